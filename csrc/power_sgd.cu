// PowerSGD's passes over matrices: M·S, orthonormal columns, Mᵀ·P, and P·Qᵀ in and out of a gradient.
//
// `table` says where each piece of a gradient lies (compress/backends/power_sgd.py): matrices, row by row, and elements
// that are in none. A *line* is a row of a matrix, or 256 of those elements; a *strip* 256 columns; a *tile* 64 rows of a
// strip. A warp takes one at a time. Where the columns of a factor have to be known as a whole, a block of threads takes
// a matrix, in float64.
#include "philox.cuh"

constexpr int THREADS = 256, TILE_ROWS = 64;
constexpr double LEAST = 0x1p-13;  // a column of which so little is left is none

// A row of the table. Without columns `left` says where the elements themselves are, and `rows` how many.
struct Piece {
    i64 start, rows, columns, left, right, line, strip, tile;
};

// The last piece that does not begin behind a line, strip or tile; those of no length never are.
template <class F>
__device__ inline const Piece& piece_at(const i64* table, int pieces, F begin, i64 number) {
    const Piece* all = (const Piece*)table;
    int low = 0, high = pieces - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (begin(all[middle]) <= number) low = middle;
        else high = middle - 1;
    }
    return all[low];
}

// This warp's share of so many: f(number).
template <class F>
__device__ inline void each(i64 count, F f) {
    each_block(count, 1, f);
}

template <class F>
__device__ inline void each_line(const i64* table, int pieces, F f) {
    const i64 lines = ((const Piece*)table)[pieces].line;
    each(lines, [&](i64 number) {
        const Piece& piece = piece_at(table, pieces, [](const Piece& p) { return p.line; }, number);
        f(piece, number - piece.line);
    });
}

__device__ inline int lane_start() {
    return threadIdx.x % WARP * SLOTS;
}

// The elements of a piece without columns that are in a line: f(index in the piece).
template <class F>
__device__ inline void each_single(const Piece& piece, i64 line, F f) {
    const i64 end = min(piece.rows, (line + 1) * ROW);
    for (i64 i = line * ROW + threadIdx.x % WARP; i < end; i += WARP) f(i);
}

// Eight numbers of P·Qᵀ, of the row and the columns from `j` on.
__device__ inline void product(const Piece& piece, int rank, const float* left, const float* right, i64 row, i64 j,
                               float (&v)[SLOTS]) {
    const float *p = left + piece.left + row, *q = right + piece.right;
    for (int k = 0; k < rank; ++k) {
        const float *column = q + k * piece.columns, share = p[k * piece.rows];
        float s[SLOTS];
        load8(column, is_aligned(column), j, piece.columns, s);
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) v[i] = k == 0 ? s[i] * share : v[i] + s[i] * share;
    }
}

// ---- across a block, in float64

__device__ inline double* shared_sums() {
    __shared__ double sums[THREADS];
    return sums;
}

// The sum of a · b by 256 partial sums, to every thread.
__device__ inline double dot(const float* a, const float* b, i64 count) {
    double *sums = shared_sums(), sum = 0.0;
    for (i64 i = threadIdx.x; i < count; i += THREADS) sum = sum + (double)a[i] * (double)b[i];
    __syncthreads();  // it may still be read from the last time, and what was written before is seen
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] = sums[threadIdx.x] + sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

__device__ inline bool all_finite(const float* p, i64 count) {
    __shared__ int odd;
    __syncthreads();
    if (threadIdx.x == 0) odd = 0;
    __syncthreads();
    bool mine = false;
    for (i64 i = threadIdx.x; i < count; i += THREADS) mine |= !is_finite(p[i]);
    if (mine) atomicOr(&odd, 1);
    __syncthreads();
    return odd == 0;
}

__device__ inline void fill(float* p, i64 count, float value) {
    for (i64 i = threadIdx.x; i < count; i += THREADS) p[i] = value;
}

template <class F>
__device__ inline void each_matrix(const i64* table, int pieces, F f) {
    const Piece* all = (const Piece*)table;
    for (int i = blockIdx.x; i < pieces; i += gridDim.x)
        if (all[i].columns != 0) f(all[i]);
}

extern "C" {

// S, as Q lies. Ranks draw it alike: the upper half of the stream, which tells them apart, counts as zero.
__global__ void power_sgd_draw(float* start, const i64* state, i64 count) {
    Rounding rounding(state);
    rounding.stream1 = 0;
    each_block(count, ROW, [&](i64 block) {
        const i64 begin = block * ROW + lane_start();
        float v[SLOTS];
        rounding(begin, v);
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) v[i] = v[i] * 2.0f + (0x1p-16f - 1.0f);
        store8(start, is_aligned(start), begin, count, v);
    });
}

__global__ void power_sgd_take(const i64* table, int pieces, const float* x, float* whole) {
    each_line(table, pieces, [&](const Piece& piece, i64 line) {
        if (piece.columns != 0) return;
        each_single(piece, line, [&](i64 i) { whole[piece.left + i] = canonical(x[piece.start + i]); });
    });
}

// out = M·S.
__global__ void power_sgd_left(const i64* table, int pieces, int rank, const float* x, const float* start, float* out) {
    each_line(table, pieces, [&](const Piece& piece, i64 line) {
        const float* row = x + piece.start + line * piece.columns;
        const bool aligned = is_aligned(row);
        for (int k = 0; k < (piece.columns != 0 ? rank : 0); ++k) {
            const float* column = start + piece.right + k * piece.columns;
            const bool column_aligned = is_aligned(column);
            float sums[SLOTS] = {};
            for (i64 j = lane_start(); j < (piece.columns + ROW - 1) / ROW * ROW; j += ROW) {
                float m[SLOTS], s[SLOTS];
                load8(row, aligned, j, piece.columns, m);
                load8(column, column_aligned, j, piece.columns, s);
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) sums[i] = sums[i] + m[i] * s[i];
            }
            const float sum = fold(sums);
            if (threadIdx.x % WARP == 0) out[piece.left + k * piece.rows + line] = sum;
        }
    });
}

__global__ void power_sgd_orthonormalise(const i64* table, int pieces, int rank, float* left) {
    each_matrix(table, pieces, [&](const Piece& piece) {
        float* p = left + piece.left;
        const i64 rows = piece.rows;
        if (!all_finite(p, rank * rows)) {
            fill(p, rank * rows, __int_as_float(NOT_A_NUMBER));
            return;
        }
        for (int k = 0; k < rank; ++k) {
            float* column = p + k * rows;
            const double before = sqrt(dot(column, column, rows));
            for (const float* other = p; other < column; other += rows) {
                const double share = dot(other, column, rows);
                for (i64 i = threadIdx.x; i < rows; i += THREADS)
                    column[i] = (float)((double)column[i] - share * (double)other[i]);
            }
            const double after = sqrt(dot(column, column, rows));
            const bool stays = after > before * LEAST;
            for (i64 i = threadIdx.x; i < rows; i += THREADS)
                column[i] = stays ? (float)((double)column[i] / after) : 0.0f;
        }
    });
}

// What each tile adds to Mᵀ·P: parts[tile][k][column of the strip].
__global__ void power_sgd_tiles(const i64* table, int pieces, int rank, const float* x, const float* left,
                               float* parts) {
    each(((const Piece*)table)[pieces].tile, [&](i64 number) {
        const Piece& piece = piece_at(table, pieces, [](const Piece& p) { return p.tile; }, number);
        const i64 tiles = (piece.rows + TILE_ROWS - 1) / TILE_ROWS, strip = (number - piece.tile) / tiles;
        const i64 top = (number - piece.tile) % tiles * TILE_ROWS, bottom = min(top + TILE_ROWS, piece.rows);
        const i64 j = strip * ROW + lane_start();
        for (int k = 0; k < rank; ++k) {
            const float* p = left + piece.left + k * piece.rows;
            float part[SLOTS] = {};
            for (i64 i = top; i < bottom; ++i) {
                const float* row = x + piece.start + i * piece.columns;
                float m[SLOTS];
                load8(row, is_aligned(row), j, piece.columns, m);
#pragma unroll
                for (int s = 0; s < SLOTS; ++s) part[s] = part[s] + m[s] * p[i];
            }
            float* target = parts + (number * rank + k) * ROW;
            store8(target, true, lane_start(), ROW, part);
        }
    });
}

// out = Mᵀ·P: of each strip, its tiles from the top on.
__global__ void power_sgd_right(const i64* table, int pieces, int rank, const float* parts, float* out) {
    each(((const Piece*)table)[pieces].strip * rank, [&](i64 number) {
        const i64 k = number % rank;
        const Piece& piece = piece_at(table, pieces, [](const Piece& p) { return p.strip; }, number / rank);
        const i64 strip = number / rank - piece.strip, tiles = (piece.rows + TILE_ROWS - 1) / TILE_ROWS;
        float total[SLOTS] = {};
        for (i64 t = 0; t < tiles; ++t) {
            float part[SLOTS];
            load8(parts + ((piece.tile + strip * tiles + t) * rank + k) * ROW, true, lane_start(), ROW, part);
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) total[s] = total[s] + part[s];
        }
        float* column = out + piece.right + k * piece.columns;
        store8(column, is_aligned(column), strip * ROW + lane_start(), piece.columns, total);
    });
}

__global__ void power_sgd_settle(const i64* table, int pieces, int rank, float* left, float* right) {
    each_matrix(table, pieces, [&](const Piece& piece) {
        float* q = right + piece.right;
        if (all_finite(q, rank * piece.columns)) return;
        fill(left + piece.left, rank * piece.rows, __int_as_float(NOT_A_NUMBER));
        fill(q, rank * piece.columns, __int_as_float(NOT_A_NUMBER));
    });
}

// start = Q, each column of length 1, where it has one.
__global__ void power_sgd_follow(const i64* table, int pieces, int rank, const float* right, float* start) {
    each_matrix(table, pieces, [&](const Piece& piece) {
        for (int k = 0; k < rank; ++k) {
            const i64 at = piece.right + k * piece.columns;
            const double length = sqrt(dot(right + at, right + at, piece.columns));
            if (!(length > 0.0) || !(length - length == 0.0)) continue;
            for (i64 i = threadIdx.x; i < piece.columns; i += THREADS)
                start[at + i] = (float)((double)right[at + i] / length);
        }
    });
}

// status[1] counts matrices, and elements that are in none, that are not finite.
__global__ void power_sgd_odd(const i64* table, int pieces, int rank, const float* whole, const float* left,
                             const float* right, i64* status) {
    each_matrix(table, pieces, [&](const Piece& piece) {
        const bool sound = all_finite(left + piece.left, rank * piece.rows);
        const bool both = all_finite(right + piece.right, rank * piece.columns) && sound;
        if (threadIdx.x == 0 && !both) atomicAdd((u64*)status + 1, 1ull);
    });
    int odd = 0;
    each_line(table, pieces, [&](const Piece& piece, i64 line) {
        if (piece.columns == 0) each_single(piece, line, [&](i64 i) { odd += !is_finite(whole[piece.left + i]); });
    });
    report(status, 0, odd);
}

// out = (fresh ? 0 : out) + alpha times what the numbers stand for.
__global__ void power_sgd_add(const i64* table, int pieces, int rank, const float* whole, const float* left,
                             const float* right, float* out, float alpha, int fresh) {
    each_line(table, pieces, [&](const Piece& piece, i64 line) {
        if (piece.columns == 0) {
            each_single(piece, line, [&](i64 i) {
                const float before = fresh ? 0.0f : out[piece.start + i];
                out[piece.start + i] = before + whole[piece.left + i] * alpha;
            });
            return;
        }
        float* row = out + piece.start + line * piece.columns;
        const bool aligned = is_aligned(row);
        for (i64 j = lane_start(); j < piece.columns; j += ROW) {
            float v[SLOTS], sum[SLOTS] = {};
            product(piece, rank, left, right, line, j, v);
            if (!fresh) load8(row, aligned, j, piece.columns, sum);
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) sum[i] = sum[i] + v[i] * alpha;
            store8(row, aligned, j, piece.columns, sum);
        }
    });
}

// residual = total less what is sent of it, P·Qᵀ or the element itself, where that is finite.
__global__ void power_sgd_leave(const i64* table, int pieces, int rank, const float* left, const float* right,
                               const float* total, float* residual) {
    each_line(table, pieces, [&](const Piece& piece, i64 line) {
        if (piece.columns == 0) {
            each_single(piece, line, [&](i64 i) {
                const float sent = total[piece.start + i];
                if (is_finite(sent)) residual[piece.start + i] = sent - (sent + 0.0f);
            });
            return;
        }
        const float* row = total + piece.start + line * piece.columns;
        float* rest = residual + piece.start + line * piece.columns;
        const bool aligned = is_aligned(row), rest_aligned = is_aligned(rest);
        for (i64 j = lane_start(); j < piece.columns; j += ROW) {
            float v[SLOTS], m[SLOTS], old[SLOTS];
            product(piece, rank, left, right, line, j, v);
            load8(row, aligned, j, piece.columns, m);
            load8(rest, rest_aligned, j, piece.columns, old);
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) {
                const float left_over = m[i] - (v[i] + 0.0f);
                old[i] = is_finite(left_over) ? left_over : old[i];
            }
            store8(rest, rest_aligned, j, piece.columns, old);
        }
    });
}
}

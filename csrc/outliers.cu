// What Outliers does besides its two codecs: entries are taken out of a gradient, and put where the inner code says
// something else: of one rank, or in the mean of all. For a mean, all ranks' inner code is decoded first, at the speed
// of its own kernel; `mean` then adds up anew what lies at the entries, tile by tile in shared memory.
#include "checked.cuh"

constexpr int THREADS = 256, TILE = THREADS * SLOTS;
constexpr int ONE_BIT = 0, LEVELS = 1;  // inner codes; of others a byte has five trits

// The inner code of all ranks, element by element, for the few that are asked for.
struct Inner {
    const u8* wires;
    i64 pitch;
    int kind, block, bits, record;  // bytes of a record

    __device__ float at(int rank, i64 element) const {
        const u8* const found = wires + rank * pitch + element / block * record;
        const int i = (int)(element % block);
        const float level = ((const float*)found)[0];
        if (kind == ONE_BIT) return found[8 + i / 8] >> i % 8 & 1 ? level : ((const float*)found)[1];
        if (kind == LEVELS) {
            const int first = i * bits, shift = first % 8, sign = 1 << (bits - 1);
            const u8* const byte = found + 4 + first / 8;
            const int both = shift + bits > 8 ? byte[0] | byte[1] << 8 : byte[0], code = both >> shift;
            const int magnitude = code & (sign - 1);
            return (float)(code & sign ? -magnitude : magnitude) * level;
        }
        const int chunk = i / (5 * ROW), row = i / ROW % 5;
        u32 trits = found[4 + chunk * ROW + i % ROW];
        if (trits >= 243) trits = 0;
        for (int lower = 0; lower < row; ++lower) trits /= 3;
        return (trits % 3 == 2 ? -1.0f : (float)(trits % 3)) * level;
    }
};

// target[index] = -x[index], or zero where x is null, for the entries whose value is finite.
template <class T>
__device__ void take_out(const u32* row, const float* values, const T* x, float* target) {
    const i64 count = row[0];
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        const i64 index = row[1 + i];
        if (is_finite(values[i])) target[index] = x == nullptr ? 0.0f : 0.0f - to_float(x[index]);
    }
}

// What the threads of a block share of a tile.
struct Tile {
    float sums[TILE], sent[TILE];
    u32 touched[TILE / WARP], sender[TILE], warps[WARP];
    u16 list[TILE];
};

// Whatever the kernel, it is the same shared memory.
__device__ inline Tile& shared_tile() {
    __shared__ Tile tile;
    return tile;
}

// f(where in the tile, value) for a rank's entries from start[0] up to start[1].
template <class F>
__device__ inline void each_entry(const Entries& entries, const u32* start, i64 first, F f) {
    for (i64 i = start[0] + threadIdx.x; i < start[1]; i += THREADS) {
        i64 index;
        if (entries.at(i, index)) f((int)(index - first), entries.values[i]);
    }
}

// `starts`: where each tile's entries begin, as topk_check has found.
template <class T>
__device__ void mean(T* out, i64 numel, float scale, const Inner& inner, const u8* rows, i64 pitch, const float* values,
                     int ranks, int k, const u32* broken, const u32* starts, const int* reach, i64* status) {
    Tile& shared = shared_tile();
    const i64 tiles = (numel + TILE - 1) / TILE;
    int not_finite = 0;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const i64 first = tile * TILE;
        const auto entries_of = [&](int rank) {
            return Entries(rows, pitch, (const u8*)values, 4 * (i64)k, rank, k, broken, reach);
        };
        const auto start_of = [&](int rank) { return starts + rank * (tiles + 1) + tile; };
        if (threadIdx.x < TILE / WARP) shared.touched[threadIdx.x] = 0;
        __syncthreads();
        for (int rank = 0; rank < ranks; ++rank)
            each_entry(entries_of(rank), start_of(rank), first, [&](int at, float v) {
                atomicOr(shared.touched + at / WARP, 1u << at % WARP);
                not_finite += !is_finite(v);
            });
        __syncthreads();
        u32 mine = shared.touched[threadIdx.x * SLOTS / WARP] >> threadIdx.x * SLOTS % WARP & 0xFF, count;
        for (u32 slot = scan((u32)__popc(mine), count, shared.warps); mine != 0; mine &= mine - 1, ++slot) {
            const int at = threadIdx.x * SLOTS + __ffs(mine) - 1;
            shared.list[slot] = (u16)at, shared.sums[at] = 0.0f, shared.sender[at] = 0;
        }
        for (int rank = 0; rank < ranks; ++rank) {
            __syncthreads();
            each_entry(entries_of(rank), start_of(rank), first, [&](int at, float v) {
                shared.sent[at] = v, shared.sender[at] = rank + 1;
            });
            __syncthreads();
            for (u32 i = threadIdx.x; i < count; i += THREADS) {
                const int at = shared.list[i];
                const bool is_sent = shared.sender[at] == (u32)rank + 1;
                shared.sums[at] = shared.sums[at] + (is_sent ? shared.sent[at] : inner.at(rank, first + at));
            }
        }
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            const int at = shared.list[i];
            from_float(shared.sums[at] * scale, out[first + at]);
        }
        __syncthreads();
    }
    report(status, 0, not_finite);
}

extern "C" {

__global__ void outliers_take_f32(const u32* row, const float* values, const float* x, float* target) {
    take_out(row, values, x, target);
}

__global__ void outliers_take_f16(const u32* row, const float* values, const Half* x, float* target) {
    take_out(row, values, x, target);
}

__global__ void outliers_take_bf16(const u32* row, const float* values, const Bfloat* x, float* target) {
    take_out(row, values, x, target);
}

// values[i] = out[index] + alpha · values[i], for the entries of `rank` that count.
__global__ void outliers_add_to_values(const float* out, float alpha, const u8* rows, i64 pitch, float* values,
                                       int rank, int k, const u32* broken, const int* reach, i64* status) {
    const Entries entries(rows, pitch, (const u8*)values, 0, rank, k, broken, reach);
    int not_finite = 0;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < entries.count(k); i += (i64)gridDim.x * blockDim.x) {
        i64 index;
        if (!entries.at(i, index)) continue;
        not_finite += !is_finite(values[i]);
        values[i] = out[index] + alpha * values[i];
    }
    report(status, 0, not_finite);
}

// out[index] = values[i].
__global__ void outliers_put(float* out, const u8* rows, i64 pitch, const float* values, int rank, int k,
                             const u32* broken, const int* reach) {
    const Entries entries(rows, pitch, (const u8*)values, 0, rank, k, broken, reach);
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < entries.count(k); i += (i64)gridDim.x * blockDim.x) {
        i64 index;
        if (entries.at(i, index)) out[index] = values[i];
    }
}

// Over the decoded mean of the inner code, that of everything at the entries.
__global__ void
outliers_mean_f32(float* out, i64 numel, float scale, const u8* wires, i64 wire_pitch, int kind, int block, int bits,
                  int record, const u8* rows, i64 pitch, const float* values, int ranks, int k, const u32* broken,
                  const u32* starts, const int* reach, i64* status) {
    const Inner inner{wires, wire_pitch, kind, block, bits, record};
    mean(out, numel, scale, inner, rows, pitch, values, ranks, k, broken, starts, reach, status);
}

__global__ void
outliers_mean_f16(Half* out, i64 numel, float scale, const u8* wires, i64 wire_pitch, int kind, int block, int bits,
                  int record, const u8* rows, i64 pitch, const float* values, int ranks, int k, const u32* broken,
                  const u32* starts, const int* reach, i64* status) {
    const Inner inner{wires, wire_pitch, kind, block, bits, record};
    mean(out, numel, scale, inner, rows, pitch, values, ranks, k, broken, starts, reach, status);
}

__global__ void
outliers_mean_bf16(Bfloat* out, i64 numel, float scale, const u8* wires, i64 wire_pitch, int kind, int block, int bits,
                   int record, const u8* rows, i64 pitch, const float* values, int ranks, int k, const u32* broken,
                   const u32* starts, const int* reach, i64* status) {
    const Inner inner{wires, wire_pitch, kind, block, bits, record};
    mean(out, numel, scale, inner, rows, pitch, values, ranks, k, broken, starts, reach, status);
}
}

// OneBit: record = negative, positive (float32), then a sign bit for each element.
#include "common.cuh"

// Decoding waits for memory: a lane reads the records of so many ranks before it adds any, and registers are kept so few
// that a multiprocessor holds so many blocks. Of all pairs that were tried on an H100 these took least.
[[maybe_unused]] constexpr int THREADS = 256, AT_ONCE = 8, RESIDENT = 3;

template <int ROWS, class T>
__device__ void onebit_encode_block(const T* x, float* residual, u8* wire, i64 numel, int block, int sided, i64 b) {
    const Block<ROWS, T> a(x, residual, b * block, numel, block);
    float minus[SLOTS] = {}, plus[SLOTS] = {};
    int below = 0;
    a.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const bool negative = v[j] < 0.0f;
            below += negative;
            if (sided) {
                minus[j] = minus[j] + (negative ? v[j] : 0.0f);
                plus[j] = plus[j] + (negative ? 0.0f : v[j]);
            } else {
                plus[j] = plus[j] + fabsf(v[j]);
            }
        }
    });
    const int lane = threadIdx.x % WARP, n = (int)(a.end - b * block);
    float negative, positive = fold(plus);
    if (sided) {
        below = warp_sum(below);
        negative = fold(minus) / (float)max(below, 1) + 0.0f;  // + 0 turns -0 into 0
        positive = positive / (float)max(n - below, 1) + 0.0f;
    } else {
        positive = positive / (float)n + 0.0f;
        negative = (0.0f - positive) + 0.0f;
    }
    const bool sound = is_finite(negative) && is_finite(positive);  // then every element is finite
    u8* const record = wire + b * (8 + block / 8);
    if (lane < 2) ((float*)record)[lane] = !sound ? __int_as_float(NOT_A_NUMBER) : lane == 0 ? negative : positive;
    a.each_row([&](int row, const float(&v)[SLOTS]) {
        u32 signs = 0;
        float rest[SLOTS];
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const bool minus_sign = v[j] < 0.0f;
            signs |= (u32)minus_sign << j;
            rest[j] = v[j] - (minus_sign ? negative : positive);
        }
        record[8 + row * WARP + lane] = sound ? (u8)signs : 0;
        if (residual != nullptr && sound) store8(residual, a.residual_aligned, a.at(row), a.end, rest);
    });
}

template <class T>
__device__ void onebit_encode(const T* x, float* residual, u8* wire, i64 numel, int block, int sided) {
    each_block(numel, block, [&](i64 b) {
        if (block == 4 * ROW)
            onebit_encode_block<4>(x, residual, wire, numel, block, sided, b);
        else
            onebit_encode_block<0>(x, residual, wire, numel, block, sided, b);
    });
}

// Rows first … first + ROWS - 1 of a block that begins at `start`; `record` is rank 0's. Of four rows a lane reads a word
// of signs, and has its own eight from the lanes that they lie with.
template <int ROWS, class T>
__device__ void onebit_add_rows(const Target<T>& target, const u8* record, i64 pitch, int ranks, i64 start, int first,
                                int& not_finite) {
    const int lane = threadIdx.x % WARP;
    const i64 at = start + first * ROW + lane * SLOTS;
    float sums[ROWS][SLOTS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) target.begin(at + row * ROW, sums[row]);
    for (int rank = 0; rank < ranks; rank += AT_ONCE, record += AT_ONCE * pitch) {
        u32 signs[AT_ONCE];
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            const u8* const bytes = record + r * pitch + 8 + first * WARP;
            signs[r] = rank + r >= ranks ? 0 : ROWS == 4 ? ((const u32*)bytes)[lane] : bytes[lane];
        }
        float negative = 0.0f, positive = 0.0f;  // of rank + lane
        if (lane < AT_ONCE && rank + lane < ranks) {
            const float* const levels = (const float*)(record + lane * pitch);
            not_finite += first == 0 && !(is_finite(levels[0]) && is_finite(levels[1]));
            negative = target.alpha * levels[0], positive = target.alpha * levels[1];
        }
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            if (rank + r >= ranks) break;
            const float minus = __shfl_sync(EVERYONE, negative, r), plus = __shfl_sync(EVERYONE, positive, r);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                u32 mine = signs[r];
                if (ROWS == 4) mine = __shfl_sync(EVERYONE, mine, row * (WARP / 4) + lane / 4) >> 8 * (lane % 4);
#pragma unroll
                for (int j = 0; j < SLOTS; ++j) sums[row][j] = sums[row][j] + (mine >> j & 1 ? minus : plus);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) target.end(at + row * ROW, sums[row]);
}

template <class T>
__device__ void onebit_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, int block, i64* status) {
    int not_finite = 0;
    each_block(target.numel, block, [&](i64 b) {
        const u8* const records = wires + b * (8 + block / 8);
        int row = 0;
        for (; row + 4 <= block / ROW; row += 4)
            onebit_add_rows<4>(target, records, pitch, ranks, b * block, row, not_finite);
        for (; row < block / ROW; ++row)
            onebit_add_rows<1>(target, records, pitch, ranks, b * block, row, not_finite);
    });
    report(status, 0, not_finite);
}

extern "C" {

// x: numel elements. residual: float32, updated in place, or null. wire: records of 8 + block / 8 bytes.
__global__ void onebit_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int block, int sided) {
    onebit_encode(x, residual, wire, numel, block, sided);
}

__global__ void onebit_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int block, int sided) {
    onebit_encode(x, residual, wire, numel, block, sided);
}

__global__ void onebit_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int block, int sided) {
    onebit_encode(x, residual, wire, numel, block, sided);
}

// out: numel elements. wires: one wire a rank, `pitch` bytes apart. See Target for alpha, add and scale.
__global__ void __launch_bounds__(THREADS, RESIDENT)
onebit_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch, int ranks,
                  int block, i64* status) {
    onebit_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void __launch_bounds__(THREADS, RESIDENT)
onebit_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch, int ranks,
                  int block, i64* status) {
    onebit_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void onebit_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                   i64 pitch, int ranks, int block, i64* status) {
    onebit_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}
}

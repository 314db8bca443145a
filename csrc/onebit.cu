// OneBit: record = negative, positive (float32), then a sign bit for each element.
#include "common.cuh"

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

template <int ROWS, class T>
__device__ void onebit_add_rows(const Target<T>& target, const u8* record, i64 pitch, int ranks, i64 start, int first) {
    const int lane = threadIdx.x % WARP;
    const i64 at = start + first * ROW + lane * SLOTS;
    float sums[ROWS][SLOTS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) target.begin(at + row * ROW, sums[row]);
#pragma unroll 2
    for (int rank = 0; rank < ranks; ++rank, record += pitch) {
        const float negative = target.alpha * ((const float*)record)[0];
        const float positive = target.alpha * ((const float*)record)[1];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const u32 signs = record[8 + (first + row) * WARP + lane];
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) sums[row][j] = sums[row][j] + (signs >> j & 1 ? negative : positive);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) target.end(at + row * ROW, sums[row]);
}

template <class T>
__device__ void onebit_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, int block, i64* status) {
    const int lane = threadIdx.x % WARP;
    int not_finite = 0;
    each_block(target.numel, block, [&](i64 b) {
        const u8* const records = wires + b * (8 + block / 8);
        for (int rank = lane; rank < ranks; rank += WARP) {
            const float* levels = (const float*)(records + rank * pitch);
            not_finite += !(is_finite(levels[0]) && is_finite(levels[1]));
        }
        // Four rows at a time where a block has them, so that a rank's levels are read once for all.
        int row = 0;
        for (; row + 4 <= block / ROW; row += 4) onebit_add_rows<4>(target, records, pitch, ranks, b * block, row);
        for (; row < block / ROW; ++row) onebit_add_rows<1>(target, records, pitch, ranks, b * block, row);
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
__global__ void onebit_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                  int ranks, int block, i64* status) {
    onebit_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void onebit_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                  int ranks, int block, i64* status) {
    onebit_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void onebit_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                   i64 pitch, int ranks, int block, i64* status) {
    onebit_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}
}

// Vectors of float32 that are kept in fewer bytes, as bfloat16 or as int8 with a step s for each 256 elements:
//
//     s = max(largest · (1/127) rounded up to 16 significant bits, 2^-126)     code = x · (1/s) to nearest     x' = code · s
//
// Reads 4 and writes 2, or 1 + 4/256, bytes an element, and the other way round. Reference: `LowPrecision` in
// compress/backends/reference/low_precision.py; compress/backends/low_precision.py says why.
#include "common.cuh"

constexpr int MOST = 0x7F7F0000, STEP_BITS = 0xFF;
constexpr float SHARE = 1.0f / 127.0f, LEAST_STEP = 0x1p-126f;
// Added to a number, it leaves the nearest whole one in the lowest bits.
constexpr float WHOLE = 0x1.8p23f;

// What is not finite as zero, and nothing beyond the largest bfloat16.
__device__ inline float sound(float v) {
    const int magnitude = magnitude_bits(v);
    if (magnitude >= INFINITE) return 0.0f;
    return __int_as_float(min(magnitude, MOST) | (__float_as_int(v) & ~MAGNITUDE));
}

union Codes {
    uint2 all;
    u8 element[SLOTS];
};

__device__ inline bool whole(const u8* codes, i64 begin, i64 numel) {
    return begin + SLOTS <= numel && ((u64)(codes + begin) & 7) == 0;
}

extern "C" {

__global__ void low_precision_to_bf16(const float* x, Bfloat* out, i64 numel) {
    const bool aligned = is_aligned(x), out_aligned = is_aligned(out);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float v[SLOTS];
        load8(x, aligned, begin, numel, v);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = sound(v[j]);
        store8(out, out_aligned, begin, numel, v);
    });
}

__global__ void low_precision_from_bf16(const Bfloat* x, float* out, i64 numel) {
    const bool aligned = is_aligned(x), out_aligned = is_aligned(out);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float v[SLOTS];
        load8(x, aligned, begin, numel, v);
        store8(out, out_aligned, begin, numel, v);
    });
}

__global__ void low_precision_to_int8(const float* x, u8* codes, float* steps, i64 numel) {
    const bool aligned = is_aligned(x);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float v[SLOTS];
        load8(x, aligned, begin, numel, v);
        int largest = 0;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            v[j] = sound(v[j]);
            largest = max(largest, magnitude_bits(v[j]));
        }
        const float share = __int_as_float(warp_max(largest)) * SHARE;
        const float up = __int_as_float((__float_as_int(share) + STEP_BITS) & ~STEP_BITS);
        const float step = up < LEAST_STEP ? LEAST_STEP : up, inverse = 1.0f / step;
        if (threadIdx.x % WARP == 0) steps[b] = step;
        Codes found;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) found.element[j] = (u8)__float_as_int(v[j] * inverse + WHOLE);
        if (whole(codes, begin, numel)) {
            __stwb((uint2*)(codes + begin), found.all);
        } else {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                if (begin + j < numel) codes[begin + j] = found.element[j];
        }
    });
}

__global__ void low_precision_from_int8(const u8* codes, const float* steps, float* out, i64 numel) {
    const bool out_aligned = is_aligned(out);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        Codes found;
        if (whole(codes, begin, numel)) {
            found.all = *(const uint2*)(codes + begin);
        } else {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) found.element[j] = begin + j < numel ? codes[begin + j] : 0;
        }
        const float step = steps[b];
        float v[SLOTS];
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = (float)(signed char)found.element[j] * step;
        store8(out, out_aligned, begin, numel, v);
    });
}
}

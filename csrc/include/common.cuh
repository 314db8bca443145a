// What the kernels share: element formats, rows of a block in and out of memory, the canonical sum.
//
// A warp works on one block (record) at a time. It holds a row of 256 elements as eight consecutive elements a lane,
// two 16-byte loads, so partial sum i mod 256 of the canonical sum (compress/codec.py) is slot i mod 8 of lane i / 8.
//
// Nothing is included: NVRTC then needs no CUDA headers. Conversions are one instruction each, spelled out below; where
// the kernels run on a CPU, for tests, they are integer arithmetic.
#pragma once

// With few registers kernels spill on Blackwell, or NVRTC 13.2 gives up ("C7600"): there they take their own number.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#undef __launch_bounds__
#define __launch_bounds__(...)
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARP = 32, SLOTS = 8, ROW = WARP * SLOTS;
constexpr u32 EVERYONE = 0xFFFFFFFFu;
constexpr int MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, NOT_A_NUMBER = 0x7FC00000;

struct Half {
    u16 bits;
};

struct Bfloat {
    u16 bits;
};

// ---- numbers

__device__ inline int magnitude_bits(float v) {
    return __float_as_int(v) & MAGNITUDE;
}

__device__ inline bool is_finite(float v) {
    return magnitude_bits(v) < INFINITE;
}

// Arithmetic makes any NaN; one is ever written.
__device__ inline float canonical(float v) {
    return magnitude_bits(v) > INFINITE ? __int_as_float(NOT_A_NUMBER) : v;
}

// 2^(exponent - 127) for exponents from 0 to 254.
__device__ inline float power(int exponent) {
    return __int_as_float(exponent > 0 ? exponent << 23 : 1 << 22);
}

// The exponent field of a block's largest magnitude, kept where both power(e) and power(254 - e) exist.
__device__ inline int scale_exponent(int largest_bits) {
    return min(max(largest_bits >> 23, 1), 254);
}

__device__ inline float to_float(float v) {
    return v;
}

__device__ inline float to_float(Half h) {
#ifndef CUDA_ON_CPU
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h.bits));
    return v;
#else
    const int bits = (h.bits & 0x7FFF) << 13, sign = (h.bits & 0x8000) << 16, exponent = bits & 0x0F800000;
    float v = __int_as_float(bits + (112 << 23));
    if (exponent == 0) v = __int_as_float(bits + (113 << 23)) - __int_as_float(113 << 23);
    if (exponent == 0x0F800000) v = __int_as_float(bits | INFINITE);
    return __int_as_float(__float_as_int(v) | sign);
#endif
}

__device__ inline float to_float(Bfloat b) {
    return __uint_as_float((u32)b.bits << 16);
}

// To nearest, ties to even.
__device__ inline void from_float(float v, float& out) {
    out = canonical(v);
}

__device__ inline void from_float(float v, Half& out) {
    const int bits = __float_as_int(v), magnitude = bits & MAGNITUDE;
    if (magnitude > INFINITE) {
        out.bits = 0x7E00;
        return;
    }
#ifndef CUDA_ON_CPU
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(v));
#else
    int half = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    if (magnitude < (113 << 23)) half = __float_as_int(__int_as_float(magnitude) + 0.5f) - 0x3F000000;
    if (magnitude >= (143 << 23)) half = 0x7C00;
    out.bits = (u16)(half | ((bits >> 16) & 0x8000));
#endif
}

__device__ inline void from_float(float v, Bfloat& out) {
    const u32 bits = __float_as_uint(v);
    out.bits = magnitude_bits(v) > INFINITE ? 0x7FC0 : (u16)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// ---- eight consecutive elements

// Sixteen bytes.
template <class T>
union Vector {
    uint4 whole;
    T element[16 / sizeof(T)];
};

// Whether 16 bytes at a time will do; a row always begins at a multiple of them from there.
__device__ inline bool is_aligned(const void* p) {
    return ((u64)p & 15) == 0;
}

// Elements begin … begin + 7 as float32; what lies at `end` or beyond is zero.
template <class T>
__device__ inline void load8(const T* p, bool aligned, i64 begin, i64 end, float (&v)[SLOTS]) {
    if (aligned && begin + SLOTS <= end) {
        constexpr int width = 16 / sizeof(T);
        Vector<T> vectors[SLOTS / width];
#pragma unroll
        for (int j = 0; j < SLOTS / width; ++j) vectors[j].whole = ((const uint4*)(p + begin))[j];
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = to_float(vectors[j / width].element[j % width]);
    } else {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = begin + j < end ? to_float(p[begin + j]) : 0.0f;
    }
}

// An assignment would do, but the compiler may take it apart, to share stores with the end's one by one.
template <class T>
__device__ inline void store8(T* p, bool aligned, i64 begin, i64 end, const float (&v)[SLOTS]) {
    if (aligned && begin + SLOTS <= end) {
        constexpr int width = 16 / sizeof(T);
        Vector<T> vectors[SLOTS / width];
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) from_float(v[j], vectors[j / width].element[j % width]);
#pragma unroll
        for (int j = 0; j < SLOTS / width; ++j) __stwb((uint4*)(p + begin) + j, vectors[j].whole);
    } else {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j)
            if (begin + j < end) from_float(v[j], p[begin + j]);
    }
}

// One element of what is stored as float32 (0), float16 (1) or bfloat16 (2): for the few that lie here and there.
__device__ inline void store_one(void* out, int stored, i64 at, float v) {
    if (stored == 0) from_float(v, ((float*)out)[at]);
    if (stored == 1) from_float(v, ((Half*)out)[at]);
    if (stored == 2) from_float(v, ((Bfloat*)out)[at]);
}

// Zeros, by all threads of a launch, 16 bytes at a time where that is possible.
__device__ inline void clear(void* out, int stored, i64 numel) {
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    const int shift = stored == 0 ? 2 : 3;
    const i64 wide = is_aligned(out) ? numel >> shift : 0;
    for (i64 i = thread; i < wide; i += threads) ((Vector<float>*)out)[i] = Vector<float>{};
    for (i64 i = (wide << shift) + thread; i < numel; i += threads) store_one(out, stored, i, 0.0f);
}

// ---- a block

// A lane's share of one block of a = x, or x + residual unless that is null. With ROWS > 0 the block has that many rows
// and stays in registers; with ROWS = 0 it has any number, and each pass over it reads memory again. LANES threads, a
// warp or a whole block of threads, share it, so that many times eight elements a row.
template <int ROWS, class T, int LANES = WARP>
struct Block {
    const T* x;
    const float* residual;
    bool x_aligned, residual_aligned;
    i64 begin, end;  // of this lane's first row; of the block's elements
    int rows;
    float kept[ROWS > 0 ? ROWS : 1][SLOTS];

    __device__ Block(const T* x, const float* residual, i64 start, i64 numel, int block)
        : x(x), residual(residual), x_aligned(is_aligned(x)), residual_aligned(is_aligned(residual)),
          begin(start + (threadIdx.x % LANES) * SLOTS), end(min(start + block, numel)),
          rows(ROWS > 0 ? ROWS : (block + LANES * SLOTS - 1) / (LANES * SLOTS)) {
        if constexpr (ROWS > 0) {
            // Every load before the first use: they wait for memory together.
#pragma unroll
            for (int row = 0; row < ROWS; ++row) load8(x, x_aligned, at(row), end, kept[row]);
            if (residual != nullptr) {
                float old[ROWS][SLOTS];
#pragma unroll
                for (int row = 0; row < ROWS; ++row) load8(residual, residual_aligned, at(row), end, old[row]);
#pragma unroll
                for (int row = 0; row < ROWS; ++row)
#pragma unroll
                    for (int j = 0; j < SLOTS; ++j) kept[row][j] = kept[row][j] + old[row][j];
            }
        }
    }

    __device__ i64 at(int row) const {
        return begin + row * (LANES * SLOTS);
    }

    // f(row, the eight elements) for every row.
    template <class F>
    __device__ void each_row(F f) const {
        if constexpr (ROWS > 0) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) f(row, kept[row]);
        } else {
            for (int row = 0; row < rows; ++row) {
                float v[SLOTS];
                load8(x, x_aligned, at(row), end, v);
                if (residual != nullptr) {
                    float old[SLOTS];
                    load8(residual, residual_aligned, at(row), end, old);
#pragma unroll
                    for (int j = 0; j < SLOTS; ++j) v[j] = v[j] + old[j];
                }
                f(row, v);
            }
        }
    }
};

// ---- across a warp

__device__ inline int warp_sum(int v) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) v += __shfl_xor_sync(EVERYONE, v, other);
    return v;
}

__device__ inline int warp_max(int v) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) v = max(v, __shfl_xor_sync(EVERYONE, v, other));
    return v;
}

// Half of the values stay, the other half go to the lane that keeps them, and come back as a sum.
template <int COUNT>
__device__ inline void exchange_halves(float (&s)[SLOTS], int other) {
    const bool upper = threadIdx.x & other;
#pragma unroll
    for (int j = 0; j < COUNT / 2; ++j) {
        const float mine = upper ? s[j + COUNT / 2] : s[j], theirs = upper ? s[j] : s[j + COUNT / 2];
        s[j] = mine + __shfl_xor_sync(EVERYONE, theirs, other);
    }
}

// The canonical fold of 256 partial sums, halves of 128, 64 … 1, on every lane: 12 exchanges, since lanes share the
// work on the slots. (A fold adds two numbers, and which of them comes first changes nothing.)
__device__ inline float fold(float (&s)[SLOTS]) {
    exchange_halves<8>(s, 16);
    exchange_halves<4>(s, 8);
    exchange_halves<2>(s, 4);
    float v = s[0];
    v = v + __shfl_xor_sync(EVERYONE, v, 2);
    v = v + __shfl_xor_sync(EVERYONE, v, 1);
    // The lane's bits 16, 8 and 4 now say which slot it holds.
    v = v + __shfl_xor_sync(EVERYONE, v, 16);
    v = v + __shfl_xor_sync(EVERYONE, v, 8);
    return v + __shfl_xor_sync(EVERYONE, v, 4);
}

// The block's largest magnitude as an integer, so that NaN is the largest of all.
template <class B>
__device__ inline int largest_bits(const B& block) {
    int largest = 0;
    block.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) largest = max(largest, magnitude_bits(v[j]));
    });
    return warp_max(largest);
}

// The canonical sum of (p · a)².
template <class B>
__device__ inline float sum_of_squares(const B& block, float p) {
    float sums[SLOTS] = {};
    block.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const float scaled = v[j] * p;
            sums[j] = sums[j] + scaled * scaled;
        }
    });
    return fold(sums);
}

// ---- across a block

// The sum over the block of what threads before this one have, and the sum over all in `total`.
template <class V>
__device__ inline V scan(V v, V& total, V (&warps)[WARP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, count = (blockDim.x + WARP - 1) / WARP;
    V sum = v;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const V below = __shfl_up_sync(EVERYONE, sum, distance);
        if (lane >= distance) sum += below;
    }
    __syncthreads();  // `warps` may still be read from the last time
    if (lane == WARP - 1) warps[warp] = sum;
    __syncthreads();
    V before = 0;
    total = 0;
    for (int w = 0; w < count; ++w) {
        if (w < warp) before += warps[w];
        total += warps[w];
    }
    return before + sum - v;
}

// ---- what was found, and who does what

// Add what the lanes counted to status[0], codes skipped, and status[1], records that are not finite.
__device__ inline void report(i64* status, int skipped, int not_finite) {
    skipped = warp_sum(skipped), not_finite = warp_sum(not_finite);
    const int lane = threadIdx.x % WARP, found = lane == 0 ? skipped : not_finite;
    if (lane < 2 && found != 0) atomicAdd((u64*)status + lane, (u64)found);
}

// A launch over single elements: this thread's first, and how many threads there are.
__device__ inline i64 first_thread() {
    return (i64)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ inline i64 all_threads() {
    return (i64)gridDim.x * blockDim.x;
}

// This warp's blocks, one after the other: f(index of the block).
template <class F>
__device__ inline void each_block(i64 numel, int block, F f) {
    const i64 blocks = (numel + block - 1) / block, warps = (i64)gridDim.x * (blockDim.x / WARP);
    for (i64 b = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP; b < blocks; b += warps) f(b);
}

// ---- decoding

// The mean or the sum that decoding writes: out = (add ? out : 0) + alpha · decoded, wire by wire, times scale.
template <class T>
struct Target {
    T* out;
    i64 numel;
    float alpha;
    int add;
    float scale;

    __device__ void begin(i64 at, float (&sums)[SLOTS]) const {
        if (add) {
            load8(out, is_aligned(out), at, numel, sums);
        } else {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) sums[j] = 0.0f;
        }
    }

    __device__ void end(i64 at, float (&sums)[SLOTS]) const {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) sums[j] = sums[j] * scale;
        store8(out, is_aligned(out), at, numel, sums);
    }

    // f(sums) adds what every wire says to the eight elements from `at` on.
    template <class F>
    __device__ void accumulate(i64 at, F f) const {
        if (at >= numel) return;
        float sums[SLOTS];
        begin(at, sums);
        f(sums);
        end(at, sums);
    }
};

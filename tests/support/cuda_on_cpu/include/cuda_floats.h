// float32 intrinsics. Compiled with -ffp-contract=off, so that a * b + c rounds twice.
#pragma once
#include "cuda_language.h"

static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

static inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static inline float __int_as_float(int x) { return same_bits<float>(x); }

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float a) { return a > 0.f ? (a < 1.f ? a : 1.f) : 0.f; }

// Exact here, approximate on a GPU. glibc declares functions of the last four names already, hence macros.
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
#define __expf(a) expf(a)
#define __logf(a) logf(a)
#define __log2f(a) log2f(a)
#define __powf(a, b) powf(a, b)

// CUDA saturates and turns NaN into 0, where (int)x is undefined in C++.
template <class I>
UNCHECKED static inline I emulator_to_integer(double x) {
    constexpr bool is_signed = std::is_signed<I>::value;
    constexpr I largest = is_signed ? (I)(((uint64_t)1 << (sizeof(I) * 8 - 1)) - 1) : (I) ~(I)0;
    constexpr I smallest = is_signed ? (I)(-largest - 1) : 0;
    if (x != x) return 0;
    if (x <= (double)smallest) return smallest;
    if (x >= ldexp(1.0, sizeof(I) * 8 - is_signed)) return largest;
    return (I)x;
}

#define TO_INTEGER(I, NAME)                                                                      \
    static inline I __float2##NAME##_rn(float x) { return emulator_to_integer<I>(rintf(x)); }  \
    static inline I __float2##NAME##_rz(float x) { return emulator_to_integer<I>(truncf(x)); } \
    static inline I __float2##NAME##_rd(float x) { return emulator_to_integer<I>(floorf(x)); } \
    static inline I __float2##NAME##_ru(float x) { return emulator_to_integer<I>(ceilf(x)); }
TO_INTEGER(int, int)
TO_INTEGER(unsigned, uint)
TO_INTEGER(long long, ll)
#undef TO_INTEGER

static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __ll2float_rn(long long x) { return (float)x; }

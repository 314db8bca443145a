// float16 and bfloat16: storage, conversions that round to nearest even, and arithmetic that rounds after each step.
#pragma once
#include "cuda_floats.h"

constexpr unsigned short CANONICAL_NAN_16 = 0x7fff;  // what CUDA's conversions make of any NaN

static inline unsigned short emulator_to_half(float f) {
    const unsigned bits = same_bits<unsigned>(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return CANONICAL_NAN_16;
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // 65520 and more
    if (magnitude < 0x33000001u) return (unsigned short)sign;               // 2^-25 and less
    const unsigned exponent = magnitude >> 23, mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const bool subnormal = exponent < 113;
    const unsigned shift = subnormal ? 126 - exponent : 13;
    const unsigned kept = (subnormal ? 0 : (exponent - 113) << 10) + (mantissa >> shift);
    const unsigned lost = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (unsigned short)(sign | (kept + (lost > half || (lost == half && (kept & 1)))));
}

static inline float emulator_from_half(unsigned short bits) {
    const unsigned sign = (unsigned)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) return same_bits<float>(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return same_bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    if (!mantissa) return same_bits<float>(sign);
    const unsigned shift = (unsigned)__builtin_clz(mantissa) - 21;
    return same_bits<float>(sign | (113 - shift) << 23 | (mantissa << shift & 1023) << 13);
}

static inline unsigned short emulator_to_bfloat(float f) {
    const unsigned bits = same_bits<unsigned>(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return CANONICAL_NAN_16;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

static inline float emulator_from_bfloat(unsigned short bits) { return same_bits<float>((unsigned)bits << 16); }

#define SIXTEEN_BIT_FLOAT(T, FROM_FLOAT, TO_FLOAT)                             \
    struct T {                                                                 \
        unsigned short bits;                                                   \
        T() = default;                                                         \
        T(float f) : bits(FROM_FLOAT(f)) {}                                    \
        operator float() const { return TO_FLOAT(bits); }                      \
        T& operator+=(T other) { return *this = T(float(*this) + float(other)); } \
    };                                                                         \
    static inline T operator+(T a, T b) { return T(float(a) + float(b)); }     \
    static inline T operator-(T a, T b) { return T(float(a) - float(b)); }     \
    static inline T operator*(T a, T b) { return T(float(a) * float(b)); }     \
    struct __attribute__((aligned(4))) T##2 { T x, y; };
SIXTEEN_BIT_FLOAT(__half, emulator_to_half, emulator_from_half)
SIXTEEN_BIT_FLOAT(__nv_bfloat16, emulator_to_bfloat, emulator_from_bfloat)
#undef SIXTEEN_BIT_FLOAT
using half = __half;
using half2 = __half2;

static inline __half __float2half(float f) { return __half(f); }
static inline __half __float2half_rn(float f) { return __half(f); }
static inline float __half2float(__half h) { return h; }
static inline float2 __half22float2(__half2 h) { return {h.x, h.y}; }
static inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
static inline __half __ushort_as_half(unsigned short u) { return same_bits<__half>(u); }
static inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
static inline float __bfloat162float(__nv_bfloat16 b) { return b; }
static inline float2 __bfloat1622float2(__nv_bfloat162 b) { return {b.x, b.y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return same_bits<__nv_bfloat16>(u); }

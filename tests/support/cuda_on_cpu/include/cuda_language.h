// Keywords, built-in variables, vector types, and what the scheduler offers (runtime/).
#pragma once
#include "warp_operations.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static  // shared.ld collects them in one section
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// For what belongs to these headers and not to a kernel.
#define UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
// A last parameter that says where a function was called.
#define CALLED_FROM int line = __builtin_LINE()

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#pragma GCC visibility push(hidden)
extern "C" {
extern const uint3 threadIdx, blockIdx, blockDim, gridDim;

uint64_t emulator_warp(int operation, unsigned mask, uint64_t value, int argument, int width, int line);
int emulator_barrier(int kind, int vote, int line);
void emulator_yield();
void emulator_fence();
void* emulator_dynamic_shared();
unsigned emulator_lane();
void emulator_atomic(const volatile void* address, unsigned bytes);  // checked build: as any other access is
[[noreturn]] void emulator_fail(const char* format, ...);
}
#pragma GCC visibility pop

static constexpr int warpSize = 32;

#define VECTORS(T, NAME, ALIGN2, ALIGN4)                             \
    struct __attribute__((aligned(ALIGN2))) NAME##2 { T x, y; };       \
    struct __attribute__((aligned(ALIGN4))) NAME##4 { T x, y, z, w; }; \
    static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }  \
    static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(char, char, 2, 4)
VECTORS(unsigned char, uchar, 2, 4)
VECTORS(short, short, 4, 8)
VECTORS(unsigned short, ushort, 4, 8)
VECTORS(int, int, 8, 16)
VECTORS(unsigned, uint, 8, 16)
VECTORS(float, float, 8, 16)
VECTORS(long long, longlong, 16, 16)
VECTORS(unsigned long long, ulonglong, 16, 16)
VECTORS(double, double, 16, 16)
#undef VECTORS

struct float3 {
    float x, y, z;
};

struct int3 {
    int x, y, z;
};

static inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }

[[noreturn]] static inline void __trap() { emulator_fail("__trap()"); }

#undef assert
#define assert(condition) ((condition) ? (void)0 : emulator_fail("assert(%s) at line %d", #condition, __LINE__))

// Bits of one type read as another.
template <class To, class From>
UNCHECKED static inline To same_bits(From from) {
    static_assert(sizeof(To) >= sizeof(From) && std::is_trivially_copyable<From>::value, "bits do not fit");
    To to{};
    memcpy(&to, &from, sizeof from);
    return to;
}

// Keeps a parameter out of template deduction.
template <class T> struct exactly { using type = T; };
template <class T> using exactly_t = typename exactly<T>::type;

// What PTX instructions do where C++ has no operator for it: the code that cuda_on_cpu/ptx writes calls these.
#pragma once
#include "cuda_on_cpu.h"

extern "C" __attribute__((visibility("hidden"))) char __start_emulator_shared[], __stop_emulator_shared[];

// Any NaN that arithmetic makes.
UNCHECKED static inline float ptx_canonical(float v) { return v != v ? same_bits<float>(0x7FFFFFFFu) : v; }

// The number where the other is NaN; -0 is below 0.
UNCHECKED static inline float ptx_min(float a, float b) {
    if (a != a) return ptx_canonical(b);
    if (b != b) return a;
    return a < b || (a == b && same_bits<unsigned>(a) >> 31) ? a : b;
}

UNCHECKED static inline float ptx_max(float a, float b) {
    if (a != a) return ptx_canonical(b);
    if (b != b) return a;
    return a > b || (a == b && !(same_bits<unsigned>(a) >> 31)) ? a : b;
}

// Shifts by the width or more leave nothing, or the sign.
template <class T>
UNCHECKED static inline T ptx_left(T a, uint32_t n) {
    return n >= 8 * sizeof(T) ? (T)0 : (T)((uint64_t)a << n);
}

template <class T>
UNCHECKED static inline T ptx_right(T a, uint32_t n) {
    const uint32_t most = 8 * sizeof(T) - 1;
    if (n > most) return (T)-1 < (T)0 ? (T)(a >> most) : (T)0;
    return (T)(a >> n);
}

template <class T>
UNCHECKED static inline T ptx_positive(T a) {
    return a > 0 ? a : 0;
}

// The lowest `n` bits of a at `position` of b.
template <class T>
UNCHECKED static inline T ptx_inserted(T a, T b, uint32_t position, uint32_t n) {
    T mask = 0;
    for (uint32_t i = 0; i < n && position + i < 8 * sizeof(T); ++i) mask |= (T)1 << (position + i);
    return (b & ~mask) | (ptx_left(a, position) & mask);
}

// The `n` bits of a from `position` on; beyond them all are as the highest of a signed type, or 0.
template <class T>
UNCHECKED static inline T ptx_extracted(T a, uint32_t position, uint32_t n) {
    const uint32_t bits = 8 * sizeof(T), wanted = n & 255, others = wanted < bits ? bits - wanted : 0;
    return ptx_right(ptx_left(ptx_right(a, position & 255), others), others);
}

template <class T>
UNCHECKED static inline T ptx_quotient(T a, T b) {
    if (b == 0) emulator_fail("division by zero");
    if (b == (T)-1) return (T)(0 - a);  // of the lowest integer too; -1 of an unsigned type leaves 0 or 1
    return (T)(a / b);
}

template <>
UNCHECKED inline uint64_t ptx_quotient(uint64_t a, uint64_t b) {
    if (b == 0) emulator_fail("division by zero");
    return a / b;
}

template <>
UNCHECKED inline uint32_t ptx_quotient(uint32_t a, uint32_t b) {
    if (b == 0) emulator_fail("division by zero");
    return a / b;
}

// ---- memory

// Where an address of shared memory lies; it counts from the begin of what the module has.
UNCHECKED static inline uint64_t ptx_shared(uint64_t address, uint64_t bytes, CALLED_FROM) {
    const uint64_t room = (uint64_t)(__stop_emulator_shared - __start_emulator_shared);
    if (address > room || bytes > room - address)
        emulator_fail("line %d of the PTX: out-of-bounds shared memory, %llu of %llu bytes", line,
                      (unsigned long long)address, (unsigned long long)room);
    return (uint64_t)__start_emulator_shared + address;
}

UNCHECKED static inline uint64_t ptx_shared_address(const void* p) {
    return (uint64_t)((const char*)p - __start_emulator_shared);
}

// `N` numbers that are loaded or stored at once.
template <class T, int N>
struct alignas(sizeof(T) * N) PtxWords {
    T at[N];
};

template <class T, int N>
UNCHECKED static inline PtxWords<T, N>* ptx_words(uint64_t address, CALLED_FROM) {
    if (address % (sizeof(T) * N) != 0)
        emulator_fail("line %d of the PTX: misaligned access to %d bytes", line, (int)sizeof(T) * N);
    return (PtxWords<T, N>*)address;
}

// ---- warps

// A shuffle's last operand: the bits of a lane that name its segment, and the last lane there; `last` is what it must be.
UNCHECKED static inline int ptx_width(uint32_t operand, uint32_t last, CALLED_FROM) {
    const int width = 32 - (int)(operand >> 8 & 31);
    if ((operand & 31) != last || (width & (width - 1)))
        emulator_fail("line %d of the PTX: a shuffle with operand %#x is not understood", line, operand);
    return width;
}

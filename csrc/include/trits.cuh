// Five trits to a byte.
#pragma once
#include "common.cuh"

constexpr int TRITS = 5;

// A byte of five trits times this is that byte / 243 as a fraction of 2^32, rounded up: times 3 its highest trit comes
// out on top, and what is left is the fraction of the others. Rounding adds less than 242 / 2^32, so no trit changes.
constexpr u32 PER_BYTE = 17674763;  // ceil(2^32 / 243)

// f(row, trit) for the five trits of a byte, 0, 1 or 2, the highest first.
template <class F>
__device__ inline void each_trit(u32 byte, const F& f) {
    u32 fraction = byte * PER_BYTE;
#pragma unroll
    for (int row = TRITS - 1; row >= 0; --row) {
        f(row, (int)__umulhi(fraction, 3));
        fraction *= 3;
    }
}

// Puts zeros in place of bytes that are no five trits; returns how many there were.
__device__ inline int drop_invalid(u32& word) {
    const u32 invalid = ((word & 0x7F7F7F7Fu) + (128 - 115) * 0x01010101u) & word & 0x80808080u;  // 243 = 128 + 115
    word &= ~((invalid >> 7) * 255);
    return __popc(invalid);
}

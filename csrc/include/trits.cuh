// Five trits to a byte.
#pragma once
#include "common.cuh"

// A byte of five trits times this is that byte / 243 as a fraction of 2^32, rounded up: times 3 its highest trit comes
// out on top, and what is left is the fraction of the others. 242 times what rounding adds is far below 1 / 243.
constexpr u32 PER_BYTE = 17674763;  // ceil(2^32 / 243)

// Puts zeros in place of bytes that are no five trits; returns how many there were.
__device__ inline int drop_invalid(u32& word) {
    const u32 invalid = ((word & 0x7F7F7F7Fu) + (128 - 115) * 0x01010101u) & word & 0x80808080u;  // 243 = 128 + 115
    word &= ~((invalid >> 7) * 255);
    return __popc(invalid);
}

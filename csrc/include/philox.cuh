// Random numbers.
#pragma once
#include "common.cuh"

// Philox4x32-10 (Salmon et al. 2011): a counter becomes four words.
__device__ inline void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 low0 = 0xD2511F53u * c[0], high0 = __umulhi(0xD2511F53u, c[0]);
        const u32 low1 = 0xCD9E8D57u * c[2], high1 = __umulhi(0xCD9E8D57u, c[2]);
        c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

// What rounding adds before it truncates, for the eight elements from `position` on: draws of 16 bits over 2^16 from
// Philox, or one half to round to nearest. The state lies in device memory, so that a
// captured graph draws anew when it is replayed.
struct Rounding {
    bool draws;
    u32 key0, key1, stream0, stream1, step;

    // state: seed, step, stream; null rounds to nearest.
    __device__ explicit Rounding(const i64* state) : draws(state != nullptr) {
        key0 = key1 = stream0 = stream1 = step = 0;
        if (draws) {
            key0 = (u32)state[0], key1 = (u32)((u64)state[0] >> 32), step = (u32)state[1];
            stream0 = (u32)state[2], stream1 = (u32)((u64)state[2] >> 32);
        }
    }

    // Of the eight draws from `position` on, a multiple of eight, the first two.
    __device__ u32 word(i64 position) const {
        u32 c[4] = {(u32)(position / SLOTS), stream0, step, stream1};
        philox(c, key0, key1);
        return c[0];
    }

    __device__ void operator()(i64 position, float (&r)[SLOTS]) const {
        if (!draws) {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) r[j] = 0.5f;
            return;
        }
        u32 c[4] = {(u32)(position / SLOTS), stream0, step, stream1};
        philox(c, key0, key1);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) r[j] = (float)((c[j / 2] >> (16 * (j % 2))) & 0xFFFF) * 0x1p-16f;
    }
};

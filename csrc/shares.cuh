// Work in shares that the blocks of a launch take in turn, and that may wait for earlier ones.
//
// Shares are handed out in ascending order, and nobody holds one while taking another: so whoever waits for an earlier
// share waits for a block that runs, and that all blocks run at once is not needed.
#pragma once
#include "common.cuh"

// The next share.
__device__ inline u32 take(u32* turns) {
    __shared__ u32 taken;
    __syncthreads();  // the last one may still be read
    if (threadIdx.x == 0) taken = atomicAdd(turns, 1u);
    __syncthreads();
    return taken;
}

// What the block has added up is there for whoever finds it done.
__device__ inline void finish(u32* done) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(done, 1u);
}

__device__ inline void wait_for(const u32* done, u32 shares) {
    if (threadIdx.x == 0) {
        while (*(const volatile u32*)done < shares) {
        }
        __threadfence();
    }
    __syncthreads();
}

constexpr u64 KNOWN = 1ull << 63;

// What all shares before this one have, once this one has said what it has. A word says all, so nothing else has to be
// visible with it.
__device__ inline u64 sum_before(u64* counts, u32 share, u64 mine, u64 (&warps)[WARP]) {
    if (threadIdx.x == 0) atomicExch(counts + share, mine | KNOWN);
    u64 sum = 0, total;
    for (u32 earlier = threadIdx.x; earlier < share; earlier += blockDim.x) {
        u64 there;
        do {
            there = ((const volatile u64*)counts)[earlier];
        } while (!(there & KNOWN));
        sum += there & ~KNOWN;
    }
    scan(sum, total, warps);
    return total;
}

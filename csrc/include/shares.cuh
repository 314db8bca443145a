// Work in shares that the blocks of a launch take in turn, and that may wait for earlier ones.
//
// Shares are handed out in ascending order, and nobody holds one while taking another: so whoever waits for an earlier
// share waits for a block that runs, and that all blocks run at once is not needed.
#pragma once
#include "common.cuh"

// The next share. A relaxed atomic: what it hands out is a number, and no memory goes with it.
__device__ inline u32 take(u32* turns) {
    __shared__ u32 taken;
    __syncthreads();  // the last one may still be read
    if (threadIdx.x == 0) taken = atomicAdd(turns, 1u);
    __syncthreads();
    return taken;
}

// What the block has added up is there for whoever finds it done. By PTX's memory model the barrier puts what all
// threads did before thread 0's fence, and the fence, with the relaxed atomic after it in the same thread, is a release
// of all that: fences in the other threads, before the barrier, would release nothing. Who reads the counter observes
// every block that has added to it, since each addition reads the one before.
__device__ inline void finish(u32* done) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(done, 1u);
    }
}

// A volatile load is a relaxed one, and with the fence after it in the same thread an acquire; the barrier passes that on
// to the other threads, which may then read by plain loads.
__device__ inline void wait_for(const u32* done, u32 shares) {
    if (threadIdx.x == 0) {
        while (*(const volatile u32*)done < shares) {
        }
        __threadfence();
    }
    __syncthreads();
}

constexpr u64 KNOWN = 1ull << 63;

// What all shares before this one have, once this one has said what it has. Atomic and volatile accesses of 8 bytes are
// relaxed and never torn: a word says all, nothing else has to be visible with it, and no fence is needed.
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

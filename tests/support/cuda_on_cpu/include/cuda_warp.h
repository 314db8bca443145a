// Barriers, fences, votes, shuffles and reductions across a warp.
#pragma once
#include "cuda_language.h"

static inline void __syncthreads(CALLED_FROM) { emulator_barrier(BARRIER_PLAIN, 0, line); }
static inline int __syncthreads_count(int vote, CALLED_FROM) { return emulator_barrier(BARRIER_COUNT, vote, line); }
static inline int __syncthreads_and(int vote, CALLED_FROM) { return emulator_barrier(BARRIER_AND, vote, line); }
static inline int __syncthreads_or(int vote, CALLED_FROM) { return emulator_barrier(BARRIER_OR, vote, line); }
static inline void __threadfence() { emulator_fence(); }
static inline void __threadfence_block() { emulator_fence(); }
static inline void __threadfence_system() { emulator_fence(); }
static inline void __nanosleep(unsigned) { emulator_yield(); }
// CUDA promises no more than that the caller is among them.
static inline unsigned __activemask() { return 1u << emulator_lane(); }

static inline void __syncwarp(unsigned mask = 0xffffffffu, CALLED_FROM) {
    emulator_warp(OP_SYNC, mask, 0, 0, 32, line);
}
static inline unsigned __ballot_sync(unsigned mask, int vote, CALLED_FROM) {
    return (unsigned)emulator_warp(OP_BALLOT, mask, vote != 0, 0, 32, line);
}
static inline int __any_sync(unsigned mask, int vote, CALLED_FROM) {
    return (int)emulator_warp(OP_ANY, mask, vote != 0, 0, 32, line);
}
static inline int __all_sync(unsigned mask, int vote, CALLED_FROM) {
    return (int)emulator_warp(OP_ALL, mask, vote != 0, 0, 32, line);
}
template <class T>
static inline unsigned __match_any_sync(unsigned mask, T value, CALLED_FROM) {
    return (unsigned)emulator_warp(OP_MATCH, mask, same_bits<uint64_t>(value), 0, 32, line);
}

template <class T>
UNCHECKED static inline T emulator_shuffle(int operation, unsigned mask, T value, int argument, int width, int line) {
    const uint64_t received = emulator_warp(operation, mask, same_bits<uint64_t>(value), argument, width, line);
    memcpy(&value, &received, sizeof value);
    return value;
}

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CALLED_FROM) {
    return emulator_shuffle(OP_SHUFFLE, mask, value, source, width, line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CALLED_FROM) {
    return emulator_shuffle(OP_SHUFFLE_UP, mask, value, (int)delta, width, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CALLED_FROM) {
    return emulator_shuffle(OP_SHUFFLE_DOWN, mask, value, (int)delta, width, line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CALLED_FROM) {
    return emulator_shuffle(OP_SHUFFLE_XOR, mask, value, lanes, width, line);
}

#define REDUCTION(T, NAME, OPERATION)                                 \
    static inline T NAME(unsigned mask, T value, CALLED_FROM) {         \
        return (T)emulator_warp(OPERATION, mask, (uint32_t)value, 0, 32, line); \
    }
REDUCTION(unsigned, __reduce_add_sync, OP_ADD)
REDUCTION(int, __reduce_add_sync, OP_ADD)
REDUCTION(unsigned, __reduce_min_sync, OP_MIN_UNSIGNED)
REDUCTION(int, __reduce_min_sync, OP_MIN_SIGNED)
REDUCTION(unsigned, __reduce_max_sync, OP_MAX_UNSIGNED)
REDUCTION(int, __reduce_max_sync, OP_MAX_SIGNED)
REDUCTION(unsigned, __reduce_and_sync, OP_AND)
REDUCTION(unsigned, __reduce_or_sync, OP_OR)
REDUCTION(unsigned, __reduce_xor_sync, OP_XOR)
#undef REDUCTION

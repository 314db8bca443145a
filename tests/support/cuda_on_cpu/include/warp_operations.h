// The warp collectives, as kernels (cuda_warp.h) and the scheduler (runtime/collectives.h) name them.
#pragma once

enum WarpOperation {
    OP_SYNC, OP_BALLOT, OP_ANY, OP_ALL,
    OP_SHUFFLE, OP_SHUFFLE_UP, OP_SHUFFLE_DOWN, OP_SHUFFLE_XOR,
    OP_ADD, OP_MIN_SIGNED, OP_MAX_SIGNED, OP_MIN_UNSIGNED, OP_MAX_UNSIGNED, OP_AND, OP_OR, OP_XOR,
    OP_MATCH,
};

// The barriers: what __syncthreads and its kin return.
enum BarrierKind { BARRIER_PLAIN, BARRIER_COUNT, BARRIER_AND, BARRIER_OR };

// Barriers and warp collectives: who waits, when they are complete, and what each lane gets.
#pragma once
#include "fibers.h"

static const char* const OPERATION_NAMES[] = {
    "__syncwarp",         "__ballot_sync",     "__any_sync",        "__all_sync",        "__shfl_sync",
    "__shfl_up_sync",     "__shfl_down_sync",  "__shfl_xor_sync",   "__reduce_add_sync", "__reduce_min_sync",
    "__reduce_max_sync",  "__reduce_min_sync", "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",
    "__reduce_xor_sync",  "__match_any_sync",
};

// for_each_lane(mask, [&](int lane) { … })
template <class F>
static inline void for_each_lane(unsigned mask, F f) {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

// ---- barriers

static void release_barrier() {
    Block* b = current_block;
    b->released_votes = b->votes;
    b->released_threads = b->arrived;
    b->votes = b->arrived = 0;
    b->epoch++;
    progress++;
    for (int i = 0; i < threads_per_block; i++) {
        Thread* thread = &b->threads[options->order == REVERSE ? threads_per_block - 1 - i : i];
        if (thread->state == AT_BARRIER) wake(thread);
    }
}

// ---- warp collectives

// What the lanes of a reduction or a vote have in common.
static uint64_t reduce(const Warp* warp, unsigned lanes, int operation) {
    uint64_t all = 0;
    if (operation == OP_AND || operation == OP_MIN_UNSIGNED) all = 0xffffffffu;
    if (operation == OP_MIN_SIGNED) all = 0x7fffffff;
    if (operation == OP_MAX_SIGNED) all = 0x80000000u;
    for_each_lane(lanes, [&](int lane) {
        const uint32_t v = (uint32_t)warp->value[lane], so_far = (uint32_t)all;
        switch (operation) {
            case OP_BALLOT: case OP_ANY: case OP_ALL: all |= (uint64_t)(v & 1) << lane; break;
            case OP_ADD: all = so_far + v; break;
            case OP_MIN_UNSIGNED: all = v < so_far ? v : so_far; break;
            case OP_MAX_UNSIGNED: all = v > so_far ? v : so_far; break;
            case OP_MIN_SIGNED: all = (int32_t)v < (int32_t)so_far ? v : so_far; break;
            case OP_MAX_SIGNED: all = (int32_t)v > (int32_t)so_far ? v : so_far; break;
            case OP_AND: all = so_far & v; break;
            case OP_OR: all = so_far | v; break;
            case OP_XOR: all = so_far ^ v; break;
        }
    });
    if (operation == OP_ANY) return all != 0;
    if (operation == OP_ALL) return (unsigned)all == lanes;
    return (unsigned)all;
}

// The lane that a shuffle reads; where it would leave its segment, its own.
static int shuffle_source(const Warp* warp, int lane, int operation) {
    const int argument = warp->argument[lane], width = warp->width[lane];
    const int first = lane & ~(width - 1), last = first + width - 1;
    switch (operation) {
        case OP_SHUFFLE: return first + (argument & (width - 1));
        case OP_SHUFFLE_UP: return lane - argument < first ? lane : lane - argument;
        case OP_SHUFFLE_DOWN: return (int64_t)lane + (unsigned)argument > last ? lane : lane + argument;
        default: return (lane ^ argument) > last ? lane : lane ^ argument;
    }
}

static uint64_t shuffle(const Warp* warp, unsigned lanes, int lane, int operation) {
    const int source = shuffle_source(warp, lane, operation) & 31;
    if (lanes >> source & 1) return warp->value[source];
#ifdef EMULATOR_CHECKS
    snprintf(message, sizeof message,
             "%s reads lane %d, which has exited or is not in mask 0x%08x (undefined value), line %d",
             OPERATION_NAMES[operation], source, warp->mask[lane], warp->line[lane]);
    failed = true;
#endif
    return 0xdeadbeefdeadbeefull;
}

static unsigned equal_lanes(const Warp* warp, unsigned lanes, int lane) {
    unsigned equal = 0;
    for_each_lane(lanes, [&](int other) {
        if (warp->value[other] == warp->value[lane]) equal |= 1u << other;
    });
    return equal;
}

// Complete the collective over `mask`, if every lane of it that lives has called the same one.
static void try_to_complete(Warp* warp, unsigned mask, const Thread* member) {
    const unsigned lanes = mask & ~warp->exited;
    if (!lanes || (warp->waiting & lanes) != lanes) return;
    const int operation = warp->operation[__builtin_ctz(lanes)];
    bool agree = true;
    for_each_lane(lanes, [&](int lane) { agree &= warp->mask[lane] == mask && warp->operation[lane] == operation; });
    if (!agree) return;

    const uint64_t reduced = reduce(warp, lanes, operation);
    warp->meetings++;
    progress++;
    for_each_lane(lanes, [&](int lane) {
        warp->result[lane] = operation == OP_MATCH ? equal_lanes(warp, lanes, lane)
            : operation >= OP_SHUFFLE && operation <= OP_SHUFFLE_XOR ? shuffle(warp, lanes, lane, operation)
            : reduced;
#ifdef EMULATOR_CHECKS
        for_each_lane(lanes, [&](int other) { warp->met[lane][other] = warp->meetings; });
#endif
    });
    warp->waiting &= ~lanes;
    Thread* first = &current_block->threads[member->linear - member->lane];
    for (int i = 0; i < WARP_SIZE; i++) {
        const int lane = options->order == REVERSE ? WARP_SIZE - 1 - i : i;
        if (lanes >> lane & 1) wake(first + lane);
    }
}

// ---- a thread's life

static void fiber_main() {
    kernel(kernel_arguments);
    Thread* self = current_thread;
    Warp* warp = self->warp;
    Block* b = current_block;
    self->state = DONE;
    warp->exited |= 1u << self->lane;
    b->live--;
    progress++;
    // An exit can complete what the others wait for.
    for_each_lane(warp->waiting, [&](int lane) {
        if (warp->waiting >> lane & 1 && warp->mask[lane] >> self->lane & 1) try_to_complete(warp, warp->mask[lane], self);
    });
    if (b->live && b->arrived == b->live) release_barrier();
    reschedule();
    abort();  // nobody wakes a thread that is done
}

// ---- called from kernels

extern "C" {

uint64_t emulator_warp(int operation, unsigned mask, uint64_t value, int argument, int width, int line) {
    Thread* self = current_thread;
    Warp* warp = self->warp;
    const int lane = self->lane;
    const char* name = OPERATION_NAMES[operation];
    if (!(mask >> lane & 1)) emulator_fail("%s: calling lane %d is not in mask 0x%08x, line %d", name, lane, mask, line);
    if (width < 1 || width > 32 || (width & (width - 1))) emulator_fail("%s: width %d, line %d", name, width, line);
    warp->operation[lane] = operation;
    warp->mask[lane] = mask;
    warp->value[lane] = value;
    warp->argument[lane] = argument;
    warp->width[lane] = width;
    warp->line[lane] = self->line = line;
    warp->waiting |= 1u << lane;
    self->state = IN_COLLECTIVE;
    try_to_complete(warp, mask, self);
    reschedule();
    return warp->result[lane];
}

int emulator_barrier(int kind, int vote, int line) {
    Thread* self = current_thread;
    Block* b = current_block;
#ifdef EMULATOR_CHECKS
    if (b->arrived && b->line != line)
        emulator_fail("divergent __syncthreads: some threads at line %d, this one at line %d", b->line, line);
    b->line = line;
#endif
    self->state = AT_BARRIER;
    self->line = line;
    b->arrived++;
    b->votes += vote != 0;
    if (b->arrived == b->live) release_barrier();
    reschedule();
    if (kind == BARRIER_COUNT) return b->released_votes;
    if (kind == BARRIER_AND) return b->released_votes == b->released_threads;
    return b->released_votes > 0;
}

void* emulator_dynamic_shared() {
    return dynamic_shared;
}

unsigned emulator_lane() {
    return (unsigned)current_thread->lane;
}

}  // extern "C"

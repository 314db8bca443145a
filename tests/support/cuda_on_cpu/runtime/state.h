// What the parts of the runtime share: the threads, warps and blocks of the one grid that runs, and what Python asked
// for. The grid runs on one OS thread; every CUDA thread is a fiber (fibers.h).
#pragma once
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Everywhere but on x86-64, slower; or on request, to test it.
#if !defined(__x86_64__) || defined(EMULATOR_UCONTEXT)
#define EMULATOR_USES_UCONTEXT 1
#include <ucontext.h>
#endif

#include "warp_operations.h"

#pragma GCC visibility push(hidden)

constexpr int WARP_SIZE = 32;
constexpr size_t STACK_BYTES = 64 * 1024;

struct Index3 {
    unsigned x, y, z;
};

// The names that kernels read.
extern "C" {
Index3 threadIdx, blockIdx, blockDim, gridDim;
}

// From the linker: the section of all __shared__ variables (shared.ld), and the whole loaded object.
extern "C" {
extern char __start_emulator_shared[] __attribute__((weak));
extern char __stop_emulator_shared[] __attribute__((weak));
extern char __ehdr_start[];
extern char _end[];
}

enum Order : int32_t { FORWARD, REVERSE, RANDOM };
enum Races : int32_t { NO_RACES, RACES_IN_BLOCK, ALL_RACES };
enum ThreadState { READY, AT_BARRIER, IN_COLLECTIVE, YIELDED, DONE };
enum AccessKind : uint8_t { NEVER, PLAIN, SYNCHRONISING };  // synchronising: atomic or volatile

// Checked build: the last write to one cell of memory, and the reads since.
struct Cell {
    uint32_t write_block, write_epoch, write_meetings;  // blocks count from 1 here: 0 is nobody
    uint32_t read_block, read_epoch, read_meetings, read_lanes;
    uint16_t write_thread, read_warp;
    AccessKind written, read;
};
constexpr uint32_t SEVERAL_BLOCKS = ~0u;
constexpr uint16_t SEVERAL_WARPS = 0xffff;

// Memory that the grid may touch. Cells are 2^shift bytes each.
struct Range {
    uintptr_t base;
    uint64_t size;
    int32_t shift, read_only;
    Cell* cells;
};

// As launcher.py fills it in. `ranges` has two more places than range_count: static and dynamic shared memory.
struct Options {
    uint64_t seed;
    int32_t order, resident, preempt, races, flush_subnormals, range_count;
    Range* ranges;
    uint64_t accesses;
};

struct Warp {
    unsigned waiting, exited;  // lanes, as masks
    unsigned meetings;         // collectives completed
    unsigned mask[WARP_SIZE];  // what each waiting lane called with, down to `line`
    int operation[WARP_SIZE], argument[WARP_SIZE], width[WARP_SIZE], line[WARP_SIZE];
    uint64_t value[WARP_SIZE], result[WARP_SIZE];
    unsigned met[WARP_SIZE][WARP_SIZE];  // the value of `meetings` when two lanes last met in a collective
};

struct Thread {
    void* stack_pointer;
    char* stack;
    Warp* warp;
    Index3 index;
    int linear, lane;
    ThreadState state;
    int line;  // of the barrier or collective that it waits in
};

struct Block {
    Index3 index;
    uint32_t linear;
    bool empty, yielded;  // no block runs in this slot; a thread has yielded since the block's last turn
    int live;             // threads that have not exited
    int arrived, votes, line;              // of the barrier that is filling
    int released_threads, released_votes;  // of the last one
    unsigned epoch;                        // barriers released
    Thread* threads;
    Warp* warps;
    int *queue, queue_head, queue_length;  // ready threads, a ring
    char* shared;                          // its shared memory while another block runs
    Cell* cells;                           // of its shared memory
};

static Options* options;
static Block* current_block;
static Thread* current_thread;  // null in the grid loop
static int threads_per_block;
static unsigned dynamic_bytes;
static char* dynamic_shared;
static void (*kernel)(void**);
static void** kernel_arguments;
static uint64_t progress;  // counts whatever makes a spinning thread's wait worth while
static bool failed;
static char message[2048];

static inline size_t static_bytes() {
    return (size_t)(__stop_emulator_shared - __start_emulator_shared);
}

// ---- random numbers: xorshift64

static uint64_t random_state;

static inline unsigned random_bits() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)(random_state >> 32);
}

static inline unsigned random_below(unsigned n) {
    return (unsigned)((uint64_t)random_bits() * n >> 32);
}

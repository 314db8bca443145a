// The grid loop: starts blocks, gives each resident one its turn, notices deadlock and livelock. Linked into every
// shared object of kernels.
#include "checks.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

constexpr uint64_t IDLE_ROUNDS = 2000000;

// ---- floating point

#ifdef __SSE__
// Subnormal results and operands become zero, or stay, whatever the process does otherwise.
struct FloatingPointMode {
    const unsigned before = _mm_getcsr();
    static constexpr unsigned FLUSH = 0x8040;

    explicit FloatingPointMode(bool flush) { _mm_setcsr(flush ? before | FLUSH : before & ~FLUSH); }
    ~FloatingPointMode() { _mm_setcsr(before); }
};
#else
struct FloatingPointMode {
    explicit FloatingPointMode(bool) {}
};
#endif

// ---- fiber stacks, kept from launch to launch

static char* stacks;
static size_t stack_count;

static void give_back_stacks() {
    if (stacks) munmap(stacks, stack_count * STACK_BYTES);
    stacks = nullptr;
    stack_count = 0;
}

static bool have_stacks(size_t wanted) {
    if (stack_count >= wanted) return true;
    give_back_stacks();
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, wanted * STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    stacks = memory == MAP_FAILED ? nullptr : (char*)memory;
    stack_count = stacks ? wanted : 0;
#ifndef EMULATOR_USES_UCONTEXT
    // A guard page below each, as long as the process may have so many mappings.
    if (stack_count <= 8192)
        for (size_t i = 0; i < stack_count; i++) mprotect(stacks + i * STACK_BYTES, 4096, PROT_NONE);
#endif
    return stacks != nullptr;
}

// ---- shared memory: one address for all blocks, so its contents follow the block that runs

static Block* loaded;

static void save_shared() {
    if (!loaded || !loaded->shared) return;
    memcpy(loaded->shared, __start_emulator_shared, static_bytes());
    memcpy(loaded->shared + static_bytes(), dynamic_shared, dynamic_bytes);
}

static void use_cells(Block* block) {
#ifdef EMULATOR_CHECKS
    options->ranges[options->range_count].cells = block->cells;
    options->ranges[options->range_count + 1].cells = block->cells + static_bytes();
#else
    (void)block;
#endif
}

static void load_shared(Block* block) {
    if (loaded == block) return;
    save_shared();
    memcpy(__start_emulator_shared, block->shared, static_bytes());
    memcpy(dynamic_shared, block->shared + static_bytes(), dynamic_bytes);
    use_cells(block);
    loaded = block;
}

// ---- blocks

static void allocate_block(Block* block, size_t slot, bool several) {
    const size_t shared = static_bytes() + dynamic_bytes + 1, warps = (threads_per_block + WARP_SIZE - 1) / WARP_SIZE;
    block->threads = (Thread*)calloc(threads_per_block, sizeof(Thread));
    block->warps = (Warp*)calloc(warps, sizeof(Warp));
    block->queue = (int*)calloc(threads_per_block, sizeof(int));
    block->shared = several ? (char*)calloc(1, shared) : nullptr;
#ifdef EMULATOR_CHECKS
    block->cells = (Cell*)calloc(shared, sizeof(Cell));
#endif
    for (int i = 0; i < threads_per_block; i++)
        block->threads[i].stack = stacks + (slot * threads_per_block + i) * STACK_BYTES;
    block->empty = true;
}

static void free_block(Block* block) {
    free(block->threads);
    free(block->warps);
    free(block->queue);
    free(block->shared);
    free(block->cells);
}

static void start_block(Block* block, uint32_t linear) {
    save_shared();
    loaded = block;
    current_block = block;
    block->index = {linear % gridDim.x, linear / gridDim.x % gridDim.y, linear / gridDim.x / gridDim.y};
    block->linear = linear;
    block->empty = block->yielded = false;
    block->live = threads_per_block;
    block->arrived = block->votes = block->line = block->released_threads = block->released_votes = 0;
    block->epoch = 1;
    block->queue_head = block->queue_length = 0;

    const int warps = (threads_per_block + WARP_SIZE - 1) / WARP_SIZE, tail = threads_per_block % WARP_SIZE;
    memset(block->warps, 0, sizeof(Warp) * warps);
    if (tail) block->warps[warps - 1].exited = ~0u << tail;
    for (int i = 0; i < threads_per_block; i++) {
        const unsigned j = options->order == REVERSE ? threads_per_block - 1 - i : i;
        Thread* thread = &block->threads[j];
        thread->index = {j % blockDim.x, j / blockDim.x % blockDim.y, j / blockDim.x / blockDim.y};
        thread->linear = (int)j;
        thread->lane = (int)j % WARP_SIZE;
        thread->warp = &block->warps[j / WARP_SIZE];
        thread->state = READY;
        thread->line = 0;
        prepare_fiber(thread);
        push((int)j);
    }

    // Nothing may depend on what an earlier block left behind.
    const int poison = options->order == RANDOM ? (int)(random_bits() & 255) | 1 : 0xff;
    memset(__start_emulator_shared, poison, static_bytes());
    memset(dynamic_shared, poison, dynamic_bytes);
#ifdef EMULATOR_CHECKS
    memset(block->cells, 0, sizeof(Cell) * (static_bytes() + dynamic_bytes));
#endif
    use_cells(block);
}

static void report_deadlock(const Block* block) {
    int length = snprintf(message, sizeof message, "deadlock in block %u:", block->linear), shown = 0;
    for (int j = 0; j < threads_per_block && shown < 6; j++) {
        const Thread* thread = &block->threads[j];
        const bool as_before = j && thread[-1].state == thread->state && thread[-1].line == thread->line;
        if (thread->state == DONE || as_before) continue;
        const bool barrier = thread->state == AT_BARRIER;
        const char* place = barrier ? "__syncthreads" : OPERATION_NAMES[thread->warp->operation[thread->lane]];
        const unsigned mask = barrier ? 0u : thread->warp->mask[thread->lane];
        length += snprintf(message + length, sizeof message - length, " thread %d waits in %s (mask 0x%08x) at line %d;", j,
                           place, mask, thread->line);
        shown++;
    }
    failed = true;
}

// Run a block until each of its threads waits. Returns whether it has ended.
static bool take_turn(Block* block) {
    current_block = block;
    blockIdx = block->index;
    if (block->yielded)
        for (int j = 0; j < threads_per_block; j++)
            if (block->threads[j].state == YIELDED) wake(&block->threads[j]);
    block->yielded = false;
    const int next = pop();
    if (next >= 0) {
        current_thread = &block->threads[next];
        threadIdx = current_thread->index;
        emulator_switch(&main_stack_pointer, current_thread->stack_pointer);
        current_thread = nullptr;
    }
    if (failed) return false;
    if (block->live && !block->yielded) report_deadlock(block);
    return !block->live;
}

// ---- the grid

static uint32_t* order_of_blocks(uint64_t count) {
    uint32_t* order = (uint32_t*)malloc(count * sizeof(uint32_t));
    for (uint64_t i = 0; i < count; i++) order[i] = (uint32_t)(options->order == REVERSE ? count - 1 - i : i);
    if (options->order == RANDOM)
        for (uint64_t i = count - 1; i > 0; i--) {
            const uint64_t j = random_below((unsigned)(i + 1));
            const uint32_t swapped = order[i];
            order[i] = order[j];
            order[j] = swapped;
        }
    return order;
}

static void run_grid(Block* slots, uint64_t resident, uint64_t count) {
    uint32_t* order = order_of_blocks(count);
    uint64_t started = 0, ended = 0, idle = 0, progress_before = progress;
    const bool out_of_step = options->order == RANDOM && resident > 1;
    while (!failed && ended < count) {
        for (uint64_t slot = 0; slot < resident && !failed; slot++) {
            if (out_of_step && random_below(2)) continue;  // or an earlier block would always be ahead
            Block* block = &slots[slot];
            if (block->empty && started == count) continue;
            if (block->empty)
                start_block(block, order[started++]);
            else if (resident > 1)
                load_shared(block);
            if (take_turn(block)) {
                block->empty = true;
                ended++;
            }
        }
        idle = progress == progress_before ? idle + 1 : 0;
        progress_before = progress;
        if (idle > IDLE_ROUNDS && !failed) {
            snprintf(message, sizeof message,
                     "livelock: %llu rounds of spinning without progress (%llu resident block(s); a spin on another block "
                     "needs resident>=that many)",
                     (unsigned long long)idle, (unsigned long long)resident);
            failed = true;
        }
    }
    free(order);
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

// A guarded stack is two mappings, and a process may have 65530: whoever loads many modules gives their stacks back.
EXPORTED void emulator_give_back() {
    give_back_stacks();
}

EXPORTED uint64_t emulator_static_shared() {
    return static_bytes();
}

// Run one grid to its end. Returns 0, or 1 with the reason in `text`.
EXPORTED int emulator_launch(void (*function)(void**), void** arguments, const unsigned* grid, const unsigned* block,
                             unsigned dynamic, Options* given, char* text, int text_bytes) {
    options = given;
    kernel = function;
    kernel_arguments = arguments;
    dynamic_bytes = dynamic;
    failed = false;
    message[0] = 0;
    current_thread = nullptr;
    loaded = nullptr;
    random_state = options->seed * 0x9E3779B97F4A7C15ull + 0x1234567ull;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    threads_per_block = (int)(block[0] * block[1] * block[2]);
    const uint64_t count = (uint64_t)grid[0] * grid[1] * grid[2];
    uint64_t resident = options->resident < 1 ? 1 : (uint64_t)options->resident;
    if (resident > count) resident = count;
    if (!have_stacks(resident * threads_per_block)) {
        snprintf(text, text_bytes, "no memory for the fibers' stacks");
        return 1;
    }
    dynamic_shared = (char*)aligned_alloc(256, (dynamic + 511) & ~255u);
    Block* slots = (Block*)calloc(resident, sizeof(Block));
    for (uint64_t slot = 0; slot < resident; slot++) allocate_block(&slots[slot], slot, resident > 1);
#ifdef EMULATOR_CHECKS
    Range* const end = options->ranges + options->range_count;
    for (Range* range = options->ranges; range < end; range++)
        if (options->races != NO_RACES) range->cells = (Cell*)calloc((range->size >> range->shift) + 2, sizeof(Cell));
    end[0] = Range{(uintptr_t)__start_emulator_shared, static_bytes(), 0, 0, nullptr};
    end[1] = Range{(uintptr_t)dynamic_shared, dynamic, 0, 0, nullptr};
#endif
#ifdef EMULATOR_USES_UCONTEXT
    main_stack_pointer = &main_context;
#endif
    {
        const FloatingPointMode mode(options->flush_subnormals);
        run_grid(slots, resident, count);
    }
    if (failed) snprintf(text, text_bytes, "%s", message);
    for (uint64_t slot = 0; slot < resident; slot++) free_block(&slots[slot]);
#ifdef EMULATOR_CHECKS
    for (Range* range = options->ranges; range < end; range++) free(range->cells);
#endif
    free(slots);
    free(dynamic_shared);
    current_block = nullptr;
    return failed;
}

// The checked build: what happens at every access to memory, and where behaviour would be undefined.
//
// g++ -fsanitize=thread,undefined calls __tsan_* and __ubsan_* functions. These are ours, and know CUDA's rules: which
// arrays the kernel was given, which threads a barrier or a warp collective has ordered.
#pragma once
#include "collectives.h"

#ifdef EMULATOR_CHECKS

enum Access { READ, WRITE, ATOMIC, VOLATILE_READ, VOLATILE_WRITE };
static const char* const ACCESS_NAMES[] = {"read", "write", "atomic", "volatile read", "volatile write"};

// One access, and where in the code it is.
struct Touch {
    uintptr_t address;
    unsigned bytes;
    Access access;
    void* caller;

    bool writes() const { return access == WRITE || access == ATOMIC || access == VOLATILE_WRITE; }
    bool reads() const { return access != WRITE && access != VOLATILE_WRITE; }
    AccessKind kind() const { return access >= ATOMIC ? SYNCHRONISING : PLAIN; }
    const char* name() const { return ACCESS_NAMES[access]; }
    unsigned long counter() const { return (unsigned long)((char*)caller - __ehdr_start); }
};

// ---- the right to touch an address

static Range* find_range(uintptr_t address) {
    static int last;  // a loop stays with one array for a while
    const int count = options->range_count + 2;
    if (last >= count) last = 0;
    for (int i = 0; i < count; i++) {
        const int candidate = (last + i) % count;
        if (address - options->ranges[candidate].base < options->ranges[candidate].size) {
            last = candidate;
            return &options->ranges[candidate];
        }
    }
    return nullptr;
}

// __constant__ and __device__ variables, literals.
static bool is_in_this_object(const Touch& t) {
    return t.address >= (uintptr_t)__ehdr_start && t.address + t.bytes <= (uintptr_t)_end;
}

static void check_bounds(const Touch& t, const Range* range) {
    const int thread = current_thread->linear;
    const uint32_t block = current_block->linear;
    if (!range)
        emulator_fail("out-of-bounds %u-byte %s at %p: inside no array argument (thread %d, block %u) @pc=0x%lx", t.bytes,
                      t.name(), (void*)t.address, thread, block, t.counter());
    const uint64_t end = t.address - range->base + t.bytes;
    if (end > range->size)
        emulator_fail("out-of-bounds %u-byte %s runs %ld bytes past the end of an array (thread %d, block %u) @pc=0x%lx",
                      t.bytes, t.name(), (long)(end - range->size), thread, block, t.counter());
    const bool power_of_two = (t.bytes & (t.bytes - 1)) == 0;
    if (power_of_two && t.address & (t.bytes - 1))
        emulator_fail("misaligned %u-byte %s at %p (thread %d, block %u) @pc=0x%lx", t.bytes, t.name(), (void*)t.address,
                      thread, block, t.counter());
    if (range->read_only && t.writes())
        emulator_fail("%s to a const/read-only argument (thread %d, block %u) @pc=0x%lx", t.name(), thread, block,
                      t.counter());
}

// ---- data races

[[noreturn]] static void report_race(const char* order, const Touch& t, uint32_t other_block, int other_thread) {
    char other[64];
    if (other_thread >= 0)
        snprintf(other, sizeof other, "thread %d of block %u", other_thread, other_block - 1);
    else if (other_block == SEVERAL_BLOCKS)
        snprintf(other, sizeof other, "threads of several blocks");
    else
        snprintf(other, sizeof other, "several threads of block %u", other_block - 1);
    emulator_fail("data race (%s): %u-byte %s at %p by thread %d of block %u conflicts with %s @pc=0x%lx", order, t.bytes,
                  t.name(), (void*)t.address, current_thread->linear, current_block->linear, other, t.counter());
}

// Whether a collective has ordered what lane a did `meetings` collectives ago before what lane b does now.
static inline bool have_met(const Warp* warp, int a, int b, unsigned meetings) {
    return a == b || warp->met[a][b] > meetings;
}

static bool is_ordered_after_write(const Touch& t, const Cell* c, uint32_t block, int warp) {
    if (t.kind() == SYNCHRONISING && c->written == SYNCHRONISING) return true;
    if (c->write_block != block) return options->races != ALL_RACES;
    if (c->write_thread == current_thread->linear || c->write_epoch < current_block->epoch) return true;
    return c->write_thread / WARP_SIZE == warp &&
           have_met(current_thread->warp, c->write_thread % WARP_SIZE, current_thread->lane, c->write_meetings);
}

static bool is_ordered_after_reads(const Touch& t, const Cell* c, uint32_t block, int warp) {
    if (t.kind() == SYNCHRONISING && c->read == SYNCHRONISING) return true;
    if (c->read_block != block) return options->races != ALL_RACES;
    if (c->read_epoch < current_block->epoch) return true;
    if (c->read_warp != warp) return false;
    bool ordered = true;
    for_each_lane(c->read_lanes, [&](int lane) {
        ordered &= have_met(current_thread->warp, lane, current_thread->lane, c->read_meetings);
    });
    return ordered;
}

static void note_write(const Touch& t, Cell* c, uint32_t block) {
    c->write_block = block;
    c->write_epoch = current_block->epoch;
    c->write_meetings = current_thread->warp->meetings;
    c->write_thread = (uint16_t)current_thread->linear;
    c->written = t.kind();
    c->read = NEVER;
}

static void note_read(const Touch& t, Cell* c, uint32_t block, int warp) {
    const bool beside_others = c->read && c->read_block == block && c->read_epoch == current_block->epoch;
    if (beside_others) {
        if (c->read_warp == warp)
            c->read_lanes |= 1u << current_thread->lane;
        else
            c->read_warp = SEVERAL_WARPS;
        if (t.kind() < c->read) c->read = t.kind();
    } else {
        const bool another_block = c->read && c->read_block != block && options->races == ALL_RACES;
        c->read_block = another_block ? SEVERAL_BLOCKS : block;
        c->read_warp = (uint16_t)warp;
        c->read_lanes = 1u << current_thread->lane;
        c->read = t.kind();
    }
    c->read_epoch = current_block->epoch;
    c->read_meetings = current_thread->warp->meetings;
}

static void check_cell(const Touch& t, Cell* c, bool shared) {
    const uint32_t block = current_block->linear + 1;
    const int warp = (int)(current_thread->warp - current_block->warps);
    if (shared && t.reads() && !c->written)
        emulator_fail("uninitialised __shared__ read of %u bytes (thread %d, block %u) @pc=0x%lx", t.bytes,
                      current_thread->linear, current_block->linear, t.counter());
    if (options->races != NO_RACES) {
        if (c->written && !is_ordered_after_write(t, c, block, warp))
            report_race(t.writes() ? "write after write" : "read after write", t, c->write_block, c->write_thread);
        if (t.writes() && c->read && !is_ordered_after_reads(t, c, block, warp))
            report_race("write after read", t, c->read_block,
                        c->read_warp == warp ? warp * WARP_SIZE + __builtin_ctz(c->read_lanes) : -1);
    }
    if (t.writes())
        note_write(t, c, block);
    else
        note_read(t, c, block, warp);
}

// ---- every access

static void touch(const volatile void* address, unsigned bytes, Access access, void* caller) {
    if (!current_thread) return;
    const Touch t{(uintptr_t)address, bytes, access, caller};
    if (t.address - (uintptr_t)current_thread->stack < STACK_BYTES) return;  // a local variable
    options->accesses++;
    Range* range = find_range(t.address);
    if (!range && is_in_this_object(t)) return;
    check_bounds(t, range);
    const bool shared = range >= options->ranges + options->range_count;
    if (options->races != NO_RACES || shared) {
        const uint64_t first = t.address - range->base, last = first + bytes - 1;
        for (uint64_t cell = first >> range->shift; cell <= last >> range->shift; cell++)
            check_cell(t, &range->cells[cell], shared);
    }
    // A thread that looks at a volatile again and again waits for another one.
    if (access == VOLATILE_READ || (access == ATOMIC && options->resident > 1))
        emulator_yield();
    else
        maybe_preempt();
}

extern "C" {

void emulator_atomic(const volatile void* address, unsigned bytes) {
    touch(address, bytes, ATOMIC, __builtin_return_address(0));
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define HOOK(name, bytes, access) \
    void __tsan_##name##bytes(void* p) { touch(p, bytes, access, __builtin_return_address(0)); }
#define HOOKS(bytes)                                    \
    HOOK(read, bytes, READ)                             \
    HOOK(write, bytes, WRITE)                           \
    HOOK(unaligned_read, bytes, READ)                   \
    HOOK(unaligned_write, bytes, WRITE)                 \
    HOOK(volatile_read, bytes, VOLATILE_READ)           \
    HOOK(volatile_write, bytes, VOLATILE_WRITE)         \
    HOOK(unaligned_volatile_read, bytes, VOLATILE_READ) \
    HOOK(unaligned_volatile_write, bytes, VOLATILE_WRITE)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void* p, unsigned long bytes) {
    touch(p, (unsigned)bytes, READ, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
    touch(p, (unsigned)bytes, WRITE, __builtin_return_address(0));
}

// ---- undefined behaviour

struct SourceLocation {
    const char* file;
    unsigned line, column;
};

[[noreturn]] static void report_undefined(const char* what, const SourceLocation* where) {
    if (!current_thread) {
        fprintf(stderr, "undefined behaviour outside a kernel: %s\n", what);
        abort();
    }
    emulator_fail("undefined behaviour: %s at line %u (thread %d, block %u)", what, where->line, current_thread->linear,
                  current_block->linear);
}

#define UNDEFINED(name, what) \
    void __ubsan_handle_##name(SourceLocation* where) { report_undefined(what, where); }
UNDEFINED(out_of_bounds_abort, "index out of bounds of a fixed-size array")
UNDEFINED(type_mismatch_v1_abort, "misaligned or null pointer")
UNDEFINED(shift_out_of_bounds_abort, "shift count out of range")
UNDEFINED(divrem_overflow_abort, "integer division by zero or overflow")
UNDEFINED(add_overflow_abort, "signed overflow in +")
UNDEFINED(sub_overflow_abort, "signed overflow in -")
UNDEFINED(mul_overflow_abort, "signed overflow in *")
UNDEFINED(negate_overflow_abort, "signed overflow in unary -")
UNDEFINED(float_cast_overflow_abort, "float to integer conversion out of range (CUDA saturates: use __float2int_r*)")
UNDEFINED(load_invalid_value_abort, "invalid bool/enum value")
UNDEFINED(pointer_overflow_abort, "pointer overflow")
UNDEFINED(nonnull_arg_abort, "null argument")
UNDEFINED(builtin_unreachable, "unreachable code")

}  // extern "C"

#else

extern "C" void emulator_atomic(const volatile void*, unsigned) {
    if (options->resident > 1)
        emulator_yield();
    else
        maybe_preempt();
}

#endif

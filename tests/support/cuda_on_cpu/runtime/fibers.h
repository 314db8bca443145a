// Fibers: switching stacks, the queue of ready threads, and how a thread gives the processor away.
#pragma once
#include "state.h"

static void* main_stack_pointer;
static void fiber_main();

#ifndef EMULATOR_USES_UCONTEXT

// Saves what a callee must preserve, and swaps stacks.
extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp,(%rdi)
    movq %rsi,%rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch,.-emulator_switch
)");

static void prepare_fiber(Thread* thread) {
    // Stacks begin at different offsets, since equal ones would share the same few cache sets. After the last `ret` the
    // stack pointer is 8 modulo 16, as the ABI wants at a function's entry.
    void** top = (void**)(thread->stack + STACK_BYTES - (thread->linear * 5 & 63) * 64) - 3;
    *--top = (void*)fiber_main;
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    thread->stack_pointer = top;
}

#else

static ucontext_t main_context;

static void emulator_switch(void** save, void* to) {
    swapcontext((ucontext_t*)*save, (ucontext_t*)to);
}

static void prepare_fiber(Thread* thread) {
    ucontext_t* context = (ucontext_t*)thread->stack;  // at the bottom of the stack's own memory
    getcontext(context);
    context->uc_stack.ss_sp = thread->stack + 4096;
    context->uc_stack.ss_size = STACK_BYTES - 4096;
    context->uc_link = nullptr;
    makecontext(context, fiber_main, 0);
    thread->stack_pointer = context;
}

#endif

// ---- the queue of ready threads

static inline int around(int i) {
    return i >= threads_per_block ? i - threads_per_block : i;
}

static inline void push(int thread) {
    Block* b = current_block;
    b->queue[around(b->queue_head + b->queue_length++)] = thread;
}

static inline int pop() {
    Block* b = current_block;
    if (!b->queue_length) return -1;
    if (options->order == RANDOM) {
        const int chosen = around(b->queue_head + (int)random_below((unsigned)b->queue_length));
        const int thread = b->queue[chosen];
        b->queue[chosen] = b->queue[b->queue_head];
        b->queue[b->queue_head] = thread;
    }
    const int thread = b->queue[b->queue_head];
    b->queue_head = around(b->queue_head + 1);
    b->queue_length--;
    return thread;
}

static inline void wake(Thread* thread) {
    thread->state = READY;
    push(thread->linear);
}

// ---- giving the processor away

// To the next ready thread of the block, or back to the grid loop.
static void reschedule() {
    Thread* self = current_thread;
    const int next = failed ? -1 : pop();
    if (next == self->linear) return;
    if (next >= 0) {
        current_thread = &current_block->threads[next];
        threadIdx = current_thread->index;
        emulator_switch(&self->stack_pointer, current_thread->stack_pointer);
    } else {
        current_thread = nullptr;
        emulator_switch(&self->stack_pointer, main_stack_pointer);
    }
}

// Once in `preempt` accesses, let another thread go first.
static inline void maybe_preempt() {
    if (options->preempt && random_below((unsigned)options->preempt) == 0) {
        push(current_thread->linear);
        reschedule();
    }
}

extern "C" {

// Wait for another block's turn, or for another thread's.
void emulator_yield() {
    if (!current_thread) return;
    current_thread->state = YIELDED;
    current_block->yielded = true;
    reschedule();
}

void emulator_fence() {
    if (options->resident > 1 || options->preempt) emulator_yield();
}

// The grid ends here, with the first failure's message.
[[noreturn]] void emulator_fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (!failed) vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    failed = true;
    void* abandoned = current_thread->stack_pointer;  // with ucontext, where to save this fiber
    emulator_switch(&abandoned, main_stack_pointer);
    abort();
}

}  // extern "C"

// Atomics, and loads and stores with cache hints.
#pragma once
#include "cuda_language.h"

// One OS thread runs the grid, so a plain read and write is atomic.
template <class T, class F>
UNCHECKED static inline T emulator_update(T* p, F f) {
    emulator_atomic(p, sizeof(T));
    const T old = *p;
    *p = f(old);
    return old;
}

#define ATOMIC_OPERATION(NAME, RESULT)                                                               \
    template <class T>                                                                               \
    UNCHECKED static inline T NAME(T* p, exactly_t<T> v) {                                           \
        static_assert(sizeof(T) >= 4 || !std::is_integral<T>::value, #NAME ": 32 or 64 bits only");  \
        return emulator_update(p, [v](T old) UNCHECKED -> T { (void)old; return RESULT; });          \
    }                                                                                                \
    template <class T>                                                                               \
    UNCHECKED static inline T NAME##_block(T* p, exactly_t<T> v) { return NAME(p, v); }
ATOMIC_OPERATION(atomicAdd, (T)(old + v))
ATOMIC_OPERATION(atomicSub, (T)(old - v))
ATOMIC_OPERATION(atomicExch, v)
ATOMIC_OPERATION(atomicMin, v < old ? v : old)
ATOMIC_OPERATION(atomicMax, old < v ? v : old)
ATOMIC_OPERATION(atomicAnd, (T)(old & v))
ATOMIC_OPERATION(atomicOr, (T)(old | v))
ATOMIC_OPERATION(atomicXor, (T)(old ^ v))
ATOMIC_OPERATION(atomicInc, old >= v ? (T)0 : (T)(old + 1))
#undef ATOMIC_OPERATION

template <class T>
UNCHECKED static inline T atomicCAS(T* p, exactly_t<T> expected, exactly_t<T> desired) {
    return emulator_update(p, [=](T old) UNCHECKED -> T { return old == expected ? desired : old; });
}

template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldca(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldlu(const T* p) { return *p; }
template <class T> static inline void __stwb(T* p, exactly_t<T> v) { *p = v; }
template <class T> static inline void __stcg(T* p, exactly_t<T> v) { *p = v; }
template <class T> static inline void __stcs(T* p, exactly_t<T> v) { *p = v; }

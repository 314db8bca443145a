// How a kernel leaves the shared object: a function that takes its arguments as cuLaunchKernel does, by a pointer to
// each, and a text that says what they are (launcher.py, Parameter.parse).
#pragma once
#include "cuda_language.h"

namespace emulator {

template <class T>
int describe_value(char* out) {
    const char kind = std::is_same<T, bool>::value ? 'b'
        : std::is_floating_point<T>::value ? 'f'
        : std::is_integral<T>::value ? (std::is_signed<T>::value ? 'i' : 'u')
        : std::is_void<T>::value ? 'v' : 's';
    return sprintf(out, "%c%d", kind, (int)sizeof(std::conditional_t<std::is_void<T>::value, char, T>));
}

template <class T>
int describe(char* out) {
    int length = 0;
    if constexpr (std::is_pointer<T>::value) {
        using Element = std::remove_pointer_t<T>;
        length = sprintf(out, std::is_const<Element>::value ? "Pc" : "Pm");
        length += describe_value<std::remove_cv_t<Element>>(out + length);
    } else {
        length = describe_value<std::remove_cv_t<T>>(out);
    }
    out[length] = ' ';
    return length + 1;
}

template <class... Parameters>
void describe_all(char* out, void (*)(Parameters...)) {
    ((out += describe<Parameters>(out)), ...);
    *out = 0;
}

template <class... Parameters, size_t... I>
UNCHECKED void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    void (*volatile not_inlined)(Parameters...) = kernel;
    (void)arguments;
    not_inlined(*(std::remove_cv_t<Parameters>*)arguments[I]...);
}

template <class... Parameters>
UNCHECKED void call(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

}  // namespace emulator

#define EMULATOR_KERNEL(NAME)                                                                \
    extern "C" {                                                                             \
    __attribute__((visibility("default"))) UNCHECKED void emulator_run_##NAME(void** a) {    \
        emulator::call(&NAME, a);                                                            \
    }                                                                                        \
    __attribute__((visibility("default"))) void emulator_signature_##NAME(char* out) {       \
        emulator::describe_all(out, &NAME);                                                  \
    }                                                                                        \
    }

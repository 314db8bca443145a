// How a gradient g enters a momentum, and what is to be sent of that. What is not finite does not enter.
//
//     Tracking:             m' = m + (g - m) · share     out = m' - m
//     Momentum:             u' = u · β + g               out = u'
//     Nesterov's:           u' = (u + g) · β             out = u' + g
//     Tracking's estimate:  H' = H + mean, and that is handed out in the place of the mean
//     Magnitudes:           out = g / s(M);              u = mean · s(M),  M' = √(M² · β + u² · (1 - β))
//
// Each reads and writes everything once. compress/backends/kernels.py says what they mean.
#include "common.cuh"

// Rows of 256: `work` makes `out` of what has come in, and what is kept then is stored if KEEPS.
template <bool KEEPS, class T, class F>
__device__ inline void each_row(const T* in, float* kept, float* out, i64 numel, F work) {
    const bool aligned = is_aligned(in), kept_aligned = is_aligned(kept), out_aligned = is_aligned(out);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float x[SLOTS], k[SLOTS];
        load8(in, aligned, begin, numel, x);
        load8(kept, kept_aligned, begin, numel, k);
        work(x, k);
        if (KEEPS) store8(kept, kept_aligned, begin, numel, k);
        store8(out, out_aligned, begin, numel, x);
    });
}

template <class T, class F>
__device__ inline void each_element(const T* grad, float* momentum, float* out, i64 numel, F enter) {
    each_row<true>(grad, momentum, out, numel, [&](float(&g)[SLOTS], float(&m)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) enter(g[j], m[j]);
    });
}

template <class T>
__device__ inline void change(const T* grad, float* momentum, float* out, float share, i64 numel) {
    each_element(grad, momentum, out, numel, [=](float& g, float& m) {
        const float now = m + (g - m) * share;
        g = now - m;
        if (is_finite(now)) m = now;
    });
}

template <class T>
__device__ inline void enter(const T* grad, float* momentum, float* out, float beta, int nesterov, i64 numel) {
    each_element(grad, momentum, out, numel, [=](float& g, float& u) {
        const float now = nesterov ? (u + g) * beta : u * beta + g;
        g = nesterov ? now + g : now;
        if (is_finite(g)) u = now;
    });
}

// By which the scales of a row's magnitudes follow them: 10 / their root mean square, or 0.
__device__ inline float scale_factor(const float (&magnitudes)[SLOTS]) {
    float squares[SLOTS];
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) squares[j] = magnitudes[j] * magnitudes[j];
    const float sum = fold(squares);
    return sum != 0.0f ? (float)(10.0 / sqrt((double)sum * 0x1p-8)) : 0.0f;
}

template <class T>
__device__ inline void divide(const T* grad, float* magnitudes, float* out, i64 numel) {
    each_row<false>(grad, magnitudes, out, numel, [](float(&g)[SLOTS], float(&m)[SLOTS]) {
        const float factor = scale_factor(m);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) g[j] = g[j] / (m[j] * factor + 1.0f);
    });
}

extern "C" {

__global__ void tracking_change_f32(const float* grad, float* momentum, float* out, float share, i64 numel) {
    change(grad, momentum, out, share, numel);
}

__global__ void tracking_change_f16(const Half* grad, float* momentum, float* out, float share, i64 numel) {
    change(grad, momentum, out, share, numel);
}

__global__ void tracking_change_bf16(const Bfloat* grad, float* momentum, float* out, float share, i64 numel) {
    change(grad, momentum, out, share, numel);
}

__global__ void tracking_follow(float* estimate, float* mean, i64 numel) {
    each_element(mean, estimate, mean, numel, [](float& mean, float& estimate) {
        const float total = estimate + mean;
        const bool sound = is_finite(total);
        estimate = sound ? total : estimate;
        mean = sound ? total : __int_as_float(NOT_A_NUMBER);
    });
}

__global__ void magnitudes_divide_f32(const float* grad, float* magnitudes, float* out, i64 numel) {
    divide(grad, magnitudes, out, numel);
}

__global__ void magnitudes_divide_f16(const Half* grad, float* magnitudes, float* out, i64 numel) {
    divide(grad, magnitudes, out, numel);
}

__global__ void magnitudes_divide_bf16(const Bfloat* grad, float* magnitudes, float* out, i64 numel) {
    divide(grad, magnitudes, out, numel);
}

__global__ void magnitudes_multiply(float* mean, float* magnitudes, float beta, float share, i64 numel) {
    each_row<true>(mean, magnitudes, mean, numel, [=](float(&x)[SLOTS], float(&m)[SLOTS]) {
        const float factor = scale_factor(m);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            x[j] = x[j] * (m[j] * factor + 1.0f);
            const float now = sqrtf(m[j] * m[j] * beta + x[j] * x[j] * share);
            if (is_finite(now)) m[j] = now;
        }
    });
}

__global__ void momentum_enter_f32(const float* grad, float* momentum, float* out, float beta, int nesterov,
                                   i64 numel) {
    enter(grad, momentum, out, beta, nesterov, numel);
}

__global__ void momentum_enter_f16(const Half* grad, float* momentum, float* out, float beta, int nesterov, i64 numel) {
    enter(grad, momentum, out, beta, nesterov, numel);
}

__global__ void momentum_enter_bf16(const Bfloat* grad, float* momentum, float* out, float beta, int nesterov,
                                    i64 numel) {
    enter(grad, momentum, out, beta, nesterov, numel);
}
}

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

template <class T, class F>
__device__ inline void each_element(const T* grad, float* momentum, float* out, i64 numel, F enter) {
    const bool aligned = is_aligned(grad), momentum_aligned = is_aligned(momentum), out_aligned = is_aligned(out);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float g[SLOTS], m[SLOTS];
        load8(grad, aligned, begin, numel, g);
        load8(momentum, momentum_aligned, begin, numel, m);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) enter(g[j], m[j]);
        store8(momentum, momentum_aligned, begin, numel, m);
        store8(out, out_aligned, begin, numel, g);
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
__device__ inline void divide(const T* grad, const float* magnitudes, float* out, i64 numel) {
    const bool aligned = is_aligned(grad), magnitudes_aligned = is_aligned(magnitudes), out_aligned = is_aligned(out);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float g[SLOTS], m[SLOTS];
        load8(grad, aligned, begin, numel, g);
        load8(magnitudes, magnitudes_aligned, begin, numel, m);
        const float factor = scale_factor(m);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) g[j] = g[j] / (m[j] * factor + 1.0f);
        store8(out, out_aligned, begin, numel, g);
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

__global__ void magnitudes_divide_f32(const float* grad, const float* magnitudes, float* out, i64 numel) {
    divide(grad, magnitudes, out, numel);
}

__global__ void magnitudes_divide_f16(const Half* grad, const float* magnitudes, float* out, i64 numel) {
    divide(grad, magnitudes, out, numel);
}

__global__ void magnitudes_divide_bf16(const Bfloat* grad, const float* magnitudes, float* out, i64 numel) {
    divide(grad, magnitudes, out, numel);
}

__global__ void magnitudes_multiply(float* mean, float* magnitudes, float beta, float share, i64 numel) {
    const bool aligned = is_aligned(mean), magnitudes_aligned = is_aligned(magnitudes);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float x[SLOTS], m[SLOTS];
        load8(mean, aligned, begin, numel, x);
        load8(magnitudes, magnitudes_aligned, begin, numel, m);
        const float factor = scale_factor(m);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            x[j] = x[j] * (m[j] * factor + 1.0f);
            const float now = sqrtf(m[j] * m[j] * beta + x[j] * x[j] * share);
            if (is_finite(now)) m[j] = now;
        }
        store8(mean, aligned, begin, numel, x);
        store8(magnitudes, magnitudes_aligned, begin, numel, m);
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

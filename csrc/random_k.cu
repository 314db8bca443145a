// RandomK: wire = seed (8 bytes), step, bucket; then the values of k elements, one of each of k pieces of equal length.
// compress/backends/random_k.py has the same in torch, which every byte equals.
//
// To encode passes over the gradient twice with a residual, once without: only when all of it has been seen to be finite
// may a residual take it in. Decoding touches k elements, since pieces are the same on all ranks: a thread has a piece of
// its own, and adds what every rank says there, in their order.
#include "philox.cuh"

// The element that is drawn of piece i.
__device__ inline i64 drawn(const u32* words, i64 numel, i64 k, i64 i) {
    u32 c[4] = {(u32)(i / 4), words[3], words[2], 0};
    philox(c, words[0], words[1]);
    const i64 start = i * numel / k, length = (i + 1) * numel / k - start;
    const u32 word = i & 2 ? (i & 1 ? c[3] : c[2]) : (i & 1 ? c[1] : c[0]);  // an index would put them on the stack
    return start + (i64)(((u64)word * (u64)length) >> 32);
}

// f(begin, the sums of eight elements of x and residual), by all warps, a row of elements each.
template <class T, class F>
__device__ inline void each_sum(const T* x, const float* residual, i64 numel, F f) {
    const bool aligned = is_aligned(x), residual_aligned = is_aligned(residual);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float v[SLOTS], old[SLOTS];
        load8(x, aligned, begin, numel, v);
        if (residual != nullptr) {
            load8(residual, residual_aligned, begin, numel, old);
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) v[j] = v[j] + old[j];
        }
        f(begin, v);
    });
}

template <class T>
__device__ inline void check(const T* x, const float* residual, u32* odd, i64 numel) {
    bool bad = false;
    each_sum(x, residual, numel, [&](i64, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) bad |= !is_finite(v[j]);
    });
    if (bad) atomicOr(odd, 1u);
}

template <class T>
__device__ inline void enter(const T* x, float* residual, const u32* odd, i64 numel) {
    if (odd[0] != 0) return;
    const bool aligned = is_aligned(residual);
    each_sum(x, residual, numel, [&](i64 begin, const float(&v)[SLOTS]) { store8(residual, aligned, begin, numel, v); });
}

template <class T>
__device__ inline void read(const T* x, u8* wire, const u32* odd, i64 numel, i64 k) {
    for (i64 i = first_thread(); i < k; i += all_threads())
        ((float*)wire)[4 + i] =
            odd[0] != 0 ? __int_as_float(NOT_A_NUMBER) : to_float(x[drawn((const u32*)wire, numel, k, i)]);
}

template <class T>
__device__ inline void mean(const float* total, T* out, const u32* odd, int ranks, float scale, i64 numel) {
    bool bad = false;
    for (int rank = 0; rank < ranks; ++rank) bad |= odd[rank] != 0;
    const bool aligned = is_aligned(total), out_aligned = is_aligned(out);
    each_block(numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        float v[SLOTS];
        load8(total, aligned, begin, numel, v);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = bad ? __int_as_float(NOT_A_NUMBER) : v[j] * scale;
        store8(out, out_aligned, begin, numel, v);
    });
}

extern "C" {

// Which elements these are, to the wire; `odd` is cleared.
__global__ void random_k_begin(const i64* draw, u8* wire, u32* odd) {
    if (first_thread() != 0) return;
    u32* const words = (u32*)wire;
    words[0] = (u32)draw[0], words[1] = (u32)((u64)draw[0] >> 32), words[2] = (u32)draw[1], words[3] = (u32)draw[2];
    odd[0] = 0;
}

// Whether anything is not finite, to `odd`. residual: float32, or null.
__global__ void random_k_check_f32(const float* x, const float* residual, u32* odd, i64 numel) {
    check(x, residual, odd, numel);
}

__global__ void random_k_check_f16(const Half* x, const float* residual, u32* odd, i64 numel) {
    check(x, residual, odd, numel);
}

__global__ void random_k_check_bf16(const Bfloat* x, const float* residual, u32* odd, i64 numel) {
    check(x, residual, odd, numel);
}

// The residual takes x in, unless anything is odd.
__global__ void random_k_enter_f32(const float* x, float* residual, const u32* odd, i64 numel) {
    enter(x, residual, odd, numel);
}

__global__ void random_k_enter_f16(const Half* x, float* residual, const u32* odd, i64 numel) {
    enter(x, residual, odd, numel);
}

__global__ void random_k_enter_bf16(const Bfloat* x, float* residual, const u32* odd, i64 numel) {
    enter(x, residual, odd, numel);
}

// The values of what is drawn, out of the residual; of -0 the sign stays there.
__global__ void random_k_take(float* residual, u8* wire, const u32* odd, i64 numel, i64 k) {
    float* const values = (float*)wire + 4;
    for (i64 i = first_thread(); i < k; i += all_threads()) {
        if (odd[0] != 0) {
            values[i] = __int_as_float(NOT_A_NUMBER);
            continue;
        }
        float* const place = residual + drawn((const u32*)wire, numel, k, i);
        const float v = *place;
        values[i] = v;
        *place = v - (v + 0.0f);
    }
}

__global__ void random_k_read_f32(const float* x, u8* wire, const u32* odd, i64 numel, i64 k) {
    read(x, wire, odd, numel, k);
}

__global__ void random_k_read_f16(const Half* x, u8* wire, const u32* odd, i64 numel, i64 k) {
    read(x, wire, odd, numel, k);
}

__global__ void random_k_read_bf16(const Bfloat* x, u8* wire, const u32* odd, i64 numel, i64 k) {
    read(x, wire, odd, numel, k);
}

// out += alpha · values, of each rank in turn. `odd`: a word for each rank, zero before; which have a value that is not
// finite, as status[1] counts.
__global__ void random_k_add(float* out, i64 numel, i64 k, float alpha, const u8* words, i64 words_pitch,
                             const u8* values, i64 values_pitch, int ranks, u32* odd, i64* status) {
    for (i64 i = first_thread(); i < k; i += all_threads()) {
        for (int rank = 0; rank < ranks; ++rank) {
            const float v = ((const float*)(values + rank * values_pitch))[i];
            const i64 at = drawn((const u32*)(words + rank * words_pitch), numel, k, i);
            out[at] = out[at] + alpha * v;
            if (!is_finite(v) && atomicOr(odd + rank, 1u) == 0) atomicAdd((u64*)status + 1, 1ull);
        }
    }
}

// If a rank's values are odd, all of the sum is NaN.
__global__ void random_k_spoil(float* out, i64 numel, const u32* odd) {
    if (odd[0] == 0) return;
    for (i64 i = first_thread(); i < numel; i += all_threads()) out[i] = __int_as_float(NOT_A_NUMBER);
}

// out = total · scale; `total` may be `out`.
__global__ void random_k_mean_f32(const float* total, float* out, const u32* odd, int ranks, float scale, i64 numel) {
    mean(total, out, odd, ranks, scale, numel);
}

__global__ void random_k_mean_f16(const float* total, Half* out, const u32* odd, int ranks, float scale, i64 numel) {
    mean(total, out, odd, ranks, scale, numel);
}

__global__ void random_k_mean_bf16(const float* total, Bfloat* out, const u32* odd, int ranks, float scale,
                                   i64 numel) {
    mean(total, out, odd, ranks, scale, numel);
}
}

// Cast and Identity: the elements themselves in another format, S. A row of 256 stands in for the block.
#include "common.cuh"

template <class T, class S>
__device__ void cast_encode_as(const T* x, float* residual, S* wire, i64 numel) {
    const bool aligned = is_aligned(wire), residual_aligned = is_aligned(residual);
    each_block(numel, ROW, [&](i64 b) {
        const Block<1, T> a(x, residual, b * ROW, numel, ROW);
        const i64 begin = a.at(0);
        store8(wire, aligned, begin, numel, a.kept[0]);
        if (residual == nullptr) return;
        float rest[SLOTS];
        load8(residual, residual_aligned, begin, numel, rest);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            S sent;
            from_float(a.kept[0][j], sent);
            const float decoded = to_float(sent) + 0.0f;  // as a sum that begins with zero has it
            if (is_finite(decoded) && is_finite(a.kept[0][j])) rest[j] = a.kept[0][j] - decoded;
        }
        store8(residual, residual_aligned, begin, numel, rest);
    });
    // An odd number of halves leaves two bytes of the last record.
    if (sizeof(S) == 2 && numel % 2 == 1 && blockIdx.x == 0 && threadIdx.x == 0) ((u16*)wire)[numel] = 0;
}

template <class T>
__device__ void cast_encode(const T* x, float* residual, u8* wire, i64 numel, int stored) {
    if (stored == 0) cast_encode_as(x, residual, (float*)wire, numel);
    if (stored == 1) cast_encode_as(x, residual, (Half*)wire, numel);
    if (stored == 2) cast_encode_as(x, residual, (Bfloat*)wire, numel);
}

template <class T, class S>
__device__ void cast_decode_as(const Target<T>& target, const u8* wires, i64 pitch, int ranks, i64* status) {
    int not_finite = 0;
    each_block(target.numel, ROW, [&](i64 b) {
        const i64 begin = b * ROW + threadIdx.x % WARP * SLOTS;
        target.accumulate(begin, [&](float(&sums)[SLOTS]) {
            for (int rank = 0; rank < ranks; ++rank) {
                const S* const wire = (const S*)(wires + rank * pitch);
                float v[SLOTS];
                load8(wire, is_aligned(wire), begin, target.numel, v);
#pragma unroll
                for (int j = 0; j < SLOTS; ++j) {
                    not_finite += !is_finite(v[j]);
                    sums[j] = sums[j] + target.alpha * v[j];
                }
            }
        });
    });
    report(status, 0, not_finite);
}

template <class T>
__device__ void cast_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, int stored, i64* status) {
    if (stored == 0) cast_decode_as<T, float>(target, wires, pitch, ranks, status);
    if (stored == 1) cast_decode_as<T, Half>(target, wires, pitch, ranks, status);
    if (stored == 2) cast_decode_as<T, Bfloat>(target, wires, pitch, ranks, status);
}

extern "C" {

// stored: 0 for float32, 1 for float16, 2 for bfloat16.
__global__ void cast_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int stored) {
    cast_encode(x, residual, wire, numel, stored);
}

__global__ void cast_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int stored) {
    cast_encode(x, residual, wire, numel, stored);
}

__global__ void cast_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int stored) {
    cast_encode(x, residual, wire, numel, stored);
}

__global__ void cast_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int stored, i64* status) {
    cast_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, stored, status);
}

__global__ void cast_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int stored, i64* status) {
    cast_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, stored, status);
}

__global__ void cast_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                 int ranks, int stored, i64* status) {
    cast_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, stored, status);
}
}

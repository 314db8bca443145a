// What Outliers does besides its two codecs: entries are taken out of a gradient, and put in the place of what the inner
// code says there. Each launch works on the entries of one rank.
#include "checked.cuh"

// target[index] = -x[index], or zero where x is null, for the entries whose value is finite.
template <class T>
__device__ void take_out(const u32* row, const float* values, const T* x, float* target) {
    const i64 count = row[0];
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        const i64 index = row[1 + i];
        if (is_finite(values[i])) target[index] = x == nullptr ? 0.0f : 0.0f - to_float(x[index]);
    }
}

extern "C" {

__global__ void outliers_take_f32(const u32* row, const float* values, const float* x, float* target) {
    take_out(row, values, x, target);
}

__global__ void outliers_take_f16(const u32* row, const float* values, const Half* x, float* target) {
    take_out(row, values, x, target);
}

__global__ void outliers_take_bf16(const u32* row, const float* values, const Bfloat* x, float* target) {
    take_out(row, values, x, target);
}

// values[i] = out[index] + alpha · values[i], for the entries of `rank` that count.
__global__ void outliers_add_to_values(const float* out, float alpha, const u8* rows, i64 pitch, float* values,
                                       int rank, int k, const u32* broken, const int* reach, i64* status) {
    const Entries entries(rows, pitch, (const u8*)values, 0, rank, k, broken, reach);
    int not_finite = 0;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < entries.count(k); i += (i64)gridDim.x * blockDim.x) {
        i64 index;
        if (!entries.at(i, index)) continue;
        not_finite += !is_finite(values[i]);
        values[i] = out[index] + alpha * values[i];
    }
    report(status, 0, not_finite);
}

// out[index] = values[i].
__global__ void outliers_put(float* out, const u8* rows, i64 pitch, const float* values, int rank, int k,
                             const u32* broken, const int* reach) {
    const Entries entries(rows, pitch, (const u8*)values, 0, rank, k, broken, reach);
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < entries.count(k); i += (i64)gridDim.x * blockDim.x) {
        i64 index;
        if (entries.at(i, index)) out[index] = values[i];
    }
}
}

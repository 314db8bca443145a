// Outliers: record = entries as of ChunkedTopK, then the inner code's records, which its own kernels make. A block of
// threads takes a chunk at a time, or a record. Entries lie in lists, k for each chunk: where they are in it, -1 where
// there is none, and values.
#include "chunk.cuh"

// The entries of a chunk to its record and to the lists: where they are, and what is left of their values. The inner
// code shall see zero there: target[index] = -x[index] where the target is the residual, else 0.
template <int ROWS, class T>
__device__ void pick_chunk(const T* x, const float* residual, float* target, u8* wire, i64 record_bytes, int* index,
                           float* left, i64 numel, const Form& form, i64 b, Selection& shared, int& turn, int& guess) {
    const i64 start = b * form.chunk;
    const Block<ROWS, T, THREADS> a(x, residual, start, numel, form.chunk);
    const int count = choose(a, start, form, shared, turn, guess);
    __syncthreads();
    u32* const record = (u32*)(wire + b * record_bytes);
    for (int i = threadIdx.x; i < form.words(); i += THREADS) record[i] = shared.record[i];
    for (int i = threadIdx.x; i < form.k; i += THREADS) {
        index[b * form.k + i] = i < count ? shared.index[i] : -1;
        if (i >= count) continue;
        const i64 at = start + shared.index[i];
        left[b * form.k + i] = shared.value[i];
        target[at] = residual == nullptr ? 0.0f : 0.0f - to_float(x[at]);
    }
    __syncthreads();  // before the next chunk
}

template <class T>
__device__ void pick(const T* x, const float* residual, float* target, u8* wire, i64 record_bytes, int* index,
                     float* left, i64 numel, const Form& form) {
    Selection& shared = shared_selection();
    int turn = 0, guess = 0;
    for (i64 b = blockIdx.x; b * form.chunk < numel; b += gridDim.x) {
        if (form.chunk == TILE)
            pick_chunk<KEPT>(x, residual, target, wire, record_bytes, index, left, numel, form, b, shared, turn, guess);
        else
            pick_chunk<0>(x, residual, target, wire, record_bytes, index, left, numel, form, b, shared, turn, guess);
    }
}

extern "C" {

__global__ void outliers_pick_f32(const float* x, const float* residual, float* target, u8* wire, i64 record_bytes,
                                  int* index, float* left, i64 numel, int chunk, int k, int bits, int low_bits,
                                  int upper_words, int low_words) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    pick(x, residual, target, wire, record_bytes, index, left, numel, form);
}

__global__ void outliers_pick_f16(const Half* x, const float* residual, float* target, u8* wire, i64 record_bytes,
                                  int* index, float* left, i64 numel, int chunk, int k, int bits, int low_bits,
                                  int upper_words, int low_words) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    pick(x, residual, target, wire, record_bytes, index, left, numel, form);
}

__global__ void outliers_pick_bf16(const Bfloat* x, const float* residual, float* target, u8* wire, i64 record_bytes,
                                   int* index, float* left, i64 numel, int chunk, int k, int bits, int low_bits,
                                   int upper_words, int low_words) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    pick(x, residual, target, wire, record_bytes, index, left, numel, form);
}

// The entries of the ranks' wires to the lists, so many from one rank's to the next: those that count.
__global__ void outliers_list(const u8* wires, i64 pitch, int ranks, i64 record_bytes, int* index, float* value,
                              i64 entries, i64 numel, int chunk, int k, int bits, int low_bits, int upper_words,
                              int low_words, i64* status) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    int skipped = 0, not_finite = 0;
    for (i64 b = blockIdx.x; b * chunk < numel; b += gridDim.x) {
        const int n = (int)min((i64)chunk, numel - b * chunk);
        for (int rank = 0; rank < ranks; ++rank) {
            const Record record(form, (const u32*)(wires + rank * pitch + b * record_bytes));
            const bool sound = bits >= 16 || (is_finite(record.smallest) && is_finite(record.largest));
            const i64 first = rank * entries + b * k;
            for (int i = threadIdx.x; i < k; i += THREADS) index[first + i] = -1;
            __syncthreads();
            for (int place = threadIdx.x; place < 32 * upper_words; place += THREADS) {
                if (!record.is_set(place)) continue;
                const int i = record.entries_before(place), at = i < k ? record.position(place, i) : n;
                if (!record.counts(place, i, at, n)) {
                    ++skipped;
                    continue;
                }
                const float v = sound ? record.value(i) : __int_as_float(NOT_A_NUMBER);
                not_finite += !is_finite(v);
                index[first + i] = at, value[first + i] = v;
            }
        }
    }
    report(status, skipped, not_finite);
}

// values[i] = out[index] + alpha · values[i], for k entries of each chunk.
__global__ void outliers_add_to_values(const float* out, float alpha, const int* index, float* values, i64 entries,
                                       int chunk, int k) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < entries; i += (i64)gridDim.x * blockDim.x)
        if (index[i] >= 0) values[i] = out[i / k * chunk + index[i]] + alpha * values[i];
}

// out[index] = values[i].
__global__ void outliers_put(float* out, const int* index, const float* values, i64 entries, int chunk, int k) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < entries; i += (i64)gridDim.x * blockDim.x)
        if (index[i] >= 0) out[i / k * chunk + index[i]] = values[i];
}
}

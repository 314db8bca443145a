// ChunkedTopK: record = two levels (float32) unless values are floats, then indices as Elias and Fano pack them, then
// values. A block of threads takes a chunk at a time: of 4096 elements each thread has 16, in registers; of another size
// it reads them again for every pass.
#include "chunk.cuh"

// ---- encoding

template <int ROWS, class T>
__device__ void encode_chunk(const T* x, float* residual, u8* wire, i64 numel, const Form& form, i64 b,
                             Selection& shared, int& turn, int& guess) {
    const i64 start = b * form.chunk;
    const Block<ROWS, T, THREADS> a(x, residual, start, numel, form.chunk);
    const int count = choose(a, start, form, shared, turn, guess), words = form.words();
    const bool sound = count >= 0;
    if (!sound && threadIdx.x == 0) {
        if (form.bits < 16)
            shared.record[0] = shared.record[1] = NOT_A_NUMBER;
        else
            shared.record[form.codes()] = form.bits == 16 ? 0x7FC0 : NOT_A_NUMBER;
    }
    if (sound && residual != nullptr) {
        a.each_row([&](int row, const float(&v)[SLOTS]) {
            store8(residual, a.residual_aligned, a.at(row), a.end, v);
        });
    }
    __syncthreads();
    u32* const record = (u32*)wire + b * words;
    for (int i = threadIdx.x; i < words; i += THREADS) record[i] = shared.record[i];
    if (sound && residual != nullptr)
        for (int i = threadIdx.x; i < count; i += THREADS) residual[start + shared.index[i]] = shared.value[i];
    __syncthreads();  // before the next chunk
}

template <class T>
__device__ void chunked_encode(const T* x, float* residual, u8* wire, i64 numel, const Form& form) {
    Selection& shared = shared_selection();
    int turn = 0, guess = 0;
    for (i64 b = blockIdx.x; b * form.chunk < numel; b += gridDim.x) {
        if (form.chunk == TILE)
            encode_chunk<KEPT>(x, residual, wire, numel, form, b, shared, turn, guess);
        else
            encode_chunk<0>(x, residual, wire, numel, form, b, shared, turn, guess);
    }
}

// ---- decoding

// Elements that are added up at a time.
__device__ inline float* shared_sums() {
    __shared__ float sums[TILE];
    return sums;
}

template <class T>
__device__ void chunked_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, const Form& form,
                               i64* status) {
    float* const sums = shared_sums();
    const int words = form.words();
    int skipped = 0, not_finite = 0;
    for (i64 b = blockIdx.x; b * form.chunk < target.numel; b += gridDim.x) {
        const i64 start = b * form.chunk;
        const int n = (int)min((i64)form.chunk, target.numel - start);
        for (int tile = 0; tile < n; tile += TILE) {
            const int end = min(tile + TILE, n);
            // Eight elements are one thread's but while entries are added.
            for (int row = 0; row < KEPT; ++row) {
                const int at = row * SPAN + threadIdx.x * SLOTS;
                if (tile + at >= end) break;
                float v[SLOTS];
                target.begin(start + tile + at, v);
#pragma unroll
                for (int j = 0; j < SLOTS; ++j) sums[at + j] = v[j];
            }
            for (int rank = 0; rank < ranks; ++rank) {
                const Record record(form, (const u32*)(wires + rank * pitch) + b * words);
                const bool sound = record.is_sound();
                __syncthreads();
                if (!sound) {
                    not_finite += threadIdx.x == 0 && tile == 0;
                    for (int at = tile + threadIdx.x; at < end; at += THREADS)
                        sums[at - tile] = __int_as_float(NOT_A_NUMBER);
                    continue;
                }
                for (int place = threadIdx.x; place < 32 * form.upper_words; place += THREADS) {
                    if (!record.is_set(place)) continue;
                    const int i = record.entries_before(place);
                    const int at = i < form.k ? record.position(place, i) : n;
                    if (!record.counts(place, i, at, n)) {
                        skipped += tile == 0;
                    } else if (at >= tile && at < end) {
                        sums[at - tile] = sums[at - tile] + target.alpha * record.value(i);
                    }
                }
            }
            __syncthreads();
            for (int row = 0; row < KEPT; ++row) {
                const int at = row * SPAN + threadIdx.x * SLOTS;
                if (tile + at >= end) break;
                float v[SLOTS];
#pragma unroll
                for (int j = 0; j < SLOTS; ++j) v[j] = sums[at + j];
                target.end(start + tile + at, v);
            }
        }
    }
    report(status, skipped, not_finite);
}

extern "C" {

// x: numel elements. residual: float32, updated in place, or null. The rest says how records are laid out.
__global__ void chunked_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int chunk, int k, int bits,
                                   int low_bits, int upper_words, int low_words) {
    chunked_encode(x, residual, wire, numel, Form{chunk, k, bits, low_bits, upper_words, low_words});
}

__global__ void chunked_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int chunk, int k, int bits,
                                   int low_bits, int upper_words, int low_words) {
    chunked_encode(x, residual, wire, numel, Form{chunk, k, bits, low_bits, upper_words, low_words});
}

__global__ void chunked_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int chunk, int k, int bits,
                                    int low_bits, int upper_words, int low_words) {
    chunked_encode(x, residual, wire, numel, Form{chunk, k, bits, low_bits, upper_words, low_words});
}

__global__ void chunked_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                   i64 pitch, int ranks, int chunk, int k, int bits, int low_bits, int upper_words,
                                   int low_words, i64* status) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    chunked_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, form, status);
}

__global__ void chunked_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                   int ranks, int chunk, int k, int bits, int low_bits, int upper_words, int low_words,
                                   i64* status) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    chunked_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, form, status);
}

__global__ void chunked_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                    i64 pitch, int ranks, int chunk, int k, int bits, int low_bits, int upper_words,
                                    int low_words, i64* status) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    chunked_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, form, status);
}
}

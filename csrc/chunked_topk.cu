// ChunkedTopK: record = two levels (float32) unless values are floats, then indices as Elias and Fano pack them, then
// values. A block of threads takes a chunk at a time: of 4096 elements each thread has 16, in registers; of another size
// it reads them again for every pass. What is selected lies in shared memory, where the record is put together.
//
// The threshold is searched by counting what is above a key, from the one of the last chunk: a dozen times or so, each
// an instruction or two an element, while other blocks wait for memory.
#include "record.cuh"

constexpr int WARPS = THREADS / WARP, SPAN = THREADS * SLOTS;
constexpr int KEPT = 2, TILE = KEPT * SPAN;   // rows that stay in registers; elements that are added up at a time
constexpr int MOST_ENTRIES = 1024;            // of a chunk
constexpr int MOST_WORDS = 320 + MOST_ENTRIES;  // of a record: levels, 288 words of indices at most, values
constexpr int MOST_UPPER = 288;  // words of upper bits: all of a record's indices
constexpr int CHUNK_STEPS = 4, OUTLOOK = 1 << 19;

// ---- encoding

// What the threads of a block share. Sums are taken in turns, so that one barrier serves each.
struct Selection {
    u32 record[MOST_WORDS];
    int index[MOST_ENTRIES];
    float value[MOST_ENTRIES];  // then what of it is not sent
    float smallest, largest;
    u32 warps[WARP];
    int sums[2][WARPS];
};

// Whatever the kernel, it is the same shared memory.
__device__ inline Selection& shared_selection() {
    __shared__ Selection selection;
    return selection;
}

__device__ inline float* shared_sums() {
    __shared__ float sums[TILE];
    return sums;
}

// What the warps have, to every thread.
__device__ inline const int (&exchange(int v, Selection& shared, int& turn))[WARPS] {
    turn ^= 1;
    if (threadIdx.x % WARP == 0) shared.sums[turn][threadIdx.x / WARP] = v;
    __syncthreads();
    return shared.sums[turn];
}

template <class A>
__device__ inline int largest_key(const A& a, Selection& shared, int& turn) {
    int largest = 0;
    for (const int of_warp : exchange(largest_bits(a), shared, turn)) largest = max(largest, of_warp);
    return largest;
}

template <class A>
__device__ inline int count_from(const A& a, int key, Selection& shared, int& turn) {
    int count = 0;
    a.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) count += magnitude_bits(v[j]) >= key;
    });
    int total = 0;
    for (const int of_warp : exchange(warp_sum(count), shared, turn)) total += of_warp;
    return total;
}

// The key above which everything is selected, and how many of those equal to it; no zero.
template <class A>
__device__ int kth_key(const A& a, int k, int largest, int guess, Selection& shared, int& turn, int& ties) {
    int low = 0, high = largest + 1, above = 0, width = OUTLOOK;  // k or more from low on, fewer from high on: `above`
    int probe = guess > 0 && guess < high ? guess : max(largest - (1 << 23), high / 2);  // half of the largest
    ties = 0;
    while (high - low > 1) {
        const int count = count_from(a, probe, shared, turn);
        if (count == k) return probe - 1;
        if (count > k) {
            low = probe, probe += min(width, high - probe);
        } else {
            high = probe, above = count, probe -= min(width, probe - low);
        }
        width = min(width * 4, 1 << 28);
        if ((low > 0 && high <= largest) || probe <= low || probe >= high) probe = low + (high - low) / 2;
    }
    if (low > 0) ties = k - above;
    return low;
}

// Lists what is selected, in order; returns how many.
template <class A>
__device__ int list(const A& a, i64 start, int key, int ties, Selection& shared) {
    int all_above = 0, all_equal = 0;
    a.each_row([&](int row, const float(&v)[SLOTS]) {
        u32 mine = 0, total;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const int found = magnitude_bits(v[j]);
            mine += found > key ? 1u << 16 : found == key ? 1u : 0u;
        }
        const u32 before = scan(mine, total, shared.warps);
        int above = all_above + (int)(before >> 16), equal = all_equal + (int)(before & 0xFFFF);
        if (mine != 0) {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const int found = magnitude_bits(v[j]);
                if (found > key || (found == key && equal < ties)) {
                    const int entry = above + min(equal, ties);
                    shared.index[entry] = (int)(a.at(row) - start) + j;
                    shared.value[entry] = v[j];
                }
                above += found > key, equal += found == key;
            }
        }
        all_above += (int)(total >> 16), all_equal += (int)(total & 0xFFFF);
    });
    return all_above + min(all_equal, ties);
}

// The levels of what is listed, which zeros follow to the end of a row. One warp's work; every lane has them.
__device__ inline void fit(const Selection& shared, int count, int bits, float& smallest, float& largest) {
    const int lane = threadIdx.x % WARP;
    int most = 0, least = 0;
    for (int i = lane; i < count; i += WARP) {
        const int key = magnitude_bits(shared.value[i]);
        most = max(most, key), least = max(least, MAGNITUDE - key);
    }
    smallest = count > 0 ? __int_as_float(MAGNITUDE - warp_max(least)) : 0.0f;
    largest = __int_as_float(warp_max(most));
    if (bits != 2 || count == 0) return;
    for (int step = 0; step < CHUNK_STEPS; ++step) {
        const float middle = smallest * 0.5f + largest * 0.5f;
        float lower[SLOTS] = {}, upper[SLOTS] = {};
        int uppers = 0;
        for (int row = 0; row < count; row += ROW) {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const float v = fabsf(shared.value[row + lane * SLOTS + j]);
                uppers += v > middle;
                lower[j] = lower[j] + (v > middle ? 0.0f : v);
                upper[j] = upper[j] + (v > middle ? v : 0.0f);
            }
        }
        uppers = warp_sum(uppers);
        const float below = fold(lower), beyond = fold(upper);
        if (uppers < count) smallest = below / (float)(count - uppers);
        if (uppers > 0) largest = beyond / (float)uppers;
    }
}

// Entry i into the record; what of its value is not sent stays in the list.
__device__ inline void put(const Form& form, int i, Selection& shared) {
    const u32 at = (u32)shared.index[i], place = (at >> form.low_bits) + i;
    atomicOr(shared.record + form.upper() + place / 32, 1u << place % 32);
    if (form.low_bits > 0) {
        const u32 bits = at & ((1u << form.low_bits) - 1), shift = (u32)(i * form.low_bits) % 32;
        u32* const word = shared.record + form.low() + i * form.low_bits / 32;
        atomicOr(word, bits << shift);
        if (shift + form.low_bits > 32) atomicOr(word + 1, bits >> (32 - shift));
    }
    const float v = shared.value[i];
    u32 code;
    float decoded = v;
    if (form.bits == 32) {
        code = __float_as_uint(v);
    } else if (form.bits == 16) {
        Bfloat half;
        from_float(v, half);
        half.bits -= (half.bits & 0x7FFF) == 0x7F80;
        code = half.bits, decoded = to_float(half);
    } else {
        const float step = step_of(shared.smallest, shared.largest, form.top());
        float y = step > 0.0f ? (fabsf(v) - shared.smallest) / step + 0.5f : 0.0f;
        y = y >= (float)form.top() ? (float)form.top() : y > 0.0f ? y : 0.0f;
        const int level = __float2int_rz(y);
        const float magnitude = level_at(level, shared.smallest, shared.largest, step);
        code = (u32)level | (v < 0.0f ? 1u << (form.bits - 1) : 0u);
        decoded = v < 0.0f ? -magnitude : magnitude;
    }
    atomicOr(shared.record + form.codes() + i * form.bits / 32, code << (i * form.bits) % 32);
    shared.value[i] = v - decoded;
}

template <int ROWS, class T>
__device__ void encode_chunk(const T* x, float* residual, u8* wire, i64 numel, const Form& form, i64 b,
                             Selection& shared, int& turn, int& guess) {
    const i64 start = b * form.chunk;
    const Block<ROWS, T, THREADS> a(x, residual, start, numel, form.chunk);
    const int words = form.words();
    for (int i = threadIdx.x; i < words; i += THREADS) shared.record[i] = 0;
    for (int i = threadIdx.x; i < MOST_ENTRIES; i += THREADS) shared.value[i] = 0.0f;
    const int largest = largest_key(a, shared, turn);
    bool sound = largest < INFINITE;
    int count = 0;
    if (sound) {
        int ties;
        const int key = kth_key(a, form.k, largest, guess, shared, turn, ties);
        if (key > 0) guess = key;
        count = list(a, start, key, ties, shared);
        __syncthreads();
        if (form.bits < 16) {
            if (threadIdx.x < WARP) {
                float smallest, largest;
                fit(shared, count, form.bits, smallest, largest);
                if (threadIdx.x == 0) shared.smallest = smallest, shared.largest = largest;
            }
            __syncthreads();
            sound = is_finite(shared.smallest) && is_finite(shared.largest);
        }
    }
    if (sound) {
        for (int i = threadIdx.x; i < count; i += THREADS) put(form, i, shared);
        if (threadIdx.x == 0 && form.bits < 16) {
            shared.record[0] = __float_as_uint(shared.smallest);
            shared.record[1] = __float_as_uint(shared.largest);
        }
    } else if (threadIdx.x == 0) {
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
__device__ void chunked_topk_encode(const T* x, float* residual, u8* wire, i64 numel, const Form& form) {
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

template <class T>
__device__ void chunked_topk_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, const Form& form,
                               i64* status) {
    __shared__ u16 before[WARPS][MOST_UPPER];  // of as many ranks as there are warps to count
    float* const sums = shared_sums();
    const int words = form.words(), warp = threadIdx.x / WARP;
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
                const auto record_of = [&](int r) { return Record(form, (const u32*)(wires + r * pitch) + b * words); };
                if (rank % WARPS == 0) {
                    __syncthreads();
                    if (rank + warp < ranks) record_of(rank + warp).count_before(before[warp]);
                }
                const Record record = record_of(rank);
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
                    const int i = record.entries_before(place, before[rank % WARPS]);
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
__global__ void chunked_topk_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int chunk, int k, int bits,
                                   int low_bits, int upper_words, int low_words) {
    chunked_topk_encode(x, residual, wire, numel, Form{chunk, k, bits, low_bits, upper_words, low_words});
}

__global__ void chunked_topk_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int chunk, int k, int bits,
                                   int low_bits, int upper_words, int low_words) {
    chunked_topk_encode(x, residual, wire, numel, Form{chunk, k, bits, low_bits, upper_words, low_words});
}

__global__ void chunked_topk_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int chunk, int k, int bits,
                                    int low_bits, int upper_words, int low_words) {
    chunked_topk_encode(x, residual, wire, numel, Form{chunk, k, bits, low_bits, upper_words, low_words});
}

__global__ void chunked_topk_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                   i64 pitch, int ranks, int chunk, int k, int bits, int low_bits, int upper_words,
                                   int low_words, i64* status) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    chunked_topk_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, form, status);
}

__global__ void chunked_topk_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                   int ranks, int chunk, int k, int bits, int low_bits, int upper_words, int low_words,
                                   i64* status) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    chunked_topk_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, form, status);
}

__global__ void chunked_topk_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                    i64 pitch, int ranks, int chunk, int k, int bits, int low_bits, int upper_words,
                                    int low_words, i64* status) {
    const Form form{chunk, k, bits, low_bits, upper_words, low_words};
    chunked_topk_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, form, status);
}
}

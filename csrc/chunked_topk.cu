// ChunkedTopK: record = two levels (float32) unless values are floats, then indices as Elias and Fano pack them, then
// values. A block of threads takes a chunk at a time: of 4096 elements each thread has 16, in registers, and writes what
// is not sent of them once; of another size it reads them again for every pass. What is selected lies in shared memory,
// where the record is put together.
//
// The threshold is found digit by digit, by counting in shared memory: two digits nearly always do.
#include "record.cuh"

constexpr int WARPS = THREADS / WARP, SPAN = THREADS * SLOTS;
constexpr int KEPT = 2, TILE = KEPT * SPAN;   // rows that stay in registers; elements that are added up at a time
constexpr int MOST_ENTRIES = 1024;            // of a chunk
constexpr int MOST_WORDS = 320 + MOST_ENTRIES;  // of a record: levels, 288 words of indices at most, values
constexpr int STAGED = 1408, LISTED = 4096;  // words of records, and entries, that a block decodes at a time
constexpr int CHUNK_STEPS = 4, BINS = 2048;  // digits of a key have 11, 10 and 10 bits

// ---- encoding

// What the threads of a block share while they encode.
struct Selection {
    u32 bins[BINS];  // zero but while a digit is counted
    u32 record[MOST_WORDS];
    float value[MOST_ENTRIES];  // then what of it is not sent
    u16 index[MOST_ENTRIES];
    float smallest, largest;
    u32 digit, left, last, wild;  // what the bins say
    u32 warps[WARP];
};

// And while they decode: sums of elements, ranks' records, and the buckets of their entries.
struct Decoding {
    float sums[TILE];
    u32 records[STAGED];
    u16 buckets[LISTED];
    Found found[WARPS];
};

// Whatever the kernel, it is the same shared memory.
union Room {
    Selection selection;
    Decoding decoding;
};

__device__ inline Room& shared_room() {
    __shared__ __align__(16) Room room;
    return room;
}

// Eight numbers that lie in shared memory, 16 bytes at a time.
struct Eight {
    float v[SLOTS];

    __device__ void from(const float* p) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Vector<float> four{((const uint4*)p)[half]};
#pragma unroll
            for (int j = 0; j < 4; ++j) v[4 * half + j] = four.element[j];
        }
    }

    __device__ void to(float* p) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vector<float> four;
#pragma unroll
            for (int j = 0; j < 4; ++j) four.element[j] = v[4 * half + j];
            ((uint4*)p)[half] = four.whole;
        }
    }
};

// What is selected: keys above one, and so many of those equal to it. Nothing of a chunk that is not finite.
struct Kth {
    int key, ties;
    bool sound;
};

// Finds in which bin of a digit the key lies that `left` keys are not below, and clears the bins.
template <int EACH>
__device__ inline void find_digit(u32 left, Selection& shared) {
    u32 counts[EACH], mine = 0, total;  // from the highest bin down, which thread 0 has
    uint4* const bins = (uint4*)(shared.bins + (THREADS - 1 - threadIdx.x) * EACH);
#pragma unroll
    for (int four = 0; four < EACH / 4; ++four) {
        const uint4 of = bins[EACH / 4 - 1 - four];
        bins[EACH / 4 - 1 - four] = uint4{0, 0, 0, 0};
        counts[4 * four] = of.w, counts[4 * four + 1] = of.z, counts[4 * four + 2] = of.y, counts[4 * four + 3] = of.x;
        mine += of.x + of.y + of.z + of.w;
    }
    u32 above = scan(mine, total, shared.warps);
    if (threadIdx.x == 0) shared.wild = EACH == SLOTS && mine > 0;  // infinity's bin is the lowest of the highest eight
    if (above < left && left <= above + mine) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            if (above < left && left <= above + counts[j]) {
                shared.digit = THREADS * EACH - 1 - threadIdx.x * EACH - j;
                shared.left = left - above, shared.last = counts[j];
            }
            above += counts[j];
        }
    }
    __syncthreads();
}

// Zeros count as keys, also those beyond the end, and are never selected.
template <class A>
__device__ Kth kth_key(const A& a, int k, Selection& shared) {
    a.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) atomicAdd(shared.bins + (magnitude_bits(v[j]) >> 20), 1u);
    });
    __syncthreads();
    find_digit<SLOTS>((u32)k, shared);
    if (shared.wild != 0) return Kth{0, 0, false};
    u32 prefix = shared.digit, left = shared.left;
    int shift = 20;
    while (shared.last != left && shift > 0) {
        shift -= 10;
        a.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const u32 digits = (u32)magnitude_bits(v[j]) >> shift;
                if (digits >> 10 == prefix) atomicAdd(shared.bins + digits % (BINS / 2), 1u);
            }
        });
        __syncthreads();
        find_digit<SLOTS / 2>(left, shared);
        prefix = prefix << 10 | shared.digit, left = shared.left;
    }
    const int key = (int)(prefix << shift);
    if (shared.last == left) return Kth{max(key - 1, 0), 0, true};  // all that begin so
    return Kth{key, key > 0 ? (int)left : 0, true};
}

// Which of a thread's elements are selected, and the number of their first, for each row that stays in registers.
template <int ROWS>
struct Chosen {
    u32 slots[ROWS > 0 ? ROWS : 1];
    int entry[ROWS > 0 ? ROWS : 1];
};

// Lists what is selected, in order, and zeros behind it to the end of a row; returns how many.
template <int ROWS, class A>
__device__ int list(const A& a, i64 start, const Kth& kth, Selection& shared, Chosen<ROWS>& chosen) {
    int listed = 0, equals = 0;
    a.each_row([&](int row, const float(&v)[SLOTS]) {
        u32 taken = 0, equal = 0, total;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) taken |= (u32)(magnitude_bits(v[j]) > kth.key) << j;
        if (kth.ties > 0) {
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) equal |= (u32)(magnitude_bits(v[j]) == kth.key) << j;
            const int before = equals + (int)scan((u32)__popc(equal), total, shared.warps);
            equals += (int)total;
            for (int room = kth.ties - before; room > 0 && equal != 0; --room, equal &= equal - 1)
                taken |= equal & (0u - equal);
        }
        int entry = listed + (int)scan((u32)__popc(taken), total, shared.warps);
        listed += (int)total;
        if constexpr (ROWS > 0) chosen.slots[row] = taken, chosen.entry[row] = entry;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            if (taken >> j & 1) {
                shared.index[entry] = (u16)((int)(a.at(row) - start) + j);
                shared.value[entry] = v[j];
                ++entry;
            }
        }
    });
    if (listed + (int)threadIdx.x < (listed + ROW - 1) / ROW * ROW) shared.value[listed + threadIdx.x] = 0.0f;
    return listed;
}

// The levels of what is listed. One warp's work; every lane has them.
__device__ inline void fit(const Selection& shared, int count, int bits, float& smallest, float& largest) {
    const float* const mine = shared.value + threadIdx.x % WARP * SLOTS;
    int most = 0, least = 0;
    Eight listed;
    for (int row = 0; row < count; row += ROW) {
        listed.from(mine + row);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const int key = magnitude_bits(listed.v[j]);
            most = max(most, key), least = max(least, key > 0 ? MAGNITUDE - key : 0);
        }
    }
    smallest = count > 0 ? __int_as_float(MAGNITUDE - warp_max(least)) : 0.0f;
    largest = __int_as_float(warp_max(most));
    if (bits != 2 || count == 0) return;
    for (int step = 0; step < CHUNK_STEPS; ++step) {
        const float middle = smallest * 0.5f + largest * 0.5f;
        float lower[SLOTS] = {}, upper[SLOTS] = {};
        int uppers = 0;
        for (int row = 0; row < count; row += ROW) {
            listed.from(mine + row);
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const float v = fabsf(listed.v[j]);
                if (v > middle)
                    upper[j] = upper[j] + v, ++uppers;
                else
                    lower[j] = lower[j] + v;
            }
        }
        uppers = warp_sum(uppers);
        const float below = fold(lower), beyond = fold(upper);
        if (uppers < count) smallest = below / (float)(count - uppers);
        if (uppers > 0) largest = beyond / (float)uppers;
    }
}

// What stands for a value on the wire; what of it is not sent stays in its place.
__device__ inline u32 code_of(const Form& form, float smallest, float largest, float step, float& value) {
    const float v = value;
    u32 code = __float_as_uint(v);
    float decoded = v;
    if (form.bits == 16) {
        Bfloat half;
        from_float(v, half);
        half.bits -= (half.bits & 0x7FFF) == 0x7F80;
        code = half.bits, decoded = to_float(half);
    } else if (form.bits < 16) {
        float y = step > 0.0f ? (fabsf(v) - smallest) / step + 0.5f : 0.0f;
        y = y >= (float)form.top() ? (float)form.top() : y > 0.0f ? y : 0.0f;
        const int level = __float2int_rz(y);
        const float magnitude = level_at(level, smallest, largest, step);
        code = (u32)level | (v < 0.0f ? 1u << (form.bits - 1) : 0u);
        decoded = v < 0.0f ? -magnitude : magnitude;
    }
    value = v - decoded;
    return code;
}

// Eight entries, or the last ones, into the record: the low bits of eight fill bytes, as many as one has bits, and so do
// their codes.
__device__ inline void put(const Form& form, int first, int count, Selection& shared) {
    float smallest = 0.0f, largest = 0.0f, step = 0.0f;
    if (form.bits < 16) {
        smallest = shared.smallest, largest = shared.largest;
        step = step_of(smallest, largest, form.top());
    }
    u8* low = (u8*)(shared.record + form.low()) + first / SLOTS * form.low_bits;
    u8* codes = (u8*)(shared.record + form.codes()) + first / SLOTS * form.bits;
    u32 low_ready = 0, codes_ready = 0;
    int low_filled = 0, codes_filled = 0;
    const int end = min(first + SLOTS, count);
#pragma unroll 1
    for (int i = first; i < end; ++i) {
        const u32 at = shared.index[i], place = (at >> form.low_bits) + i;
        atomicOr(shared.record + form.upper() + place / 32, 1u << place % 32);
        const u32 code = code_of(form, smallest, largest, step, shared.value[i]);
        low_ready |= (at & ((1u << form.low_bits) - 1)) << low_filled;
        for (low_filled += form.low_bits; low_filled >= 8; low_filled -= 8, low_ready >>= 8) *low++ = (u8)low_ready;
        if (form.bits >= 8) {
            for (int shift = 0; shift < form.bits; shift += 8) *codes++ = (u8)(code >> shift);
        } else {
            codes_ready |= code << codes_filled;
            if ((codes_filled += form.bits) == 8) *codes++ = (u8)codes_ready, codes_filled = 0, codes_ready = 0;
        }
    }
    // The last entries need not fill a byte.
    if (low_filled > 0) *low = (u8)low_ready;
    if (codes_filled > 0) *codes = (u8)codes_ready;
}

template <int ROWS, class T>
__device__ void encode_chunk(const T* x, float* residual, u8* wire, i64 numel, const Form& form, i64 b,
                             Selection& shared) {
    const i64 start = b * form.chunk;
    const Block<ROWS, T, THREADS> a(x, residual, start, numel, form.chunk);
    const int words = form.words();
    const Kth kth = kth_key(a, form.k, shared);
    for (int i = threadIdx.x; i < words; i += THREADS) shared.record[i] = 0;
    bool sound = kth.sound;
    int count = 0;
    Chosen<ROWS> chosen;
    if (sound) count = list<ROWS>(a, start, kth, shared, chosen);
    __syncthreads();
    if (sound && form.bits < 16) {
        if (threadIdx.x < WARP) {
            float smallest, largest;
            fit(shared, count, form.bits, smallest, largest);
            if (threadIdx.x == 0) shared.smallest = smallest, shared.largest = largest;
        }
        __syncthreads();
        sound = is_finite(shared.smallest) && is_finite(shared.largest);
    }
    if (sound) {
        for (int i = threadIdx.x * SLOTS; i < count; i += SPAN) put(form, i, count, shared);
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
    const bool left = sound && residual != nullptr;
    if (ROWS == 0 && left) {
        a.each_row([&](int row, const float(&v)[SLOTS]) {
            store8(residual, a.residual_aligned, a.at(row), a.end, v);
        });
    }
    __syncthreads();
    u32* const record = (u32*)wire + b * words;
    for (int i = threadIdx.x; i < words; i += THREADS) record[i] = shared.record[i];
    if (ROWS == 0 && left)
        for (int i = threadIdx.x; i < count; i += THREADS) residual[start + shared.index[i]] = shared.value[i];
    if constexpr (ROWS > 0) {
        if (!left) return;
        a.each_row([&](int row, const float(&v)[SLOTS]) {
            float rest[SLOTS];
            int entry = chosen.entry[row];
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) rest[j] = chosen.slots[row] >> j & 1 ? shared.value[entry++] : v[j];
            store8(residual, a.residual_aligned, a.at(row), a.end, rest);
        });
    }
}

template <class T>
__device__ void chunked_topk_encode(const T* x, float* residual, u8* wire, i64 numel, const Form& form) {
    Selection& shared = shared_room().selection;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.bins[bin] = 0;
    __syncthreads();
    for (i64 b = blockIdx.x; b * form.chunk < numel; b += gridDim.x) {
        if (form.chunk == TILE)
            encode_chunk<KEPT>(x, residual, wire, numel, form, b, shared);
        else
            encode_chunk<0>(x, residual, wire, numel, form, b, shared);
    }
}

// ---- decoding

// Words into shared memory, by one warp: all that a lane takes wait for memory together.
__device__ inline void fetch(const u32* from, int words, u32* to) {
    for (int first = threadIdx.x % WARP; first < words; first += SLOTS * WARP) {
        u32 v[SLOTS];
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = first + j * WARP < words ? from[first + j * WARP] : 0;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j)
            if (first + j * WARP < words) to[first + j * WARP] = v[j];
    }
    __syncwarp();
}

// Adds a record's entries to the sums of a tile, two a thread; returns how many were skipped.
template <class T>
__device__ inline int add_entries(const Target<T>& target, const Record& record, const u16* buckets, int count, int n,
                                  int tile, int end, float* sums) {
    const int lane = threadIdx.x % WARP;
    int skipped = 0;
    for (int first = 2 * (threadIdx.x - lane); first < count; first += 2 * THREADS) {
        const int i = min(first + 2 * lane, count - 1), next = min(first + 2 * lane + 1, count - 1);
        const u32 low = record.low_from(i);  // of both: one has 15 bits at most
        int at[2] = {record.position(buckets[i], low), record.position(buckets[next], low >> record.form.low_bits)};
        int before = __shfl_up_sync(EVERYONE, at[1], 1);
        if (lane == 0) before = record.highest_before(i, buckets, n);
        const bool sound = first + 2 * WARP <= count && before < at[0] && at[0] < at[1] && at[1] < n;
        if (__ballot_sync(EVERYONE, !sound) != 0) {  // or there are fewer than the warp takes
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (first + 2 * lane + j >= count) {
                    at[j] = -1;
                } else if (at[j] >= n || record.highest_before(i + j, buckets, n) >= at[j]) {
                    at[j] = -1, ++skipped;
                }
            }
        }
        u32 code = record.code_from(i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (j == 1) code = record.form.bits < 32 ? code >> record.form.bits : record.code_from(next);
            if ((u32)(at[j] - tile) < (u32)(end - tile))
                sums[at[j] - tile] = sums[at[j] - tile] + target.alpha * record.value(code);
        }
    }
    return skipped;
}

// A block owns a chunk: as many ranks' records as there is room for are read at once, a warp each, which lists their
// entries. Then they are added, rank after rank, in shared memory, and the chunk is written once.
template <class T>
__device__ inline void decode_chunks(const Target<T>& target, const u8* wires, i64 pitch, int ranks, const Form& form,
                                     i64* status) {
    Decoding& shared = shared_room().decoding;
    float* const sums = shared.sums;
    const int words = form.words(), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int at_once = min(WARPS, min(STAGED / words, LISTED / form.k));
    int skipped = 0, not_finite = 0;
    for (i64 b = blockIdx.x; b * form.chunk < target.numel; b += gridDim.x) {
        const i64 start = b * form.chunk;
        const int n = (int)min((i64)form.chunk, target.numel - start);
        for (int tile = 0; tile < n; tile += TILE) {
            const int end = min(tile + TILE, n);
            // Eight elements are one thread's but while entries are added.
#pragma unroll
            for (int row = 0; row < KEPT; ++row) {
                const int at = row * SPAN + threadIdx.x * SLOTS;
                Eight eight;
                if (tile + at < end) target.begin(start + tile + at, eight.v), eight.to(sums + at);
            }
            for (int first = 0; first < ranks; first += at_once) {
                const int batch = min(at_once, ranks - first);
                __syncthreads();
                if (warp < batch) {
                    u32* const record = shared.records + warp * words;
                    fetch((const u32*)(wires + (first + warp) * pitch) + b * words, words, record);
                    const Found mine = find(form, record, shared.buckets + warp * form.k);
                    if (lane == 0) shared.found[warp] = mine;
                    if (lane == 0 && tile == 0) skipped += max(mine.count - form.k, 0), not_finite += mine.count < 0;
                }
                for (int r = 0; r < batch; ++r) {
                    __syncthreads();
                    const Record record(form, shared.records + r * words, shared.found[r].step);
                    const u16* const buckets = shared.buckets + r * form.k;
                    const int count = min(shared.found[r].count, form.k);
                    const int dropped = add_entries(target, record, buckets, count, n, tile, end, sums);
                    skipped += tile == 0 ? dropped : 0;
                    for (int at = tile + threadIdx.x; count < 0 && at < end; at += THREADS)
                        sums[at - tile] = __int_as_float(NOT_A_NUMBER);
                }
            }
            __syncthreads();
#pragma unroll
            for (int row = 0; row < KEPT; ++row) {
                const int at = row * SPAN + threadIdx.x * SLOTS;
                Eight eight;
                if (tile + at < end) eight.from(sums + at), target.end(start + tile + at, eight.v);
            }
        }
    }
    report(status, skipped, not_finite);
}

// With two bits of chunks that are one tile, the common case, the compiler knows both.
template <class T>
__device__ void chunked_topk_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, const Form& form,
                               i64* status) {
    if (form.bits == 2 && form.chunk == TILE) {
        const Form common{TILE, form.k, 2, form.low_bits, form.upper_words, form.low_words};
        decode_chunks(target, wires, pitch, ranks, common, status);
    } else {
        decode_chunks(target, wires, pitch, ranks, form, status);
    }
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

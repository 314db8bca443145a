// TopK: a wire is two parts, count and k indices, then k values. Three launches write it, and nothing but them decides:
//
//   collect   a = x + residual; whatever is at or above a threshold, predicted from the last call, becomes a candidate
//             and leaves the residual. A tile's candidates lie together, in order; tiles lie as they come. Counts how
//             often each value of their highest digit occurs.
//   digits    twice: the same of the next digit, among the keys that agree so far with the k-th largest. After the last
//             the k-th key is known.
//   write     indices and values in order; candidates that are not sent return; predicts the next threshold.
//
// Where the prediction failed, because fewer than k were found or more than fit, the last two look at every element
// instead of the candidates: same code, another source. A key is a magnitude as an integer.
//
// `collect` moves 12 bytes an element; the rest is about the candidates, 1.3 k of them: 8 bytes to read their values
// for the digits, 8 for what `write` counts and places, 8 to write. What leaves the residual lies here and there, each in
// 32 bytes that memory reads and writes: so it leaves as `collect` writes all, and but 0.3 k return.
//
// Blocks wait for others of the same launch: for all shares of a digit before the next one, and for what the shares
// before one's own put on the wire.
#include "shares.cuh"

constexpr int THREADS = 256, TILE = THREADS * SLOTS;
constexpr int DIGITS = 3, BINS = 2048;
constexpr int BATCH = 4;  // loads that wait for memory together
constexpr int SHARE = 4 * BATCH * THREADS;  // candidates of a block that counts digits: each share costs the others a wait

// What a workspace holds; all int32. `threshold` lives from call to call, `found` and the highest digit's histogram are
// zero between them, and `collect` clears what comes from `turns` on.
struct State {
    u32 found;      // candidates, stored or not
    u32 threshold;  // keys from here on are candidates
    u32 dense;      // whether `write` looks at every element
    u32 prefix, left, all;  // what `digits` has found: see Kth
    u32 highest[BINS];
    u32 turns[2];   // the next share of `digits`, and of `write`
    u32 done[DIGITS];
    u32 lower[BINS];  // the histograms of two digits, one after the other
};

constexpr int CLEARED = 2 + DIGITS + BINS;

// A histogram, or where candidates lie: whatever the kernel, it is the same shared memory.
__device__ inline u32* shared_words() {
    __shared__ u32 words[BINS];
    return words;
}

__device__ inline u32 key_of(float v) {
    return __float_as_uint(canonical(v)) & MAGNITUDE;
}

// A block's histogram, of zeros.
__device__ inline u32* new_histogram() {
    u32* const histogram = shared_words();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
    __syncthreads();
    return histogram;
}

// Adds it to that of all.
__device__ inline void add_histogram(u32* all, int bins) {
    const u32* const histogram = shared_words();
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += THREADS)
        if (histogram[bin] != 0) atomicAdd(all + bin, histogram[bin]);
}

// ---- candidates

template <class T>
__device__ void collect(const T* x, float* residual, i64 numel, State* state, u32* index, float* value, int capacity,
                        uint2* tiles, u8* not_finite, u64* counts, int shares) {
    __shared__ u32 warps[WARP];
    __shared__ u32 first;
    u32 *const cleared = state->turns, *const histogram = new_histogram();
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < CLEARED; i += gridDim.x * THREADS) cleared[i] = 0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < shares; i += gridDim.x * THREADS) counts[i] = 0;
    const u32 threshold = max(state->threshold, 1u);
    const bool x_aligned = is_aligned(x), residual_aligned = is_aligned(residual);
    for (i64 tile = blockIdx.x; tile * TILE < numel; tile += gridDim.x) {
        const i64 begin = tile * TILE + threadIdx.x * SLOTS;
        float v[SLOTS], old[SLOTS];
        load8(x, x_aligned, begin, numel, v);
        u32 chosen = 0, wild = 0;
        if (residual != nullptr) load8(residual, residual_aligned, begin, numel, old);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            if (residual != nullptr) v[j] = v[j] + old[j];
            chosen |= (u32)(key_of(v[j]) >= threshold) << j;
            wild |= (u32)!is_finite(v[j]) << j;
        }
        u32 total;
        u32 slot = scan((u32)__popc(chosen), total, warps);
        const int any_wild = __syncthreads_or(wild != 0);
        if (threadIdx.x == 0) {
            first = total > 0 ? atomicAdd(&state->found, total) : 0;
            tiles[tile] = make_uint2(first, total | (u32)(any_wild != 0) << 31);
        }
        __syncthreads();
        slot += first;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            if (chosen >> j & 1) {
                atomicAdd(&histogram[key_of(v[j]) >> 20], 1u);
                if (slot < (u32)capacity) {
                    index[slot] = (u32)(begin + j);
                    value[slot] = canonical(v[j]);
                    v[j] = 0.0f;
                }
                ++slot;
            }
        }
        if (residual != nullptr) {
            // Where a is not finite the residual stays, and which those are is kept: x + residual is a there alone.
            if (any_wild) not_finite[tile * THREADS + threadIdx.x] = (u8)wild;
#pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                if (wild >> j & 1) v[j] = old[j];
            store8(residual, residual_aligned, begin, numel, v);
        }
    }
    add_histogram(state->highest, BINS);
}

// Whether the candidates will not do: more than fit, or fewer than k though there may be others.
__device__ inline bool failed(const State* state, int k, int capacity) {
    return state->found > (u32)capacity || (state->found < (u32)k && state->threshold > 1);
}

// What the selection looks at: the candidates, or every element.
template <class T>
struct Source {
    const T* x;
    float* residual;
    i64 numel;
    const u32* index;
    const float* value;
    int capacity;
    const uint2* tiles;
    const u8* not_finite;
    bool dense;

    __device__ float element(i64 i) const {
        if (residual == nullptr) return canonical(to_float(x[i]));
        const bool wild = tiles[i / TILE].y >> 31 && not_finite[i / SLOTS] >> i % SLOTS & 1;
        return wild ? canonical(to_float(x[i]) + residual[i]) : residual[i];
    }

    // In any order; how many there are.
    __device__ i64 items(u32 found) const {
        return !dense ? found : numel + (residual == nullptr ? 0 : min((i64)found, (i64)capacity));
    }

    // Behind the elements come the candidates that have left them.
    __device__ float item(i64 i) const {
        if (dense && i < numel) return element(i);
        const float v = value[dense ? i - numel : i];
        return dense && !is_finite(v) ? 0.0f : v;
    }

    // The candidates of some tiles return.
    __device__ void give_back(i64 first, i64 last) const {
        for (i64 tile = first; residual != nullptr && tile < last; ++tile) {
            const i64 begin = tiles[tile].x, end = min(begin + (tiles[tile].y & MAGNITUDE), (i64)capacity);
            for (i64 i = begin + threadIdx.x; i < end; i += THREADS)
                if (is_finite(value[i])) residual[index[i]] = value[i];
        }
        __syncthreads();
    }
};

// ---- the k-th largest key

// Digits of a key, from the highest: 11, 10 and 10 bits.
__device__ inline int bins_of(int digit) {
    return digit == 0 ? BINS : BINS / 2;
}

__device__ inline u32* histogram_of(State* state, int digit) {
    return digit == 0 ? state->highest : state->lower + (digit - 1) * (BINS / 2);
}

// What complete histograms say of the k-th largest key: its highest digits, and how many to take of the keys that begin
// with them; with fewer than k keys above zero both are zero, and `all` says how many there are.
struct Kth {
    int digits;
    u32 prefix, left, all;

    __device__ explicit Kth(int k) : digits(0), prefix(0), left((u32)k), all(0) {}

    // As `digits` has left it.
    __device__ explicit Kth(const State* state)
        : digits(DIGITS), prefix(state->prefix), left(state->left), all(state->all) {}

    // One digit more. Every thread of the block must call it.
    __device__ void learn(State* state, u32 (&warps)[WARP]) {
        __shared__ u32 found[2];
        const int bins = bins_of(digits), each = bins / THREADS, high = bins - 1 - (int)threadIdx.x * each;
        const volatile u32* const histogram = histogram_of(state, digits);
        u32 counts[SLOTS], mine = 0, total;  // from the highest bin down, which thread 0 has
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            counts[j] = j < each ? histogram[high - j] : 0;
            mine += counts[j];
        }
        u32 above = scan(mine, total, warps);
        if (threadIdx.x == 0) found[0] = 0, found[1] = 0;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            if (above < left && left <= above + counts[j]) found[0] = (u32)(high - j), found[1] = left - above;
            above += counts[j];
        }
        __syncthreads();
        if (digits == 0) all = total;
        prefix = prefix << (digits == 0 ? 11 : 10) | found[0];
        left = found[1];
        ++digits;
    }
};

// Adds what the items begin … end - 1 have of the next digit. Of the highest one the candidates have been counted.
template <class T>
__device__ void count_digit(const Source<T>& source, i64 begin, i64 end, const Kth& kth, State* state) {
    const u32 counted = kth.digits == 0 ? max(state->threshold, 1u) : ~0u;
    u32* const histogram = new_histogram();
    const int bins = bins_of(kth.digits), shift = 20 - 10 * kth.digits, above = shift + (kth.digits == 0 ? 11 : 10);
    for (i64 first = begin + threadIdx.x; first < end; first += BATCH * THREADS) {
        u32 keys[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const i64 i = first + j * THREADS;
            keys[j] = i < end ? key_of(source.item(i)) : 0;
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (keys[j] > 0 && keys[j] < counted && keys[j] >> above == kth.prefix)
                atomicAdd(&histogram[keys[j] >> shift & (bins - 1)], 1u);
    }
    add_histogram(histogram_of(state, kth.digits), bins);
}

template <class T>
__device__ void digits(const Source<T>& source, State* state, int k) {
    __shared__ u32 warps[WARP];
    const int begun = source.dense ? 0 : 1;  // the first digit that is counted here
    const i64 items = source.items(state->found);
    const u32 shares = source.dense ? gridDim.x : (u32)min((i64)gridDim.x, items / SHARE + 1);
    const u32 turns = (DIGITS - begun) * shares;
    Kth kth(k);
    const auto learn = [&]() {
        if (kth.digits >= begun) wait_for(&state->done[kth.digits], shares);
        kth.learn(state, warps);
    };
    for (u32 turn = take(&state->turns[0]); turn < turns; turn = take(&state->turns[0])) {
        const int digit = begun + (int)(turn / shares);
        while (kth.digits < digit) learn();
        const i64 share = turn % shares, begin = items * share / shares, end = items * (share + 1) / shares;
        if (begin < end && kth.left > 0) count_digit(source, begin, end, kth, state);
        if (turn == 0 && threadIdx.x == 0) state->dense = source.dense;
        finish(&state->done[digit]);
        if (turn == turns - 1) {
            learn();
            if (threadIdx.x == 0) state->prefix = kth.prefix, state->left = kth.left, state->all = kth.all;
        }
    }
}

// ---- the wire

// The items of some tiles in ascending order of index, at most as many tiles as a block has threads.
template <class T>
struct Listed {
    const Source<T>& source;
    i64 start;
    int items;
    u32 *before, *offset;  // of a tile's candidates in this list, and from here to where they lie

    __device__ Listed(const Source<T>& source, i64 first, int count, u32 (&warps)[WARP])
        : source(source), start(first * TILE), items((int)min((i64)count * TILE, source.numel - first * TILE)),
          before(shared_words()), offset(before + THREADS) {
        if (source.dense) {
            source.give_back(first, min(first + count, (source.numel + TILE - 1) / TILE));
            return;
        }
        const i64 tile = first + threadIdx.x;
        const bool here = (int)threadIdx.x < count && tile * TILE < source.numel;
        const uint2 lie = here ? source.tiles[tile] : make_uint2(0, 0);
        u32 total;
        const u32 sum = scan(lie.y & MAGNITUDE, total, warps);
        before[threadIdx.x] = sum, offset[threadIdx.x] = lie.x - sum;
        items = (int)total;
        __syncthreads();
    }

    __device__ float at(int i, u32& where) const {
        if (source.dense) {
            where = (u32)(start + i);
            return source.element(where);
        }
        int tile = 0;  // the last that begins here or before
#pragma unroll
        for (int step = THREADS / 2; step > 0; step /= 2)
            if (before[tile + step] <= (u32)i) tile += step;
        const u32 lies = offset[tile] + (u32)i;
        where = source.index[lies];
        return source.value[lies];
    }

    // How many from begin on are above a key, in the upper half, and how many equal to it; every WARP-th.
    __device__ u64 count(int begin, int end, u32 key) const {
        u64 counts = 0;
        for (int first = begin; first < end; first += BATCH * WARP) {
            u32 keys[BATCH], where;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) keys[j] = first + j * WARP < end ? key_of(at(first + j * WARP, where)) : 0;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) counts += keys[j] > key ? 1ull << 32 : keys[j] == key && key > 0 ? 1 : 0;
        }
        return counts;
    }
};

// The next threshold, from how many candidates this one gave and where the k-th key lay above it. The bits of a float
// are about its logarithm, and the tail of a distribution about a power of it: so the logarithm of the count is linear
// in the key, and about the count itself where that is near k. Aims at 1.3 k candidates.
__device__ inline u32 predict(u32 threshold, u32 found, u32 key, int k) {
    if (key == 0 || key >= INFINITE) return 1;
    float margin = 1 << 19;  // a 16th of a binade, before anything is known
    const float excess = (float)found / (float)k - 1.0f;
    if (threshold > 1 && threshold < key && excess > 0.02f) margin = (float)(key - threshold) * (0.3f / excess);
    const u32 distance = (u32)fminf(fmaxf(margin, 1 << 12), 1 << 23);
    return key > distance ? key - distance : 1;
}

// What is selected of the items begin … end - 1, a warp's, behind the keys above and equal to the k-th before them.
template <class T>
__device__ void place(const Listed<T>& listed, int begin, int end, const Kth& kth, u64 before, u32* indices,
                      float* values) {
    const Source<T>& source = listed.source;
    const int lane = threadIdx.x % WARP;
    const u32 key = kth.prefix, ties = kth.left, lower_lanes = (1u << lane) - 1;
    u32 equal_before = (u32)before, slot = (u32)(before >> 32) + min(equal_before, ties);
    for (int i = begin + lane; i - lane < end; i += WARP) {
        u32 where = 0;
        const float v = i < end ? listed.at(i, where) : 0.0f;
        const u32 this_key = key_of(v);
        const bool is_equal = this_key == key && key > 0;
        const u32 equals = __ballot_sync(EVERYONE, is_equal);
        const bool is_tie = is_equal && equal_before + __popc(equals & lower_lanes) < ties;
        const u32 taken = __ballot_sync(EVERYONE, this_key > key || is_tie);
        const bool takes = taken >> lane & 1;
        slot += __popc(taken);
        equal_before += __popc(equals);
        if (takes) {
            const u32 at = slot - __popc(taken & ~lower_lanes);
            indices[at] = where;
            values[at] = v;
        }
        // Candidates have left the residual, and elements have not.
        if (source.residual != nullptr && i < end && takes == source.dense && is_finite(v))
            source.residual[where] = source.dense ? 0.0f : v;
    }
}

// `counts`: a word for each share of `each` tiles.
template <class T>
__device__ void write(const Source<T>& source, State* state, int k, u64* counts, int each, u32* indices,
                      float* values) {
    __shared__ u32 warps[WARP];
    __shared__ u64 pairs[WARP];
    const Kth kth(state);
    const u32 selected = kth.left == 0 ? kth.all : (u32)k;
    const u32 shares = (u32)((source.numel + (i64)each * TILE - 1) / ((i64)each * TILE));
    for (u32 share = take(&state->turns[1]); share < shares; share = take(&state->turns[1])) {
        const Listed<T> listed(source, (i64)share * each, each, warps);
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = (listed.items + 7) / (THREADS / WARP);
        const int begin = min(warp * part, listed.items), end = min(begin + part, listed.items);
        u64 total;
        u64 before = scan(listed.count(begin + lane, end, kth.prefix), total, pairs);
        before = __shfl_sync(EVERYONE, before, 0) + sum_before(counts, share, total, pairs);
        place(listed, begin, end, kth, before, indices + 1, values);
        for (i64 at = selected + (i64)share * THREADS + threadIdx.x; at < k; at += (i64)shares * THREADS)
            indices[1 + at] = 0, values[at] = 0.0f;
        if (share == 0 && threadIdx.x == 0) {
            indices[0] = selected;
            state->threshold = predict(state->threshold, state->found, kth.prefix, k);
            state->found = 0;
        }
        if (share == 0)
            for (int bin = threadIdx.x; bin < BINS; bin += THREADS) state->highest[bin] = 0;
    }
}

extern "C" {

__global__ void topk_collect_f32(const float* x, float* residual, i64 numel, State* state, u32* index, float* value,
                                 int capacity, uint2* tiles, u8* not_finite, u64* counts, int shares) {
    collect(x, residual, numel, state, index, value, capacity, tiles, not_finite, counts, shares);
}

__global__ void topk_digits_f32(const float* x, float* residual, i64 numel, State* state, const u32* index,
                                const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k) {
    const bool dense = failed(state, k, capacity);
    digits(Source<float>{x, residual, numel, index, value, capacity, tiles, not_finite, dense}, state, k);
}

__global__ void topk_write_f32(const float* x, float* residual, i64 numel, State* state, const u32* index,
                               const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                               u64* counts, int each, u32* indices, float* values) {
    const bool dense = state->dense != 0;
    write(Source<float>{x, residual, numel, index, value, capacity, tiles, not_finite, dense}, state, k, counts, each,
          indices, values);
}

__global__ void topk_collect_f16(const Half* x, float* residual, i64 numel, State* state, u32* index, float* value,
                                 int capacity, uint2* tiles, u8* not_finite, u64* counts, int shares) {
    collect(x, residual, numel, state, index, value, capacity, tiles, not_finite, counts, shares);
}

__global__ void topk_digits_f16(const Half* x, float* residual, i64 numel, State* state, const u32* index,
                                const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k) {
    const bool dense = failed(state, k, capacity);
    digits(Source<Half>{x, residual, numel, index, value, capacity, tiles, not_finite, dense}, state, k);
}

__global__ void topk_write_f16(const Half* x, float* residual, i64 numel, State* state, const u32* index,
                               const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                               u64* counts, int each, u32* indices, float* values) {
    const bool dense = state->dense != 0;
    write(Source<Half>{x, residual, numel, index, value, capacity, tiles, not_finite, dense}, state, k, counts, each,
          indices, values);
}

__global__ void topk_collect_bf16(const Bfloat* x, float* residual, i64 numel, State* state, u32* index, float* value,
                                  int capacity, uint2* tiles, u8* not_finite, u64* counts, int shares) {
    collect(x, residual, numel, state, index, value, capacity, tiles, not_finite, counts, shares);
}

__global__ void topk_digits_bf16(const Bfloat* x, float* residual, i64 numel, State* state, const u32* index,
                                 const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k) {
    const bool dense = failed(state, k, capacity);
    digits(Source<Bfloat>{x, residual, numel, index, value, capacity, tiles, not_finite, dense}, state, k);
}

__global__ void topk_write_bf16(const Bfloat* x, float* residual, i64 numel, State* state, const u32* index,
                                const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                                u64* counts, int each, u32* indices, float* values) {
    const bool dense = state->dense != 0;
    write(Source<Bfloat>{x, residual, numel, index, value, capacity, tiles, not_finite, dense}, state, k, counts, each,
          indices, values);
}
}

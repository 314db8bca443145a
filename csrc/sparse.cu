// TopK, and sums of sparse wires. A wire is two parts: count and k indices, then k values.
//
// Encoding takes one pass over the gradient, and all that follows is decided on the device:
//
//   collect   a = x + residual; whatever is at or above a threshold, predicted from the last call, becomes a candidate.
//             A tile's candidates lie together, in order; tiles lie as they come.
//   digits    three times: how often each value of the next digit occurs, among the keys that agree so far with the
//             k-th largest. After the last the k-th key is known.
//   tally     for each tile: how many are above that key, and how many equal to it.
//   place     where each tile's share of the wire begins; predicts the next threshold.
//   write     indices and values in order; what is sent leaves the residual.
//
// Where the prediction failed, because fewer than k were found or more than fit, the last four look at every element
// instead of the candidates: same code, another source. A key is a magnitude as an integer. Without `not_finite`, where
// a call notes what of a is not finite, the residual is only read.
#include "checked.cuh"

constexpr int THREADS = 256, TILE = THREADS * SLOTS;
constexpr int DIGITS = 3, BINS = 2048;
constexpr int RANKS = 64;  // of which a block reads at once where a tile's entries lie

// What a workspace holds; all int32. `threshold` lives from call to call, the counters are left at zero.
struct State {
    u32 found;      // candidates, stored or not
    u32 threshold;  // keys from here on are candidates
    u32 key;        // the k-th largest; every selected key is this or above
    u32 ties;       // how many of those equal to it are selected
    u32 selected;
    u32 dense;  // whether `write` looks at every element
    u32 histogram[DIGITS][BINS];
};

// A histogram, or the sums of a tile: whatever the kernel, it is the same shared memory.
__device__ inline u32* shared_words() {
    __shared__ u32 words[TILE];
    return words;
}

__device__ inline u32 key_of(float v) {
    return __float_as_uint(canonical(v)) & MAGNITUDE;
}

// Tiles of candidates are short: a warp takes one at a time.
__device__ inline i64 first_warp() {
    return (i64)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
}

__device__ inline i64 all_warps() {
    return (i64)gridDim.x * (THREADS / WARP);
}

// ---- encoding

template <class T>
__device__ void collect(const T* x, float* residual, i64 numel, State* state, u32* index, float* value, int capacity,
                        uint2* tiles, u8* not_finite) {
    __shared__ u32 warps[WARP];
    __shared__ u32 first;
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
                if (slot < (u32)capacity) {
                    index[slot] = (u32)(begin + j);
                    value[slot] = canonical(v[j]);
                }
                ++slot;
            }
        }
        if (residual != nullptr && not_finite != nullptr) {
            // Where a is not finite the residual stays, and which those are is kept: x + residual is a there alone.
            if (any_wild) not_finite[tile * THREADS + threadIdx.x] = (u8)wild;
#pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                if (wild >> j & 1) v[j] = old[j];
            store8(residual, residual_aligned, begin, numel, v);
        }
    }
}

// Whether the candidates will not do: more than fit, or fewer than k though there may be others.
__device__ inline bool failed(const State* state, int k, int capacity) {
    return state->found > (u32)capacity || (state->found < (u32)k && state->threshold > 1);
}

// What the selection looks at, tile by tile: the candidates, or every element.
template <class T>
struct Source {
    const T* x;
    const float* residual;
    i64 numel;
    const u32* index;
    const float* value;
    const uint2* tiles;
    const u8* not_finite;
    bool dense;

    __device__ i64 count() const {
        return (numel + TILE - 1) / TILE;
    }

    __device__ int items(i64 tile) const {
        return dense ? (int)min((i64)TILE, numel - tile * TILE) : (int)(tiles[tile].y & MAGNITUDE);
    }

    // Item i of a tile, in ascending order of index.
    __device__ float at(i64 tile, int i, u32& where) const {
        if (!dense) {
            where = index[tiles[tile].x + i];
            return value[tiles[tile].x + i];
        }
        where = (u32)(tile * TILE + i);
        if (residual == nullptr) return canonical(to_float(x[where]));
        if (not_finite == nullptr) return canonical(to_float(x[where]) + residual[where]);
        const bool wild = tiles[tile].y >> 31 && not_finite[where / SLOTS] >> where % SLOTS & 1;
        return wild ? canonical(to_float(x[where]) + residual[where]) : residual[where];
    }
};

// Digits of a key, from the highest: 11, 10 and 10 bits.
__device__ inline int shift_of(int digit) {
    return 20 - 10 * digit;
}

__device__ inline int bins_of(int digit) {
    return digit == 0 ? BINS : BINS / 2;
}

// What is known of the k-th largest key once `digits` histograms are complete: its highest digits, and how many to take
// of the keys that begin with them. With fewer than k keys in all, zero. Every thread of the block must call it.
__device__ inline u32 prefix_of(const State* state, int digits, u32 k, u32& left, u32 (&warps)[WARP]) {
    __shared__ u32 found[2];
    u32 prefix = 0;
    left = k;
    for (int digit = 0; digit < digits; ++digit) {
        const int bins = bins_of(digit), each = bins / THREADS;
        const u32* const histogram = state->histogram[digit];
        // Thread 0 has the highest bins.
        const int high = bins - 1 - (int)threadIdx.x * each;
        u32 mine = 0, total;
        for (int i = 0; i < each && threadIdx.x < THREADS; ++i) mine += histogram[high - i];
        u32 above = scan(mine, total, warps);
        if (threadIdx.x == 0) found[0] = 0, found[1] = 0;
        __syncthreads();
        if (above < left && left <= above + mine) {
            int bin = high;
            while (above + histogram[bin] < left) above += histogram[bin--];
            found[0] = (u32)bin, found[1] = left - above;
        }
        __syncthreads();
        const u32 bin = found[0];
        left = found[1];
        prefix = prefix << (digit == 0 ? 11 : 10) | bin;
        __syncthreads();
        if (left == 0) return 0;  // fewer than k: everything is selected
    }
    return prefix;
}

template <class T>
__device__ void digits(const Source<T>& source, State* state, int digit, int k) {
    __shared__ u32 warps[WARP];
    u32* const histogram = shared_words();
    u32 left;
    const u32 prefix = prefix_of(state, digit, (u32)k, left, warps);
    if (left == 0) return;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
    __syncthreads();
    const int shift = shift_of(digit), above = shift + (digit == 0 ? 11 : 10);
    for (i64 tile = first_warp(); tile < source.count(); tile += all_warps()) {
        const int items = source.items(tile);
        for (int i = threadIdx.x % WARP; i < items; i += WARP) {
            u32 where;
            const u32 key = key_of(source.at(tile, i, where));
            if (key > 0 && key >> above == prefix) atomicAdd(&histogram[key >> shift & (bins_of(digit) - 1)], 1u);
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins_of(digit); bin += THREADS)
        if (histogram[bin] != 0) atomicAdd(&state->histogram[digit][bin], histogram[bin]);
}

// tally[tile] = how many of its keys are above the k-th largest, and how many equal to it.
template <class T>
__device__ void tally(const Source<T>& source, const State* state, int k, uint2* tally) {
    __shared__ u32 warps[WARP];
    u32 left;
    const u32 key = prefix_of(state, DIGITS, (u32)k, left, warps);
    for (i64 tile = first_warp(); tile < source.count(); tile += all_warps()) {
        const int items = source.items(tile);
        int above = 0, equal = 0;
        for (int i = threadIdx.x % WARP; i < items; i += WARP) {
            u32 where;
            const u32 this_key = key_of(source.at(tile, i, where));
            above += this_key > key;
            equal += this_key == key && key > 0;
        }
        above = warp_sum(above), equal = warp_sum(equal);
        if (threadIdx.x % WARP == 0) tally[tile] = make_uint2(above, equal);
    }
}

// The next threshold, from how many candidates this one gave and where the k-th key lay above it. The bits of a float
// are about its logarithm, and the tail of a distribution about a power of it: so the logarithm of the count is linear
// in the key. Aims at 1.3 k candidates.
__device__ inline u32 predict(u32 threshold, u32 found, u32 key, int k) {
    if (key == 0 || key >= INFINITE) return 1;
    float margin = 1 << 19;  // a 16th of a binade, before anything is known
    if (threshold > 1 && threshold < key && (float)found > 1.02f * (float)k)
        margin = (float)(key - threshold) * (logf(1.3f) / logf((float)found / (float)k));
    const u32 distance = (u32)fminf(fmaxf(margin, 1 << 12), 1 << 23);
    return key > distance ? key - distance : 1;
}

// One block: tally becomes what lies before each tile; the state becomes what `write` and the next call need. A thread
// takes eight tiles at once, both counts of them in one word: rounds are what costs time here.
__device__ void place(State* state, int k, int capacity, i64 tiles, uint2* tally) {
    __shared__ u32 warps[WARP];
    __shared__ u64 pairs[WARP];
    u32 left;
    const u32 key = prefix_of(state, DIGITS, (u32)k, left, warps);
    u64 before = 0;  // above in the upper half, equal in the lower
    for (i64 first = 0; first < tiles; first += blockDim.x * SLOTS) {
        const i64 tile = first + threadIdx.x * SLOTS;
        u64 counts[SLOTS], mine = 0, total;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const uint2 here = tile + j < tiles ? tally[tile + j] : make_uint2(0, 0);
            counts[j] = (u64)here.x << 32 | here.y;
            mine += counts[j];
        }
        u64 sum = before + scan(mine, total, pairs);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            if (tile + j < tiles) tally[tile + j] = make_uint2((u32)(sum >> 32), (u32)sum);
            sum += counts[j];
        }
        before += total;
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < DIGITS * BINS; bin += blockDim.x) (&state->histogram[0][0])[bin] = 0;
    if (threadIdx.x != 0) return;
    state->dense = failed(state, k, capacity);
    state->threshold = predict(state->threshold, state->found, key, k);
    state->found = 0;
    state->key = key;
    state->ties = left;
    state->selected = (u32)(before >> 32) + min(left, (u32)before);
}

template <class T>
__device__ void write(const Source<T>& source, float* residual, const State* state, int k, const uint2* before,
                      u32* indices, float* values) {
    const u32 key = state->key, ties = state->ties, selected = state->selected;
    const int lane = threadIdx.x % WARP;
    const u32 lower_lanes = (1u << lane) - 1;
    for (i64 tile = first_warp(); tile < source.count(); tile += all_warps()) {
        const int items = source.items(tile);
        u32 equal_before = before[tile].y, slot = before[tile].x + min(equal_before, ties);
        for (int i = lane; i - lane < items; i += WARP) {
            u32 where = 0;
            const float v = i < items ? source.at(tile, i, where) : 0.0f;
            const u32 this_key = key_of(v);
            const bool is_equal = this_key == key && key > 0;
            const u32 equals = __ballot_sync(EVERYONE, is_equal);
            const bool is_tie = is_equal && equal_before + __popc(equals & lower_lanes) < ties;
            const u32 taken = __ballot_sync(EVERYONE, this_key > key || is_tie);
            if (taken >> lane & 1) {
                const u32 at = slot + __popc(taken & lower_lanes);
                indices[1 + at] = where;
                values[at] = v;
                if (residual != nullptr && source.not_finite != nullptr && is_finite(v)) residual[where] = 0.0f;
            }
            slot += __popc(taken);
            equal_before += __popc(equals);
        }
    }
    const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (thread == 0) indices[0] = selected;
    for (i64 at = selected + thread; at < k; at += (i64)gridDim.x * THREADS) indices[1 + at] = 0, values[at] = 0.0f;
}

// ---- decoding

// Which entries of the ranks' wires count: those in range and above every index in range before them. Sound wires
// ascend; then starts[tile] is the first entry of each tile of the output. Any other is left to `repair`.
__device__ void check(const u8* rows, i64 pitch, int ranks, i64 numel, int k, u32* broken, u32* starts, i64* status) {
    const i64 tiles = (numel + TILE - 1) / TILE, threads = (i64)gridDim.x * blockDim.x;
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = threadIdx.x % WARP;
    for (int rank = 0; rank < ranks; ++rank) {
        const u32* const indices = (const u32*)(rows + rank * pitch) + 1;
        const u32 claimed = indices[-1];
        const i64 count = min((i64)claimed, (i64)k);
        u32* const start = starts + rank * (tiles + 1);
        if (thread == 0 && claimed > (u32)k) atomicAdd((u64*)status, (u64)(claimed - (u32)k));
        for (i64 first = thread - lane; first <= count; first += threads) {  // a warp stays together
            const i64 i = first + lane;
            const i64 before = i > 0 && i <= count ? (i64)indices[i - 1] : -1, at = i < count ? (i64)indices[i] : numel;
            const bool entry = i < count, sound = before < at && (!entry || at < numel);
            if (entry && !sound) atomicOr(broken + rank, 1u);
            // The tiles that begin at this entry. Atomic, since a broken wire may come to a tile twice; `repair` then
            // writes it anew.
            const int tile = before < 0 ? 0 : (int)(before / TILE) + 1;
            const int past = i > count || !sound ? tile : (int)(entry ? at / TILE : tiles) + 1;
            if (past - tile <= WARP)
                for (int t = tile; t < past; ++t) atomicExch(start + t, (u32)i);
            // A wire without entries begins all of them at once: the warp shares those.
            for (u32 far = __ballot_sync(EVERYONE, past - tile > WARP); far != 0; far &= far - 1) {
                const int source = __ffs((int)far) - 1, end = __shfl_sync(EVERYONE, past, source);
                for (int t = __shfl_sync(EVERYONE, tile, source) + lane; t < end; t += WARP)
                    atomicExch(start + t, (u32)(first + source));
            }
        }
    }
}

// A block for each rank. reach[i] = the largest index in range so far: an entry counts if it grows there. -1 at first.
__device__ void repair(const u8* rows, i64 pitch, i64 numel, int k, const u32* broken, u32* starts, int* reach,
                       i64* status) {
    const int rank = blockIdx.x, lane = threadIdx.x;
    if (!broken[rank]) return;
    const u32* const indices = (const u32*)(rows + rank * pitch) + 1;
    const i64 count = min((i64)indices[-1], (i64)k), tiles = (numel + TILE - 1) / TILE;
    u32* const start = starts + rank * (tiles + 1);
    int* const mine = reach + (i64)rank * k;
    int before = -1, skipped = 0;  // one warp: broken wires may be slow
    for (i64 first = 0; first < count; first += WARP) {
        const bool here = first + lane < count;
        const u32 index = here ? indices[first + lane] : 0;
        int top = here && (i64)index < numel ? (int)index : -1;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int lower = __shfl_up_sync(EVERYONE, top, distance);
            if (lane >= distance) top = max(top, lower);
        }
        top = max(top, before);
        const int previous = __shfl_up_sync(EVERYONE, top, 1), last = lane == 0 ? before : previous;
        if (here) {
            mine[first + lane] = top;
            skipped += top == last;
            for (i64 tile = last < 0 ? 0 : last / TILE + 1; top > last && tile <= top / TILE; ++tile)
                start[tile] = (u32)(first + lane);
        }
        before = __shfl_sync(EVERYONE, top, WARP - 1);
    }
    for (i64 tile = (before < 0 ? 0 : before / TILE + 1) + lane; tile <= tiles; tile += WARP) start[tile] = (u32)count;
    report(status, skipped, 0);
}

// out = mean over ranks, tile by tile in shared memory: rank after rank, and a rank has an index once at most.
template <class T>
__device__ void merge(T* out, i64 numel, float scale, const u8* rows, i64 pitch, const u8* value_rows, i64 value_pitch,
                      int ranks, int k, const u32* broken, const u32* starts, const int* reach, i64* status) {
    __shared__ u32 begin[RANKS], end[RANKS];
    float* const sums = (float*)shared_words();
    const i64 tiles = (numel + TILE - 1) / TILE;
    const bool aligned = is_aligned(out);
    int not_finite = 0;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int i = threadIdx.x; i < TILE; i += THREADS) sums[i] = 0.0f;
        for (int rank = 0; rank < ranks; ++rank) {
            // Where the ranks' entries lie, of many ranks at once: they wait for memory together.
            if (rank % RANKS == 0) {
                for (int r = threadIdx.x; r < min(RANKS, ranks - rank); r += THREADS) {
                    const u32* const start = starts + (rank + r) * (tiles + 1) + tile;
                    begin[r] = start[0], end[r] = start[1];
                }
                __syncthreads();
            }
            const Entries entries(rows, pitch, value_rows, value_pitch, rank, k, broken, reach);
            for (i64 i = begin[rank % RANKS] + threadIdx.x; i < end[rank % RANKS]; i += THREADS) {
                i64 index;
                if (!entries.at(i, index)) continue;
                const float v = entries.values[i];
                not_finite += !is_finite(v);
                sums[index - tile * TILE] = sums[index - tile * TILE] + v;
            }
            __syncthreads();
        }
        float v[SLOTS];
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = sums[threadIdx.x * SLOTS + j] * scale;
        store8(out, aligned, tile * TILE + threadIdx.x * SLOTS, numel, v);
        __syncthreads();
    }
    report(status, 0, not_finite);
}

extern "C" {

__global__ void topk_collect_f32(const float* x, float* residual, i64 numel, State* state, u32* index, float* value,
                                  int capacity, uint2* tiles, u8* not_finite) {
    collect(x, residual, numel, state, index, value, capacity, tiles, not_finite);
}

__global__ void topk_digits_f32(const float* x, const float* residual, i64 numel, State* state, const u32* index,
                                 const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                                 int digit) {
    const Source<float> source{x, residual, numel, index, value, tiles, not_finite, failed(state, k, capacity)};
    digits(source, state, digit, k);
}

__global__ void topk_tally_f32(const float* x, const float* residual, i64 numel, const State* state, const u32* index,
                                const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                                uint2* counts) {
    const Source<float> source{x, residual, numel, index, value, tiles, not_finite, failed(state, k, capacity)};
    tally(source, state, k, counts);
}

__global__ void topk_write_f32(const float* x, float* residual, i64 numel, const State* state, const u32* index,
                                const float* value, const uint2* tiles, const u8* not_finite, int k,
                                const uint2* before, u8* indices, u8* values) {
    const Source<float> source{x, residual, numel, index, value, tiles, not_finite, state->dense != 0};
    write(source, residual, state, k, before, (u32*)indices, (float*)values);
}

__global__ void topk_mean_f32(float* out, i64 numel, float scale, const u8* rows, i64 pitch, const u8* value_rows,
                               i64 value_pitch, int ranks, int k, const u32* broken, const u32* starts,
                               const int* reach, i64* status) {
    merge(out, numel, scale, rows, pitch, value_rows, value_pitch, ranks, k, broken, starts, reach, status);
}

__global__ void topk_collect_f16(const Half* x, float* residual, i64 numel, State* state, u32* index, float* value,
                                  int capacity, uint2* tiles, u8* not_finite) {
    collect(x, residual, numel, state, index, value, capacity, tiles, not_finite);
}

__global__ void topk_digits_f16(const Half* x, const float* residual, i64 numel, State* state, const u32* index,
                                 const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                                 int digit) {
    const Source<Half> source{x, residual, numel, index, value, tiles, not_finite, failed(state, k, capacity)};
    digits(source, state, digit, k);
}

__global__ void topk_tally_f16(const Half* x, const float* residual, i64 numel, const State* state, const u32* index,
                                const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                                uint2* counts) {
    const Source<Half> source{x, residual, numel, index, value, tiles, not_finite, failed(state, k, capacity)};
    tally(source, state, k, counts);
}

__global__ void topk_write_f16(const Half* x, float* residual, i64 numel, const State* state, const u32* index,
                                const float* value, const uint2* tiles, const u8* not_finite, int k,
                                const uint2* before, u8* indices, u8* values) {
    const Source<Half> source{x, residual, numel, index, value, tiles, not_finite, state->dense != 0};
    write(source, residual, state, k, before, (u32*)indices, (float*)values);
}

__global__ void topk_mean_f16(Half* out, i64 numel, float scale, const u8* rows, i64 pitch, const u8* value_rows,
                               i64 value_pitch, int ranks, int k, const u32* broken, const u32* starts,
                               const int* reach, i64* status) {
    merge(out, numel, scale, rows, pitch, value_rows, value_pitch, ranks, k, broken, starts, reach, status);
}

__global__ void topk_collect_bf16(const Bfloat* x, float* residual, i64 numel, State* state, u32* index, float* value,
                                  int capacity, uint2* tiles, u8* not_finite) {
    collect(x, residual, numel, state, index, value, capacity, tiles, not_finite);
}

__global__ void topk_digits_bf16(const Bfloat* x, const float* residual, i64 numel, State* state, const u32* index,
                                 const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                                 int digit) {
    const Source<Bfloat> source{x, residual, numel, index, value, tiles, not_finite, failed(state, k, capacity)};
    digits(source, state, digit, k);
}

__global__ void topk_tally_bf16(const Bfloat* x, const float* residual, i64 numel, const State* state, const u32* index,
                                const float* value, int capacity, const uint2* tiles, const u8* not_finite, int k,
                                uint2* counts) {
    const Source<Bfloat> source{x, residual, numel, index, value, tiles, not_finite, failed(state, k, capacity)};
    tally(source, state, k, counts);
}

__global__ void topk_write_bf16(const Bfloat* x, float* residual, i64 numel, const State* state, const u32* index,
                                const float* value, const uint2* tiles, const u8* not_finite, int k,
                                const uint2* before, u8* indices, u8* values) {
    const Source<Bfloat> source{x, residual, numel, index, value, tiles, not_finite, state->dense != 0};
    write(source, residual, state, k, before, (u32*)indices, (float*)values);
}

__global__ void topk_mean_bf16(Bfloat* out, i64 numel, float scale, const u8* rows, i64 pitch, const u8* value_rows,
                               i64 value_pitch, int ranks, int k, const u32* broken, const u32* starts,
                               const int* reach, i64* status) {
    merge(out, numel, scale, rows, pitch, value_rows, value_pitch, ranks, k, broken, starts, reach, status);
}

// One block.
__global__ void topk_place(State* state, int k, int capacity, i64 tiles, uint2* tally) {
    place(state, k, capacity, tiles, tally);
}

__global__ void topk_check(const u8* rows, i64 pitch, int ranks, i64 numel, int k, u32* broken, u32* starts,
                           i64* status) {
    check(rows, pitch, ranks, numel, k, broken, starts, status);
}

// A block of one warp for each rank.
__global__ void topk_repair(const u8* rows, i64 pitch, i64 numel, int k, const u32* broken, u32* starts, int* reach,
                            i64* status) {
    repair(rows, pitch, numel, k, broken, starts, reach, status);
}

// out += alpha · values of one wire.
__global__ void topk_add(float* out, float alpha, const u8* row, const u8* values, int k, const u32* broken,
                         const int* reach, i64* status) {
    const Entries entries(row, 0, values, 0, 0, k, broken, reach);
    int not_finite = 0;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < entries.count(k); i += (i64)gridDim.x * blockDim.x) {
        i64 index;
        if (!entries.at(i, index)) continue;
        not_finite += !is_finite(entries.values[i]);
        out[index] = out[index] + alpha * entries.values[i];
    }
    report(status, 0, not_finite);
}

// What exchanges of sparse gradients need besides. The union of index sets goes through a bitmap of 32 elements a word,
// which is zero before and after: `mark` for every set, `tally`, one block of `place`, and `list`.
__global__ void union_mark(const u32* indices, i64 count, i64 numel, u32* bitmap, i64* status) {
    int skipped = 0;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        const u32 index = indices[i];
        if ((i64)index < numel)
            atomicOr(bitmap + index / 32, 1u << index % 32);
        else
            ++skipped;
    }
    report(status, skipped, 0);
}

// For each tile of 256 words, how many bits are set.
__global__ void union_tally(const u32* bitmap, i64 words, u32* tally) {
    __shared__ u32 warps[WARP];
    for (i64 tile = blockIdx.x; tile * THREADS < words; tile += gridDim.x) {
        const i64 word = tile * THREADS + threadIdx.x;
        u32 total;
        scan(word < words ? (u32)__popc(bitmap[word]) : 0u, total, warps);
        if (threadIdx.x == 0) tally[tile] = total;
    }
}

// One block: tally becomes what lies before each tile; size[0] the number of all.
__global__ void union_place(u32* tally, i64 tiles, u32* size) {
    __shared__ u32 warps[WARP];
    u32 before = 0;
    for (i64 first = 0; first < tiles; first += THREADS) {
        const i64 tile = first + threadIdx.x;
        u32 total;
        const u32 here = scan(tile < tiles ? tally[tile] : 0u, total, warps);
        if (tile < tiles) tally[tile] = before + here;
        before += total;
    }
    if (threadIdx.x == 0) size[0] = before;
}

// The set bits in ascending order, as many as fit; clears the bitmap.
__global__ void union_list(u32* bitmap, i64 words, const u32* tally, u32* indices, i64 capacity) {
    __shared__ u32 warps[WARP];
    for (i64 tile = blockIdx.x; tile * THREADS < words; tile += gridDim.x) {
        const i64 word = tile * THREADS + threadIdx.x;
        u32 bits = word < words ? bitmap[word] : 0, total;
        i64 slot = (i64)tally[tile] + scan((u32)__popc(bits), total, warps);
        for (; bits != 0; bits &= bits - 1, ++slot)
            if (slot < capacity) indices[slot] = (u32)(word * 32 + __ffs(bits) - 1);
        if (word < words) bitmap[word] = 0;
    }
}

// values[i] = x[indices[i]], zero where the index is out of range, for the first size[0] of at most `capacity`.
__global__ void gather_at(const float* x, i64 numel, const u32* indices, const u32* size, i64 capacity, float* values) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < capacity; i += (i64)gridDim.x * blockDim.x)
        values[i] = i < (i64)size[0] && (i64)indices[i] < numel ? x[indices[i]] : 0.0f;
}

// out[indices[i]] = alpha · values[i], for the first size[0] of at most `capacity`; no index may come twice.
__global__ void scatter_to(float* out, i64 numel, const u32* indices, const u32* size, i64 capacity,
                           const float* values, float alpha) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < capacity; i += (i64)gridDim.x * blockDim.x)
        if (i < (i64)size[0] && (i64)indices[i] < numel) out[indices[i]] = alpha * values[i];
}
}

// What `union` does where no host may read: the union of index sets, what this rank has there, and the means.
// compress/backends/union.py has the same in torch, which every byte equals.
//
// The union goes through a bitmap of 32 elements a word, which is zero before and after: `union_mark` for every set, and
// `union_list`, which reads it twice, a quarter of a byte an element. The rest is about the entries, but that
// `union_late` clears the gradient.
#include "shares.cuh"

constexpr int THREADS = 256;

__device__ inline i64 first_thread() {
    return (i64)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ inline i64 all_threads() {
    return (i64)gridDim.x * blockDim.x;
}

// The first of ascending indices at or above one.
__device__ inline i64 first_from(const u32* indices, i64 count, u32 from) {
    i64 first = 0, last = count;
    while (first < last) {
        const i64 middle = (first + last) / 2;
        if (indices[middle] < from)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

// Where an index is among ascending ones; -1: it is not.
__device__ inline i64 find(const u32* indices, i64 count, u32 index) {
    const i64 at = first_from(indices, count, index);
    return at < count && indices[at] == index ? at : -1;
}

extern "C" {

// What `union_list` needs besides the bitmap is cleared: a word for each of its shares, and whose turn it is.
__global__ void union_mark(const u32* indices, i64 count, i64 numel, u32* bitmap, u64* tally, int shares, u32* turn,
                           i64* status) {
    for (i64 i = first_thread(); i < shares; i += all_threads()) tally[i] = 0;
    if (first_thread() == 0) turn[0] = 0;
    int skipped = 0;
    for (i64 i = first_thread(); i < count; i += all_threads()) {
        const u32 index = indices[i];
        if ((i64)index < numel)
            atomicOr(bitmap + index / 32, 1u << index % 32);
        else
            ++skipped;
    }
    report(status, skipped, 0);
}

// The set bits in ascending order, as many as fit, and how many there are; clears the bitmap.
__global__ void union_list(u32* bitmap, i64 words, u64* tally, int shares, u32* turn, u32* indices, i64 capacity,
                           u32* size) {
    __shared__ u32 warps[WARP];
    __shared__ u64 sums[WARP];
    const i64 each = (words + shares - 1) / shares;
    for (u32 share = take(turn); share < (u32)shares; share = take(turn)) {
        const i64 begin = min(share * each, words), end = min(begin + each, words);
        u32 mine = 0, total;
        for (i64 word = begin + threadIdx.x; word < end; word += THREADS) mine += __popc(bitmap[word]);
        scan(mine, total, warps);
        i64 before = (i64)sum_before(tally, share, total, sums);
        if (share == (u32)shares - 1 && threadIdx.x == 0) size[0] = (u32)(before + total);
        for (i64 first = begin; first < end; first += THREADS) {
            const i64 word = first + threadIdx.x;
            u32 bits = word < end ? bitmap[word] : 0;
            i64 slot = before + scan((u32)__popc(bits), total, warps);
            for (; bits != 0; bits &= bits - 1, ++slot)
                if (slot < capacity) indices[slot] = (u32)(word * 32 + __ffs(bits) - 1);
            if (word < end) bitmap[word] = 0;
            before += total;
        }
    }
}

// Of this rank's entries those that are not among the first `room` of the union go back to the residual, which may be
// null. What is not finite waits nowhere, and must be seen: `hidden`, zero before. `out` is cleared.
__global__ void union_late(const u32* count, const u32* indices, const float* values, i64 k, const u32* listed,
                           const u32* size, i64 room, float* residual, u8* later, u32* hidden, u8* out,
                           int stored, i64 numel) {
    const i64 own = min((i64)count[0], k), taking = min((i64)size[0], room);
    for (i64 i = first_thread(); i < k; i += all_threads()) {
        const bool late = i < own && find(listed, taking, indices[i]) < 0, wild = !is_finite(values[i]);
        later[i] = late && !wild;
        if (!late) continue;
        if (wild)
            atomicOr(hidden, 1u);
        else if (residual != nullptr)
            residual[indices[i]] = residual[indices[i]] + values[i];
    }
    clear(out, stored, numel);
}

// What this rank has at the union, entries and residual, and `extra` behind it. What is sent leaves the residual.
__global__ void union_take(const u32* count, const u32* indices, const float* values, i64 k, const u32* listed,
                           const u32* size, i64 room, float* residual, const u32* hidden, float* total,
                           const float* extra, i64 extras) {
    const i64 own = min((i64)count[0], k), taking = min((i64)size[0], room);
    for (i64 i = first_thread(); i < room + extras; i += all_threads()) {
        if (i >= room) {
            total[i] = extra[i - room];
            continue;
        }
        const i64 at = i < taking ? find(indices, own, listed[i]) : -1;
        float v = at < 0 ? 0.0f : 0.0f + values[at];
        if (hidden[0]) v = __int_as_float(NOT_A_NUMBER);
        if (i < taking && residual != nullptr) {
            v = v + residual[listed[i]];
            if (is_finite(v)) residual[listed[i]] = 0.0f;
        }
        total[i] = v;
    }
}

// The means, each where it belongs, and those of `extra`. counted: entries that came and cannot be right, less those
// that are padding and were counted as such; and means that are not finite.
__global__ void union_deliver(const float* total, i64 room, float scale, const u32* listed, const u32* size, u8* out,
                              int stored, float* extra, i64 extras, const u32* used, int ranks, i64 k, u32* hidden,
                              i64* counted) {
    const i64 taking = min((i64)size[0], room);
    int padding = 0, not_finite = 0;
    for (i64 i = first_thread(); i < room + extras; i += all_threads()) {
        const float v = total[i] * scale;
        if (i < taking)
            store_one(out, stored, listed[i], 0.0f + v);
        else if (i >= room)
            extra[i - room] = v;
        else
            continue;
        not_finite += !is_finite(v);
    }
    for (i64 rank = first_thread(); rank < ranks; rank += all_threads())
        padding += (int)(k - min((i64)used[rank], k));
    if (first_thread() == 0) hidden[0] = 0;
    report(counted, -padding, not_finite);
}
}

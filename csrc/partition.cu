// What `split` does with entries where no host may read: it deals them to the owners of elements, who sum them, and
// takes the owners' largest sums. compress/backends/partition.py has the same in torch, which every byte equals.
//
//   rows      this rank's entries, in rows to their owners, packed; a block for each row, which reads all k indices
//   deliver   the owners' means, each where it belongs; what has not arrived goes back to the residual
//
// What an owner sums in between is a mean of sparse wires (topk_decode.cu). All of this is about k entries.
#include "entries.cuh"

constexpr int DEALING = 512;  // threads that fill a row
constexpr u32 SCATTER = 0x4F1BBCDD, NEXT_TURN = 0x2545F491, LOW_BITS = 0x7FFFFFFF;

// Which rank owns which element, as the class Partition says.
struct Partition {
    u32 ranks, start;

    __device__ Partition(int ranks, const i64* turn) : ranks((u32)ranks), start((u32)turn[0] * NEXT_TURN) {}

    __device__ u32 turned(u32 place) const {
        const u64 mixed = ((place + start) & LOW_BITS) * SCATTER & LOW_BITS;
        return (u32)(mixed * mixed >> 31) % ranks;
    }

    __device__ u32 owner(u32 index) const {
        return (index + turned(index / ranks)) % ranks;
    }

    __device__ i64 index(u32 owner, u32 place) const {
        return (i64)place * ranks + (owner + ranks - turned(place)) % ranks;
    }
};

// Rows of unpacked places.
struct Rows {
    const u32 *places, *used;
    int each, low_bits;

    __device__ Unpacked of(int row) const {
        return Unpacked{places + (i64)row * each, min((i64)used[row], (i64)each), low_bits};
    }
};

__device__ inline void add_finite(float* to, float v) {
    if (is_finite(v)) *to = *to + v;
}

extern "C" {

// `slots` says where in the row to its owner each entry is, or would be if there were room. What is not finite must be
// seen, and waits nowhere: a row that has no room for it is of NaN.
__global__ void partition_rows(const u32* count, const u32* indices, const float* values, int k, const i64* turn,
                             int ranks, int capacity, int low_bits, i64 upper_words, i64 low_words, u32* places,
                             float* numbers, u32* slots, u8* index_rows, u8* value_rows, i64 pitch, int form) {
    __shared__ u32 warps[WARP];
    const Partition partition(ranks, turn);
    const int owner = blockIdx.x, used = (int)used_of(count, k);
    places += (i64)owner * capacity, numbers += (i64)owner * capacity;
    index_rows += owner * pitch, value_rows += owner * pitch;
    u32 filled = 0;
    bool hidden = false;
    for (int first = 0; first < used; first += DEALING * SLOTS) {
        const int begin = first + threadIdx.x * SLOTS;
        u32 mine = 0, total;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j)
            if (begin + j < used) mine |= (u32)(partition.owner(indices[begin + j]) == (u32)owner) << j;
        u32 slot = filled + scan((u32)__popc(mine), total, warps);
        for (; mine != 0; mine &= mine - 1, ++slot) {
            const int i = begin + __ffs(mine) - 1;
            slots[i] = slot;
            if (slot < (u32)capacity)
                places[slot] = indices[i] / partition.ranks, numbers[slot] = values[i];
            else
                hidden |= !is_finite(values[i]);
        }
        filled += total;
    }
    filled = min(filled, (u32)capacity);
    if (__syncthreads_or(hidden)) {
        for (int i = threadIdx.x; i < capacity; i += DEALING) numbers[i] = __int_as_float(NOT_A_NUMBER);
    } else {
        for (int i = filled + threadIdx.x; i < capacity; i += DEALING) numbers[i] = 0.0f;
    }
    __syncthreads();
    const Ascending row{places, filled, 0, low_bits};
    for (i64 word = threadIdx.x; word < upper_words + low_words; word += DEALING)
        ((u32*)index_rows)[word] = word < upper_words ? row.upper(word) : row.low(word - upper_words);
    const auto leave = [](i64, float, float) {};
    const int warp = threadIdx.x / WARP;
    if (form == FLOAT)
        for (int i = threadIdx.x; i < capacity; i += DEALING) ((float*)value_rows)[i] = canonical(numbers[i]);
    else if (form == BFLOAT)
        for (int i = threadIdx.x; i < (capacity + 1) / 2; i += DEALING)
            pack_pair(numbers, capacity, i, value_rows, leave);
    else
        for (int unit = warp; unit < (capacity + ROW - 1) / ROW; unit += DEALING / WARP)
            pack_unit(numbers, is_aligned(numbers), capacity, unit, value_rows, leave);
}

// The owners' means into `out`, and into `residual`, unless it is null, what has not arrived: of this rank's entries
// those that no mean has, whole, and what rounding has taken from the others; and from the means that this rank owns.
__global__ void partition_deliver(u8* out, int stored, i64 numel, const u32* places, const u32* used, int share,
                                int low_bits, const u8* mean_rows, i64 mean_pitch, int form, int ranks, int rank,
                                const i64* turn, const float* mean, const u32* count, const u32* indices,
                                const float* values, int k, const u32* slots, int capacity, const u8* sent_rows,
                                i64 sent_pitch, float* residual, u8* later, i64* counted) {
    const Partition partition(ranks, turn);
    const Values means{mean_rows, mean_pitch, form, share}, sent{sent_rows, sent_pitch, form, capacity};
    const i64 own = used_of(count, k);
    int skipped = 0, not_finite = 0;
    const Rows rows{places, used, share, low_bits};
    const bool rounds = residual != nullptr && means.form != FLOAT;
    for (i64 at = first_thread(); at < (i64)ranks * share + k; at += all_threads()) {
        if (at < (i64)ranks * share) {  // a mean
            const u32 owner = (u32)at / (u32)share;
            const i64 i = (u32)at % (u32)share;
            const Unpacked row = rows.of(owner);
            if (i >= row.count) continue;
            const u32 place = row.indices[i];
            const i64 index = row.counts(i) ? partition.index(owner, place) : numel;
            if (index >= numel) {
                ++skipped;
                continue;
            }
            const float v = means.at(owner, i);
            not_finite += !is_finite(v);
            store_one(out, stored, index, 0.0f + v);
            // Where this rank has an entry too, whoever looks at that does both.
            if (rounds && owner == (u32)rank && Unpacked{indices, own, 0}.find((u32)index) < 0)
                add_finite(residual + index, ranks * (mean[place] - means.at(rank, i)));
        } else {  // an entry of this rank's
            const i64 i = at - (i64)ranks * share;
            later[i] = 0;
            if (i >= own || residual == nullptr) continue;
            const u32 index = indices[i], place = index / partition.ranks, owner = partition.owner(index), slot = slots[i];
            const i64 found = rows.of(owner).find(place);
            if (rounds && owner == (u32)rank && found >= 0) add_finite(residual + index, ranks * (mean[place] - means.at(rank, found)));
            const bool arrived = found >= 0 && slot < (u32)capacity;
            if (!arrived)
                add_finite(residual + index, values[i]);
            else if (sent.form != FLOAT)
                add_finite(residual + index, values[i] - sent.at(owner, slot));
            later[i] = !arrived && is_finite(values[i]);
        }
    }
    report(counted, skipped, not_finite);
}
}

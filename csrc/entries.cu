// The entries of sparse gradients, packed and unpacked: compress/formats/entries.py has the format, and the class Entries of
// compress/backends/reference/entries.py is what every byte equals.
//
//   indices   at = index - base, split into its l lowest bits and the rest. Bit (at >> l) + i of `upper` is set for
//             entry i, and `low` holds the low bits of one entry after the other. About k·(l + 2.5) / 8 bytes.
//   values    bfloat16, to nearest and never beyond the largest; or int8, v ≈ code · u with one u = max |v| / 127 for
//             each 256 values. 2k bytes, or k + k / 64. What that rounds away stays in the residual.
//
// Every word of a wire is written once, by one thread: nothing is cleared before, and no atomic is needed. To pack
// moves 4k bytes of indices in and the wire out. To unpack moves the wire in and 4k bytes a row out; besides, `upper`
// is read from the cache some 16 times, since where a share's entries begin is counted anew by whoever needs it: one
// launch then serves all rows, without memory of its own.
#include "entries.cuh"
#include "shares.cuh"

// Threads that unpack one share of a row, and so words of `upper` that they take at once.
constexpr int UNPACKING = 512;

// The low bits of an entry, which may lie in two words.
__device__ inline u32 low_of(const u32* low, i64 entry, int low_bits) {
    if (low_bits == 0) return 0;
    const i64 bit = entry * low_bits;
    const int shift = (int)(bit % WORD);
    u64 both = low[bit / WORD];
    if (shift + low_bits > WORD) both |= (u64)low[bit / WORD + 1] << WORD;
    return (u32)(both >> shift) & ((1u << low_bits) - 1);
}

// Bits set in the words that begin … end - 1, on every thread of the block.
__device__ inline u32 count_bits(const u32* words, i64 begin, i64 end, u32 (&warps)[WARP]) {
    u32 mine = 0, total;
    for (i64 word = begin + threadIdx.x; word < end; word += blockDim.x) mine += __popc(words[word]);
    scan(mine, total, warps);
    return total;
}

// A zero of `upper` ends 2^low_bits elements: behind every 2^shift-th one a group begins. Notes which entry is the first of
// each that begins in a word, `before` entries having come before the word.
__device__ inline void note_starts(u32* starts, i64 groups, int shift, i64 word, u32 bits, i64 before, i64 k) {
    i64 zeros = word * WORD - before;
    if (zeros >> shift == (zeros + __popc(~bits)) >> shift) return;
    for (u32 rest = ~bits; rest != 0; rest &= rest - 1) {
        const i64 group = ++zeros >> shift;
        if (group << shift == zeros && group <= groups)
            starts[group] = (u32)min(before + __popc(bits & ((rest & -rest) - 1)), k);
    }
}

// What rounding took from a value stays in the residual, unless the value is not finite.
struct Rest {
    float* residual;  // may be null
    const u32* indices;
    i64 used;

    __device__ Rest(float* residual, const u32* indices, const u32* count, i64 k)
        : residual(residual), indices(indices), used(used_of(count, k)) {}

    __device__ void keep(i64 i, float v, float decoded) const {
        if (residual != nullptr && i < used && is_finite(v)) residual[indices[i]] = v - decoded;
    }
};

extern "C" {

// out[places] += values, where those are finite. Where a place comes twice, all values but one are -0.0, which changes
// nothing and is left out: so nobody else is there, and no atomic is needed, which would take subnormal numbers for zeros.
__global__ void entries_add(float* out, const i64* places, const float* values, i64 k) {
    for (i64 i = first_thread(); i < k; i += all_threads()) {
        const float v = values[i];
        if (is_finite(v) && __float_as_uint(v) != 0x80000000u) out[places[i]] = out[places[i]] + v;
    }
}

// A thread for each word of the wire.
__global__ void entries_pack_indices(const u32* indices, i64 k, const u32* count, i64 base, int low_bits,
                                     i64 upper_words, i64 low_words, u8* wire) {
    const Ascending entries{indices, used_of(count, k), base, low_bits};
    for (i64 word = first_thread(); word < upper_words + low_words; word += all_threads())
        ((u32*)wire)[word] = word < upper_words ? entries.upper(word) : entries.low(word - upper_words);
}

// `upper` of each row is cut into shares of some tiles, and a block takes one share at a time. What is not there, or
// not below numel, becomes NO_INDEX. counts may be null; it and the rows of indices lie as many words apart as told.
// Unless `starts` is null: groups + 1 words a row for where the entries of each 2^shift elements begin; and entries that
// have no room, or are not below numel, are counted.
__global__ void entries_unpack_indices(const u8* wires, i64 pitch, int rows, int shares, i64 base, i64 numel,
                                       int low_bits, i64 upper_words, u32* counts, i64 counts_pitch, u32* indices,
                                       i64 indices_pitch, i64 k, u32* starts, int shift, i64 groups, i64* status) {
    __shared__ u32 warps[WARP];
    __shared__ u16 places[UNPACKING * WORD];  // the set bits of a tile
    int skipped = 0;
    const i64 tiles = (upper_words + UNPACKING - 1) / UNPACKING, each = (tiles + shares - 1) / shares * UNPACKING;
    for (int job = blockIdx.x; job < rows * shares; job += gridDim.x) {
        const int row = job / shares, share = job % shares;
        const u32 *const upper = (const u32*)(wires + row * pitch), *const low = upper + upper_words;
        u32* const out = indices + row * indices_pitch;
        u32* const start = starts == nullptr ? nullptr : starts + row * (groups + 1);
        const i64 begin = min(share * each, upper_words), end = min(begin + each, upper_words);
        i64 entry = count_bits(upper, 0, begin, warps);
        for (i64 tile = begin; tile < end; tile += UNPACKING) {
            const i64 word = tile + threadIdx.x;
            u32 bits = word < end ? upper[word] : 0, total;
            u32 slot = scan((u32)__popc(bits), total, warps);
            if (start != nullptr && word < end) note_starts(start, groups, shift - low_bits, word, bits, entry + slot, k);
            for (; bits != 0; bits &= bits - 1) places[slot++] = (u16)(threadIdx.x * WORD + __ffs(bits) - 1);
            __syncthreads();
            for (i64 i = threadIdx.x; i < total && entry + i < k; i += UNPACKING) {
                const i64 rest = tile * WORD + places[i] - (entry + i);
                const i64 at = (rest << low_bits) + low_of(low, entry + i, low_bits);
                out[entry + i] = at < numel ? (u32)(at + base) : (u32)NO_INDEX;
                skipped += at >= numel;
            }
            entry += total;  // and the next scan waits for all before it lets anyone change `places`
        }
        if (share != shares - 1) continue;
        for (i64 i = entry + threadIdx.x; i < k; i += UNPACKING) out[i] = (u32)NO_INDEX;
        if (counts != nullptr && threadIdx.x == 0) counts[row * counts_pitch] = (u32)entry;
        if (start == nullptr) continue;
        const i64 noted = (upper_words * WORD - entry) >> (shift - low_bits);
        for (i64 group = noted + 1 + threadIdx.x; group <= groups; group += UNPACKING) start[group] = (u32)min(entry, k);
        if (threadIdx.x == 0) start[0] = 0, skipped += (int)max(entry - k, (i64)0);
    }
    if (status != nullptr) report(status, skipped, 0);
}

__global__ void entries_pack_f32(const float* values, i64 k, u8* wire, const u32* indices, const u32* count,
                                 float* residual) {
    const Rest rest(residual, indices, count, k);
    for (i64 i = first_thread(); i < k; i += all_threads()) {
        ((float*)wire)[i] = canonical(values[i]);
        rest.keep(i, values[i], values[i]);
    }
}

// A thread for each word.
__global__ void entries_pack_bf16(const float* values, i64 k, u8* wire, const u32* indices, const u32* count,
                                  float* residual) {
    const Rest rest(residual, indices, count, k);
    for (i64 word = first_thread(); word < (k + 1) / 2; word += all_threads())
        pack_pair(values, k, word, wire, [&](i64 i, float v, float decoded) { rest.keep(i, v, decoded); });
}

// A warp for each unit, as for the blocks of a dense codec.
__global__ void entries_pack_int8(const float* values, i64 k, u8* wire, const u32* indices, const u32* count,
                                  float* residual) {
    const Rest rest(residual, indices, count, k);
    const bool aligned = is_aligned(values);
    each_block(k, ROW, [&](i64 unit) {
        pack_unit(values, aligned, k, unit, wire, [&](i64 i, float v, float decoded) { rest.keep(i, v, decoded); });
    });
}

// A thread for each value, row after row.
__global__ void entries_unpack_bf16(const u8* wires, i64 pitch, int rows, float* values, i64 values_pitch, i64 k) {
    for (int row = 0; row < rows; ++row) {
        const Bfloat* const wire = (const Bfloat*)(wires + row * pitch);
        for (i64 i = first_thread(); i < k; i += all_threads()) values[row * values_pitch + i] = to_float(wire[i]);
    }
}

__global__ void entries_unpack_int8(const u8* wires, i64 pitch, int rows, float* values, i64 values_pitch, i64 k) {
    for (int row = 0; row < rows; ++row) {
        const float* const units = (const float*)(wires + row * pitch);
        const signed char* const codes = (const signed char*)(units + (k + ROW - 1) / ROW);
        for (i64 i = first_thread(); i < k; i += all_threads())
            values[row * values_pitch + i] = decoded_of(codes[i], units[i / ROW]);
    }
}
}

// ---- unions

// What `union` does where no host may read: the union of index sets, what this rank has there, and the means.
// compress/backends/union.py has the same in torch, which every byte equals.
//
// The union goes through a bitmap of 32 elements a word, which is zero before and after: `union_mark` for every set, and
// `union_list`, which reads it twice, a quarter of a byte an element. The rest is about the entries, but that
// `union_late` clears the gradient.
constexpr int THREADS = 256;

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

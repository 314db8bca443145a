// Sums of sparse wires. A wire is two parts: count and k indices, or packed ones, then k values that may be packed
// (entries.cu). Indices that were packed lie unpacked by now, and with them is known which tile an entry begins.
//
// `mean` writes an element once; the rest is about the entries of all ranks: 4 bytes to read an index, and its value.
#include "entries.cuh"

constexpr int THREADS = 256, TILE = THREADS * SLOTS, WARPS = THREADS / WARP;
constexpr int BATCH = 2;  // entries of a lane that wait for memory together

// The ranks' indices, low_bits being 0 where they are plain.
struct Lists {
    const u8* rows;
    i64 pitch;
    int k, low_bits;
    const u32* broken;  // null where indices were packed
    const int* reach;

    __device__ Unpacked of(int rank) const {
        const u32* const row = (const u32*)(rows + rank * pitch);
        const bool repaired = broken != nullptr && broken[rank] != 0;
        return Unpacked{repaired ? (const u32*)reach + (i64)rank * k : row + 1, min((i64)row[0], (i64)k), low_bits};
    }
};

// ---- plain indices

// The first of ascending indices at or above one.
__device__ inline u32 first_from(const u32* indices, i64 count, i64 from) {
    i64 first = 0, last = count;
    while (first < last) {
        const i64 middle = (first + last) / 2;
        if ((i64)indices[middle] < from)
            first = middle + 1;
        else
            last = middle;
    }
    return (u32)first;
}

// Which entries of the ranks' plain wires count: those in range and above every index in range before them. Sound wires
// ascend; then starts[tile] is the first entry of each tile of the output. Any other is left to `repair`.
__device__ void check(const u8* rows, i64 pitch, int ranks, i64 numel, int k, u32* broken, u32* starts, i64* status) {
    const i64 bounds = (numel + TILE - 1) / TILE + 1, threads = (i64)gridDim.x * blockDim.x;
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (int rank = 0; rank < ranks; ++rank) {
        const u32* const indices = (const u32*)(rows + rank * pitch) + 1;
        const u32 claimed = indices[-1];
        const i64 count = min((i64)claimed, (i64)k);
        if (thread == 0 && claimed > (u32)k) atomicAdd((u64*)status, (u64)(claimed - (u32)k));
        for (i64 i = thread; i < count; i += threads) {
            const i64 before = i > 0 ? (i64)indices[i - 1] : -1, at = (i64)indices[i];
            const bool sound = before < at && at < numel;
            if (!sound) atomicOr(broken + rank, 1u);
        }
    }
    // Searched for, since an entry may begin any number of tiles: those of a wire of zeros begin all at once.
    for (i64 i = thread; i < ranks * bounds; i += threads) {
        const u32* const indices = (const u32*)(rows + i / bounds * pitch) + 1;
        starts[i] = first_from(indices, min((i64)indices[-1], (i64)k), i % bounds * TILE);
    }
}

// A block for each rank. reach[i] = the largest index in range so far: an entry counts if it grows there. -1 at first, for
// what does not count; of the others whoever adds them says which do.
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
            skipped += top < 0;
            for (i64 tile = last < 0 ? 0 : last / TILE + 1; top > last && tile <= top / TILE; ++tile)
                start[tile] = (u32)(first + lane);
        }
        before = __shfl_sync(EVERYONE, top, WARP - 1);
    }
    for (i64 tile = (before < 0 ? 0 : before / TILE + 1) + lane; tile <= tiles; tile += WARP) start[tile] = (u32)count;
    report(status, skipped, 0);
}

// ---- sums

// The sums of a tile: whatever the kernel, it is the same shared memory.
__device__ inline float* shared_sums() {
    __shared__ __align__(16) float sums[TILE];
    return sums;
}

// out = mean over ranks, tile by tile in shared memory. A warp has a rank's entries, so that those of as many ranks as
// there are warps wait for memory together; they add in turns, and a rank has an index once at most. `starts`: the first
// entry of each 2^shift elements, TILE or more.
template <class T>
__device__ void mean(T* out, i64 numel, float scale, const Lists& lists, const Values& values, int ranks,
                     const u32* starts, int shift, i64* status) {
    float* const sums = shared_sums();
    float* const own = sums + threadIdx.x * SLOTS;  // which this thread alone reads in the end, and clears
    const i64 tiles = (numel + TILE - 1) / TILE, groups = ((numel - 1) >> shift) + 1;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const bool aligned = is_aligned(out);
    int skipped = 0, not_finite = 0;
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) own[j] = 0.0f;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 first = (u32)(tile * TILE), past = (u32)min((i64)TILE, numel - tile * TILE);
        for (int turn = 0; turn < ranks; turn += WARPS) {
            const int rank = min(turn + warp, ranks - 1);  // the last one is read in vain where there are fewer
            const Unpacked list = lists.of(rank);
            const u32 bound = lane < 2 ? starts[rank * (groups + 1) + (first >> shift) + lane] : 0;
            int i = (int)__shfl_sync(EVERYONE, bound, 0) + lane;
            const int end = (int)__shfl_sync(EVERYONE, bound, 1);
            u32 at[BATCH];
            float v[BATCH];
            const auto load = [&]() {
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const bool here = i + j * WARP < end;
                    at[j] = here ? list.indices[i + j * WARP] : (u32)NO_INDEX;
                    v[j] = here ? values.at(rank, i + j * WARP) : 0.0f;
                }
            };
            load();
            for (int adding = 0; adding < min(WARPS, ranks - turn); ++adding) {
                __syncthreads();
                while (adding == warp && i - lane < end) {
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const u32 place = at[j] - first;
                        if (place >= past) continue;
                        if (!list.counts(i + j * WARP)) {
                            ++skipped;
                            continue;
                        }
                        not_finite += !is_finite(v[j]);
                        sums[place] = sums[place] + v[j];
                    }
                    i += BATCH * WARP;
                    if (i - lane < end) load();
                }
            }
        }
        __syncthreads();
        float v[SLOTS];
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) v[j] = own[j] * scale, own[j] = 0.0f;
        store8(out, aligned, tile * TILE + threadIdx.x * SLOTS, numel, v);
    }
    report(status, skipped, not_finite);
}

extern "C" {

__global__ void topk_mean_f32(float* out, i64 numel, float scale, const u8* rows, i64 pitch, int k, int low_bits,
                              const u32* broken, const int* reach, const u8* value_rows, i64 value_pitch, int form,
                              int ranks, const u32* starts, int shift, i64* status) {
    const Lists lists{rows, pitch, k, low_bits, broken, reach};
    mean(out, numel, scale, lists, Values{value_rows, value_pitch, form, k}, ranks, starts, shift, status);
}

__global__ void topk_mean_f16(Half* out, i64 numel, float scale, const u8* rows, i64 pitch, int k, int low_bits,
                              const u32* broken, const int* reach, const u8* value_rows, i64 value_pitch, int form,
                              int ranks, const u32* starts, int shift, i64* status) {
    const Lists lists{rows, pitch, k, low_bits, broken, reach};
    mean(out, numel, scale, lists, Values{value_rows, value_pitch, form, k}, ranks, starts, shift, status);
}

__global__ void topk_mean_bf16(Bfloat* out, i64 numel, float scale, const u8* rows, i64 pitch, int k, int low_bits,
                               const u32* broken, const int* reach, const u8* value_rows, i64 value_pitch, int form,
                               int ranks, const u32* starts, int shift, i64* status) {
    const Lists lists{rows, pitch, k, low_bits, broken, reach};
    mean(out, numel, scale, lists, Values{value_rows, value_pitch, form, k}, ranks, starts, shift, status);
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
__global__ void topk_add(float* out, float alpha, const u8* row, i64 pitch, int k, int low_bits, const u32* broken,
                         const int* reach, const u8* value_row, i64 value_pitch, int form, i64* status) {
    const Unpacked list = Lists{row, pitch, k, low_bits, broken, reach}.of(0);
    const Values values{value_row, value_pitch, form, k};
    int skipped = 0, not_finite = 0;
    for (i64 i = first_thread(); i < list.count; i += all_threads()) {
        const u32 index = list.indices[i];
        if (index == (u32)NO_INDEX) continue;
        if (!list.counts(i)) {
            ++skipped;
            continue;
        }
        const float v = values.at(0, i);
        not_finite += !is_finite(v);
        out[index] = out[index] + alpha * v;
    }
    report(status, skipped, not_finite);
}
}

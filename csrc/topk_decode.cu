// Sums of sparse wires. A wire is two parts: count and k indices, then k
// values; topk.cu writes them.
#include "checked.cuh"

constexpr int THREADS = 256, TILE = THREADS * SLOTS;
constexpr int RANKS = 64;  // of which a block reads at once where a tile's entries lie

// The sums of a tile: whatever the kernel, it is the same shared memory.
__device__ inline float* shared_sums() {
    __shared__ float sums[TILE];
    return sums;
}

// ---- decoding

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

// Which entries of the ranks' wires count: those in range and above every index in range before them. Sound wires
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
    float* const sums = shared_sums();
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

__global__ void topk_mean_f32(float* out, i64 numel, float scale, const u8* rows, i64 pitch, const u8* value_rows,
                               i64 value_pitch, int ranks, int k, const u32* broken, const u32* starts,
                               const int* reach, i64* status) {
    merge(out, numel, scale, rows, pitch, value_rows, value_pitch, ranks, k, broken, starts, reach, status);
}

__global__ void topk_mean_f16(Half* out, i64 numel, float scale, const u8* rows, i64 pitch, const u8* value_rows,
                               i64 value_pitch, int ranks, int k, const u32* broken, const u32* starts,
                               const int* reach, i64* status) {
    merge(out, numel, scale, rows, pitch, value_rows, value_pitch, ranks, k, broken, starts, reach, status);
}

__global__ void topk_mean_bf16(Bfloat* out, i64 numel, float scale, const u8* rows, i64 pitch, const u8* value_rows,
                               i64 value_pitch, int ranks, int k, const u32* broken, const u32* starts,
                               const int* reach, i64* status) {
    merge(out, numel, scale, rows, pitch, value_rows, value_pitch, ranks, k, broken, starts, reach, status);
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
}

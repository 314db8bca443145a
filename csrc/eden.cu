// EDEN: record = the scales of five rows of 256 (bfloat16), the seed of their signs, then five trits a byte, as in
// trits.cuh. A row is rotated by signs and Sylvester's Hadamard matrix: a lane's slots first, then the lanes.
#include "philox.cuh"
#include "trits.cuh"

constexpr int ROWS = TRITS, HEAD = 12, RECORD = HEAD + ROW;

// A row's transform: sums and differences of elements 1, 2, 4, … 128 apart.
template <class V>
__device__ inline void hadamard(V (&v)[SLOTS]) {
#pragma unroll
    for (int distance = 1; distance < SLOTS; distance *= 2)
#pragma unroll
        for (int j = 0; j < SLOTS; ++j)
            if ((j & distance) == 0) {
                const V low = v[j], high = v[j + distance];
                v[j] = low + high, v[j + distance] = low - high;
            }
    for (int other = 1; other < WARP; other *= 2) {
        const bool upper = threadIdx.x & other;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const V theirs = __shfl_xor_sync(EVERYONE, v[j], other);
            v[j] = theirs + (upper ? -v[j] : v[j]);
        }
    }
}

// The signs of a lane's elements: bit 31 - row of a hash for each slot.
struct Signs {
    u32 hash[SLOTS];

    __device__ explicit Signs(u32 seed) {
        const u32 first = seed << 8 | threadIdx.x % WARP * SLOTS;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            u32 h = first + j;
            h = (h ^ h >> 16) * 0x85EBCA6Bu;  // MurmurHash3's last steps
            h = (h ^ h >> 13) * 0xC2B2AE35u;
            hash[j] = h ^ h >> 16;
        }
    }

    __device__ float operator()(float v, int row, int j) const {
        return __uint_as_float(__float_as_uint(v) ^ (hash[j] << row & 0x80000000u));
    }
};

// The trits of five rows, three and two to a word, 10 bits apart: sums of words are words of sums, of up to 256 each.
struct Words {
    int low[SLOTS], high[SLOTS];

    // Of a row, from the words' transforms: its 10 bits come on top, rounded from those below.
    __device__ float number(int row, int j) const {
        const u32 word = (row < 3 ? low : high)[j];
        return (float)((int)((word << 22 - 10 * (row % 3)) + (1u << 21)) >> 22);
    }

    __device__ void transform() {
        hadamard(low);
        hadamard(high);
    }
};

__device__ inline float scale_of(const u32 (&head)[3], int row) {
    return __uint_as_float(row % 2 ? head[row / 2] & 0xFFFF0000u : head[row / 2] << 16);
}

template <class T>
__device__ void eden_encode(const T* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    const Rounding rounding(draw);
    const int lane = threadIdx.x % WARP;
    each_block(numel, block, [&](i64 b) {
        const Block<ROWS, T> a(x, residual, b * block, numel, block);
        const u32 seed = rounding.draws ? rounding.word(b * block) & 0xFFFF : 0;
        const Signs signs(seed);
        u32 head[3] = {0, 0, seed << 16}, packed[2] = {}, digit = 1;
        Words words = {};
        bool sound = true;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            int largest = 0;
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) largest = max(largest, magnitude_bits(a.kept[row][j]));
            largest = warp_max(largest);
            const int exponent = scale_exponent(largest);
            const float p = power(254 - exponent);
            float v[SLOTS], sums[SLOTS];
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) v[j] = signs(a.kept[row][j] * p, row, j);
            hadamard(v);
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) sums[j] = v[j] * v[j];
            const float energy = fold(sums), threshold = sqrtf(energy * 0x1p-8f) * 0.612f;
            int count = 0;
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const bool some = fabsf(v[j]) > threshold, minus = some && v[j] < 0.0f;
                sums[j] = some ? fabsf(v[j]) : 0.0f;
                count += some;
                packed[j / 4] += (((u32)some + (u32)minus) * digit) << 8 * (j % 4);  // at most 242: no carry
                const int trit = (int)some - 2 * (int)minus;
                (row < 3 ? words.low : words.high)[j] += trit * (1 << 10 * (row % 3));
            }
            digit *= 3;
            const float kept = fold(sums);
            const float level = rounding.draws ? energy / kept : kept / (float)warp_sum(count);
            const u32 bits = __float_as_uint(kept > 0.0f ? level * 0x1p-8f * power(exponent) : 0.0f);
            const u32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
            sound = sound && largest < INFINITE && is_finite(__uint_as_float(rounded << 16) * 256.0f);
            head[row / 2] |= rounded << 16 * (row % 2);
        }
        if (!sound) head[0] = head[1] = 0x7FC07FC0, head[2] = 0x7FC0 | seed << 16, packed[0] = packed[1] = 0;
        u32* const record = (u32*)(wire + b * RECORD);
        if (lane < 3) record[lane] = lane == 0 ? head[0] : lane == 1 ? head[1] : head[2];
        record[3 + 2 * lane] = packed[0], record[4 + 2 * lane] = packed[1];
        if (!sound || residual == nullptr) return;
        words.transform();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float rest[SLOTS];
#pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                rest[j] = a.kept[row][j] - signs(words.number(row, j) * scale_of(head, row), row, j);
            store8(residual, a.residual_aligned, a.at(row), a.end, rest);
        }
    });
}

template <class T>
__device__ void eden_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, int block,
                            i64* status) {
    const int lane = threadIdx.x % WARP;
    int skipped = 0, not_finite = 0;
    each_block(target.numel, block, [&](i64 b) {
        const i64 at = b * block + lane * SLOTS;
        float sums[ROWS][SLOTS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) target.begin(at + row * ROW, sums[row]);
        for (int rank = 0; rank < ranks; ++rank) {
            const u32* const record = (const u32*)(wires + rank * pitch + b * RECORD);
            const u32 head[3] = {record[0], record[1], record[2]};
            u32 packed[2] = {record[3 + 2 * lane], record[4 + 2 * lane]};
            const Signs signs(head[2] >> 16);
            skipped += drop_invalid(packed[0]) + drop_invalid(packed[1]);
            Words words;
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                int low = 0, high = 0;
                each_trit(packed[j / 4] >> 8 * (j % 4) & 255, [&](int row, int trit) {
                    int& word = row < 3 ? low : high;
                    word = word * (1 << 10) + trit - 3 * (trit >> 1);
                });
                words.low[j] = low, words.high[j] = high;
            }
            words.transform();
            bool sound = true;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) sound = sound && is_finite(scale_of(head, row) * 256.0f);
            not_finite += lane == 0 && !sound;
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int j = 0; j < SLOTS; ++j) {
                    const float value = signs(words.number(row, j) * scale_of(head, row), row, j);
                    sums[row][j] = sums[row][j] + target.alpha * value;
                }
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) target.end(at + row * ROW, sums[row]);
    });
    report(status, skipped, not_finite);
}

extern "C" {

// x: numel elements. residual: float32, updated in place, or null. draw: seed, step and stream, or null for the
// scales of least error and the rotation of seed 0.
__global__ void eden_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    eden_encode(x, residual, wire, numel, block, draw);
}

__global__ void eden_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    eden_encode(x, residual, wire, numel, block, draw);
}

__global__ void eden_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    eden_encode(x, residual, wire, numel, block, draw);
}

__global__ void eden_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int block, i64* status) {
    eden_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void eden_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int block, i64* status) {
    eden_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void eden_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                 int ranks, int block, i64* status) {
    eden_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}
}

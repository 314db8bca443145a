// EDEN: record = the scales of rows of 256 (bfloat16), the seed of their signs, then a byte of a digit of each row: five
// trits, as in trits.cuh, or eight bits, set for minus. A row is rotated by signs and Sylvester's Hadamard matrix: a
// lane's slots first, then the lanes.
#include "philox.cuh"
#include "trits.cuh"

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

// The digits of the rows as -1, 0 and 1, of three in a word, 10 bits apart: sums of words are words of sums, of up to
// 256 each.
template <int ROWS>
struct Words {
    int of[(ROWS + 2) / 3][SLOTS];

    __device__ void append(int row, int j, int digit) {
        of[row / 3][j] = of[row / 3][j] * (1 << 10) + digit;
    }

    // Of a row, from the words' transforms: its 10 bits come on top, rounded from those below.
    __device__ float number(int row, int j) const {
        const u32 word = of[row / 3][j];
        return (float)((int)((word << 22 - 10 * (row % 3)) + (1u << 21)) >> 22);
    }

    __device__ void transform() {
#pragma unroll
        for (int word = 0; word < (ROWS + 2) / 3; ++word) hadamard(of[word]);
    }
};

// A record's head, in words: scales, seed, and zeros to a whole word.
template <int ROWS>
struct Head {
    static constexpr int WORDS = (ROWS + 2) / 2, RECORD = WORDS + ROW / 4;
    u32 of[WORDS];

    __device__ float scale(int row) const {
        return __uint_as_float(row % 2 ? of[row / 2] & 0xFFFF0000u : of[row / 2] << 16);
    }

    __device__ u32 seed() const {
        return of[ROWS / 2] >> 16 * (ROWS % 2) & 0xFFFF;
    }
};

template <int ROWS, int LEVELS, class T>
__device__ void eden_encode(const T* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    const Rounding rounding(draw);
    const int lane = threadIdx.x % WARP;
    each_block(numel, block, [&](i64 b) {
        const Block<ROWS, T> a(x, residual, b * block, numel, block);
        const u32 seed = rounding.draws ? rounding.word(b * block) & 0xFFFF : 0;
        const Signs signs(seed);
        Head<ROWS> head = {};
        head.of[ROWS / 2] = seed << 16 * (ROWS % 2);
        u32 packed[2] = {}, place = 1;
        Words<ROWS> words = {};
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
                const bool some = LEVELS == 2 || fabsf(v[j]) > threshold, minus = some && v[j] < 0.0f;
                sums[j] = some ? fabsf(v[j]) : 0.0f;
                count += some;
                const u32 digit = (u32)(LEVELS == 3 && some) + (u32)minus;
                packed[j / 4] += digit * place << 8 * (j % 4);  // of a byte at most 242, or 255: no carry
                words.of[row / 3][j] += ((int)some - 2 * (int)minus) * (1 << 10 * (row % 3));
            }
            place *= LEVELS;
            const float kept = fold(sums);
            const float level = rounding.draws ? energy / kept : kept / (float)warp_sum(count);
            const u32 bits = __float_as_uint(kept > 0.0f ? level * 0x1p-8f * power(exponent) : 0.0f);
            const u32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
            sound = sound && largest < INFINITE && is_finite(__uint_as_float(rounded << 16) * 256.0f);
            head.of[row / 2] |= rounded << 16 * (row % 2);
        }
        if (!sound) {
#pragma unroll
            for (int row = 0; row < ROWS; row += 2)
                head.of[row / 2] = row + 1 < ROWS ? 0x7FC07FC0 : 0x7FC0 | seed << 16;
            packed[0] = packed[1] = 0;
        }
        u32* const record = (u32*)wire + b * Head<ROWS>::RECORD;
        if (lane == 0) {
#pragma unroll
            for (int word = 0; word < Head<ROWS>::WORDS; ++word) record[word] = head.of[word];
        }
        record[Head<ROWS>::WORDS + 2 * lane] = packed[0], record[Head<ROWS>::WORDS + 1 + 2 * lane] = packed[1];
        if (!sound || residual == nullptr) return;
        words.transform();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float rest[SLOTS];
#pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                // + 0 turns -0 into 0
                rest[j] = a.kept[row][j] - (signs(words.number(row, j) * head.scale(row), row, j) + 0.0f);
            store8(residual, a.residual_aligned, a.at(row), a.end, rest);
        }
    });
}

template <int ROWS, int LEVELS, class T>
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
            const u32* const record = (const u32*)(wires + rank * pitch) + b * Head<ROWS>::RECORD;
            Head<ROWS> head;
#pragma unroll
            for (int word = 0; word < Head<ROWS>::WORDS; ++word) head.of[word] = record[word];
            u32 packed[2] = {record[Head<ROWS>::WORDS + 2 * lane], record[Head<ROWS>::WORDS + 1 + 2 * lane]};
            const Signs signs(head.seed());
            if (LEVELS == 3) skipped += drop_invalid(packed[0]) + drop_invalid(packed[1]);
            Words<ROWS> words = {};
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const u32 byte = packed[j / 4] >> 8 * (j % 4) & 255;
                if constexpr (LEVELS == 3) {
                    each_trit(byte, [&](int row, int trit) { words.append(row, j, trit - 3 * (trit >> 1)); });
                } else {
#pragma unroll
                    for (int row = ROWS - 1; row >= 0; --row) words.append(row, j, 1 - 2 * (int)(byte >> row & 1));
                }
            }
            words.transform();
            bool sound = true;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) sound = sound && is_finite(head.scale(row) * 256.0f);
            not_finite += lane == 0 && !sound;
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int j = 0; j < SLOTS; ++j) {
                    const float value = signs(words.number(row, j) * head.scale(row), row, j);
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
    eden_encode<TRITS, 3>(x, residual, wire, numel, block, draw);
}

__global__ void eden_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    eden_encode<TRITS, 3>(x, residual, wire, numel, block, draw);
}

__global__ void eden_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    eden_encode<TRITS, 3>(x, residual, wire, numel, block, draw);
}

__global__ void eden_bits_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int block,
                                      const i64* draw) {
    eden_encode<8, 2>(x, residual, wire, numel, block, draw);
}

__global__ void eden_bits_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int block, const i64* draw) {
    eden_encode<8, 2>(x, residual, wire, numel, block, draw);
}

__global__ void eden_bits_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int block,
                                       const i64* draw) {
    eden_encode<8, 2>(x, residual, wire, numel, block, draw);
}

__global__ void eden_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int block, i64* status) {
    eden_decode<TRITS, 3>(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void eden_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int block, i64* status) {
    eden_decode<TRITS, 3>(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void eden_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                 int ranks, int block, i64* status) {
    eden_decode<TRITS, 3>(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void eden_bits_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                      i64 pitch, int ranks, int block, i64* status) {
    eden_decode<8, 2>(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void eden_bits_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                      i64 pitch, int ranks, int block, i64* status) {
    eden_decode<8, 2>(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void eden_bits_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                       i64 pitch, int ranks, int block, i64* status) {
    eden_decode<8, 2>(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}
}

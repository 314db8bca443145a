// TernGrad and Ternary: record = scale (float32), then five trits a byte. A byte's five lie 256 elements apart, so that a
// lane packs its own: byte 8 · lane + j of 1280 elements holds slot j of the lane's five rows, the first row lowest.
#include "philox.cuh"
#include "trits.cuh"

// Decoding waits for memory: a lane reads the records of so many ranks before it adds any, and registers are kept so few
// that a multiprocessor holds so many blocks. Of all pairs that were tried on an H100 these took least.
constexpr int THREADS = 256, AT_ONCE = 2, RESIDENT = BLACKWELL ? 2 : 3;

constexpr int LLOYD_STEPS = 2;

// Writes the trits of a block, and what they leave to the residual; `decide` says which elements are not zero.
template <class A, class Decide>
__device__ void write_trits(const A& a, bool sound, float level, float* residual, u8* record, const Decide& decide) {
    const int lane = threadIdx.x % WARP;
    u32 packed[2] = {}, digit = 1;
    a.each_row([&](int row, const float(&v)[SLOTS]) {
        if (sound) {
            bool some[SLOTS];
            float rest[SLOTS];
            decide(row, v, some);
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const bool minus = some[j] && v[j] < 0.0f;
                packed[j / 4] += (((u32)some[j] + (u32)minus) * digit) << 8 * (j % 4);  // at most 242: no carry
                rest[j] = v[j] - (minus ? -level : some[j] ? level : 0.0f);
            }
            if (residual != nullptr) store8(residual, a.residual_aligned, a.at(row), a.end, rest);
        }
        digit *= 3;
        if (row % TRITS == TRITS - 1) {
            u32* const words = (u32*)(record + 4 + row / TRITS * ROW) + 2 * lane;
            words[0] = packed[0], words[1] = packed[1];
            packed[0] = packed[1] = 0, digit = 1;
        }
    });
}

template <int ROWS, class T>
__device__ void terngrad_encode_block(const T* x, float* residual, u8* wire, i64 numel, int block, float clip,
                                      const Rounding& rounding, i64 b) {
    const Block<ROWS, T> a(x, residual, b * block, numel, block);
    const int lane = threadIdx.x % WARP, n = (int)(a.end - b * block);
    u8* const record = wire + b * (4 + block / TRITS);

    const int largest = largest_bits(a), exponent = scale_exponent(largest);
    const float p = power(254 - exponent);
    const bool sound = largest < INFINITE;
    const float sigma = sqrtf(sum_of_squares(a, p) / (float)n), clipped = clip * sigma;
    float scaled = __int_as_float(largest) * p;
    if (clipped < scaled) scaled = clipped;  // not so when it is infinity times zero
    float level = scaled * power(exponent);
    if (largest > 0 && level == 0.0f) level = 0x1p-149f;
    if (lane == 0) *(float*)record = sound ? level : __int_as_float(NOT_A_NUMBER);
    const float inverse = scaled > 0.0f ? 1.0f / scaled : 0.0f;

    write_trits(a, sound, level, residual, record, [&](int row, const float(&v)[SLOTS], bool(&some)[SLOTS]) {
        float r[SLOTS];
        rounding(a.at(row), r);
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) some[j] = fabsf(v[j]) * p * inverse + r[j] >= 1.0f;
    });
}

template <class T>
__device__ void terngrad_encode(const T* x, float* residual, u8* wire, i64 numel, int block, float clip,
                                const i64* draw) {
    const Rounding rounding(draw);
    each_block(numel, block, [&](i64 b) {
        if (block == TRITS * ROW)
            terngrad_encode_block<TRITS>(x, residual, wire, numel, block, clip, rounding, b);
        else
            terngrad_encode_block<0>(x, residual, wire, numel, block, clip, rounding, b);
    });
}

// The canonical sum of the magnitudes above a threshold, and their mean; 0 where there are none.
template <class B>
__device__ float sum_above(const B& block, float threshold, float& mean) {
    float sums[SLOTS] = {};
    int count = 0;
    block.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const bool above = fabsf(v[j]) > threshold;
            count += above;
            sums[j] = sums[j] + (above ? fabsf(v[j]) : 0.0f);
        }
    });
    const float total = fold(sums);
    mean = total / (float)max(warp_sum(count), 1);
    return total;
}

// What a nonzero trit stands for, of a block of n elements whose magnitudes have a finite sum. Every lane gets it.
template <class B>
__device__ float best_level(const B& block, float total, int n) {
    const int largest = largest_bits(block);
    const float p = power(254 - scale_exponent(largest)), limit = __int_as_float(largest);
    float level = 0.0f, best = 0.0f, mean;
    for (float at = total / (float)n * 0.5f; at < limit; at = fmaxf(at + at, 0x1p-149f)) {
        const float kept = sum_above(block, at, mean), gain = (kept * p) * (mean * p);
        if (gain > best) level = mean, best = gain;
    }
    for (int step = 0; step < LLOYD_STEPS; ++step) {
        sum_above(block, level * 0.5f, mean);
        level = mean;
    }
    return level;
}

template <int ROWS, class T>
__device__ void ternary_encode_block(const T* x, float* residual, u8* wire, i64 numel, int block, i64 b) {
    const Block<ROWS, T> a(x, residual, b * block, numel, block);
    float sums[SLOTS] = {};
    a.each_row([&](int, const float(&v)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) sums[j] = sums[j] + fabsf(v[j]);
    });
    const float total = fold(sums);
    const int lane = threadIdx.x % WARP, n = (int)(a.end - b * block);
    const bool sound = is_finite(total);  // then every element is finite
    const float level = sound ? best_level(a, total, n) : 0.0f, threshold = level * 0.5f;
    u8* const record = wire + b * (4 + block / TRITS);
    if (lane == 0) *(float*)record = sound ? level : __int_as_float(NOT_A_NUMBER);

    write_trits(a, sound, level, residual, record, [&](int, const float(&v)[SLOTS], bool(&some)[SLOTS]) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) some[j] = fabsf(v[j]) > threshold;
    });
}

template <class T>
__device__ void ternary_encode(const T* x, float* residual, u8* wire, i64 numel, int block) {
    each_block(numel, block, [&](i64 b) {
        if (block == TRITS * ROW)
            ternary_encode_block<TRITS>(x, residual, wire, numel, block, b);
        else
            ternary_encode_block<0>(x, residual, wire, numel, block, b);
    });
}

// What a trit stands for lies in lane `trit` of each four lanes: a code says from which lane to take its own.
template <class T>
__device__ void ternary_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, int block,
                                i64* status) {
    const int lane = threadIdx.x % WARP;
    const float own = (lane & 3) == 2 ? -1.0f : (float)(lane & 1);
    int skipped = 0, not_finite = 0;
    each_block(target.numel, block, [&](i64 b) {
        const u8* const records = wires + b * (4 + block / TRITS);
        for (int chunk = 0; chunk < block / (TRITS * ROW); ++chunk) {
            const i64 at = b * block + chunk * TRITS * ROW + lane * SLOTS;
            float sums[TRITS][SLOTS];
#pragma unroll
            for (int row = 0; row < TRITS; ++row) target.begin(at + row * ROW, sums[row]);
            const u8* record = records;
            for (int rank = 0; rank < ranks; rank += AT_ONCE, record += AT_ONCE * pitch) {
                u32 words[AT_ONCE][2];
#pragma unroll
                for (int r = 0; r < AT_ONCE; ++r) {
                    // NVRTC for Blackwell wants loads that no condition guards.
                    const int there = BLACKWELL ? min(r, ranks - 1 - rank) : r;
                    const u32* const bytes = (const u32*)(record + there * pitch + 4 + chunk * ROW) + 2 * lane;
                    const bool reads = BLACKWELL || rank + r < ranks;
                    words[r][0] = reads ? bytes[0] : 0, words[r][1] = reads ? bytes[1] : 0;
                }
                float scale = 0.0f;  // of rank + lane
                if (lane < AT_ONCE && rank + lane < ranks) scale = *(const float*)(record + lane * pitch);
                not_finite += chunk == 0 && !is_finite(scale);
#pragma unroll
                for (int r = 0; r < AT_ONCE; ++r) {
                    if (rank + r >= ranks) break;
                    const float value = target.alpha * (own * __shfl_sync(EVERYONE, scale, r));
                    skipped += drop_invalid(words[r][0]) + drop_invalid(words[r][1]);
#pragma unroll
                    for (int j = 0; j < SLOTS; ++j) {
                        each_trit(words[r][j / 4] >> 8 * (j % 4) & 255, [&](int row, int trit) {
                            sums[row][j] = sums[row][j] + __shfl_sync(EVERYONE, value, trit, 4);
                        });
                    }
                }
            }
#pragma unroll
            for (int row = 0; row < TRITS; ++row) target.end(at + row * ROW, sums[row]);
        }
    });
    report(status, skipped, not_finite);
}

extern "C" {

// draw: seed, step and stream, or null to round to nearest. wire: records of 4 + block / 5 bytes.
__global__ void terngrad_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int block, float clip,
                                    const i64* draw) {
    terngrad_encode(x, residual, wire, numel, block, clip, draw);
}

__global__ void terngrad_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int block, float clip,
                                    const i64* draw) {
    terngrad_encode(x, residual, wire, numel, block, clip, draw);
}

__global__ void terngrad_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int block, float clip,
                                     const i64* draw) {
    terngrad_encode(x, residual, wire, numel, block, clip, draw);
}

// x: numel elements. residual: float32, updated in place, or null.
__global__ void ternary_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int block) {
    ternary_encode(x, residual, wire, numel, block);
}

__global__ void ternary_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int block) {
    ternary_encode(x, residual, wire, numel, block);
}

__global__ void ternary_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int block) {
    ternary_encode(x, residual, wire, numel, block);
}

__global__ void __launch_bounds__(THREADS, RESIDENT)
ternary_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch, int ranks,
                   int block, i64* status) {
    ternary_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void ternary_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                   int ranks, int block, i64* status) {
    ternary_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}

__global__ void ternary_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires,
                                     i64 pitch, int ranks, int block, i64* status) {
    ternary_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, status);
}
}

// QSGD: record = unit (float32), then `bits` bits an element: the level, and on top the sign.
#include "common.cuh"

// Codes lie end to end from the lowest bit up, so a lane's eight are `bits` bytes of their own.
__device__ inline void store_codes(u8* target, u64 codes, int bits) {
    if (bits == 4) {
        *(u32*)target = (u32)codes;
        return;
    }
    for (int byte = 0; byte < bits; ++byte) target[byte] = (u8)(codes >> 8 * byte);
}

__device__ inline u64 load_codes(const u8* source, int bits) {
    if (bits == 4) return *(const u32*)source;
    u64 codes = 0;
    for (int byte = 0; byte < bits; ++byte) codes |= (u64)source[byte] << 8 * byte;
    return codes;
}

template <int ROWS, class T>
__device__ void qsgd_encode_block(const T* x, float* residual, u8* wire, i64 numel, int block, int bits, int l2,
                                  const Rounding& rounding, i64 b) {
    const Block<ROWS, T> a(x, residual, b * block, numel, block);
    const int lane = threadIdx.x % WARP, s = (1 << (bits - 1)) - 1;
    u8* const record = wire + b * (4 + block / 8 * bits);

    const int largest = largest_bits(a), exponent = scale_exponent(largest);
    const float p = power(254 - exponent);
    const float norm = l2 ? sqrtf(sum_of_squares(a, p)) : __int_as_float(largest) * p;
    float unit = norm / (float)s * power(exponent);
    if (largest > 0 && unit == 0.0f) unit = 0x1p-149f;
    const bool sound = largest < INFINITE && is_finite(unit);
    if (lane == 0) *(float*)record = sound ? unit : __int_as_float(NOT_A_NUMBER);
    const float scaled_unit = unit * p;  // of the unit as it is sent, which has lost bits if it is subnormal
    const float inverse = scaled_unit > 0.0f ? 1.0f / scaled_unit : 0.0f;

    a.each_row([&](int row, const float(&v)[SLOTS]) {
        u64 codes = 0;
        if (sound) {
            float r[SLOTS];
            rounding(a.at(row), r);
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                const int level = (int)fminf(fabsf(v[j]) * p * inverse + r[j], (float)s);
                const bool minus = v[j] < 0.0f && level > 0;
                codes |= (u64)(level | (int)minus << (bits - 1)) << bits * j;
                const float decoded = minus ? -((float)level * unit) : (float)level * unit;
                // s times the unit may round beyond the largest float32: then the residual stays.
                if (residual != nullptr) r[j] = is_finite(decoded) ? v[j] - decoded : __int_as_float(NOT_A_NUMBER);
            }
            if (residual != nullptr) {
                bool all = true;
#pragma unroll
                for (int j = 0; j < SLOTS; ++j) all = all && is_finite(r[j]);
                if (all) {
                    store8(residual, a.residual_aligned, a.at(row), a.end, r);
                } else {
                    for (int j = 0; j < SLOTS; ++j)
                        if (is_finite(r[j]) && a.at(row) + j < a.end) residual[a.at(row) + j] = r[j];
                }
            }
        }
        store_codes(record + 4 + (row * WARP + lane) * bits, codes, bits);
    });
}

template <class T>
__device__ void qsgd_encode(const T* x, float* residual, u8* wire, i64 numel, int block, int bits, int l2,
                            const i64* draw) {
    const Rounding rounding(draw);
    each_block(numel, block, [&](i64 b) {
        if (block == 2 * ROW)
            qsgd_encode_block<2>(x, residual, wire, numel, block, bits, l2, rounding, b);
        else
            qsgd_encode_block<0>(x, residual, wire, numel, block, bits, l2, rounding, b);
    });
}

template <class T>
__device__ void qsgd_decode(const Target<T>& target, const u8* wires, i64 pitch, int ranks, int block, int bits,
                            i64* status) {
    const int lane = threadIdx.x % WARP, s = (1 << (bits - 1)) - 1, sign = 1 << (bits - 1);
    int skipped = 0, not_finite = 0;
    each_block(target.numel, block, [&](i64 b) {
        const u8* const records = wires + b * (4 + block / 8 * bits);
        for (int rank = lane; rank < ranks; rank += WARP)
            not_finite += !is_finite(*(const float*)(records + rank * pitch));
        for (int row = 0; row < block / ROW; ++row) {
            const i64 begin = b * block + row * ROW + lane * SLOTS;
            target.accumulate(begin, [&](float(&sums)[SLOTS]) {
#pragma unroll 4
                for (int rank = 0; rank < ranks; ++rank) {
                    const u8* record = records + rank * pitch;
                    const float unit = *(const float*)record;
                    const u64 codes = load_codes(record + 4 + (row * WARP + lane) * bits, bits);
#pragma unroll
                    for (int j = 0; j < SLOTS; ++j) {
                        const int code = (int)(codes >> bits * j) & (2 * sign - 1), level = code & s;
                        // What pads a tail is not looked at.
                        skipped += code == sign && begin + j < target.numel;
                        sums[j] = sums[j] + target.alpha * ((float)(code & sign ? -level : level) * unit);
                    }
                }
            });
        }
    });
    report(status, skipped, not_finite);
}

extern "C" {

// draw: seed, step and stream, or null to round to nearest. wire: records of 4 + block / 8 · bits bytes.
__global__ void qsgd_encode_f32(const float* x, float* residual, u8* wire, i64 numel, int block, int bits, int l2,
                                const i64* draw) {
    qsgd_encode(x, residual, wire, numel, block, bits, l2, draw);
}

__global__ void qsgd_encode_f16(const Half* x, float* residual, u8* wire, i64 numel, int block, int bits, int l2,
                                const i64* draw) {
    qsgd_encode(x, residual, wire, numel, block, bits, l2, draw);
}

__global__ void qsgd_encode_bf16(const Bfloat* x, float* residual, u8* wire, i64 numel, int block, int bits, int l2,
                                 const i64* draw) {
    qsgd_encode(x, residual, wire, numel, block, bits, l2, draw);
}

__global__ void qsgd_decode_f32(float* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int block, int bits, i64* status) {
    qsgd_decode(Target<float>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, bits, status);
}

__global__ void qsgd_decode_f16(Half* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                int ranks, int block, int bits, i64* status) {
    qsgd_decode(Target<Half>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, bits, status);
}

__global__ void qsgd_decode_bf16(Bfloat* out, i64 numel, float alpha, int add, float scale, const u8* wires, i64 pitch,
                                 int ranks, int block, int bits, i64* status) {
    qsgd_decode(Target<Bfloat>{out, numel, alpha, add, scale}, wires, pitch, ranks, block, bits, status);
}
}

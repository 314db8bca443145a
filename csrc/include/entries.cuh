// Entries of sparse gradients, packed (entries.cu has the format): one word or value of them at a time, and how to find an
// entry among indices that have been unpacked.
#pragma once
#include "common.cuh"

constexpr int WORD = 32, NO_INDEX = -1;
constexpr int MISSING = -128, LEVELS = 127;
// The largest unit: 127 of it are finite.
constexpr float LARGEST_UNIT = 132104.046875f * 0x1p104f;

// How many of k entries are used; a null count means all.
__device__ inline i64 used_of(const u32* count, i64 k) {
    return count == nullptr ? k : min((i64)count[0], k);
}

// ---- indices

// Ascending indices on their way into words.
struct Ascending {
    const u32* indices;
    i64 used, base;
    int low_bits;

    __device__ i64 at(i64 i) const {
        return (i64)indices[i] - base;
    }

    // Which bit of `upper` stands for entry i.
    __device__ i64 place(i64 i) const {
        return (at(i) >> low_bits) + i;
    }

    __device__ u32 upper(i64 word) const {
        const i64 begin = word * WORD;
        // The first entry whose bit lies here or beyond: bit i at least is entry i's.
        i64 first = 0, last = min(used, begin);
        while (first < last) {
            const i64 middle = (first + last) / 2;
            if (place(middle) < begin)
                first = middle + 1;
            else
                last = middle;
        }
        u32 bits = 0;
        for (; first < used && place(first) < begin + WORD; ++first) bits |= 1u << (place(first) - begin);
        return bits;
    }

    __device__ u32 low(i64 word) const {
        const i64 begin = word * WORD;
        u32 bits = 0;
        for (i64 i = begin / low_bits; i < used && i * low_bits < begin + WORD; ++i) {
            const u32 mine = (u32)at(i) & ((1u << low_bits) - 1);
            const i64 shift = i * low_bits - begin;
            bits |= shift >= 0 ? mine << shift : mine >> -shift;
        }
        return bits;
    }
};

// Indices as they have been unpacked: their upper parts never descend, whatever the wire was, but for NO_INDEX, which may
// stand among the highest. An index counts if it is above every one before it.
struct Unpacked {
    const u32* indices;
    i64 count;
    int low_bits;

    // The first whose upper part is at least this one.
    __device__ i64 from(u32 upper) const {
        i64 first = 0, last = count;
        while (first < last) {
            const i64 middle = (first + last) / 2;
            if (indices[middle] >> low_bits < upper)
                first = middle + 1;
            else
                last = middle;
        }
        return first;
    }

    // Whether entry i counts: only those with its upper part can be in its way, which are few in a sound wire.
    __device__ bool counts(i64 i) const {
        const u32 index = indices[i];
        if (index == (u32)NO_INDEX) return false;
        for (i64 before = i - 1; before >= 0; --before) {
            const u32 other = indices[before];
            if (other == (u32)NO_INDEX) continue;
            if (other >> low_bits < index >> low_bits) break;
            if (other >= index) return false;
        }
        return true;
    }

    // Where an index is that counts; -1: nowhere.
    __device__ i64 find(u32 index) const {
        i64 highest = -1;
        for (i64 i = from(index >> low_bits); i < count; ++i) {
            const u32 other = indices[i];
            if (other == (u32)NO_INDEX) continue;
            if (other >> low_bits != index >> low_bits) break;
            if (other == index && (i64)other > highest) return i;
            highest = max(highest, (i64)other);
        }
        return -1;
    }
};

// ---- values

// How values are packed.
enum Form { FLOAT, BFLOAT, CODES };

// A finite value stays finite.
__device__ inline Bfloat saturated(float v) {
    Bfloat rounded;
    from_float(v, rounded);
    if (is_finite(v) && (rounded.bits & 0x7FFF) == 0x7F80) --rounded.bits;
    return rounded;
}

// Zero only where all is zero.
__device__ inline float unit_of(float largest) {
    const float unit = fminf(__fdiv_rn(largest, (float)LEVELS), LARGEST_UNIT);
    return largest > 0.0f && unit == 0.0f ? 0x1p-149f : unit;
}

__device__ inline int code_of(float v, float unit) {
    if (!is_finite(v)) return MISSING;
    if (unit == 0.0f) return 0;
    return (int)fminf(fmaxf(rintf(__fdiv_rn(v, unit)), -LEVELS), LEVELS);
}

__device__ inline float decoded_of(int code, float unit) {
    return code == MISSING ? __int_as_float(NOT_A_NUMBER) : (float)code * unit;
}

// Word `word` of k values as bfloat16: two of them, of which the last may be missing. keep(i, value, what it decodes to).
template <class K>
__device__ inline void pack_pair(const float* values, i64 k, i64 word, u8* wire, K keep) {
    u32 both = 0;
    for (int j = 0; j < 2; ++j) {
        const i64 i = 2 * word + j;
        if (i >= k) break;
        const Bfloat sent = saturated(values[i]);
        both |= (u32)sent.bits << (16 * j);
        keep(i, values[i], to_float(sent));
    }
    ((u32*)wire)[word] = both;
}

// Unit `unit` of k values as codes, by a warp. The codes that fill up the last word are zero.
template <class K>
__device__ inline void pack_unit(const float* values, bool aligned, i64 k, i64 unit, u8* wire, K keep) {
    u32* const codes = (u32*)wire + (k + ROW - 1) / ROW;
    const i64 begin = unit * ROW + threadIdx.x % WARP * SLOTS;
    float v[SLOTS];
    load8(values, aligned, begin, k, v);
    int largest = 0;
#pragma unroll
    for (int j = 0; j < SLOTS; ++j)
        if (is_finite(v[j])) largest = max(largest, magnitude_bits(v[j]));
    const float step = unit_of(__int_as_float(warp_max(largest)));
    if (threadIdx.x % WARP == 0) ((float*)wire)[unit] = step;
    u32 words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        const int code = code_of(v[j], step);
        words[j / 4] |= (u32)(code & 0xFF) << (8 * (j % 4));
        if (begin + j < k) keep(begin + j, v[j], decoded_of(code, step));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (begin + 4 * half < k) codes[begin / 4 + half] = words[half];
}

// Value i of k that have been packed.
__device__ inline float value_at(const u8* wire, int form, i64 k, i64 i) {
    if (form == FLOAT) return ((const float*)wire)[i];
    if (form == BFLOAT) return to_float(((const Bfloat*)wire)[i]);
    const float* const units = (const float*)wire;
    return decoded_of(((const signed char*)(units + (k + ROW - 1) / ROW))[i], units[i / ROW]);
}

// Rows of packed values.
struct Values {
    const u8* rows;
    i64 pitch;
    int form;
    i64 each;

    __device__ float at(int row, i64 i) const {
        return value_at(rows + row * pitch, form, each, i);
    }
};

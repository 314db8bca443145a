// The record of a chunk: how it is laid out, what its levels mean, and how it is read. chunked_topk.cu writes it.
#pragma once
#include "common.cuh"

constexpr int THREADS = 256;  // of a block

// How a record is laid out, in words.
struct Form {
    int chunk, k, bits, low_bits, upper_words, low_words;

    __device__ int upper() const {
        return bits < 16 ? 2 : 0;
    }

    __device__ int low() const {
        return upper() + upper_words;
    }

    __device__ int codes() const {
        return low() + low_words;
    }

    __device__ int words() const {
        return codes() + (k * bits + 31) / 32;
    }

    // The highest level of values that have any.
    __device__ int top() const {
        return (1 << (bits - 1)) - 1;
    }
};

// What lies between the levels: nothing where they are equal.
__device__ inline float step_of(float smallest, float largest, int top) {
    return (largest - smallest) / (float)top;
}

__device__ inline float level_at(int level, float smallest, float largest, float step) {
    const float magnitude = smallest + (float)level * step;
    return magnitude > largest ? largest : magnitude;
}

// One rank's record of a chunk, in shared memory. Whatever its bytes are, nothing is read outside of it.
struct Record {
    const Form& form;
    const u32* words;
    float smallest, largest, step, lowest, highest;  // of fewer than 16 bits; then what levels 0 and 1 mean

    __device__ Record(const Form& form, const u32* words, float step) : form(form), words(words), step(step) {
        smallest = __uint_as_float(words[0]), largest = __uint_as_float(words[1]);
        lowest = level_at(0, smallest, largest, step), highest = level_at(1, smallest, largest, step);
    }

    // The word that begins with entry i, which is even, and has the next one's code too unless a code fills it.
    __device__ u32 code_from(int i) const {
        const u32 first = (u32)(i * form.bits);
        return words[form.codes() + first / 32] >> first % 32;
    }

    // What a word stands for that begins with a code.
    __device__ float value(u32 code) const {
        if (form.bits == 32) return __uint_as_float(code);
        if (form.bits == 16) return __uint_as_float(code << 16);
        const int level = (int)code & form.top();
        const float some = level != 0 ? highest : lowest;
        const float magnitude = form.bits == 2 ? some : level_at(level, smallest, largest, step);
        return code >> (form.bits - 1) & 1 ? -magnitude : magnitude;
    }

    // 32 bits of the low bits, from those of entry i on.
    __device__ u32 low_from(int i) const {
        if (form.low_bits == 0) return 0;
        const u32 first = (u32)(i * form.low_bits);
        const u32* const word = words + form.low() + first / 32;
        return __funnelshift_r(word[0], word[1], first);  // by its last 5 bits; behind the last word the codes begin
    }

    // Where an entry of a bucket lies in the chunk: a bucket has the positions that differ in their low bits alone.
    __device__ int position(int bucket, u32 low) const {
        return (bucket << form.low_bits) + (int)(low & ((1u << form.low_bits) - 1));
    }

    // The highest position below n of the entries before i in its bucket, or -1. Those of other buckets are lower.
    __device__ int highest_before(int i, const u16* buckets, int n) const {
        int highest = -1;
        for (int j = i - 1; j >= 0 && buckets[j] == buckets[i]; --j) {
            const int at = position(buckets[j], low_from(j));
            if (at < n) highest = max(highest, at);
        }
        return highest;
    }
};

// What a warp finds in a record: how many entries it says it has, or -1 if its chunk is not finite; from level to level.
struct Found {
    int count;
    float step;
};

// Lists the buckets of up to k entries, by one warp.
__device__ inline Found find(const Form& form, const u32* words, u16* buckets) {
    const int lane = threadIdx.x % WARP;
    float step = 0.0f;
    bool wild = false;
    if (form.bits < 16) {
        const float smallest = __uint_as_float(words[0]), largest = __uint_as_float(words[1]);
        wild = !is_finite(smallest) || !is_finite(largest);
        step = step_of(smallest, largest, form.top());
    } else {
        for (int i = lane; i < form.k; i += WARP) {
            const u32 word = words[form.codes() + i * form.bits / 32];
            wild |= !is_finite(__uint_as_float(form.bits == 16 ? word >> i * 16 % 32 << 16 : word));
        }
    }
    if (__ballot_sync(EVERYONE, wild) != 0) return Found{-1, step};
    int counted = 0;
    for (int first = 0; first < form.upper_words; first += WARP) {
        u32 left = first + lane < form.upper_words ? words[form.upper() + first + lane] : 0;
        const int mine = __popc(left);
        int sum = mine;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int below = __shfl_up_sync(EVERYONE, sum, distance);
            if (lane >= distance) sum += below;
        }
        const int before = counted + sum - mine, room = form.k - before;
        u16* const mine_from = buckets + before;
        for (int i = 0, place = 32 * (first + lane) - 1 - before; left != 0 && i < room; left &= left - 1, ++i)
            mine_from[i] = (u16)(place - i + __ffs((int)left));
        counted += __shfl_sync(EVERYONE, sum, WARP - 1);
    }
    return Found{counted, step};
}

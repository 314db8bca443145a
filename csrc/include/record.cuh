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

// One rank's record of a chunk. Whatever its bytes are, nothing is read outside of it.
struct Record {
    const Form& form;
    const u32* words;
    float smallest, largest, step;

    __device__ Record(const Form& form, const u32* words)
        : form(form), words(words), smallest(0.0f), largest(0.0f), step(0.0f) {
        if (form.bits < 16) {
            smallest = __uint_as_float(words[0]), largest = __uint_as_float(words[1]);
            step = step_of(smallest, largest, form.top());
        }
    }

    __device__ float value(int i) const {
        const u32 word = words[form.codes() + i * form.bits / 32];
        if (form.bits == 32) return __uint_as_float(word);
        const u32 code = word >> (i * form.bits) % 32 & ((1u << form.bits) - 1);
        if (form.bits == 16) return __uint_as_float(code << 16);
        const int top = form.top();
        const float magnitude = level_at((int)code & top, smallest, largest, step);
        return (int)code > top ? -magnitude : magnitude;
    }

    // Whether the chunk is finite, as the block's threads find together.
    __device__ bool is_sound() const {
        if (form.bits < 16) return is_finite(smallest) && is_finite(largest);
        int wild = 0;
        for (int i = threadIdx.x; i < form.k; i += THREADS) wild |= !is_finite(value(i));
        return !__syncthreads_or(wild);
    }

    __device__ bool is_set(int place) const {
        return words[form.upper() + place / 32] >> place % 32 & 1;
    }

    // How many entries lie before each word of the upper bits, by one warp.
    __device__ void count_before(u16* before) const {
        const int lane = threadIdx.x % WARP;
        int counted = 0;
        for (int first = 0; first < form.upper_words; first += WARP) {
            const int mine = first + lane < form.upper_words ? __popc(words[form.upper() + first + lane]) : 0;
            int sum = mine;
#pragma unroll
            for (int distance = 1; distance < WARP; distance *= 2) {
                const int below = __shfl_up_sync(EVERYONE, sum, distance);
                if (lane >= distance) sum += below;
            }
            if (first + lane < form.upper_words) before[first + lane] = (u16)(counted + sum - mine);
            counted += __shfl_sync(EVERYONE, sum, WARP - 1);
        }
    }

    // How many entries lie before a place.
    __device__ int entries_before(int place, const u16* before) const {
        return before[place / 32] + __popc(words[form.upper() + place / 32] & ((1u << place % 32) - 1));
    }

    // Where entry `i`, which is set at a place, lies in the chunk.
    __device__ int position(int place, int i) const {
        if (form.low_bits == 0) return place - i;
        const int first = i * form.low_bits, shift = first % 32;
        const u32* const word = words + form.low() + first / 32;
        u32 bits = word[0] >> shift;
        if (shift + form.low_bits > 32) bits |= word[1] << (32 - shift);
        return ((place - i) << form.low_bits) + (int)(bits & ((1u << form.low_bits) - 1));
    }

    // Whether a position is in range and above every such one before it. Only those in adjacent places can be above.
    __device__ bool counts(int place, int i, int at, int n) const {
        if (at >= n) return false;
        for (int back = 1; back <= i && is_set(place - back); ++back) {
            const int earlier = position(place - back, i - back);
            if (earlier >= at && earlier < n) return false;
        }
        return true;
    }
};

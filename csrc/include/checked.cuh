// Entries of wires, as they are, once `topk_check` and `topk_repair` have looked at them.
#pragma once
#include "common.cuh"

// Entry i of a rank's wire: whether it counts, and its index.
struct Entries {
    const u32* indices;
    const float* values;
    const int* reach;  // null where the wire ascends

    __device__ Entries(const u8* rows, i64 pitch, const u8* value_rows, i64 value_pitch, int rank, int k,
                       const u32* broken, const int* reach)
        : indices((const u32*)(rows + rank * pitch) + 1), values((const float*)(value_rows + rank * value_pitch)),
          reach(broken[rank] ? reach + (i64)rank * k : nullptr) {}

    __device__ i64 count(int k) const {
        return min((i64)indices[-1], (i64)k);
    }

    __device__ bool at(i64 i, i64& index) const {
        if (reach == nullptr) {
            index = indices[i];
            return true;
        }
        index = reach[i];
        return index > (i > 0 ? reach[i - 1] : -1);
    }
};

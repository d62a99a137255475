// The dropout mask of a P fragment, regenerated as in the forward pass.
#pragma once
#include "sm90/bwd_fragments.cuh"

// A bit for each element of a lane. A Philox call serves four keys of a row, which lie in several lanes; so each of
// these lanes makes the words of a part of the rows, and they exchange them.
struct DropoutMask {
    unsigned bits[4];

    __device__ __forceinline__ static unsigned kept_of_four_keys(const Params& p, int b, int h, int row, int key) {
        const Words words = philox(p.seed, key >> 2, row, h, b);
        unsigned kept = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) kept |= (words.word[j] >= (unsigned)p.dropout_threshold ? 1u : 0u) << j;
        return kept;
    }
    // Of rows 4 m + i, in the order of elements, lane i of four has bits 16 * half + 4 m + key % 4.
    __device__ __forceinline__ void fill(const Params& p, int b, int h, int row0, int k0) {
        static_assert(!HAS_DROPOUT || S_REGS <= 32, "a lane's bits of a part of the rows fit a word");
        unsigned own = 0;
        const int part = threadIdx.x % 16 / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int m = 0; m < S_REGS / 8; ++m) {
                const int e = 4 * m + part;
                const int row = row0 + lane_row(e / 2, e % 2);
                own |= kept_of_four_keys(p, b, h, row, k0 + lane_key(half)) << (16 * half + 4 * m);
            }
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = __shfl_sync(~0u, own, (threadIdx.x % 32 & ~12) | 4 * i) >> part;
    }
    __device__ __forceinline__ bool kept(int n, int half, int c) const {
        const int e = 2 * n + c;
        return bits[e % 4] >> (16 * half + e / 4 * 4) & 1;
    }
};

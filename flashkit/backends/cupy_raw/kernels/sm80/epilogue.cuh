// How a block of the forward pass ends (sm80_forward.cu), and what it does again where weights of 0 met what is not finite.
#pragma once
#include "sm80/layout.cuh"

// S = Q K^T on the ordinary units.
DEVICE void scores_nonfinite(float (&s)[TILES][KEYS][4], unsigned char* q, unsigned char* k) {
#pragma unroll 1
    for (int d = 0; d < HEAD_DIM; ++d)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                const float x = (float)widen(element<HEAD_DIM>(q, row, d));
#pragma unroll
                for (int n = 0; n < KEYS; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        s[i][n][2 * half + c] += x * (float)widen(element<HEAD_DIM>(k, Place::key(n) + c, d));
            }
}

// O += P V, leaving out the values of weights that are 0.
DEVICE void accumulate_nonfinite(float (&output)[TILES][COLUMNS][4], const float (&s)[TILES][KEYS][4],
                                 const storage* weights, unsigned char* v) {
    float own[TILES][KEYS][4];  // indexed by the loop below, so in memory
    if constexpr (WARPS_K == 1) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) own[i][n][e] = s[i][n][e];
    }
#pragma unroll 1
    for (int k = 0; k < BLOCK_K; ++k) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                const float w = WARPS_K == 1
                    ? __shfl_sync(~0u, own[i][k / 8 % KEYS][2 * half + k % 2], (threadIdx.x & 28) + k % 8 / 2)
                    : (float)widen(weights[row * (PITCH_P / (int)sizeof(storage)) + k]);
                if (w != 0) {
#pragma unroll
                    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c)
                            output[i][n][2 * half + c] += w * (float)widen(element<HEAD_DIM_V>(v, k, Place::column(n) + c));
                }
            }
    }
}

// Divide by the sums; store output and log-sum-exp, or those of a part. Outputs go through the memory of Q, where its rows
// are wide enough.
constexpr bool STAGED = !SPLIT && padded(HEAD_DIM_V) <= padded(HEAD_DIM);
DEVICE void finish(const Params& p, const Place& at, int part, const float (&m)[TILES][2], const float (&l)[TILES][2],
                   float (&output)[TILES][COLUMNS][4], unsigned char* q_of_warp) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int index = at.row(i, half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
            float top = m[i][half], sum = l[i][half], factor = 1;
            if (HAS_SINKS && !SPLIT) {  // one more logit in the sum, without a value
                const float sink = static_cast<const float*>(p.sinks)[h] * LOG2E;
                if (sink != HIDDEN) {
                    top = fmaxf(top, sink);
                    factor = exp2_fast(m[i][half] - top);
                    sum = sum * factor + exp2_fast(sink - top);
                }
            }
            const bool empty = sum == 0;  // no key is visible
            // Of 16-bit elements the last bits of float32 make no difference, and finding them takes 2 % of a short call.
            const float lse = empty ? HIDDEN : IS_FLOAT32 ? fmaf(top, LN2, logf(sum)) : (top + log2_fast(sum)) * LN2;
            factor = empty ? 0.0f : IS_FLOAT32 ? factor / sum : factor * reciprocal(sum);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) output[i][n][2 * half] *= factor, output[i][n][2 * half + 1] *= factor;
            if (index >= at.rows) continue;
            if (threadIdx.x % 4 == 0 && at.share() == 0) {
                if constexpr (SPLIT) *row_at<float>(p.lse_partial, part * p.batch + at.b, h, row) = lse;
                else *row_at<float>(p.lse, at.b, h, row) = lse;
            }
            if constexpr (SPLIT) {
                float* target = row_at<float>(p.o_partial, part * p.batch + at.b, h, row);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    const int column = at.column(n);
                    if (column < HEAD_DIM_V) target[column] = output[i][n][2 * half];
                    if (column + 1 < HEAD_DIM_V) target[column + 1] = output[i][n][2 * half + 1];
                }
            } else if constexpr (!STAGED) {
                storage* target = row_at<storage>(p.out, at.b, h, row);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n)
                    store_pair<HEAD_DIM_V>(target, at.column(n), output[i][n][2 * half], output[i][n][2 * half + 1]);
            }
        }
    if constexpr (STAGED) {
        const int column = at.share() * COLUMNS * 8;
        store_tile<HEAD_DIM_V, HEAD_DIM>(output, 1.0f, q_of_warp, column, column, Rows<PACK_GQA>(p.out, at.b, at.h),
                                         at.row0 + at.row_of_warp(), at.rows);
    }
}

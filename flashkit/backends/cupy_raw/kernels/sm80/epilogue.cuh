// The epilogue of the forward pass, and the recomputation of tiles with a non-finite O.
#pragma once
#include "sm80/layout.cuh"

// S = Q K^T by FFMA.
DEVICE void scores_nonfinite(float (&s)[TILES][KEYS][4], unsigned char* q, unsigned char* k) {
#pragma unroll 1
    for (int d = 0; d < HEAD_DIM; ++d)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = WorkTile::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                const float x = (float)widen(element<HEAD_DIM>(q, row, d));
#pragma unroll
                for (int n = 0; n < KEYS; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        s[i][n][2 * half + c] += x * (float)widen(element<HEAD_DIM>(k, WorkTile::key(n) + c, d));
            }
}

// O += P V by FFMA; skips rows of V whose P is 0.
DEVICE void accumulate_nonfinite(float (&o)[TILES][COLUMNS][4], const float (&s)[TILES][KEYS][4],
                                 const storage* p_tile, unsigned char* v) {
    float own[TILES][KEYS][4];  // indexed at run time, hence in local memory
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
                const int row = WorkTile::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                const float x = WARPS_K == 1
                    ? __shfl_sync(~0u, own[i][k / 8 % KEYS][2 * half + k % 2], (threadIdx.x & 28) + k % 8 / 2)
                    : (float)widen(p_tile[row * (PITCH_P / (int)sizeof(storage)) + k]);
                if (x != 0) {
#pragma unroll
                    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c)
                            o[i][n][2 * half + c] +=
                                x * (float)widen(element<HEAD_DIM_V>(v, k, WorkTile::column(n) + c));
                }
            }
    }
}

// Divides O by the row sums; stores O and the log-sum-exp, or those of a split. O goes through the shared memory of Q
// where rows of Q are wide enough.
constexpr bool STAGED = !SPLIT_KV && padded(HEAD_DIM_V) <= padded(HEAD_DIM);
DEVICE void epilogue(const Params& p, const WorkTile& at, int split, const float (&m)[TILES][2],
                     const float (&l)[TILES][2], float (&o)[TILES][COLUMNS][4], unsigned char* q_of_warp) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int index = at.row(i, half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
            float row_max = m[i][half], row_sum = l[i][half], factor = 1;
            if (HAS_SINKS && !SPLIT_KV) add_sink(p, h, row_max, row_sum, factor);
            const bool empty = row_sum == 0;  // no visible key
            // For 16-bit elements approximations of the logarithm and the reciprocal are accurate enough.
            const float lse = empty        ? HIDDEN
                              : IS_FLOAT32 ? fmaf(row_max, LN2, logf(row_sum))
                                           : (row_max + log2_fast(row_sum)) * LN2;
            factor = empty ? 0.0f : IS_FLOAT32 ? factor / row_sum : factor * reciprocal(row_sum);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) o[i][n][2 * half] *= factor, o[i][n][2 * half + 1] *= factor;
            if (index >= at.rows) continue;
            if (threadIdx.x % 4 == 0 && at.warp_column() == 0) {
                if constexpr (SPLIT_KV)
                    *row_at<float2>(p.lse_partial, split * p.batch + at.b, h, row) = float2{row_max, row_sum};
                else *q_row<float>(p, p.lse, at.b, h, row) = lse;
            }
            if constexpr (SPLIT_KV) {
                float* target = row_at<float>(p.o_partial, split * p.batch + at.b, h, row);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    const int column = at.column(n);
                    if (column < HEAD_DIM_V) target[column] = o[i][n][2 * half];
                    if (column + 1 < HEAD_DIM_V) target[column + 1] = o[i][n][2 * half + 1];
                }
            } else if constexpr (!STAGED) {
                storage* target = q_row<storage>(p, p.out, at.b, h, row);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n)
                    store_pair<HEAD_DIM_V>(target, at.column(n), o[i][n][2 * half], o[i][n][2 * half + 1]);
            }
        }
    if constexpr (STAGED) {
        const int column = at.warp_column() * COLUMNS * 8;
        const Rows<PACK_GQA> target(p.out, at.b, at.h, seq_info(p, at.b).row_offset);
        store_tile<HEAD_DIM_V, HEAD_DIM>(o, 1.0f, q_of_warp, column, column, target,
                                         at.row0 + at.row_of_warp(), at.rows);
    }
}

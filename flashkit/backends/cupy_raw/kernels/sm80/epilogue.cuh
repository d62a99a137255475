// The epilogue of the forward pass, and the recomputation of rows with a non-finite O.
#pragma once
#include "sm80/layout.cuh"

// The non-finite fallback: a warp's rows again, of keys first ... end - 1. The warps that share rows take turns.
DEVICE void rows_nonfinite(const Params& p, const WorkTile& at, int split, int first, int end) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int r = at.warp_column(); r < 16 * TILES; r += WARPS_K) {
        const int index = at.row0 + at.row_of_warp() + r, row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        if (index >= at.rows) break;
        float sums[OWN];
        const RowSums of = row_nonfinite<PlainElements<storage>>(p, at.b, h, row, first, end, HAS_SINKS && !SPLIT_KV,
                                                                 lane, lane, sums);
        const bool empty = of.sum == 0;
        const long long entry = split * p.batch + at.b;
        if (lane == 0) {
            if constexpr (SPLIT_KV)
                *row_at<float2>(p.lse_partial, entry, h, row) = float2{empty ? HIDDEN : of.top, of.sum};
            else *q_row<float>(p, p.lse, at.b, h, row) = empty ? HIDDEN : fmaf(of.top, LN2, logf(of.sum));
            if constexpr (HAS_STATS) {
                *q_row<float>(p, p.max_logit, at.b, h, row) = of.sum == of.sum ? of.greatest * LN2 : of.sum;
                const float sink = (HAS_SINKS ? static_cast<const float*>(p.sinks)[h] * LOG2E : HIDDEN) - of.top;
                const float total = fmaf(exp2_fast(sink), fmaxf(sink, LOWEST), of.total);
                *q_row<float>(p, p.entropy, at.b, h, row) = empty ? 0.0f : logf(of.sum) - LN2 * total / of.sum;
            }
        }
        UNROLL(i, OWN) {
            const int column = lane + 32 * i;
            const float x = empty ? 0.0f : sums[i] / of.sum;
            if (column >= HEAD_DIM_V) break;
            if constexpr (SPLIT_KV) row_at<float>(p.o_partial, entry, h, row)[column] = x;
            else q_row<storage>(p, p.out, at.b, h, row)[column] = narrow(x);
        }
    }
}

// Divides O by the row sums; stores O and the log-sum-exp, or those of a split. O goes through the shared memory of Q
// where rows of Q are wide enough.
constexpr bool STAGED = !SPLIT_KV && padded(HEAD_DIM_V) <= padded(HEAD_DIM);
DEVICE void epilogue(const Params& p, const WorkTile& at, int split, const float (&m)[TILES][2],
                     const float (&l)[TILES][2], float (&o)[TILES][COLUMNS][4], unsigned char* q_of_warp) {
    UNROLL(i, TILES)
        UNROLL(half, 2) {
            const int index = at.row(i, half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
            float row_max = m[i][half], row_sum = l[i][half], factor = 1;
            if (HAS_SINKS && !SPLIT_KV) add_sink(p, h, row_max, row_sum, factor);
            const bool empty = row_sum == 0;  // no visible key
            // For 16-bit elements approximations of the logarithm and the reciprocal are accurate enough.
            const float lse = empty        ? HIDDEN
                              : IS_FLOAT32 ? fmaf(row_max, LN2, logf(row_sum))
                                           : (row_max + log2_fast(row_sum)) * LN2;
            factor = empty ? 0.0f : IS_FLOAT32 ? factor / row_sum : factor * reciprocal(row_sum);
            UNROLL(n, COLUMNS) o[i][n][2 * half] *= factor, o[i][n][2 * half + 1] *= factor;
            if (index >= at.rows) continue;
            if (threadIdx.x % 4 == 0 && at.warp_column() == 0) {
                if constexpr (SPLIT_KV)
                    *row_at<float2>(p.lse_partial, split * p.batch + at.b, h, row) = float2{row_max, row_sum};
                else *q_row<float>(p, p.lse, at.b, h, row) = lse;
            }
            if constexpr (SPLIT_KV) {
                float* target = row_at<float>(p.o_partial, split * p.batch + at.b, h, row);
                UNROLL(n, COLUMNS) {
                    const int column = at.column(n);
                    if (column < HEAD_DIM_V) target[column] = o[i][n][2 * half];
                    if (column + 1 < HEAD_DIM_V) target[column + 1] = o[i][n][2 * half + 1];
                }
            } else if constexpr (!STAGED) {
                storage* target = q_row<storage>(p, p.out, at.b, h, row);
                UNROLL(n, COLUMNS)
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

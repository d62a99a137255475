// P of a pair in the FP16x2 backward pass, and the non-finite fallback: gradients of a warp's rows again from global
// memory, on CUDA cores, without the pairs that are masked.
#pragma once
#include "sm90/fp16x2_bwd_layout.cuh"

DEVICE float dropout(float x, const Params& p, const WorkTile& at, int h, int query, int key) {
    return HAS_DROPOUT ? drop(x, p, at.b, h, query, key) : x;
}

// P of a pair, 0 where it is masked. scale: what 1 stands for in s. lse: of the query, in base 2, or its fraction.
template <bool UNMASKED>
DEVICE float probability(const Params& p, const WorkTile& at, int h, int query, int key, float s, float scale,
    float lse, float& slope) {
    if constexpr (UNMASKED && !HAS_SCORE) return exp2_fast(fmaf(s, scale, -lse));
    if (!UNMASKED && (query >= (int)seq_info(p, at.b).n_q || key >= at.n_k)) return 0;
    float x = s * scale;
    if constexpr (HAS_SCORE) slope = score_slope(x, at.b, h, query, query + at.offset, key, p);
    x = modify<!UNMASKED>(x, at.b, h, query, query + at.offset, key, p);
    return x == HIDDEN ? 0.0f : exp2_fast(fmaf(x, HAS_SCORE ? LOG2E : 1.0f, -lse));
}

// Gradients of a warp's 16 rows.
DEVICE void rows_nonfinite(const Params& p, const WorkTile& at, int first, float (&acc_1)[ACC_COLUMNS_1 / 2 + 1],
    float (&acc_2)[ACC_COLUMNS_2 / 2 + 1]) {
    const int lane = threadIdx.x % 32, columns = DQ_KERNEL ? at.n_k : (int)seq_info(p, at.b).n_q;
#pragma unroll
    for (int i = 0; i < ACC_COLUMNS_1 / 2; ++i) acc_1[i] = 0;
#pragma unroll
    for (int i = 0; i < ACC_COLUMNS_2 / 2; ++i) acc_2[i] = 0;
#pragma unroll 1
    for (int i = 0; i < (DQ_KERNEL ? 1 : GQA_GROUP); ++i) {
        const int h = DQ_KERNEL ? at.h : at.h * GQA_GROUP + i, head = DQ_KERNEL ? at.h / GQA_GROUP : at.h;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = first + 8 * half + lane / 4, row = own < at.rows ? own : larger(at.rows - 1, 0);
#pragma unroll 1
            for (int c0 = 0; c0 < columns; c0 += 4) {  // the four lanes of a row take a column each
                const int own_column = c0 + lane % 4, column = own_column < columns ? own_column : columns - 1;
                const int query = DQ_KERNEL ? row : column, key = DQ_KERNEL ? column : row;
                const storage *q = q_row<const storage>(p, p.q, at.b, h, query),
                    *k = kv_row<const storage>(p, p.k, at.b, head, key);
                const storage *dout = q_row<const storage>(p, p.dout, at.b, h, query),
                    *v = kv_row<const storage>(p, p.v, at.b, head, key);
                float s = 0, dp = 0;
#pragma unroll 1
                for (int d = 0; d < HEAD_DIM; ++d) s = fmaf(q[d], k[d], s);
#pragma unroll 1
                for (int d = 0; d < HEAD_DIM_V; ++d) dp = fmaf(dout[d], v[d], dp);
                const float lse = *row_at<const float>(p.bwd_lse, at.b, h, query) * LOG2E,
                    delta = *row_at<const float>(p.delta, at.b, h, query);
                const float scale = (float)(HAS_SCORE ? p.softmax_scale : p.softmax_scale * 1.4426950408889634);
                float slope = 1;
                const float w = own_column < columns ? probability<false>(p, at, h, query, key, s, scale, lse, slope)
                    : 0.0f;
                const float ds = w == 0 ? 0.0f : w * slope * (dropout(dp, p, at, h, query, key) - delta);
#pragma unroll 1
                for (int other = 0; other < 4; ++other) {
                    const int from = c0 + other < columns ? c0 + other : columns - 1;
                    auto add = [&](float own_weight, auto dim, const storage* b, auto& sums) {
                        const float weight = __shfl_sync(~0u, own_weight, (lane & 28) + other);
                        if (weight == 0) return;
#pragma unroll
                        for (int e = 0; e < padded(decltype(dim)::value) / 4; ++e) {
                            const int column = e / 2 * 8 + lane % 4 * 2 + e % 2;
                            if (column < decltype(dim)::value) sums[e / 2 * 4 + 2 * half + e % 2] += weight * b[column];
                        }
                    };
                    const storage* b1 = DQ_KERNEL ? kv_row<const storage>(p, p.k, at.b, head, from)
                        : q_row<const storage>(p, p.q, at.b, h, from);
                    add(ds, Number<HEAD_DIM>{}, b1, acc_1);
                    if constexpr (!DQ_KERNEL) add(w == 0 ? 0.0f : dropout(w, p, at, h, query, key),
                        Number<HEAD_DIM_V>{}, q_row<const storage>(p, p.dout, at.b, h, from), acc_2);
                }
            }
        }
    }
}

// The non-finite fallback of kernels that store gradients from registers: those that are not finite are recomputed from
// global memory, pair by pair. P or dS = 0 of a masked pair may have met inf or NaN in a tensor core, or terms may not
// stand for the elements.
#pragma once
#include "common/fragment.cuh"

enum Gradient { DQ, DK, DV };

template <int DIM>
DEVICE float dot(const storage* x, const storage* y) {
    float sum = 0;
#pragma unroll 1
    for (int d = 0; d < DIM; ++d) sum = fmaf((float)widen(x[d]), (float)widen(y[d]), sum);
    return sum;
}

// P of a pair after dropout (DV), or its dS (DQ, DK).
template <Gradient WHICH>
DEVICE float recompute_pair(const Params& p, int b, int h, int query, int key) {
    const long long q = query + seq_info(p, b).q_position;
    const storage* q_data = q_row<storage>(p, p.q, b, h, query);
    const storage* k_data = kv_row<storage>(p, p.k, b, h / GQA_GROUP, key);
    const float s = dot<HEAD_DIM>(q_data, k_data) * (float)p.softmax_scale;
    const long long stats = stats_row(p, b, query);
    const float lse = *row_at<float>(p.bwd_lse, b, h, stats), x = modify<true>(s, b, h, query, q, key, p);
    const float p_pair = x == HIDDEN ? 0.0f : exp2_fast((x - lse) * LOG2E);
    if (p_pair == 0) return 0;
    if constexpr (WHICH == DV) return HAS_DROPOUT ? drop(p_pair, p, b, h, query, key) : p_pair;
    float dp = dot<HEAD_DIM_V>(q_row<storage>(p, p.dout, b, h, query), kv_row<storage>(p, p.v, b, h / GQA_GROUP, key));
    if constexpr (HAS_DROPOUT) dp = drop(dp, p, b, h, query, key);
    const float slope = HAS_SCORE ? (float)score_slope(s, b, h, query, q, key, p) : 1.0f;
    return p_pair * slope * (dp - *row_at<float>(p.delta, b, h, stats));
}

// A warp recomputes columns first ... of one row of dQ, dK or dV, skipping products with 0. head: a query head for dQ,
// else a key/value head.
template <Gradient WHICH>
DEVICE void recompute_row(const Params& p, int b, int head, int row, int first, int columns, float factor) {
    constexpr int DIM = WHICH == DV ? HEAD_DIM_V : HEAD_DIM, HEADS = WHICH == DQ ? 1 : GQA_GROUP;
    const Tensor& target = WHICH == DQ ? p.dq : WHICH == DK ? p.dk : p.dv;
    const Tensor& other = WHICH == DQ ? p.k : WHICH == DK ? p.q : p.dout;
    const SeqInfo seq = seq_info(p, b);
    const long long start_target = WHICH == DQ ? seq.row_offset : seq.key_offset;
    const long long start_other = WHICH == DQ ? seq.key_offset : seq.row_offset;
    const int lane = threadIdx.x % 32, n = WHICH == DQ ? (int)seq.n_k : (int)seq.n_q;
#pragma unroll 1
    for (int c = lane; c - lane < columns; c += 32) {
        const bool exists = c < columns && first + c < DIM;
        float sum = 0;
#pragma unroll 1
        for (int h = head * HEADS; h < (head + 1) * HEADS; ++h)
#pragma unroll 1
            for (int start = 0; start < n; start += 32) {
                const int own = start + lane < n ? start + lane : n - 1;
                const float mine = recompute_pair<WHICH>(p, b, h, WHICH == DQ ? row : own, WHICH == DQ ? own : row);
#pragma unroll 1
                for (int i = 0; i < 32 && start + i < n; ++i) {
                    const float factor_i = __shfl_sync(~0u, mine, i);
                    const int other_head = WHICH == DQ ? h / GQA_GROUP : h;
                    const storage* x = row_at<storage>(other, b, other_head, start_other + start + i);
                    if (factor_i != 0 && exists) sum = fmaf(factor_i, (float)widen(x[first + c]), sum);
                }
            }
        if (exists) row_at<storage>(target, b, head, start_target + row)[first + c] = narrow(sum * factor);
    }
}

// The epilogue of the FP16x2 backward pass: gradients to global memory.
#pragma once
#include "sm90/fp16x2_bwd_layout.cuh"

// --- the non-finite fallback -----------------------------------------------------------------------------------------
//
// P of a pair in the FP16x2 backward pass, and the non-finite fallback: gradients of a warp's rows again from global
// memory, on CUDA cores, without the pairs that are masked.

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

// --- the epilogue ----------------------------------------------------------------------------------------------------

// A gradient of a warp's 16 rows to global memory, 32 columns at a time through 2 KiB of shared memory, so that stores
// are of whole 128-byte lines. all: rows of the tensor, which get zeros from at.rows on.
template <int DIM, int M>
DEVICE void store_gradient(const Tensor& gradient, const WorkTile& at, int first, int all, const float (&sums)[M],
    float factor, unsigned staged) {
    const int lane = threadIdx.x % 32;
    const bool whole = DIM % 4 == 0 && ((unsigned long long)gradient.data & 15) == 0;  // a gradient is contiguous
#pragma unroll
    for (int c0 = 0; c0 < padded(DIM); c0 += 32) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8 && c0 + i / 2 * 8 < padded(DIM); ++i) {
            const int own = lane / 4 + 8 * (i % 2), e = (c0 / 8 + i / 2) * 4 + 2 * (i % 2),
                vec = 2 * (i / 2) + lane % 4 / 2;
            const bool exists = first + own < at.rows;
            store_floats(staged + swizzled(own, vec) + lane % 2 * 8, exists ? sums[e] * factor : 0.0f,
                exists ? sums[e + 1] * factor : 0.0f);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = 4 * i + lane / 8, column = c0 + lane % 8 * 4;
            const float2 x = load_floats(staged + swizzled(own, lane % 8)),
                y = load_floats(staged + swizzled(own, lane % 8) + 8);
            if (first + own >= all) continue;
            float* target = row_at<float>(gradient, at.b, at.h, first + own) + column;
            if (whole) {
                if (column < DIM) *reinterpret_cast<float4*>(target) = {x.x, x.y, y.x, y.y};
            } else {
                if (column < DIM) target[0] = x.x;
                if (column + 1 < DIM) target[1] = x.y;
                if (column + 2 < DIM) target[2] = y.x;
                if (column + 3 < DIM) target[3] = y.y;
            }
        }
    }
}

// The gradients of a work tile; `staged`: its warp group's rows of A1, which are no longer read.
DEVICE void epilogue(const Params& p, const WorkTile& at, int wg, float (&acc_1)[ACC_COLUMNS_1 / 2 + 1],
    float (&acc_2)[ACC_COLUMNS_2 / 2 + 1], const float (&factor)[2], bool is_nonfinite, unsigned staged) {
    const int warp = uniform(threadIdx.x % 128 / 32), first = at.row0 + 64 * wg + 16 * warp,
        all = DQ_KERNEL ? (int)seq_info(p, at.b).n_q : (int)max_n_k(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < ACC_COLUMNS_1 / 4; ++i) {
            float& x = acc_1[i / 2 * 4 + 2 * half + i % 2];
            x *= factor[half], is_nonfinite |= !is_finite(x);
        }
#pragma unroll
        for (int i = 0; i < ACC_COLUMNS_2 / 4; ++i) is_nonfinite |= !is_finite(acc_2[i / 2 * 4 + 2 * half + i % 2]);
    }
    if (__any_sync(~0u, is_nonfinite)) rows_nonfinite(p, at, first, acc_1, acc_2);
    named_barrier_sync(1 + wg, 128);  // no warp of the warp group reads the rows any more
    staged += 16 * warp * CHUNK_ROW;
    store_gradient<HEAD_DIM>(DQ_KERNEL ? p.dq : p.dk, at, first, all, acc_1, (float)p.softmax_scale, staged);
    if constexpr (!DQ_KERNEL) store_gradient<HEAD_DIM_V>(p.dv, at, first, all, acc_2, 1.0f, staged);
    fence_proxy_async();
    __syncwarp();
}

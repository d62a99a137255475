// The non-finite fallback of the forward epilogue: rows computed again from global memory, pair by pair, where a masked
// pair or P = 0 has met infinity or NaN in V, or where FP16X2 terms do not stand for the elements. No branch differs
// between the lanes of a warp, as the compiler would take nothing behind it as uniform.
#pragma once
#include "sm90/score_mod.cuh"

// An element of O to its warp group's rows in shared memory.
DEVICE void store_16bit(unsigned staged, int row, int column, const float& x) {
    const unsigned chunk = staged + column / 64 * 64 * CHUNK_ROW;
    const unsigned target = chunk + swizzled(row, column % 64 / 8) + column % 8 * 2;
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"((unsigned short)pack(x, 0.0f)) : "memory");
}

// O of a warp's 16 rows, from their log-sum-exps in base 2. `staged`: the warp group's rows of O in shared memory.
DEVICE void accumulate_nonfinite(const Params& p, const WorkTile& at, const float (&lse)[2], unsigned staged) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = opaque(threadIdx.x % 32), row0 = opaque(uniform(threadIdx.x % 128 / 32)) * 16;
    const int n_k = uniform((int)seq_info(p, at.b).n_k);
    const long long offset = seq_info(p, at.b).q_position;
    // Relative to the log-sum-exp P is at most 1. In the main loop it may be far above, and a product with large V may
    // have been what overflowed.
    const float reference_of[2] = {lse[0] == HIDDEN ? -HIDDEN : lse[0], lse[1] == HIDDEN ? -HIDDEN : lse[1]};
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        const auto [h, row] = clamped_row(p, at.b, at.h, at.row0 + row0 + r);
        const float reference = __shfl_sync(~0u, r < 8 ? reference_of[0] : reference_of[1], r % 8 * 4);
        const storage* q = q_row<const storage>(p, p.q, at.b, h, row);
        float sums[OWN] = {};
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) {
            const int k = k0 + lane < n_k ? k0 + lane : n_k - 1;
            const storage* key = kv_row<const storage>(p, p.k, at.b, h / GQA_GROUP, k);
            float x = 0;
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) x += widen(q[d]) * widen(key[d]);
            x = modify<true>(x * (float)p.softmax_scale, at.b, h, row, row + offset, k, p);
            x = exp2_fast(fmaf(x, LOG2E, -reference));
            if constexpr (HAS_DROPOUT) x = drop(x, p, at.b, h, row, k);
#pragma unroll 1
            for (int other = 0; other < 32; ++other) {
                const int from = k0 + other < n_k ? k0 + other : n_k - 1;
                const float weight = k0 + other < n_k ? __shfl_sync(~0u, x, other) : 0.0f;
                const storage* value = kv_row<const storage>(p, p.v, at.b, h / GQA_GROUP, from);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float v = widen(value[lane + 32 * i < HEAD_DIM_V ? lane + 32 * i : 0]);
                    sums[i] += weight == 0 ? 0.0f : weight * v;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) store_16bit(staged, row0 + r, lane + 32 * i, sums[i]);
    }
}

// HAS_SCALES: O and log-sum-exp of a warp's 16 rows on CUDA cores, for any numbers.
DEVICE void rows_nonfinite(const Params& p, const WorkTile& at, unsigned staged) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = opaque(threadIdx.x % 32), row0 = opaque(uniform(threadIdx.x % 128 / 32)) * 16;
    const int n_k = uniform((int)seq_info(p, at.b).n_k), last = (int)seq_info(p, at.b).n_q * PACK_GQA - 1;
    const long long offset = seq_info(p, at.b).q_position;
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        const auto [h, row] = clamped_row(p, at.b, at.h, at.row0 + row0 + r);
        const operand* q = q_row<const operand>(p, p.q, at.b, h, row);
        const float q_scale = scale_of(p.q_scale, at.b, h, row);
        auto score_log2 = [&, h = h, row = row](int k) {
            const operand* key = kv_row<const operand>(p, p.k, at.b, h / GQA_GROUP, k < n_k ? k : n_k - 1);
            float s = 0;
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) s = fmaf(widen(q[d]), widen(key[d]), s);
            if (FP8) s *= q_scale * scale_of(p.k_scale, at.b, h / GQA_GROUP, k < n_k ? k : n_k - 1);
            if (k >= n_k) return (float)HIDDEN;
            s = modify<true>(s * (float)p.softmax_scale, at.b, h, row, row + offset, k, p);
            return __fmul_rn(s, LOG2E);  // not fused with the subtraction of a great row reference
        };
        float top = HIDDEN, sum = 0;
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) top = fmaxf(top, score_log2(k0 + lane));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        if (HAS_SINKS) top = fmaxf(top, static_cast<const float*>(p.sinks)[h] * LOG2E);
        const float shift = top == HIDDEN ? 0.0f : top;
        float sums[OWN] = {};
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) {
            float x = exp2_fast(score_log2(k0 + lane) - shift);
            sum += x;
            if constexpr (HAS_DROPOUT) x = drop(x, p, at.b, h, row, k0 + lane);
#pragma unroll 1
            for (int other = 0; other < 32; ++other) {
                const float weight = __shfl_sync(~0u, x, other);  // 0 past the last key
                const operand* value = kv_row<const operand>(p, p.v, at.b, h / GQA_GROUP,
                    k0 + other < n_k ? k0 + other : n_k - 1);
                const float v_scale =
                    scale_of(p.v_scale, at.b, h / GQA_GROUP, k0 + other < n_k ? k0 + other : n_k - 1);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    float v = widen(value[lane + 32 * i < HEAD_DIM_V ? lane + 32 * i : 0]);
                    if constexpr (FP8) v *= v_scale;
                    sums[i] += weight == 0 ? 0.0f : weight * v;
                }
            }
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (HAS_SINKS) sum += exp2_fast(static_cast<const float*>(p.sinks)[h] * LOG2E - shift);
        const bool empty = sum == 0;
        if (lane == 0 && at.row0 + row0 + r <= last)
            *q_row<float>(p, p.lse, at.b, h, row) = empty ? HIDDEN : fmaf(shift, LN2, logf(sum));
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if constexpr (FP8) store_16bit(staged, row0 + r, lane + 32 * i, empty ? 0.0f : sums[i] / sum);
            else store_float(staged + i * 64 * CHUNK_ROW + swizzled(row0 + r, lane / 4) + lane % 4 * 4,
                empty ? 0.0f : sums[i] / sum);
        }
    }
}

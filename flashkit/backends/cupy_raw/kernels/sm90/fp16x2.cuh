// The FP16x2 consumer: float32 attention from products of two float16 terms.
//
// Q, K and V come as two float16 terms for each element, x = scale (high + low), high in the first half of a row's
// chunks, low in the second (fp16x2_convert.cu): 23 bits and a sign, all but one of float32's. A product is low high +
// high low + high high, three wgmmas; low low is below float32's rounding.
//
// Tensor cores round float32 sums toward zero (Ootomo and Yokota 2022, arXiv 2203.03341), and errors of one sign add up
// in long sums. So the small products come first, and PV of each tile has an accumulator of its own, which CUDA cores
// add to O. That addition applies the tile's scale.
//
//     O         [64][HEAD_DIM_V]    registers, sums by CUDA cores
//     PV        [64][HEAD_DIM_V]    registers, the accumulator of one tile
//     P         [64][BLOCK_K]       registers, as terms
//
// Elements that are not finite, or too far from 1 for products of scales, show in the scales (NaN or huge) or in the
// output. A warp computes such rows again on CUDA cores (epilogue.cuh).
#pragma once
#include "sm90/epilogue.cuh"

// --- one term --------------------------------------------------------------------------------------------------------
//
// TF32 by one float16 term: the power-of-two scales of Q, K and V tiles in the main loop. For 16-bit elements all of it
// is empty.
//
// Scales of Q and K go into the factor of a row's scores. That of a V tile goes into the tile's P, as if its row
// reference were another one, and is taken out of the row sum.

// What 1 stands for in a tile's products.
struct TileScales {
    float score[2];  // for each of a lane's rows
    float v;
    bool valid;      // elements are finite, and not too far from 1
};
DEVICE TileScales tile_scales(const Params& p, const WorkTile& at, const float (&q_scale)[2], int tile) {
    if constexpr (!IS_FLOAT32) return {{1, 1}, 1, true};
    const float k_scale = *row_at<const float>(p.k_scale, at.b, at.h / GQA_GROUP, tile);
    const float v = *row_at<const float>(p.v_scale, at.b, at.h / GQA_GROUP, tile);
    const float score[2] = {q_scale[0] * k_scale, q_scale[1] * k_scale};
    return {{fmaxf(score[0], MIN_SCALE), fmaxf(score[1], MIN_SCALE)}, v,
            score[0] <= MAX_SCALE && score[1] <= MAX_SCALE && v <= MAX_SCALE};
}

// The factor from S to base 2. A score modification needs scores that are scaled beforehand, by scale_scores().
DEVICE float score_factor(const TileScales& scales, int half, float scale_log2) {
    return IS_FLOAT32 && !HAS_SCORE ? scales.score[half] * scale_log2 : scale_log2;
}
DEVICE void scale_scores(float (&s)[S_REGS], const TileScales& scales) {
#pragma unroll
    for (int i = 0; IS_FLOAT32 && HAS_SCORE && i < S_REGS; ++i) s[i] *= scales.score[i / 2 % 2];
}

// l += the row sums of P, without the scale of V. NaN makes the epilogue compute the row again.
DEVICE void add_row_sums(float (&l)[2], const float (&sum)[2], const TileScales& scales) {
    if constexpr (IS_FLOAT32) {
        const float back = scales.valid ? inverse_of(scales.v) : fk_special(0);
        l[0] = fmaf(sum[0], back, l[0]), l[1] = fmaf(sum[1], back, l[1]);
    } else {
        l[0] += sum[0], l[1] += sum[1];
    }
}

// The scales of Q, and the exponent that O is relative to. O follows the scale of V where that is off by more than 2^4:
// P of a tile in a much smaller scale would lose its bits.
struct FloatTermsState {
    float q_scale[2];
    float exponent = 0;                        // of O
    float shift = 0;                           // of the tile's P
    float change = 0, change_factor = 1;       // of O with this tile

    __device__ __forceinline__ void begin_work_tile(const Params& p, const WorkTile& at) {
#pragma unroll
        for (int half = 0; IS_FLOAT32 && half < 2; ++half) {
            const auto [h, row] = clamped_row(p, at.b, at.h, at.row0 + row_of_lane(half));
            q_scale[half] = *row_at<const float>(p.q_scale, at.b, h, row);
        }
    }
    __device__ __forceinline__ void begin_tile(const TileScales& scales, bool first_tile, float (&m)[2], float (&l)[2],
                                               float (&ref_minus_bias)[2]) {
        if constexpr (IS_FLOAT32) {
            shift = exponent_of(scales.v), change = 0, change_factor = 1;
            if (first_tile) exponent = shift;
            if (__any_sync(~0u, fabsf(shift - exponent) > 4)) {
                change = shift - exponent, change_factor = exp2_fast(-change), exponent = shift;
                m[0] += change, m[1] += change;
                ref_minus_bias[0] += change, ref_minus_bias[1] += change, l[0] *= change_factor, l[1] *= change_factor;
            }
            m[0] += -shift, m[1] += -shift;
        }
    }
    // m and l from before begin_tile() to after it.
    __device__ __forceinline__ void restore(float (&m)[2], float (&l)[2]) const {
        if constexpr (IS_FLOAT32) {
            m[0] += change - shift, m[1] += change - shift;
            l[0] *= change_factor, l[1] *= change_factor;
        }
    }
    // The rounding of a great row reference hides the exponents of V. The epilogue sees NaN.
    __device__ __forceinline__ void refuse_great(const float (&m)[2], float (&l)[2]) const {
#pragma unroll
        for (int half = 0; IS_FLOAT32 && half < 2; ++half)
            if (is_great(m[half]) && m[half] != HIDDEN) l[half] = fk_special(0);
    }
    __device__ __forceinline__ void end_tile(float (&m)[2]) const {
        if constexpr (IS_FLOAT32) m[0] += shift, m[1] += shift;
    }
    __device__ __forceinline__ bool rescales() const { return IS_FLOAT32 && change != 0; }
};

// --- two terms -------------------------------------------------------------------------------------------------------

// What the low terms add to a descriptor.
constexpr int LOW_Q = along_rows(4 * chunks(HEAD_DIM), 64), LOW_K = along_rows(4 * chunks(HEAD_DIM), BLOCK_K);
constexpr int LOW_V = chunks(HEAD_DIM_V) * CHUNK_BYTES >> 4;

// P is up to 2^MAX_P_LOG2: down to 2^-28 of a row's greatest it keeps all bits. Dropout scales what it keeps, and needs
// room.
constexpr float MAX_P_LOG2 = HAS_DROPOUT ? 7 : 14;

DEVICE void issue_qk_fp16x2(float (&s)[S_REGS], unsigned long long q, unsigned long long k) {
    auto term = [&](unsigned long long q, unsigned long long k, bool first) {
        UNROLL(step, padded(HEAD_DIM) / 16) {
            if (first && step == 0) wgmma_zero_init<0, 0>(s, q, k);
            else product<0, 0>(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K), 1);
        }
    };
    wgmma_fence();
    term(q + LOW_Q, k, true), term(q, k + LOW_K, false), term(q, k, false);
    wgmma_commit();
}

DEVICE void issue_pv_fp16x2(float (&pv)[O_REGS], const unsigned (&high)[P_REGS], const unsigned (&low)[P_REGS],
                            unsigned long long v) {
    auto term = [&](const unsigned (&x)[P_REGS], unsigned long long v, bool first) {
        UNROLL(step, BLOCK_K / 16)
            wgmma_rs<1>(pv, x, 4 * step, v + along_columns(step), first && step == 0 ? 0 : 1);
    };
    wgmma_fence();
    term(low, v, true), term(high, v + LOW_V, false), term(high, v, false);
    wgmma_commit();
}

DEVICE void consumer_fp16x2(const Params& p, unsigned base, int wg) {
    const Pipeline<Q_BUFFERS> pipe_q = q_pipe(base);
    const Pipeline<STAGES> pipe_k = k_pipe(base), pipe_v = v_pipe(base);
    const float scale_log2 = uniform_float(HAS_SCORE ? 1.0f : softmax_scale_log2(p));
    float o[O_REGS], pv[O_REGS], s[S_REGS], m[2], l[2], q_scale[2];
    unsigned high[P_REGS], low[P_REGS];
    WorkTile at;
    int number = -1;  // of the work tile whose O is in registers

#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        pipe_k.consumer_wait(n);
        const int tile_desc = uniform(load_word(tile_desc_slot(base, n)));
        if (tile_desc & FIRST_TILE) {  // also END
            if (number >= 0) epilogue(p, read_work_tile(p, base, number, wg), base, number, m, l, RowStats{}, o, wg);
            if (tile_desc == END) break;
            pipe_q.consumer_wait(++number);
            at = read_work_tile(p, base, number, wg);
            UNROLL(half, 2) {
                const auto [h, row] = clamped_row(p, at.b, at.h, at.row0 + row_of_lane(half));
                m[half] = HIDDEN, l[half] = 0;
                q_scale[half] = *row_at<const float>(p.q_scale, at.b, h, row);
            }
            UNROLL(i, COLUMNS / 2) o[i] = 0;
        }
        const int state = tile_desc >> 2 * wg & 3, tile = tile_desc >> 8, k0 = tile * BLOCK_K;
        if (state == EMPTY) {
            pipe_k.consumer_release(n);
            pipe_v.consumer_wait(n);
            pipe_v.consumer_release(n);
            continue;
        }
        issue_qk_fp16x2(s, descriptor(q_rows(base, number % Q_BUFFERS, wg)), descriptor(base + at_k(n % STAGES)));
        const float k_scale = *row_at<const float>(p.k_scale, at.b, at.h / GQA_GROUP, tile);
        const float v_scale = *row_at<const float>(p.v_scale, at.b, at.h / GQA_GROUP, tile);
        // The rounding of a great row reference is more than exponents may be: it is subtracted from scaled scores.
        const bool great = __any_sync(~0u, is_great(m[0]) || is_great(m[1]));
        wgmma_wait<0>();
        fence_operand(s);
        pipe_k.consumer_release(n);
        float scale[2];  // from S to base 2
        UNROLL(half, 2) {
            scale[half] = q_scale[half] * k_scale * scale_log2;
            if (!(scale[half] <= MAX_SCALE && v_scale <= MAX_SCALE)) l[half] = fk_special(0);  // the epilogue sees NaN
            scale[half] = fmaxf(scale[half], MIN_SCALE);
            if (HAS_SCORE) {
                UNROLL(i, S_REGS / 2) s[i / 2 * 4 + 2 * half + i % 2] *= scale[half];
                scale[half] = LOG2E;
            }
        }
        modify_tile(p, at, state == FULL, s, k0, (float)p.softmax_scale);
        if (great) {  // also of the first tile
            UNROLL(i, S_REGS) s[i] *= scale[i / 2 % 2];
            scale[0] = scale[1] = 1;
        }
        float rescale[2];
        online_softmax_below(s, m, l, rescale, scale, MAX_P_LOG2, !great);
        if constexpr (HAS_DROPOUT) dropout_tile(p, at, s, k0);
        UNROLL(i, P_REGS) to_terms(s[2 * i], s[2 * i + 1], high[i], low[i]);
        pipe_v.consumer_wait(n);
        issue_pv_fp16x2(pv, high, low, descriptor(base + at_v(n % STAGES), chunk_stride_v(n % STAGES)));
        if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
            UNROLL(i, COLUMNS / 2) o[i] *= rescale[i / 2 % 2];
        }
        wgmma_wait<0>();
        fence_operand(pv), fence_operand(high), fence_operand(low);
        pipe_v.consumer_release(n);
        UNROLL(i, COLUMNS / 2) o[i] = fmaf(pv[i], v_scale, o[i]);
    }
}

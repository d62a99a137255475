// TF32 by one float16 term: the power-of-two scales of Q, K and V tiles in the main loop. For 16-bit elements all of it
// is empty.
//
// Scales of Q and K go into the factor of a row's scores. That of a V tile goes into the tile's P, as if its row
// reference were another one, and is taken out of the row sum.
#pragma once
#include "sm90/layout.cuh"

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

// Affine score modifications, gain * f(rate * s) + bias with f the identity or tanh (cuda_common/affine_score.py): in
// FULL tiles the exponents of P come straight from the accumulators of Q K^T, at one or two instructions each.
#pragma once
#include "common/positions.cuh"

constexpr bool AFFINE = HAS_SCORE && IS_AFFINE && POSITIONS != ANY && !IS_FLOAT32;
constexpr bool AFFINE_SCALE_ONLY = AFFINE && EVEN && !BIASED;  // f times one gain for all rows

// A row of a tile: gain and rate, and the bias at the lane's first key and its step from key to key. Base 2.
struct AffineScore {
    float gain, rate, bias, bias_step;
    float slope;  // of the modified score, without the factor f'
};

// Finds the affine scores of a lane's rows row_of(i, half), which may lie past the last of `rows`; the SPAN rows of a
// warp are neighbours, from row0 on. key: the lane's first key among the KEYS keys of the tile, which begin at k0.
// Returns false where the bias is not linear in the key within the tile, for a row of this warp.
template <int KEYS, int SPAN, int PACK_GQA, int TILES, typename F>
DEVICE bool find_affine(const Params& p, int b, int h, long long q_position, int rows, int row0, int k0, int key,
                   AffineScore (&affine)[TILES][2], F row_of) {
    constexpr bool SHARED = DIAGONAL && PACK_GQA == 1;  // a step of one key is a step of one row in the other direction
    const float scale = (float)p.softmax_scale;
    bool linear = true;
    float step = 0, corner = 0;
    if (SLOPED && SHARED) {
        const start q0 = (start)(row0 + q_position);
        const Head head_values = head_of(b, h, p);
        corner = score_bias<position>(b, h, row0, q0 + (SPAN - 1), head_values, k0, p) * LOG2E;
        const float last = score_bias<position>(b, h, row0, q0, head_values, k0 + KEYS - 1, p) * LOG2E;
        step = last == corner ? 0.0f : (last - corner) * (1.0f / (KEYS + SPAN - 2));
        linear = bias_is_straight<position>(b, h, row0, q0, head_values, k0 - (SPAN - 1), k0 + KEYS - 1, p);
    }
    UNROLL(i, TILES)
        UNROLL(half, 2) {
            AffineScore& at = affine[i][half];
            const int own = row_of(i, half), index = own < rows ? own : rows - 1;
            const int row = index / PACK_GQA, head = h + index % PACK_GQA;
            const start q = (start)(row + q_position);
            const Head head_values = head_of(b, head, p);
            const float gain = score_gain<position>(b, head, row, q, head_values, p);
            const float rate = CAPPED ? score_rate<position>(b, head, row, q, head_values, p) : 1.0f;
            at.gain = gain * (CAPPED ? LOG2E : scale * LOG2E), at.rate = rate * scale, at.slope = gain * rate;
            if (SLOPED && SHARED) {
                at.bias = fmaf(step, (float)(SPAN - 1 - (own - row0) + key), corner), at.bias_step = step;
            } else {
                at.bias = score_bias<position>(b, head, row, q, head_values, k0, p) * LOG2E, at.bias_step = 0;
                if constexpr (SLOPED) {
                    const float last = score_bias<position>(b, head, row, q, head_values, k0 + KEYS - 1, p) * LOG2E;
                    at.bias_step = last == at.bias ? 0.0f : (last - at.bias) * (1.0f / (KEYS - 1));
                    at.bias = fmaf(at.bias_step, (float)key, at.bias);
                    linear &= bias_is_straight<position>(b, head, row, q, head_values, k0, k0 + KEYS - 1, p);
                }
            }
        }
    return !SLOPED || __all_sync(~0u, linear);
}

// The exponent of P for a score x, `keys` past the lane's first key; `slope`: of the modified score.
DEVICE float affine_exponent(float x, const AffineScore& affine, int keys, float& slope) {
    const float bias = SLOPED ? fmaf(affine.bias_step, (float)keys, affine.bias) : affine.bias;
    slope = affine.slope;
    if constexpr (!CAPPED) return fmaf(x, affine.gain, bias);
    const float f = tanh_of(x * affine.rate);
    slope *= fmaf(-f, f, 1.0f);
    return fmaf(f, affine.gain, bias);
}

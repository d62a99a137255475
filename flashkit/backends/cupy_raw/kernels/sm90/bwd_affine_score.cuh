// Affine score modifications, gain * f(rate * s) + bias (cuda_common/affine_score.py), in tiles whose pairs are all
// visible: the exponent is a multiply-add of the accumulator, and the slope comes from f. Here the bias depends on
// q - k alone, gain and rate on nothing: then few numbers describe a warp's tile.
#pragma once
#include "sm90/bwd_fragments.cuh"

constexpr bool AFFINE_PATH = HAS_SCORE && IS_AFFINE && EVEN && DIAGONAL && SMALL_SCORE && !HAS_DROPOUT;

// These numbers take a chain of some hundred instructions, for which S would wait. So they are found once for a work
// tile, where they are the same for all its query tiles; or for the next query tile, while dV and dK are multiplied,
// where registers allow; or in each step.
constexpr bool AFFINE_PER_WORK_TILE = AFFINE_PATH && !SLOPED && (!PER_HEAD || GQA_GROUP == 1);
constexpr bool AFFINE_AHEAD = AFFINE_PATH && !AFFINE_PER_WORK_TILE && S_REGS <= 32 && CLUSTER_SIZE == 1;
constexpr bool AFFINE_PER_STEP = AFFINE_PATH && !AFFINE_PER_WORK_TILE && !AFFINE_AHEAD;

// A warp's rows and keys.
struct AffineTile {
    bool valid;         // positions are near and the bias is linear over the tile
    float gain, rate;   // of the accumulator; gain in base 2
    float slope;        // derivative where f is linear
    float first, step;  // bias in base 2: of the lane's first pair, and from key to key
};

DEVICE AffineTile affine_tile(const Params& p, const FragmentId& id, int warp, int lane) {
    AffineTile tile{false, 1, 1, 1, 0, 0};
    if constexpr (AFFINE_PATH) {
        constexpr int ROWS = BLOCK_Q, KEYS = 16;  // of a warp
        const FragmentCoord at = coord_of(p, id);
        const long long offset = at.seq.q_position();
        const int row = at.row0, k = at.k0 + warp % 4 * KEYS, q = row + (int)offset;
        const Head head = head_of(at.b, at.h, p);
        const float gain = score_gain<int>(at.b, at.h, row, q, head, p);
        const float rate = CAPPED ? score_rate<int>(at.b, at.h, row, q, head, p) : 1;
        tile.gain = uniform_float(gain * (CAPPED ? 1.0f : (float)p.softmax_scale) * LOG2E);
        tile.slope = UNIT_SLOPE ? 1.0f : uniform_float(gain * rate);
        tile.rate = uniform_float(rate * (float)p.softmax_scale);
        const float far = score_bias<int>(at.b, at.h, row, q + ROWS - 1, head, k, p) * LOG2E;
        const float near = SLOPED ? score_bias<int>(at.b, at.h, row, q, head, k + KEYS - 1, p) * LOG2E : far;
        tile.step = SLOPED ? (near - far) * (1.0f / (ROWS + KEYS - 2)) : 0.0f;
        tile.first = SLOPED ? fmaf(tile.step, ROWS - 1 - lane % 4 * 2 + lane / 4, far) : far;
        const bool linear = !SLOPED || bias_is_straight<int>(at.b, at.h, row, q, head, k - (ROWS - 1), k + KEYS - 1, p);
        tile.valid = positions_are_near(p, offset) && __all_sync(~0u, linear);
    }
    return tile;
}

// bias - lse of element 4 n + 2 half + c.
DEVICE float bias_minus_lse(const AffineTile& tile, float lse, int n, int half, int c) {
    if constexpr (!BIASED) return -lse;
    return SLOPED ? fmaf(tile.step, 8 * half - 8 * n - c, tile.first - lse) : tile.first - lse;
}

// AFFINE_AHEAD: the first log-sum-exps become bias - lse of half 0 before S is there.
template <int EARLY>
DEVICE void add_bias_early(const AffineTile& tile, float (&stats)[EARLY][2]) {
#pragma unroll
    for (int n = 0; AFFINE_AHEAD && n < EARLY; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) stats[n][c] = bias_minus_lse(tile, stats[n][c], n, 0, c);
}

// tanh. For bfloat16 the hardware's, accurate to 2^-11. For float16, up to |x| = TANH_POLY_MAX, polynomials of x^2 for
// tanh(x) / x and for the slope, accurate to 2e-5 and 2e-4; beyond, and where registers are short, the exact tanh.
constexpr bool HAS_TANH_POLY = CAPPED && STORAGE != BFLOAT16 && S_REGS <= 32;
constexpr float TANH_POLY_MAX = 0.5f;
constexpr float TANH_POLY[3] = {0.99997744f, -0.3316915f, 0.11520976f};
constexpr float SLOPE_POLY[3] = {0.99983822f, -0.98864075f, 0.5423509f};

DEVICE bool tanh_poly_ok(const float (&s)[S_REGS], const AffineTile& tile) {
    float greatest[4] = {};
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) greatest[i % 4] = fmaxf(greatest[i % 4], fabsf(s[i]));
    const float of_all = fmaxf(fmaxf(greatest[0], greatest[1]), fmaxf(greatest[2], greatest[3]));
    return __all_sync(~0u, of_all * fabsf(tile.rate) <= TANH_POLY_MAX);
}

// Score modifications of a known form in the Hopper backward pass: gain * f(rate * s) + bias (cuda_common/form.py). In tiles
// whose pairs are all visible exponents of weights are taken from the products as they come, and the slope from f. Here the bias
// is of the distance q - k, or constant, gain and rate are the same for all rows: then a warp's numbers are few.
#pragma once
#include "sm90/pipeline.cuh"

constexpr bool BY_FORM = HAS_SCORE && FORMED && EVEN && DIAGONAL && SMALL_SCORE && !HAS_DROPOUT;

// To find a tile's numbers takes a chain of small steps, a hundred instructions, and scores would wait for it. So it is done once
// for an item where they are the same for all its tiles (LASTING: 4 to 7 % faster), or for the next tile while sums are
// multiplied, where there are registers to keep them (BEFOREHAND: 3 to 5 %; with tiles of 128 queries 1 to 4 % slower, where blocks
// share items 6 %).
constexpr bool LASTING = BY_FORM && !SLOPED && (!PER_HEAD || GQA_GROUP == 1);
constexpr bool BEFOREHAND = BY_FORM && !LASTING && PAIRS <= 32 && !KEYS_SHARED, AT_ONCE = BY_FORM && !LASTING && !BEFOREHAND;

// What makes exponents of a warp's rows and keys.
struct Line {
    bool known;         // whether positions are near and the bias grows evenly
    float gain, rate;   // of the product; the gain in base 2
    float slope;        // where f does not bend
    float first, step;  // the bias in base 2: of the lane's first pair, from key to key
};

// Of tile `n`, item `number`.
DEVICE Line line_of(const Params& p, unsigned base, unsigned n, unsigned number, int group, int warp, int lane) {
    Line line{false, 1, 1, 1, 0, 0};
    if constexpr (BY_FORM) {
        constexpr int ROWS = BLOCK_Q, KEYS = 16;  // of a warp
        const Place at = place_of(base, n, number, group);
        const long long offset = offset_of(p, at.b);
        const int row = at.row0, k = at.k0 + warp % 4 * KEYS, q = row + (int)offset;
        const Head head = head_of(at.b, at.h, p);
        const float gain = score_gain<int>(at.b, at.h, row, q, head, p), rate = CAPPED ? score_rate<int>(at.b, at.h, row, q, head, p) : 1;
        line.gain = uniform_float(gain * (CAPPED ? 1.0f : (float)p.softmax_scale) * LOG2E);
        line.slope = UNIT_SLOPE ? 1.0f : uniform_float(gain * rate), line.rate = uniform_float(rate * (float)p.softmax_scale);
        const float far = score_bias<int>(at.b, at.h, row, q + ROWS - 1, head, k, p) * LOG2E;
        const float near = SLOPED ? score_bias<int>(at.b, at.h, row, q, head, k + KEYS - 1, p) * LOG2E : far;
        line.step = SLOPED ? (near - far) * (1.0f / (ROWS + KEYS - 2)) : 0.0f;
        line.first = SLOPED ? fmaf(line.step, ROWS - 1 - lane % 4 * 2 + lane / 4, far) : far;
        const bool straight = !SLOPED || bias_is_straight<int>(at.b, at.h, row, q, head, k - (ROWS - 1), k + KEYS - 1, p);
        line.known = is_near(p, offset) && __all_sync(~0u, straight);
    }
    return line;
}

// The bias less the row's log-sum-exp, of element 4 n + 2 half + c.
DEVICE float lowered(const Line& line, float lse, int n, int half, int c) {
    if constexpr (!BIASED) return -lse;
    return SLOPED ? fmaf(line.step, 8 * half - 8 * n - c, line.first - lse) : line.first - lse;
}

// If BEFOREHAND, log-sum-exps become that before scores are there, those of half 0.
template <int EARLY>
DEVICE void lower(const Line& line, float (&numbers)[EARLY][2]) {
#pragma unroll
    for (int n = 0; BEFOREHAND && n < EARLY; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) numbers[n][c] = lowered(line, numbers[n][c], n, 0, c);
}

// With bfloat16 tanh is the device's own, right to 2^-11: up to 128 columns polynomials are 1 % slower. With float16, tanh(x) / x and
// the slope by polynomials of x^2 for |x| up to CALM, to 2e-5 and 2e-4; beyond, and where registers are short, tanh as it is.
constexpr bool BY_POLYNOMIAL = CAPPED && STORAGE != BFLOAT16 && PAIRS <= 32;
constexpr float CALM = 0.5f, TANH[3] = {0.99997744f, -0.3316915f, 0.11520976f}, SLOPE[3] = {0.99983822f, -0.98864075f, 0.5423509f};

// Whether polynomials do for all scores of a warp's tile.
DEVICE bool is_calm(const float (&s)[PAIRS], const Line& line) {
    float greatest[4] = {};
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) greatest[i % 4] = fmaxf(greatest[i % 4], fabsf(s[i]));
    const float of_all = fmaxf(fmaxf(greatest[0], greatest[1]), fmaxf(greatest[2], greatest[3]));
    return __all_sync(~0u, of_all * fabsf(line.rate) <= CALM);
}

// Scores to weights, rounded in `pairs`; in their place stays the factor of dP - delta in dS. early: numbers of the first rows.
template <bool CALM_TILE, int EARLY>
DEVICE void weigh_formed(float (&s)[PAIRS], unsigned (&pairs)[PAIRS / 2], const float (&early)[EARLY][2], unsigned shift,
                         const Line& line) {
    const float gain = line.gain, slope = line.slope, rate = line.rate, square = rate * rate, eight = 8 * line.step;
    weigh_each(s, pairs, early, shift, [&](float& x, float number, int n, int half, int c) {
        const float bias = !BEFOREHAND ? lowered(line, number, n, half, c) : SLOPED && half == 1 ? number + eight : number;
        float w;
        if constexpr (!CAPPED) {
            w = exp2_fast(fmaf(x, gain, bias));
            x = UNIT_SLOPE ? w : w * slope;
        } else if constexpr (CALM_TILE) {
            const float y = x * x, high = gain * rate;
            w = exp2_fast(fmaf(x, fmaf(fmaf(TANH[2] * high * square * square, y, TANH[1] * high * square), y, TANH[0] * high), bias));
            x = w * fmaf(fmaf(SLOPE[2] * slope * square * square, y, SLOPE[1] * slope * square), y, SLOPE[0] * slope);
        } else {
            const float t = tanh_of(x * rate);
            w = exp2_fast(fmaf(t, gain, bias));
            x = w * (UNIT_SLOPE ? fmaf(-t, t, 1.0f) : fmaf(-slope * t, t, slope));
        }
        return w;
    });
}

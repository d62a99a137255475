// Affine score modifications, gain * f(rate * s) + bias with f the identity or tanh (cuda_common/affine_score.py):
// exponents come straight from the accumulators of Q K^T. Soft-capping, ALiBi, temperatures and sums of these are
// affine.
#pragma once
#include "sm90/softmax.cuh"

constexpr bool AFFINE = HAS_SCORE && IS_AFFINE && POSITIONS != ANY && PACK_GQA == 1 && !HAS_STATS;

// tanh(x) / x as a polynomial of x^2 - TANH_POLY_MAX^2, for |x| <= TANH_POLY_MAX: to 2^-13, or 2^-12 with two terms
// where P has 8 bits. With those, larger x go through the device's tanh, to 2^-11; it costs one more instruction of the
// unit that computes the exponentials.
constexpr bool TANH_POLY_SHORT = STORAGE == BFLOAT16;
constexpr float TANH_POLY_MAX = TANH_POLY_SHORT ? 0.35f : 0.65f,
                TANH_POLY_0 = TANH_POLY_SHORT ? 0.9608449935913086f : 0.8795788288116455f,
                TANH_POLY_1 = TANH_POLY_SHORT ? -0.3176961839199066f : -0.2405111938714981f,
                TANH_POLY_2 = TANH_POLY_SHORT ? 0.0f : 0.10479581356048584f;

// Soft-capping bounds the scores of a work tile: one row reference may do for all its tiles, without looking at sums.
constexpr bool BOUNDED_SCORES = AFFINE && ROW_SUM_BY_MMA;

// What depends neither on keys nor, where EVEN, on rows is found once for a work tile, off the path between two
// products. It waits in shared memory, and is read while S is computed.
constexpr bool AFFINE_PER_WORK_TILE = AFFINE && CAPPED && !SLOPED && EVEN;

// With head dims around 128 a tile's own numbers are found between the issue of S and that of PV, in the shadow of S.
constexpr bool AFFINE_BEFORE_PV = AFFINE && SLOPED && HEAD_DIM > 64 && HEAD_DIM <= 128;

// From the accumulator to the exponent, in base 2, for each of a lane's rows.
struct AffineScore {
    float gain[2], rate[2];            // where f is the identity, the gain includes the rate
    float neg_max2[2], poly[2][3];     // tanh: minus the greatest square; coefficients with gain and rate in them
    float bias[2], bias_step[2];       // at the lane's first key, and from key to key
    float bias_max[2];                 // over the row of the tile
};

// A value that is the same for all rows where EVEN.
DEVICE float row_uniform(float x) { return EVEN ? uniform_float(x) : x; }

// The part that depends on the score alone.
DEVICE void find_gain(const Params& p, const WorkTile& at, const Head& head, int row, start q, float scale,
                      AffineScore& affine, int half) {
    const float gain = score_gain<position>(at.b, at.h, row, q, head, p) * LOG2E;
    if constexpr (CAPPED) {
        const float rate = score_rate<position>(at.b, at.h, row, q, head, p) * scale, square = rate * rate;
        affine.gain[half] = row_uniform(gain), affine.rate[half] = row_uniform(rate);
        affine.neg_max2[half] = row_uniform(-TANH_POLY_MAX * TANH_POLY_MAX * reciprocal(square));
        affine.poly[half][0] = row_uniform(TANH_POLY_0 * gain * rate);
        affine.poly[half][1] = row_uniform(TANH_POLY_1 * gain * rate * square);
        affine.poly[half][2] = row_uniform(TANH_POLY_2 * gain * rate * square * square);
    } else {
        affine.gain[half] = row_uniform(gain * scale);
    }
}

// The same part to and from a warp's place in shared memory.
DEVICE void store_gain(const AffineScore& affine, unsigned address) {
    const float values[] = {affine.gain[0],    affine.rate[0],    affine.neg_max2[0],
                            affine.poly[0][0], affine.poly[0][1], affine.poly[0][2]};
    __syncwarp();  // all lanes have read the previous values
    UNROLL(i, 6) store_float(address + 4 * i, values[i]);
    __syncwarp();
}
DEVICE void load_gain(AffineScore& affine, unsigned address) {
    float values[6];
    UNROLL(i, 6) values[i] = __int_as_float(uniform(load_word(address + 4 * i)));
    UNROLL(half, 2) {
        affine.gain[half] = values[0], affine.rate[half] = values[1], affine.neg_max2[half] = values[2];
        UNROLL(i, 3) affine.poly[half][i] = values[3 + i];
    }
}

DEVICE float step_between(float first, float last, int steps) {
    return last == first ? 0.0f : (last - first) * (1.0f / steps);
}

// False where the bias is not linear in the key within the tile, for a row of this warp.
DEVICE bool find_affine(const Params& p, const WorkTile& at, const Head& head, int k0, float scale,
    AffineScore& affine) {
    constexpr int LAST = BLOCK_K - 1;
    const int end = (int)seq_info(p, at.b).n_q - 1;
    if constexpr (SLOPED && DIAGONAL) {  // one step along a row equals one from row to row, the other way
        const int row0 = at.row0 + threadIdx.x % 128 / 32 * 16, lane = threadIdx.x % 32;
        const start q0 = row0 + at.offset;
        const float first = score_bias<position>(at.b, at.h, row0, q0 + 15, head, k0, p) * LOG2E;
        const float last = score_bias<position>(at.b, at.h, row0, q0, head, k0 + LAST, p) * LOG2E;
        const float step = step_between(first, last, LAST + 15);
        UNROLL(half, 2) {
            const int own = at.row0 + row_of_lane(half), row = own < end ? own : end;
            find_gain(p, at, head, row, row + at.offset, scale, affine, half);
            affine.bias_step[half] = step, affine.bias_max[half] = fmaxf(first, last);
            affine.bias[half] = fmaf(step, 15 - lane / 4 - 8 * half + lane % 4 * 2, first);
        }
        return __all_sync(~0u, bias_is_straight<position>(at.b, at.h, row0, q0, head, k0 - 15, k0 + LAST, p));
    }
    bool straight = true;
    UNROLL(half, 2) {
        const int own = at.row0 + row_of_lane(half), row = own < end ? own : end;
        const start q = row + at.offset;
        find_gain(p, at, head, row, q, scale, affine, half);
        affine.bias[half] = affine.bias_max[half] = score_bias<position>(at.b, at.h, row, q, head, k0, p) * LOG2E;
        affine.bias_step[half] = 0;
        if constexpr (SLOPED) {
            const float last = score_bias<position>(at.b, at.h, row, q, head, k0 + LAST, p) * LOG2E;
            affine.bias_step[half] = step_between(affine.bias[half], last, LAST);
            affine.bias_max[half] = fmaxf(last, affine.bias[half]);
            affine.bias[half] = fmaf(affine.bias_step[half], threadIdx.x % 4 * 2, affine.bias[half]);
            straight &= bias_is_straight<position>(at.b, at.h, row, q, head, k0, k0 + LAST, p);
        }
    }
    return !SLOPED || __all_sync(~0u, straight);
}

// The exponent of an accumulator. x2_excess: negative where the polynomial holds. approx: the device's tanh instead.
DEVICE float affine_exponent(float x, const AffineScore& affine, int half, float bias, float neg_max2, bool approx,
                             float& x2_excess) {
    if constexpr (!CAPPED) return fmaf(x, affine.gain[half], bias);
    if (approx) return fmaf(tanh_fast(x * affine.rate[half]), affine.gain[half], bias);
    x2_excess = fmaf(x, x, neg_max2);
    const float inner = TANH_POLY_SHORT ? affine.poly[half][1]
        : fmaf(x2_excess, affine.poly[half][2], affine.poly[half][1]);
    return fmaf(x, fmaf(x2_excess, inner, affine.poly[half][0]), bias);
}

// Whether the bias is a row reference for all scores of a work tile: no score is further from it than the gain, so P
// stays within 2^MAX_GAIN.
constexpr float MAX_GAIN = 80, MAX_BIAS = 1e6f;
DEVICE bool bound_scores(const AffineScore& affine, float (&m)[2]) {
    bool bounded = true;
    UNROLL(half, 2)
        bounded &= fabsf(affine.gain[half]) <= MAX_GAIN && fabsf(affine.bias[half]) <= MAX_BIAS;
    if (!__all_sync(~0u, bounded)) return false;
    m[0] = affine.bias[0], m[1] = affine.bias[1];
    return true;
}

// guess_row_ref() from accumulators.
DEVICE bool guess_row_ref_affine(const float (&s)[S_REGS], float (&m)[2], const AffineScore& affine) {
    if (!GUESSES_ROW_REF) return false;
    UNROLL(half, 2) {
        float top = HIDDEN, excess;
        UNROLL(i, 4)
            top = fmaxf(top, affine_exponent(s[i / 2 * 4 + 2 * half + i % 2], affine, half, 0, affine.neg_max2[half],
                                             TANH_POLY_SHORT, excess));
        m[half] = max_across_lanes(top) + affine.bias_max[half];
        if (P_IS_FLOAT16) m[half] += HEADROOM;
    }
    return __all_sync(~0u, are_row_refs(m));
}

// Which scores go through the device's tanh all the same, to balance the units: one in eight, where row sums are
// needed.
template <bool BOUNDED> DEVICE constexpr bool uses_tanh_unit(int n) {
    return TANH_POLY_SHORT && HEAD_DIM > 64 && !BOUNDED && n % 4 == 1;
}

// Speculative softmax from accumulators. False where S is needed again: the reference was too low, or too high where
// `may_be_high`; or, which poly_ok tells, scores are too large for the polynomial. STEEP: all tanh by the device.
// BOUNDED: the reference cannot be wrong, and row sums are not needed.
template <bool STEEP, bool BOUNDED>
DEVICE bool affine_softmax(float (&s)[S_REGS], const float (&m)[2], float (&sum)[2], const AffineScore& affine,
                           bool may_be_high, bool& poly_ok) {
    constexpr float MIN_SUM = !P_IS_FLOAT16 ? 1e-18f : GUESSES_ROW_REF ? 5e-4f : 0.03f;
    unsigned signs = ~0u;  // of the excesses, and-ed: LOP3 takes two at a time, a maximum only one
    float total[4] = {0, 0, 0, 0}, neg_max2[2] = {affine.neg_max2[0], affine.neg_max2[1]}, excess[2] = {-1, -1};
    const float base[2] = {affine.bias[0] - m[0], affine.bias[1] - m[1]};
    UNROLL(n, BLOCK_K / 8) {
        UNROLL(half, 2) {
            UNROLL(c, 2) {
                float& x = s[4 * n + 2 * half + c];
                const float bias = SLOPED ? fmaf(affine.bias_step[half], 8 * n + c, base[half]) : base[half];
                const bool approx = STEEP || (c == 1 && uses_tanh_unit<BOUNDED>(n));
                x = exp2_fast(affine_exponent(x, affine, half, bias, neg_max2[half], approx, excess[c]));
                if (!BOUNDED) total[2 * half + c] += x;
            }
            if (CAPPED && !STEEP)
                signs &= __float_as_uint(excess[0]) & (uses_tanh_unit<BOUNDED>(n) ? ~0u : __float_as_uint(excess[1]));
        }
        // A dependence on one exponential, so that the compiler starts exponentials before all exponents are computed.
        if (CAPPED && !STEEP && TANH_POLY_SHORT)
            neg_max2[0] = fmaf(s[4 * n + 1], 0.0f, neg_max2[0]),
            neg_max2[1] = EVEN ? neg_max2[0] : fmaf(s[4 * n + 1], 0.0f, neg_max2[1]);
    }
    sum[0] = total[0] + total[1], sum[1] = total[2] + total[3];
    poly_ok = !CAPPED || STEEP || (int)signs < 0;
    if constexpr (BOUNDED) return STEEP || __all_sync(~0u, poly_ok);
    const float least = SLOPED && may_be_high ? MIN_SUM : 0.0f;
    return __all_sync(~0u, sum[0] <= MAX_SUM && sum[1] <= MAX_SUM &&
        (!SLOPED || (sum[0] >= least && sum[1] >= least)) && poly_ok);
}

// Where the bias grows from tile to tile the row reference grows with it, before P overflows. ref_minus_bias: the
// reference less the greatest bias of the tile that it comes from; -inf where unknown.
constexpr float MAX_LAG = P_IS_FLOAT16 ? 7 : 30;
DEVICE void find_ref_minus_bias(const AffineScore& affine, const float (&m)[2], float (&ref_minus_bias)[2]) {
    UNROLL(half, 2)
        if (ref_minus_bias[half] == HIDDEN && affine.bias_max[half] != HIDDEN)
            ref_minus_bias[half] = m[half] - affine.bias_max[half];
}
DEVICE bool row_ref_lags(const AffineScore& affine, const float (&m)[2], const float (&ref_minus_bias)[2]) {
    return SLOPED && (ref_minus_bias[0] + affine.bias_max[0] - m[0] > MAX_LAG ||
        ref_minus_bias[1] + affine.bias_max[1] - m[1] > MAX_LAG);
}
DEVICE void raise_row_ref(const AffineScore& affine, float (&m)[2], const float (&ref_minus_bias)[2],
    float (&rescale)[2]) {
    UNROLL(half, 2) {
        const float top = fmaxf(m[half], ref_minus_bias[half] + affine.bias_max[half]);
        rescale[half] = exp2_fast(m[half] - top);
        m[half] = top;
    }
}

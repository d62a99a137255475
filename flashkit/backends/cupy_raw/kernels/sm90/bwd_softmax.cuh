// Scores to weights in the Hopper backward pass; what is said of their slopes stays in the place of the scores.
#pragma once
#include "sm90/pipeline.cuh"

// Element 4 n + 2 half + c: -inf where it is hidden. Where the mask SHIFTS, queries are counted from the lane's first one: so each is
// a number in the instruction that compares it.
template <typename POSITION>
DEVICE float hidden_or(const Params& p, const Place& at, float x, int n, int half, int c, POSITION offset, int n_k) {
    const int k = at.k0 + key_of_lane(half), own = at.row0 + row_of_lane(n, c), last = (int)p.n_q - 1, row = own < last ? own : last;
    const POSITION first = at.row0 + row_of_lane(0, 0) + offset;
    const POSITION q = SHIFTS ? 8 * n + c : row + offset, key = SHIFTS ? k - first : k;
    return k < n_k && (!HAS_MASK || visible(at.b, at.h, row, q, key, p)) ? x : HIDDEN;
}

// Scores of a tile of which a part is hidden. Far positions are dealt with one after the other, which takes few registers.
DEVICE void hide(const Params& p, const Place& at, float (&s)[PAIRS]) {
    const int n_k = (int)keys_of(p, at.b);
    const long long offset = offset_of(p, at.b);
    if (!HAS_MASK || is_near(p, offset)) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) s[i] = hidden_or<int>(p, at, s[i], i / 4, i / 2 % 2, i % 2, (int)offset, n_k);
        return;
    }
    if constexpr (HAS_MASK) {
        float copy[PAIRS];  // in memory, since its index is not constant
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) copy[i] = s[i];
#pragma unroll 1
        for (int i = 0; i < PAIRS; ++i) copy[i] = hidden_or<long long>(p, at, copy[i], i / 4, i / 2 % 2, i % 2, offset, n_k);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) s[i] = copy[i];
    }
}

// A score to its weight; in x it stays as the factor of dP - delta in dS: times the slope of the score modification. odd:
// bits of keys that are not finite.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE float weigh_one(const Params& p, const Place& at, float& x, int n, int half, int c, long long offset, int n_k, float scale,
                       float lse, bool odd) {
    const int k = at.k0 + key_of_lane(half), row = at.row0 + row_of_lane(n, c);
    float slope = 1;
    x *= scale;
    if (k < n_k && row < (int)p.n_q) {
        if (HAS_SCORE) slope = score_slope(x, at.b, at.h, row, row + offset, k, p);
        x = modify<PARTIAL_TILE, POSITION>(x, at.b, at.h, row, (POSITION)(row + offset), k, p);
        if (HAS_SCORE) x *= LOG2E;
    } else {
        x = HIDDEN;
    }
    float w = x == HIDDEN ? 0.0f : exp2_fast(x - lse);
    // A score of a key that is not finite is -inf or has made its row's sum infinite or NaN.
    if (odd) w = x == HIDDEN || is_finite(lse) ? 0.0f : fk_special(0);
    x = HAS_SCORE && w != 0 ? w * slope : w;
    return w;
}

// Scores to weights, rounded in `pairs`, dropped ones as 0. shift: address of the log-sum-exps in base 2.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE void weigh(const Params& p, const Place& at, float (&s)[PAIRS], unsigned (&pairs)[PAIRS / 2], unsigned shift, const Kept& kept) {
    constexpr bool IN_TURN = SMALL_SCORE && sizeof(POSITION) == 8;  // far positions, as in hide()
    const int n_k = (int)keys_of(p, at.b);
    const long long offset = offset_of(p, at.b);
    const float scale = (float)(HAS_SCORE ? p.softmax_scale : p.softmax_scale * 1.4426950408889634);
    auto odd_from = [&](int half) {  // bits of keys that are not finite, from that of the half's key on
        const int bit = at.first + key_of_lane(half);
        return (unsigned)load_word(at.odd + bit / 32 * 4) >> bit % 32;
    };
    auto keep = [&](int i, float w, float v) {
        if (HAS_DROPOUT) {
            w = kept.has(i / 4, i / 2 % 2, 0) ? w * (float)p.dropout_scale : 0.0f;
            v = kept.has(i / 4, i / 2 % 2, 1) ? v * (float)p.dropout_scale : 0.0f;
        }
        pairs[i / 2] = pack(w, v);
    };
    if constexpr (IN_TURN) {
        float copy[PAIRS], weight[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) copy[i] = s[i];
#pragma unroll 1
        for (int i = 0; i < PAIRS; ++i) {
            const int n = i / 4, half = i / 2 % 2, c = i % 2;
            const float lse = load_number(shift + 32 * n + 4 * c);
            weight[i] = weigh_one<PARTIAL_TILE, POSITION>(p, at, copy[i], n, half, c, offset, n_k, scale, lse,
                                                          odd_from(half) & 1);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) s[i] = copy[i];
#pragma unroll
        for (int i = 0; i < PAIRS; i += 2) keep(i, weight[i], weight[i + 1]);
    } else {
        const unsigned odd[2] = {odd_from(0), odd_from(1)};
#pragma unroll
        for (int n = 0; n < PAIRS / 4; ++n) {
            float lse[2];
            load_numbers_of(lse, shift, n);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float w[2];
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    w[c] = weigh_one<PARTIAL_TILE, POSITION>(p, at, s[4 * n + 2 * half + c], n, half, c, offset, n_k, scale, lse[c],
                                                             odd[half] & 1);
                keep(4 * n + 2 * half, w[0], w[1]);
            }
        }
    }
}

// The same where nothing is hidden or hide() has been there. early: numbers of the first rows, loaded before.
template <int EARLY>
DEVICE void weigh_plainly(float (&s)[PAIRS], unsigned (&pairs)[PAIRS / 2], const float (&early)[EARLY][2], unsigned shift, float unit) {
    weigh_each(s, pairs, early, shift, [&](float& x, float lse, int, int, int) { return x = exp2_fast(fmaf(x, unit, -lse)); });
}

// Scores to weights, whichever way fits; whether nothing is hidden.
template <int EARLY>
DEVICE bool weights(const Params& p, unsigned base, unsigned n, unsigned number, int tile_desc, int group, bool even, float (&s)[PAIRS],
                    unsigned (&pairs)[PAIRS / 2], float (&early)[EARLY][2], unsigned shift, float unit, Kept& kept,
                    const Line& line) {
    const bool full = (tile_desc >> 2 * group & 3) == FULL;
    if constexpr (!HAS_SCORE && !HAS_DROPOUT) {
        if (!full) {
            hide(p, place_of(base, n, number, group), s);
#pragma unroll
            for (int i = 0; i < EARLY; ++i) load_numbers_of(early[i], shift, i);  // anew: that took all registers
        }
        if (!MAY_HIDE || (even && !(tile_desc & ODD))) {
            weigh_plainly(s, pairs, early, shift, unit);
            return full;
        }
        weigh<false, int>(p, place_of(base, n, number, group), s, pairs, shift, kept);
        return false;
    }
    if constexpr (BY_FORM) {
        if (full && even && !(tile_desc & ODD) && line.known) {
            if (BY_POLYNOMIAL && is_calm(s, line)) weigh_formed<true>(s, pairs, early, shift, line);
            else weigh_formed<false>(s, pairs, early, shift, line);
            return true;
        }
    }
    const Place own = place_of(base, n, number, group);
    if constexpr (HAS_DROPOUT) kept.fill(p, own.b, own.h, own.row0, own.k0);
    const long long offset = offset_of(p, own.b);
    const bool near = SMALL_SCORE && is_near(p, offset);
    if (HAS_SCORE && !BY_FORM && full && near) weigh<false, int>(p, own, s, pairs, shift, kept);
    else if (near) weigh<true, int>(p, own, s, pairs, shift, kept);
    else weigh<true, long long>(p, own, s, pairs, shift, kept);
    return false;
}

// S to P = exp(S - lse). P is rounded into a fragment for dV; in the place of S stays P times the slope of the score
// modification, by which dP - delta is multiplied. Dropped elements are 0 in the fragment.
#pragma once
#include "sm90/bwd_fragments.cuh"

// --- affine scores ---------------------------------------------------------------------------------------------------
//
// Affine score modifications, gain * f(rate * s) + bias (cuda_common/affine_score.py), in tiles whose pairs are all
// visible: the exponent is a multiply-add of the accumulator, and the slope comes from f. Here the bias depends on
// q - k alone, gain and rate on nothing: then few numbers describe a warp's tile.

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
DEVICE void add_early_bias(const AffineTile& tile, float (&stats)[EARLY][2]) {
#pragma unroll
    for (int n = 0; AFFINE_AHEAD && n < EARLY; ++n)
        UNROLL(c, 2) stats[n][c] = bias_minus_lse(tile, stats[n][c], n, 0, c);
}

// --- masks -----------------------------------------------------------------------------------------------------------

// Element 4 n + 2 half + c, or -inf if it is masked. Where the mask SHIFTS, queries are counted from the lane's first
// one, so that each comparison is with an immediate.
template <typename POSITION>
DEVICE float mask_score(const Params& p, const FragmentCoord& at, float x, int n, int half, int c, POSITION offset,
                        int n_q, int n_k) {
    const int k = at.k0 + row_of_lane(half), own = at.row0 + lane_row(n, c), last = n_q - 1;
    const int row = own < last ? own : last;
    const POSITION first = at.row0 + lane_row(0, 0) + offset;
    const POSITION q = SHIFTS ? 8 * n + c : row + offset, key = SHIFTS ? k - first : k;
    return k < n_k && (!IS_PACKED || own <= last) && (!HAS_MASK || visible(at.b, at.h, row, q, key, p)) ? x : HIDDEN;
}

// A PARTIAL tile. Positions beyond 32 bits are masked in a loop, which takes few registers.
DEVICE void mask_scores(const Params& p, const FragmentCoord& at, float (&s)[S_REGS]) {
    const int n_q = at.seq.n_q(), n_k = at.seq.n_k();
    const long long offset = HAS_MASK ? at.seq.q_position() : 0;
    if (!HAS_MASK || positions_are_near(p, offset)) {
        UNROLL(i, S_REGS)
            s[i] = mask_score<int>(p, at, s[i], i / 4, i / 2 % 2, i % 2, (int)offset, n_q, n_k);
        return;
    }
    if constexpr (HAS_MASK) {
        float copy[S_REGS];  // in local memory, as its index is not constant
        UNROLL(i, S_REGS) copy[i] = s[i];
#pragma unroll 1
        for (int i = 0; i < S_REGS; ++i)
            copy[i] = mask_score<long long>(p, at, copy[i], i / 4, i / 2 % 2, i % 2, offset, n_q, n_k);
        UNROLL(i, S_REGS) s[i] = copy[i];
    }
}

// --- any modification, non-finite rows and keys ----------------------------------------------------------------------

// P of one score x, in whose place P * slope stays.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE float softmax_p_one(const Params& p, const FragmentCoord& at, float& x, int n, int half, int c, long long offset,
                           int n_q, int n_k, float scale, float lse, bool nonfinite_key) {
    const int own_k = at.k0 + row_of_lane(half), own_row = at.row0 + lane_row(n, c);
    const int k = clamped_index(own_k, n_k), row = clamped_index(own_row, n_q);
    const bool exists = own_k < n_k && own_row < n_q;
    float slope = 1;
    x *= scale;
    if (!AFFINE_PATH || exists) {  // without a branch the reads of all pairs are under way at once
        if (HAS_SCORE) slope = score_slope(x, at.b, at.h, row, row + offset, k, p);
        x = modify<PARTIAL_TILE, POSITION>(x, at.b, at.h, row, (POSITION)(row + offset), k, p);
        if (HAS_SCORE) x *= LOG2E;
    }
    if (!exists) x = HIDDEN;
    float w = x == HIDDEN ? 0.0f : exp2_fast(x - lse);
    // The score of a non-finite key was -inf, or has made the row's sum infinite or NaN.
    if (nonfinite_key) w = x == HIDDEN || is_finite(lse) ? 0.0f : fk_special(0);
    x = HAS_SCORE && w != 0 ? w * slope : w;
    return w;
}

// lse: address of the log-sum-exps, in base 2.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE void softmax_p_general(const Params& p, const FragmentCoord& at, float (&s)[S_REGS],
                              unsigned (&p_frag)[S_REGS / 2], unsigned lse_address, float scale_log2,
                              const DropoutMask& dropout) {
    constexpr bool LOOPS = (SMALL_SCORE || HAS_BIAS) && sizeof(POSITION) == 8;  // as in mask_scores()
    const int n_q = at.seq.n_q(), n_k = at.seq.n_k();
    const long long offset = at.seq.q_position();
    const float scale = IS_FLOAT32 ? scale_log2
        : (float)(HAS_SCORE ? p.softmax_scale : p.softmax_scale * 1.4426950408889634);
    auto nonfinite_keys_from = [&](int half) {  // bits from that of row_of_lane(half) on
        const int bit = at.first_key + row_of_lane(half);
        return (unsigned)load_word(at.nonfinite_keys + bit / 32 * 4) >> bit % 32;
    };
    auto round_and_drop = [&](int i, float w, float v) {
        if (HAS_DROPOUT) {
            w = dropout.kept(i / 4, i / 2 % 2, 0) ? w * (float)p.dropout_scale : 0.0f;
            v = dropout.kept(i / 4, i / 2 % 2, 1) ? v * (float)p.dropout_scale : 0.0f;
        }
        p_frag[i / 2] = pack(w, v);
    };
    if constexpr (LOOPS) {
        float copy[S_REGS], weight[S_REGS];
        UNROLL(i, S_REGS) copy[i] = s[i];
#pragma unroll 1
        for (int i = 0; i < S_REGS; ++i) {
            const int n = i / 4, half = i / 2 % 2, c = i % 2;
            const float lse = load_float(lse_address + 32 * n + 4 * c);
            weight[i] = softmax_p_one<PARTIAL_TILE, POSITION>(p, at, copy[i], n, half, c, offset, n_q, n_k, scale, lse,
                                                              nonfinite_keys_from(half) & 1);
        }
        UNROLL(i, S_REGS) s[i] = copy[i];
#pragma unroll
        for (int i = 0; i < S_REGS; i += 2) round_and_drop(i, weight[i], weight[i + 1]);
    } else {
        const unsigned nonfinite[2] = {nonfinite_keys_from(0), nonfinite_keys_from(1)};
        UNROLL(n, S_REGS / 4) {
            float lse[2];
            load_row_stats(lse, lse_address, n);
            UNROLL(half, 2) {
                float w[2];
                UNROLL(c, 2)
                    w[c] = softmax_p_one<PARTIAL_TILE, POSITION>(p, at, s[4 * n + 2 * half + c], n, half, c, offset,
                                                                 n_q, n_k, scale, lse[c], nonfinite[half] & 1);
                round_and_drop(4 * n + 2 * half, w[0], w[1]);
            }
        }
    }
}

// --- finite, without dropout -----------------------------------------------------------------------------------------

// exponential(x, stat, n, half, c) returns P of score x and leaves P * slope there; stat: the row's log-sum-exp, of the
// first EARLY rows as loaded before.
template <int EARLY, typename F>
DEVICE void softmax_p_each(float (&s)[S_REGS], unsigned (&p_frag)[S_REGS / 2], const float (&early)[EARLY][2],
                           unsigned lse_address, F exponential) {
    UNROLL(n, S_REGS / 4) {
        float l[2];
        if (n >= EARLY) load_row_stats(l, lse_address, n);
        UNROLL(half, 2) {
            float w[2];
            UNROLL(c, 2)
                w[c] = exponential(s[4 * n + 2 * half + c], n < EARLY ? early[n % EARLY][c] : l[c], n, half, c);
            p_frag[2 * n + half] = pack(w[0], w[1]);
        }
    }
}

// No score modification; masked scores are -inf.
template <int EARLY>
DEVICE void softmax_p_plain(float (&s)[S_REGS], unsigned (&p_frag)[S_REGS / 2], const float (&early)[EARLY][2],
                            unsigned lse_address, float scale_log2) {
    softmax_p_each(s, p_frag, early, lse_address,
                   [&](float& x, float lse, int, int, int) { return x = exp2_fast(fmaf(x, scale_log2, -lse)); });
}

// An affine modification; all pairs are visible.
template <int EARLY>
DEVICE void softmax_p_affine(float (&s)[S_REGS], unsigned (&p_frag)[S_REGS / 2], const float (&early)[EARLY][2],
                             unsigned lse_address, const AffineTile& tile) {
    const float gain = tile.gain, slope = tile.slope, eight = 8 * tile.step;
    softmax_p_each(s, p_frag, early, lse_address, [&](float& x, float stat, int n, int half, int c) {
        const float bias = !AFFINE_AHEAD         ? bias_minus_lse(tile, stat, n, half, c)
                           : SLOPED && half == 1 ? stat + eight
                                                 : stat;
        float w;
        if constexpr (!CAPPED) {
            w = exp2_fast(fmaf(x, gain, bias));
            x = UNIT_SLOPE ? w : w * slope;
        } else {
            const float t = tanh_of(x * tile.rate);
            w = exp2_fast(fmaf(t, gain, bias));
            x = w * (UNIT_SLOPE ? fmaf(-t, t, 1.0f) : fmaf(-slope * t, t, slope));
        }
        return w;
    });
}

// --- a bias ----------------------------------------------------------------------------------------------------------

// s + bias. PARTIAL_TILE: masked scores are -inf, whatever the bias is.
template <bool PARTIAL_TILE, int EARLY>
DEVICE void softmax_p_biased(float (&s)[S_REGS], unsigned (&p_frag)[S_REGS / 2], const float (&early)[EARLY][2],
                             unsigned lse_address, float scale_log2, const BiasFragment& bias) {
    softmax_p_each(s, p_frag, early, lse_address, [&](float& x, float lse, int n, int half, int c) {
        const float w = exp2_fast(fmaf(x, scale_log2, fmaf(bias.get(n, half, c), LOG2E, -lse)));
        return x = PARTIAL_TILE && x == HIDDEN ? 0.0f : w;
    });
}

// --- all -------------------------------------------------------------------------------------------------------------

// Takes the path that fits the tile; returns whether all pairs are visible. keys_finite: those of the fragment.
template <int EARLY>
DEVICE bool softmax_p(const Params& p, const FragmentId& id, int tile_desc, bool keys_finite, float (&s)[S_REGS],
                      unsigned (&p_frag)[S_REGS / 2], float (&early)[EARLY][2], unsigned lse_address, float scale_log2,
                      DropoutMask& dropout, const AffineTile& affine, BiasFragment& bias) {
    const bool full = (tile_desc >> 2 * id.key_group & 3) == FULL;
    if constexpr (!HAS_SCORE && !HAS_DROPOUT) {
        if (!full) {
            mask_scores(p, coord_of(p, id), s);
#pragma unroll
            // again: masking takes all registers
            for (int i = 0; i < EARLY; ++i) load_row_stats(early[i], lse_address, i);
        }
        if (!MAY_HIDE || (keys_finite && !(tile_desc & TileDesc::NONFINITE_ROWS))) {
            softmax_p_plain(s, p_frag, early, lse_address, scale_log2);
            return full;
        }
        softmax_p_general<false, int>(p, coord_of(p, id), s, p_frag, lse_address, scale_log2, dropout);
        return false;
    }
    if constexpr (AFFINE_PATH) {
        if (full && keys_finite && !(tile_desc & TileDesc::NONFINITE_ROWS) && affine.valid) {
            softmax_p_affine(s, p_frag, early, lse_address, affine);
            return true;
        }
    }
    if constexpr (HAS_BIAS) {
        if (keys_finite && !(tile_desc & TileDesc::NONFINITE_ROWS)) {
            if (full) {
                softmax_p_biased<false>(s, p_frag, early, lse_address, scale_log2, bias);
                return false;
            }
            mask_scores(p, coord_of(p, id), s);
            UNROLL(i, EARLY) load_row_stats(early[i], lse_address, i);
            bias.load_again();
            softmax_p_biased<true>(s, p_frag, early, lse_address, scale_log2, bias);
            return false;
        }
    }
    const FragmentCoord at = coord_of(p, id);
    if constexpr (HAS_DROPOUT) dropout.fill(p, at.b, at.h, at.row0, at.k0);
    const long long offset = at.seq.q_position();
    const bool near = SMALL_SCORE && positions_are_near(p, offset);
    if (HAS_SCORE && !AFFINE_PATH && !HAS_BIAS && full && near)
        softmax_p_general<false, int>(p, at, s, p_frag, lse_address, scale_log2, dropout);
    else if (near) softmax_p_general<true, int>(p, at, s, p_frag, lse_address, scale_log2, dropout);
    else softmax_p_general<true, long long>(p, at, s, p_frag, lse_address, scale_log2, dropout);
    return false;
}

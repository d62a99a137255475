// What happens to pairs in the Hopper backward pass: scores to weights, dP to dS.
//
// Numbers lie as wgmma leaves them. Element 4 n + 2 half + c of a lane is at
//
//     KEYS_SHARED   row row_of_lane(half),      key key_of_lane(n) + c
//     else          row row_of_lane(n) + c,     key key_of_lane(half)
//
// of its group's rows and keys: there are four lanes for each element of the first axis.
#pragma once
#include "sm90.cuh"

constexpr int PAIRS = KEYS_SHARED ? GROUP_KEYS / 2 : BLOCK_Q / 2;  // elements of a lane

DEVICE int first_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }
DEVICE int second_of_lane(int n) { return 8 * n + threadIdx.x % 4 * 2; }
DEVICE int row_of_lane(int n, int half, int c) { return KEYS_SHARED ? first_of_lane(half) : second_of_lane(n) + c; }
DEVICE int key_of_lane(int n, int half, int c) { return KEYS_SHARED ? second_of_lane(n) + c : first_of_lane(half); }

// Numbers of the rows of a lane's elements 4 n ...: [half][c]. address: of the lane's first one, own_row() bytes into the tile's.
DEVICE unsigned own_row(int warp, int lane) { return KEYS_SHARED ? warp % 4 * 64 + lane / 4 * 4 : lane % 4 * 8; }
DEVICE void load_numbers_of(float (&x)[2][2], unsigned address, int n) {
    if constexpr (KEYS_SHARED) {
        x[0][0] = x[0][1] = load_number(address);
        x[1][0] = x[1][1] = load_number(address + 32);
    } else {
        load_two(x[0], address + 32 * n);
        x[1][0] = x[0][0], x[1][1] = x[0][1];
    }
}

// --- dropout ----------------------------------------------------------------------------------------------------------

// Which of a lane's weights are kept, a bit for each. A call of the generator is for four keys of a row, which several lanes
// have; each of them makes the words for a part of the rows.
struct Kept {
    unsigned bits[4];

    __device__ __forceinline__ static unsigned four(const Params& p, int b, int h, int row, int key) {
        const Words words = philox(p.seed, key >> 2, row, h, b);
        unsigned kept = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) kept |= (words.word[j] >= (unsigned)p.threshold ? 1u : 0u) << j;
        return kept;
    }
    // Keys are lanes: of rows 4 m + i (in the order of elements) lane i of four has bits 16 * half + 4 m + key % 4. Rows are
    // lanes: the even one of two has bits 4 n + key % 4 of half 0, the odd one of half 1.
    __device__ __forceinline__ void fill(const Params& p, int b, int h, int row0, int k0) {
        static_assert(!HAS_DROPOUT || PAIRS <= 32, "a lane's bits of a part of the rows fit a word");
        unsigned own = 0;
        if constexpr (KEYS_SHARED) {
            const int half = threadIdx.x % 2;
#pragma unroll
            for (int n = 0; n < PAIRS / 4; ++n)
                own |= four(p, b, h, row0 + first_of_lane(half), k0 + (second_of_lane(n) & ~3)) << 4 * n;
            const unsigned other = __shfl_xor_sync(~0u, own, 1);
            bits[0] = (half == 0 ? own : other) >> 2 * half, bits[1] = (half == 0 ? other : own) >> 2 * half;
        } else {
            const int part = threadIdx.x % 16 / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int m = 0; m < PAIRS / 8; ++m) {
                    const int e = 4 * m + part;
                    own |= four(p, b, h, row0 + second_of_lane(e / 2) + e % 2, k0 + first_of_lane(half)) << (16 * half + 4 * m);
                }
#pragma unroll
            for (int i = 0; i < 4; ++i) bits[i] = __shfl_sync(~0u, own, (threadIdx.x % 32 & ~12) | 4 * i) >> part;
        }
    }
    __device__ __forceinline__ bool has(int n, int half, int c) const {
        if constexpr (KEYS_SHARED) return bits[half] >> (4 * n + c) & 1;
        const int e = 2 * n + c;
        return bits[e % 4] >> (16 * half + e / 4 * 4) & 1;
    }
};

// --- modify -----------------------------------------------------------------------------------------------------------

constexpr long long FAR = 1 << 26;

// The place of a group's pairs.
struct Place {
    int b, h, row0, k0;
    unsigned odd;  // address of bits of keys that are not finite, from k0's tile on
    int first;     // of the group's keys within that
};
// Of tile `n` of queries, item `number`: from shared memory, since it is asked for rarely and would take registers always.
DEVICE Place place_of(unsigned base, unsigned n, unsigned number, int group) {
    const unsigned note = note_of(base, n), slot = item_slot(base, number);
    return {load_word(slot), load_word(note + 4), (load_word(note) >> 8) * BLOCK_Q, load_word(slot + 8) + GROUP_KEYS * group,
            odd_of(base, number), GROUP_KEYS * group};
}

// Scores of a tile of which a part is hidden: -inf there.
template <typename POSITION>
DEVICE void hide(const Params& p, const Place& at, float (&s)[PAIRS]) {
    const int n_k = (int)keys_of(p, at.b), last = (int)p.n_q - 1;
    const POSITION offset = (POSITION)offset_of(p, at.b);
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int k = at.k0 + key_of_lane(n, half, c), own = at.row0 + row_of_lane(n, half, c), row = own < last ? own : last;
                float& x = s[4 * n + 2 * half + c];
                if (k < n_k) x = modify<true, POSITION>(x, at.b, at.h, row, (POSITION)row + offset, k, p);
                else x = HIDDEN;
            }
}

// Scores to weights, rounded in `pairs`, dropped ones as 0. In s they stay as the factor of dP - delta in dS: times the slope
// of the score modification. shift: address of the log-sum-exps in base 2.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE void weigh(const Params& p, const Place& at, float (&s)[PAIRS], unsigned (&pairs)[PAIRS / 2], unsigned shift, const Kept& kept) {
    const int n_k = (int)keys_of(p, at.b), n_q = (int)p.n_q;
    const long long offset = offset_of(p, at.b);
    const float scale = (float)(HAS_SCORE ? p.scale : p.scale * 1.4426950408889634);
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float reference[2][2];
        load_numbers_of(reference, shift, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float w[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                const int key = key_of_lane(n, half, c), k = at.k0 + key, row = at.row0 + row_of_lane(n, half, c);
                const float lse = reference[half][c];
                float slope = 1;
                x *= scale;
                if (k < n_k && row < n_q) {
                    if (HAS_SCORE) slope = score_slope(x, at.b, at.h, row, row + offset, k, p);
                    x = modify<PARTIAL_TILE, POSITION>(x, at.b, at.h, row, (POSITION)(row + offset), k, p);
                    if (HAS_SCORE) x *= LOG2E;
                } else {
                    x = HIDDEN;
                }
                w[c] = x == HIDDEN ? 0.0f : exp2_fast(x - lse);
                // A score of a key that is not finite is -inf or has made its row's sum infinite or NaN.
                if (MAY_HIDE && (load_word(at.odd + (at.first + key) / 32 * 4) >> (at.first + key) % 32 & 1))
                    w[c] = x == HIDDEN || is_finite(lse) ? 0.0f : fk_special(0);
                x = HAS_SCORE && w[c] != 0 ? w[c] * slope : w[c];
                if (HAS_DROPOUT) w[c] = kept.has(n, half, c) ? w[c] * (float)p.kept_scale : 0.0f;
            }
            pairs[2 * n + half] = pack(w[0], w[1]);
        }
    }
}

// The same where nothing is hidden or hide() has been there. early: numbers of the first rows, loaded before.
template <int EARLY>
DEVICE void weigh_plainly(float (&s)[PAIRS], unsigned (&pairs)[PAIRS / 2], const float (&early)[EARLY][2][2], unsigned shift, float unit) {
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float l[2][2];
        if (!KEYS_SHARED && n >= EARLY) load_numbers_of(l, shift, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x = exp2_fast(fmaf(x, unit, -(n < EARLY || KEYS_SHARED ? early[KEYS_SHARED ? 0 : n % EARLY][half][c] : l[half][c])));
            }
            pairs[2 * n + half] = pack(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
        }
    }
}

// Scores to weights, whichever way fits; whether nothing is hidden.
template <int EARLY>
DEVICE bool weights(const Params& p, unsigned base, unsigned n, unsigned number, int note, int group, bool even, float (&s)[PAIRS],
                    unsigned (&pairs)[PAIRS / 2], const float (&early)[EARLY][2][2], unsigned shift, float unit, Kept& kept) {
    const bool full = (note >> 2 * group & 3) == FULL;
    if (!MAY_HIDE || (!HAS_SCORE && !HAS_DROPOUT && even && !(note & ODD))) {
        if (!full) {
            const Place own = place_of(base, n, number, group);
            const long long offset = offset_of(p, own.b);
            const bool narrow = __all_sync(~0u, offset >= -FAR && offset + p.n_q < FAR && p.n_k < FAR);
            if (narrow) hide<int>(p, own, s);
            else hide<long long>(p, own, s);
        }
        weigh_plainly(s, pairs, early, shift, unit);
        return full;
    }
    if constexpr (MAY_HIDE) {
        const Place own = place_of(base, n, number, group);
        if constexpr (HAS_DROPOUT) kept.fill(p, own.b, own.h, own.row0, own.k0);
        const long long offset = offset_of(p, own.b);
        const bool narrow = __all_sync(~0u, SMALL_SCORE && offset >= -FAR && offset + p.n_q < FAR && p.n_k < FAR);
        if (HAS_SCORE && full && narrow) weigh<false, int>(p, own, s, pairs, shift, kept);
        else if (narrow) weigh<true, int>(p, own, s, pairs, shift, kept);
        else weigh<true, long long>(p, own, s, pairs, shift, kept);
    }
    return false;
}

// dP to dS, rounded in `pairs`. PLAIN: nothing is hidden.
template <bool PLAIN>
DEVICE void gradients(const Params& p, const float (&s)[PAIRS], float (&dp)[PAIRS], unsigned (&pairs)[PAIRS / 2], unsigned delta,
                      const Kept& kept) {
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float d[2][2];
        load_numbers_of(d, delta, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int i = 4 * n + 2 * half + c;
                if (HAS_DROPOUT) dp[i] = kept.has(n, half, c) ? dp[i] * (float)p.kept_scale : 0.0f;
                x[c] = s[i] * (dp[i] - d[half][c]);
                if (!PLAIN && s[i] == 0) x[c] = 0;
            }
            pairs[2 * n + half] = pack(x[0], x[1]);
        }
    }
}

// --- storing ----------------------------------------------------------------------------------------------------------

// Lane t of four that share a row ends with all four words of number t.
DEVICE void turn_four(unsigned (&x)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    unsigned a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    if (odd) x[0] = a, x[2] = b;
    else x[1] = a, x[3] = b;
    a = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2), b = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
    if (high) x[0] = a, x[1] = b;
    else x[2] = a, x[3] = b;
}

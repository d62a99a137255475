// What happens to pairs in the Hopper backward pass: scores to weights, dP to dS.
//
// Numbers lie as wgmma leaves them, keys being the rows. Element 4 n + 2 half + c of a lane is at
//
//     key key_of_lane(half),     row row_of_lane(n, c) of the tile of queries
//
// of its group's keys: there are four lanes for each key.
#pragma once
#include "sm90.cuh"

constexpr int PAIRS = BLOCK_Q / 2;  // elements of a lane

DEVICE int key_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }
DEVICE int row_of_lane(int n, int c) { return 8 * n + threadIdx.x % 4 * 2 + c; }

// Numbers of the rows of a lane's elements 4 n ...: [c]. address: of the lane's first one, own_row() bytes into the tile's.
DEVICE unsigned own_row(int lane) { return lane % 4 * 8; }
DEVICE void load_numbers_of(float (&x)[2], unsigned address, int n) { load_two(x, address + 32 * n); }

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
    // Of rows 4 m + i (in the order of elements) lane i of four has bits 16 * half + 4 m + key % 4.
    __device__ __forceinline__ void fill(const Params& p, int b, int h, int row0, int k0) {
        static_assert(!HAS_DROPOUT || PAIRS <= 32, "a lane's bits of a part of the rows fit a word");
        unsigned own = 0;
        const int part = threadIdx.x % 16 / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int m = 0; m < PAIRS / 8; ++m) {
                const int e = 4 * m + part;
                own |= four(p, b, h, row0 + row_of_lane(e / 2, e % 2), k0 + key_of_lane(half)) << (16 * half + 4 * m);
            }
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = __shfl_sync(~0u, own, (threadIdx.x % 32 & ~12) | 4 * i) >> part;
    }
    __device__ __forceinline__ bool has(int n, int half, int c) const {
        const int e = 2 * n + c;
        return bits[e % 4] >> (16 * half + e / 4 * 4) & 1;
    }
};

// --- modify -----------------------------------------------------------------------------------------------------------

constexpr long long FAR = 1 << 26;

// Whether positions fit 32 bits, whatever is made of them; asked as a vote, whose outcome is known to be the same in all lanes.
DEVICE bool is_near(const Params& p, long long offset) {
    return __all_sync(~0u, offset >= -FAR && offset + p.n_q < FAR && p.n_k < FAR);
}

// The place of a group's pairs; where blocks share an item, `group` is the block's number.
struct Place {
    int b, h, row0, k0;
    unsigned odd;  // address of bits of the block's keys that are not finite
    int first;     // of the group's keys within that
};
// Of tile `n` of queries, item `number`: from shared memory, since it is asked for rarely and would take registers always.
DEVICE Place place_of(unsigned base, unsigned n, unsigned number, int group) {
    const unsigned note = note_of(base, n), slot = item_slot(base, number);
    return {load_word(slot), load_word(note + 4), (load_word(note) >> 8) * BLOCK_Q, load_word(slot + 8) + GROUP_KEYS * group,
            odd_of(base, number), KEYS_SHARED ? 0 : GROUP_KEYS * group};
}

// Element 4 n + 2 half + c: -inf where it is hidden.
template <typename POSITION>
DEVICE float hidden_or(const Params& p, const Place& at, float x, int n, int half, int c, POSITION offset, int n_k) {
    const int k = at.k0 + key_of_lane(half), own = at.row0 + row_of_lane(n, c), last = (int)p.n_q - 1, row = own < last ? own : last;
    return k < n_k ? modify<true, POSITION>(x, at.b, at.h, row, (POSITION)row + offset, k, p) : HIDDEN;
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
    const float scale = (float)(HAS_SCORE ? p.scale : p.scale * 1.4426950408889634);
    auto odd_from = [&](int half) {  // bits of keys that are not finite, from that of the half's key on
        const int bit = at.first + key_of_lane(half);
        return (unsigned)load_word(at.odd + bit / 32 * 4) >> bit % 32;
    };
    auto keep = [&](int i, float w, float v) {
        if (HAS_DROPOUT) {
            w = kept.has(i / 4, i / 2 % 2, 0) ? w * (float)p.kept_scale : 0.0f;
            v = kept.has(i / 4, i / 2 % 2, 1) ? v * (float)p.kept_scale : 0.0f;
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
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float l[2];
        if (n >= EARLY) load_numbers_of(l, shift, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x = exp2_fast(fmaf(x, unit, -(n < EARLY ? early[n % EARLY][c] : l[c])));
            }
            pairs[2 * n + half] = pack(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
        }
    }
}

// --- modifications of a known form ------------------------------------------------------------------------------------
// gain * f(rate * s) + bias (cuda_common/form.py), in tiles whose pairs are all visible: exponents of weights are taken from
// the products as they come, and the slope is a number or a polynomial. Here the bias is of the distance q - k, or constant,
// gain and rate are the same for all rows: then a warp's numbers are few.

constexpr bool BY_FORM = HAS_SCORE && FORMED && EVEN && DIAGONAL && SMALL_SCORE && !HAS_DROPOUT;

// tanh(x) / x and its slope by polynomials of x^2, for |x| up to CALM: to 2e-4 and 1e-3 for bfloat16, else 2e-5 and 2e-4.
constexpr bool SHORT = STORAGE == BFLOAT16;
constexpr float CALM = SHORT ? 0.35f : 0.5f;
constexpr float TANH_0 = SHORT ? 0.9997628f : 0.99997744f, TANH_1 = SHORT ? -0.31769618f : -0.3316915f, TANH_2 = SHORT ? 0 : 0.11520976f;
constexpr float SLOPE_0 = SHORT ? 0.99880122f : 0.99983822f, SLOPE_1 = SHORT ? -0.92255397f : -0.98864075f, SLOPE_2 = SHORT ? 0 : 0.5423509f;

// Larger ones, and all where registers are short: bfloat16 by the device's own tanh, right to 2^-11.
constexpr bool BY_POLYNOMIAL = PAIRS <= 32;
DEVICE float tanh_steep(float x) {
    if constexpr (!SHORT) return fk_tanh(x);
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What makes exponents of a warp's rows and keys.
struct Line {
    bool known;            // whether this is such a tile
    float gain, rate;      // rate: of the product
    float slope;           // where f does not bend
    float first[2], step;  // the bias in base 2: of the lane's first pair of each half; from key to key
};

constexpr int LINE_ROWS = BLOCK_Q, LINE_KEYS = 16;  // of a warp

// A number that is the same in all lanes; said so to the compiler.
DEVICE float same(float x) { return __int_as_float(uniform(__float_as_int(x))); }

DEVICE Line line_of(const Params& p, unsigned base, unsigned n, unsigned number, int note, int group, int warp, int lane, bool even) {
    Line line{false, 1, 1, 1, {0, 0}, 0};
    if constexpr (BY_FORM) {
        if ((note >> 2 * group & 3) != FULL || (note & ODD) || !even) return line;
        const Place at = place_of(base, n, number, group);
        const long long offset = offset_of(p, at.b);
        const int row = at.row0, k = at.k0 + warp % 4 * 16, q = row + (int)offset;
        constexpr int STEPS = LINE_ROWS + LINE_KEYS - 2;
        const float gain = score_gain<int>(at.b, at.h, row, q, p), rate = CAPPED ? score_rate<int>(at.b, at.h, row, q, p) : 1;
        line.gain = same(gain), line.slope = same(gain * rate), line.rate = same(rate * (float)p.scale);
        const float far = score_bias<int>(at.b, at.h, row, q + LINE_ROWS - 1, k, p) * LOG2E;
        const float near = SLOPED ? score_bias<int>(at.b, at.h, row, q, k + LINE_KEYS - 1, p) * LOG2E : far;
        line.step = SLOPED ? (near - far) * (1.0f / STEPS) : 0.0f;
        const int steps = LINE_ROWS - 1 - lane % 4 * 2 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) line.first[half] = SLOPED ? fmaf(line.step, steps + 8 * half, far) : far;
        const bool straight = !SLOPED || bias_is_straight<int>(at.b, at.h, row, q, k - (LINE_ROWS - 1), k + LINE_KEYS - 1, p);
        line.known = is_near(p, offset) && __all_sync(~0u, straight);
    }
    return line;
}

// Whether polynomials do for all scores of a warp's tile.
DEVICE bool is_calm(const float (&s)[PAIRS], const Line& line) {
    float greatest = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) greatest = fmaxf(greatest, fabsf(s[i]));
    return __all_sync(~0u, greatest * fabsf(line.rate) <= CALM);
}

template <bool CALM_TILE, int EARLY>
DEVICE void weigh_formed(float (&s)[PAIRS], unsigned (&pairs)[PAIRS / 2], const float (&early)[EARLY][2], unsigned shift, float unit,
                         const Line& line) {
    const float gain = line.gain * (CAPPED ? LOG2E : unit), slope = line.slope, rate = line.rate, square = rate * rate;
    const float tanh_0 = TANH_0 * gain * rate, tanh_1 = TANH_1 * gain * rate * square, tanh_2 = TANH_2 * gain * rate * square * square;
    const float slope_0 = SLOPE_0 * slope, slope_1 = SLOPE_1 * slope * square, slope_2 = SLOPE_2 * slope * square * square;
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float l[2];
        if (n >= EARLY) load_numbers_of(l, shift, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float w[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                const float lse = n < EARLY ? early[n % EARLY][c] : l[c];
                // Of the two numbers one is the same for both halves, the other for all n.
                const float bias = fmaf(line.step, -8 * n - c, -lse) + line.first[half];
                if constexpr (!CAPPED) {
                    w[c] = exp2_fast(fmaf(x, gain, bias));
                    x = w[c] * slope;
                } else if constexpr (CALM_TILE) {
                    const float y = x * x;
                    w[c] = exp2_fast(fmaf(x, fmaf(SHORT ? tanh_1 : fmaf(tanh_2, y, tanh_1), y, tanh_0), bias));
                    x = w[c] * fmaf(SHORT ? slope_1 : fmaf(slope_2, y, slope_1), y, slope_0);
                } else {
                    const float t = tanh_steep(x * rate);
                    w[c] = exp2_fast(fmaf(t, gain, bias));
                    x = w[c] * fmaf(-slope * t, t, slope);
                }
            }
            pairs[2 * n + half] = pack(w[0], w[1]);
        }
    }
}

// Scores to weights, whichever way fits; whether nothing is hidden.
template <int EARLY>
DEVICE bool weights(const Params& p, unsigned base, unsigned n, unsigned number, int note, int group, bool even, float (&s)[PAIRS],
                    unsigned (&pairs)[PAIRS / 2], float (&early)[EARLY][2], unsigned shift, float unit, Kept& kept,
                    const Line& line) {
    const bool full = (note >> 2 * group & 3) == FULL;
    if constexpr (!HAS_SCORE && !HAS_DROPOUT) {
        if (!full) {
            hide(p, place_of(base, n, number, group), s);
#pragma unroll
            for (int i = 0; i < EARLY; ++i) load_numbers_of(early[i], shift, i);  // anew: that took all registers
        }
        if (!MAY_HIDE || (even && !(note & ODD))) {
            weigh_plainly(s, pairs, early, shift, unit);
            return full;
        }
        weigh<false, int>(p, place_of(base, n, number, group), s, pairs, shift, kept);
        return false;
    }
    if constexpr (BY_FORM) {
        if (line.known) {
            if (!CAPPED || (BY_POLYNOMIAL && is_calm(s, line))) weigh_formed<true>(s, pairs, early, shift, unit, line);
            else weigh_formed<false>(s, pairs, early, shift, unit, line);
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

// Deltas of a lane's rows. Shared memory, which products read all the time, answers late: so where there are registers the first
// ones are loaded before they are needed. Over 128 columns it was 8 to 12 % slower so, in order 1 % faster to 5 % slower.
constexpr int EARLY_DELTAS = !HAS_SCORE && COLUMNS <= 64 ? 2 : 0;
struct Deltas {
    unsigned address;
    float early[larger(EARLY_DELTAS, 1)][2];

    __device__ __forceinline__ explicit Deltas(unsigned address) : address(address) {
#pragma unroll
        for (int i = 0; i < EARLY_DELTAS; ++i) load_numbers_of(early[i], address, i);
    }
    __device__ __forceinline__ void of(float (&x)[2], int n) const {
        if (n < EARLY_DELTAS) x[0] = early[n % larger(EARLY_DELTAS, 1)][0], x[1] = early[n % larger(EARLY_DELTAS, 1)][1];
        else load_numbers_of(x, address, n);
    }
};

// dP to dS, rounded in `pairs`. PLAIN: nothing is hidden.
template <bool PLAIN>
DEVICE void gradients(const Params& p, const float (&s)[PAIRS], float (&dp)[PAIRS], unsigned (&pairs)[PAIRS / 2],
                      const Deltas& deltas, const Kept& kept) {
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float d[2];
        deltas.of(d, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int i = 4 * n + 2 * half + c;
                if (HAS_DROPOUT) dp[i] = kept.has(n, half, c) ? dp[i] * (float)p.kept_scale : 0.0f;
                x[c] = s[i] * (dp[i] - d[c]);
                if (!PLAIN && s[i] == 0) x[c] = 0;
            }
            pairs[2 * n + half] = pack(x[0], x[1]);
        }
    }
}

// --- products that both ways to share the work have; they are begun here, and awaited by who needs them -----------------

// S^T = K Q^T or dP^T = V dO^T, of 64 of the block's keys.
template <int SUMMED>
DEVICE void begin_pairs(float (&x)[PAIRS], unsigned keys, unsigned rows) {
    const unsigned long long a = descriptor(keys), b = descriptor(rows);
    products_begin();
    product_fresh<0, 0>(x, a, b);
#pragma unroll
    for (int k = 1; k < SUMMED / 16; ++k) product<0, 0>(x, a + along_rows(k, HELD), b + along_rows(k, BLOCK_Q), 1);
    products_end();
}

// dV += P^T dO or dK += dS^T Q, from the registers where P^T or dS^T is.
template <int N>
DEVICE void begin_sums(float (&sums)[N], const unsigned (&left)[PAIRS / 2], unsigned rows, bool add) {
    const unsigned long long b = descriptor(rows, BLOCK_Q * CHUNK_ROW);
    products_begin();
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; ++k) product_weights<1>(sums, left, 4 * k, b + along_columns(k), k > 0 || add);
    products_end();
}

// --- storing ----------------------------------------------------------------------------------------------------------

// dK or dV of a warp's 16 keys, from key `first` of the item's on, leaves by the copy engine, 64 columns at a time, through one
// of PIECES places in shared memory, APART bytes from each other. BEFORE: how many pieces went there before these; at the first
// one all else that was sent from there has left. Straight from registers, eight lines a store, it took as long as a tile.
constexpr int BYTES_PIECE = 16 * CHUNK_ROW;
template <int DIM, int BEFORE, int PIECES, int APART>
DEVICE void send_keys(const TensorMap& map, const Item& at, int first, int lane, unsigned place, const float (&x)[padded(DIM) / 2],
                      float factor) {
#pragma unroll
    for (int chunk = 0; chunk < chunks(DIM); ++chunk) {
        const unsigned target = place + (BEFORE + chunk) % PIECES * APART;
        if (BEFORE + chunk == 0) stores_wait_read();
        else stores_wait_read<PIECES - 1>();
        __syncwarp();
#pragma unroll
        for (int n = 8 * chunk; n < 8 * chunk + 8 && 8 * n < padded(DIM); n += 2) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = pack(x[4 * n + 2 * i] * factor, x[4 * n + 2 * i + 1] * factor);
            store_matrices<false>(target + swizzled(lane % 16, n % 8 + lane / 16), words[0], words[1], words[2], words[3]);
        }
        fence_async();
        __syncwarp();
        if (elected()) store_box<1>(map, {64 * chunk, at.k0 + first, at.head, at.b}, target), stores_end();
    }
}

// Scores to weights in the registers of a Hopper warp group, and what is done where that went wrong.
#pragma once
#include "sm90/pipeline.cuh"

// Weights up to this much above the reference are taken as they come: they fit the type that they are rounded to.
constexpr bool HALVES = STORAGE != BFLOAT16;  // weights are float16
constexpr float LIMIT = HALVES ? 32768.0f : 1e18f;

// Whether an item's first reference is guessed, and how far above what it is guessed from, in base 2: so that float16 has room
// for greater scores. With more than 64 columns it is no faster there.
constexpr bool GUESSES = STORAGE != FLOAT16 || HEAD_DIM <= 64;
constexpr float HEADROOM = HALVES ? 6 : 0;

constexpr float STEADY = 1e-6f;  // how much less earlier weights may count than thought, and the reference still be trusted

// A hidden pair has the weight 0, but 0 times NaN is NaN: see finish().
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

// A lane's row among the 64 of its warp group.
DEVICE int row_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

// --- modify ------------------------------------------------------------------------------------------------------------

// What scores are multiplied by to be in base 2; where there is a score modification they are scaled before it.
DEVICE float softmax_scale_log2(const Params& p) { return HAS_SCORE ? LOG2E : (float)(p.softmax_scale * 1.4426950408889634); }

// A key past the end, which is hidden after all, is taken for the last one: nothing is read beyond the end of an array.
DEVICE int key_inside(int k, int n_k) { return min(k, n_k > 0 ? n_k - 1 : 0); }

// Scores of which only so many of the tile's keys exist, -inf for the others; or WEIGHTS, 0.
template <bool WEIGHTS>
DEVICE void hide_past(float (&s)[BLOCK_K / 2], int keys) {
    const int left = keys - threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) s[i] = i / 4 * 8 + i % 2 < left ? s[i] : WEIGHTS ? 0.0f : HIDDEN;
}

// Scores as they come from the product, modified; -inf where hidden. Or WEIGHTS, which are 0 there. Rows past the end are taken for
// the last one. Where the mask SHIFTS, keys are counted from the lane's first one: so each is a number in the instruction that
// compares it.
template <bool PARTIAL_TILE, bool WEIGHTS = false, typename T>
DEVICE void modify_near(const Params& p, const WorkTile& at, start offset, float (&s)[BLOCK_K / 2], int k0, float scale, T& tanh) {
    const int n_k = PARTIAL_TILE ? (int)keys_of(p, at.b) : 0;
    constexpr bool CLAMPED = PARTIAL_TILE && READS_ARRAYS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = opaque(at.row0) + row_of_lane(half), last = (int)p.n_q * PACK_GQA - 1, index = own < last ? own : last;
        const int row = index / PACK_GQA, h = at.h + index % PACK_GQA, first = k0 + threadIdx.x % 4 * 2;
        const start q = row + offset;
        const position k_first = (position)first, distance_first = (position)(q - first);
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                const int k = first + 8 * n + c, inside = CLAMPED ? key_inside(k, n_k) : k;
                const position step = (position)(8 * n + c);
                const position k_of = CLAMPED ? (position)inside : k_first + step;
                const position distance = CLAMPED ? (position)(q - inside) : distance_first - step;
                if constexpr (HAS_SCORE && !WEIGHTS) x = modified_score<position>(x * scale, at.b, h, row, q, k_of, distance, tanh, p);
                if constexpr (PARTIAL_TILE) {
                    const bool shown = HAS_MASK ? visible(at.b, h, row, SHIFTS ? q - first : q, SHIFTS ? 8 * n + c : inside, p) : k < n_k;
                    x = shown ? x : WEIGHTS ? 0.0f : HIDDEN;
                }
            }
    }
    if (PARTIAL_TILE && HAS_MASK && n_k - k0 < BLOCK_K) hide_past<WEIGHTS>(s, n_k - k0);
}

// The same for positions of any size, one pair after the other.
DEVICE void modify_far(const Params& p, const WorkTile& at, long long offset, bool full, float (&s)[BLOCK_K / 2], int k0) {
    const int n_k = (int)keys_of(p, at.b);
    const Tanh tanh;
    float copy[BLOCK_K / 2];  // in memory, since its index is not constant
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) copy[i] = s[i];
#pragma unroll 1
    for (int i = 0; i < BLOCK_K / 2; ++i) {
        const int own = opaque(at.row0) + row_of_lane(i / 2 % 2), last = (int)p.n_q * PACK_GQA - 1, index = own < last ? own : last;
        const int row = index / PACK_GQA, h = at.h + index % PACK_GQA, key = k0 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const int k = READS_ARRAYS ? key_inside(key, n_k) : key;
        float x = copy[i];
        if constexpr (HAS_SCORE) x = modified_score<long long>(x * (float)p.softmax_scale, at.b, h, row, row + offset, k, row + offset - k, tanh, p);
        if constexpr (HAS_MASK) x = full || visible(at.b, h, row, row + offset, k, p) ? x : HIDDEN;
        copy[i] = key < n_k ? x : HIDDEN;
    }
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) s[i] = copy[i];
}

// The tile of a usual step: all pairs are visible, all positions near. False where the scores are not calm: they have to
// be modified anew.
DEVICE bool modify_usual(const Params& p, const WorkTile& at, float (&s)[BLOCK_K / 2], int k0, float scale) {
    TanhPoly tanh{0};
    if constexpr (HAS_SCORE) modify_near<false>(p, at, at.offset, s, k0, scale, tanh);
    return tanh.max_abs <= TanhPoly::MAX;
}

// Whether positions are near, of a call with a score modification or a mask.
DEVICE bool is_near(const Params& p, long long offset) {
    // Asked as a vote, whose outcome is known to be the same in all lanes.
    return POSITIONS == ANY || __all_sync(~0u, offset >= -FAR && offset + p.n_q < FAR && p.n_k < FAR);
}

// Any tile. Returns whether positions are near, as far as that matters for one of which all is visible.
DEVICE bool modify_tile(const Params& p, const WorkTile& at, bool full, float (&s)[BLOCK_K / 2], int k0, float scale) {
    const Tanh tanh;
    bool near = true;
    asm volatile("" : "+r"(k0));  // or what depends on k0 alone is computed for every tile, needed or not
    if constexpr (HAS_SCORE || HAS_MASK) {
        if (!HAS_SCORE && full) return true;
        const long long offset = offset_of(p, at.b);
        near = is_near(p, offset);
        if (!near) modify_far(p, at, offset, full, s, k0);
        else if (!full) modify_near<true>(p, at, (start)offset, s, k0, scale, tanh);
        else if (HAS_SCORE) modify_near<false>(p, at, (start)offset, s, k0, scale, tanh);
    } else if (!full) {
        modify_near<true>(p, at, 0, s, k0, scale, tanh);
    }
    return near || !HAS_SCORE;
}

// --- modifications of a known form ------------------------------------------------------------------------------------
// gain * f(rate * s) + bias (cuda_common/form.py): exponents of weights are taken from the products as they come, of tiles
// whose pairs are all visible.

// tanh(x) / x by a polynomial of x^2 - CALM^2, for |x| up to CALM: right to 2^-13, or 2^-12 where a weight has 8 bits. There
// the device's own tanh, right to 2^-11, is what takes the place of it for larger x; but it is one more instruction of the
// unit that exponentials wait for.
constexpr bool SHORT = STORAGE == BFLOAT16;
constexpr float CALM = SHORT ? 0.35f : 0.65f, TERM_0 = SHORT ? 0.9608449935913086f : 0.8795788288116455f,
                TERM_1 = SHORT ? -0.3176961839199066f : -0.2405111938714981f, TERM_2 = SHORT ? 0.0f : 0.10479581356048584f;

constexpr bool BY_FORM = HAS_SCORE && FORMED && POSITIONS != ANY && PACK_GQA == 1;

// Whether one reference may do for all scores of an item, as soft-capping bounds them. Their sum need not be looked at then.
constexpr bool BOUNDABLE = BY_FORM && ROW_SUM_BY_MMA;

// Whether what makes exponents is kept for all tiles of an item: it has nothing to do with keys, and to find it anew between two
// products holds these up. With larger head dims it is no gain, without a cap a loss: the compiler then orders the softmax worse.
// There what is the same for all rows is STORED in shared memory, and read for each tile: 1 to 3 % faster than found anew, if read
// between the scores and the product of the weights before; after both 0 to 1 %.
constexpr bool LASTING = BY_FORM && CAPPED && !SLOPED && HEAD_DIM <= 64;
constexpr bool STORED = BY_FORM && CAPPED && !SLOPED && EVEN && HEAD_DIM > 64, FOUND_ONCE = LASTING || STORED;

// Whether it is found between a tile's scores and the product of the weights before, while the scores are multiplied: after both
// are begun it would be waited for. 2 to 5 % faster with head dim 128, nothing with 64, 1 to 3 % slower with 256 or with a cap alone.
constexpr bool BETWEEN = BY_FORM && SLOPED && HEAD_DIM > 64 && HEAD_DIM <= 128;

// What makes exponents of a tile, for each of a lane's rows.
struct Line {
    float gain[2], rate[2];       // of products; where f is nothing, the gain is all
    float edge[2], factor[2][3];  // the polynomial in place of tanh
    float first[2], step[2];      // the bias in base 2: at the lane's first key, from key to key
    float top[2];                 // and the greatest in the row of the tile
};

// A number that is the same for all rows where EVEN, and so may be told to be.
DEVICE float even(float x) { return EVEN ? uniform_float(x) : x; }

// The part of a line that depends on the score alone.
DEVICE void gain_of(const Params& p, const WorkTile& at, const Head& head, int row, start q, float scale, Line& line, int half) {
    const float gain = score_gain<position>(at.b, at.h, row, q, head, p) * LOG2E;
    if constexpr (CAPPED) {
        const float rate = score_rate<position>(at.b, at.h, row, q, head, p) * scale, square = rate * rate;
        line.gain[half] = even(gain), line.rate[half] = even(rate);
        line.edge[half] = even(-CALM * CALM * reciprocal(square));
        line.factor[half][0] = even(TERM_0 * gain * rate), line.factor[half][1] = even(TERM_1 * gain * rate * square);
        line.factor[half][2] = even(TERM_2 * gain * rate * square * square);
    } else {
        line.gain[half] = even(gain * scale);
    }
}

// The same part to shared memory and from there, by a warp, for whose rows it is the same.
DEVICE void store_gain(const Line& line, unsigned address) {
    const float numbers[] = {line.gain[0], line.rate[0], line.edge[0], line.factor[0][0], line.factor[0][1], line.factor[0][2]};
    __syncwarp();  // all have read what is there
#pragma unroll
    for (int i = 0; i < 6; ++i) store_float(address + 4 * i, numbers[i]);
    __syncwarp();
}
DEVICE void load_gain(Line& line, unsigned address) {
    float numbers[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) numbers[i] = __int_as_float(uniform(load_word(address + 4 * i)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        line.gain[half] = numbers[0], line.rate[half] = numbers[1], line.edge[half] = numbers[2];
#pragma unroll
        for (int i = 0; i < 3; ++i) line.factor[half][i] = numbers[3 + i];
    }
}

// From one number to another in `steps` steps.
DEVICE float step_of(float first, float last, int steps) { return last == first ? 0.0f : (last - first) * (1.0f / steps); }

// False where the bias does not grow evenly within the tile, for a row of this warp.
DEVICE bool line_of(const Params& p, const WorkTile& at, const Head& head, int k0, float scale, Line& line) {
    constexpr int LAST = BLOCK_K - 1;
    const int end = (int)p.n_q - 1;
    if constexpr (SLOPED && DIAGONAL) {  // a step along a row is one from row to row, the other way
        const int row0 = at.row0 + threadIdx.x % 128 / 32 * 16, lane = threadIdx.x % 32;
        const start q0 = row0 + at.offset;
        const float first = score_bias<position>(at.b, at.h, row0, q0 + 15, head, k0, p) * LOG2E;
        const float last = score_bias<position>(at.b, at.h, row0, q0, head, k0 + LAST, p) * LOG2E;
        const float step = step_of(first, last, LAST + 15);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = at.row0 + row_of_lane(half), row = own < end ? own : end;
            gain_of(p, at, head, row, row + at.offset, scale, line, half);
            line.step[half] = step, line.top[half] = fmaxf(first, last);
            line.first[half] = fmaf(step, 15 - lane / 4 - 8 * half + lane % 4 * 2, first);
        }
        return __all_sync(~0u, bias_is_straight<position>(at.b, at.h, row0, q0, head, k0 - 15, k0 + LAST, p));
    }
    bool straight = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = at.row0 + row_of_lane(half), row = own < end ? own : end;
        const start q = row + at.offset;
        gain_of(p, at, head, row, q, scale, line, half);
        line.first[half] = line.top[half] = score_bias<position>(at.b, at.h, row, q, head, k0, p) * LOG2E;
        line.step[half] = 0;
        if constexpr (SLOPED) {
            const float last = score_bias<position>(at.b, at.h, row, q, head, k0 + LAST, p) * LOG2E;
            line.step[half] = step_of(line.first[half], last, LAST);
            line.top[half] = fmaxf(last, line.first[half]);
            line.first[half] = fmaf(line.step[half], threadIdx.x % 4 * 2, line.first[half]);
            straight &= bias_is_straight<position>(at.b, at.h, row, q, head, k0, k0 + LAST, p);
        }
    }
    return !SLOPED || __all_sync(~0u, straight);
}

// The exponent of a score as it comes from the product, at a lane's key number `key`. far: negative where it is small
// enough for the polynomial. fast: by the device's tanh instead.
DEVICE float formed(float x, const Line& line, int half, float bias, float edge, bool fast, float& far) {
    if constexpr (!CAPPED) return fmaf(x, line.gain[half], bias);
    if (fast) return fmaf(tanh_fast(x * line.rate[half]), line.gain[half], bias);
    far = fmaf(x, x, edge);
    const float inner = SHORT ? line.factor[half][1] : fmaf(far, line.factor[half][2], line.factor[half][1]);
    return fmaf(x, fmaf(far, inner, line.factor[half][0]), bias);
}

// Whether the bias alone is a reference for all scores of an item, which are at most the gain away from it: then weights are
// no further from 1 than 2^MOST.
constexpr float MOST = 80, FARTHEST = 1e6f;
DEVICE bool is_bounded(const Line& line, float (&m)[2]) {
    bool bounded = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) bounded &= fabsf(line.gain[half]) <= MOST && fabsf(line.first[half]) <= FARTHEST;
    if (!__all_sync(~0u, bounded)) return false;
    m[0] = line.first[0], m[1] = line.first[1];
    return true;
}

// A reference from the first columns of a tile: see guess(). Or none.
DEVICE bool guess_formed(const float (&s)[BLOCK_K / 2], float (&m)[2], const Line& line) {
    if (!GUESSES) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = HIDDEN, far;
#pragma unroll
        for (int i = 0; i < 4; ++i) top = fmaxf(top, formed(s[i / 2 * 4 + 2 * half + i % 2], line, half, 0, line.edge[half], SHORT, far));
        m[half] = across_lanes(top, [](float x, float y) { return fmaxf(x, y); }) + line.top[half];
        if (HALVES) m[half] += HEADROOM;
    }
    return __all_sync(~0u, m[0] != HIDDEN && m[1] != HIDDEN);
}

// Which scores go through the device's tanh all the same, as far as its unit has room: one in eight, a score of a pair. It is no
// faster where weights are not summed here.
template <bool BOUNDED> DEVICE constexpr bool is_fast(int n) { return SHORT && HEAD_DIM > 64 && !BOUNDED && n % 4 == 1; }

// Scores as they come from the product to weights; their sums. False where they are needed anew: the reference was not
// near enough, which it may have missed on either side where it is `guessed`, or, which calm says, products are too large
// for the polynomial. STEEP: tanh is the device's own. BOUNDED: the reference is near enough, and nobody asks for sums.
template <bool STEEP, bool BOUNDED>
DEVICE bool formed_softmax(float (&s)[BLOCK_K / 2], const float (&m)[2], float (&sum)[2], const Line& line, bool guessed, bool& calm) {
    constexpr float LEAST = !HALVES ? 1e-18f : GUESSES ? 5e-4f : 0.03f;
    unsigned signs = ~0u;  // those of x^2 - CALM^2, and-ed: LOP3 takes two at once, where a maximum takes one
    float total[4] = {0, 0, 0, 0}, edge[2] = {line.edge[0], line.edge[1]}, far[2] = {-1, -1};
    const float base[2] = {line.first[0] - m[0], line.first[1] - m[1]};
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                const float bias = SLOPED ? fmaf(line.step[half], 8 * n + c, base[half]) : base[half];
                x = exp2_fast(formed(x, line, half, bias, edge[half], STEEP || (c == 1 && is_fast<BOUNDED>(n)), far[c]));
                if (!BOUNDED) total[2 * half + c] += x;
            }
            if (CAPPED && !STEEP) signs &= __float_as_uint(far[0]) & (is_fast<BOUNDED>(n) ? ~0u : __float_as_uint(far[1]));
        }
        // So that exponentials begin before the rest is done for all scores: what follows depends on one of them.
        if (CAPPED && !STEEP && SHORT) edge[0] = fmaf(s[4 * n + 1], 0.0f, edge[0]), edge[1] = EVEN ? edge[0] : fmaf(s[4 * n + 1], 0.0f, edge[1]);
    }
    sum[0] = total[0] + total[1], sum[1] = total[2] + total[3];
    calm = !CAPPED || STEEP || (int)signs < 0;
    if constexpr (BOUNDED) return STEEP || __all_sync(~0u, calm);
    const float least = SLOPED && guessed ? LEAST : 0.0f;
    return __all_sync(~0u, sum[0] <= LIMIT && sum[1] <= LIMIT && (!SLOPED || (sum[0] >= least && sum[1] >= least)) && calm);
}

// Where the bias grows, references grow with it before a weight becomes too large. level: the reference without the
// greatest bias of the tile that it was found in, -inf where that is not known.
constexpr float ROOM = HALVES ? 7 : 30;
DEVICE void find_level(const Line& line, const float (&m)[2], float (&level)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (level[half] == HIDDEN && line.top[half] != HIDDEN) level[half] = m[half] - line.top[half];
}
DEVICE bool is_low(const Line& line, const float (&m)[2], const float (&level)[2]) {
    return SLOPED && (level[0] + line.top[0] - m[0] > ROOM || level[1] + line.top[1] - m[1] > ROOM);
}
DEVICE void lift(const Line& line, float (&m)[2], const float (&level)[2], float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float top = fmaxf(m[half], level[half] + line.top[half]);
        rescale[half] = exp2_fast(m[half] - top);
        m[half] = top;
    }
}

// A reference from the first columns of a tile. False where a row has none, all of these being hidden.
DEVICE bool guess(const float (&s)[BLOCK_K / 2], float (&m)[2], const float (&unit)[2]) {
    if (!GUESSES) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float top = fmaxf(fmaxf(s[2 * half], s[2 * half + 1]), fmaxf(s[4 + 2 * half], s[4 + 2 * half + 1]));
        m[half] = across_lanes(top, [](float x, float y) { return fmaxf(x, y); }) * unit[half];
        if (HALVES) m[half] += HEADROOM;
    }
    return __all_sync(~0u, m[0] != HIDDEN && m[1] != HIDDEN);
}

// Scores of a row to weights, 2^exponent(score); their sum.
template <typename F>
DEVICE float weigh(float (&s)[BLOCK_K / 2], int half, F exponent) {
    float total[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float& x = s[4 * n + 2 * half + c];
            x = exp2_fast(exponent(x));
            total[c] += x;
        }
    return total[0] + total[1];
}

// Scores to weights relative to the greatest so far; returns what that takes for sums made before. sum: of the weights.
DEVICE void online_softmax(float (&s)[BLOCK_K / 2], float (&m)[2], float (&sum)[2], float (&rescale)[2], const float (&unit)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = m[half];
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x *= unit[half];
                top = fmaxf(top, x);
            }
        top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
        const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift);
        m[half] = top;
        sum[half] = weigh(s, half, [=](float x) { return x - shift; });
    }
}

// The same without looking for the greatest: m need not be that, only near it. False where it is not near enough (or a
// score is NaN), or the scores are not `right` anyway: then they are needed anew.
DEVICE bool speculative_softmax(float (&s)[BLOCK_K / 2], const float (&m)[2], float (&sum)[2], const float (&unit)[2], bool right) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] = weigh(s, half, [&](float x) { return fmaf(x, unit[half], -m[half]); });
    }
    return __all_sync(~0u, sum[0] <= LIMIT && sum[1] <= LIMIT && right);
}

DEVICE void drop_tile(const Params& p, const WorkTile& at, float (&s)[BLOCK_K / 2], int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half);
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
            drop_pair(s[4 * n + 2 * half], s[4 * n + 2 * half + 1], p, at.b, at.h + index % PACK_GQA, index / PACK_GQA,
                      k0 + 8 * n + threadIdx.x % 4 * 2);
    }
}

// Scores of a warp's 16 rows by instructions of the warp alone. q, k: its tiles in shared memory.
DEVICE void scores_again(float (&s)[BLOCK_K / 2], unsigned q, unsigned k) {
    const int lane = opaque(threadIdx.x % 32), row = opaque(threadIdx.x % 128 / 32) * 16 + lane % 16, key = lane / 16 * 8 + lane % 8;
    const float zero = __int_as_float(opaque(0));
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) s[i] = zero;
#pragma unroll 1
    for (int step = 0; step < padded(HEAD_DIM) / 16; ++step) {
        const int chunk = step / 4, unit = step % 4 * 2;
        unsigned left[4];
        ldmatrix_x4(left, q + chunk * 64 * CHUNK_ROW + swizzled(row, unit + lane / 16));
#pragma unroll
        for (int n = 0; n < BLOCK_K / 16; ++n) {
            unsigned right[4];
            ldmatrix_x4(right, k + (chunk * BLOCK_K + 16 * n) * CHUNK_ROW + swizzled(key, unit + lane / 8 % 2));
            multiply(s + 8 * n, left, right[0], right[1]);
            multiply(s + 8 * n + 4, left, right[2], right[3]);
        }
    }
}

// Scores to weights in the registers of a Hopper warp group, and what is done where that went wrong.
#pragma once
#include "sm90.cuh"

// Weights up to this much above the reference are taken as they come: they fit the type that they are rounded to.
constexpr float LIMIT = STORAGE == FLOAT16 ? 32768.0f : 1e18f;

constexpr float STEADY = 1e-6f;  // how much less earlier weights may count than thought, and the reference still be trusted

// A hidden pair has the weight 0, but 0 times NaN is NaN: see finish().
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

// A lane's row among the 64 of its warp group.
DEVICE int row_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

// --- modify ------------------------------------------------------------------------------------------------------------

// What scores are multiplied by to be in base 2; where there is a score modification they are scaled before it.
DEVICE float base_2(const Params& p) { return HAS_SCORE ? LOG2E : (float)(p.scale * 1.4426950408889634); }

// A key past the end, which is hidden after all, is taken for the last one: nothing is read beyond the end of an array.
DEVICE int key_inside(int k, int n_k) { return k < n_k ? k : n_k > 0 ? n_k - 1 : 0; }

// Scores as they come from the product, modified; -inf where hidden. Rows past the end are taken for the last one.
template <bool PARTIAL_TILE, typename T>
DEVICE void modify_near(const Params& p, const Item& at, start offset, float (&s)[BLOCK_K / 2], int k0, float scale, T& tanh) {
    const int n_k = PARTIAL_TILE ? (int)keys_of(p, at.b) : 0;
    constexpr bool CLAMPED = PARTIAL_TILE && READS_ARRAYS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = here(at.row0) + row_of_lane(half), last = (int)p.n_q * PACK - 1, index = own < last ? own : last;
        const int row = index / PACK, h = at.h + index % PACK, first = k0 + threadIdx.x % 4 * 2;
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
                if constexpr (HAS_SCORE) x = modified_score<position>(x * scale, at.b, h, row, q, k_of, distance, tanh, p);
                if constexpr (PARTIAL_TILE) {
                    const bool shown = !HAS_MASK || visible(at.b, h, row, q, inside, p);
                    x = k < n_k && shown ? x : HIDDEN;
                }
            }
    }
}

// The same for positions of any size, one pair after the other.
DEVICE void modify_far(const Params& p, const Item& at, long long offset, bool full, float (&s)[BLOCK_K / 2], int k0) {
    const int n_k = (int)keys_of(p, at.b);
    const Tanh tanh;
    float copy[BLOCK_K / 2];  // in memory, since its index is not constant
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) copy[i] = s[i];
#pragma unroll 1
    for (int i = 0; i < BLOCK_K / 2; ++i) {
        const int own = here(at.row0) + row_of_lane(i / 2 % 2), last = (int)p.n_q * PACK - 1, index = own < last ? own : last;
        const int row = index / PACK, h = at.h + index % PACK, key = k0 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const int k = READS_ARRAYS ? key_inside(key, n_k) : key;
        float x = copy[i];
        if constexpr (HAS_SCORE) x = modified_score<long long>(x * (float)p.scale, at.b, h, row, row + offset, k, row + offset - k, tanh, p);
        if constexpr (HAS_MASK) x = full || visible(at.b, h, row, row + offset, k, p) ? x : HIDDEN;
        copy[i] = key < n_k ? x : HIDDEN;
    }
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) s[i] = copy[i];
}

// The tile of a usual step: all pairs are visible, all positions near. False where the scores are not calm: they have to
// be modified anew.
DEVICE bool modify_usual(const Params& p, const Item& at, float (&s)[BLOCK_K / 2], int k0, float scale) {
    CalmTanh tanh{0};
    if constexpr (HAS_SCORE) modify_near<false>(p, at, at.offset, s, k0, scale, tanh);
    return tanh.greatest <= CalmTanh::CALM;
}

// Any tile. Returns whether positions are near.
DEVICE bool modify_tile(const Params& p, const Item& at, bool full, float (&s)[BLOCK_K / 2], int k0, float scale) {
    const Tanh tanh;
    bool near = true;
    asm volatile("" : "+r"(k0));  // or what depends on k0 alone is computed for every tile, needed or not
    if constexpr (HAS_SCORE || HAS_MASK) {
        const long long offset = offset_of(p, at.b);
        // Asked as a vote, whose outcome is known to be the same in all lanes.
        near = POSITIONS == ANY || __all_sync(~0u, offset >= -FAR && offset + p.n_q < FAR && p.n_k < FAR);
        if (!near) modify_far(p, at, offset, full, s, k0);
        else if (!full) modify_near<true>(p, at, (start)offset, s, k0, scale, tanh);
        else if (HAS_SCORE) modify_near<false>(p, at, (start)offset, s, k0, scale, tanh);
    } else if (!full) {
        modify_near<true>(p, at, 0, s, k0, scale, tanh);
    }
    return near;
}

// A reference from the first columns of a tile. False where a row has none, all of these being hidden, or where weights
// are float16, which has no room above a reference that is not the greatest.
DEVICE bool guess(const float (&s)[BLOCK_K / 2], float (&m)[2], float unit) {
    if (STORAGE == FLOAT16) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float top = fmaxf(fmaxf(s[2 * half], s[2 * half + 1]), fmaxf(s[4 + 2 * half], s[4 + 2 * half + 1]));
        m[half] = across_lanes(top, [](float x, float y) { return fmaxf(x, y); }) * unit;
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
DEVICE void online_softmax(float (&s)[BLOCK_K / 2], float (&m)[2], float (&sum)[2], float (&rescale)[2], float unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = m[half];
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x *= unit;
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
DEVICE bool optimistic_softmax(float (&s)[BLOCK_K / 2], const float (&m)[2], float (&sum)[2], float unit, bool right) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] = weigh(s, half, [&](float x) { return fmaf(x, unit, -m[half]); });
    }
    return __all_sync(~0u, sum[0] <= LIMIT && sum[1] <= LIMIT && right);
}

DEVICE void drop_tile(const Params& p, const Item& at, float (&s)[BLOCK_K / 2], int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half);
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
            drop_pair(s[4 * n + 2 * half], s[4 * n + 2 * half + 1], p, at.b, at.h + index % PACK, index / PACK,
                      k0 + 8 * n + threadIdx.x % 4 * 2);
    }
}

// Scores of a warp's 16 rows by instructions of the warp alone. q, k: its tiles in shared memory.
DEVICE void scores_again(float (&s)[BLOCK_K / 2], unsigned q, unsigned k) {
    const int lane = here(threadIdx.x % 32), row = here(threadIdx.x % 128 / 32) * 16 + lane % 16, key = lane / 16 * 8 + lane % 8;
    const float zero = __int_as_float(here(0));
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) s[i] = zero;
#pragma unroll 1
    for (int step = 0; step < padded(HEAD_DIM) / 16; ++step) {
        const int chunk = step / 4, unit = step % 4 * 2;
        unsigned left[4];
        load_matrices(left, q + chunk * 64 * CHUNK_ROW + swizzled(row, unit + lane / 16));
#pragma unroll
        for (int n = 0; n < BLOCK_K / 16; ++n) {
            unsigned right[4];
            load_matrices(right, k + (chunk * BLOCK_K + 16 * n) * CHUNK_ROW + swizzled(key, unit + lane / 8 % 2));
            multiply(s + 8 * n, left, right[0], right[1]);
            multiply(s + 8 * n + 4, left, right[2], right[3]);
        }
    }
}

// Output of a warp's 16 rows once more, from memory and pair by pair, leaving out the values of weights that are 0. No
// branch here differs between lanes, or the compiler would take nothing after it as uniform.
DEVICE void accumulate_carefully(const Params& p, const Item& at, const float (&m)[2], const float (&factor)[2], unsigned staged) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = here(threadIdx.x % 32), row0 = here(uniform(threadIdx.x % 128 / 32)) * 16;
    const int n_k = uniform((int)keys_of(p, at.b)), last = (int)p.n_q * PACK - 1;
    const long long offset = offset_of(p, at.b);
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        const int index = at.row0 + row0 + r < last ? at.row0 + row0 + r : last, row = index / PACK, h = at.h + index % PACK;
        const float reference = __shfl_sync(~0u, r < 8 ? m[0] : m[1], r % 8 * 4);
        const float scale = __shfl_sync(~0u, r < 8 ? factor[0] : factor[1], r % 8 * 4);
        const storage* q = row_at<const storage>(p.q, at.b, h, row);
        float sums[OWN] = {};
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) {
            const int k = k0 + lane < n_k ? k0 + lane : n_k - 1;
            const storage* key = row_at<const storage>(p.k, at.b, h / GROUP, k);
            float w = 0;
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) w += widen(q[d]) * widen(key[d]);
            w = modify<true>(w * (float)p.scale, at.b, h, row, row + offset, k, p);
            w = exp2_fast(fmaf(w, LOG2E, -reference));
            if constexpr (HAS_DROPOUT) w = drop(w, p, at.b, h, row, k);
#pragma unroll 1
            for (int other = 0; other < 32; ++other) {
                const int from = k0 + other < n_k ? k0 + other : n_k - 1;
                const float weight = k0 + other < n_k ? __shfl_sync(~0u, w, other) : 0.0f;
                const storage* value = row_at<const storage>(p.v, at.b, h / GROUP, from);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float x = widen(value[lane + 32 * i < HEAD_DIM_V ? lane + 32 * i : 0]);
                    sums[i] += weight == 0 ? 0.0f : weight * x;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int column = lane + 32 * i;
            const unsigned target = staged + column / 64 * 64 * CHUNK_ROW + swizzled(row0 + r, column % 64 / 8) + column % 8 * 2;
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"((unsigned short)pack(sums[i] * scale, 0.0f)) : "memory");
        }
    }
}

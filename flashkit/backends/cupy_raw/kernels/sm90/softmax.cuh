// The online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) of an S tile in the registers of a warp group,
// with flashkit's speculative row maximum.
//
// Exponentials are relative to a row reference m, in base 2. The online softmax takes the greatest score so far. But
// any m near it does: a float32 or bfloat16 holds 2^60 as precisely as 1. So m is speculated to hold for the next tile,
// whose scores go straight to exponentials; their sum, needed anyway, shows a misprediction. Then S is recomputed
// (recompute_qk), as the exponentials have overwritten it.
#pragma once
#include "sm90/score_mod.cuh"

constexpr bool P_IS_FLOAT16 = STORAGE != BFLOAT16;

// Row sums up to this are accepted: P fits its type.
constexpr float MAX_SUM = P_IS_FLOAT16 ? 32768.0f : 1e18f;

// Whether a work tile's first reference is guessed from its first columns; float16 needs headroom above the guess, in
// base 2.
constexpr bool GUESSES_ROW_REF = STORAGE != FLOAT16 || HEAD_DIM <= 64;
constexpr float HEADROOM = P_IS_FLOAT16 ? 6 : 0;

// After a tile that rescales the row by less than this the reference may grow again, so the next tile does not
// speculate.
constexpr float MIN_RESCALE = 1e-6f;

// Whether a tile may speculate on its row references: not where a row has none, -inf, nor where one is great.
DEVICE bool are_row_refs(const float (&m)[2]) { return fmaxf(fabsf(m[0]), fabsf(m[1])) < MAX_ROW_REF; }

// A row reference from the first 16 columns of a tile. False where a row has none, all of these being masked.
DEVICE bool guess_row_ref(const float (&s)[S_REGS], float (&m)[2], const float (&scale_log2)[2]) {
    if (!GUESSES_ROW_REF) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float top = fmaxf(fmaxf(s[2 * half], s[2 * half + 1]), fmaxf(s[4 + 2 * half], s[4 + 2 * half + 1]));
        m[half] = across_lanes(top, [](float x, float y) { return fmaxf(x, y); }) * scale_log2[half];
        if (P_IS_FLOAT16) m[half] += HEADROOM;
    }
    return __all_sync(~0u, are_row_refs(m));
}

// S of a row to P = 2^exponent(s); returns the lane's part of the row sum.
template <typename F>
DEVICE float exp2_row(float (&s)[S_REGS], int half, F exponent) {
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

// S to P relative to the row maximum so far; `rescale` brings O and l of the tiles before to it. sum: the row sums of
// P.
DEVICE void online_softmax(float (&s)[S_REGS], float (&m)[2], float (&sum)[2], float (&rescale)[2],
    const float (&scale_log2)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = m[half];
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x *= scale_log2[half];
                top = fmaxf(top, x);
            }
        top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
        const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift);
        m[half] = top;
        sum[half] = exp2_row(s, half, [=](float x) { return x - shift; });
    }
}

// The online softmax with P up to 2^max_p_log2: m is so far below the row maximum.
DEVICE void online_softmax_below(float (&s)[S_REGS], float (&m)[2], float (&l)[2], float (&rescale)[2],
    const float (&scale_log2)[2], float max_p_log2) {
    float shift[2], factor[2] = {scale_log2[0], scale_log2[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = HIDDEN;
#pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * half + i % 2]);
        top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
        top = fmaxf(m[half], fmaf(top, scale_log2[half], -max_p_log2));
        shift[half] = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift[half]);
        m[half] = top;
    }
    scale_below_great(s, shift, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half)
        l[half] = l[half] * rescale[half] + exp2_row(s, half, [&](float x) {
            return fmaf(x, factor[half], -shift[half]); });
}

// S to P relative to m as it is. False on a misprediction: m is too low, a score is NaN, or the scores are not `valid`
// anyway.
DEVICE bool speculative_softmax(float (&s)[S_REGS], const float (&m)[2], float (&sum)[2], const float (&scale_log2)[2],
    bool valid) {
    if constexpr (HEAD_DIM <= 64) {  // a lane's two rows take turns
        float total[2][2] = {};
#pragma unroll
        for (int i = 0; i < S_REGS; ++i) {
            const int half = i / 2 % 2;
            s[i] = exp2_fast(fmaf(s[i], scale_log2[half], -m[half]));
            total[half][i % 2] += s[i];
        }
        sum[0] = total[0][0] + total[0][1], sum[1] = total[1][0] + total[1][1];
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            sum[half] = exp2_row(s, half, [&](float x) { return fmaf(x, scale_log2[half], -m[half]); });
    }
    return __all_sync(~0u, sum[0] <= MAX_SUM && sum[1] <= MAX_SUM && valid);
}

// After a misprediction: S of a warp's 16 rows again, by the mma instruction of a single warp, whose accumulator has
// wgmma's layout. q, k: the warp group's rows and the K tile in shared memory.
DEVICE void recompute_qk(float (&s)[S_REGS], unsigned q, unsigned k) {
    const int lane = opaque(threadIdx.x % 32), row = opaque(threadIdx.x % 128 / 32) * 16 + lane % 16,
        key = lane / 16 * 8 + lane % 8;
    const float zero = __int_as_float(opaque(0));
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) s[i] = zero;
#pragma unroll 1
    for (int step = 0; step < padded(HEAD_DIM) / 16; ++step) {
        const int chunk = step / 4, vec = step % 4 * 2;
        unsigned a[4];
        ldmatrix_x4(a, q + chunk * 64 * CHUNK_ROW + swizzled(row, vec + lane / 16));
#pragma unroll
        for (int n = 0; n < BLOCK_K / 16; ++n) {
            unsigned b[4];
            ldmatrix_x4(b, k + (chunk * BLOCK_K + 16 * n) * CHUNK_ROW + swizzled(key, vec + lane / 8 % 2));
            mma_m16n8k16(s + 8 * n, a, b[0], b[1]);
            mma_m16n8k16(s + 8 * n + 4, a, b[2], b[3]);
        }
    }
}

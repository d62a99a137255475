// Pairs of the backward pass (sm80_backward.cu) in registers: scores to weights, and these to gradients.
#pragma once
#include "sm80/affine_score.cuh"

struct Place {
    int b, h, k0, k1, n_q, n_k;
    long long offset;
    static __device__ __forceinline__ int row(int i, int half) {  // of S that a lane holds, within the tile
        return threadIdx.x / 32 / (WARPS / WARPS_S) * 16 * S_TILES + 16 * i + 8 * half + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int key(int n) {  // and the next
        return threadIdx.x / 32 % (WARPS / WARPS_S) * 8 * S_KEYS + 8 * n + threadIdx.x % 4 * 2;
    }
    // Whether positions fit 32 bits, and what a score modification computes with them: that takes half the instructions then.
    __device__ __forceinline__ bool narrow() const { return offset >= -FAR && offset + n_q < FAR && (!HAS_SCORE || n_k < FAR); }
};

// A lane's two numbers of a row and neighbouring keys to a tile in shared memory.
DEVICE void store_weights(unsigned target, int row, int key, float x, float y) {
    target += row * PITCH_S + key * SIZE;
    if constexpr (IS_FLOAT32) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(pack(x, y)) : "memory");
}

// Scores of a tile of which a part is hidden. Far positions are dealt with one after the other, which takes few registers.
DEVICE void hide(const Params& p, const Place& at, float (&s)[S_TILES][S_KEYS][4], int row0) {
    const float hidden = p.softmax_scale < 0 ? INFINITE : HIDDEN;  // before it is multiplied
    const auto is_seen = [&](auto q0, int i, int half, int key) {
        const int row = row0 + at.row(i, half), k = at.k0 + key;
        if (row >= at.n_q || k >= at.n_k) return false;
        if constexpr (HAS_MASK) return visible(at.b, at.h, row, row + q0, k, p);
        return true;
    };
    if (!HAS_MASK || at.narrow()) {
#pragma unroll
        for (int i = 0; i < S_TILES; ++i)
#pragma unroll
            for (int n = 0; n < S_KEYS; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (!is_seen((int)at.offset, i, e / 2, at.key(n) + e % 2)) s[i][n][e] = hidden;
    } else {
        float copy[S_TILES * S_KEYS * 4];  // in memory, since its index is not constant
#pragma unroll
        for (int j = 0; j < S_TILES * S_KEYS * 4; ++j) copy[j] = s[j / 4 / S_KEYS][j / 4 % S_KEYS][j % 4];
#pragma unroll 1
        for (int j = 0; j < S_TILES * S_KEYS * 4; ++j)
            if (!is_seen(at.offset, j / 4 / S_KEYS, j / 2 % 2, at.key(j / 4 % S_KEYS) + j % 2)) copy[j] = hidden;
#pragma unroll
        for (int j = 0; j < S_TILES * S_KEYS * 4; ++j) s[j / 4 / S_KEYS][j / 4 % S_KEYS][j % 4] = copy[j];
    }
}

// Scores to weights, which go to shared memory, dropped ones as 0. They stay in s times the slope of the score
// modification, as the factor of dP - delta in dS. PLAIN: nothing is hidden or hide() has been there, and a score modification
// goes by `line`.
template <bool PLAIN, typename POSITION = int>
DEVICE void weights(const Params& p, const Place& at, float (&s)[S_TILES][S_KEYS][4],
                    const float (&shift)[S_TILES][2], Line (&line)[S_TILES][2], int row0, unsigned target) {
    const Tanh tanh;
    const float scale = (float)(HAS_SCORE ? p.softmax_scale : p.softmax_scale * 1.4426950408889634);
#pragma unroll
    for (int i = 0; i < S_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + at.row(i, half);
            const int end = row < at.n_q ? at.n_k : 0;
            const POSITION q = (POSITION)(row + at.offset);
            using I = typename Chosen<sizeof(POSITION) == 4, position, long long>::type;  // of the score modification
            const float reference = shift[i][half] * LOG2E;
            if (PLAIN && HAS_SCORE) line[i][half].first -= reference;
            const int first = at.k0 + at.key(0);
            const I k_first = (I)first, distance = (I)(q - first);
#pragma unroll
            for (int n = 0; n < S_KEYS; ++n) {
                float w[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][n][2 * half + c];
                    if constexpr (PLAIN && HAS_SCORE) {
                        float slope;
                        w[c] = exp2_fast(formed(x, line[i][half], 8 * n + c, slope));
                        x = w[c] * slope;
                        continue;
                    } else if constexpr (PLAIN) {
                        x = w[c] = exp2_fast(fmaf(x, scale, -reference));
                        continue;
                    }
                    const int k = at.k0 + at.key(n) + c;
                    float slope = 1;
                    x *= scale;
                    if (k >= end) {
                        x = HIDDEN;
                    } else {
                        slope = score_slope(x, at.b, at.h, row, q, k, p);
                        const I step = (I)(8 * n + c);
                        x = modified_score<I>(x, at.b, at.h, row, q, k_first + step, distance - step, tanh, p) * LOG2E;
                        if constexpr (HAS_MASK) x = visible(at.b, at.h, row, q, k, p) ? x : HIDDEN;
                    }
                    w[c] = x == HIDDEN ? 0.0f : exp2_fast(x - reference);
                    x = w[c] != 0 ? w[c] * slope : 0.0f;
                }
                if constexpr (HAS_DROPOUT) drop_pair(w[0], w[1], p, at.b, at.h, row, at.k0 + at.key(n));
                store_weights(target, at.row(i, half), at.key(n), w[0], w[1]);
            }
        }
}

// dP to dS, into shared memory.
DEVICE void gradients(const Params& p, const Place& at, const float (&s)[S_TILES][S_KEYS][4],
                      float (&dp)[S_TILES][S_KEYS][4], const float (&delta)[S_TILES][2], int row0, unsigned target) {
#pragma unroll
    for (int i = 0; i < S_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < S_KEYS; ++n) {
                if constexpr (HAS_DROPOUT)
                    drop_pair(dp[i][n][2 * half], dp[i][n][2 * half + 1], p, at.b, at.h, row0 + at.row(i, half),
                              at.k0 + at.key(n));
                float d[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) d[c] = s[i][n][2 * half + c] * (dp[i][n][2 * half + c] - delta[i][half]);
                store_weights(target, at.row(i, half), at.key(n), d[0], d[1]);
            }
}

// modify and softmax of the backward pass in registers: S to P.
#pragma once
#include "sm80/affine_score.cuh"

// The key tile of a CTA, the query head at work, and which rows and keys of S a lane holds.
struct WorkTile {
    int b, h, k0, k1, n_q, n_k;
    long long q_position;
    static __device__ __forceinline__ int row(int i, int half) {  // within the query tile
        return threadIdx.x / 32 / (WARPS / WARPS_S) * 16 * S_TILES + 16 * i + 8 * half + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int key(int n) {  // and the next
        return threadIdx.x / 32 % (WARPS / WARPS_S) * 8 * S_KEYS + 8 * n + threadIdx.x % 4 * 2;
    }
    // Whether positions, and what a score modification computes with them, fit 32 bits, which halves the instructions.
    __device__ __forceinline__ bool narrow() const {
        return q_position >= -FAR && q_position + n_q < FAR && (!HAS_SCORE || n_k < FAR);
    }
};

// Two neighbours of a fragment of P or dS to shared memory.
DEVICE void store_fragment(unsigned target, int row, int key, float x, float y) {
    target += row * PITCH_S + key * SIZE;
    if constexpr (IS_FLOAT32) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(pack(x, y)) : "memory");
}

// Masks the scores of a tile that is not FULL. Positions that do not fit 32 bits are evaluated in a loop, which takes
// few registers.
DEVICE void mask_tile(const Params& p, const WorkTile& at, float (&s)[S_TILES][S_KEYS][4], int row0) {
    const float masked = (float)p.softmax_scale < 0 ? INFINITE : HIDDEN;  // -inf after the multiplication
    const auto is_visible = [&](auto q0, int i, int half, int key) {
        const int row = row0 + at.row(i, half), k = at.k0 + key;
        if (row >= at.n_q || k >= at.n_k) return false;
        if constexpr (HAS_MASK) return visible(at.b, at.h, row, row + q0, k, p);
        return true;
    };
    if (!HAS_MASK || at.narrow()) {
        UNROLL(i, S_TILES)
            UNROLL(n, S_KEYS)
                UNROLL(e, 4)
                    if (!is_visible((int)at.q_position, i, e / 2, at.key(n) + e % 2)) s[i][n][e] = masked;
    } else {
        float spilled[S_TILES * S_KEYS * 4];  // indexed at run time, hence in local memory
        UNROLL(j, S_TILES * S_KEYS * 4) spilled[j] = s[j / 4 / S_KEYS][j / 4 % S_KEYS][j % 4];
#pragma unroll 1
        for (int j = 0; j < S_TILES * S_KEYS * 4; ++j)
            if (!is_visible(at.q_position, j / 4 / S_KEYS, j / 2 % 2, at.key(j / 4 % S_KEYS) + j % 2))
                spilled[j] = masked;
        UNROLL(j, S_TILES * S_KEYS * 4) s[j / 4 / S_KEYS][j / 4 % S_KEYS][j % 4] = spilled[j];
    }
}

// S to P; P after dropout goes to shared memory. s keeps P times the slope of the score modification, the factor of dP
// - delta in dS; or, where gradients by values of the modification are summed, P alone, and `before` the score. PLAIN:
// no pair is masked or mask_tile() has done it, and a score modification is given by `affine`.
template <bool PLAIN, typename POSITION = int>
DEVICE void recompute_p(const Params& p, const WorkTile& at, float (&s)[S_TILES][S_KEYS][4],
                    const float (&bwd_lse)[S_TILES][2], AffineScore (&affine)[S_TILES][2], int row0, unsigned target,
                    float (&before)[S_TILES][S_KEYS][4]) {
    float scale = (float)(HAS_SCORE ? p.softmax_scale : p.softmax_scale * 1.4426950408889634);
    if (!HAS_SCORE && scale == 0) scale = 1.1754944e-38f;  // 0 would make NaN of the -inf of a masked pair
    UNROLL(i, S_TILES)
        UNROLL(half, 2) {
            const int row = row0 + at.row(i, half);
            const int end = row < at.n_q ? at.n_k : 0;
            const POSITION q = (POSITION)(row + at.q_position);
            using I = typename Select<sizeof(POSITION) == 4, position, long long>::type;  // of the score modification
            const float lse_log2 = bwd_lse[i][half] * LOG2E;
            if (PLAIN && HAS_SCORE) affine[i][half].bias -= lse_log2;
            const int first = at.k0 + at.key(0);
            const I k_first = (I)first, distance = (I)(q - first);
            UNROLL(n, S_KEYS) {
                float p_pair[2];
                UNROLL(c, 2) {
                    float& x = s[i][n][2 * half + c];
                    if (HAS_VALUES) before[i][n][2 * half + c] = x * scale;
                    if constexpr (PLAIN && HAS_SCORE) {
                        float slope;
                        p_pair[c] = exp2_fast(affine_exponent(x, affine[i][half], 8 * n + c, slope));
                        x = HAS_VALUES ? p_pair[c] : p_pair[c] * slope;
                        continue;
                    } else if constexpr (PLAIN) {
                        x = p_pair[c] = exp2_fast(fmaf(x, scale, -lse_log2));
                        continue;
                    }
                    const int k = at.k0 + at.key(n) + c;
                    float slope = 1;
                    x *= scale;
                    if (k >= end) {
                        x = HIDDEN;
                    } else {
                        if (!HAS_VALUES) slope = score_slope(x, at.b, at.h, row, q, k, p);
                        const I step = (I)(8 * n + c);
                        x = LOG2E * modified_score<I>(x, at.b, at.h, row, q, k_first + step, distance - step, p);
                        if constexpr (HAS_MASK) x = visible(at.b, at.h, row, q, k, p) ? x : HIDDEN;
                    }
                    p_pair[c] = x == HIDDEN ? 0.0f : exp2_fast(x - lse_log2);
                    x = p_pair[c] != 0 ? p_pair[c] * slope : 0.0f;
                }
                if constexpr (HAS_DROPOUT) drop_pair(p_pair[0], p_pair[1], p, at.b, at.h, row, at.k0 + at.key(n));
                store_fragment(target, at.row(i, half), at.key(n), p_pair[0], p_pair[1]);
            }
        }
}

// --- dS --------------------------------------------------------------------------------------------------------------
//
// dS in registers.

// dP to dS = P (dP - delta), which goes to shared memory for the products of dQ and dK. I: type of positions.
template <typename I>
DEVICE void compute_ds(const Params& p, const WorkTile& at, const float (&s)[S_TILES][S_KEYS][4],
                      float (&dp)[S_TILES][S_KEYS][4], const float (&delta)[S_TILES][2], int row0, unsigned target,
                      const float (&before)[S_TILES][S_KEYS][4], ValueSums& sums) {
    UNROLL(i, S_TILES)
        UNROLL(half, 2)
            UNROLL(n, S_KEYS) {
                if constexpr (HAS_DROPOUT)
                    drop_pair(dp[i][n][2 * half], dp[i][n][2 * half + 1], p, at.b, at.h, row0 + at.row(i, half),
                              at.k0 + at.key(n));
                float d[2];
                UNROLL(c, 2) {
                    d[c] = s[i][n][2 * half + c] * (dp[i][n][2 * half + c] - delta[i][half]);
                    if (!HAS_VALUES || s[i][n][2 * half + c] == 0) continue;
                    const float score = before[i][n][2 * half + c];
                    const I row = row0 + at.row(i, half), q = row + (I)at.q_position, k = at.k0 + at.key(n) + c;
                    sums.add<I>(d[c], score, at.b, at.h, row, q, k, p);
                    if (!SLOPE_IS_ONE) d[c] *= score_slope(score, at.b, at.h, row, q, k, p);
                }
                store_fragment(target, at.row(i, half), at.key(n), d[0], d[1]);
            }
}

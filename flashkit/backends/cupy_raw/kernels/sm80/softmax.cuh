// Scores to weights in the registers of the forward pass (sm80_forward.cu).
#pragma once
#include "sm80/layout.cuh"

// The scale to base 2; in float32 it is rounded once.
DEVICE float softmax_scale_log2(const Params& p) { return IS_FLOAT32 ? (float)(p.softmax_scale * 1.4426950408889634) : (float)p.softmax_scale * LOG2E; }

// Scores as they come from the product to scores in base 2, -inf where hidden. POSITION: the type that positions fit.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE void modify_tile(const Params& p, const Place& at, float (&s)[TILES][KEYS][4], int k0) {
    using I = typename Chosen<sizeof(POSITION) == 4, position, long long>::type;  // of the score modification
    const float scale = HAS_SCORE ? (float)p.softmax_scale : softmax_scale_log2(p);
    const Tanh tanh;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int index = at.row(i, half);
            if (HAS_SCORE) asm volatile("" : "+r"(index));  // or what depends on the row alone is kept for every tile
            const int row = index / PACK_GQA, h = at.h + index % PACK_GQA;
            const POSITION q = (POSITION)(row + at.offset);
            const int end = index < at.rows ? at.n_k : 0;  // rows that do not exist: what is hidden has no effect
            const int first = k0 + at.key(0);
            const I k_first = (I)first, distance = (I)(q - first);
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][n][2 * half + c];
                    const int k = k0 + at.key(n) + c;
                    x *= scale;
                    if (!HAS_SCORE && !PARTIAL_TILE) {
                        x = k < at.n_k ? x : HIDDEN;
                    } else if (k < end) {
                        const I step = (I)(8 * n + c);
                        if constexpr (HAS_SCORE) x = modified_score<I>(x, at.b, h, row, q, k_first + step, distance - step, tanh, p) * LOG2E;
                        if constexpr (HAS_MASK && PARTIAL_TILE) x = visible(at.b, h, row, q, k, p) ? x : HIDDEN;
                    } else {
                        x = HIDDEN;
                    }
                }
        }
}

// By form; false where that does not do. factor: what is left to be multiplied by.
DEVICE bool form_tile(const Params& p, const Place& at, float (&s)[TILES][KEYS][4], int k0, float& factor) {
    Line line[TILES][2];
    if (!lines_of<BLOCK_K, 16 * TILES, PACK_GQA>(p, at.b, at.h, at.offset, at.rows, at.row0 + at.row_of_warp(), k0, at.key(0), line,
                                             [&](int i, int half) { return at.row(i, half); }))
        return false;
    const bool scaled = SCALED && line[0][0].gain > 0;
    if (scaled) factor = line[0][0].gain;
    if (scaled && !CAPPED) return true;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < KEYS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float slope;
                if (scaled) s[i][n][e] = tanh_of(s[i][n][e] * line[0][0].rate);
                else s[i][n][e] = formed(s[i][n][e], line[i][e / 2], 8 * n + e % 2, slope);
            }
    return true;
}

// The same for any tile.
DEVICE void modify_tile(const Params& p, const Place& at, bool full, float (&s)[TILES][KEYS][4], int k0, float& factor) {
    asm volatile("" : "+r"(k0));  // or what depends on k0 alone is computed for every tile, needed or not
    if constexpr (!HAS_SCORE && !HAS_MASK) {
        modify_tile<false, int>(p, at, s, k0);
    } else if (at.narrow()) {
        if constexpr (BY_FORM)
            if (full && k0 + BLOCK_K <= at.n_k && form_tile(p, at, s, k0, factor)) return;
        if (HAS_MASK && !full) modify_tile<true, int>(p, at, s, k0);
        else modify_tile<false, int>(p, at, s, k0);
    } else {
        modify_tile<HAS_MASK, long long>(p, at, s, k0);  // also right where all is visible
    }
}

// What warps that share rows have written to shared memory is there then.
DEVICE void join_warps() {
    if constexpr (WARPS_K > 1)
        asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / 32 / WARPS_K), "n"(32 * WARPS_K) : "memory");
}

// Over the lanes and warps that share a row, for each of a lane's rows.
template <typename F>
DEVICE void across_rows(float (&x)[TILES][2], F join) {
    float(*told)[BLOCK_Q] = reinterpret_cast<float(*)[BLOCK_Q]>(shared + AT_ROWS);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x[i][half] = across_lanes(x[i][half], join);
            if (WARPS_K > 1 && threadIdx.x % 4 == 0)
                told[Place::share()][Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4] = x[i][half];
        }
    if constexpr (WARPS_K > 1) {
        join_warps();
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                x[i][half] = told[0][row];
#pragma unroll
                for (int other = 1; other < WARPS_K; ++other) x[i][half] = join(x[i][half], told[other][row]);
            }
    }
}

// Scores times scale > 0, in base 2, to weights relative to the greatest so far; what was summed before is rescaled to it.
// That the greatest weight is 1, and so does not suffer from being rounded, makes the error of 16-bit results a twentieth
// smaller than with weights relative to any number near it, which would be 2 to 15 % faster, for then nobody looks for it.
DEVICE void online_softmax(float (&s)[TILES][KEYS][4], float (&output)[TILES][COLUMNS][4], float scale) {
    RowState now = state_of_lane();
    float top[TILES][2], (&m)[TILES][2] = now.m, (&l)[TILES][2] = now.l;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = HIDDEN;
#pragma unroll
            for (int n = 0; n < KEYS; ++n) most = fmaxf(most, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
            top[i][half] = fmaxf(m[i][half], most * scale);
        }
    across_rows(top, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shift = top[i][half] == HIDDEN ? 0.0f : top[i][half];  // so that -inf stays -inf
            factor[half] = exp2_fast(m[i][half] - shift);
            m[i][half] = top[i][half];
            float sum = 0;
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][n][2 * half + c];
                    x = exp2_fast(fmaf(x, scale, -shift));
                    sum += x;
                }
            l[i][half] = l[i][half] * factor[half] + sum;  // of this lane's keys; the row's is formed at the end
        }
        if (__all_sync(~0u, factor[0] == 1 && factor[1] == 1)) continue;
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) output[i][n][e] *= factor[e / 2];
    }
    state_of_lane() = now;
}

DEVICE void drop_tile(const Params& p, const Place& at, float (&s)[TILES][KEYS][4], int k0) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int index = at.row(i, half);
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
                drop_pair(s[i][n][2 * half], s[i][n][2 * half + 1], p, at.b, at.h + index % PACK_GQA, index / PACK_GQA,
                          k0 + at.key(n));
        }
}

DEVICE void store_weights(const float (&s)[TILES][KEYS][4], storage* weights) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                const int row = Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                char* target = reinterpret_cast<char*>(weights) + row * PITCH_P + Place::key(n) * (int)sizeof(storage);
                const float x = s[i][n][2 * half], y = s[i][n][2 * half + 1];
                if constexpr (IS_FLOAT32) *reinterpret_cast<float2*>(target) = float2{x, y};
                else *reinterpret_cast<unsigned*>(target) = pack(x, y);
            }
}

// modify, online_softmax and dropout on fragments of S in the registers of the forward pass.
#pragma once
#include "sm80/layout.cuh"

// The softmax scale times log2(e); for float32 it is rounded once.
DEVICE float softmax_scale_log2(const Params& p) {
    return IS_FLOAT32 ? (float)(p.softmax_scale * 1.4426950408889634) : (float)p.softmax_scale * LOG2E;
}

// S as it comes from the product to base-2 scores, -inf where masked. POSITION: the type that positions fit.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE void modify_tile(const Params& p, const WorkTile& at, float (&s)[TILES][KEYS][4], int k0) {
    using I = typename Select<sizeof(POSITION) == 4, position, long long>::type;  // of the score modification
    const float scale = HAS_SCORE ? (float)p.softmax_scale : softmax_scale_log2(p);
    UNROLL(i, TILES)
        UNROLL(half, 2) {
            int index = at.row(i, half);
            if (HAS_SCORE) asm volatile("" : "+r"(index));  // else values of the row alone occupy registers
            const int row = index / PACK_GQA, h = at.h + index % PACK_GQA;
            const POSITION q = (POSITION)(row + at.q_position);
            const int end = index < at.rows ? at.n_k : 0;  // rows past the last are masked
            const int first = k0 + at.key(0);
            const I k_first = (I)first, distance = (I)(q - first);
            UNROLL(n, KEYS)
                UNROLL(c, 2) {
                    float& x = s[i][n][2 * half + c];
                    const int k = k0 + at.key(n) + c;
                    x *= scale;
                    if (!HAS_SCORE && !PARTIAL_TILE) {
                        x = k < at.n_k ? x : HIDDEN;
                    } else if (k < end) {
                        const I step = (I)(8 * n + c);
                        if constexpr (HAS_SCORE)
                            x = LOG2E * modified_score<I>(x, at.b, h, row, q, k_first + step, distance - step, p);
                        if constexpr (HAS_MASK && PARTIAL_TILE) x = visible(at.b, h, row, q, k, p) ? x : HIDDEN;
                    } else {
                        x = HIDDEN;
                    }
                }
        }
}

// Affine score modifications; false where the bias is not linear in the tile. factor: what the softmax still has to
// multiply the scores by.
DEVICE bool affine_tile(const Params& p, const WorkTile& at, float (&s)[TILES][KEYS][4], int k0, float& factor) {
    AffineScore affine[TILES][2];
    if (!find_affine<BLOCK_K, 16 * TILES, PACK_GQA>(p, at.b, at.h, at.q_position, at.rows, at.row0 + at.row_of_warp(),
                                                    k0, at.key(0), affine,
                                                    [&](int i, int half) { return at.row(i, half); }))
        return false;
    const bool scaled = AFFINE_SCALE_ONLY && affine[0][0].gain > 0;
    if (scaled) factor = affine[0][0].gain;
    if (scaled && !CAPPED) return true;
    UNROLL(i, TILES)
        UNROLL(n, KEYS)
            UNROLL(e, 4) {
                float slope;
                if (scaled) s[i][n][e] = tanh_of(s[i][n][e] * affine[0][0].rate);
                else s[i][n][e] = affine_exponent(s[i][n][e], affine[i][e / 2], 8 * n + e % 2, slope);
            }
    return true;
}

// modify: chooses the path for a tile.
DEVICE void modify_tile(const Params& p, const WorkTile& at, bool full, float (&s)[TILES][KEYS][4], int k0,
                        float& factor) {
    asm volatile("" : "+r"(k0));  // else values that depend on k0 alone are computed for every tile, used or not
    if constexpr (!HAS_SCORE && !HAS_MASK) {
        modify_tile<false, int>(p, at, s, k0);
    } else if (at.narrow()) {
        if constexpr (AFFINE)
            if (full && k0 + BLOCK_K <= at.n_k && affine_tile(p, at, s, k0, factor)) return;
        if (HAS_MASK && !full) modify_tile<true, int>(p, at, s, k0);
        else modify_tile<false, int>(p, at, s, k0);
    } else {
        modify_tile<HAS_MASK, long long>(p, at, s, k0);  // correct for FULL tiles, too
    }
}

// A barrier for the warps that share rows.
DEVICE void sync_row_warps() {
    if constexpr (WARPS_K > 1)
        asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / 32 / WARPS_K), "n"(32 * WARPS_K) : "memory");
}

// Reduces over the lanes and warps that share a row, for each of a lane's rows.
template <typename F>
DEVICE void across_rows(float (&x)[TILES][2], F join) {
    float(*reduce)[BLOCK_Q] = reinterpret_cast<float(*)[BLOCK_Q]>(shared + AT_ROW_REDUCE);
    UNROLL(i, TILES)
        UNROLL(half, 2) {
            x[i][half] = across_lanes(x[i][half], join);
            if (WARPS_K > 1 && threadIdx.x % 4 == 0)
                reduce[WorkTile::warp_column()][WorkTile::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4] =
                    x[i][half];
        }
    if constexpr (WARPS_K > 1) {
        sync_row_warps();
        UNROLL(i, TILES)
            UNROLL(half, 2) {
                const int row = WorkTile::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                x[i][half] = reduce[0][row];
#pragma unroll
                for (int other = 1; other < WARPS_K; ++other) x[i][half] = join(x[i][half], reduce[other][row]);
            }
    }
}

// S times scale > 0 to P relative to the running row maximum; rescales l and O to it. The exact maximum, unlike a
// reference near it, makes the largest P 1, which rounding to 16 bits does not change.
DEVICE void online_softmax(float (&s)[TILES][KEYS][4], float (&o)[TILES][COLUMNS][4], float scale) {
    RowState now = row_state();
    RowTotals totals;
    if constexpr (HAS_STATS) totals = row_totals();
    float row_max[TILES][2], (&m)[TILES][2] = now.m, (&l)[TILES][2] = now.l;
    UNROLL(i, TILES)
        UNROLL(half, 2) {
            float top = HIDDEN;
            UNROLL(n, KEYS) top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
            row_max[i][half] = fmaxf(m[i][half], top * scale);
        }
    across_rows(row_max, [](float x, float y) { return fmaxf(x, y); });
    bool great = false;
    UNROLL(i, TILES) great |= is_great(row_max[i][0]) || is_great(row_max[i][1]);
    if (__any_sync(~0u, great)) {
        UNROLL(i, TILES)
            UNROLL(n, KEYS)
                UNROLL(e, 4) s[i][n][e] *= scale;
        scale = 1;
    }
    UNROLL(i, TILES) {
        float rescale[2];
        UNROLL(half, 2) {
            const float finite_max = row_max[i][half] == HIDDEN ? 0.0f : row_max[i][half];  // -inf - 0 stays -inf
            rescale[half] = exp2_fast(m[i][half] - finite_max);
            float sum = 0, &total = totals.of[i][half];
            if constexpr (HAS_STATS)
                total = l[i][half] == 0 ? 0.0f : rescale[half] * fmaf(m[i][half] - finite_max, l[i][half], total);
            m[i][half] = row_max[i][half];
            UNROLL(n, KEYS)
                UNROLL(c, 2) {
                    float& x = s[i][n][2 * half + c];
                    const float below = fmaf(x, scale, -finite_max);
                    x = exp2_fast(below);
                    sum += x;
                    if constexpr (HAS_STATS) total = fmaf(x, fmaxf(below, LOWEST), total);
                }
            l[i][half] = l[i][half] * rescale[half] + sum;  // of this lane's keys; the epilogue reduces over the row
        }
        if (__all_sync(~0u, rescale[0] == 1 && rescale[1] == 1)) continue;
        UNROLL(n, COLUMNS)
            UNROLL(e, 4) o[i][n][e] *= rescale[e / 2];
    }
    row_state() = now;
    if constexpr (HAS_STATS) row_totals() = totals;
}

DEVICE void drop_tile(const Params& p, const WorkTile& at, float (&s)[TILES][KEYS][4], int k0) {
    UNROLL(i, TILES)
        UNROLL(half, 2) {
            const int index = at.row(i, half);
            UNROLL(n, KEYS)
                drop_pair(s[i][n][2 * half], s[i][n][2 * half + 1], p, at.b, at.h + index % PACK_GQA, index / PACK_GQA,
                          k0 + at.key(n));
        }
}

// P to shared memory, for the warps that share its rows.
DEVICE void store_p(const float (&s)[TILES][KEYS][4], storage* p_tile) {
    UNROLL(i, TILES)
        UNROLL(half, 2)
            UNROLL(n, KEYS) {
                const int row = WorkTile::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                const int offset = row * PITCH_P + WorkTile::key(n) * (int)sizeof(storage);
                char* target = reinterpret_cast<char*>(p_tile) + offset;
                const float x = s[i][n][2 * half], y = s[i][n][2 * half + 1];
                if constexpr (IS_FLOAT32) *reinterpret_cast<float2*>(target) = float2{x, y};
                else *reinterpret_cast<unsigned*>(target) = pack(x, y);
            }
}

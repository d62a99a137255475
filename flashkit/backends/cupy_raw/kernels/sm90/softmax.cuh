// The online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) of an S tile in the registers of a warp group,
// with flashkit's speculative row maximum.
//
// Exponentials are relative to a row reference m, in base 2. The online softmax takes the greatest score so far. But
// any m near it does: a float32 or bfloat16 holds 2^60 as precisely as 1. So m is speculated to hold for the next tile,
// whose scores go straight to exponentials; their sum, needed anyway, shows a misprediction. Then S is recomputed
// (recompute_qk), as the exponentials have overwritten it.
#pragma once
#include "sm90/layout.cuh"

// --- modify ----------------------------------------------------------------------------------------------------------
//
// Score and mask modifications of an S tile in registers: the generated functions, pair by pair.

// A masked pair has P = 0, but 0 * NaN is NaN: the epilogue detects outputs that this may have spoilt.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

// The factor that brings scores to base 2. A score modification takes scaled scores, so the softmax scale comes before
// it.
DEVICE float softmax_scale_log2(const Params& p) {
    return HAS_SCORE ? LOG2E : (float)(p.softmax_scale * 1.4426950408889634);
}

// Masks all but the first `keys` keys of the tile: S becomes -inf, or P (OF_P) becomes 0.
template <bool OF_P>
DEVICE void mask_past_end(float (&s)[S_REGS], int keys) {
    const int left = keys - threadIdx.x % 4 * 2;
    UNROLL(i, S_REGS) s[i] = i / 4 * 8 + i % 2 < left ? s[i] : OF_P ? 0.0f : HIDDEN;
}

// HAS_DISTANCE_BIAS: S times its scale, plus what is the same for all pairs of a distance.
DEVICE void add_distance_bias(const Params& p, const WorkTile& at, const SeqSlot& seq, float (&s)[S_REGS], int k0,
                            float scale) {
    const int own = at.row0 + row_of_lane(0), first = k0 + threadIdx.x % 4 * 2;
    UNROLL(half, 2) {
        const auto [h, row] = PACK_GQA > 1 ? clamped_row(seq.n_q(), at.h, own + 8 * half) : HeadRow{at.h, own};
        const float* added = distances(p.distance_bias, seq, h) + (row - first) + (PACK_GQA > 1 ? 0 : 8 * half);
        UNROLL(n, BLOCK_K / 8)
            UNROLL(c, 2) {
                float& x = s[4 * n + 2 * half + c];
                x = fmaf(x, scale, __ldg(added - (8 * n + c)));
            }
    }
}

// BIAS_BYTES: S times its scale, plus the bias.
DEVICE void add_bias(float (&s)[S_REGS], unsigned tile, float scale) {
    constexpr int CHUNK = BLOCK_Q * CHUNK_ROW;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; n += 2) {  // 16 keys
        const unsigned address = tile + 8 * n / BiasTile::CHUNK * CHUNK;
        const int vec = 8 * n % BiasTile::CHUNK * BIAS_BYTES / VEC_BYTES;
        float added[8];
        if constexpr (BIAS_BYTES == 2) {
            unsigned pairs[4];
            ldmatrix_x4(pairs, address + swizzled(threadIdx.x % 128 / 32 * 16 + lane % 16, vec + lane / 16));
            UNROLL(i, 8) added[i] = bias_of_pair(pairs[i / 2], i % 2);
        } else {
            UNROLL(i, 4) {
                const int row = row_of_lane(i % 2), of_row = vec + i / 2 * 2 + lane % 4 / 2;
                const float2 two = load_floats(address + swizzled(row, of_row) + lane % 2 * 8);
                added[2 * i] = two.x, added[2 * i + 1] = two.y;
            }
        }
        UNROLL(i, 8) s[4 * n + i] = fmaf(s[4 * n + i], scale, added[i]);
    }
}

// MASK_TILES: a bit for each of a lane's pairs. ldmatrix has keys 4 (lane % 4) to 4 (lane % 4) + 3 of sixteen.
struct MaskFragment {
    unsigned words[up(BLOCK_K, 128) / 128][2][2];

    __device__ __forceinline__ void load(unsigned tile) {
        const int lane = threadIdx.x % 32;
        UNROLL(i, up(BLOCK_K, 128) / 128)
            UNROLL(half, 2) {
                const int row = threadIdx.x % 128 / 32 * 16 + 8 * half + lane % 8;
                const unsigned keys = tile + i * BLOCK_Q * CHUNK_ROW + swizzled(row, lane / 8);
                const unsigned bits = mask_bits<false>(keys, keys ^ 4 * VEC_BYTES);
                UNROLL(odd, 2) {
                    const int from = lane / 4 * 4 + 2 * odd + lane % 4 / 2;
                    words[i][half][odd] = __shfl_sync(~0u, bits, from) >> lane % 2 * 16;
                }
            }
    }
    __device__ __forceinline__ bool shown(int n, int half, int c) const {
        return words[n / 16][half][n % 2] >> (8 * c + n / 2 % 8) & 1;
    }
};

// Of a tile of a dense bias the address of the warp group's rows, and of a mask the lane's bits.
struct DenseFragments {
    unsigned bias = 0;
    MaskFragment mask;
};

// S of a tile, modified, and -inf where masked; or P (OF_P), 0 where masked. Positions are in range
// (positions_in_range). Where the mask SHIFTS, it depends on q - k alone, and keys count from the lane's first one:
// each becomes an immediate of the comparison.
template <bool PARTIAL_TILE, bool OF_P = false>
DEVICE void modify_in_range(const Params& p, const WorkTile& at, start offset, float (&s)[S_REGS], int k0,
                            float scale, const DenseFragments& dense) {
    const SeqSlot seq = seq_of(p, at);
    const int n_q = seq.n_q(), n_k = PARTIAL_TILE ? seq.n_k() : 0;
    constexpr bool CLAMPED = PARTIAL_TILE && READS_ARRAYS, ADDED = HAS_DISTANCE_BIAS || BIAS_BYTES > 0;
    if constexpr (HAS_DISTANCE_BIAS && !OF_P) add_distance_bias(p, at, seq, s, k0, scale);
    if constexpr (BIAS_BYTES > 0 && !OF_P) add_bias(s, dense.bias, scale);
    if constexpr (ADDED && !PARTIAL_TILE) return;
    UNROLL(half, 2) {
        const auto [h, row] = clamped_row(n_q, at.h, opaque(at.row0) + row_of_lane(half));
        const int first = k0 + threadIdx.x % 4 * 2;
        const start q = row + offset;
        const position k_first = (position)first, distance_first = (position)(q - first);
        UNROLL(n, BLOCK_K / 8)
            UNROLL(c, 2) {
                float& x = s[4 * n + 2 * half + c];
                const int k = first + 8 * n + c, inside = CLAMPED ? clamped_index(k, n_k) : k;
                const position step = (position)(8 * n + c);
                const position k_of = CLAMPED ? (position)inside : k_first + step;
                const position distance = CLAMPED ? (position)(q - inside) : distance_first - step;
                if constexpr (HAS_SCORE && !ADDED && !OF_P)
                    x = modified_score<position>(x * scale, at.b, h, row, q, k_of, distance, p);
                if constexpr (PARTIAL_TILE) {
                    bool shown = k < n_k;
                    if constexpr (MASK_TILES)
                        shown = visible_where(dense.mask.shown(n, half, c), at.b, h, row, q, inside, p);
                    else if constexpr (HAS_MASK)
                        shown = visible(at.b, h, row, SHIFTS ? q - first : q, SHIFTS ? 8 * n + c : inside, p);
                    x = shown ? x : OF_P ? 0.0f : HIDDEN;
                }
            }
    }
    if (PARTIAL_TILE && HAS_MASK && n_k - k0 < BLOCK_K) mask_past_end<OF_P>(s, n_k - k0);
}

// The same for positions of any size, in 64 bits and one pair at a time.
DEVICE void modify_any_position(const Params& p, const WorkTile& at, long long offset, bool full, float (&s)[S_REGS],
    int k0) {
    const int n_k = (int)seq_info(p, at.b).n_k;
    float copy[S_REGS];  // in local memory, as its index is not constant
    UNROLL(i, S_REGS) copy[i] = s[i];
#pragma unroll 1
    for (int i = 0; i < S_REGS; ++i) {
        const auto [h, row] = clamped_row(p, at.b, at.h, opaque(at.row0) + row_of_lane(i / 2 % 2));
        const int key = k0 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, k = READS_ARRAYS ? clamped_index(key, n_k) : key;
        const long long q = row + offset;
        float x = copy[i];
        if constexpr (HAS_SCORE)
            x = modified_score<long long>(x * (float)p.softmax_scale, at.b, h, row, q, k, q - k, p);
        if constexpr (HAS_MASK) x = full || visible(at.b, h, row, q, k, p) ? x : HIDDEN;
        copy[i] = key < n_k ? x : HIDDEN;
    }
    UNROLL(i, S_REGS) s[i] = copy[i];
}

// Whether positions are in the range that POSITIONS' types hold exactly. A vote, so that the compiler knows it is
// uniform.
DEVICE bool positions_in_range(const Params& p, long long offset) {
    return POSITIONS == ANY || __all_sync(~0u, offset >= -FAR && offset + max_n_q(p) < FAR && max_n_k(p) < FAR);
}

// Any tile. Returns whether positions are in range, as far as a later unmasked tile needs it.
DEVICE bool modify_tile(const Params& p, const WorkTile& at, bool full, float (&s)[S_REGS], int k0, float scale,
                        const DenseFragments& dense = {}) {
    bool in_range = true;
    asm volatile("" : "+r"(k0));  // or what depends on k0 alone is computed for every tile, whether needed or not
    if constexpr (HAS_SCORE || HAS_MASK) {
        if (!HAS_SCORE && full) return true;
        const long long offset = seq_of(p, at).q_position();
        in_range = positions_in_range(p, offset);
        if (!in_range) modify_any_position(p, at, offset, full, s, k0);
        else if (!full) modify_in_range<true>(p, at, (start)offset, s, k0, scale, dense);
        else if (HAS_SCORE) modify_in_range<false>(p, at, (start)offset, s, k0, scale, dense);
    } else if (!full) {
        modify_in_range<true>(p, at, 0, s, k0, scale, dense);
    }
    return in_range || !HAS_SCORE;
}

DEVICE void dropout_tile(const Params& p, const WorkTile& at, float (&s)[S_REGS], int k0) {
    UNROLL(half, 2) {
        const int index = at.row0 + row_of_lane(half);
        UNROLL(n, BLOCK_K / 8)
            drop_pair(s[4 * n + 2 * half], s[4 * n + 2 * half + 1], p, at.b, at.h + index % PACK_GQA, index / PACK_GQA,
                      k0 + 8 * n + threadIdx.x % 4 * 2);
    }
}

// --- the online softmax ----------------------------------------------------------------------------------------------

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
    UNROLL(half, 2) {
        const float top = fmaxf(fmaxf(s[2 * half], s[2 * half + 1]), fmaxf(s[4 + 2 * half], s[4 + 2 * half + 1]));
        m[half] = max_across_lanes(top) * scale_log2[half];
        if (P_IS_FLOAT16) m[half] += HEADROOM;
    }
    return __all_sync(~0u, are_row_refs(m));
}

// HAS_STATS: of a lane's rows the sum of P log2 P and the greatest P, relative to the row reference as the row sum is.
struct RowStats { float total[2], top[2]; };

// S of a row to P = 2^exponent(s); returns the lane's part of the row sum. HAS_STATS: FINITE takes it that no exponent
// is -inf; where one is, the sum of P log2 P is NaN.
template <bool FINITE = false, typename F>
DEVICE float exp2_row(float (&s)[S_REGS], int half, F exponent, RowStats& stats) {
    float total[2] = {0, 0}, weighted[2] = {0, 0};
    int top = 0;  // bits: positive floats are ordered as integers, of which one instruction compares three
    UNROLL(n, BLOCK_K / 8)
        UNROLL(c, 2) {
            float& x = s[4 * n + 2 * half + c];
            const float below = exponent(x);
            x = exp2_fast(below);
            total[c] += x;
            if constexpr (HAS_STATS) {
                top = max(top, __float_as_int(x));
                weighted[c] = fmaf(x, FINITE ? below : fmaxf(below, LOWEST), weighted[c]);
            }
        }
    if constexpr (HAS_STATS) stats.total[half] = weighted[0] + weighted[1], stats.top[half] = __int_as_float(top);
    return total[0] + total[1];
}
template <typename F>
DEVICE float exp2_row(float (&s)[S_REGS], int half, F exponent) {
    RowStats unused;
    return exp2_row(s, half, exponent, unused);
}

// S to P relative to the row maximum so far; `rescale` brings O and l of the tiles before to it. sum: the row sums of
// P.
DEVICE void online_softmax(float (&s)[S_REGS], float (&m)[2], float (&sum)[2], float (&rescale)[2],
    const float (&scale_log2)[2], RowStats& stats) {
    UNROLL(half, 2) {
        float top = m[half];
        UNROLL(n, BLOCK_K / 8)
            UNROLL(c, 2) {
                float& x = s[4 * n + 2 * half + c];
                x *= scale_log2[half];
                top = fmaxf(top, x);
            }
        top = max_across_lanes(top);
        const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift);
        m[half] = top;
        sum[half] = exp2_row(s, half, [=](float x) { return x - shift; }, stats);
    }
}

// The online softmax with P up to 2^max_p_log2: m is so far below the row maximum. refuses_great: where m becomes great
// l becomes NaN, which the epilogue sees.
DEVICE void online_softmax_below(float (&s)[S_REGS], float (&m)[2], float (&l)[2], float (&rescale)[2],
    const float (&scale_log2)[2], float max_p_log2, bool refuses_great) {
    UNROLL(half, 2) {
        float top = HIDDEN;
        UNROLL(i, S_REGS / 2) top = fmaxf(top, s[i / 2 * 4 + 2 * half + i % 2]);
        top = max_across_lanes(top);
        top = fmaxf(m[half], fmaf(top, scale_log2[half], -max_p_log2));
        const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift);
        m[half] = top;
        l[half] = l[half] * rescale[half] + exp2_row(s, half, [&](float x) {
            return fmaf(x, scale_log2[half], -shift); });
        if (refuses_great && is_great(shift)) l[half] = fk_special(0);
    }
}

// HAS_STATS: they follow a row reference.
DEVICE void rescale_stats(RowStats& stats, const float (&before)[2], const float (&m)[2], const float (&l)[2],
                           const float (&rescale)[2]) {
    UNROLL(half, 2) {
        stats.total[half] =
            l[half] == 0 ? 0.0f : rescale[half] * fmaf(before[half] - m[half], l[half], stats.total[half]);
        stats.top[half] *= rescale[half];
    }
}

// Adds a tile's.
DEVICE void add_stats(RowStats& stats, const RowStats& tile) {
    UNROLL(half, 2)
        stats.total[half] += tile.total[half], stats.top[half] = fmaxf(stats.top[half], tile.top[half]);
}

// S to P relative to m as it is. False on a misprediction: m is too low, or a score is NaN. FINITE: as of exp2_row().
template <bool FINITE>
DEVICE bool speculative_softmax(float (&s)[S_REGS], const float (&m)[2], float (&sum)[2],
                                const float (&scale_log2)[2], RowStats& stats) {
    if constexpr (HEAD_DIM <= 64 && !HAS_STATS) {  // a lane's two rows take turns
        float total[2][2] = {};
        UNROLL(i, S_REGS) {
            const int half = i / 2 % 2;
            s[i] = exp2_fast(fmaf(s[i], scale_log2[half], -m[half]));
            total[half][i % 2] += s[i];
        }
        sum[0] = total[0][0] + total[0][1], sum[1] = total[1][0] + total[1][1];
    } else {
        UNROLL(half, 2)
            sum[half] = exp2_row<FINITE>(s, half, [&](float x) { return fmaf(x, scale_log2[half], -m[half]); }, stats);
    }
    const bool is_finite = !HAS_STATS || !FINITE || stats.total[0] + stats.total[1] <= INFINITE;
    return __all_sync(~0u, sum[0] <= MAX_SUM && sum[1] <= MAX_SUM && is_finite);
}

// After a misprediction: S of a warp's 16 rows again, by the mma instruction of a single warp, whose accumulator has
// wgmma's layout. q, k: the warp group's rows and the K tile in shared memory.
DEVICE void recompute_qk(float (&s)[S_REGS], unsigned q, unsigned k) {
    const int lane = opaque(threadIdx.x % 32), row = opaque(threadIdx.x % 128 / 32) * 16 + lane % 16,
        key = lane / 16 * 8 + lane % 8;
    const float zero = __int_as_float(opaque(0));
    UNROLL(i, S_REGS) s[i] = zero;
#pragma unroll 1
    for (int step = 0; step < padded(HEAD_DIM) / 16; ++step) {
        const int chunk = step / 4, vec = step % 4 * 2;
        unsigned a[4];
        ldmatrix_x4(a, q + chunk * 64 * CHUNK_ROW + swizzled(row, vec + lane / 16));
        UNROLL(n, BLOCK_K / 16) {
            unsigned b[4];
            ldmatrix_x4(b, k + (chunk * BLOCK_K + 16 * n) * CHUNK_ROW + swizzled(key, vec + lane / 8 % 2));
            mma_m16n8k16(s + 8 * n, a, b[0], b[1]);
            mma_m16n8k16(s + 8 * n + 4, a, b[2], b[3]);
        }
    }
}

// Score and mask modifications of an S tile in registers: the generated functions, pair by pair.
#pragma once
#include "sm90/layout.cuh"

// A masked pair has P = 0, but 0 * NaN is NaN: the epilogue detects outputs that this may have spoilt.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

// The factor that brings scores to base 2. A score modification takes scaled scores, so the softmax scale comes before
// it.
DEVICE float softmax_scale_log2(const Params& p) {
    return HAS_SCORE ? LOG2E : (float)(p.softmax_scale * 1.4426950408889634);
}

// Where a warp has a great row reference: S times `factor`, which becomes 1.
DEVICE void scale_below_great(float (&s)[S_REGS], const float (&row_ref)[2], float (&factor)[2]) {
    if (!__any_sync(~0u, is_great(row_ref[0]) || is_great(row_ref[1]))) return;
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) s[i] *= factor[i / 2 % 2];
    factor[0] = factor[1] = 1;
}

// A key past the end stands for the last one, so no array is read beyond its end. Its pair is masked anyway.
DEVICE int key_inside(int k, int n_k) { return min(k, n_k > 0 ? n_k - 1 : 0); }

// Masks all but the first `keys` keys of the tile: S becomes -inf, or P (OF_P) becomes 0.
template <bool OF_P>
DEVICE void mask_past_end(float (&s)[S_REGS], int keys) {
    const int left = keys - threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) s[i] = i / 4 * 8 + i % 2 < left ? s[i] : OF_P ? 0.0f : HIDDEN;
}

// S of a tile, modified, and -inf where masked; or P (OF_P), 0 where masked. Positions are in range
// (positions_in_range). Where the mask SHIFTS, it depends on q - k alone, and keys count from the lane's first one:
// each becomes an immediate of the comparison.
template <bool PARTIAL_TILE, bool OF_P = false, typename T>
DEVICE void modify_in_range(const Params& p, const WorkTile& at, start offset, float (&s)[S_REGS], int k0, float scale,
    T& tanh) {
    const SeqSlot seq = seq_of(p, at);
    const int n_q = seq.n_q(), n_k = PARTIAL_TILE ? seq.n_k() : 0;
    constexpr bool CLAMPED = PARTIAL_TILE && READS_ARRAYS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto [h, row] = clamped_row(n_q, at.h, opaque(at.row0) + row_of_lane(half));
        const int first = k0 + threadIdx.x % 4 * 2;
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
                if constexpr (HAS_SCORE && !OF_P)
                    x = modified_score<position>(x * scale, at.b, h, row, q, k_of, distance, tanh, p);
                if constexpr (PARTIAL_TILE) {
                    const bool shown =
                        HAS_MASK ? visible(at.b, h, row, SHIFTS ? q - first : q, SHIFTS ? 8 * n + c : inside, p)
                            : k < n_k;
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
    const Tanh tanh;
    float copy[S_REGS];  // in local memory, as its index is not constant
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) copy[i] = s[i];
#pragma unroll 1
    for (int i = 0; i < S_REGS; ++i) {
        const auto [h, row] = clamped_row(p, at.b, at.h, opaque(at.row0) + row_of_lane(i / 2 % 2));
        const int key = k0 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, k = READS_ARRAYS ? key_inside(key, n_k) : key;
        const long long q = row + offset;
        float x = copy[i];
        if constexpr (HAS_SCORE)
            x = modified_score<long long>(x * (float)p.softmax_scale, at.b, h, row, q, k, q - k, tanh, p);
        if constexpr (HAS_MASK) x = full || visible(at.b, h, row, q, k, p) ? x : HIDDEN;
        copy[i] = key < n_k ? x : HIDDEN;
    }
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) s[i] = copy[i];
}

// Whether positions are in the range that POSITIONS' types hold exactly. A vote, so that the compiler knows it is
// uniform.
DEVICE bool positions_in_range(const Params& p, long long offset) {
    return POSITIONS == ANY || __all_sync(~0u, offset >= -FAR && offset + max_n_q(p) < FAR && max_n_k(p) < FAR);
}

// An unmasked tile with positions in range. False where the polynomial for tanh does not hold for all scores, which
// then have to be computed again.
DEVICE bool modify_unmasked(const Params& p, const WorkTile& at, float (&s)[S_REGS], int k0, float scale) {
    TanhPoly tanh{0};
    if constexpr (HAS_SCORE) modify_in_range<false>(p, at, at.offset, s, k0, scale, tanh);
    return tanh.max_abs <= TanhPoly::MAX;
}

// Any tile. Returns whether positions are in range, as far as a later unmasked tile needs it.
DEVICE bool modify_tile(const Params& p, const WorkTile& at, bool full, float (&s)[S_REGS], int k0, float scale) {
    const Tanh tanh;
    bool in_range = true;
    asm volatile("" : "+r"(k0));  // or what depends on k0 alone is computed for every tile, whether needed or not
    if constexpr (HAS_SCORE || HAS_MASK) {
        if (!HAS_SCORE && full) return true;
        const long long offset = seq_of(p, at).q_position();
        in_range = positions_in_range(p, offset);
        if (!in_range) modify_any_position(p, at, offset, full, s, k0);
        else if (!full) modify_in_range<true>(p, at, (start)offset, s, k0, scale, tanh);
        else if (HAS_SCORE) modify_in_range<false>(p, at, (start)offset, s, k0, scale, tanh);
    } else if (!full) {
        modify_in_range<true>(p, at, 0, s, k0, scale, tanh);
    }
    return in_range || !HAS_SCORE;
}

DEVICE void dropout_tile(const Params& p, const WorkTile& at, float (&s)[S_REGS], int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half);
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
            drop_pair(s[4 * n + 2 * half], s[4 * n + 2 * half + 1], p, at.b, at.h + index % PACK_GQA, index / PACK_GQA,
                      k0 + 8 * n + threadIdx.x % 4 * 2);
    }
}

// Tiles of the score matrix: mask classification, the walk over tiles that are not EMPTY, modification of scores.
//
// The host passes no list of tiles. classify() proves from the corners of a tile that it is EMPTY (no pair is visible)
// or FULL (all pairs are); where it proves neither, the tile is PARTIAL and visible() decides each pair. Tiles may
// therefore have any size, and masks any length.
#pragma once

// Generated functions, defined before this text (cupy_raw/modify.py). b, h: batch entry and query head; row: index of
// the query; q: its position, row + SeqInfo::q_position; k: index of the key. The corners of classify() are inclusive.
//
//     fk_float modified_score<I>(fk_float s, b, h, row, q, k, q - k, p)   I: type of its integers
//     fk_float score_slope(fk_float s, b, h, row, q, k, p)         d modified_score / d s
//     bool visible(b, h, row, q, k, p)
//     int classify(b, h, row0, row1, q0, q1, k0, k1, p)            a TileState
//
// and of an affine score modification, gain * f(rate * s) + bias (cuda_common/affine_score.py):
//
//     Head head_of(b, h, p)                                        values from arrays that are constant over a head
//     fk_float score_gain<I>, score_rate<I>(b, h, row, q, head, p), score_bias<I>(b, h, row, q, head, k, p)
//     bool bias_is_straight<I>(b, h, row, q, head, k0, k1, p)      whether the bias is linear from key k0 to key k1

// TileState of rows row0 ... row1 - 1 and keys k0 ... k1 - 1; neither range is empty.
DEVICE int tile_state(const Params& p, long long b, long long h, long long q_position, long long row0, long long row1,
                      long long k0, long long k1) {
    if constexpr (HAS_MASK)
        return classify(b, h, row0, row1 - 1, row0 + q_position, row1 - 1 + q_position, k0, k1 - 1, p);
    return FULL;
}

// Walks along one axis over the tiles that are not EMPTY. Every warp of a CTA walks by itself, in step with the others.
// The lanes of a warp classify 32 tiles at once, and before that 32 groups of 32 tiles unless the mask reads arrays; so
// a long run of EMPTY tiles costs few evaluations of the mask. All lanes of a warp call next() together.
//
//     TileWalk<BLOCK_K, true> walk(p, b, h, row0, row1, n_keys);
//     while (walk.next()) { walk.tile, walk.state ... }
template <int BLOCK, bool ALONG_KEYS>
struct TileWalk {
    const Params& p;
    long long b, h, q_position, from, to;  // from ... to - 1: the range on the other axis
    long long n, tiles;                    // elements and tiles along the axis
    long long tile;                        // the tile that next() found
    int state;                             // PARTIAL or FULL
    long long chunk;                       // tiles chunk ... chunk + 31 are classified
    unsigned live, full;                   // bit masks: not EMPTY and not yet visited; FULL

    __device__ __forceinline__ TileWalk(const Params& p, long long b, long long h, long long from, long long to,
                                        long long n)
        : p(p), b(b), h(h), q_position(seq_info(p, b).q_position), from(from), to(to), n(n),
          tiles((n + BLOCK - 1) / BLOCK), tile(-1), state(FULL), chunk(-32), live(0), full(0) {}

    __device__ __forceinline__ int classify_tiles(long long first, long long last) const {  // first ... last - 1
        const long long start = first * BLOCK, end = last * BLOCK < n ? last * BLOCK : n;
        if (first >= tiles) return EMPTY;
        return ALONG_KEYS ? tile_state(p, b, h, q_position, from, to, start, end)
                          : tile_state(p, b, h, q_position, start, end, from, to);
    }

    __device__ __forceinline__ bool next() {
        if constexpr (!HAS_MASK) return ++tile < tiles;
        const int lane = threadIdx.x % 32;
        while (live == 0) {
            chunk += 32;
            if (chunk >= tiles) return false;
            if (!MASK_READS_ARRAYS && tiles - chunk > 32) {
                const long long group = chunk + 32 * lane;
                const unsigned groups = __ballot_sync(~0u, classify_tiles(group, group + 32) != EMPTY);
                chunk += 32 * (groups == 0 ? 31 : __ffs(groups) - 1);
                if (groups == 0) continue;
            }
            const int found = classify_tiles(chunk + lane, chunk + lane + 1);
            live = __ballot_sync(~0u, found != EMPTY);
            full = __ballot_sync(~0u, found == FULL);
        }
        const int bit = __ffs(live) - 1;
        tile = chunk + bit;
        state = full >> bit & 1 ? FULL : PARTIAL;
        live &= live - 1;
        return true;
    }
};

// The modified score, -inf where the pair is masked. PARTIAL_TILE: visible() decides. I: type of the integers in the
// score modification.
template <typename I> struct Integer { using type = I; };
template <bool PARTIAL_TILE, typename I = long long>
DEVICE fk_float modify(fk_float s, typename Integer<I>::type b, typename Integer<I>::type h,
                       typename Integer<I>::type row, typename Integer<I>::type q, typename Integer<I>::type k,
                       const Params& p) {
    if constexpr (HAS_SCORE) s = modified_score<I>(s, b, h, row, q, k, q - k, p);
    if constexpr (HAS_MASK && PARTIAL_TILE) s = visible(b, h, row, q, k, p) ? s : HIDDEN;
    return s;
}

// --- dropout ---------------------------------------------------------------------------------------------------------
//
// Dropout of P and dP by a counter-based generator (flashkit/mods/dropout.py): the forward and the backward pass
// compute the same bits from (seed, batch entry, head, row, key).

struct Words { unsigned word[4]; };

// Philox-4x32-10: four words, for keys 4 * key_group ... 4 * key_group + 3 of a row.
DEVICE Words philox(const Params& p, long long key_group, long long row, long long h, long long b) {
    unsigned c0 = (unsigned)key_group + (unsigned)(p.dropout_first >> 32);
    unsigned c1 = (unsigned)row + (unsigned)p.dropout_first;
    unsigned c2 = (unsigned)h + (unsigned)p.dropout_head, c3 = (unsigned)b;
    unsigned key0 = (unsigned)p.seed, key1 = (unsigned)(p.seed >> 32);
    UNROLL(round, 10) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ key0, c1 = low1, c2 = high0 ^ c3 ^ key1, c3 = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// An element of P or dP, dropped or scaled.
DEVICE fk_float drop(fk_float x, const Params& p, long long b, long long h, long long row, long long key) {
    const Words words = philox(p, key >> 2, row, h, b);
    const unsigned(&w)[4] = words.word;
    const int lane = key & 3;
    const unsigned word = lane == 0 ? w[0] : lane == 1 ? w[1] : lane == 2 ? w[2] : w[3];
    return word >= (unsigned)p.dropout_threshold ? x * (fk_float)p.dropout_scale : (fk_float)0;
}

// Two neighbouring elements of a fragment, keys key and key + 1 of a row. key is even, so one call of Philox serves
// both.
DEVICE void drop_pair(float& x0, float& x1, const Params& p, int b, int h, int row, int key) {
    const Words words = philox(p, key >> 2, row, h, b);
    const bool upper = key & 2;
    const unsigned word0 = upper ? words.word[2] : words.word[0], word1 = upper ? words.word[3] : words.word[1];
    x0 = word0 >= (unsigned)p.dropout_threshold ? x0 * (float)p.dropout_scale : 0;
    x1 = word1 >= (unsigned)p.dropout_threshold ? x1 * (float)p.dropout_scale : 0;
}

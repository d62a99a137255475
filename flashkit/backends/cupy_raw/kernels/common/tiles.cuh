// Tiles of the score matrix: which exist, what happens to a score of one, which weights dropout removes.
//
// No list of tiles is handed over. classify() proves from the corners of a tile alone that it is EMPTY (no pair is
// visible) or FULL (all are); where it can do neither the tile is PARTIAL and visible() decides each pair. So tiles
// may have any size, and masks any length.
#pragma once

// The generated functions, which stand before this text; b, h: batch entry and query head, row: the query's index, q:
// its position, row + offset_of(p, b), k: the key's index; the corners of classify are inclusive.
//
//     fk_float modified_score<I>(fk_float s, b, h, row, q, k, q - k, tanh, p)   I: the type of integers in it
//     fk_float score_slope(fk_float s, b, h, row, q, k, p)         d modified_score / d s
//     bool visible(b, h, row, q, k, p)
//     int classify(b, h, row0, row1, q0, q1, k0, k1, p)            a State
//
// and of a score modification of a known form, gain * f(rate * s) + bias (cuda_common/form.py):
//
//     Head head_of(b, h, p)                                        what the others read from arrays, the same for a head
//     fk_float score_gain<I>, score_rate<I>(b, h, row, q, head, p), score_bias<I>(b, h, row, q, head, k, p)
//     bool bias_is_straight<I>(b, h, row, q, head, k0, k1, p)      whether it grows evenly from key k0 to k1

// State of rows row0 ... row1 - 1 and keys k0 ... k1 - 1, at least one of each.
DEVICE int tile_state(const Params& p, long long b, long long h, long long offset, long long row0, long long row1,
                      long long k0, long long k1) {
    if constexpr (HAS_MASK) return classify(b, h, row0, row1 - 1, row0 + offset, row1 - 1 + offset, k0, k1 - 1, p);
    return FULL;
}

// Walks along an axis over the tiles that are not EMPTY. Every warp of a block walks by itself, all in step: the lanes
// of a warp classify 32 tiles at once, after 32 groups of 32 unless tiles are MASK_READS_ARRAYS, so a long run of EMPTY tiles
// costs a few looks at the mask. Call next() with all lanes of a warp.
//
//     TileWalk<BLOCK_K, true> walk(p, b, h, row0, row1, n_keys);
//     while (walk.next()) { walk.tile, walk.state ... }
template <int BLOCK, bool ALONG_KEYS>
struct TileWalk {
    const Params& p;
    long long b, h, offset, from, to;  // from ... to - 1: the range on the other axis
    long long n, tiles;                // elements along the axis, and tiles
    long long tile;                    // the tile that next() found
    int state;                         // PARTIAL or FULL
    long long chunk;                   // tiles chunk ... chunk + 31 are classified
    unsigned live, full, groups;       // those of them that exist and that are FULL; groups that are not EMPTY
    long long first_group;

    __device__ __forceinline__ TileWalk(const Params& p, long long b, long long h, long long from, long long to, long long n)
        : p(p), b(b), h(h), offset(offset_of(p, b)), from(from), to(to), n(n), tiles((n + BLOCK - 1) / BLOCK),
          tile(-1), state(FULL), chunk(-32), live(0), full(0), groups(0), first_group(-32) {}

    __device__ __forceinline__ int look(long long first, long long last) const {  // tiles first ... last - 1
        const long long start = first * BLOCK, end = last * BLOCK < n ? last * BLOCK : n;
        if (first >= tiles) return EMPTY;
        return ALONG_KEYS ? tile_state(p, b, h, offset, from, to, start, end)
                          : tile_state(p, b, h, offset, start, end, from, to);
    }

    __device__ __forceinline__ bool next() {
        if constexpr (!HAS_MASK) return ++tile < tiles;
        const int lane = threadIdx.x % 32;
        while (live == 0) {
            if constexpr (!MASK_READS_ARRAYS) {
                while (groups == 0) {
                    first_group += 32;
                    if (first_group * 32 >= tiles) return false;
                    const long long group = first_group + lane;
                    groups = __ballot_sync(~0u, look(group * 32, group * 32 + 32) != EMPTY);
                }
                chunk = (first_group + __ffs(groups) - 1) * 32;
                groups &= groups - 1;
            } else {
                chunk += 32;
                if (chunk >= tiles) return false;
            }
            const int found = look(chunk + lane, chunk + lane + 1);
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

// A score, modified; -inf where the pair is hidden. PARTIAL_TILE: whether visible() has to be asked.
// I: of the integers in the score modification.
template <typename I> struct Integer { using type = I; };
template <bool PARTIAL_TILE, typename I = long long>
DEVICE fk_float modify(fk_float s, typename Integer<I>::type b, typename Integer<I>::type h, typename Integer<I>::type row,
                       typename Integer<I>::type q, typename Integer<I>::type k, const Params& p) {
    const Tanh tanh;
    if constexpr (HAS_SCORE) s = modified_score<I>(s, b, h, row, q, k, q - k, tanh, p);
    if constexpr (HAS_MASK && PARTIAL_TILE) s = visible(b, h, row, q, k, p) ? s : HIDDEN;
    return s;
}

// --- dropout (flashkit/mods/dropout.py) --------------------------------------------------------------------------------------

struct Words { unsigned word[4]; };

// Philox-4x32 with ten rounds: four words for keys 4 * key_group ... 4 * key_group + 3 of a row.
DEVICE Words philox(unsigned long long seed, long long key_group, long long row, long long h, long long b) {
    unsigned c0 = (unsigned)key_group, c1 = (unsigned)row, c2 = (unsigned)h, c3 = (unsigned)b;
    unsigned key0 = (unsigned)seed, key1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ key0, c1 = low1, c2 = high0 ^ c3 ^ key1, c3 = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// A weight, dropped or scaled.
DEVICE fk_float drop(fk_float weight, const Params& p, long long b, long long h, long long row, long long key) {
    const Words words = philox(p.seed, key >> 2, row, h, b);
    const int lane = key & 3;
    const unsigned word = lane == 0 ? words.word[0] : lane == 1 ? words.word[1] : lane == 2 ? words.word[2] : words.word[3];
    return word >= (unsigned)p.dropout_threshold ? weight * (fk_float)p.dropout_scale : (fk_float)0;
}

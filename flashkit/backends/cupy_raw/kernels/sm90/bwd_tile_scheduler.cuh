// Which work tile each CTA of Hopper's persistent backward kernel takes, and in which order.
#pragma once
#include "sm90/bwd_layout.cuh"
#include "sm90/packed_tiles.cuh"

// Heads of all batch entries; of packed sequences, whose tiles follow each other, those of one entry.
DEVICE int num_kv_heads(const Params& p) { return (int)(p.heads / GQA_GROUP * num_entries(p)); }
DEVICE int kv_head_index(const Params& p, int b, int head) {
    return (IS_PACKED ? 0 : b * ((int)p.heads / GQA_GROUP)) + head;
}
DEVICE int tiles_of_queries(const Params& p) { return (int)num_q_tiles(p, BLOCK_Q); }  // of a head
// The index of a query tile among all, as they lie in dq_accum: those of a key/value head follow one another.
DEVICE int query_tile_index(const Params& p, int b, int h, int tile) {
    return (IS_PACKED ? h : b * (int)p.heads + h) * tiles_of_queries(p) + (int)q_tile_number(p, b, tile, BLOCK_Q);
}
// Of a head; not of packed sequences, which TileScheduler::tiles() counts.
DEVICE int tiles_of_keys(const Params& p) { return (int)num_k_tiles(p, BLOCK_K); }

// Without a mask heads follow one another. Under a mask that is not read from arrays, p.heads_per_l2_group heads share
// the L2 cache, and first key tiles come first: under a causal mask these have most to do. The last heads
// (HAS_LPT_TAIL) are all interleaved, so that the shortest work tiles come at the very end and CTAs finish together,
// yet whole heads finish early, for bwd_postprocess. FROM_DIAGONAL: key tiles descend, but for those of the last heads.
constexpr bool HAS_LPT_TAIL = HAS_MASK && (DETERMINISTIC || !MASK_READS_ARRAYS);

// How many heads the tail has, where each has `tiles` key tiles. Unless DETERMINISTIC, one work tile for each CTA: more
// would wait until dq_accum is cleared, and as there are not more, not all of them wait.
DEVICE int tail_heads(const Params& p, int tiles) {
    if constexpr (!HAS_LPT_TAIL) return 0;
    const int all = num_kv_heads(p), one_each = ceil_div(gridDim.x / CLUSTER_SIZE, tiles);
    const int tail = !DETERMINISTIC ? one_each : p.heads_per_l2_group < 2 ? 2 : (int)p.heads_per_l2_group;
    return tail < all ? tail : all;
}
DEVICE bool is_descending(const Params& p, int bh, int tiles) {
    return FROM_DIAGONAL && bh < num_kv_heads(p) - tail_heads(p, tiles);
}

struct TileScheduler {
    const Params& p;
    unsigned base;
    PackedTiles<KEYS, BLOCK_K> packed{p};

    __device__ __forceinline__ int tiles() const {  // of a head
        if constexpr (IS_PACKED) return packed.total;
        return tiles_of_keys(p);
    }
    __device__ __forceinline__ int count() const { return tiles() * num_kv_heads(p); }
    __device__ __forceinline__ WorkTile work_tile(int index) {  // by a warp
        const int heads = (int)p.heads / GQA_GROUP, tiles = this->tiles(), tail = tail_heads(p, tiles);
        const int first = num_kv_heads(p) - tail;
        const bool in_tail = HAS_LPT_TAIL && index >= first * tiles;
        const TileCoord coord = in_tail ? tile_coord(index - first * tiles, tiles, tail, tail)
                                        : tile_coord(index, tiles, first, (int)p.heads_per_l2_group);
        const int bh = in_tail ? first + coord.bh : coord.bh;
        const int number = FROM_DIAGONAL && !in_tail ? tiles - 1 - coord.tile : coord.tile;
        const SeqTile at = IS_PACKED ? packed.tile(number) : SeqTile{bh / heads, number};
        return {(int)at.b, bh % heads, (int)at.tile * BLOCK_K};
    }

    // By a warp: claims an index, which claimed() tells of the result. Meanwhile there is time for something else, if
    // the claim is early. The first CTA of a cluster claims for both.
    __device__ __forceinline__ int claim(bool leader) const {
        const bool claims = leader && cta_rank() == 0;
        if constexpr (IS_PACKED) return count_if(claims, p.tile_counter);
        return claims ? (int)atomicAdd(p.tile_counter, 1u) : 0;
    }
    // The index of work tile `number` of the CTA.
    __device__ __forceinline__ int claimed(int claim, unsigned number, bool leader) const {
        return uniform(leader && CLUSTER_SIZE > 1 ? agreed(claim, number) : claim);
    }
    // By one lane. A word may be overwritten two work tiles later: the peer CTA has read it by then, as it has sent dS
    // of query tiles that the first CTA could not complete without.
    __device__ __forceinline__ int agreed(int claim, unsigned number) const {
        const unsigned barrier = base + AT_CLAIMED + number % 2 * 8, word = base + AT_CLAIMED_INDEX + number % 2 * 4;
        if (cta_rank() == 0) {
            if (CLUSTER_SIZE > 1) dsmem_store(mapa(word, 1), claim, mapa(barrier, 1));
            return claim;
        }
        mbarrier_arrive_expect_tx(barrier, 4);
        mbarrier_wait(barrier, number / 2 & 1);
        return load_word(word);
    }
    // The last CTA to end leaves the counters as the next launch expects them.
    __device__ __forceinline__ void reset(bool leader) const {
        if (leader && atomicAdd(p.tile_counter + 1, 1u) == gridDim.x - 1) p.tile_counter[0] = 0, p.tile_counter[1] = 0;
    }
};

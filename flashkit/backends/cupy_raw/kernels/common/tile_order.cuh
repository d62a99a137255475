// The order in which a persistent grid takes the tiles of all heads: L2 swizzle and longest-processing-time-first
// (LPT).
#pragma once

struct TileCoord { int tile, bh; };  // index of a tile; of a head among those of all batch entries

// The tile at place `index` of the order: `heads_at_a_time` heads together, tile after tile, so that their K and V stay
// in the L2 cache. Tiles from number `before_tail` on, the shortest, come after those of all heads: they even out the
// CTAs' ends.
DEVICE TileCoord tile_coord(int index, int before_tail, int heads, int heads_at_a_time) {
    if (index >= before_tail * heads) {
        const int tile = index / heads;
        return {tile, index - tile * heads};
    }
    const int first = index / (heads_at_a_time * before_tail) * heads_at_a_time, rest = index - first * before_tail;
    const int group = heads - first < heads_at_a_time ? heads - first : heads_at_a_time, tile = rest / group;
    return {tile, first + rest - tile * group};
}

// How many of a head's tiles come before the LPT tail: three quarters under a mask whose tiles shrink along the order.
// A mask that is read from arrays says nothing of their sizes, and a tail would only lose L2 hits.
DEVICE int tiles_before_lpt_tail(int tiles) { return HAS_MASK && !MASK_READS_ARRAYS ? tiles - tiles / 4 : tiles; }

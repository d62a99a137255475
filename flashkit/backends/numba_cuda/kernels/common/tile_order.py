# parts: common/fragment
# The order in which CTAs take the tiles of all heads: L2 swizzle and longest-processing-time-first (LPT).
#
# A work tile of the forward pass is (batch entry, first of its PACK_GQA heads, first of its BLOCK_Q rows).


@device
def tile_coord(index, before_tail, heads, heads_at_a_time):
    """(tile, head among those of all batch entries) at place `index` of the order, all unsigned.

    `heads_at_a_time` heads come together, tile after tile, so that their K and V stay in the L2 cache. Tiles from
    number `before_tail` on, the shortest, come after those of all heads: they even out the CTAs' ends.
    """
    if index < u32(before_tail * heads):
        first = u32(index // u32(heads_at_a_time * before_tail) * heads_at_a_time)
        rest = u32(index - first * before_tail)
        group = u32(min(heads - first, heads_at_a_time))
        tile = u32(rest // group)
        head = u32(first + rest - tile * group)
    else:
        tile = u32(index // heads)
        head = u32(index - tile * heads)
    return tile, head


@device
def tiles_before_lpt_tail(tiles):
    """How many of a head's tiles come before the LPT tail: three quarters under a mask whose tiles shrink along the
    order.

    A mask that is read from arrays says nothing of their sizes, and a tail would only lose L2 hits.
    """
    return u32(tiles - tiles // u32(4)) if HAS_MASK and not MASK_READS_ARRAYS else tiles


@device
def num_work_tiles(p):
    rows = (max_n_q(p) * PACK_GQA + BLOCK_Q - 1) // BLOCK_Q
    return i32((num_q_tiles(p, BLOCK_Q) if IS_PACKED else rows) * (p.heads // PACK_GQA) * num_entries(p))


@device
def work_tile(p, index):
    """Work tile at place `index`. Under a mask: longest first, with L2 swizzle and LPT tail. Packed sequences: in turn,
    with L2 swizzle, as a row of one head is next to those of the others. Otherwise head after head, the ragged tiles
    last. Of packed sequences it may be past the last row. By all lanes of a warp.
    """
    heads, rows, index = u32(u32(p.heads) // u32(PACK_GQA)), u32(max_n_q(p) * PACK_GQA), u32(index)
    tiles, every = u32((rows + u32(BLOCK_Q - 1)) // u32(BLOCK_Q)), u32(heads * num_entries(p))
    if IS_PACKED:
        tiles = u32(num_q_tiles(p, BLOCK_Q))
    if HAS_MASK or IS_PACKED:
        tile, head = tile_coord(index, tiles_before_lpt_tail(tiles), every, u32(p.heads_per_l2_group))
        if HAS_MASK:
            tile = u32(tiles - u32(1) - tile)
    else:
        whole = u32(rows // u32(BLOCK_Q))
        if index < u32(whole * every):
            head = u32(index // whole)
            tile = u32(index - head * whole)
        else:
            head = u32(index - whole * every)
            tile = whole
    at = q_tile_of_warp(p, head // heads, tile, BLOCK_Q)
    return i32(at.b), i32(head % heads * PACK_GQA), i32(at.tile * BLOCK_Q)

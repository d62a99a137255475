# parts: common/tiles common/fragment common/tile_order sm80/bwd_layout
# Which key tile a CTA of the backward pass takes.
#
# CTAs take work tiles from an atomic counter in the order in which they add to dQ. A CTA therefore only ever waits for
# a CTA that is resident. p.heads_per_l2_group heads are worked on at the same time: the L2 cache holds their operands
# and dq_accum. The last key tiles come first, and a CTA starts with its first query tile: under a causal mask that is
# its diagonal, where it is the first to add. With a mask the last group of heads runs in the reverse order, longest
# first, so that all CTAs end at about the same time.


@device
def initial_work_tile(p, base):
    """Batch entry, key/value head and key tile of this CTA, and whether its query tiles come in descending order."""
    if thread() == 0:
        store_word(base + AT_TILE_COUNTER, i32(fetch_add(p.tile_counter, 1)))
    threads_sync()
    index, heads = u32(load_word(base + AT_TILE_COUNTER)), u32(u32(p.heads) // u32(GQA_GROUP))
    tiles, all_heads = u32(num_k_tiles(p, BLOCK_K)), u32(heads * u32(p.batch))
    group = u32(p.heads_per_l2_group)
    tile, head = tile_coord(index, tiles, all_heads, group)
    descending = HAS_MASK and all_heads > group and head >= u32(u32(all_heads - u32(1)) // group * group)
    number = i32(tile) if descending else i32(tiles - u32(1) - tile)
    return i32(head // heads), i32(head % heads), number, descending

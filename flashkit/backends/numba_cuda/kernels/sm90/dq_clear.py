# Clearing the sums of dQ ahead of those who add to them, where that is in no order: those of the first heads are
# cleared by bwd_preprocess(), then some tiles come with each item, by the warp that takes it, so far ahead that hardly
# anybody waits. Tiles count as in the sums, so that a head of keys has `of_head` in a row. A head's count of those that
# are cleared stands behind the mark of its first tile.


@device
def clearing_of(p):
    """Tiles of a head of keys, tiles that come with an item, and tiles that bwd_preprocess() clears."""
    of_head, early = u32(tiles_along(p.n_q, BLOCK_Q) * GQA_GROUP), early_tiles(p)
    with_item = u32(u32(of_head + early - u32(1)) // early)
    return I(of_head), I(with_item), p.heads_per_l2_group * I(of_head) + 300 // CLUSTER_SIZE * I(with_item)


@device
def count_of_cleared(p, b, head):
    return dq_semaphore_of(p, b, head * GQA_GROUP, 0) + 4


@device
def clear_ahead(p, index):
    """By a warp that has taken item `index`; blocks that share it clear in turn."""
    of_head, with_item, before = clearing_of(p)
    heads, lane = i32(p.heads // GQA_GROUP), opaque(thread() % 32)
    first = before + index * with_item
    where, end = first + rank_of_block(), min(first + with_item, of_head * heads * p.batch)
    while where < end:
        target = p.dq_accum.data + where * BYTES_SUMS + 16 * I(lane)
        for i in range(i32(BYTES_SUMS // 512)):
            store_vec(target + 512 * i, ZEROS)
        fence_proxies()
        lanes_sync()
        if lane == 0:
            head = i32(u32(where) // u32(of_head))
            add_after(count_of_cleared(p, i32(u32(head) // u32(heads)), i32(u32(head) % u32(heads))), 1)
        where += CLUSTER_SIZE


@device
def await_cleared(p, at):
    """Until all tiles of an item's head are cleared."""
    of_head, _, before = clearing_of(p)
    end = (I(at[0]) * (p.heads // GQA_GROUP) + at[1] + 1) * of_head - before
    need, count = min(end, of_head), count_of_cleared(p, at[0], at[1])
    while I(load_acquired(count)) < need:
        pass
    fence_proxies()

# dQ in global memory: dq_accum, float32 sums of each query tile, to which CTAs add in any order. bwd_preprocess clears
# those of the heads that come first; the scheduler warps clear the others, some with each work tile and so far ahead
# that a CTA hardly ever waits.
#
# Query tiles are numbered as they lie in dq_accum, so those of a key/value head follow one another.
#
# dq_semaphore has two words for each query tile, at these offsets in bytes: 1 if the tile has non-finite rows; and, of
# the first query tile of a key/value head, how many of the head's are cleared.

SEMAPHORE_FLAGS, SEMAPHORE_CLEARED = 0, 4


@device
def dq_semaphore(p, b, h, tile):
    return number_address(p.dq_semaphore, I(b), I(h), I(tile))


@device
def dq_accum_at(p, index, offset):
    """From byte `offset` of a query tile on. index: of the tile among all."""
    return p.dq_accum.data + I(index) * BYTES_DQ + offset


@device
def clearing_plan(p):
    """Query tiles of a key/value head, those cleared with a work tile, and those that bwd_preprocess clears."""
    of_head, work_tiles = u32(tiles_of_queries(p) * GQA_GROUP), key_tiles_before_lpt_tail(p)
    with_work_tile = u32(u32(of_head + work_tiles - u32(1)) // work_tiles)
    before = p.heads_per_l2_group * I(of_head) + 300 // CLUSTER_SIZE * I(with_work_tile)
    return I(of_head), I(with_work_tile), before


@device
def cleared_count(p, b, head):
    return dq_semaphore(p, b, head * GQA_GROUP, 0) + SEMAPHORE_CLEARED


@device
def clear_dq_ahead(p, work_tile_index):
    """By the scheduler warp; the CTAs of a cluster alternate."""
    of_head, with_work_tile, before = clearing_plan(p)
    heads, lane = i32(p.heads // GQA_GROUP), opaque(thread() % 32)
    first = before + work_tile_index * with_work_tile
    index, end = first + cta_rank(), min(first + with_work_tile, of_head * heads * p.batch)
    while index < end:
        target = dq_accum_at(p, index, 16 * I(lane))
        for i in range(i32(BYTES_DQ // 512)):
            store_vec(target + 512 * i, ZEROS)
        fence_proxies()
        lanes_sync()
        if lane == 0:
            bh = i32(u32(index) // u32(of_head))
            red_add_release(cleared_count(p, i32(u32(bh) // u32(heads)), i32(u32(bh) % u32(heads))), 1)
        index += CLUSTER_SIZE


@device
def wait_until_cleared(p, at):
    """Until dq_accum of a work tile's head is cleared."""
    of_head, _, before = clearing_plan(p)
    end = (I(at[0]) * (p.heads // GQA_GROUP) + at[1] + 1) * of_head - before
    need, count = min(end, of_head), cleared_count(p, at[0], at[1])
    while I(load_acquire(count)) < need:
        pass
    fence_proxies()

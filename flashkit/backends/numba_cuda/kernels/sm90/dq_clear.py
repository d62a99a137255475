# Clearing dq_accum where the order of additions is arbitrary. bwd_preprocess clears the query tiles of the heads that
# come first; the scheduler warps clear the others, some with each work tile and so far ahead that a CTA hardly ever
# waits.
#
# Query tiles are numbered as they lie in dq_accum, so those of a key/value head follow one another. How many of a
# key/value head are cleared is counted in the semaphore of its first query tile, whose bits are unused then.


@device
def clearing_plan(p):
    """Query tiles of a key/value head, those cleared with a work tile, and those that bwd_preprocess clears."""
    of_head, work_tiles = u32(tiles_of_queries(p) * GQA_GROUP), key_tiles_before_lpt_tail(p)
    with_work_tile = u32(u32(of_head + work_tiles - u32(1)) // work_tiles)
    before = p.heads_per_l2_group * I(of_head) + 300 // CLUSTER_SIZE * I(with_work_tile)
    return I(of_head), I(with_work_tile), before


@device
def cleared_count(p, b, head):
    return number_address(p.dq_semaphore, I(b), I(head * GQA_GROUP), I(0)) + SEMAPHORE_ADDED


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

# parts: common/tile_order
# Which work tile each CTA of Hopper's persistent backward kernel takes, and in which order.


@device
def tiles_of_queries(p):
    """Of a head."""
    return ceil_div(p.n_q, BLOCK_Q)


@device
def tiles_of_keys(p):
    return ceil_div(p.n_k, BLOCK_K)


@device
def query_tile_index(p, b, h, tile):
    """The index of a query tile among all, as they lie in dq_accum."""
    return i32((b * i32(p.heads) + h) * tiles_of_queries(p) + tile)


@device
def num_bwd_work_tiles(p):
    return tiles_of_keys(p) * i32(p.heads // GQA_GROUP * p.batch)


@device
def key_tiles_before_lpt_tail(p):
    return tiles_before_lpt_tail(u32(tiles_of_keys(p)))


@device
def bwd_work_tile(p, index):
    """Under a mask key tiles ascend, of p.heads_per_l2_group heads at a time: under a causal mask the first have most
    to do. The last quarter of each head's is the LPT tail, which evens out the CTAs' ends.
    """
    heads = u32(u32(p.heads) // u32(GQA_GROUP))
    tile, bh = tile_coord(
        u32(index), key_tiles_before_lpt_tail(p), u32(heads * p.batch), u32(p.heads_per_l2_group)
    )  # fmt: skip
    return i32(bh // heads), i32(bh % heads), i32(tile * BLOCK_K)


@device
def claim(p, base, number):
    """The index of work tile `number` of the CTA, by one lane. The first CTA of a cluster claims for both. A word may
    be overwritten two work tiles later: the peer CTA has read it by then, as it has sent dS of query tiles that the
    first CTA could not complete without.
    """
    barrier, word = full_barrier(base + AT_CLAIMED, number, 2), base + AT_CLAIMED_INDEX + 4 * stage_of(number, 2)
    if cta_rank() == 0:
        index = i32(fetch_add(p.tile_counter, 1))
        if CLUSTER_SIZE > 1:
            dsmem_store(mapa(word, 1), index, mapa(barrier, 1))
        return index
    mbarrier_arrive_expect_tx(barrier, 4)
    consumer_wait(base + AT_CLAIMED, number, 2)
    return load_word(word)


@device
def next_work_tile(p, base, number):
    """The same, by a warp. All but the first are claimed late, so that the last ones are shared evenly."""
    if number > 0:
        mbarrier_wait_backoff(base + AT_CLAIM, u32(number - u32(1)) & 1, BACKOFF_NS)
    index = i32(0)
    if thread() % 32 == 0:
        index = claim(p, base, number)
    return uniform(index)


@device
def reset_tile_scheduler(p):
    """By one lane: the last CTA to end leaves the counters as the next launch expects them."""
    if fetch_add(p.tile_counter + 4, 1) == blocks() - 1:
        store(np.int32, p.tile_counter, 0, i32(0))
        store(np.int32, p.tile_counter, 1, i32(0))

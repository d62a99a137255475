# parts: sm90/pipeline sm90/bwd_layout sm90/bwd_producer
# The scheduler warp of Hopper's backward pass: claims work tiles, lists the query tiles that see them, loads their K.
# It runs ahead of the producer, as classifying 32 query tiles may take as long as the products of a few.


@device
def bwd_work_tile(p, index, tiles):
    """Under a mask key tiles ascend, of p.heads_per_l2_group heads at a time: under a causal mask the first have most
    to do. The last quarter of each head's is the LPT tail, which evens out the CTAs' ends.
    """
    heads = u32(u32(p.heads) // u32(GQA_GROUP))
    tile, bh = tile_coord(
        u32(index), tiles_before_lpt_tail(u32(tiles)), u32(heads * p.batch), u32(p.heads_per_l2_group)
    )  # fmt: skip
    return i32(bh // heads), i32(bh % heads), i32(tile * BLOCK_K)


@device
def next_work_tile(p, base, number):
    """Claims one, by a warp. All but the first are claimed late, so that the last ones are shared evenly."""
    if number > 0:
        mbarrier_wait_backoff(base + AT_CLAIM, u32(number - u32(1)) & 1, BACKOFF_NS)
    index = i32(0)
    if thread() % 32 == 0:
        index = i32(fetch_add(p.tile_counter, 1))
    return uniform(index)


@device
def state_of_keys(p, b, h, n_k, row0, row1, k0, k1):
    """A tile that reaches past the last key is PARTIAL."""
    if k0 >= n_k:
        return i32(EMPTY)
    state = i32(tile_state(p, b, h, seq_info(p, I(b)).q_position, row0, row1, k0, i32(min(k1, n_k))))
    return i32(PARTIAL) if state == FULL and k1 > n_k else state


@device
def look(p, coord, n_k, tiles, tile, many):
    """The states of query tiles `tile` ... `tile` + many - 1 together. coord: batch entry, query head, first key."""
    b, h, k0 = coord
    row0 = i32(tile * BLOCK_Q)
    row1 = i32(min(row0 + many * BLOCK_Q, i32(p.n_q)))
    every, states = state_of_keys(p, b, h, n_k, row0, row1, k0, i32(k0 + BLOCK_K)), i32(0)
    for g in range(MMA_WARPGROUPS):
        state = every
        if every == PARTIAL and many == 1:
            first = i32(k0 + WARPGROUP_KEYS * g)
            state = state_of_keys(p, b, h, n_k, row0, row1, first, i32(first + WARPGROUP_KEYS))
        states = i32(states | state << 2 * g)
    return states


@device
def load_k(base, at, number):
    """A work tile and its K, by a warp."""
    buffer = stage_of(number, KEY_BUFFERS)
    slot, full = work_tile_slot(base, number), base + AT_K_PIPE + 8 * buffer
    producer_acquire(base + AT_K_PIPE, number, KEY_BUFFERS)
    if elect_one():
        store_word(slot, at[0])
        store_word(slot + 4, at[1])
        store_word(slot + 8, at[2])
        mbarrier_arrive_expect_tx(full, BYTES_K)
        load_tile(base + AT_K + buffer * BYTES_K, map_address("map_k"), CHUNKS, BLOCK_K, at[2], at[1], at[0], full)


@device
def scheduler(p, base):
    leader, tiles, tiles_k = thread() % 32 == 0, tiles_of_queries(p), i32((p.n_k + BLOCK_K - 1) // BLOCK_K)
    work_tiles = tiles_k * i32(p.heads // GQA_GROUP * p.batch)
    c, number = u32(0), u32(0)  # lists and work tiles so far
    while True:
        index = next_work_tile(p, base, number)
        if index >= work_tiles:
            break
        at = bwd_work_tile(p, index, tiles_k)
        n_k = i32(seq_info(p, I(at[0])).n_k)
        if KEY_BUFFERS > 1:
            load_k(base, at, number)
        first, member, place = YES, i32(0), i32(0)
        while member < GQA_GROUP:
            h = i32(at[1] * GQA_GROUP + member)
            tile_list = acquire_list(base, c)
            count, place, _ = fill(p, c, tile_list + LIST_HEADER, (at[0], h, at[2]), n_k, place, tiles)
            ends = place >= tiles
            if leader:
                store_word(tile_list + LIST_B, at[0])
                store_word(tile_list + LIST_HEAD, h)
                store_word(tile_list + LIST_K0, at[2])
                store_word(tile_list + LIST_COUNT, count)
                store_word(tile_list + LIST_ENDS, 1 if ends and member == GQA_GROUP - 1 else 0)
            commit_list(base, c)
            c = u32(c + 1)
            if ends:
                place, member = i32(0), i32(member + 1)
            if KEY_BUFFERS == 1 and first:
                load_k(base, at, number)
            first = NO
        number = u32(number + 1)
    tile_list = acquire_list(base, c)  # END to the producer and the consumers
    if leader:
        store_word(tile_list + LIST_B, END)
    commit_list(base, c)
    producer_acquire(base + AT_K_PIPE, number, KEY_BUFFERS)
    if leader:
        store_word(work_tile_slot(base, number), END)
        mbarrier_arrive(full_barrier(base + AT_K_PIPE, number, KEY_BUFFERS))
        reset_tile_counter(p)

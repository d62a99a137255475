# parts: sm90/pipeline sm90/bwd_layout
# The producer warp of Hopper's backward pass: loads Q and dO of each query tile with their rows' log-sum-exps and
# deltas, and V with the first tile of a work tile; and the scheduler warp.


@device
def load_tile(target, tensor, many, rows, token, head, b, barrier):
    """Chunks of 64 columns by TMA."""
    for c in range(many):
        tma_load(target + c * rows * CHUNK_ROW, tensor, barrier, 64 * c, token, 0, head, b)


@device
def load_v(base, tile_list, number, head, b):
    producer_acquire(base + AT_V_PIPE, number, 1)
    mbarrier_arrive_expect_tx(base + AT_V_PIPE, BYTES_V)
    key = load_word(tile_list + LIST_K0)
    load_tile(base + AT_V, map_address("map_v"), CHUNKS_V, BLOCK_K, key, head, b, base + AT_V_PIPE)


@device
def load_q_and_dout(p, base, tile_list, number, n, first, entry, h, last):
    """Query tile n, an entry of the list, of query head h, by one thread. first, last: of work tile `number`."""
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    q_full, dout_full = base + AT_Q_PIPE + 8 * stage, base + AT_DOUT_PIPE + 8 * dout_stage
    b, tile = load_word(tile_list + LIST_B), i32(entry >> 8)
    row0, index = i32(tile * BLOCK_Q), i32((b * i32(p.heads) + h) * tiles_of_queries(p) + tile)
    stats = I(index) * BYTES_ROW_STATS
    producer_acquire(base + AT_Q_PIPE, n, STAGES)
    tile_desc = tile_desc_slot(base, n)
    store_word(tile_desc, entry | (LAST_TILE if last else 0))
    store_word(tile_desc + DESC_HEAD, h)
    store_word(tile_desc + DESC_INDEX, index)
    mbarrier_arrive_expect_tx(q_full, BYTES_Q + BYTES_ROW_STATS)
    load_tile(base + AT_Q + stage * BYTES_Q, map_address("map_q"), CHUNKS, BLOCK_Q, row0, h, b, q_full)
    load_bulk(base + AT_LSE + stage * BYTES_ROW_STATS, p.bwd_lse.data + stats, BYTES_ROW_STATS, q_full)
    if first:
        load_v(base, tile_list, number, i32(u32(h) // u32(GQA_GROUP)), b)
    producer_acquire(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    mbarrier_arrive_expect_tx(dout_full, BYTES_DOUT + BYTES_ROW_STATS)
    dout = base + AT_DOUT + dout_stage * BYTES_DOUT
    load_tile(dout, map_address("map_dout"), CHUNKS_V, BLOCK_Q, row0, h, b, dout_full)
    load_bulk(base + AT_DELTA + dout_stage * BYTES_ROW_STATS, p.delta.data + stats, BYTES_ROW_STATS, dout_full)


@device
def producer(p, base):
    """By one thread. A query tile is held back until it is known whether it is the work tile's last."""
    c, n, number = u32(0), u32(0), u32(0)  # lists, query tiles, work tiles so far
    first, held, held_head = YES, i32(0), i32(0)
    while True:
        consumer_wait(base + AT_LIST_PIPE, c, NUM_LISTS)
        tile_list = list_of(base, c)
        if load_word(tile_list + LIST_B) == END:
            break
        h, count, i = load_word(tile_list + LIST_HEAD), load_word(tile_list + LIST_COUNT), i32(0)
        claim_at = i32(max(count - CLAIM_AHEAD, 0) if load_word(tile_list + LIST_ENDS) != 0 else -1)
        while i < count:
            if i == claim_at:
                mbarrier_arrive(base + AT_CLAIM)
            if held != 0:
                load_q_and_dout(p, base, tile_list, number, n, first, held, held_head, NO)
                first, n = NO, u32(n + 1)
            held, held_head, i = load_word(tile_list + LIST_HEADER + 4 * i), h, i32(i + 1)
        if claim_at >= 0:
            # Consumers expect a query tile in each work tile: where there is none, one whose pairs are all masked.
            if held == 0:
                held, held_head = i32(PARTIAL * 5), h
            load_q_and_dout(p, base, tile_list, number, n, first, held, held_head, YES)
            first, held, n, number = YES, i32(0), u32(n + 1), u32(number + 1)
            if claim_at == count:
                mbarrier_arrive(base + AT_CLAIM)
        mbarrier_arrive(empty_barrier(base + AT_LIST_PIPE, c, NUM_LISTS))
        c = u32(c + 1)


# --- the scheduler warp -----------------------------------------------------------------------------------------------
#
# It claims work tiles, lists the query tiles that see them, and loads their K. It runs ahead of the producer, as
# classifying 32 query tiles may take as long as the products of a few.


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

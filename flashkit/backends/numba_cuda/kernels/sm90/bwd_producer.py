# The producer warp of Hopper's backward pass: loads Q and dO of each query tile with their rows' log-sum-exps and
# deltas, and V with the first tile of a work tile.


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

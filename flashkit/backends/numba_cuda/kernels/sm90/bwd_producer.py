# The producer warp of Hopper's backward pass: loads Q and dO of each query tile with their rows' log-sum-exps and
# deltas, and V with the first tile of a work tile.


@device
def load_q_and_dout(p, base, tile_list, number, n, nonfinite_tiles, first, entry, h, last):
    """Query tile n, an entry of the list, of query head h. Returns how many tiles had to be cleared. first, last: of
    work tile `number`.
    """
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    q_full, dout_full = base + AT_Q_PIPE + 8 * stage, base + AT_DOUT_PIPE + 8 * dout_stage
    q, dout = base + AT_Q + stage * BYTES_Q, base + AT_DOUT + dout_stage * BYTES_DOUT
    lse = base + AT_LSE + stage * BYTES_ROW_STATS
    # Rows that are not finite are cleared between loading and committing the stages.
    nonfinite = CLEARS_ROWS and entry & NONFINITE_ROWS != 0
    if elect_one():
        q_loaded, dout_loaded = (base + AT_ROWS_LOADED, base + AT_ROWS_LOADED) if nonfinite else (q_full, dout_full)
        b, tile = load_word(tile_list + LIST_B), i32(entry >> 8)
        row0, index = i32(tile * BLOCK_Q), query_tile_index(p, b, h, tile)
        stats = I(index) * BYTES_ROW_STATS
        producer_acquire(base + AT_Q_PIPE, n, STAGES)
        tile_desc = tile_desc_slot(base, n)
        store_word(tile_desc, entry | (LAST_TILE if last else 0))
        store_word(tile_desc + DESC_HEAD, h)
        store_word(tile_desc + DESC_INDEX, index)
        more = BYTES_DOUT + BYTES_ROW_STATS if nonfinite else 0
        mbarrier_arrive_expect_tx(q_loaded, BYTES_Q + BYTES_ROW_STATS + more)
        load_tile(q, map_address("map_q"), CHUNKS, BLOCK_Q, row0, h, b, q_loaded, 0)
        load_bulk(lse, p.bwd_lse.data + stats, BYTES_ROW_STATS, q_loaded)
        if first:
            load_v(base, (b, i32(u32(h) // u32(GQA_GROUP)), load_word(tile_list + LIST_K0)), number)
        producer_acquire(base + AT_DOUT_PIPE, n, DOUT_STAGES)
        if not nonfinite:
            mbarrier_arrive_expect_tx(dout_loaded, BYTES_DOUT + BYTES_ROW_STATS)
        load_tile(dout, map_address("map_dout"), CHUNKS_V, BLOCK_Q, row0, h, b, dout_loaded, 0)
        load_bulk(base + AT_DELTA + dout_stage * BYTES_ROW_STATS, p.delta.data + stats, BYTES_ROW_STATS, dout_loaded)
    if nonfinite:
        lanes_sync()
        mbarrier_wait(base + AT_ROWS_LOADED, u32(nonfinite_tiles) & 1)
        nonfinite_tiles = u32(nonfinite_tiles + 1)
        lane = opaque(thread() % 32)
        clear_nonfinite_rows(q, lse, CHUNKS, lane)
        clear_nonfinite_rows(dout, lse, CHUNKS_V, lane)
        fence_proxy_async()
        lanes_sync()
        if elect_one():
            mbarrier_arrive(q_full)
            mbarrier_arrive(dout_full)
    return u32(nonfinite_tiles)


@device
def producer(p, base):
    """A query tile is held back until it is known whether it is the work tile's last."""
    c, n, number, nonfinite_tiles = u32(0), u32(0), u32(0), u32(0)  # lists, query tiles, work tiles so far
    first, held, held_head = YES, i32(0), i32(0)
    while True:
        consumer_wait(base + AT_LIST_PIPE, c, NUM_LISTS)
        tile_list = list_of(base, c)
        if load_word(tile_list + LIST_B) == END:
            break
        h, count, i = load_word(tile_list + LIST_HEAD), load_word(tile_list + LIST_COUNT), i32(0)
        claim_at = i32(max(count - CLAIM_AHEAD, 0) if load_word(tile_list + LIST_ENDS) != 0 else -1)
        while i < count:
            if i == claim_at and elect_one():
                mbarrier_arrive(base + AT_CLAIM)
            if held != 0:
                nonfinite_tiles = load_q_and_dout(
                    p, base, tile_list, number, n, nonfinite_tiles, first, held, held_head, NO
                )  # fmt: skip
                first, n = NO, u32(n + 1)
            held, held_head, i = load_word(tile_list + LIST_HEADER + 4 * i), h, i32(i + 1)
        if claim_at >= 0:
            # Consumers expect a query tile in each work tile: where there is none, one whose pairs are all masked. Its
            # rows may be non-finite.
            if held == 0:
                held, held_head = i32(PARTIAL * 5 | (NONFINITE_ROWS if CLEARS_ROWS else 0)), h
            nonfinite_tiles = load_q_and_dout(
                p, base, tile_list, number, n, nonfinite_tiles, first, held, held_head, YES
            )  # fmt: skip
            first, held, n, number = YES, i32(0), u32(n + 1), u32(number + 1)
            if claim_at == count and elect_one():
                mbarrier_arrive(base + AT_CLAIM)
        lanes_sync()
        if elect_one():
            mbarrier_arrive(empty_barrier(base + AT_LIST_PIPE, c, NUM_LISTS))
        c = u32(c + 1)

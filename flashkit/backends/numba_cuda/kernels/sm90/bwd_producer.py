# The producer warp of Hopper's backward pass: loads Q and dO of each query tile with their rows' log-sum-exps and
# deltas, and V with the first tile of a work tile.

# --- non-finite rows and keys -----------------------------------------------------------------------------------------
#
# Rows and keys of Hopper's backward pass that are not finite, or past the end, are cleared in shared memory before they
# are multiplied (bwd_layout, CLEARS_KEYS).


@device
def still_finite(v, finite, args):
    """Whether 16 bytes of elements are, too: the exponent of a non-finite one is all ones."""
    row, lane = args
    vec, ones = load_vec(row + (v ^ lane & 7) * VEC_BYTES), u32(0x7C00 if STORAGE == "float16" else 0x7F80)
    for i in range(4):
        finite = finite & (vec[i] & ones != ones) & (vec[i] >> u32(16) & ones != ones)
    return finite


@device
def nonfinite_keys(tile, many, word, lane):
    """A bit for each of 32 keys; a lane reads one."""
    row, finite = i32(32 * word + lane), YES
    for c in range(i32(many)):
        finite = repeat(still_finite, 8, finite, (u32(tile + (c * CTA_KEYS + row) * CHUNK_ROW), lane))
    return vote(not finite)


@device
def clear_row(tile, row, rows, many, lane):
    """An eighth of a row, by each of eight lanes."""
    for c in range(many):
        store_zeros(tile + (c * rows + row) * CHUNK_ROW + lane % 8 * VEC_BYTES, 0)


@device
def clear_nonfinite_keys(tile, many, existing, bits):
    """By a warp, in a tile of keys of `many` chunks: clears those that are not finite, and those past the first
    `existing`. bits: where a bit for each of the former goes, or 0.
    """
    lane = opaque(thread() % 32)
    for word in range(i32(NONFINITE_WORDS)):
        nonfinite = u32(0)
        if MAY_HIDE:
            nonfinite = nonfinite_keys(tile, many, word, lane)
        if bits != 0 and lane == 0:
            store_word(bits + 4 * word, i32(nonfinite))
        if nonfinite != 0 or existing < 32 * word + 32:
            for row in range(i32(32 * word + lane // 8), i32(32 * word + 32), i32(4)):
                if nonfinite >> u32(row % 32) & u32(1) != 0 or row >= existing:
                    clear_row(tile, row, CTA_KEYS, many, lane)
    fence_proxy_async()
    lanes_sync()


@device
def clear_nonfinite_rows(tile, lse, many, lane):
    """By a warp, in a tile of Q or dO: the rows whose log-sum-exp, from that address on, is not finite."""
    for row in range(i32(lane // 8), i32(BLOCK_Q), i32(4)):
        if not is_finite(load_float(lse + 4 * row)):
            clear_row(tile, row, BLOCK_Q, many, lane)


# --- K and V ----------------------------------------------------------------------------------------------------------
#
# Where K and V of a work tile come from: dense tensors, by TMA.


@device
def load_tile(target, tensor, many, rows, token, head, b, barrier, column):
    """Chunks of columns from `column` on."""
    for c in range(many):
        tma_load(target + c * rows * CHUNK_ROW, tensor, barrier, column + 64 * c, token, 0, head, b)


@device
def load_k(base, at, number):
    """A work tile and K of the CTA's keys. Keys that are to be cleared arrive at a barrier of their own first."""
    buffer = stage_of(number, KEY_BUFFERS)
    loaded = base + (AT_K_LOADED if CLEARS_KEYS else AT_K_PIPE) + 8 * buffer
    producer_acquire(base + AT_K_PIPE, number, KEY_BUFFERS)
    if elect_one():
        slot = work_tile_slot(base, number)
        store_word(slot, at[0])
        store_word(slot + 4, at[1])
        store_word(slot + 8, at[2])
        mbarrier_arrive_expect_tx(loaded, BYTES_K)
        tile = base + AT_K + buffer * BYTES_K
        load_tile(tile, map_address("map_k"), CHUNKS, CTA_KEYS, first_cta_key(at), at[1], at[0], loaded, 0)


@device
def clear_nonfinite_k(p, base, at, number):
    buffer = stage_of(number, KEY_BUFFERS)
    mbarrier_wait(base + AT_K_LOADED + 8 * buffer, u32(number) // u32(KEY_BUFFERS) & 1)
    existing = i32(i32(seq_info(p, I(at[0])).n_k) - first_cta_key(at))
    clear_nonfinite_keys(base + AT_K + buffer * BYTES_K, CHUNKS, existing, nonfinite_keys_slot(base, number))
    mbarrier_arrive_once(full_barrier(base + AT_K_PIPE, number, KEY_BUFFERS))


@device
def load_peer_k(p, base, at, number):
    """K of the peer CTA's keys, in the columns of dQ that this CTA computes."""
    loaded, rank = base + (AT_PEER_K_LOADED if CLEARS_KEYS else AT_PEER_K_PIPE), cta_rank()
    first = i32(at[2] + CTA_KEYS * (1 - rank))
    producer_acquire(base + AT_PEER_K_PIPE, number, 1)
    if elect_one():
        mbarrier_arrive_expect_tx(loaded, BYTES_PEER_K)
        tile, column = base + AT_PEER_K, 64 * DQ_CHUNKS * rank
        load_tile(tile, map_address("map_k"), DQ_CHUNKS, CTA_KEYS, first, at[1], at[0], loaded, column)
    if CLEARS_KEYS:
        mbarrier_wait(loaded, u32(number) & 1)
        clear_nonfinite_keys(base + AT_PEER_K, DQ_CHUNKS, i32(i32(seq_info(p, I(at[0])).n_k) - first), u32(0))
        mbarrier_arrive_once(base + AT_PEER_K_PIPE)


@device
def load_v(base, at, number):
    """V of the CTA's keys, by one thread. Nothing is cleared: compute_ds drops what masked keys give."""
    full = base + AT_V_PIPE
    producer_acquire(full, number, 1)
    mbarrier_arrive_expect_tx(full, BYTES_V)
    load_tile(base + AT_V, map_address("map_v"), CHUNKS_V, CTA_KEYS, first_cta_key(at), at[1], at[0], full, 0)


# --- Q, dO and V ------------------------------------------------------------------------------------------------------


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

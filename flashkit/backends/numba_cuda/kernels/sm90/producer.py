# parts: sm90/pipeline
# The producer: one thread issues TMA loads of K, V and Q for every K/V tile of every work tile that the scheduler
# lists.

# --- the tile scheduler -----------------------------------------------------------------------------------------------
#
# The tile scheduler of the forward pass: a persistent grid takes work tiles from an atomic counter. A warp of its own
# claims them and lists the K/V tiles that the mask leaves of each. common/fragment has their number and order.


@device
def kv_tile_state(p, work, n_k, row0, row1, tile, count):
    """State of rows row0 ... row1 - 1 and K/V tiles tile ... tile + count - 1. A ragged tile is PARTIAL."""
    b, h, _ = work
    k0, whole = i32(tile * BLOCK_K), i32((tile + count) * BLOCK_K)
    state = i32(tile_state(p, b, h, seq_info(p, b).q_position, row0, row1, k0, i32(min(whole, n_k))))
    return i32(PARTIAL) if state == FULL and whole > n_k else state


@device
def kv_tile_states(p, work, n_k, tile, count):
    """States of the warp groups' rows in K/V tiles tile ... tile + count - 1, two bits each."""
    row0 = work[2]
    end = i32(min(row0 + BLOCK_Q, i32(p.n_q)))
    every, states = kv_tile_state(p, work, n_k, row0, end, tile, count), i32(0)
    for wg in range(MMA_WARPGROUPS):
        first = i32(row0 + 64 * wg)
        state = every if first < end else i32(EMPTY)
        if HAS_MASK and state == PARTIAL and count == 1:
            state = kv_tile_state(p, work, n_k, first, i32(min(first + 64, end)), tile, count)
        states = i32(states | state << 2 * wg)
    return states


@device
def look(p, work, n_k, tiles, index, count):
    """The states of tiles at places index ... of the way over them, the last keys first."""
    return kv_tile_states(p, work, n_k, i32(tiles - index - count), count)


@device
def claims_late(tiles):
    """Whether the next work tile is claimed when this one nears its end, so that the last ones are shared evenly. Short
    sequences, of so many K/V tiles, leave no time for that.
    """
    return tiles > 16


@device
def initial_work_tile():
    return I(block())


@device
def claim_work_tile(p):
    """Claim the next one, by a warp: its index less the number of CTAs, in the first lane."""
    return count_if(p.tile_counter, i32(thread() % 32 == 0))


@device
def work_tile_index(claimed):
    return I(uniform(claimed)) + blocks()


@device
def write_list(p, to, work, count, first_bits, tiles, ends):
    store_word(to, work[0])
    store_word(to + 4, work[1])
    store_word(to + 8, work[2])
    store_word(to + 12, 1 if first_bits != 0 and count == 0 else count)
    store_word(to + 16, tiles - 1)
    store_word(to + 20, first_bits)
    store_word(to + 24, 1 if ends else 0)
    if count == 0:
        store_word(to + LIST_HEADER, tiles - 1 << 8)  # tile 0


@device
def scheduler_warp(p, base):
    """It runs ahead of the producer: classifying tiles is a latency-bound chain, and may take as long as the products
    of a tile.
    """
    leader, count, index = thread() % 32 == 0, num_work_tiles(p), initial_work_tile()
    c, number = u32(0), u32(0)  # lists, late claims so far
    while index < count:
        work = work_tile(p, index)
        n_k = i32(seq_info(p, work[0]).n_k)
        tiles = i32((n_k + BLOCK_K - 1) // BLOCK_K)
        late, claimed = claims_late(tiles), i32(0)
        if not late:
            claimed = claim_work_tile(p)  # it arrives while the tiles are listed
        next_tile, first = i32(0), True
        while first or next_tile < tiles:
            to = acquire_list(base, c)
            entries, next_tile, seen = fill(p, c, to + LIST_HEADER, work, n_k, next_tile, tiles)
            # A warp group without any visible key still gets one tile, as PARTIAL with every pair masked: rows without
            # keys need no code of their own.
            first_bits = FIRST_TILE if first else 0
            if first:
                for wg in range(MMA_WARPGROUPS):
                    if seen >> 2 * wg & 3 == EMPTY:
                        first_bits |= PARTIAL << 2 * wg
            if leader:
                write_list(p, to, work, entries, first_bits, tiles, next_tile >= tiles)
            commit_list(base, c)
            first, c = False, u32(c + 1)
        if late:
            mbarrier_wait_backoff(base + AT_CLAIM, number & 1, BACKOFF_NS)
            number = u32(number + 1)
            claimed = claim_work_tile(p)
        index = work_tile_index(claimed)
    to = acquire_list(base, c)
    if leader:
        store_word(to, END)
    commit_list(base, c)
    if leader:
        reset_tile_counter(p)


# --- the producer -----------------------------------------------------------------------------------------------------


@device
def load_v(base, n, tile, head, b):
    producer_acquire(base + AT_V_PIPE, n, STAGES)
    stage = stage_of(n, STAGES)
    full = base + AT_V_PIPE + 8 * stage
    mbarrier_arrive_expect_tx(full, BYTES_V)
    for c in range(chunks_v):
        target = base + AT_V + stage * BYTES_V + c * BLOCK_K * CHUNK_ROW
        tma_load(target, map_address("map_v"), full, 64 * c, i32(tile * BLOCK_K), 0, head, b)


@device
def load_k(base, n, tile_desc, tile, head, b):
    producer_acquire(base + AT_K_PIPE, n, STAGES)
    stage = stage_of(n, STAGES)
    full = base + AT_K_PIPE + 8 * stage
    store_word(base + AT_TILE_DESCS + 4 * stage, tile_desc)
    mbarrier_arrive_expect_tx(full, BYTES_K)
    for c in range(chunks_q):
        target = base + AT_K + stage * BYTES_K + c * BLOCK_K * CHUNK_ROW
        tma_load(target, map_address("map_k"), full, 64 * c, i32(tile * BLOCK_K), 0, head, b)


@device
def load_q(base, number, work):
    """Write a work tile to its slot, and load its rows."""
    b, h, row0 = work
    producer_acquire(base + AT_Q_PIPE, number, Q_BUFFERS)
    buffer = stage_of(number, Q_BUFFERS)
    slot, full = base + AT_WORK_TILES + 12 * buffer, base + AT_Q_PIPE + 8 * buffer
    store_word(slot, b)
    store_word(slot + 4, h)
    store_word(slot + 8, row0)
    mbarrier_arrive_expect_tx(full, MMA_WARPGROUPS * 64 * CHUNK_ROW * chunks_q)
    for wg in range(MMA_WARPGROUPS):
        for c in range(chunks_q):
            target = base + (buffer * MMA_WARPGROUPS + wg) * BYTES_Q + c * 64 * CHUNK_ROW
            tma_load(target, map_address("map_q"), full, 64 * c, i32(row0 + 64 * wg), 0, h, b)


@device
def producer(p, base):
    """V follows K one tile later, as consumers need it. Q follows the first K of its work tile: consumers begin with a
    K tile before they release the previous Q, so this order cannot deadlock.
    """
    c, n, number = u32(0), u32(0), u32(0)  # lists, K/V tiles, work tiles so far
    tile, head, b = i32(0), i32(0), i32(0)  # of the V to come
    while True:
        consumer_wait(base + AT_LIST_PIPE, c, NUM_LISTS)
        at = list_of(base, c)
        work = load_word(at), load_word(at + 4), load_word(at + 8)
        count, last, first_bits, ends = load_word(at + 12), load_word(at + 16), load_word(at + 20), load_word(at + 24)
        if work[0] == END:
            break
        claim_at = i32(max(count - CLAIM_AHEAD, 0) if ends != 0 and claims_late(last + 1) else -1)
        if claim_at == count:
            mbarrier_arrive(base + AT_CLAIM)
        for i in range(count):
            if i == claim_at:
                mbarrier_arrive(base + AT_CLAIM)
            entry = load_word(at + LIST_HEADER + 4 * i)
            kv_tile = i32(last - (entry >> 8))
            load_k(base, n, kv_tile << 8 | entry & 63 | first_bits, kv_tile, work[1] // GQA_GROUP, work[0])
            if n > 0:
                load_v(base, n - 1, tile, head, b)
            tile, head, b, n = kv_tile, i32(work[1] // GQA_GROUP), work[0], u32(n + 1)
            if first_bits != 0:
                load_q(base, number, work)
                first_bits, number = i32(0), u32(number + 1)
        mbarrier_arrive(empty_barrier(base + AT_LIST_PIPE, c, NUM_LISTS))
        c = u32(c + 1)
    if n > 0:
        load_v(base, n - 1, tile, head, b)
    # END for the consumers and the store warp.
    producer_acquire(base + AT_K_PIPE, n, STAGES)
    store_word(tile_desc_slot(base, n), END)
    mbarrier_arrive(full_barrier(base + AT_K_PIPE, n, STAGES))
    producer_acquire(base + AT_Q_PIPE, number, Q_BUFFERS)
    store_word(work_tile_slot(base, number), END)
    mbarrier_arrive(full_barrier(base + AT_Q_PIPE, number, Q_BUFFERS))

# parts: sm90/tile_scheduler
# The producer: one thread issues TMA loads of K, V and Q for every K/V tile of every work tile that the scheduler
# lists.


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

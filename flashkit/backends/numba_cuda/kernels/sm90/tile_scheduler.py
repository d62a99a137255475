# parts: sm90/tile_lists
# Which work the blocks of the Hopper forward pass take, and its coming and going: the roles of warp group 0.
#
# An item is (batch entry, first of its heads, first of its rows).


# --- which tiles ------------------------------------------------------------------------------------------------------


@device
def state_of(p, item, n_k, row0, row1, tile, many):
    """State of rows row0 ... row1 - 1 and tiles of keys tile ... tile + many - 1; a tile that is not whole is
    PARTIAL.
    """
    b, h, _ = item
    k0, whole = i32(tile * BLOCK_K), i32((tile + many) * BLOCK_K)
    first, last, k1 = i32(row0 // PACK_GQA), i32((row1 + PACK_GQA - 1) // PACK_GQA), i32(min(whole, n_k))
    offset = offset_of(p, b)
    state = i32(tile_state(p, b, h, offset, first, last, k0, k1))
    if HAS_MASK:
        for other in range(1, PACK_GQA):
            if tile_state(p, b, i32(h + other), offset, first, last, k0, k1) != state:
                state = i32(PARTIAL)
    return i32(PARTIAL) if state == FULL and whole > n_k else state


@device
def states_of(p, item, n_k, tile, many):
    """States of the groups' rows and a tile of keys, two bits a group."""
    row0 = item[2]
    end = i32(min(row0 + BLOCK_Q, i32(p.n_q) * PACK_GQA))
    every, states = state_of(p, item, n_k, row0, end, tile, many), i32(0)
    for g in range(MMA_WARPGROUPS):
        first = i32(row0 + 64 * g)
        state = every if first < end else i32(EMPTY)
        if HAS_MASK and state == PARTIAL and many == 1:
            state = state_of(p, item, n_k, first, i32(min(first + 64, end)), tile, many)
        states = i32(states | state << 2 * g)
    return states


@device
def look(p, item, n_k, tiles, place, many):
    """The last keys come first."""
    return states_of(p, item, n_k, i32(tiles - place - many), many)


@device
def takes_late(p):
    """Whether the next item is taken not before the end of this one is near, so that the last ones are shared evenly:
    where they are long enough for it.
    """
    return p.n_k > 16 * BLOCK_K


@device
def find_items(p, base):
    """The finding warp, ahead of the one that loads, as classifying may take as long as a tile's products."""
    leader, late, items, index = thread() % 32 == 0, takes_late(p), num_work_tiles(p), I(block())
    c, number = u32(0), u32(0)  # lists, items so far
    while index < items:
        item = work_tile(p, index)
        n_k = i32(keys_of(p, item[0]))
        tiles = i32((n_k + BLOCK_K - 1) // BLOCK_K)
        place, first = i32(0), True
        while first or place < tiles:
            at = await_list(base, c)
            count, place, seen = fill(p, c, at + IN_LIST, item, n_k, place, tiles)
            # Groups that see nothing take a tile all the same, where everything is hidden from them.
            extra = FIRST if first else 0
            if first:
                for g in range(MMA_WARPGROUPS):
                    if seen >> 2 * g & 3 == EMPTY:
                        extra |= PARTIAL << 2 * g
            if leader:
                store_word(at, item[0])
                store_word(at + 4, item[1])
                store_word(at + 8, item[2])
                store_word(at + 12, 1 if first and count == 0 else count)
                store_word(at + 16, tiles - 1)
                store_word(at + 20, extra)
                store_word(at + 24, 1 if place >= tiles else 0)
                if count == 0:
                    store_word(at + IN_LIST, tiles - 1 << 8)  # tile 0
            hand_over(base, c)
            first, c = False, u32(c + 1)
        if late:
            mbarrier_wait_backoff(base + AT_SOON, number & 1, SLEEP)
            number = u32(number + 1)
        taken = i32(0)
        if leader:
            taken = i32(fetch_add(p.tile_counter, 1))
        index = I(uniform(taken)) + blocks()
    at = await_list(base, c)
    if leader:
        store_word(at, END)
    hand_over(base, c)
    if leader:
        if fetch_add(p.tile_counter + 4, 1) == blocks() - 1:  # the last block leaves the counters as they were found
            store(np.int32, p.tile_counter, 0, i32(0))
            store(np.int32, p.tile_counter, 1, i32(0))


# --- loading ----------------------------------------------------------------------------------------------------------


@device
def load_values(p, base, n, tile, head, b):
    producer_acquire(base + AT_V_PIPE, n, STAGES)
    stage = stage_of(n, STAGES)
    full = base + AT_V_PIPE + 8 * stage
    mbarrier_arrive_expect_tx(full, BYTES_V)
    for c in range(chunks_v):
        target = base + AT_V + stage * BYTES_V + c * BLOCK_K * CHUNK_ROW
        tma_load(target, map_address("map_v"), full, 64 * c, tile * BLOCK_K, 0, head, b)


@device
def load_keys(p, base, n, tile_desc, tile, head, b):
    producer_acquire(base + AT_K_PIPE, n, STAGES)
    stage = stage_of(n, STAGES)
    full = base + AT_K_PIPE + 8 * stage
    store_word(base + AT_TILE_DESCS + 4 * stage, tile_desc)
    mbarrier_arrive_expect_tx(full, BYTES_K)
    for c in range(chunks_q):
        target = base + AT_K + stage * BYTES_K + c * BLOCK_K * CHUNK_ROW
        tma_load(target, map_address("map_k"), full, 64 * c, tile * BLOCK_K, 0, head, b)


@device
def load_queries(p, base, number, item):
    b, h, row0 = item
    producer_acquire(base + AT_Q_PIPE, number, Q_BUFFERS)
    buffer = stage_of(number, Q_BUFFERS)
    slot, full = base + AT_WORK_TILES + 12 * buffer, base + AT_Q_PIPE + 8 * buffer
    store_word(slot, b)
    store_word(slot + 4, h)
    store_word(slot + 8, row0)
    mbarrier_arrive_expect_tx(full, MMA_WARPGROUPS * 64 * CHUNK_ROW * chunks_q)
    for g in range(MMA_WARPGROUPS):
        token = (row0 + 64 * g) // PACK_GQA
        for c in range(chunks_q):
            target = base + (buffer * MMA_WARPGROUPS + g) * BYTES_Q + c * 64 * CHUNK_ROW
            if PACK_GQA > 1:
                tma_load(target, map_address("map_q"), full, 64 * c, 0, token, h // PACK_GQA, b)
            else:
                tma_load(target, map_address("map_q"), full, 64 * c, token, 0, h, b)


@device
def load_items(p, base):
    """The loading thread: brings the keys of each tile, queries with the first of an item and, a tile later, values."""
    late, c, n, number = takes_late(p), u32(0), u32(0), u32(0)  # lists, tiles, items so far
    tile, head, b = i32(0), i32(0), i32(0)  # of the values that are to come
    while True:
        consumer_wait(base + AT_LISTS_PIPE, c, LISTS)
        at = list_of(base, c)
        item = load_word(at), load_word(at + 4), load_word(at + 8)
        count, last, extra, ends = load_word(at + 12), load_word(at + 16), load_word(at + 20), load_word(at + 24)
        if item[0] == END:
            break
        soon = i32(max(count - AHEAD, 0) if late and ends != 0 else -1)
        if soon == count:
            mbarrier_arrive(base + AT_SOON)
        for i in range(count):
            if i == soon:
                mbarrier_arrive(base + AT_SOON)
            entry = load_word(at + IN_LIST + 4 * i)
            found = i32(last - (entry >> 8))
            load_keys(p, base, n, found << 8 | entry & 63 | extra, found, item[1] // GQA_GROUP, item[0])
            if n > 0:
                load_values(p, base, n - 1, tile, head, b)
            tile, head, b, n = found, i32(item[1] // GQA_GROUP), item[0], u32(n + 1)
            if extra != 0:
                load_queries(p, base, number, item)
                extra, number = i32(0), u32(number + 1)
        mbarrier_arrive(empty_barrier(base + AT_LISTS_PIPE, c, LISTS))
        c = u32(c + 1)
    if n > 0:
        load_values(p, base, n - 1, tile, head, b)
    # The others are told to stop.
    producer_acquire(base + AT_K_PIPE, n, STAGES)
    store_word(base + AT_TILE_DESCS + 4 * stage_of(n, STAGES), END)
    mbarrier_arrive(full_barrier(base + AT_K_PIPE, n, STAGES))
    producer_acquire(base + AT_Q_PIPE, number, Q_BUFFERS)
    store_word(base + AT_WORK_TILES + 12 * stage_of(number, Q_BUFFERS), END)
    mbarrier_arrive(full_barrier(base + AT_Q_PIPE, number, Q_BUFFERS))


# --- storing ----------------------------------------------------------------------------------------------------------


@device
def store_items(p, base):
    """The storing thread: takes each finished item's outputs from the buffers that its rows came in."""
    number = u32(0)
    while True:
        buffer = stage_of(number, Q_BUFFERS)
        slot, parity = base + AT_WORK_TILES + 12 * buffer, u32(number) // u32(Q_BUFFERS) & 1
        consumer_wait(base + AT_Q_PIPE, number, Q_BUFFERS)
        b, h = load_word(slot), load_word(slot + 4)
        if b == END:
            break
        for g in range(MMA_WARPGROUPS):
            row0, place = load_word(slot + 8) + 64 * g, buffer * MMA_WARPGROUPS + g
            mbarrier_wait_backoff(base + AT_DONE + 8 * place, parity, SLEEP)
            if row0 < p.n_q * PACK_GQA:
                for c in range(chunks_v):
                    source = base + place * BYTES_Q + c * 64 * CHUNK_ROW
                    if PACK_GQA > 1:
                        tma_store(map_address("map_out"), source, 64 * c, 0, row0 // PACK_GQA, h // PACK_GQA, b)
                    else:
                        tma_store(map_address("map_out"), source, 64 * c, row0, 0, h, b)
            bulk_commit()
        bulk_wait_read(0)
        mbarrier_arrive(base + AT_Q_PIPE + 8 * Q_BUFFERS + 8 * buffer)
        number = u32(number + 1)
    bulk_wait()

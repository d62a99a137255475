# Which work the blocks of the Hopper forward pass take, and its coming and going: the roles of warp group 0.
#
# An item is (batch entry, first of its heads, first of its rows).

store_count = store_to("global", int32)


# --- which tiles ------------------------------------------------------------------------------------------------------


@device
def state_of(p, item, n_k, row0, row1, tile, many):
    """State of rows row0 ... row1 - 1 and tiles of keys tile ... tile + many - 1; a tile that is not whole is
    PARTIAL.
    """
    b, h, _ = item
    k0, whole = tile * BLOCK_K, (tile + many) * BLOCK_K
    first, last, k1, offset = row0 // PACK, (row1 + PACK - 1) // PACK, min(whole, n_k), offset_of(p, b)
    state = tile_state(p, b, h, offset, first, last, k0, k1)
    if HAS_MASK:
        for other in range(1, PACK):
            if tile_state(p, b, h + other, offset, first, last, k0, k1) != state:
                state = PARTIAL
    if state == FULL and whole > n_k:
        state = PARTIAL
    return state


@device
def states_of(p, item, n_k, tile, many):
    """States of the groups' rows and a tile of keys, two bits a group."""
    rows, row0 = i32(p.n_q) * PACK, item[2]
    end = min(row0 + BLOCK_Q, rows)
    every = state_of(p, item, n_k, row0, end, tile, many)
    states = 0
    for g in range(GROUPS):
        first = row0 + 64 * g
        state = every if first < end else EMPTY
        if HAS_MASK and state == PARTIAL and many == 1:
            state = state_of(p, item, n_k, first, min(first + 64, end), tile, 1)
        states |= state << 2 * g
    return states


@device
def fill(p, base, item, n_k, next_place, tiles):
    """Write the next of the tiles that exist to the list, the last keys first, as place << 8 | states: by one warp, 32
    at a time and before that, where one look may cover so many, 32 groups of 32. How many; where to go on; all
    states.
    """
    lane, count, seen = thread() % 32, 0, 0
    lanes_sync()
    while next_place < tiles and count + 32 <= LIST:
        if HAS_MASK and CLASSIFY_MANY and tiles - next_place > 32:
            first = next_place + 32 * lane
            many = min(tiles - first, 32)
            groups = vote(many > 0 and states_of(p, item, n_k, tiles - first - many, many) != 0)
            if groups == 0:
                next_place += 1024
                continue
            next_place += 32 * lowest_one(groups)
        place = next_place + lane
        states = 0
        if place < tiles:
            states = states_of(p, item, n_k, tiles - place - 1, 1)
        live = vote(states != 0)
        if states != 0:
            store_word(base + AT_LIST + 4 * (count + ones(live & ((1 << lane) - 1))), place << 8 | states)
        seen |= or_lanes(states)
        count += ones(live)
        next_place += 32
    lanes_sync()
    return count, next_place, seen


# --- loading ----------------------------------------------------------------------------------------------------------


@device
def load_values(p, base, n, tile, head, b):
    wait_empty(base + AT_V_RING, n, STAGES)
    stage = stage_of(n, STAGES)
    full = base + AT_V_RING + 8 * stage
    arrive_and_expect(full, BYTES_V)
    for c in range(chunks_v):
        target = base + AT_V + stage * BYTES_V + c * BLOCK_K * CHUNK_ROW
        load_box(target, map_address("map_v"), full, 64 * c, tile * BLOCK_K, 0, head, b)


@device
def load_keys(p, base, n, note, tile, head, b):
    wait_empty(base + AT_K_RING, n, STAGES)
    stage = stage_of(n, STAGES)
    full = base + AT_K_RING + 8 * stage
    store_word(base + AT_NOTES + 4 * stage, note)
    arrive_and_expect(full, BYTES_K)
    for c in range(chunks_q):
        target = base + AT_K + stage * BYTES_K + c * BLOCK_K * CHUNK_ROW
        load_box(target, map_address("map_k"), full, 64 * c, tile * BLOCK_K, 0, head, b)


@device
def load_queries(p, base, number, item):
    b, h, row0 = item
    wait_empty(base + AT_Q_RING, number, Q_BUFFERS)
    buffer = stage_of(number, Q_BUFFERS)
    slot, full = base + AT_ITEMS + 12 * buffer, base + AT_Q_RING + 8 * buffer
    store_word(slot, b)
    store_word(slot + 4, h)
    store_word(slot + 8, row0)
    arrive_and_expect(full, GROUPS * 64 * CHUNK_ROW * chunks_q)
    for g in range(GROUPS):
        token = (row0 + 64 * g) // PACK
        for c in range(chunks_q):
            target = base + (buffer * GROUPS + g) * BYTES_Q + c * 64 * CHUNK_ROW
            if PACK > 1:
                load_box(target, map_address("map_q"), full, 64 * c, 0, token, h // PACK, b)
            else:
                load_box(target, map_address("map_q"), full, 64 * c, token, 0, h, b)


@device
def load_items(p, base):
    """The loading warp: finds the tiles that each item sees, and brings keys, queries and, a tile later, values."""
    leader = thread() == 0
    items, index, n, number = items_of(p), I(block()), I(0), I(0)
    tile, head, b = I(0), I(0), I(0)  # of the values that are to come
    while index < items:
        item = item_of(p, index)
        n_k = keys_of(p, item[0])
        tiles = (n_k + BLOCK_K - 1) // BLOCK_K
        if leader:
            index = I(fetch_add(p.ticket, 1)) + blocks()
        count, next_place, seen = fill(p, base, item, n_k, I(0), tiles)
        # Groups that see nothing take a tile all the same, where everything is hidden from them.
        extra = FIRST
        for g in range(GROUPS):
            if seen >> 2 * g & 3 == EMPTY:
                extra |= PARTIAL << 2 * g
        if count == 0:
            if leader:
                store_word(base + AT_LIST, tiles - 1 << 8)  # tile 0
            lanes_sync()
            count = 1
        while count > 0:
            if leader:
                for i in range(count):
                    entry = load_word(base + AT_LIST + 4 * i)
                    here = tiles - 1 - (entry >> 8)
                    load_keys(p, base, n, here << 8 | entry & 63 | extra, here, item[1] // GROUP, item[0])
                    if n > 0:
                        load_values(p, base, n - 1, tile, head, b)
                    tile, head, b = here, item[1] // GROUP, item[0]
                    n += 1
                    if extra != 0:
                        load_queries(p, base, number, item)
                        extra = 0
            count, next_place, seen = fill(p, base, item, n_k, next_place, tiles)
        index = I(uniform(index))
        number += 1
    if leader:  # the others are told to stop
        if n > 0:
            load_values(p, base, n - 1, tile, head, b)
        wait_empty(base + AT_K_RING, n, STAGES)
        store_word(base + AT_NOTES + 4 * stage_of(n, STAGES), END)
        arrive(base + AT_K_RING + 8 * stage_of(n, STAGES))
        wait_empty(base + AT_Q_RING, number, Q_BUFFERS)
        store_word(base + AT_ITEMS + 12 * stage_of(number, Q_BUFFERS), END)
        arrive(base + AT_Q_RING + 8 * stage_of(number, Q_BUFFERS))
        if fetch_add(p.ticket + 4, 1) == blocks() - 1:  # the last block leaves the counters as they were found
            store_count(p.ticket, 0)
            store_count(p.ticket + 4, 0)


# --- storing ----------------------------------------------------------------------------------------------------------


@device
def store_items(p, base, group):
    """The storing thread of a warp group: takes each finished item's output from the buffer that its rows came in."""
    number = I(0)
    while True:
        buffer = stage_of(number, Q_BUFFERS)
        slot, staged = base + AT_ITEMS + 12 * buffer, base + (buffer * GROUPS + group) * BYTES_Q
        wait_full(base + AT_Q_RING, number, Q_BUFFERS)
        b, h, row0 = load_word(slot), load_word(slot + 4), load_word(slot + 8) + 64 * group
        if b == END:
            break
        done, parity = base + AT_DONE + 8 * (buffer * GROUPS + group), u32(number) // u32(Q_BUFFERS) & 1
        while not has_ended(done, parity):
            nap()
        if row0 < p.n_q * PACK:
            for c in range(chunks_v):
                source = staged + c * 64 * CHUNK_ROW
                if PACK > 1:
                    store_box(map_address("map_out"), source, 64 * c, 0, row0 // PACK, h // PACK, b)
                else:
                    store_box(map_address("map_out"), source, 64 * c, row0, 0, h, b)
        stores_end()
        stores_wait_read()
        arrive(base + AT_Q_RING + 8 * Q_BUFFERS + 8 * buffer)
        number += 1
    stores_wait()

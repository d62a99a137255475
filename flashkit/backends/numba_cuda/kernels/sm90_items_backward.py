# Which work the blocks of the Hopper backward pass take, and its coming: roles of warp group 0.
#
# A loading warp that found tiles in a function of its own, 32 at a time, with one place to load them from, and asked
# for the next item three tiles ahead was 1 to 19 % slower under a causal mask, most with wide heads.
#
# An item is (batch entry, head of keys, first of its BLOCK_K keys).


@device
def key_items(p):
    return tiles_along(p.n_k, BLOCK_K) * i32(p.heads // GROUP * p.batch)


@device
def key_item(p, index):
    """Item number `index`. With a mask: tiles in ascending order, of p.splits heads at a time, for under a causal mask
    the first keys are seen by most; of the last ones a quarter is left to the end, where they even out when blocks
    finish.
    """
    heads = u32(u32(p.heads) // u32(GROUP))
    tiles = u32(tiles_along(p.n_k, BLOCK_K))
    early = u32(tiles - tiles // u32(4)) if HAS_MASK else tiles
    tile, head = turn_of(u32(index), early, u32(heads * p.batch), u32(p.splits))
    return i32(head // heads), i32(head % heads), i32(tile * BLOCK_K)


@device
def read_item(base, number):
    slot = item_slot(base, number)
    return uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))


# --- which tiles ------------------------------------------------------------------------------------------------------


@device
def state_of_keys(p, at, h, n_k, row0, row1, k0, k1):
    """A tile that is not whole along the keys is PARTIAL."""
    if k0 >= n_k:
        return EMPTY
    state = tile_state(p, I(at[0]), I(h), offset_of(p, I(at[0])), I(row0), I(row1), I(k0), I(min(k1, n_k)))
    return PARTIAL if state == FULL and k1 > n_k else state


@device
def states_of(p, at, h, n_k, tile, many):
    """States of the groups' keys and the rows of `many` tiles of queries, two bits a group."""
    row0 = tile * BLOCK_Q
    row1 = min(row0 + many * BLOCK_Q, i32(p.n_q))
    every = state_of_keys(p, at, h, n_k, row0, row1, at[2], at[2] + BLOCK_K)
    states = 0
    for g in range(GROUPS):
        state = every
        if every == PARTIAL and many == 1:
            first = at[2] + GROUP_KEYS * g
            state = state_of_keys(p, at, h, n_k, row0, row1, first, first + GROUP_KEYS)
        states |= state << 2 * g
    if MAY_HIDE:
        if states != 0 and many == 1 and load(np.int32, marks_of(p, at[0], h, tile), 0) != 0:
            states |= ODD
    return i32(states)


@device
def tile_at(tiles, place, many):
    return tiles - place - many if ORDERED else place


@device
def nothing_added(p, at, h, tile):
    """Of a tile that sees nothing of the item."""
    tile_k = at[2] // BLOCK_K
    set_bits(marks_of(p, at[0], h, tile) + 4 + tile_k // 32 * 4, u32(1) << u32(tile_k % 32))


# --- loading ----------------------------------------------------------------------------------------------------------


@device
def load_tile(target, tensor, many, rows, token, head, b, barrier):
    for c in range(many):
        load_box(target + c * rows * CHUNK_ROW, tensor, barrier, 64 * c, token, 0, head, b)


@device
def clear_row(tile, row, rows, many):
    """Zeros in an eighth of a row, by each of eight lanes."""
    for c in range(many):
        store_zeros(tile + (c * rows + row) * CHUNK_ROW + thread() % 8 * UNIT, 0)


@device
def clear_odd_rows(tile, shift, many):
    """Zeros in the rows that are not finite, by one warp."""
    for row in range(thread() % 32 // 8, BLOCK_Q, 4):
        if not is_finite(load_number(shift + 4 * row)):
            clear_row(tile, row, BLOCK_Q, many)


@device
def load_queries(p, base, at, number, first, n, odd_tiles, tile, h, states, last):
    """Tile n of Q and dO with their rows' numbers; before the first of an item comes its V. The next n, and how many
    tiles were odd.
    """
    leader, stage, dout_stage = thread() == 0, stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    q_full, dout_full = base + AT_Q_RING + 8 * stage, base + AT_DOUT_RING + 8 * dout_stage
    q, dout = base + AT_Q + stage * BYTES_Q, base + AT_DOUT + dout_stage * BYTES_DOUT
    shift, delta = base + AT_SHIFT + stage * BYTES_ROWS, base + AT_DELTA + dout_stage * BYTES_ROWS
    odd, row0 = MAY_HIDE and states & ODD != 0, tile * BLOCK_Q
    if leader:
        q_came, dout_came = (base + AT_ROWS_CAME, base + AT_ROWS_CAME) if odd else (q_full, dout_full)
        wait_empty(base + AT_Q_RING, n, STAGES)
        note = note_of(base, n)
        store_word(note, tile << 8 | (LAST_TILE if last else 0) | states)
        store_word(note + 4, h)
        store_word(note + 8, (at[0] * i32(p.heads) + h) * tiles_along(p.n_q, BLOCK_Q) + tile)
        arrive_and_expect(q_came, BYTES_Q + BYTES_ROWS + (BYTES_DOUT + BYTES_ROWS if odd else 0))
        load_tile(q, map_address("map_q"), chunks_q, BLOCK_Q, row0, h, at[0], q_came)
        load_bulk(shift, number_address(p.shift, I(at[0]), I(h), I(row0)), BYTES_ROWS, q_came)
        if first:
            v_full = base + AT_V_RING
            wait_empty(base + AT_V_RING, number, 1)
            arrive_and_expect(v_full, BYTES_V)
            load_tile(base + AT_V, map_address("map_v"), chunks_v, BLOCK_K, at[2], at[1], at[0], v_full)
        wait_empty(base + AT_DOUT_RING, n, DOUT_STAGES)
        if not odd:
            arrive_and_expect(dout_came, BYTES_DOUT + BYTES_ROWS)
        load_tile(dout, map_address("map_dout"), chunks_v, BLOCK_Q, row0, h, at[0], dout_came)
        load_bulk(delta, number_address(p.delta, I(at[0]), I(h), I(row0)), BYTES_ROWS, dout_came)
    if odd:
        lanes_sync()
        await_barrier(base + AT_ROWS_CAME, u32(odd_tiles) & 1)
        odd_tiles = u32(odd_tiles + 1)
        clear_odd_rows(q, shift, chunks_q)
        clear_odd_rows(dout, shift, chunks_v)
        fence_async()
        lanes_sync()
        if leader:
            arrive(q_full)
            arrive(dout_full)
    return u32(n + 1), odd_tiles


@device
def load_items(p, base):
    """The loading warp: finds the tiles of queries that see each item. A tile is held back until it is known whether
    another one follows.
    """
    leader, lane, tiles, items = thread() == 0, i32(thread() % 32), tiles_along(p.n_q, BLOCK_Q), key_items(p)
    n, odd_tiles, number = u32(0), u32(0), u32(0)
    while True:
        came = base + (AT_K_CAME if CLEANS_KEYS else AT_K_RING) + 8 * stage_of(number, KEY_BUFFERS)
        slot = item_slot(base, number)
        # Not asked for earlier: who has waited for others would come back to an item that others wait for.
        index = i32(0)
        if leader:
            index = i32(fetch_add(p.ticket, 1))
            wait_empty(base + AT_K_RING, number, KEY_BUFFERS)
        index = uniform(index)
        if index >= items:  # the others are told to stop
            if leader:
                store_word(slot, END)
                arrive(came)
            break
        at = key_item(p, index)
        n_k = i32(keys_of(p, I(at[0])))
        if leader:
            store_word(slot, at[0])
            store_word(slot + 4, at[1])
            store_word(slot + 8, at[2])
            arrive_and_expect(came, BYTES_K)
            target = base + AT_K + stage_of(number, KEY_BUFFERS) * BYTES_K
            load_tile(target, map_address("map_k"), chunks_q, BLOCK_K, at[2], at[1], at[0], came)
        first, held, held_head, held_states = YES, i32(0), i32(at[1] * GROUP), i32(0)
        for h in range(at[1] * GROUP, (at[1] + 1) * GROUP):
            start = i32(0)
            while start < tiles:
                if HAS_MASK and CLASSIFY_MANY and tiles - start > 32:  # whether there is anything in groups of 32
                    place = i32(start + 32 * lane)
                    many = i32(min(tiles - place, 32))
                    some = many > 0 and states_of(p, at, i32(h), n_k, tile_at(tiles, place, many), many) != 0
                    groups_seen = vote(some)
                    empty = i32(32 if groups_seen == 0 else lowest_one(groups_seen))
                    if ORDERED:
                        for other in range(start + lane, min(start + 32 * empty, tiles), 32):
                            nothing_added(p, at, h, tile_at(tiles, other, 1))
                    start = i32(start + 32 * empty)
                    if groups_seen == 0:
                        continue
                place, states = i32(start + lane), i32(0)
                if place < tiles:
                    states = states_of(p, at, i32(h), n_k, tile_at(tiles, place, 1), 1)
                    if ORDERED:
                        if states == 0:
                            nothing_added(p, at, h, tile_at(tiles, place, 1))
                live = vote(states != 0)
                while live != 0:
                    if held_states != 0:
                        n, odd_tiles = load_queries(
                            p, base, at, number, first, n, odd_tiles, held, held_head, held_states, NO
                        )
                        first = NO
                    bit = lowest_one(live)
                    held, held_head = i32(tile_at(tiles, start + bit, 1)), i32(h)
                    held_states = from_lane(states, bit)
                    live = u32(live & u32(live - u32(1)))
                start = i32(start + 32)
        # An item that is seen by no query takes one tile all the same, where everything is hidden.
        states = held_states if held_states != 0 else i32(PARTIAL * 5)
        n, odd_tiles = load_queries(p, base, at, number, first, n, odd_tiles, held, held_head, states, YES)
        number = u32(number + 1)
    if leader:
        if fetch_add(p.ticket + 4, 1) == blocks() - 1:  # the last block leaves the counters as they were found
            store(np.int32, p.ticket, 0, i32(0))
            store(np.int32, p.ticket, 1, i32(0))


# --- cleaning keys ----------------------------------------------------------------------------------------------------


@device
def all_finite(unit):
    """Of 16 bytes of elements: a number that is not has an exponent of ones."""
    exponent, finite = u32(0x7C00 if STORAGE == "float16" else 0x7F80), True
    for i in range(4):
        finite = finite and unit[i] & exponent != exponent and unit[i] >> u32(16) & exponent != exponent
    return finite


@device
def odd_keys(tile, word):
    """A bit for each of 32 keys that is not finite; eight lanes look at a key."""
    lane, odd = thread() % 32, u32(0)
    for i in range(8):
        row, finite = 32 * word + 4 * i + lane // 8, True
        if row < BLOCK_K:
            for c in range(chunks_q):
                finite = finite and all_finite(load_unit(tile + (c * BLOCK_K + row) * CHUNK_ROW + lane % 8 * UNIT))
        found = vote(not finite)
        for r in range(4):
            if found >> u32(8 * r) & u32(255) != 0:
                odd |= u32(1) << u32(4 * i + r)
    return u32(odd)


@device
def clean_keys(p, base):
    """A warp: keys past the length, and those that are not finite, are cleared; the others go by as they are."""
    lane, number = i32(thread() % 32), I(0)
    while True:
        buffer = stage_of(number, KEY_BUFFERS)
        slot, bits = item_slot(base, number), odd_of(base, number)
        await_barrier(base + AT_K_CAME + 8 * buffer, u32(number) // u32(KEY_BUFFERS) & 1)
        b, k0, tile = load_word(slot), load_word(slot + 8), base + AT_K + buffer * BYTES_K
        if b != END:
            exist = i32(keys_of(p, I(b))) - k0
            for word in range(ODD_WORDS):
                odd = u32(0)
                if MAY_HIDE:
                    odd = odd_keys(tile, word)
                if lane == 0:
                    store_word(bits + 4 * word, i32(odd))
                if odd != 0 or exist < 32 * word + 32:
                    for row in range(32 * word + lane // 8, min(32 * word + 32, BLOCK_K), 4):
                        if odd >> u32(row % 32) & u32(1) != 0 or row >= exist:
                            clear_row(tile, row, BLOCK_K, chunks_q)
            fence_async()
            lanes_sync()
        if lane == 0:
            arrive(base + AT_K_RING + 8 * buffer)
        if b == END:
            break
        number += 1

# parts: sm90/bwd_nonfinite sm90/dq_clear common/tile_order sm90/tile_lists
# Which work the blocks of the Hopper backward pass take, and its coming: roles of warp group 0.
#
# An item is (batch entry, head of keys, first of its BLOCK_K keys).


@device
def key_items(p):
    return tiles_along(p.n_k, BLOCK_K) * i32(p.heads // GQA_GROUP * p.batch)


@device
def early_tiles(p):
    """How many tiles of keys of a head come before what is left to the end."""
    tiles = u32(tiles_along(p.n_k, BLOCK_K))
    return tiles if ORDERED else tiles_before_lpt_tail(tiles)


@device
def key_item(p, index):
    """WorkTile number `index`. With a mask: tiles in ascending order, of p.heads_per_l2_group heads at a time, for under a causal mask
    the first keys are seen by most; of the last ones a quarter is left to the end (tiles_before_lpt_tail), where they even out
    when blocks finish. FROM_DIAGONAL: in descending order.
    """
    heads, tiles = u32(u32(p.heads) // u32(GQA_GROUP)), u32(tiles_along(p.n_k, BLOCK_K))
    tile, head = tile_coord(u32(index), early_tiles(p), u32(heads * p.batch), u32(p.heads_per_l2_group))
    if FROM_DIAGONAL:
        tile = u32(tiles - u32(1) - tile)
    return i32(head // heads), i32(head % heads), i32(tile * BLOCK_K)


@device
def read_item(base, number):
    slot = work_tile_slot(base, number)
    return uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))


# --- which tiles ------------------------------------------------------------------------------------------------------


@device
def state_of_keys(p, b, h, n_k, row0, row1, k0, k1):
    """A tile that is not whole along the keys is PARTIAL."""
    if k0 >= n_k:
        return i32(EMPTY)
    state = i32(tile_state(p, b, h, offset_of(p, I(b)), row0, row1, k0, i32(min(k1, n_k))))
    return i32(PARTIAL) if state == FULL and k1 > n_k else state


@device
def states_of(p, item, n_k, tile, many):
    """States of the groups' keys and the rows of `many` tiles of queries, two bits a group. item: here it is (batch
    entry, head of queries, first key).
    """
    b, h, k0 = item
    row0 = i32(tile * BLOCK_Q)
    row1 = i32(min(row0 + many * BLOCK_Q, i32(p.n_q)))
    every, states = state_of_keys(p, b, h, n_k, row0, row1, k0, i32(k0 + BLOCK_K)), i32(0)
    for g in range(MMA_WARPGROUPS):
        state = every
        if every == PARTIAL and many == 1:
            first = i32(k0 + GROUP_KEYS * g)
            state = state_of_keys(p, b, h, n_k, row0, row1, first, i32(first + GROUP_KEYS))
        states = i32(states | state << 2 * g)
    if MAY_HIDE:
        if states != 0 and many == 1 and load(np.int32, dq_semaphore_of(p, b, h, tile), 0) != 0:
            states = i32(states | ODD)
    return states


@device
def tile_at(tiles, place, many):
    """The tile at a place of the way over all of a head's, or the first of `many`."""
    return i32(tiles - place - many) if ORDERED and not FROM_DIAGONAL else i32(place)


@device
def nothing_added(p, item, tile):
    """By a tile that sees nothing of the item."""
    b, h, k0 = item
    tile_k = k0 // BLOCK_K
    word = rank_of_block() * order_words(p) + tile_k // 32
    set_bits(dq_semaphore_of(p, b, h, tile) + 4 + word * 4, u32(1) << u32(tile_k % 32))


@device
def look(p, item, n_k, tiles, place, many):
    tile = tile_at(tiles, place, many)
    states = states_of(p, item, n_k, tile, many)
    if ORDERED:
        if states == 0:
            for other in range(tile, tile + many):
                nothing_added(p, item, other)
    return states


# --- finding tiles ----------------------------------------------------------------------------------------------------


@device
def held_from(at):
    """The first of an item's keys that the block has."""
    return i32(at[2] + HELD * rank_of_block())


@device
def load_keys(base, at, number):
    """An item, as it is announced, and its keys."""
    buffer = stage_of(number, KEY_BUFFERS)
    came = base + (AT_K_CAME if CLEANS_KEYS else AT_K_PIPE) + 8 * buffer
    producer_acquire(base + AT_K_PIPE, number, KEY_BUFFERS)
    if elect_one():
        slot = work_tile_slot(base, number)
        store_word(slot, at[0])
        store_word(slot + 4, at[1])
        store_word(slot + 8, at[2])
        mbarrier_arrive_expect_tx(came, BYTES_K)
        tile = base + AT_K + buffer * BYTES_K
        load_tile(tile, map_address("map_k"), chunks_q, HELD, held_from(at), at[1], at[0], came, 0)


@device
def clean_own(p, base, at, number):
    """The block's keys, when they have come."""
    buffer = stage_of(number, KEY_BUFFERS)
    mbarrier_wait(base + AT_K_CAME + 8 * buffer, u32(number) // u32(KEY_BUFFERS) & 1)
    exist = i32(i32(keys_of(p, I(at[0]))) - held_from(at))
    clean_keys(base + AT_K + buffer * BYTES_K, chunks_q, exist, odd_of(base, number))
    mbarrier_arrive_once(full_barrier(base + AT_K_PIPE, number, KEY_BUFFERS))


@device
def load_others(p, base, at, number):
    """The keys of the other block, in the columns of this block's part of dQ."""
    came, rank = base + (AT_OTHERS_CAME if CLEANS_KEYS else AT_PEER_K_PIPE), rank_of_block()
    first = i32(at[2] + HELD * (1 - rank))
    producer_acquire(base + AT_PEER_K_PIPE, number, 1)
    if elect_one():
        mbarrier_arrive_expect_tx(came, BYTES_OTHERS)
        tile, column = base + AT_OTHERS, 64 * SHARE * rank
        load_tile(tile, map_address("map_k"), SHARE, HELD, first, at[1], at[0], came, column)
    if CLEANS_KEYS:
        mbarrier_wait(came, u32(number) & 1)
        clean_keys(base + AT_OTHERS, SHARE, i32(i32(keys_of(p, I(at[0]))) - first), u32(0))
        mbarrier_arrive_once(base + AT_PEER_K_PIPE)


@device
def take_item(p, base, number):
    """The number of a block's next item, by one lane. Of blocks that share items the first one takes them and tells the
    other, which by the next but one has read it: it has added its part to tiles that the first could not end without.
    """
    barrier, word = full_barrier(base + AT_TAKEN, number, 2), base + AT_TAKEN + 16 + 4 * stage_of(number, 2)
    if rank_of_block() == 0:
        index = i32(fetch_add(p.tile_counter, 1))
        if CLUSTER_SIZE > 1:
            dsmem_store(mapa(word, 1), index, mapa(barrier, 1))
        return index
    mbarrier_arrive_expect_tx(barrier, 4)
    consumer_wait(base + AT_TAKEN, number, 2)
    return load_word(word)


@device
def find_items(p, base):
    """The finding warp, ahead of the one that loads, as classifying 32 tiles may take as long as the products of a few.
    So its own are the items: it takes them, finds their tiles, loads their keys and looks through these.
    """
    leader, tiles, items = thread() % 32 == 0, tiles_along(p.n_q, BLOCK_Q), key_items(p)
    c, number = u32(0), u32(0)  # lists, items so far
    while True:
        # Not earlier than it has to be, so that the last items are shared evenly.
        if number > 0:
            mbarrier_wait_backoff(base + AT_SOON, u32(number - u32(1)) & 1, BACKOFF_NS)
        index = i32(0)
        if leader:
            index = take_item(p, base, number)
        index = uniform(index)
        if index >= items:
            break
        at = key_item(p, index)
        n_k = i32(keys_of(p, I(at[0])))
        if KEY_BUFFERS > 1:
            load_keys(base, at, number)
        first, member, place = YES, i32(0), i32(0)
        while member < GQA_GROUP:
            h = i32(at[1] * GQA_GROUP + member)
            found = acquire_list(base, c)
            count, place, _ = fill(p, c, found + LIST_HEADER, (at[0], h, at[2]), n_k, place, tiles)
            over = place >= tiles
            if leader:
                store_word(found, at[0])
                store_word(found + 4, h)
                store_word(found + 8, at[2])
                store_word(found + 12, count)
                store_word(found + 16, 1 if over and member == GQA_GROUP - 1 else 0)
            if not ORDERED:
                if first:
                    await_cleared(p, at)
            commit_list(base, c)
            c = u32(c + 1)
            if over:
                place, member = i32(0), i32(member + 1)
            if first:
                first = NO
                if KEY_BUFFERS == 1:
                    load_keys(base, at, number)
                if CLEANS_KEYS:
                    clean_own(p, base, at, number)
                if CLUSTER_SIZE > 1:
                    load_others(p, base, at, number)
        if not ORDERED:
            clear_ahead(p, index)
        number = u32(number + 1)
    found = acquire_list(base, c)  # the others are told to stop
    if leader:
        store_word(found, END)
    commit_list(base, c)
    producer_acquire(base + AT_K_PIPE, number, KEY_BUFFERS)
    if leader:
        store_word(work_tile_slot(base, number), END)
        mbarrier_arrive(full_barrier(base + AT_K_PIPE, number, KEY_BUFFERS))
        if fetch_add(p.tile_counter + 4, 1) == blocks() - 1:  # the last block leaves the counters as they were found
            store(np.int32, p.tile_counter, 0, i32(0))
            store(np.int32, p.tile_counter, 1, i32(0))


# --- loading ----------------------------------------------------------------------------------------------------------


@device
def load_tile(target, tensor, many, rows, token, head, b, barrier, column):
    """Chunks of columns from `column` on, side by side."""
    for c in range(many):
        tma_load(target + c * rows * CHUNK_ROW, tensor, barrier, column + 64 * c, token, 0, head, b)


@device
def load_queries(p, base, found, number, n, odd_tiles, first, entry, h, last):
    """Tile n of Q and dO with their rows' numbers; before the first of an item comes its V. How many tiles were odd.
    found: the item's list; entry, h: the tile, its states, its head.
    """
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    q_full, dout_full = base + AT_Q_PIPE + 8 * stage, base + AT_DOUT_PIPE + 8 * dout_stage
    q, dout = base + AT_Q + stage * BYTES_Q, base + AT_DOUT + dout_stage * BYTES_DOUT
    shift = base + AT_SHIFT + stage * BYTES_ROWS
    odd = MAY_HIDE and entry & ODD != 0
    if elect_one():
        q_came, dout_came = (base + AT_ROWS_CAME, base + AT_ROWS_CAME) if odd else (q_full, dout_full)
        b, tile = load_word(found), i32(entry >> 8)
        row0, where = i32(tile * BLOCK_Q), i32((b * i32(p.heads) + h) * tiles_along(p.n_q, BLOCK_Q) + tile)
        numbers = I(where) * BYTES_ROWS  # they lie one tile after the other
        producer_acquire(base + AT_Q_PIPE, n, STAGES)
        tile_desc = tile_desc_of(base, n)
        store_word(tile_desc, entry | (LAST_TILE if last else 0))
        store_word(tile_desc + 4, h)
        store_word(tile_desc + 8, where)
        mbarrier_arrive_expect_tx(q_came, BYTES_Q + BYTES_ROWS + (BYTES_DOUT + BYTES_ROWS if odd else 0))
        load_tile(q, map_address("map_q"), chunks_q, BLOCK_Q, row0, h, b, q_came, 0)
        load_bulk(shift, p.bwd_lse.data + numbers, BYTES_ROWS, q_came)
        if first:
            v_full, head = base + AT_V_PIPE, i32(u32(h) // u32(GQA_GROUP))
            producer_acquire(v_full, number, 1)
            mbarrier_arrive_expect_tx(v_full, BYTES_V)
            token = held_from((b, head, load_word(found + 8)))
            load_tile(base + AT_V, map_address("map_v"), chunks_v, HELD, token, head, b, v_full, 0)
        producer_acquire(base + AT_DOUT_PIPE, n, DOUT_STAGES)
        if not odd:
            mbarrier_arrive_expect_tx(dout_came, BYTES_DOUT + BYTES_ROWS)
        load_tile(dout, map_address("map_dout"), chunks_v, BLOCK_Q, row0, h, b, dout_came, 0)
        load_bulk(base + AT_DELTA + dout_stage * BYTES_ROWS, p.delta.data + numbers, BYTES_ROWS, dout_came)
    if odd:
        lanes_sync()
        mbarrier_wait(base + AT_ROWS_CAME, u32(odd_tiles) & 1)
        odd_tiles = u32(odd_tiles + 1)
        lane = opaque(thread() % 32)
        clear_odd_rows(q, shift, chunks_q, lane)
        clear_odd_rows(dout, shift, chunks_v, lane)
        fence_proxy_async()
        lanes_sync()
        if elect_one():
            mbarrier_arrive(q_full)
            mbarrier_arrive(dout_full)
    return u32(odd_tiles)


@device
def load_items(p, base):
    """The loading warp. A tile is held back until it is known whether another one follows."""
    c, n, number, odd_tiles = u32(0), u32(0), u32(0), u32(0)  # lists, tiles, items so far
    first, held, held_head = YES, i32(0), i32(0)
    while True:
        consumer_wait(base + AT_LIST_PIPE, c, NUM_LISTS)
        found = list_of(base, c)
        if load_word(found) == END:
            break
        h, count, i = load_word(found + 4), load_word(found + 12), i32(0)
        soon = i32(max(count - AHEAD, 0) if load_word(found + 16) != 0 else -1)  # of the item's last list
        while i < count:
            if not ORDERED:
                if i == soon and elect_one():
                    mbarrier_arrive(base + AT_SOON)
            if held != 0:
                odd_tiles = load_queries(p, base, found, number, n, odd_tiles, first, held, held_head, NO)
                first, n = NO, u32(n + 1)
            held, held_head, i = load_word(found + LIST_HEADER + 4 * i), h, i32(i + 1)
            if ORDERED and not FROM_DIAGONAL:
                tiles = tiles_along(p.n_q, BLOCK_Q)
                held = i32(tile_at(tiles, held >> 8, i32(1)) << 8 | held & 255)
        if soon >= 0:
            if held == 0:  # an item that is seen by no query takes one tile all the same, where everything is hidden
                held, held_head = i32(PARTIAL * 5), h
            odd_tiles = load_queries(p, base, found, number, n, odd_tiles, first, held, held_head, YES)
            first, held, n, number = YES, i32(0), u32(n + 1), u32(number + 1)
            # In an order the next item is taken not before all is loaded: who has waited for others would come back to
            # one that others wait for.
            if (ORDERED or soon == count) and elect_one():
                mbarrier_arrive(base + AT_SOON)
        lanes_sync()
        if elect_one():
            mbarrier_arrive(empty_barrier(base + AT_LIST_PIPE, c, NUM_LISTS))
        c = u32(c + 1)

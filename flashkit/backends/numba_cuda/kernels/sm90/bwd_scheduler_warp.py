# parts: sm90/bwd_layout sm90/dq_accum sm90/bwd_producer sm90/pipeline
# The scheduler warp of Hopper's backward pass: claims work tiles, lists the query tiles that see them, loads their K.
# It runs ahead of the producer, as classifying 32 query tiles may take as long as the products of a few.


@device
def state_of_keys(p, b, h, n_k, row0, row1, k0, k1):
    """A tile that reaches past the last key is PARTIAL."""
    if k0 >= n_k:
        return i32(EMPTY)
    state = i32(tile_state(p, b, h, seq_info(p, I(b)).q_position, row0, row1, k0, i32(min(k1, n_k))))
    return i32(PARTIAL) if state == FULL and k1 > n_k else state


@device
def look(p, coord, n_k, tiles, tile, many):
    """For sm90/tile_lists: flags and states for the descriptor of query tiles `tile` ... `tile` + many - 1; 0 if all
    are EMPTY. coord: batch entry, query head, first key.
    """
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
    if CLEARS_ROWS:
        if states != 0 and many == 1 and load(np.int32, dq_semaphore(p, b, h, tile) + SEMAPHORE_FLAGS, 0) != 0:
            states = i32(states | NONFINITE_ROWS)
    return states


@device
def scheduler(p, base):
    leader, tiles, work_tiles = thread() % 32 == 0, tiles_of_queries(p), num_bwd_work_tiles(p)
    c, number = u32(0), u32(0)  # lists and work tiles so far
    while True:
        index = next_work_tile(p, base, number)
        if index >= work_tiles:
            break
        at = bwd_work_tile(p, index)
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
            if first:
                wait_until_cleared(p, at)
            commit_list(base, c)
            c = u32(c + 1)
            if ends:
                place, member = i32(0), i32(member + 1)
            if first:
                first = NO
                if KEY_BUFFERS == 1:
                    load_k(base, at, number)
                if CLEARS_KEYS:
                    clear_nonfinite_k(p, base, at, number)
                if CLUSTER_SIZE > 1:
                    load_peer_k(p, base, at, number)
        clear_dq_ahead(p, index)
        number = u32(number + 1)
    tile_list = acquire_list(base, c)  # END to the producer and the consumers
    if leader:
        store_word(tile_list + LIST_B, END)
    commit_list(base, c)
    producer_acquire(base + AT_K_PIPE, number, KEY_BUFFERS)
    if leader:
        store_word(work_tile_slot(base, number), END)
        mbarrier_arrive(full_barrier(base + AT_K_PIPE, number, KEY_BUFFERS))
        reset_tile_scheduler(p)

# Lists of the tiles that a mask leaves, from a Hopper kernel's scheduler warp to its producer. List number c lies at
# AT_LISTS in place c % NUM_LISTS, its entries, index << 8 | states, LIST_HEADER bytes behind its begin.
#
# A kernel defines look(p, work, n_k, tiles, index, count): the states of tiles index ... index + count - 1 of a work
# tile together, 0 if all are EMPTY.


@device
def list_of(base, c):
    return base + AT_LISTS + LIST_BYTES * stage_of(c, NUM_LISTS)


@device
def fill(p, c, entries, work, n_k, next_tile, tiles):
    """Write the next tiles that exist to list number c: how many, where to go on, and the union of their states.

    The warp asks for 32 tiles at a time, after 32 groups of 32 where a query may span so many. The first list takes
    what is found first, as the pipeline is still empty.
    """
    lane, count, seen = i32(thread() % 32), i32(0), u32(0)
    lanes_sync()
    while next_tile < tiles and count + 32 <= LIST_CAPACITY and (c > 0 or count == 0):
        if HAS_MASK and not MASK_READS_ARRAYS and tiles - next_tile > 32:
            first = i32(next_tile + 32 * lane)
            many = i32(min(tiles - first, 32))
            live = vote(many > 0 and look(p, work, n_k, tiles, first, many) != 0)
            if live == 0:
                next_tile = i32(next_tile + 1024)
                continue
            next_tile = i32(next_tile + 32 * lowest_set_bit(live))
        own, states = i32(next_tile + lane), i32(0)
        if own < tiles:
            states = look(p, work, n_k, tiles, own, i32(1))
        live = vote(states != 0)
        if states != 0:
            before = ones(u32(live & u32((u32(1) << u32(lane)) - u32(1))))
            store_word(entries + 4 * (count + before), own << 8 | states)
        seen = u32(seen | or_lanes(u32(states)))
        count, next_tile = i32(count + ones(live)), i32(next_tile + 32)
    lanes_sync()
    return count, next_tile, seen


@device
def acquire_list(base, c):
    """List number c, once it may be filled."""
    parity = u32(c) // u32(NUM_LISTS) & 1 ^ 1
    mbarrier_wait_backoff(empty_barrier(base + AT_LIST_PIPE, c, NUM_LISTS), parity, BACKOFF_NS)
    return list_of(base, c)


@device
def commit_list(base, c):
    lanes_sync()
    mbarrier_arrive_once(full_barrier(base + AT_LIST_PIPE, c, NUM_LISTS))

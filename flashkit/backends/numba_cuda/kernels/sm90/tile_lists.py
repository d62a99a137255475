# Lists of tiles that exist, from the warp of a Hopper kernel that finds them to the one that loads them. Number c of
# them lies in place c % LISTS, its entries, place << 8 | states of each tile, IN_LIST bytes behind its head.
#
# look(p, item, n_k, tiles, place, many): states of `many` of the item's tiles from a place of the way over them on, 0
# if all are EMPTY.


@device
def list_of(base, c):
    return base + AT_LISTS + BYTES_LIST * stage_of(c, LISTS)


@device
def fill(p, c, entries, item, n_k, place, tiles):
    """Write the next of the tiles that exist to list number c: by one warp, 32 at a time and before that, where one
    look may cover so many, 32 groups of 32. For the first list all wait, so it takes what the first look finds. How
    many; where to go on; all states.
    """
    lane, count, seen = i32(thread() % 32), i32(0), u32(0)
    lanes_sync()
    while place < tiles and count + 32 <= MOST and (c > 0 or count == 0):
        if HAS_MASK and not MASK_READS_ARRAYS and tiles - place > 32:
            first = i32(place + 32 * lane)
            many = i32(min(tiles - first, 32))
            live = vote(many > 0 and look(p, item, n_k, tiles, first, many) != 0)
            if live == 0:
                place = i32(place + 1024)
                continue
            place = i32(place + 32 * lowest_one(live))
        own, states = i32(place + lane), i32(0)
        if own < tiles:
            states = look(p, item, n_k, tiles, own, i32(1))
        live = vote(states != 0)
        if states != 0:
            before = ones(u32(live & u32((u32(1) << u32(lane)) - u32(1))))
            store_word(entries + 4 * (count + before), own << 8 | states)
        seen = u32(seen | or_lanes(u32(states)))
        count, place = i32(count + ones(live)), i32(place + 32)
    lanes_sync()
    return count, place, seen


@device
def await_list(base, c):
    """List number c, once it may be filled."""
    mbarrier_wait_backoff(empty_barrier(base + AT_LISTS_PIPE, c, LISTS), u32(c) // u32(LISTS) & 1 ^ 1, SLEEP)
    return list_of(base, c)


@device
def hand_over(base, c):
    lanes_sync()
    mbarrier_arrive_once(full_barrier(base + AT_LISTS_PIPE, c, LISTS))

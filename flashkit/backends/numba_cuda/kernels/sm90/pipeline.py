# Descriptors of wgmma operands, and pipelines: circular buffers in shared memory with a full and an empty mbarrier for
# each stage, as in CUTLASS. Index n of a sequence lies in stage n % stages. A pipeline is given by the address of its
# barriers, the full ones first. One without a consumer_release has full barriers only.

ROWS, WARP_ROWS, GROUP_THREADS = 2, 16, 128  # of a lane, of a warp; the threads of a warp group


def along_rows(dim, rows):
    """What each step of 16 columns adds to the descriptor of a tile of `rows` rows."""
    return tuple((k // 4 * rows * CHUNK_ROW + k % 4 * 32) >> 4 for k in range(padded(dim) // 16))


def along_columns(keys):
    """What each step of 16 rows adds."""
    return tuple(k * 16 * CHUNK_ROW >> 4 for k in range(keys // 16))


@device
def descriptor(address, chunk):
    """The lower half of a descriptor: address and, if it is read along columns, the stride from chunk to chunk."""
    return u32(u32(u32(address) >> u32(4)) + u32(chunk >> 4 << 16))


@device
def clear_rows(tile, first, end, rows, many):
    """Write zeros to rows first ... end - 1 of a tile of `rows` rows and `many` chunks, by a warp group: 0 * NaN past
    the length must not matter.
    """
    for i in range(thread() % 128, (end - first) * many * 8, 128):
        vec, chunk, row = i % 8, i // 8 % many, first + i // 8 // many
        store_zeros(tile + (chunk * rows + row) * CHUNK_ROW + vec * VEC_BYTES, 0)
    fence_proxy_async()


# --- pipelines --------------------------------------------------------------------------------------------------------


@device
def stage_of(n, stages):
    return i32(u32(n) % u32(stages))


@device
def full_barrier(pipe, n, stages):
    return pipe + 8 * stage_of(n, stages)


@device
def empty_barrier(pipe, n, stages):
    return full_barrier(pipe + 8 * stages, n, stages)


@device
def mbarrier_wait(barrier, parity):
    if WATCHDOG:  # a debugging aid: a deadlock becomes a fault
        begin = clock()
        while not mbarrier_try_wait(barrier, parity):
            if clock() - begin > 4000000000:
                store_word(u32(0xFFFFFFF0), 0)  # there is no such memory
    else:
        mbarrier_wait_spin(barrier, parity)


@device
def mbarrier_wait_backoff(barrier, parity, nanoseconds):
    """A wait off the critical path: sleeps between attempts, which leaves the issue slots to other warps."""
    while not mbarrier_try_wait(barrier, parity):
        nap(nanoseconds)


@device
def consumer_wait(pipe, n, stages):
    mbarrier_wait(full_barrier(pipe, n, stages), u32(n) // u32(stages) & 1)


@device
def producer_acquire(pipe, n, stages):
    mbarrier_wait(empty_barrier(pipe, n, stages), u32(n) // u32(stages) & 1 ^ 1)


@device
def consumer_release(pipe, n, stages):
    """One arrival for a warp that no longer reads the stage."""
    mbarrier_arrive_once(empty_barrier(pipe, n, stages))


@device
def pipeline_init(pipe, stages, producers, consumers):
    for i in range(stages):
        mbarrier_init(pipe + 8 * i, producers)
        mbarrier_init(pipe + 8 * stages + 8 * i, consumers)


# --- lists of tiles ---------------------------------------------------------------------------------------------------
#
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


@device
def reset_tile_counter(p):
    """By one thread of each CTA, at its end: the last CTA resets the counters for the next launch."""
    if fetch_add(p.tile_counter + 4, 1) == blocks() - 1:
        store(np.int32, p.tile_counter, 0, i32(0))
        store(np.int32, p.tile_counter, 1, i32(0))

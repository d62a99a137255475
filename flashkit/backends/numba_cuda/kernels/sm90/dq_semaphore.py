# The order of adding dQ in the Hopper backward pass: roles of warp group 0.
#
# Those that multiply say at once which tile of dQ their number n is, and which tile of keys, and a step later that it
# is there: meanwhile its turn has come. If it is in shared memory it is added from there; if it is in registers they
# are told when to add it. Two warps do this, each for every second tile. Four slots: before tile n + 4 is asked for, n
# has left.


@device
def slot_of(base, n):
    return base + AT_SLOTS + 8 * stage_of(n, 4)


@device
def ask(base, n, where, tile_k):
    """where: the tile of queries among all."""
    store_word(slot_of(base, n), where)
    store_word(slot_of(base, n) + 4, tile_k)
    mbarrier_arrive(full_barrier(base + AT_ASKED, n, 4))


@device
def wait_for_turn(p, done, tile_k):
    """Until all tiles of keys whose turn comes before tile_k's are done, by a warp."""
    first, end = (tile_k + 1, tiles_along(p.n_k, BLOCK_K)) if FROM_DIAGONAL else (0, tile_k)
    for word in range(first // 32 + thread() % 32, (end + 31) // 32, 32):
        left = end - 32 * word
        need = u32(0xFFFFFFFF) if left >= 32 else u32((u32(1) << u32(left)) - u32(1))
        if FROM_DIAGONAL:
            if first > 32 * word:
                need = u32(need & u32(u32(0xFFFFFFFF) << u32(first % 32)))
        while load_acquired(done + 4 * word) & need != need:
            pass
    lanes_sync()


@device
def keep_order(p, base, which):
    n, leader = u32(which), thread() % 32 == 0
    while True:
        consumer_wait(base + AT_ASKED, n, 4)
        where, tile_k = load_word(slot_of(base, n)), load_word(slot_of(base, n) + 4)
        if where == END:
            break
        done = p.dq_semaphore.data + 4 * (I(where) * p.dq_semaphore.token + 1 + rank_of_block() * order_words(p))
        wait_for_turn(p, done, tile_k)
        if leader:
            if KEYS_SHARED:
                mbarrier_arrive(full_barrier(base + AT_TURN, n, 2))
                consumer_wait(base + AT_ADDED, n, 2)
            else:
                consumer_wait(base + AT_ADDED, n, 2)
                fence_proxies()
                bulk_reduce_add(p.dq_accum.data + I(where) * BYTES_SUMS, base + AT_SUMS, BYTES_SUMS)
                bulk_commit()
                bulk_wait_read(0)
                mbarrier_arrive(full_barrier(base + AT_TURN, n, 2))  # the next one may come
                bulk_wait()
                fence_proxies()
            set_bits_after(done + tile_k // 32 * 4, u32(1) << u32(tile_k % 32))
        lanes_sync()
        n = u32(n + u32(2))

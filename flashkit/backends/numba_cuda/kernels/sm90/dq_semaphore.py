# dQ in global memory: dq_accum, float32 sums of each query tile, and dq_semaphore, which puts the additions in order.
#
# DETERMINISTIC: a query tile is added to by one key tile after the other, so the bits never change. dq_semaphore has a
# bit for each pair of tiles. Work tiles are claimed in the order of the additions, so a CTA only ever waits for
# resident CTAs. Without a mask keys ascend and each CTA goes from the last queries to the first; with one,
# FROM_DIAGONAL.

# The words of a query tile: flags (1 if it has non-finite rows), then for each CTA of a cluster, as it has columns of
# dQ of its own, a bit for each key tile that has been added. Offsets in bytes.
SEMAPHORE_FLAGS, SEMAPHORE_ADDED = 0, 4


@device
def dq_semaphore(p, b, h, tile):
    return number_address(p.dq_semaphore, I(b), I(h), I(tile))


@device
def added_words_per_cta(p):
    return ceil_div(p.n_k, 32 * BLOCK_K)


@device
def added_words(p, semaphore):
    """The CTA's words with a bit for each key tile."""
    return semaphore + SEMAPHORE_ADDED + 4 * cta_rank() * added_words_per_cta(p)


@device
def dq_accum_at(p, index, offset):
    """From byte `offset` of a query tile on. index: of the tile among all."""
    return p.dq_accum.data + I(index) * BYTES_DQ + offset


@device
def skip_dq(p, semaphore, tile_k):
    """Key tile tile_k adds nothing."""
    red_or(added_words(p, semaphore) + tile_k // 32 * 4, u32(1) << u32(tile_k % 32))


@device
def release_dq(added, tile_k):
    """Key tile tile_k has been added."""
    red_or_release(added + tile_k // 32 * 4, u32(1) << u32(tile_k % 32))


@device
def acquire_dq(p, added, index, tile_k):
    """A warp waits until all key tiles that add to query tile `index` before tile_k does have been added."""
    first, end = (tile_k + 1, tiles_of_keys(p)) if FROM_DIAGONAL else (0, tile_k)
    for word in range(first // 32 + thread() % 32, (end + 31) // 32, 32):
        left = end - 32 * word
        needed = u32(0xFFFFFFFF) if left >= 32 else u32((u32(1) << u32(left)) - u32(1))
        if FROM_DIAGONAL:
            if first > 32 * word:
                needed = u32(needed & u32(u32(0xFFFFFFFF) << u32(first % 32)))
        while load_acquire(added + 4 * word) & needed != needed:
            pass
    lanes_sync()


# --- between consumers and the semaphore warps ------------------------------------------------------------------------
#
# Consumers request a turn for query tile n as soon as they know it, a step before its dQ is there: the semaphore warp
# waits meanwhile. dQ then leaves in one of two ways.
#
#     CLUSTER_SIZE == 1   consumers write dQ to shared memory (AT_DQ_WRITTEN); the semaphore warp sends it when its
#                         turn has come, and grants the buffer to the next tile (AT_DQ_GRANTED)
#     CLUSTER_SIZE == 2   the semaphore warp grants the turn (AT_DQ_GRANTED); consumers add from registers
#                         (AT_DQ_WRITTEN)
#
# Two warps take every second tile each. There are four slots: before tile n + 4 is requested, tile n has left.


@device
def dq_slot(base, n):
    """The query tile's index among all, and the key tile."""
    return base + AT_DQ_SLOTS + 8 * stage_of(n, 4)


@device
def request_dq_turn(base, n, index, tile_k):
    store_word(dq_slot(base, n), index)
    store_word(dq_slot(base, n) + 4, tile_k)
    mbarrier_arrive(full_barrier(base + AT_DQ_REQUESTED, n, 4))


@device
def end_dq_requests(base, n):
    request_dq_turn(base, n, END, 0)
    request_dq_turn(base, n + 1, END, 0)


@device
def dq_semaphore_warp(p, base, which):
    """The semaphore warp `which` of two."""
    n, leader = u32(which), thread() % 32 == 0
    while True:
        consumer_wait(base + AT_DQ_REQUESTED, n, 4)
        index, tile_k = load_word(dq_slot(base, n)), load_word(dq_slot(base, n) + 4)
        if index == END:
            break
        added = added_words(p, p.dq_semaphore.data + 4 * (I(index) * p.dq_semaphore.token))
        acquire_dq(p, added, index, tile_k)
        if leader:
            if CLUSTER_SIZE > 1:
                mbarrier_arrive(full_barrier(base + AT_DQ_GRANTED, n, 2))
                consumer_wait(base + AT_DQ_WRITTEN, n, 2)
            else:
                consumer_wait(base + AT_DQ_WRITTEN, n, 2)
                fence_proxies()
                bulk_reduce_add(dq_accum_at(p, index, 0), base + AT_DQ, BYTES_DQ)
                bulk_commit()
                bulk_wait_read(0)
                mbarrier_arrive(full_barrier(base + AT_DQ_GRANTED, n, 2))
                bulk_wait()
                fence_proxies()
            release_dq(added, tile_k)
        lanes_sync()
        n = u32(n + u32(2))

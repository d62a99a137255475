# parts: common/tiles common/fragment sm80/bwd_layout
# The order in which CTAs add to dq_accum, which makes dQ deterministic. p.dq_semaphore has a bit for each pair of a
# query tile and a key tile: the CTA of the key tile has added to the query tile.


@device
def semaphore_at(p, b, h, tile):
    """Address of the bits of a query tile: one for each key tile whose CTA has added to its dQ."""
    return number_address(p.dq_semaphore, I(b), I(h), I(tile))


@device
def semaphore_skip_empty(p, b, head, tile_k, n_k):
    """Sets the bits of query tiles that see none of these keys."""
    if HAS_MASK:
        k0, seq = I(tile_k) * BLOCK_K, seq_info(p, I(b))
        tiles = i32((seq.n_q + BLOCK_Q - 1) // BLOCK_Q)
        k1 = min(k0 + BLOCK_K, I(n_k))
        for h in range(head * GQA_GROUP, head * GQA_GROUP + GQA_GROUP):
            for tile in range(i32(thread()), tiles, THREADS):
                row0 = I(tile) * BLOCK_Q
                if tile_state(p, I(b), I(h), seq.q_position, row0, min(row0 + BLOCK_Q, seq.n_q), k0, k1) == EMPTY:
                    red_or(semaphore_at(p, b, h, tile) + 4 * (tile_k >> 5), u32(1) << u32(tile_k & 31))


@device
def semaphore_release(p, b, h, tile, tile_k):
    """Sets a bit; orders the CTA's additions before its last barrier."""
    red_or_release(semaphore_at(p, b, h, tile) + 4 * (tile_k >> 5), u32(1) << u32(tile_k & 31))


@device
def bits_below(end, word):
    """The bits of tiles before `end` in word number `word`."""
    left = end - 32 * word
    return u32(0xFFFFFFFF) if left >= 32 else u32((u32(1) << u32(max(left, 0) & 31)) - u32(1))


@device
def missing_in_word(semaphore, word, low, high):
    """The bits of tiles low ... high - 1 that are not set yet, in word number `word`."""
    need = u32(bits_below(high, word) & ~bits_below(low, word))
    return u32(need & ~load_relaxed(semaphore + 4 * word)) if need != u32(0) else need


@device
def semaphore_missing(semaphore, low, high):
    """missing_in_word() of a lane's first word, loaded ahead of its use."""
    return missing_in_word(semaphore, (low >> 5) + i32(thread() % 32), low, high)


@device
def semaphore_wait(semaphore, missing, low, high):
    """Waits until the bits of tiles low ... high - 1 are set. A relaxed load suffices: the additions that follow are
    performed at the L2 cache and depend on a branch on it, so they come after the additions that the bits stand for.
    """
    word = low >> 5
    while 32 * word < high:
        while missing != u32(0):
            missing = missing_in_word(semaphore, word + i32(thread() % 32), low, high)
        word += 32
        missing = missing_in_word(semaphore, word + i32(thread() % 32), low, high)
    lanes_sync()


@device
def reduce_add_fragment(i, four, address):
    """Adds four neighbouring registers of a lane to dq_accum."""
    if VECTOR_ADDS:
        red_add_four(address + 512 * i, four)
    else:
        for j in range(4):
            red_add(address + 512 * i + 4 * j, four[j])


@device
def dq_accum_at(p, b, h, tile, warp):
    """Address of a lane's part of dq_accum, which lies in memory as fragments: four registers of each lane in turn."""
    head_accum = number_address(p.dq_accum, I(b), I(h), I(0))
    of_tile = I(tile) * (4 * BLOCK_Q * PADDED_QK)
    return head_accum + of_tile + 128 * SUMS_Q * warp + 16 * (thread() % 32)

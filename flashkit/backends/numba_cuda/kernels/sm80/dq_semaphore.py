# parts: common/tiles common/fragment sm80/bwd_layout
# Sums of dQ in memory: blocks of the backward pass by mma.sync add to a tile of queries one after the other, so the
# bits never change. A block adds when all that come before it are done with the tile; p.dq_semaphore has a bit for each
# pair of tiles. Blocks take their work by a ticket in that order, so whoever waits, waits for a block that runs. They
# work at p.heads_per_l2_group heads at a time, whose rows and sums the L2 cache holds. The last keys come first, and a block goes
# over its queries from the first on: under a causal mask it begins at its diagonal, where it is the first to add. Only
# the last heads go the other way round, where there is a mask: blocks with most to do come first, so that all end at
# about the same time.


@device
def take_work(p, base):
    """Batch entry, head of keys and tile of keys of this block's ticket, and whether it goes the other way round."""
    if thread() == 0:
        store_word(base + AT_TICKET, i32(fetch_add(p.tile_counter, 1)))
    threads_sync()
    index, heads = u32(load_word(base + AT_TICKET)), u32(u32(p.heads) // u32(GQA_GROUP))
    tiles, every = u32((u32(p.n_k) + u32(BLOCK_K - 1)) // u32(BLOCK_K)), u32(heads * u32(p.batch))
    most = u32(p.heads_per_l2_group)
    first = u32(index // u32(most * tiles) * most)
    rest = u32(index - first * tiles)
    size = u32(min(every - first, most))
    place = u32(rest // size)
    head = u32(first + rest - place * size)
    down = HAS_MASK and every > most and first >= u32(u32(every - u32(1)) // most * most)
    return i32(head // heads), i32(head % heads), i32(place) if down else i32(tiles - u32(1) - place), down


@device
def bits_at(p, b, h, tile):
    """Address of the bits of a tile of queries."""
    return number_address(p.dq_semaphore, I(b), I(h), I(tile))


@device
def leave_out(p, b, head, tile_k, n_k):
    """Say of tiles of queries that see none of these keys that the block is done with them."""
    if HAS_MASK:
        k0, tiles, offset = I(tile_k) * BLOCK_K, i32((p.n_q + BLOCK_Q - 1) // BLOCK_Q), offset_of(p, I(b))
        k1 = min(k0 + BLOCK_K, I(n_k))
        for h in range(head * GQA_GROUP, head * GQA_GROUP + GQA_GROUP):
            for tile in range(i32(thread()), tiles, THREADS):
                row0 = I(tile) * BLOCK_Q
                if tile_state(p, I(b), I(h), offset, row0, min(row0 + BLOCK_Q, p.n_q), k0, k1) == EMPTY:
                    set_bits(bits_at(p, b, h, tile) + 4 * (tile_k >> 5), u32(1) << u32(tile_k & 31))


@device
def be_done(p, b, h, tile, tile_k):
    """What the block's threads have added to a tile before they last met is there when the bit is."""
    set_bits_after(bits_at(p, b, h, tile) + 4 * (tile_k >> 5), u32(1) << u32(tile_k & 31))


@device
def bits_below(end, word):
    """Bits of word number `word` that the tiles before `end` have."""
    left = end - 32 * word
    return u32(0xFFFFFFFF) if left >= 32 else u32((u32(1) << u32(max(left, 0) & 31)) - u32(1))


@device
def missing_at(bits, word, low, high):
    """Of tiles low ... high - 1 those that are not done yet, in a word of their bits."""
    need = u32(bits_below(high, word) & ~bits_below(low, word))
    return u32(need & ~load_now(bits + 4 * word)) if need != u32(0) else need


@device
def missing_first(bits, low, high):
    """The same in a lane's first word: looked at a while before it matters, as memory is far."""
    return missing_at(bits, (low >> 5) + i32(thread() % 32), low, high)


@device
def wait_for_turn(bits, missing, low, high):
    """Until the blocks of tiles low ... high - 1 are done with a tile of queries. What comes next acts where memory is
    and after a branch, so later than what the bits stand for, without a load that acquires.
    """
    word = low >> 5
    while 32 * word < high:
        while missing != u32(0):
            missing = missing_at(bits, word + i32(thread() % 32), low, high)
        word += 32
        missing = missing_at(bits, word + i32(thread() % 32), low, high)
    lanes_sync()


@device
def add_four(i, four, address):
    """Four neighbouring registers of a lane to their place among the sums."""
    if VECTOR_ADDS:
        add_to_four(address + 512 * i, four)
    else:
        for j in range(4):
            add_to(address + 512 * i + 4 * j, four[j])


@device
def sums_of(p, b, h, tile, warp):
    """Where a lane's sums of dQ are: as its warp holds them, four registers of each lane after the other."""
    head = number_address(p.dq_accum, I(b), I(h), I(0))
    return head + I(tile) * (4 * BLOCK_Q * WHOLE) + 128 * SUMS_Q * warp + 16 * (thread() % 32)

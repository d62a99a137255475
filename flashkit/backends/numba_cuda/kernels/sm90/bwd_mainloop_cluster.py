# parts: sm90/backward
# Products of the Hopper backward pass where dK and dV of 64 keys do not fit the registers of a warp group. A cluster of
# two blocks has an item, 64 keys each; of a block's groups one has what is of pairs, the other the sums over them. All
# are turned: keys are the rows.
#
#     S, P, dP, dS  [64][64]   registers of the first group; dS also in shared memory, of both blocks
#     dV            [64][..]   registers of the first
#     dK            [64][..]   registers of the second
#     dQ^T          half the columns, of the keys of both blocks: registers of the second, from where they are added
#
# What limited one block alone is the way to the L2 cache: dQ, in float32, took more of it than all that is read. So
# blocks send each other dS, in 16 bits, and each adds half the columns, once for 128 keys.
#
# A step, for the tile of queries number n, of the first group and of the second:
#
#     S = K Q^T was begun in the step before     dK += dS Q
#     dP = V dO^T, meanwhile weights of S        dQ^T = K^T dS of the block's own keys
#     dV += P dO, meanwhile dS of dP,            the other block's dS is waited for
#         which goes to both blocks              dQ^T += K^T dS of its keys
#     S of the next tile                         dQ leaves

BYTES_HANDED = BYTES_DS // SIDE  # what a warp's dS of a tile is, to shared memory of both blocks: 16 rows of keys
PART, PARTS_OF_DQ = BLOCK_Q // 2, SHARE * BLOCK_Q // 2  # registers of a lane: 64 columns of dQ, those of a block

send_dv = keys_sender(COLUMNS_V, 0, chunks_v, HELD * CHUNK_ROW)
send_dk = keys_sender(COLUMNS, 0, SHARE, HELD * CHUNK_ROW)

dk_product = wgmma(STORAGE, COLUMNS, along_rows(BLOCK_Q, HELD), along_columns(BLOCK_Q), turned_b=True)
dq_product, dq_fresh = (
    wgmma(
        STORAGE, BLOCK_Q, along_columns(HELD), along_columns(HELD), turned_a=True, turned_b=True, fresh=fresh
    ) for fresh in (False, True)
)  # fmt: skip


# --- the first group: what is of pairs --------------------------------------------------------------------------------


@device
def store_sixteen(i, words, place):
    """16 queries of a warp's keys, as rows of keys."""
    stmatrix_x4(u32(place ^ u32(2 * VEC_BYTES * i)), words[0], words[1], words[2], words[3])


@device
def hand_pairs(base, n, ds, places):
    """A warp's dS to shared memory, and from there to the other block's."""
    hand, place, there, told = places
    producer_acquire(base + AT_DS_PIPE, n, 1)
    producer_acquire(base + AT_DSMEM_PIPE, n, 1)
    groups(store_sixteen, 4, ds, place)
    fence_proxy_async()
    lanes_sync()
    dsmem_copy(there, hand, BYTES_HANDED, told)
    mbarrier_arrive_once(base + AT_DS_PIPE)


@device
def begin_pairs(base, k_tile, number, n, dv, rest):
    consumer_wait(base + AT_Q_PIPE, n, STAGES)
    s = scores(base, k_tile, 0, n)
    consumer_wait(base + AT_V_PIPE, number, 1)
    return s, dv


@device
def step_of_pairs(p, base, k_tile, number, even, tile, state, rest):
    """Tile n, whose scores have been begun: to its dS, and dV. first, last: of the item."""
    n, first = tile
    _, rank, _, own, places, unit = rest
    s, dv = state
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    shift, delta = own + AT_SHIFT + stage * BYTES_ROWS, own + AT_DELTA + dout_stage * BYTES_ROWS
    dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT
    tile_desc = uniform(load_word(tile_desc_of(base, n)))
    last = tile_desc & LAST_TILE != 0
    if ORDERED:
        if thread() == 128:
            ask(base, n, load_word(tile_desc_of(base, n) + 8), load_word(work_tile_slot(base, number) + 8) // BLOCK_K)
    early = listed(numbers_of, EARLY, shift)
    consumer_wait(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    wgmma_wait(0)  # S
    s = fence_operand(s)
    dp = gradients_of_weights(base, 0, dout_tile)
    s, w, kept, plain = weights(p, base, n, number, tile_desc, rank, even, s, early, shift, unit)
    wgmma_fence()
    dv = dv_product(dv, w, descriptor(dout_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    wgmma_commit()
    wgmma_wait(1)  # dP
    ds = gradients(p, s, fence_operand(dp), plain, delta, kept)
    hand_pairs(base, n, ds, places)
    consumer_release(base + AT_Q_PIPE, n, STAGES)
    if not last:
        consumer_wait(base + AT_Q_PIPE, n + 1, STAGES)
    # Always begun, or the compiler makes it wait; after the last tile nothing comes of it.
    s = scores(base, k_tile, 0, n if last else n + 1)
    wgmma_wait(1)  # dV
    w = fence_operand(w)
    consumer_release(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    return (s, dv), last


@device
def finish_pairs(p, base, k_tile, number, n, state, rest):
    _, rank, warp, _, _, _ = rest
    s, dv = state
    s, dv = fence_operand(s), fence_operand(dv)
    at = read_item(base, number)
    consumer_release(base + AT_K_PIPE, number, KEY_BUFFERS)
    named_barrier_sync(1, 128)  # nobody reads V any more: dV leaves through its place
    lane, first, place = opaque(thread() % 32), HELD * rank + 16 * warp, base + AT_V + BYTES_PIECE * warp
    send_dv(map_address("map_dv"), at, first, lane, place, dv, np.float32(1))
    bulk_wait_read(0)
    lanes_sync()
    consumer_release(base + AT_V_PIPE, number, 1)
    return dv


# --- the second group: sums over pairs --------------------------------------------------------------------------------


@device
def begin_part(c, _, rest):
    keys, ds = rest
    return dq_fresh(descriptor(keys + c * HELD * CHUNK_ROW, 16), descriptor(ds, 16))


@device
def add_part(c, dq, rest):
    keys, ds = rest
    return dq_product(dq, descriptor(keys + c * HELD * CHUNK_ROW, 16), descriptor(ds, 16), 1)


@device
def query_gradients(part, dq, keys, ds):
    """dQ^T = K^T dS of a block's keys, or that added; 64 columns after the other, each by part()."""
    wgmma_fence()
    dq = groups(part, PART, dq, (keys, ds))
    wgmma_commit()
    return dq


@device
def send_part(c, dq, rest):
    target, first = rest
    if chunks_q % SHARE == 0 or first + c < chunks_q:
        groups(add_four, 4, dq, target + c * BYTES_PART)


@device
def begin_sums(base, k_tile, number, n, dk, rest):
    return dk, read_item(base, number)


@device
def step_of_sums(p, base, k_tile, number, even, tile, state, rest):
    """Tile n, whose dS comes from both blocks: to dK and dQ."""
    n, first = tile
    _, rank, warp, part_of_lane, room = rest
    dk, at = state
    q_tile, pairs_here = base + AT_Q + stage_of(n, STAGES) * BYTES_Q, base + AT_DS
    consumer_wait(base + AT_Q_PIPE, n, STAGES)
    tile_desc, where = uniform(load_word(tile_desc_of(base, n))), load_word(tile_desc_of(base, n) + 8)
    last = tile_desc & LAST_TILE != 0
    consumer_wait(base + AT_DS_PIPE, n, 1)
    wgmma_fence()
    dk = dk_product(dk, descriptor(pairs_here, 16), descriptor(q_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    wgmma_commit()
    own_tile = k_tile + SHARE * HELD * CHUNK_ROW * rank
    dq = query_gradients(begin_part, filled(ZERO, PARTS_OF_DQ), own_tile, pairs_here)
    wgmma_wait(1)  # dK
    consumer_release(base + AT_Q_PIPE, n, STAGES)
    if first:
        consumer_wait(base + AT_PEER_K_PIPE, number, 1)
    consumer_wait(base + AT_DSMEM_PIPE, n, 1)
    dq = query_gradients(add_part, dq, base + AT_OTHERS, pairs_here + BYTES_DS)
    wgmma_wait(1)  # dQ of the block's own keys
    consumer_release(base + AT_DS_PIPE, n, 1)
    wgmma_wait(0)
    dq = fence_operand(dq)
    if warp == 0:
        arrive_and_expect_once(base + AT_DSMEM_PIPE, BYTES_DS)  # of the next tile
    dsmem_arrive(room)
    if ORDERED:
        consumer_wait(base + AT_TURN, n, 2)
    if last:
        consumer_release(base + AT_K_PIPE, number, KEY_BUFFERS)
    chunk = SHARE * rank
    groups(send_part, PART, dq, (part_of_sums(p, where, chunk * BYTES_PART + part_of_lane), chunk))
    if ORDERED:
        lanes_sync()
        mbarrier_arrive_once(full_barrier(base + AT_ADDED, n, 2))
    return (dk, at), last


@device
def finish_sums(p, base, k_tile, number, n, state, rest):
    _, rank, warp, _, _ = rest
    dk, at = state
    dk = fence_operand(dk)
    named_barrier_sync(2, 128)  # nobody reads the other block's keys any more: dK leaves through their place
    lane, first, place = opaque(thread() % 32), HELD * rank + 16 * warp, base + AT_OTHERS + BYTES_PIECE * warp
    send_dk(map_address("map_dk"), at, first, lane, place, dk, np.float32(p.softmax_scale))
    bulk_wait_read(0)
    lanes_sync()
    consumer_release(base + AT_PEER_K_PIPE, number, 1)
    return dk


# --- both -------------------------------------------------------------------------------------------------------------


@device
def multiply_pairs(p, base, rank, warp, lane):
    unit = as_float(uniform(as_int(np.float32(p.softmax_scale * 1.4426950408889634))))  # or it is computed anew, in float64
    # Where a lane's numbers of queries are; a warp's dS, a lane's matrices of it, its place in the other block, and the
    # barrier there.
    own, hand = u32(opaque(base + own_row())), u32(base + AT_DS + warp * BYTES_HANDED)
    place = u32(opaque(hand + swizzled(lane % 16, lane // 16)))
    there, told = mapa(u32(hand + BYTES_DS), 1 - rank), mapa(u32(base + AT_DSMEM_PIPE), 1 - rank)
    rest = 0, rank, warp, own, (hand, place, there, told), unit
    n = multiply_items(p, base, filled(ZERO, SUMS_V), begin_pairs, step_of_pairs, finish_pairs, rest)
    if ORDERED:
        if thread() == 128:
            ask(base, n, END, 0)
            ask(base, n + 1, END, 0)


@device
def multiply_sums(p, base, rank, warp, lane):
    if warp == 0:
        arrive_and_expect_once(base + AT_DSMEM_PIPE, BYTES_DS)
    room = mapa(u32(base + AT_DSMEM_PIPE + 8), 1 - rank)
    rest = 0, rank, warp, u32(BYTES_WARP * warp + 16 * lane), room  # its part of a chunk of dQ
    multiply_items(p, base, filled(ZERO, SUMS), begin_sums, step_of_sums, finish_sums, rest)


@device
def consumer(p, base, group):
    rank, warp, lane = uniform(rank_of_block()), i32(uniform(thread() // 32 % 4)), opaque(thread() % 32)
    if group == 0:
        multiply_pairs(p, base, rank, warp, lane)
    else:
        multiply_sums(p, base, rank, warp, lane)
    bulk_wait()

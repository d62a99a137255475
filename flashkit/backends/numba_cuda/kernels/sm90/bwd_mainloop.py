# parts: sm90/backward
# Products of the Hopper backward pass where each warp group has 64 of the keys. All are turned: keys are the rows.
#
#     S, P         [64][BLOCK_Q]   registers
#     dP, dS       [64][BLOCK_Q]   registers; dS also in shared memory, two tiles, for dQ
#     dK, dV       [64][..]        registers
#     dQ           a part          registers, then shared memory, from where the copy engine adds it
#
# A step, for the tile of queries number n:
#
#     S = K Q^T            was begun in the step before,
#     dP = V dO^T          is begun; meanwhile S becomes weights,
#     dV += P dO           is begun; meanwhile dP becomes dS, which goes to shared memory,
#     dQ^T = K^T dS        of the tile before, so that nobody waits for the other group's dS,
#     dK += dS Q           (up to 64 columns before dQ) and the next tile's scores are begun; meanwhile dQ leaves.

KEYS_FIRST = chunks_q == 1 and not FROM_DIAGONAL  # dK is begun before dQ; not where others wait for dQ at once

PIECES = BYTES_WARP // BYTES_PIECE
send_dv, send_dk = (
    keys_sender(columns, before, PIECES, BYTES_PIECE) for columns, before in ((COLUMNS_V, 0), (COLUMNS, chunks_v))
)

dk_product = wgmma_registers(STORAGE, COLUMNS, along_columns(BLOCK_Q), turned_b=True)
dq_product = wgmma(
    STORAGE, PART_ROWS, along_columns(BLOCK_K), along_rows(BLOCK_K, BLOCK_Q), turned_a=True, fresh=True
)  # fmt: skip

# Where a group's part of dQ begins in K and in dS.
K_OF_GROUP, DS_OF_GROUP = (BLOCK_K * CHUNK_ROW, 0) if BY_COLUMNS else (0, PART_ROWS * CHUNK_ROW)


@device
def query_gradients(base, k_tile, group, n):
    """dQ^T = K^T dS of a tile, a chunk of columns or a part of the rows."""
    ds = base + AT_DS + stage_of(n, 2) * BYTES_DS
    wgmma_fence()
    dq = dq_product(descriptor(k_tile + group * K_OF_GROUP, 16), descriptor(ds + group * DS_OF_GROUP, 16))
    wgmma_commit()
    return dq


@device
def key_gradients(base, dk, ds, n, first):
    """dK += dS Q."""
    q_tile = base + AT_Q + stage_of(n, STAGES) * BYTES_Q
    wgmma_fence()
    dk = dk_product(dk, ds, descriptor(q_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    wgmma_commit()
    return dk


@device
def release_tile(base, n):
    consumer_release(base + AT_Q_PIPE, n, STAGES)
    consumer_release(base + AT_DOUT_PIPE, n, DOUT_STAGES)


# --- dS to shared memory, dQ to memory --------------------------------------------------------------------------------


@device
def store_sixteen(i, words, target):
    """16 queries of a warp's keys, as rows of queries."""
    store_matrices_turned(target + 16 * i * CHUNK_ROW, words[0], words[1], words[2], words[3])


@device
def hand_pairs(base, n, ds, pairs_of_lane):
    """A warp's dS to shared memory, for dQ."""
    producer_acquire(base + AT_DS_PIPE, n, 2)
    groups(store_sixteen, 4, ds, pairs_of_lane + u32(stage_of(n, 2) * BYTES_DS))
    fence_proxy_async()
    lanes_sync()
    mbarrier_arrive_once(full_barrier(base + AT_DS_PIPE, n, 2))


@device
def stage_four(i, four, target):
    store_four(target + 512 * i, four)


@device
def stage_sums(base, n, dq, lane_part):
    """dQ leaves in two steps: to shared memory at once; from there when the next proxy fence has been made anyway, or
    in order by a warp that makes its own.
    """
    consumer_release(base + AT_DS_PIPE, n, 2)
    if ORDERED:
        consumer_wait(base + AT_TURN, u32(n - 1), 2)
    bulk_wait_read(0)
    lanes_sync()
    groups(stage_four, 4, dq, base + AT_SUMS + lane_part)
    if ORDERED:
        lanes_sync()
        mbarrier_arrive_once(full_barrier(base + AT_ADDED, n, 2))


@device
def send_sums(p, base, where, warp):
    """After a fence and lanes_sync()."""
    if not ORDERED:
        part = BYTES_WARP * warp
        add_bulk_once(part_of_sums(p, where, part), base + AT_SUMS + part, BYTES_WARP)
        bulk_commit()


# --- multiplying ------------------------------------------------------------------------------------------------------

@device
def begin(base, k_tile, number, n, sums, rest):
    consumer_wait(base + AT_Q_PIPE, n, STAGES)
    s = scores(base, k_tile, rest[0], n)
    consumer_wait(base + AT_V_PIPE, number, 1)
    return s, sums[0], sums[1], i32(-1), i32(-1)  # tiles of dQ: in shared memory, and the one that is next


@device
def step(p, base, k_tile, number, even, tile, state, rest):
    """Tile n, whose scores have been begun: to its dV and dK, and dQ of the tile before. first, last: of the item."""
    n, first = tile
    group, (own, lane_part, pairs_of_lane, warp), unit = rest
    s, dk, dv, staged, before = state
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    shift, delta = own + AT_SHIFT + stage * BYTES_ROWS, own + AT_DELTA + dout_stage * BYTES_ROWS
    dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT
    tile_desc, where = uniform(load_word(tile_desc_of(base, n))), load_word(tile_desc_of(base, n) + 8)
    last = tile_desc & LAST_TILE != 0
    if ORDERED:
        if thread() == 128:
            ask(base, n, where, load_word(work_tile_slot(base, number) + 8) // BLOCK_K)
    early = listed(numbers_of, EARLY, shift)
    consumer_wait(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    wgmma_wait(0)  # S, and dK of the tile before
    s = fence_operand(s)
    dp = gradients_of_weights(base, group, dout_tile)
    s, w, kept, plain = weights(p, base, n, number, tile_desc, group, even, s, early, shift, unit)
    wgmma_fence()
    dv = dv_product(dv, w, descriptor(dout_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    wgmma_commit()
    wgmma_wait(1)  # dP
    if last:  # the next item's values may come while this one ends
        consumer_release(base + AT_V_PIPE, number, 1)
    ds = gradients(p, s, fence_operand(dp), plain, delta, kept)
    hand_pairs(base, n, ds, pairs_of_lane)
    if staged >= 0:
        send_sums(p, base, staged, warp)
    wgmma_wait(0)  # dV
    w = fence_operand(w)
    if KEYS_FIRST:
        dk = key_gradients(base, dk, ds, n, first)
    if not first:
        consumer_wait(base + AT_DS_PIPE, n - 1, 2)
    # Always begun, or the compiler makes it wait; of an item's first tile nothing comes of it.
    dq = query_gradients(base, k_tile, group, n + 1)
    if not KEYS_FIRST:
        dk = key_gradients(base, dk, ds, n, first)
    if not last:
        consumer_wait(base + AT_Q_PIPE, n + 1, STAGES)
    s = scores(base, k_tile, group, n if last else n + 1)  # likewise, of the last
    wgmma_wait(1)  # dQ, dK
    dq, ds = fence_operand(dq), fence_operand(ds)
    release_tile(base, n)
    if not first:
        stage_sums(base, n - 1, dq, lane_part)
    return (s, dk, dv, before, where), last


@device
def finish(p, base, k_tile, number, n, state, rest):
    group, (_, lane_part, _, warp), _ = rest
    s, dk, dv, staged, before = state
    s, dk, dv = fence_operand(s), fence_operand(dk), fence_operand(dv)
    consumer_wait(base + AT_DS_PIPE, n - 1, 2)
    dq = query_gradients(base, k_tile, group, n - 1)
    if not ORDERED:
        fence_proxy_async()
        lanes_sync()
        if staged >= 0:
            send_sums(p, base, staged, warp)
    wgmma_wait(0)
    dq = fence_operand(dq)
    if ORDERED:
        stage_sums(base, n - 1, dq, lane_part)
    else:  # from registers, while what leaves through shared memory does so
        consumer_release(base + AT_DS_PIPE, n - 1, 2)
        groups(add_four, 4, dq, part_of_sums(p, before, lane_part))
    at = read_item(base, number)
    consumer_release(base + AT_K_PIPE, number, KEY_BUFFERS)
    if ORDERED:
        consumer_wait(base + AT_TURN, u32(n - 1), 2)  # the sums have left
    lane, first, place = opaque(thread() % 32), 16 * warp, base + AT_SUMS + BYTES_WARP * warp
    send_dv(map_address("map_dv"), at, first, lane, place, dv, np.float32(1))
    send_dk(map_address("map_dk"), at, first, lane, place, dk, np.float32(p.softmax_scale))
    return dk, dv


@device
def consumer(p, base, group):
    unit = as_float(uniform(as_int(np.float32(p.softmax_scale * 1.4426950408889634))))  # or it is computed anew, in float64
    # What follows from the thread is made once: asking again which it is waits for all stores to shared memory before.
    lane, warp = opaque(thread() % 32), i32(uniform(thread() // 32) - 4)
    # Where a lane's numbers of queries are, its part of a tile of dQ, and its matrices of dS; its warp.
    lane_places = (
        u32(opaque(base + own_row())),
        u32(BYTES_WARP * warp + 16 * lane),
        u32(opaque(base + AT_DS + group * BLOCK_Q * CHUNK_ROW
                 + swizzled(lane % 8 + lane // 16 * 8, warp % 4 * 2 + lane // 8 % 2))),
        warp,
    )  # fmt: skip
    sums = filled(ZERO, SUMS), filled(ZERO, SUMS_V)
    n = multiply_items(p, base, sums, begin, step, finish, (group, lane_places, unit))
    if ORDERED:
        if thread() == 128:
            ask(base, n, END, 0)
            ask(base, n + 1, END, 0)
    bulk_wait()

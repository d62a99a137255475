# parts: sm90_backward
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
#     dK += dS Q           and the next tile's scores are begun; meanwhile dQ goes to shared memory.

# Where a group's part of dQ begins in K and in dS.
K_OF_GROUP, DS_OF_GROUP = (BLOCK_K * CHUNK_ROW, 0) if BY_COLUMNS else (0, PART_ROWS * CHUNK_ROW)


@device
def query_gradients_of(base, k_tile, group, n):
    ds = base + AT_PAIRS + stage_of(n, 2) * BYTES_PAIRS
    return query_gradients(k_tile + group * K_OF_GROUP, ds + group * DS_OF_GROUP)


# --- dS to shared memory, dQ to memory --------------------------------------------------------------------------------


@device
def stage_four(i, four, target):
    store_four(target + 512 * i, four)


@device
def stage_sums(base, n, dq, part_of_lane):
    """dQ leaves in two steps: to shared memory at once; from there when the next proxy fence has been made anyway, or
    in order by a warp that makes its own.
    """
    release(base + AT_PAIRS_RING, n, 2)
    if ORDERED:
        wait_full(base + AT_TURN, u32(n - 1), 2)
    else:
        stores_wait_read()
    lanes_sync()
    groups(stage_four, 4, dq, part_of_lane)
    if ORDERED:
        lanes_sync()
        arrive_once(full_of(base + AT_ADDED, n, 2))


@device
def send_sums(p, base, where, part_of_warp):
    """After a fence and lanes_sync(). where: the tile of queries among all."""
    if not ORDERED:
        target = p.partial.data + I(where) * BYTES_SUMS + part_of_warp
        add_bulk_once(target, base + AT_SUMS + part_of_warp, BYTES_WARP)
        stores_end()


# --- multiplying ------------------------------------------------------------------------------------------------------

@device
def begin(base, k_tile, number, n, sums, rest):
    wait_full(base + AT_Q_RING, n, STAGES)
    s = scores(base, k_tile, rest[0], n)
    wait_full(base + AT_V_RING, number, 1)
    return s, sums[0], sums[1], i32(-1), i32(-1)  # tiles of dQ: in shared memory, and the one that is next


@device
def step(p, base, k_tile, number, even, tile, state, rest):
    """Tile n, whose scores have been begun: to its dV and dK, and dQ of the tile before. first, last: of the item."""
    n, first = tile
    group, (own, part_of_lane, pairs_of_lane, part_of_warp), unit = rest
    s, dk, dv, staged, before = state
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    shift, delta = own + AT_SHIFT + stage * BYTES_ROWS, own + AT_DELTA + dout_stage * BYTES_ROWS
    q_tile, dout_tile = base + AT_Q + stage * BYTES_Q, base + AT_DOUT + dout_stage * BYTES_DOUT
    note, where = uniform(load_word(note_of(base, n))), load_word(note_of(base, n) + 8)
    last = note & LAST_TILE != 0
    if ORDERED:
        if thread() == 128:
            ask(base, n, where, load_word(item_slot(base, number) + 8) // BLOCK_K)
    early = listed(numbers_of, EARLY, shift)
    wait_full(base + AT_DOUT_RING, n, DOUT_STAGES)
    products_wait(0)  # S, and dK of the tile before
    s = settle(s)
    dp = gradients_of_weights(base, group, dout_tile)
    if not first:
        release(base + AT_Q_RING, n - 1, STAGES)
        release(base + AT_DOUT_RING, n - 1, DOUT_STAGES)

    s, w, kept, plain = weights(p, base, n, number, note, group, even, s, early, shift, unit)
    products_begin()
    dv = dv_product(dv, w, descriptor(dout_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    products_wait(1)  # dP
    ds = gradients(p, s, settle(dp), plain, delta, kept)
    hand_pairs(base, n, ds, pairs_of_lane)
    if staged >= 0:
        send_sums(p, base, staged, part_of_warp)
    products_wait(0)  # dV
    w = settle(w)
    if not first:
        wait_full(base + AT_PAIRS_RING, n - 1, 2)
    # Always begun, or the compiler makes it wait; of an item's first tile nothing comes of it.
    dq = query_gradients_of(base, k_tile, group, n + 1)
    products_begin()
    dk = dk_product(dk, ds, descriptor(q_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    if not last:
        wait_full(base + AT_Q_RING, n + 1, STAGES)
    s = scores(base, k_tile, group, n if last else n + 1)  # likewise, of the last
    products_wait(1)  # dQ, dK
    dq, ds = settle(dq), settle(ds)
    if not first:
        stage_sums(base, n - 1, dq, part_of_lane)
    return (s, dk, dv, before, where), last


@device
def finish(p, base, k_tile, number, n, state, rest):
    group, (_, part_of_lane, _, part_of_warp), _ = rest
    s, dk, dv, staged, before = state
    s, dk, dv = settle(s), settle(dk), settle(dv)
    release(base + AT_Q_RING, n - 1, STAGES)
    release(base + AT_DOUT_RING, n - 1, DOUT_STAGES)
    release(base + AT_V_RING, number, 1)
    wait_full(base + AT_PAIRS_RING, n - 1, 2)
    dq = query_gradients_of(base, k_tile, group, n - 1)
    fence_async()
    lanes_sync()
    if staged >= 0:
        send_sums(p, base, staged, part_of_warp)
    products_wait(0)
    stage_sums(base, n - 1, settle(dq), part_of_lane)
    at = read_item(base, number)
    fence_async()
    lanes_sync()
    send_sums(p, base, before, part_of_warp)
    release(base + AT_K_RING, number, KEY_BUFFERS)
    store_keys(p, p.dv, at, group, dv, np.float32(1), HEAD_DIM_V, MISSING_V)
    store_keys(p, p.dk, at, group, dk, np.float32(p.scale), HEAD_DIM, MISSING)
    return dk, dv


@device
def multiply_tiles(p, base, group):
    unit = as_float(uniform(as_int(np.float32(p.scale * 1.4426950408889634))))  # or it is computed anew, in float64
    # What follows from the thread is made once: asking again which it is waits for all stores to shared memory before.
    lane, warp = here(thread() % 32), u32(uniform(thread() // 32)) - u32(4)
    # Where a lane's numbers of queries are, its part of dQ in shared memory, and its matrices of dS; its warp's part.
    lane_places = (
        u32(here(base + own_row())),
        u32(base + AT_SUMS + warp * BYTES_WARP + lane * 16),
        u32(here(base + AT_PAIRS + group * BLOCK_Q * CHUNK_ROW
                 + swizzled(lane % 8 + lane // 16 * 8, warp % 4 * 2 + lane // 8 % 2))),
        i32(warp * BYTES_WARP),
    )  # fmt: skip
    sums = filled(ZERO, SUMS), filled(ZERO, SUMS_V)
    n = multiply_items(p, base, sums, begin, step, finish, (group, lane_places, unit))
    if ORDERED:
        wait_full(base + AT_TURN, u32(n - 1), 2)
        if thread() == 128:
            ask(base, n, END, 0)
            ask(base, n + 1, END, 0)
    else:
        stores_wait()

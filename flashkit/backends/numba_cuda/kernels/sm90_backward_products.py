# parts: sm90_backward
# Products of the Hopper backward pass where dK and dV of 64 keys do not fit the registers of a warp group: one has dV,
# and makes the weights, the other dK, and makes their gradients. All are turned: keys are the rows.
#
#     S, P     [64][64]   registers of the first group, which hands P to the other through shared memory, in float32
#     dP, dS   [64][64]   registers of the second; dS also in shared memory, two tiles, for dQ
#     dV, dK   [64][..]   registers of the first, of the second
#     dQ       half the columns each, 64 at a time: registers, from where they are added
#
# A step, for the tile of queries number n, of one group and of the other:
#
#     weights of S                          dS of dP, and of the weights that the first group hands over
#     dQ^T = K^T dS of the tile before      dQ^T = K^T dS, 64 columns
#     dV += P dO                            dK += dS Q
#     dQ^T, 64 more columns                 dQ^T, 64 more columns
#     S = K Q^T of the next tile            dP = V dO^T of the next tile
#
# So the first group is ahead by about half a step, and each one's small steps take place beside the other's products.

BYTES_CHUNK = BLOCK_K * CHUNK_ROW  # of K
HAS, HAS_TOO = (chunks_q + 1) // 2, chunks_q // 2  # chunks of dQ of the first group and of the second


@device
def ds_of(base, n):
    return base + AT_PAIRS + stage_of(n, 2) * BYTES_PAIRS


# --- weights from group to group, dQ to memory ------------------------------------------------------------------------


@device
def hand_four(i, four, place):
    store_four(place + 2048 * i, four)


@device
def take_four(i, _, place):
    x = load_unit(place + 2048 * i)
    return as_float(i32(x[0])), as_float(i32(x[1])), as_float(i32(x[2])), as_float(i32(x[3]))


@device
def add_four(i, four, address):
    add_to_four(address + 512 * i, four)


@device
def add_sums(p, where, chunk, dq, part_of_lane):
    """A chunk of dQ. where: the tile of queries among all."""
    groups(add_four, 4, dq, p.partial.data + I(where) * BYTES_SUMS + chunk * BYTES_PART + part_of_lane)


@device
def await_order(base, n):
    """Until dQ of tile n may be added."""
    if ORDERED:
        wait_full(base + AT_TURN, n, 2)


@device
def all_added(base, n):
    if ORDERED:
        lanes_sync()
        arrive_once(full_of(base + AT_ADDED, n, 2))


# --- the first group --------------------------------------------------------------------------------------------------


@device
def begin_weights(base, k_tile, number, n, dv, rest):
    wait_full(base + AT_Q_RING, n, STAGES)
    return scores(base, k_tile, 0, n), dv, i32(0)


@device
def step_of_weights(p, base, k_tile, number, even, tile, state, rest):
    """Tile n, whose scores have been begun: to its weights and dV, and dQ of the tile before. first: of the item."""
    n, first = tile
    _, (own, part_of_lane, place, _), unit = rest
    s, dv, before = state
    dout_tile = base + AT_DOUT + stage_of(n, DOUT_STAGES) * BYTES_DOUT
    note, where = uniform(load_word(note_of(base, n))), load_word(note_of(base, n) + 8)
    last = note & LAST_TILE != 0
    if ORDERED:
        if thread() == 128:
            ask(base, n, where, load_word(item_slot(base, number) + 8) // BLOCK_K)
    shift = own + AT_SHIFT + stage_of(n, STAGES) * BYTES_ROWS
    early = listed(numbers_of, EARLY, shift)
    products_wait(0)  # S
    s, w, _, _ = weights(p, base, n, number, note, 0, even, settle(s), early, shift, unit)
    wait_empty(base + AT_WEIGHTS_RING, n, 1)
    groups(hand_four, 4, s, place)
    lanes_sync()
    arrive_once(base + AT_WEIGHTS_RING)
    release(base + AT_Q_RING, n, STAGES)
    wait_full(base + AT_DOUT_RING, n, DOUT_STAGES)
    if not first:
        wait_full(base + AT_PAIRS_RING, n - 1, 2)
    # Always begun, or the compiler makes it wait; of an item's first tile nothing comes of it.
    ds = ds_of(base, n + 1)
    dq = query_gradients(k_tile, ds)
    products_begin()
    dv = dv_product(dv, w, descriptor(dout_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    products_wait(1)  # dQ
    dq = settle(dq)
    if not first:
        await_order(base, u32(n - 1))
        add_sums(p, before, 0, dq, part_of_lane)
    if HAS > 1:
        dq = query_gradients(k_tile + BYTES_CHUNK, ds)
    if not last:
        wait_full(base + AT_Q_RING, n + 1, STAGES)
    s = scores(base, k_tile, 0, n if last else n + 1)  # likewise, of the last
    products_wait(1)  # dV, dQ
    w, dq = settle(w), settle(dq)
    release(base + AT_DOUT_RING, n, DOUT_STAGES)
    if not first:
        if HAS > 1:
            add_sums(p, before, 1, dq, part_of_lane)
        all_added(base, u32(n - 1))
        release(base + AT_PAIRS_RING, n - 1, 2)
    return (s, dv, where), last


@device
def finish_weights(p, base, k_tile, number, n, state, rest):
    part_of_lane = rest[1][1]
    s, dv, before = state
    s, dv = settle(s), settle(dv)
    wait_full(base + AT_PAIRS_RING, n - 1, 2)
    await_order(base, u32(n - 1))
    for chunk in range(HAS):
        dq = query_gradients(k_tile + chunk * BYTES_CHUNK, ds_of(base, n - 1))
        products_wait(0)
        add_sums(p, before, chunk, settle(dq), part_of_lane)
    all_added(base, u32(n - 1))
    release(base + AT_PAIRS_RING, n - 1, 2)
    at = read_item(base, number)
    release(base + AT_K_RING, number, KEY_BUFFERS)
    store_keys(p, p.dv, at, 0, dv, np.float32(1), HEAD_DIM_V, MISSING_V)
    return dv


# --- the second group -------------------------------------------------------------------------------------------------


@device
def begin_gradients(base, k_tile, number, n, dk, rest):
    wait_full(base + AT_V_RING, number, 1)
    wait_full(base + AT_DOUT_RING, n, DOUT_STAGES)
    return gradients_of_weights(base, 0, base + AT_DOUT + stage_of(n, DOUT_STAGES) * BYTES_DOUT), dk


@device
def step_of_gradients(p, base, k_tile, number, even, tile, state, rest):
    """Tile n, whose dP has been begun: to its dS, dK and dQ."""
    n, first = tile
    own, part_of_lane, place, pairs_of_lane = rest[1]
    dp, dk = state
    q_tile = base + AT_Q + stage_of(n, STAGES) * BYTES_Q
    wait_full(base + AT_Q_RING, n, STAGES)
    note, where = uniform(load_word(note_of(base, n))), load_word(note_of(base, n) + 8)
    last, kept, plain = note & LAST_TILE != 0, ALL_KEPT, note & 3 == FULL
    if HAS_DROPOUT:
        kept = kept_bits(p, pairs_of(p, base, n, number, 0))
    if MAY_HIDE:
        plain = plain and not HAS_SCORE and not HAS_DROPOUT and even and note & ODD == 0
    wait_full(base + AT_WEIGHTS_RING, n, 1)
    s = groups(take_four, 4, filled(ZERO, PAIRS), place)
    products_wait(0)  # dP
    delta = own + AT_DELTA + stage_of(n, DOUT_STAGES) * BYTES_ROWS
    ds = gradients(p, s, settle(dp), plain, delta, kept)
    hand_pairs(base, n, ds, pairs_of_lane)
    release(base + AT_WEIGHTS_RING, n, 1)
    release(base + AT_DOUT_RING, n, DOUT_STAGES)
    wait_full(base + AT_PAIRS_RING, n, 2)
    ds_tile, keys = ds_of(base, n), k_tile + HAS * BYTES_CHUNK
    dq = filled(ZERO, PAIRS)
    if HAS_TOO > 0:
        dq = query_gradients(keys, ds_tile)
    products_begin()
    dk = dk_product(dk, ds, descriptor(q_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    if HAS_TOO > 0:
        products_wait(1)  # dQ
        dq = settle(dq)
        await_order(base, n)
        add_sums(p, where, HAS, dq, part_of_lane)
    if HAS_TOO > 1:
        dq = query_gradients(keys + BYTES_CHUNK, ds_tile)
    if not last:
        wait_full(base + AT_DOUT_RING, n + 1, DOUT_STAGES)
    dout = base + AT_DOUT + stage_of(n if last else n + 1, DOUT_STAGES) * BYTES_DOUT
    dp = gradients_of_weights(base, 0, dout)  # always begun, as above
    products_wait(1)  # dK, dQ
    ds = settle(ds)
    release(base + AT_Q_RING, n, STAGES)
    if HAS_TOO > 1:
        add_sums(p, where, HAS + 1, settle(dq), part_of_lane)
    all_added(base, n)
    return (dp, dk), last


@device
def finish_gradients(p, base, k_tile, number, n, state, rest):
    dp, dk = state
    dp, dk = settle(dp), settle(dk)
    release(base + AT_V_RING, number, 1)
    at = read_item(base, number)
    release(base + AT_K_RING, number, KEY_BUFFERS)
    store_keys(p, p.dk, at, 0, dk, np.float32(p.scale), HEAD_DIM, MISSING)
    return dk


# --- both -------------------------------------------------------------------------------------------------------------


@device
def multiply_tiles(p, base, group):
    lane, warp = here(thread() % 32), u32(uniform(thread() // 32 % 4))
    # Where a lane's numbers of queries are, its part of a chunk of dQ, the weights it hands over or takes, its matrices
    # of dS.
    lane_places = (
        u32(here(base + own_row())),
        u32(warp * BYTES_WARP + lane * 16),
        u32(here(base + AT_SUMS + (warp * 32 + lane) * 16)),
        u32(here(base + AT_PAIRS + swizzled(lane % 8 + lane // 16 * 8, warp * 2 + lane // 8 % 2))),
    )  # fmt: skip
    if group == 0:
        unit = as_float(uniform(as_int(np.float32(p.scale * 1.4426950408889634))))  # or it is computed anew, in float64
        rest, sums = (0, lane_places, unit), filled(ZERO, SUMS_V)
        n = multiply_items(p, base, sums, begin_weights, step_of_weights, finish_weights, rest)
        if ORDERED:
            if thread() == 128:
                ask(base, n, END, 0)
                ask(base, n + 1, END, 0)
    else:
        sums = filled(ZERO, SUMS)
        multiply_items(p, base, sums, begin_gradients, step_of_gradients, finish_gradients, (0, lane_places))

# parts: sm90_backward
# Products of the Hopper backward pass where both warp groups share the keys: each has half the keys of S and dP, whose
# rows are queries, and then half the columns of the gradients, which are turned.
#
#     S, P, dP, dS   [64][BLOCK_K / 2]         registers; P and dS also in shared memory, two tiles
#     dK, dV         [chunk][64][BLOCK_K]      registers, for each chunk of 64 columns that the group has
#     dQ             [64][BLOCK_Q]             registers, one chunk at a time, from where it is added
#
# A step, for the tile of queries number n; in brackets the products, in the order in which they are begun:
#
#     [dP = dO V^T]        S is there already and becomes weights, while dK of the tile before is still multiplied,
#                          then dP becomes dS; both groups meet,
#     [dV^T += dO^T P] [dQ^T = K^T dS^T] [S = Q K^T of the next tile]
#                          dQ is added, one chunk while the next one is multiplied,
#     [dK^T += Q^T dS].
#
# Where a group's last chunk is past the end (there are three chunks) it multiplies what lies there, and stores nothing.

TWO = HAS > 1
LATE = TWO and not ORDERED and BLOCK_K <= 64  # the second chunk of dQ is added in the next step: registers allow
HALF_TILE, LAST_WORDS = GROUP_KEYS % 16 != 0, PAIRS // 2 - 2  # keys of a group that are not whole sixteens
SUMS_LATE = BLOCK_Q // 2
MEETING = 1  # number of the barrier of both groups

scores_product = wgmma(STORAGE, GROUP_KEYS, along_rows(HEAD_DIM, BLOCK_Q), along_rows(HEAD_DIM, BLOCK_K), fresh=True)
values_product = wgmma(
    STORAGE, GROUP_KEYS, along_rows(HEAD_DIM_V, BLOCK_Q), along_rows(HEAD_DIM_V, BLOCK_K), fresh=True
)  # fmt: skip
along_queries, of_chunks = (along_columns(BLOCK_Q),) * 2, BLOCK_Q * CHUNK_ROW >> 4
dv_product = wgmma(STORAGE, BLOCK_K, *along_queries, turned_a=True, turned_b=True, tiles=HAS_V, apart=of_chunks)
dk_product = wgmma(STORAGE, BLOCK_K, *along_queries, turned_a=True, turned_b=True, tiles=HAS, apart=of_chunks)
BYTES_CHUNK = BLOCK_K * CHUNK_ROW  # of K


@device
def scores(base, keys_of_group, n):
    products_begin()
    s = scores_product(descriptor(base + AT_Q + stage_of(n, STAGES) * BYTES_Q, 16), descriptor(keys_of_group, 16))
    products_end()
    return s


@device
def gradients_of_weights(values_of_group, dout):
    products_begin()
    dp = values_product(descriptor(dout, 16), descriptor(values_of_group, 16))
    products_end()
    return dp


# --- P and dS to shared memory, dQ to memory --------------------------------------------------------------------------


@device
def store_sixteen(i, words, rest):
    """16 keys of a warp's queries, to a tile [chunk of keys][query]."""
    tile, row, unit = rest
    unit = u32(unit + 2 * i)
    place = tile + unit // u32(8) * u32(BLOCK_Q * CHUNK_ROW) + swizzled(row, unit % u32(8))
    store_matrices(u32(place), words[0], words[1], words[2], words[3])


@device
def store_pairs(tile, group, pairs):
    lane = thread() % 32
    row, unit = thread() % 128 // 32 * 16 + lane % 16, u32(group * (GROUP_KEYS // 8))
    groups(store_sixteen, 4, pairs, (tile, row, u32(unit + lane // 16)))
    if HALF_TILE:
        unit = u32(unit + GROUP_KEYS // 8 - 1)
        place = tile + unit // u32(8) * u32(BLOCK_Q * CHUNK_ROW) + swizzled(row, unit % u32(8))
        rest = part(pairs, LAST_WORDS, 2)
        store_two_matrices(u32(place), rest[0], rest[1])


@device
def add_four(i, four, address):
    add_to_four(address + 512 * i, four)


@device
def add_sums(p, where, chunk, dq, part_of_lane):
    """A chunk of dQ. where: the tile of queries among all."""
    if chunks_q % 2 == 0 or chunk < chunks_q:
        groups(add_four, 4, dq, p.partial.data + I(where) * BYTES_SUMS + chunk * BYTES_PART + part_of_lane)


# --- an item's end ----------------------------------------------------------------------------------------------------


@device
def store_sixteen_keys(i, x, rest):
    """64 columns of 16 keys, 16 bytes at a time; they lie turned."""
    tensor, at, first_chunk, n_k, factor, dim = rest
    words = alike(turned, join(pack, scaled(x, factor)), 0)
    four = turn_four(i32(words[0]), i32(words[1]), i32(words[2]), i32(words[3]))
    t = i32(thread() % 4)
    column = 64 * (first_chunk + i // (BLOCK_K // 16)) + i32(thread() % 128 // 32 * 16) + t % 2 * 8
    key = at[2] + 8 * (2 * (i % (BLOCK_K // 16)) + t // 2) + i32(thread() % 32 // 4)
    if key < n_k and column < dim:
        store_unit(row_address(tensor, I(at[0]), I(at[1]), I(key)) + column * ITEM, four)


@device
def store_keys(p, tensor, at, first_chunk, x, factor, dim):
    """dK or dV of a warp group's columns."""
    groups(store_sixteen_keys, 8, x, (tensor, at, first_chunk, i32(p.n_k), factor, dim))


# --- multiplying ------------------------------------------------------------------------------------------------------


@device
def step(p, base, group, k_tile, number, unit, even, lane_places, tile, state):
    """Tile n, whose scores are there: to its dV, dQ and dK. first, last: of the item."""
    n, first = tile
    own, part_of_lane, lane = lane_places
    s, dk, dv, late, before = state
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    shift, delta = own + AT_SHIFT + stage * BYTES_ROWS, own + AT_DELTA + dout_stage * BYTES_ROWS
    q_tile, dout_tile = base + AT_Q + stage * BYTES_Q, base + AT_DOUT + dout_stage * BYTES_DOUT
    p_tile = base + AT_PAIRS + stage_of(n, 2) * BYTES_PAIRS
    ds_tile, of_group = p_tile + BYTES_TILE, group * GROUP_KEYS * CHUNK_ROW
    note, where = uniform(load_word(note_of(base, n))), load_word(note_of(base, n) + 8)
    last = note & LAST_TILE != 0
    if ORDERED:
        if thread() == 128:
            ask(base, n, where, load_word(item_slot(base, number) + 8) // BLOCK_K)
    early = listed(numbers_of, EARLY, shift)
    wait_full(base + AT_DOUT_RING, n, DOUT_STAGES)
    dp = gradients_of_weights(base + AT_V + of_group, dout_tile)
    products_wait(1)  # dK of the tile before
    if not first:
        release(base + AT_Q_RING, n - 1, STAGES, lane)
        if LATE:
            add_sums(p, before, group * HAS + 1, late, part_of_lane)
    s, w, kept, plain = weights(p, base, n, number, note, group, even, s, early, shift, unit)
    early = listed(numbers_of, EARLY, delta)
    products_wait(0)  # dP
    ds = gradients(p, s, settle(dp), plain, early, delta, kept)
    # Since they met at the tile before, both are done with the one before that, whose place this is.
    store_pairs(p_tile, group, w)
    store_pairs(ds_tile, group, ds)
    fence_async()
    warps_sync(MEETING, 256)

    products_begin()
    a = descriptor(dout_tile + group * HAS_V * BLOCK_Q * CHUNK_ROW, 16)
    dv = dv_product(dv, a, descriptor(p_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    dq = query_gradients(k_tile + group * HAS * BYTES_CHUNK, ds_tile)
    products_wait(1)  # dV
    release(base + AT_DOUT_RING, n, DOUT_STAGES, lane)
    if not last:
        wait_full(base + AT_Q_RING, n + 1, STAGES)
    s = scores(base, k_tile + of_group, n if last else n + 1)  # always begun, or the compiler makes it wait
    products_wait(1)  # dQ
    dq = settle(dq)
    if ORDERED:
        await_barrier(turn_to_add(base, n), u32(n) // u32(2) & 1)
    add_sums(p, where, group * HAS, dq, part_of_lane)
    if TWO:
        late = query_gradients(k_tile + (group * HAS + 1) * BYTES_CHUNK, ds_tile)
    products_begin()
    a = descriptor(q_tile + group * HAS * BLOCK_Q * CHUNK_ROW, 16)
    dk = dk_product(dk, a, descriptor(ds_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    products_wait(1)  # the next tile's scores, dQ
    s = settle(s)
    if TWO:
        late = settle(late)
        if not LATE:
            add_sums(p, where, group * HAS + 1, late, part_of_lane)
    if ORDERED:
        lanes_sync()
        arrive_once(added_of(base, n), lane)
    return (s, dk, dv, late, where), last


@device
def multiply_tiles(p, base, group):
    unit = as_float(uniform(as_int(np.float32(p.scale * 1.4426950408889634))))  # or it is computed anew, in float64
    # Where a lane's numbers of queries are, and its part of a chunk of dQ; the lane.
    lane, warp = here(thread() % 32), uniform(thread() % 128 // 32)
    lane_places = u32(here(base + own_row())), u32(warp * BYTES_WARP + lane * 16), lane
    dk, dv, late = filled(ZERO, SUMS), filled(ZERO, SUMS_V), filled(ZERO, SUMS_LATE)
    n, number = u32(0), u32(0)  # tiles so far, items
    while True:
        wait_full(base + AT_K_RING, number, KEY_BUFFERS)
        if uniform(load_word(item_slot(base, number))) == END:
            break
        k_tile, odd, even = base + AT_K + stage_of(number, KEY_BUFFERS) * BYTES_K, i32(0), True
        if MAY_HIDE:
            for word in range(ODD_WORDS):
                odd |= load_word(odd_of(base, number) + 4 * word)
            even = uniform(odd) == 0
        wait_full(base + AT_Q_RING, n, STAGES)
        s = scores(base, k_tile + group * GROUP_KEYS * CHUNK_ROW, n)
        wait_full(base + AT_V_RING, number, 1)
        products_wait(0)
        state, first, last = (settle(s), dk, dv, late, i32(0)), YES, NO
        while not last:
            state, last = step(p, base, group, k_tile, number, unit, even, lane_places, (n, first), state)
            first, n = NO, u32(n + 1)
        products_wait(0)
        s, dk, dv, late, before = state
        dk, dv = settle(dk), settle(dv)
        if LATE:
            add_sums(p, before, group * HAS + 1, late, lane_places[1])
        at = read_item(base, number)
        release(base + AT_Q_RING, n - 1, STAGES, lane)
        release(base + AT_V_RING, number, 1, lane)
        release(base + AT_K_RING, number, KEY_BUFFERS, lane)
        store_keys(p, p.dv, at, group * HAS_V, dv, np.float32(1), HEAD_DIM_V)
        store_keys(p, p.dk, at, group * HAS, dk, np.float32(p.scale), HEAD_DIM)
        number = u32(number + 1)
    if ORDERED:
        if thread() == 128:
            ask(base, n, END, 0)
            ask(base, n + 1, END, 0)

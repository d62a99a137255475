# parts: tiles tensor sm90 sm90_tile_backward softmax sm90_items_backward sm90_pairs sm90_queries
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2; warp groups with roles as in
# FlashAttention-3, Shah et al. 2024, arXiv 2407.08608) for Hopper: weights recomputed from the log-sum-exp, five
# products.
#
# As many blocks as multiprocessors take items one after the other, each BLOCK_K keys of a key/value head, and go over
# the tiles of queries that see them. Two warp groups multiply, each with 64 of the keys. All products are turned: keys
# are the rows.
#
#     K                [KEY_BUFFERS][BLOCK_K][..]   shared memory
#     V                [BLOCK_K][..]                shared memory
#     Q                [STAGES][BLOCK_Q][..]        shared memory, a ring; with a log-sum-exp for each row
#     dO               [DOUT_STAGES][BLOCK_Q][..]   shared memory, a ring; with a delta for each row
#     S, P, dP, dS     [64][BLOCK_Q]                registers of a warp group; dS also in shared memory, two tiles
#     dK, dV           [64][..]                     registers of a warp group
#     dQ               a part                       registers, then shared memory, from where the copy engine adds it to
#                                                   float32 sums in memory: prepare_rows() clears them, store_queries()
#                                                   makes dQ of them
#
# Warp group 0: warp 0 finds the tiles and loads them, warp 1 looks through the keys, warps 2 and 3 keep the order in
# which dQ is added, if it matters. A step of the others, for the tile of queries number n:
#
#     S = K Q^T            was begun in the step before,
#     dP = V dO^T          is begun; meanwhile S becomes weights,
#     dV += P dO           is begun; meanwhile dP becomes dS, which goes to shared memory,
#     dQ^T = K^T dS        of the tile before, so that nobody waits for the other group's dS,
#     dK += dS Q           and the next tile's scores are begun; meanwhile dQ goes to shared memory.
#
# With ORDERED a tile is added to by one block after the other, in the order of their keys, so the bits never change.

scores_product = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM, BLOCK_K), along_rows(HEAD_DIM, BLOCK_Q), fresh=True)
values_product = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM_V, BLOCK_K), along_rows(HEAD_DIM_V, BLOCK_Q), fresh=True)
dv_product = wgmma_registers(STORAGE, COLUMNS_V, along_columns(BLOCK_Q), turned_b=True)
dk_product = wgmma_registers(STORAGE, COLUMNS, along_columns(BLOCK_Q), turned_b=True)
dq_product = wgmma(
    STORAGE, PART_ROWS, along_columns(BLOCK_K), along_rows(BLOCK_K, BLOCK_Q), turned_a=True, fresh=True
)  # fmt: skip


@device
def scores(base, k_tile, group, n):
    q = base + AT_Q + stage_of(n, STAGES) * BYTES_Q
    products_begin()
    s = scores_product(descriptor(k_tile + group * 64 * CHUNK_ROW, 16), descriptor(q, 16))
    products_end()
    return s


@device
def gradients_of_weights(base, group, dout):
    products_begin()
    dp = values_product(descriptor(base + AT_V + group * 64 * CHUNK_ROW, 16), descriptor(dout, 16))
    products_end()
    return dp


@device
def query_gradients(base, k_tile, group, n):
    ds = base + AT_PAIRS + stage_of(n, 2) * BYTES_PAIRS
    if BY_COLUMNS:
        k_tile = k_tile + group * BLOCK_K * CHUNK_ROW
    else:
        ds = ds + group * PART_ROWS * CHUNK_ROW
    products_begin()
    dq = dq_product(descriptor(k_tile, 16), descriptor(ds, 16))
    products_end()
    return dq


# --- dS to shared memory, dQ to memory --------------------------------------------------------------------------------


@device
def store_sixteen(i, words, target):
    """16 queries of a warp's keys, as rows of queries."""
    store_matrices_turned(target + 16 * i * CHUNK_ROW, words[0], words[1], words[2], words[3])


@device
def stage_four(i, four, target):
    store_four(target + 512 * i, four)


@device
def stage_sums(base, n, sent, dq, part_of_lane):
    """dQ leaves in two steps: to shared memory at once; from there when the next proxy fence has been made anyway."""
    release(base + AT_PAIRS_RING, n, 2)
    if ORDERED:
        await_barrier(base + AT_TURN, u32(sent) & 1 ^ 1)
    else:
        stores_wait_read()
    lanes_sync()
    groups(stage_four, 4, dq, part_of_lane)


@device
def send_sums(p, base, at, sent, where):
    """After a fence and lanes_sync(). where: the tile of queries among all."""
    warp = uniform(thread() // 32) - 4
    if thread() % 32 == 0:
        if ORDERED:
            if warp == 0:
                store_word(slot_of(base, sent), where)
                store_word(slot_of(base, sent) + 4, at[2] // BLOCK_K)
            arrive(added_of(base, sent))
        else:
            target = p.partial.data + I(where) * BYTES_SUMS + warp * BYTES_WARP
            add_bulk(target, base + AT_SUMS + warp * BYTES_WARP, BYTES_WARP)
            stores_end()


# --- an item's end ----------------------------------------------------------------------------------------------------


@device
def turn_four(a, b, c, d):
    """Lane t of four that share a row ends with all four words of number t."""
    lane = i32(thread() % 32)
    odd, high = lane & 1 != 0, lane & 2 != 0
    x, y = from_lane(a if odd else b, lane ^ 1), from_lane(c if odd else d, lane ^ 1)
    a, b, c, d = (x, b, y, d) if odd else (a, x, c, y)
    x, y = from_lane(a if high else c, lane ^ 2), from_lane(b if high else d, lane ^ 2)
    a, b, c, d = (x, y, c, d) if high else (a, b, x, y)
    return u32(a), u32(b), u32(c), u32(d)


@device
def store_columns(i, words, rest):
    """32 columns of a lane's two keys."""
    rows, keys, n_k, dim = rest
    column = 32 * i + i32(thread() % 4 * 8)
    for half in range(2):
        four = turn_four(i32(words[half]), i32(words[2 + half]), i32(words[4 + half]), i32(words[6 + half]))
        if keys[half] < n_k and column < dim:
            store_unit(rows[half] + column * ITEM, four)


@device
def store_keys(p, tensor, at, group, x, factor, dim, missing):
    """dK or dV of a warp group's keys, 16 bytes at a time; missing: registers to whole 32 columns."""
    k0 = at[2] + 64 * group
    keys = k0 + first_of_lane(0), k0 + first_of_lane(1)
    rows = row_address(tensor, I(at[0]), I(at[1]), I(keys[0])), row_address(tensor, I(at[0]), I(at[1]), I(keys[1]))
    words = join(pack, scaled(x, factor)) + missing
    groups(store_columns, 8, words, (rows, keys, i32(p.n_k), dim))


# --- multiplying ------------------------------------------------------------------------------------------------------

MISSING, MISSING_V = ((u32(0),) * (-SUMS // 2 % 8) for SUMS in (SUMS, SUMS_V))


@device
def step(p, base, at, group, k_tile, unit, even, odd, lane_places, tile, state):
    """Tile n, whose scores have been begun: to its dV and dK, and dQ of the tile before. first, last: of the item."""
    n, first, sent = tile
    part_of_lane, pairs_of_lane = lane_places
    s, dk, dv, staged, before = state
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    lane_row = thread() % 4 * 8
    shift, delta = base + AT_SHIFT + stage * BYTES_ROWS + lane_row, base + AT_DELTA + dout_stage * BYTES_ROWS + lane_row
    q_tile, dout_tile = base + AT_Q + stage * BYTES_Q, base + AT_DOUT + dout_stage * BYTES_DOUT
    note, h = uniform(load_word(base + AT_NOTES + 8 * stage)), uniform(load_word(base + AT_NOTES + 8 * stage + 4))
    last = note & LAST_TILE != 0
    early = listed(numbers_of, EARLY, shift)
    wait_full(base + AT_DOUT_RING, n, DOUT_STAGES)
    products_wait(0)  # S, and dK of the tile before
    s = settle(s)
    dp = gradients_of_weights(base, group, dout_tile)
    if not first:
        release(base + AT_Q_RING, n - 1, STAGES)
        release(base + AT_DOUT_RING, n - 1, DOUT_STAGES)

    s, w, kept, plain = weights(p, at, group, note, even, odd, h, s, early, shift, unit)
    products_begin()
    dv = dv_product(dv, w, descriptor(dout_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    products_wait(1)  # dP
    ds = gradients(p, s, settle(dp), plain, delta, kept)
    wait_empty(base + AT_PAIRS_RING, n, 2)
    groups(store_sixteen, 4, ds, pairs_of_lane + u32(stage_of(n, 2) * BYTES_PAIRS))
    fence_async()
    lanes_sync()
    arrive_once(base + AT_PAIRS_RING + 8 * stage_of(n, 2))
    if staged >= 0:
        send_sums(p, base, at, sent, staged)
        sent = u32(sent + 1)
    products_wait(0)  # dV
    w = settle(w)
    if not first:
        wait_full(base + AT_PAIRS_RING, n - 1, 2)
    # Always begun, or the compiler makes it wait; of an item's first tile nothing comes of it.
    dq = query_gradients(base, k_tile, group, n + 1)
    products_begin()
    dk = dk_product(dk, ds, descriptor(q_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    products_end()
    if not last:
        wait_full(base + AT_Q_RING, n + 1, STAGES)
    s = scores(base, k_tile, group, n if last else n + 1)  # likewise, of the last
    products_wait(1)  # dQ, dK
    dq, ds = settle(dq), settle(ds)
    if not first:
        stage_sums(base, n - 1, sent, dq, part_of_lane)
    where = i32((at[0] * i32(p.heads) + h) * tiles_along(p.n_q, BLOCK_Q) + (note >> 8))
    return (s, dk, dv, before, where), sent, last


@device
def multiply_tiles(p, base, group):
    unit = as_float(uniform(as_int(np.float32(p.scale * 1.4426950408889634))))  # or it is computed anew, in float64
    lane, warp = thread() % 32, u32(uniform(thread() // 32)) - u32(4)
    # Where a lane's part of dQ goes in shared memory, and where its matrices of dS.
    lane_places = (
        u32(base + AT_SUMS + warp * BYTES_WARP + lane * 16),
        u32(base + AT_PAIRS + group * BLOCK_Q * CHUNK_ROW
            + swizzled(lane % 8 + lane // 16 * 8, warp % 4 * 2 + lane // 8 % 2)),
    )  # fmt: skip
    dk, dv = filled(ZERO, SUMS), filled(ZERO, SUMS_V)
    n, sent, number = u32(0), u32(0), u32(0)  # tiles so far; those of dQ that have been sent; items
    while True:
        wait_full(base + AT_K_RING, number, KEY_BUFFERS)
        at = read_item(base, number)
        if at[0] == END:
            break
        buffer = stage_of(number, KEY_BUFFERS)
        k_tile, odd, even = base + AT_K + buffer * BYTES_K, base + AT_ODD + 4 * ODD_WORDS * buffer, True
        if MAY_HIDE:
            even = uniform(load_word(odd + 8 * group) | load_word(odd + 8 * group + 4)) == 0
        wait_full(base + AT_Q_RING, n, STAGES)
        s = scores(base, k_tile, group, n)
        wait_full(base + AT_V_RING, number, 1)
        # Tiles of dQ: in shared memory, and the one that is next.
        state, first, last = (s, dk, dv, i32(-1), i32(-1)), True, False
        while not last:
            state, sent, last = step(p, base, at, group, k_tile, unit, even, odd, lane_places, (n, first, sent), state)
            first, n = False, u32(n + 1)
        products_wait(0)
        s, dk, dv, staged, before = state
        s, dk, dv = settle(s), settle(dk), settle(dv)
        release(base + AT_Q_RING, n - 1, STAGES)
        release(base + AT_DOUT_RING, n - 1, DOUT_STAGES)
        release(base + AT_V_RING, number, 1)
        wait_full(base + AT_PAIRS_RING, n - 1, 2)
        dq = query_gradients(base, k_tile, group, n - 1)
        fence_async()
        lanes_sync()
        if staged >= 0:
            send_sums(p, base, at, sent, staged)
            sent = u32(sent + 1)
        products_wait(0)
        stage_sums(base, n - 1, sent, settle(dq), lane_places[0])
        release(base + AT_K_RING, number, KEY_BUFFERS)
        fence_async()
        lanes_sync()
        send_sums(p, base, at, sent, before)
        sent = u32(sent + 1)
        store_keys(p, p.dv, at, group, dv, np.float32(1), HEAD_DIM_V, MISSING_V)
        store_keys(p, p.dk, at, group, dk, np.float32(p.scale), HEAD_DIM, MISSING)
        number = u32(number + 1)
    if ORDERED:
        await_barrier(base + AT_TURN, u32(sent) & 1 ^ 1)
        if thread() % 32 == 0:
            for i in range(2):
                if thread() == 128:
                    store_word(slot_of(base, sent + i), END)
                arrive(added_of(base, sent + i))
    else:
        stores_wait()


# --- roles ------------------------------------------------------------------------------------------------------------


@kernel(THREADS, 1, maps=("map_q", "map_k", "map_v", "map_dout"))
def sm90_backward(p):
    base = u32(uniform(shared_address()))
    if thread() == 0:
        ring_init(base + AT_Q_RING, STAGES, 1, WARPS)
        ring_init(base + AT_DOUT_RING, DOUT_STAGES, 1, WARPS)
        ring_init(base + AT_K_RING, KEY_BUFFERS, 1, WARPS)
        ring_init(base + AT_V_RING, 1, 1, WARPS)
        ring_init(base + AT_PAIRS_RING, 2, WARPS, WARPS)
        for i in range(2):
            barrier_init(base + AT_ADDED + 8 * i, WARPS)
        barrier_init(base + AT_TURN, 1)
        for i in range(KEY_BUFFERS):
            barrier_init(base + AT_K_CAME + 8 * i, 1)
        barrier_init(base + AT_ROWS_CAME, 1)
        barriers_ready()
    threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        give_registers(REGISTERS_LOADING)
        if warp == 0:
            load_items(p, base)
        elif warp == 1 and CLEANS_KEYS:
            clean_keys(p, base)
        elif warp >= 2 and ORDERED:
            keep_order(p, base, warp - 2)
    else:
        take_registers(REGISTERS)
        multiply_tiles(p, base, role - 1)

# parts: common/tiles common/fragment sm90/pipeline sm90/layout sm90/tile_scheduler common/softmax sm90/softmax
# Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1; warp groups with roles and softmax beside
# products as in FlashAttention-3, Shah et al. 2024, arXiv 2407.08608) for Hopper. docs/numba_hopper.md walks through
# it.
#
# As many blocks as multiprocessors take items one after the other, each BLOCK_Q rows of a head. With PACK > 1 a row is
# one of the PACK query heads that share a key/value head, at one token.
#
#     Q, then O   [Q_BUFFERS][GROUPS][64][..]   shared memory, an item's rows; its output on the way out
#     K, V        [STAGES][BLOCK_K][..]         shared memory, two rings
#     s, weights  [64][BLOCK_K]                 registers of a warp group
#     output      [64][HEAD_DIM_V]              registers of a warp group, unscaled
#     m, l        [64]                          a row's reference, in base 2, and its sum of weights: registers
#
# Warp group 0: warp 0 loads tiles, warp 1 stores outputs, warp 2 finds the tiles to load. Warp groups 1 ... GROUPS,
# with 64 rows each, multiply. A step of such a group, for the tile of keys number n of all that the block loads:
#
#     scores      s = Q K_n^T          is begun,
#     accumulate  output += weights V  of the tile before is begun,
#     modify, online_softmax           s becomes weights while the second product runs,
#     and the first tile of an item is begun before the last item is finished.


@device
def buffer_of(base, number, group):
    return base + (stage_of(number, Q_BUFFERS) * GROUPS + group) * BYTES_Q


@device
def done_of(base, number, group):
    return base + AT_DONE + 8 * (stage_of(number, Q_BUFFERS) * GROUPS + group)


@device
def take_turn(group):
    if TURNS:
        warps_sync(TURN + group, 256)


@device
def pass_turn(group):
    if TURNS:
        warps_arrive(TURN + (0 if group + 1 == GROUPS else group + 1), 256)


# --- the products -----------------------------------------------------------------------------------------------------

scores_product = wgmma(STORAGE, BLOCK_K, along_rows(HEAD_DIM, 64), along_rows(HEAD_DIM, BLOCK_K), fresh=True)
output_product = wgmma_registers(STORAGE, COLUMNS, along_columns(BLOCK_K), turned_b=True)


@device
def scores(base, rows, n):
    keys = descriptor(base, 16) + (AT_K >> 4) + stage_of(n, STAGES) * (BYTES_K >> 4)  # sixteen bytes are one
    products_begin()
    s = scores_product(rows, keys)
    products_end()
    return s


@device
def clear_rows(tile, first):
    """Zeros in the rows of a tile of values from `first` on, by a warp group: what lies past the length must not
    matter.
    """
    for i in range(thread() % 128, (BLOCK_K - first) * chunks_v * 8, 128):
        unit, chunk, row = i % 8, i // 8 % chunks_v, first + i // 8 // chunks_v
        store_zeros(tile + (chunk * BLOCK_K + row) * CHUNK_ROW + unit * UNIT, 0)
    fence_async()


@device
def accumulate(base, group, n, output, weights, continued, exist):
    tile = base + AT_V + stage_of(n, STAGES) * BYTES_V
    wait_full(base + AT_V_RING, n, STAGES)
    if HAS_LENGTHS:
        if exist < BLOCK_K:
            clear_rows(tile, max(exist, 0))
            warps_sync(MEETING + group, 128)
    values = descriptor(base, BLOCK_K * CHUNK_ROW) + (AT_V >> 4) + stage_of(n, STAGES) * (BYTES_V >> 4)
    products_begin()
    output = output_product(output, weights, values, continued)
    products_end()
    return output


@device
def accumulated(base, n, output, weights):
    products_wait(0)
    output, weights = settle(output), settle(weights)
    release(base + AT_V_RING, n, STAGES)
    return output, weights


# --- scores that hardly ever are needed again -------------------------------------------------------------------------

product_of_warp = mma(STORAGE)


@device
def multiply_sixteen(i, sums, rest):
    """Sums of 16 keys by the instruction of a single warp."""
    left, k, unit = rest
    lane = here(thread() % 32)
    key = lane // 16 * 8 + lane % 8
    right = load_matrices(k + 16 * i * CHUNK_ROW + swizzled(key, unit + lane // 8 % 2))
    first = product_of_warp(part(sums, 0, 4), left, right[0], right[1])
    return first + product_of_warp(part(sums, 4, 4), left, right[2], right[3])


@device
def scores_again(q, k):
    """Scores of a warp's 16 rows by instructions of the warp alone, from its tiles in shared memory."""
    lane = here(thread() % 32)
    row = here(thread() % 128 // 32) * 16 + lane % 16
    s = filled(as_float(here(0)), SCORES)
    for step in range(COLUMNS_QK // 16):
        chunk, unit = step // 4, step % 4 * 2
        left = load_matrices(q + chunk * 64 * CHUNK_ROW + swizzled(row, unit + lane // 16))
        s = groups(multiply_sixteen, 8, s, (left, k + chunk * BLOCK_K * CHUNK_ROW, unit))
    return s


# --- an item's end ----------------------------------------------------------------------------------------------------


@device
def store_piece(i, words, rest):
    """16 columns of a warp's 16 rows to shared memory."""
    staged, row, lane = rest
    unit = swizzled(row, i % 4 * 2 + lane // 16)
    store_matrices(staged + i // 4 * 64 * CHUNK_ROW + unit, words[0], words[1], words[2], words[3])


@device
def finish(p, base, at, number, group, m, l, output):
    """Divide by the sums; log-sum-exp to memory, output to shared memory."""
    at = here(at[0]), here(at[1]), here(at[2])
    output, factor, odd = finish_rows(p, at, m, l, output)
    staged = buffer_of(base, number, group)
    warps_sync(MEETING + group, 128)  # all are done with Q
    lane = here(thread() % 32)
    row = here(thread() % 128 // 32) * 16 + lane % 16
    groups(store_piece, 4, join(pack, output), (staged, row, lane))
    if MAY_HIDE:  # a value that is not finite may have met a weight of 0
        if any_lane(odd):
            lanes_sync()
            accumulate_carefully(p, at, m, factor, staged, 64)
    fence_async()
    lanes_sync()
    arrive_once(done_of(base, number, group))


# --- multiplying ------------------------------------------------------------------------------------------------------


@device
def read_item(base, number, group):
    wait_full(base + AT_Q_RING, number, Q_BUFFERS)
    slot = base + AT_ITEMS + 12 * stage_of(number, Q_BUFFERS)
    row0 = uniform(load_word(slot + 8)) + 64 * group
    return uniform(load_word(slot)), uniform(load_word(slot + 4)), i32(row0)


@device
def await_note(base, n, mine):
    """When its keys are there; and 0 if its bits `mine`, the group's, say that the tile is FULL and not the first of an
    item.
    """
    n = u32(n)
    wait_full(base + AT_K_RING, n, STAGES)
    note = uniform(load_word(base + AT_NOTES + 4 * stage_of(n, STAGES)))
    return note, i32((note ^ 21 * FULL) & mine)


@device
def after(x):
    """0, which the compiler does not know: what uses it is not moved before x is there. No computation gives this
    NaN.
    """
    return 1 if as_int(x) == 0x7FA12345 else 0


@device
def step(p, base, group, mine, unit, pending, usual, fresh, full, tile, state):
    """Tile n from its scores to its weights. pending: meanwhile the product of the weights before. usual: all rows of
    this warp have a reference, and all pairs are visible. Both are known to the compiler where this is put in place, or
    it would make products wait for each other."""
    n, k0, number, rows, continued, exist = tile
    at, output, weights, m, l, begun = state
    before, m_before, l_before = at, m, l
    if not usual and fresh:
        at = read_item(base, number, group)
        m, l = UNKNOWN, NOTHING
    take_turn(group)
    s = scores(base, rows, n)
    if pending:
        output = accumulate(base, group, n - 1, output, weights, continued, exist)
    pass_turn(group)
    if pending:
        products_wait(1)
    else:
        products_wait(0)
    s = modified(p, at, usual or full, settle(s), k0)
    first = not usual and fresh
    if first:
        m, begun = guess(s, unit)
    total, rescale, near = NOTHING, NOTHING, False
    hopeful = usual or begun
    if hopeful:
        s, total, near = optimistic_softmax(s, m, unit)
    exact = not near
    if exact:
        if hopeful:  # the optimism was misplaced, and has cost the scores
            s = scores_again(buffer_of(base, number, group), base + AT_K + stage_of(n, STAGES) * BYTES_K)
            s = modify_tile(p, at, usual or full, s, k0)
        if first:
            m = UNKNOWN
        s, m, total, rescale = online_softmax(s, m, unit)
        l = both(times, l, rescale)
        begun = all_lanes(repeat(lasts, ROWS, True, (m, rescale, first)))
    l = both(add, l, total)
    if usual:
        release(base + AT_K_RING, n, STAGES)
    else:  # or exponentials are computed after the next wait
        release(base + AT_K_RING, n + after(total[0]) + after(total[1]), STAGES)
    if pending:
        output, weights = accumulated(base, n - 1, output, weights)
    if not usual and fresh:
        if pending and Q_BUFFERS > 1:
            finish(p, base, before, number - 1, group, m_before, l_before, output)
    elif exact:
        output = rows_scaled(output, rescale)
    if HAS_DROPOUT:
        s = drop_tile(p, at, s, k0)
    next_note = await_note(base, n + 1, mine)  # its latencies pass while weights are packed
    return (at, output, join(pack, s), m, l, begun), next_note


@device
def multiply_tiles(p, base, group):
    unit = as_float(uniform(as_int(base_2(p))))  # or it is computed anew, in float64
    nothing, group = i32(0), i32(group)
    mine = i32(FIRST | 3 << 2 * group)  # of a note: what a usual step looks at
    state = (
        (nothing, nothing, nothing),                       # the item whose output is in registers,
        filled(ZERO, SUMS), filled(u32(0), PACKED), UNKNOWN, NOTHING,
        NO,                                                # whether all rows of this warp have a reference
    )  # fmt: skip
    open_item = False  # whether there is such an item,
    fresh = False  # whether the tile that comes is the first of another,
    number, rows = i32(-1), u32(0)  # of the item that the tile belongs to among the block's; its rows of Q
    pending = False  # whether weights of the tile before wait for their values,
    continued, exist = i32(0), i32(0)  # to be added to the output, not to start it; keys of that tile that exist
    if TURNS and group == GROUPS - 1:
        pass_turn(group)
    n, next_note = u32(0), await_note(base, u32(0), mine)
    while True:
        note, unusual = next_note
        k0 = i32((note >> 8) * BLOCK_K)
        # Both END and the first tile of an item have the bit FIRST.
        if pending and state[5] and unusual == 0:
            tile = n, k0, number, rows, continued, exist
            state, next_note = step(p, base, group, mine, unit, True, True, False, True, tile, state)
            continued = i32(1)
        else:
            if note & FIRST:
                fresh, number = True, i32(number + 1)
                rows = descriptor(buffer_of(base, number, group), 16)
            kind = EMPTY if note == END else note >> 2 * group & 3
            # What is pending is done by itself where no scores go with it, or where the next item's rows have no room.
            if pending and (kind == EMPTY or (Q_BUFFERS == 1 and fresh)):
                at, output, weights, m, l, begun = state
                output = accumulate(base, group, n - 1, output, weights, continued, exist)
                output, weights = accumulated(base, n - 1, output, weights)
                state, pending = (at, output, weights, m, l, begun), False
            if fresh and open_item and not pending:
                at, output, weights, m, l, begun = state
                finish(p, base, at, number - 1, group, m, l, output)
                open_item = False
            if note == END:
                break
            if kind == EMPTY:
                take_turn(group)
                pass_turn(group)
                release(base + AT_K_RING, n, STAGES)
                wait_full(base + AT_V_RING, n, STAGES)
                release(base + AT_V_RING, n, STAGES)
                next_note = await_note(base, n + 1, mine)
            else:
                full = kind == FULL
                tile = n, k0, number, rows, continued, exist
                if pending:
                    state, next_note = step(p, base, group, mine, unit, True, False, fresh, full, tile, state)
                else:
                    state, next_note = step(p, base, group, mine, unit, False, False, fresh, full, tile, state)
                pending, open_item, continued, fresh = True, True, i32(0 if fresh else 1), False
        if HAS_LENGTHS:
            if pending:
                exist = i32(keys_of(p, state[0][0]) - k0)
        n = u32(n + 1)


# --- roles ------------------------------------------------------------------------------------------------------------


@kernel(THREADS, 1, maps=("map_q", "map_k", "map_v", "map_out"))
def sm90_forward(p):
    base = u32(uniform(shared_address()))
    if thread() == 0:
        ring_init(base + AT_Q_RING, Q_BUFFERS, 1, 1)
        ring_init(base + AT_K_RING, STAGES, 1, 4 * GROUPS)
        ring_init(base + AT_V_RING, STAGES, 1, 4 * GROUPS)
        ring_init(base + AT_LISTS_RING, LISTS, 1, 1)
        barrier_init(base + AT_SOON, 1)
        for i in range(GROUPS * Q_BUFFERS):
            barrier_init(base + AT_DONE + 8 * i, 4)
        barriers_ready()
    kernel_before()
    threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        give_registers(REGISTERS_LOADING)
        if warp == 2:
            find_items(p, base)
        elif elect():
            if warp == 0:
                load_items(p, base)
            elif warp == 1:
                store_items(p, base)
    else:
        take_registers(REGISTERS)
        multiply_tiles(p, base, role - 1)

# parts: common/tiles common/fragment sm90/pipeline sm90/layout sm90/tile_scheduler common/softmax sm90/softmax
# Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1; warp groups with roles and softmax beside
# products as in FlashAttention-3, Shah et al. 2024, arXiv 2407.08608) for Hopper. docs/numba_hopper.md walks through
# it.
#
# As many blocks as multiprocessors take items one after the other, each BLOCK_Q rows of a head. With PACK_GQA > 1 a row is
# one of the PACK_GQA query heads that share a key/value head, at one token.
#
#     Q, then O   [Q_BUFFERS][MMA_WARPGROUPS][64][..]   shared memory, an item's rows; its output on the way out
#     K, V        [STAGES][BLOCK_K][..]         shared memory, two rings
#     s, weights  [64][BLOCK_K]                 registers of a warp group
#     output      [64][HEAD_DIM_V]              registers of a warp group, unscaled
#     m, l        [64]                          a row's reference, in base 2, and its sum of weights: registers
#
# Warp group 0: warp 0 loads tiles, warp 1 stores outputs, warp 2 finds the tiles to load. Warp groups 1 ... MMA_WARPGROUPS,
# with 64 rows each, multiply. A step of such a group, for the tile of keys number n of all that the block loads:
#
#     scores      s = Q K_n^T          is begun,
#     accumulate  output += weights V  of the tile before is begun,
#     modify, online_softmax           s becomes weights while the second product runs,
#     and the first tile of an item is begun before the last item is finished.


@device
def buffer_of(base, number, group):
    return base + (stage_of(number, Q_BUFFERS) * MMA_WARPGROUPS + group) * BYTES_Q


@device
def done_of(base, number, group):
    return base + AT_DONE + 8 * (stage_of(number, Q_BUFFERS) * MMA_WARPGROUPS + group)


@device
def warpgroup_barrier_sync(group):
    if PING_PONG:
        named_barrier_sync(TURN + group, 256)


@device
def warpgroup_barrier_arrive(group):
    if PING_PONG:
        named_barrier_arrive(TURN + (0 if group + 1 == MMA_WARPGROUPS else group + 1), 256)


# --- the products -----------------------------------------------------------------------------------------------------

scores_product = wgmma(STORAGE, BLOCK_K, along_rows(HEAD_DIM, 64), along_rows(HEAD_DIM, BLOCK_K), fresh=True)
output_product = wgmma_registers(STORAGE, COLUMNS, along_columns(BLOCK_K), turned_b=True)


@device
def scores(base, rows, n):
    keys = descriptor(base, 16) + (AT_K >> 4) + stage_of(n, STAGES) * (BYTES_K >> 4)  # sixteen bytes are one
    wgmma_fence()
    s = scores_product(rows, keys)
    wgmma_commit()
    return s


@device
def clear_rows(tile, first):
    """Zeros in the rows of a tile of values from `first` on, by a warp group: what lies past the length must not
    matter.
    """
    for i in range(thread() % 128, (BLOCK_K - first) * chunks_v * 8, 128):
        unit, chunk, row = i % 8, i // 8 % chunks_v, first + i // 8 // chunks_v
        store_zeros(tile + (chunk * BLOCK_K + row) * CHUNK_ROW + unit * VEC_BYTES, 0)
    fence_proxy_async()


@device
def accumulate(base, group, n, output, weights, continued, exist):
    tile = base + AT_V + stage_of(n, STAGES) * BYTES_V
    consumer_wait(base + AT_V_PIPE, n, STAGES)
    if HAS_LENGTHS:
        if exist < BLOCK_K:
            clear_rows(tile, max(exist, 0))
            named_barrier_sync(MEETING + group, 128)
    values = descriptor(base, BLOCK_K * CHUNK_ROW) + (AT_V >> 4) + stage_of(n, STAGES) * (BYTES_V >> 4)
    wgmma_fence()
    output = output_product(output, weights, values, continued)
    wgmma_commit()
    return output


@device
def accumulated(base, n, output, weights):
    wgmma_wait(0)
    output, weights = fence_operand(output), fence_operand(weights)
    consumer_release(base + AT_V_PIPE, n, STAGES)
    return output, weights


# --- scores that hardly ever are needed again -------------------------------------------------------------------------

product_of_warp = mma(STORAGE)


@device
def multiply_sixteen(i, sums, rest):
    """Sums of 16 keys by the instruction of a single warp."""
    left, k, unit = rest
    lane = opaque(thread() % 32)
    key = lane // 16 * 8 + lane % 8
    right = ldmatrix_x4(k + 16 * i * CHUNK_ROW + swizzled(key, unit + lane // 8 % 2))
    first = product_of_warp(part(sums, 0, 4), left, right[0], right[1])
    return first + product_of_warp(part(sums, 4, 4), left, right[2], right[3])


@device
def scores_again(q, k):
    """Scores of a warp's 16 rows by instructions of the warp alone, from its tiles in shared memory."""
    lane = opaque(thread() % 32)
    row = opaque(thread() % 128 // 32) * 16 + lane % 16
    s = filled(as_float(opaque(0)), SCORES)
    for step in range(COLUMNS_QK // 16):
        chunk, unit = step // 4, step % 4 * 2
        left = ldmatrix_x4(q + chunk * 64 * CHUNK_ROW + swizzled(row, unit + lane // 16))
        s = groups(multiply_sixteen, 8, s, (left, k + chunk * BLOCK_K * CHUNK_ROW, unit))
    return s


# --- an item's end ----------------------------------------------------------------------------------------------------


@device
def store_piece(i, words, rest):
    """16 columns of a warp's 16 rows to shared memory."""
    staged, row, lane = rest
    unit = swizzled(row, i % 4 * 2 + lane // 16)
    stmatrix_x4(staged + i // 4 * 64 * CHUNK_ROW + unit, words[0], words[1], words[2], words[3])


@device
def finish(p, base, at, number, group, m, l, output):
    """Divide by the sums; log-sum-exp to memory, output to shared memory."""
    at = opaque(at[0]), opaque(at[1]), opaque(at[2])
    output, factor, odd = finish_rows(p, at, m, l, output)
    staged = buffer_of(base, number, group)
    named_barrier_sync(MEETING + group, 128)  # all are done with Q
    lane = opaque(thread() % 32)
    row = opaque(thread() % 128 // 32) * 16 + lane % 16
    groups(store_piece, 4, join(pack, output), (staged, row, lane))
    if MAY_HIDE:  # a value that is not finite may have met a weight of 0
        if any_lane(odd):
            lanes_sync()
            accumulate_nonfinite(p, at, m, factor, staged, 64)
    fence_proxy_async()
    lanes_sync()
    mbarrier_arrive_once(done_of(base, number, group))


# --- multiplying ------------------------------------------------------------------------------------------------------


@device
def read_item(base, number, group):
    consumer_wait(base + AT_Q_PIPE, number, Q_BUFFERS)
    slot = base + AT_WORK_TILES + 12 * stage_of(number, Q_BUFFERS)
    row0 = uniform(load_word(slot + 8)) + 64 * group
    return uniform(load_word(slot)), uniform(load_word(slot + 4)), i32(row0)


@device
def await_tile_desc(base, n, mine):
    """When its keys are there; and 0 if its bits `mine`, the group's, say that the tile is FULL and not the first of an
    item.
    """
    n = u32(n)
    consumer_wait(base + AT_K_PIPE, n, STAGES)
    tile_desc = uniform(load_word(base + AT_TILE_DESCS + 4 * stage_of(n, STAGES)))
    return tile_desc, i32((tile_desc ^ 21 * FULL) & mine)


@device
def depends_on(x):
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
    warpgroup_barrier_sync(group)
    s = scores(base, rows, n)
    if pending:
        output = accumulate(base, group, n - 1, output, weights, continued, exist)
    warpgroup_barrier_arrive(group)
    if pending:
        wgmma_wait(1)
    else:
        wgmma_wait(0)
    s = modified(p, at, usual or full, fence_operand(s), k0)
    first = not usual and fresh
    if first:
        m, begun = guess(s, unit)
    total, rescale, near = NOTHING, NOTHING, False
    hopeful = usual or begun
    if hopeful:
        s, total, near = speculative_softmax(s, m, unit)
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
        consumer_release(base + AT_K_PIPE, n, STAGES)
    else:  # or exponentials are computed after the next wait
        consumer_release(base + AT_K_PIPE, n + depends_on(total[0]) + depends_on(total[1]), STAGES)
    if pending:
        output, weights = accumulated(base, n - 1, output, weights)
    if not usual and fresh:
        if pending and Q_BUFFERS > 1:
            finish(p, base, before, number - 1, group, m_before, l_before, output)
    elif exact:
        output = rows_scaled(output, rescale)
    if HAS_DROPOUT:
        s = drop_tile(p, at, s, k0)
    next_tile_desc = await_tile_desc(base, n + 1, mine)  # its latencies pass while weights are packed
    return (at, output, join(pack, s), m, l, begun), next_tile_desc


@device
def consumer(p, base, group):
    unit = as_float(uniform(as_int(softmax_scale_log2(p))))  # or it is computed anew, in float64
    nothing, group = i32(0), i32(group)
    mine = i32(FIRST | 3 << 2 * group)  # of a tile_desc: what a usual step looks at
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
    if PING_PONG and group == MMA_WARPGROUPS - 1:
        warpgroup_barrier_arrive(group)
    n, next_tile_desc = u32(0), await_tile_desc(base, u32(0), mine)
    while True:
        tile_desc, unusual = next_tile_desc
        k0 = i32((tile_desc >> 8) * BLOCK_K)
        # Both END and the first tile of an item have the bit FIRST.
        if pending and state[5] and unusual == 0:
            tile = n, k0, number, rows, continued, exist
            state, next_tile_desc = step(p, base, group, mine, unit, True, True, False, True, tile, state)
            continued = i32(1)
        else:
            if tile_desc & FIRST:
                fresh, number = True, i32(number + 1)
                rows = descriptor(buffer_of(base, number, group), 16)
            kind = EMPTY if tile_desc == END else tile_desc >> 2 * group & 3
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
            if tile_desc == END:
                break
            if kind == EMPTY:
                warpgroup_barrier_sync(group)
                warpgroup_barrier_arrive(group)
                consumer_release(base + AT_K_PIPE, n, STAGES)
                consumer_wait(base + AT_V_PIPE, n, STAGES)
                consumer_release(base + AT_V_PIPE, n, STAGES)
                next_tile_desc = await_tile_desc(base, n + 1, mine)
            else:
                full = kind == FULL
                tile = n, k0, number, rows, continued, exist
                if pending:
                    state, next_tile_desc = step(p, base, group, mine, unit, True, False, fresh, full, tile, state)
                else:
                    state, next_tile_desc = step(p, base, group, mine, unit, False, False, fresh, full, tile, state)
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
        pipeline_init(base + AT_Q_PIPE, Q_BUFFERS, 1, 1)
        pipeline_init(base + AT_K_PIPE, STAGES, 1, 4 * MMA_WARPGROUPS)
        pipeline_init(base + AT_V_PIPE, STAGES, 1, 4 * MMA_WARPGROUPS)
        pipeline_init(base + AT_LISTS_PIPE, LISTS, 1, 1)
        mbarrier_init(base + AT_SOON, 1)
        for i in range(MMA_WARPGROUPS * Q_BUFFERS):
            mbarrier_init(base + AT_DONE + 8 * i, 4)
        fence_mbarrier_init()
    griddepcontrol_wait()
    threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        setmaxnreg_dec(PRODUCER_REGISTERS)
        if warp == 2:
            find_items(p, base)
        elif elect_one():
            if warp == 0:
                load_items(p, base)
            elif warp == 1:
                store_items(p, base)
    else:
        setmaxnreg_inc(CONSUMER_REGISTERS)
        consumer(p, base, role - 1)

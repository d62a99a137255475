# parts: common/tiles common/fragment sm80/decode_layout sm80/mma common/softmax common/epilogue sm80/combine
# Few queries on tensor cores by mma.sync (FlashDecoding: Dao, Haziza, Massa, Sizov 2023): what takes time is reading
# keys and values, so each is read once for all heads that share it, by as many warps as the device holds.
#
# A warp takes 16 rows and one of p.num_splits parts of their keys, by itself; kernels/sm80_combine.py joins the parts.
#
#     Q           [16][HEAD_DIM]          shared memory of the warp
#     K, V        [STAGES][BLOCK_K][..]   shared memory of the warp, filled STAGES - 1 tiles ahead
#     s, weights  [16][BLOCK_K]           registers
#     output      [16][HEAD_DIM_V]        registers, unscaled

# --- load_tile --------------------------------------------------------------------------------------------------------


@device
def load_rows(target, p, at):
    """The warp's rows of q to shared memory; those that do not exist become zeros."""
    lane, pack = i32(thread() % 32), u32(PACK_GQA)
    for chunk in range((COLUMNS_QK + 63) // 64):
        for i in range(0, 16, 4):
            row, unit = i + lane // 8, lane % 8
            index = u32(at[2] + row)
            source = row_address(p.q, I(at[0]), at[1] + I(index % pack), I(index // pack)) + (8 * chunk + unit) * VEC_BYTES
            wanted = index < u32(p.n_q * PACK_GQA) and 64 * chunk + 8 * unit < HEAD_DIM
            copy_unit(target + 16 * chunk * CHUNK_ROW + swizzled(row, unit), source, 0, 1 if wanted else 0)


@device
def load_tile(target, tensor, b, h, first, n_k, dim, columns):
    """BLOCK_K keys or values to the warp's shared memory."""
    lane = i32(thread() % 32)
    row, unit = lane // 8, lane % 8
    source = row_address(tensor, I(b), I(h), I(first + row)) + VEC_BYTES * unit
    for chunk in range((columns + 63) // 64):
        left = n_k - first - row if 64 * chunk + 8 * unit < dim else 0
        there = source + CHUNK_ROW * chunk
        for i in range(0, BLOCK_K, 4):
            copy_unit(target + chunk * CHUNK_K + swizzled(row + i, unit), there, i, left)
            there += tensor.token * (4 * ITEM)


@device
def state_of_tile(p, at, tile, last, n_k):
    """Whether any of the warp's rows sees a tile of keys, or all of them see all of it; past the last none does."""
    if tile >= last:
        return I(EMPTY)
    start, end = I(tile) * BLOCK_K, min(I(tile) * BLOCK_K + BLOCK_K, I(n_k))
    row0, row1 = I(at[2]) // PACK_GQA, (min(I(at[2]) + 16, p.n_q * PACK_GQA) - 1) // PACK_GQA + 1
    offset = offset_of(p, I(at[0]))
    state = I(tile_state(p, I(at[0]), I(at[1]), offset, row0, row1, start, end))
    if HAS_MASK:
        for head in range(1, PACK_GQA):
            found = I(tile_state(p, I(at[0]), I(at[1] + head), offset, row0, row1, start, end))
            state = state if found == state else I(PARTIAL)
    return state if state != FULL or end == start + BLOCK_K else I(PARTIAL)


@device
def begin_tile(p, at, target, tile, last, n_k):
    """Keys and values of a tile that is seen are on their way."""
    if state_of_tile(p, at, tile, last, n_k) != EMPTY:
        head = at[1] // GQA_GROUP
        load_tile(target, p.k, at[0], head, i32(tile) * BLOCK_K, n_k, HEAD_DIM, COLUMNS_QK)
        load_tile(target + BYTES_K, p.v, at[0], head, i32(tile) * BLOCK_K, n_k, HEAD_DIM_V, COLUMNS)
    copies_end()


@device
def scores(q, k):
    """s = Q K^T"""
    return repeat(sixteen_dims, STEPS, filled(ZERO, SCORES), (q, CHUNK_Q, k, CHUNK_K))


# --- the end ----------------------------------------------------------------------------------------------------------


@device
def finish_part(j, rest):
    """Where a lane's row of this part goes, or 0, and the factor of its output; its log-sum-exp in base 2 to memory."""
    p, at, part, m, total = rest
    index = at[2] + row_of_lane(j)
    place, head, row = I(part) * p.batch + I(at[0]), I(at[1] + index % PACK_GQA), I(index // PACK_GQA)
    exists = index < i32(p.n_q) * PACK_GQA
    if exists and thread() % 4 == 0:
        lse = HIDDEN if total[j] == ZERO else m[j] + log2(total[j])
        store(np.float32, number_address(p.lse_partial, place, head, row), 0, lse)
    factor = ZERO if total[j] == ZERO else reciprocal(total[j])
    return number_address(p.o_partial, place, head, row) if exists else I(0), factor


@device
def store_two(x, y, column, row, first):
    column += first
    if row[0] != 0 and column < HEAD_DIM_V:
        store(np.float32, row[0], column, x * row[1])
        store(np.float32, row[0], column + 1, y * row[1])
    return x, y


@kernel(THREADS, BLOCKS_PER_SM)
def sm80_decode(p):
    warp, parts, heads = u32(thread() // u32(32)), u32(p.num_splits), u32(u32(p.heads) // u32(GQA_GROUP))
    blocks, tiles_q = u32(parts // u32(WARPS)), u32(u32(p.n_q * PACK_GQA + 15) // u32(16))
    item = u32(block() // blocks)
    head = u32(item // tiles_q)
    b = u32(head // heads)
    part = u32(u32(block() - item * blocks) * u32(WARPS) + warp)
    at = i32(b), i32(u32(head - b * heads) * u32(GQA_GROUP)), i32(u32(item - head * tiles_q) * u32(16))
    if EARLY:
        griddepcontrol_wait()
    n_k, unit, base = i32(keys_of(p, I(at[0]))), softmax_scale_log2(p), shared_address() + warp * BYTES_WARP
    tiles = u32(u32(n_k + BLOCK_K - 1) // u32(BLOCK_K))
    each_part = u32(u32(tiles + parts - u32(1)) // parts)
    tile = i32(part * each_part)
    last = i32(min(tile + each_part, tiles))

    load_rows(base, p, at)
    for i in range(AHEAD):
        begin_tile(p, at, base + BYTES_Q + i * BYTES_STAGE, tile + i, last, n_k)
    output, m, l, stage = filled(ZERO, SUMS), NO_REFERENCE, ZERO_ROWS, I(0)
    while tile < last:
        copies_wait(PENDING)
        lanes_sync()  # the tile is there for all lanes, and all are done with the one before
        free = stage + AHEAD if stage + AHEAD < STAGES else stage - 1
        begin_tile(p, at, base + BYTES_Q + free * BYTES_STAGE, tile + AHEAD, last, n_k)
        state = state_of_tile(p, at, tile, last, n_k)
        if state != EMPTY:
            k = base + BYTES_Q + stage * BYTES_STAGE
            s = modify_tile(p, at, state == FULL, scores(base, k), i32(tile * BLOCK_K))
            s, m, total, rescale = online_softmax(s, m, unit)
            l, output = both(add, both(times, l, rescale), total), rows_scaled(output, rescale)
            if HAS_DROPOUT:
                s = dropout_tile(p, at, s, i32(tile * BLOCK_K))
            output = accumulate(output, operand(s), k + BYTES_K, CHUNK_K)
        stage, tile = stage + 1 if stage + 1 < STAGES else I(0), tile + 1
    copies_wait(0)
    rows = listed(finish_part, ROWS, (p, at, part, m, across_row(add, l)))
    pairs_at(store_two, output, rows, i32(thread() % 4 * 2))

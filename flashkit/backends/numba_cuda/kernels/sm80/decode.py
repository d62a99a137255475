# parts: common/tiles common/kv_source common/fragment sm80/decode_layout sm80/mma common/softmax common/epilogue
# parts: sm80/combine
# Split-KV for few queries on tensor cores by mma.sync (FlashDecoding, Dao et al. 2023). Reading K and V bounds the
# time, so all heads that share them use one load, and the splits occupy all warps that the device holds.
#
# A warp takes 16 rows and one of p.num_splits parts of their keys, without other warps; combine.py reduces the splits.
#
#     Q           [16][HEAD_DIM]          shared memory of the warp
#     K, V        [STAGES][BLOCK_K][..]   shared memory of the warp, filled STAGES - 1 tiles ahead
#     s (S, P)    [16][BLOCK_K]           registers
#     output      [16][HEAD_DIM_V]        registers, not yet divided by the row sum

# --- load_tile --------------------------------------------------------------------------------------------------------


@device
def load_q(target, p, at):
    """The warp's rows of Q to shared memory; rows past the last become zeros."""
    lane, pack = i32(thread() % 32), u32(PACK_GQA)
    for chunk in range((COLUMNS_QK + 63) // 64):
        for i in range(0, 16, 4):
            row, vec = i + lane // 8, lane % 8
            index = u32(at[2] + row)
            source = q_row_address(p, p.q, I(at[0]), at[1] + I(index % pack), I(index // pack))
            source += (8 * chunk + vec) * VEC_BYTES
            wanted = index < u32(max_n_q(p) * PACK_GQA) and 64 * chunk + 8 * vec < HEAD_DIM
            cp_async(target + 16 * chunk * CHUNK_ROW + swizzled(row, vec), source, 0, 1 if wanted else 0)


@device
def load_tile(target, tensor, kv, first, dim, columns):
    """BLOCK_K rows of K or V to the warp's shared memory."""
    lane = i32(thread() % 32)
    row, vec = lane // 8, lane % 8
    if IS_PAGED:
        for i in range(0, BLOCK_K, 4):  # of each row, where it lies is looked up once
            there = kv_address(kv, tensor, first + row + i) + VEC_BYTES * vec
            for chunk in range((columns + 63) // 64):
                left = kv.n_k - first - row if 64 * chunk + 8 * vec < dim else 0
                cp_async(target + chunk * CHUNK_K + swizzled(row + i, vec), there + CHUNK_ROW * chunk, i, left)
    else:
        source = kv_address(kv, tensor, first + row) + VEC_BYTES * vec
        for chunk in range((columns + 63) // 64):
            left = kv.n_k - first - row if 64 * chunk + 8 * vec < dim else 0
            there = source + CHUNK_ROW * chunk
            for i in range(0, BLOCK_K, 4):
                cp_async(target + chunk * CHUNK_K + swizzled(row + i, vec), there, i, left)
                there += tensor.token * (4 * ITEMSIZE)


@device
def tile_state_of_warp(p, at, tile, last, n_k):
    """State of a key tile for the warp's rows of all heads; EMPTY past the last tile."""
    if tile >= last:
        return I(EMPTY)
    start, end = I(tile) * BLOCK_K, min(I(tile) * BLOCK_K + BLOCK_K, I(n_k))
    row0, row1 = I(at[2]) // PACK_GQA, (min(I(at[2]) + 16, max_n_q(p) * PACK_GQA) - 1) // PACK_GQA + 1
    q_position = seq_info(p, I(at[0])).q_position
    state = I(tile_state(p, I(at[0]), I(at[1]), q_position, row0, row1, start, end))
    if HAS_MASK:
        for head in range(1, PACK_GQA):
            found = I(tile_state(p, I(at[0]), I(at[1] + head), q_position, row0, row1, start, end))
            state = state if found == state else I(PARTIAL)
    return state if state != FULL or end == start + BLOCK_K else I(PARTIAL)


@device
def load_kv(p, at, kv, target, tile, last):
    """Issues the loads of K and V of a tile that is not EMPTY."""
    if tile_state_of_warp(p, at, tile, last, kv.n_k) != EMPTY:
        load_tile(target, kv.k, kv, i32(tile) * BLOCK_K, HEAD_DIM, COLUMNS_QK)
        load_tile(target + AT_STAGE_V, kv.v, kv, i32(tile) * BLOCK_K, HEAD_DIM_V, COLUMNS)
    cp_async_commit()


@device
def scores(q, k):
    """s = Q K^T"""
    return repeat(mma_step_nt, STEPS, filled(ZERO, SCORES), (q, CHUNK_Q, k, CHUNK_K))


# --- epilogue ---------------------------------------------------------------------------------------------------------


@device
def epilogue_split(j, rest):
    """Address of a lane's row of this split, or 0, and the factor of its output; stores its base-2 log-sum-exp."""
    p, at, part, m, total = rest
    index = at[2] + row_of_lane(j)
    place, head, row = I(part) * p.batch + I(at[0]), I(at[1] + index % PACK_GQA), I(index // PACK_GQA)
    exists = index < i32(max_n_q(p)) * PACK_GQA
    if exists and thread() % 4 == 0:
        lse = HIDDEN if total[j] == ZERO else m[j] + log2(total[j])
        store(np.float32, number_address(p.lse_partial, place, head, row), 0, lse)
    factor = ZERO if total[j] == ZERO else reciprocal(total[j])
    return number_address(p.o_partial, place, head, row) if exists else I(0), factor


@device
def store_o_partial(x, y, column, row, first):
    column += first
    if row[0] != 0 and column < HEAD_DIM_V:
        store(np.float32, row[0], column, x * row[1])
        store(np.float32, row[0], column + 1, y * row[1])
    return x, y


@kernel(THREADS, BLOCKS_PER_SM)
def sm80_decode(p):
    warp, splits, heads = u32(thread() // u32(32)), u32(p.num_splits), u32(u32(p.heads) // u32(GQA_GROUP))
    blocks, tiles_q = u32(splits // u32(WARPS)), u32(u32(max_n_q(p) * PACK_GQA + 15) // u32(16))
    at = u32(block() // blocks)
    head = u32(at // tiles_q)
    b = u32(head // heads)
    part = u32(u32(block() - at * blocks) * u32(WARPS) + warp)
    at = i32(b), i32(u32(head - b * heads) * u32(GQA_GROUP)), i32(u32(at - head * tiles_q) * u32(16))
    if EARLY:
        griddepcontrol_wait()
    n_k, scale_log2, base = i32(seq_info(p, I(at[0])).n_k), softmax_scale_log2(p), shared_address() + warp * BYTES_WARP
    tiles = u32(u32(n_k + BLOCK_K - 1) // u32(BLOCK_K))
    each_part = u32(u32(tiles + splits - u32(1)) // splits)
    tile = i32(part * each_part)
    last = i32(min(tile + each_part, tiles))

    kv = kv_source(p, at[0], at[1] // GQA_GROUP, n_k)
    load_q(base, p, at)
    for i in range(STAGES_AHEAD):
        load_kv(p, at, kv, base + AT_KV + i * STAGE_BYTES, tile + i, last)
    output, m, l, stage = filled(ZERO, SUMS), NO_REFERENCE, ZERO_ROWS, I(0)
    while tile < last:
        cp_async_wait(PENDING)
        lanes_sync()  # all lanes see the tile and have finished the previous one
        free = stage + STAGES_AHEAD if stage + STAGES_AHEAD < STAGES else stage - 1
        load_kv(p, at, kv, base + AT_KV + free * STAGE_BYTES, tile + STAGES_AHEAD, last)
        state = tile_state_of_warp(p, at, tile, last, n_k)
        if state != EMPTY:
            k = base + AT_KV + stage * STAGE_BYTES
            s = modify_tile(p, at, state == FULL, scores(base, k), i32(tile * BLOCK_K))
            s, m, total, rescale = online_softmax(s, m, scale_log2)
            l, output = both(add, both(times, l, rescale), total), rows_scaled(output, rescale)
            if HAS_DROPOUT:
                s = dropout_tile(p, at, s, i32(tile * BLOCK_K))
            output = gemm_rs(output, to_operand(s), k + AT_STAGE_V, CHUNK_K)
        stage, tile = stage + 1 if stage + 1 < STAGES else I(0), tile + 1
    cp_async_wait(0)
    rows = listed(epilogue_split, ROWS, (p, at, part, m, across_row(add, l)))
    pairs_at(store_o_partial, output, rows, i32(thread() % 4 * 2))

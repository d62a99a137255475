# parts: common/tiles common/fragment sm80/layout sm80/mma common/softmax
# parts: common/epilogue
# Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on tensor cores by mma.sync, from Ampere on.
#
# A CTA of four warps takes a work tile, BLOCK_Q query rows of a head, and loops over the key tiles that the mask shows.
#
#     Q, then O   [BLOCK_Q][..]           shared memory
#     K, V        [STAGES][BLOCK_K][..]   shared memory, double-buffered; with a single stage V of a tile is loaded
#                                         during Q K^T, and K of the next tile after it
#     s (S, P)    [WARP_ROWS][BLOCK_K]    registers of a warp, which has 16 rows, or two tiles of 16 for the same keys
#     output      [WARP_ROWS][HEAD_DIM_V] registers of a warp, not yet divided by the row sum
#     m, l        [WARP_ROWS]             row reference, in base 2, and row sum: registers
#
# Shared memory (numba_cuda/sm80.py: Tile.smem): Q at 0, AT_KV; within a stage, of STAGE_BYTES bytes, K at 0 and
# AT_STAGE_V. The row reference is the running row maximum, or near it (common/softmax.py: speculative_softmax).


@device
def scores(q, k):
    """s = Q K^T for the rows of this warp."""
    return repeat(mma_step_nt, STEPS, filled(ZERO, SCORES), (q, CHUNK_Q, k, CHUNK_K))


@device
def load_k(p, target, kv, tile):
    b, head, n_k = kv
    load_tile(target, p.k, b, head, i32(tile) * BLOCK_K, n_k, BLOCK_K, HEAD_DIM, COLUMNS_QK)


@device
def load_v(p, target, kv, tile):
    b, head, n_k = kv
    load_tile(target, p.v, b, head, i32(tile) * BLOCK_K, n_k, BLOCK_K, HEAD_DIM_V, COLUMNS)


@device
def is_one(j, so_far, factor):
    return so_far and factor[j] == ONE


@device
def epilogue(p, base, at, m, l, output):
    """Divides O by the row sums; stores the log-sum-exp, and O by way of shared memory in vectors of 16 bytes."""
    output, factor, nonfinite = normalize_rows(p, at, m, l, output)
    lane, row0 = thread() % 32, thread() // 32 * WARP_ROWS
    staged = base + row0 * CHUNK_ROW
    lanes_sync()
    groups(store_o_fragment, FRAGMENT, to_operand(output), (staged, CHUNK_Q, 0))
    lanes_sync()
    if MAY_HIDE:  # P = 0 may have met inf or NaN in V
        if any_lane(nonfinite):
            accumulate_nonfinite(p, at, m, factor, base, BLOCK_Q)
            lanes_sync()
    target = row_address(p.out, I(at[0]), I(at[1]), I(at[2] + row0))
    for i in range(lane, WARP_ROWS * ROW_VECS_V, 32):
        row, vec = i // ROW_VECS_V, i % ROW_VECS_V
        if at[2] + row0 + row < p.n_q:
            vector = load_vec(staged + vec // 8 * CHUNK_Q + swizzled(row, vec % 8))
            store_vec(target + row * p.out.token * ITEMSIZE + VEC_BYTES * vec, vector)


@kernel(THREADS, BLOCKS_PER_SM)
def sm80_forward(p):
    base, at = shared_address(), work_tile(p, block())
    n_k, n_q = i32(seq_info(p, I(at[0])).n_k), p.n_q
    scale_log2, kv = softmax_scale_log2(p), (at[0], at[1] // GQA_GROUP, n_k)
    q = base + thread() // 32 * WARP_ROWS * CHUNK_ROW
    load_tile(base, p.q, at[0], at[1], at[2], i32(n_q), BLOCK_Q, HEAD_DIM, COLUMNS_QK)
    end = min(I(at[2]) + BLOCK_Q, n_q)
    walk = walk_keys(p, I(at[0]), I(at[1]), I(at[2]), end, I(n_k))
    if walk.state != EMPTY:
        load_k(p, base + AT_KV, kv, walk.tile)
        if STAGES > 1:
            load_v(p, base + AT_KV + AT_STAGE_V, kv, walk.tile)
    cp_async_commit()
    if walk.state == EMPTY:  # the epilogue reuses the memory in which Q arrives
        cp_async_wait(0)
        threads_sync()

    output, m, l = filled(ZERO, SUMS), NO_REFERENCE, ZERO_ROWS
    has_row_ref, stage = False, I(0)
    while walk.state != EMPTY:
        cp_async_wait(0)
        threads_sync()  # all threads see the tile and have finished the previous one
        ahead = next_tile(p, walk)
        if STAGES == 1:
            load_v(p, base + AT_KV + AT_STAGE_V, kv, walk.tile)
        elif ahead.state != EMPTY:
            free = base + AT_KV + (1 - stage) * STAGE_BYTES
            load_k(p, free, kv, ahead.tile)
            load_v(p, free + AT_STAGE_V, kv, ahead.tile)
        cp_async_commit()
        k0, k = walk.tile * BLOCK_K, base + AT_KV + stage * STAGE_BYTES
        full = walk.state == FULL and k0 + BLOCK_K <= n_k
        s, near, total = scores(q, k), False, ZERO_ROWS
        if STAGES == 1:
            cp_async_wait(0)
            threads_sync()  # all threads see V and have finished with K
            if ahead.state != EMPTY:
                load_k(p, base + AT_KV, kv, ahead.tile)
            cp_async_commit()
        speculative = has_row_ref and full and not HAS_SCORE and STAGES > 1
        if speculative:
            s, total, near = speculative_softmax(s, m, scale_log2)
            if not near:  # the speculation failed, and the scores are overwritten
                s = scores(q, k)
        if not near:
            s = modify_tile(p, at, full, s, i32(k0))
            s, m, total, rescale = online_softmax(s, m, scale_log2)
            l = both(times, l, rescale)
            if not all_lanes(repeat(is_one, ROWS, True, rescale)):
                output = rows_scaled(output, rescale)
            has_row_ref = all_lanes(repeat(is_not_great, ROWS, True, m))
        l = both(add, l, total)
        if HAS_DROPOUT:
            s = dropout_tile(p, at, s, i32(k0))
        output = gemm_rs(output, to_operand(s), k + AT_STAGE_V, CHUNK_K)
        stage, walk = 1 - stage if STAGES > 1 else stage, ahead
    epilogue(p, base, at, m, l, output)

# parts: simt/tile
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on CUDA cores. P is recomputed from the
# log-sum-exp.
#
# Two kernels, each of which owns its gradients, so there are no atomics and the result is deterministic: "dkdv" takes a
# tile of keys and loops over the query tiles that see it, for dK and dV; "dq" takes a tile of query rows and loops over
# its key tiles, for dQ. That costs seven matrix products instead of five. BACKWARD_KEYS says for which of the two this
# text is compiled.
#
#     dkdv:   s, dp transposed [BLOCK_K][BLOCK_Q];  dk [BLOCK_K][HEAD_DIM], dv [BLOCK_K][HEAD_DIM_V]
#     dq:     s, dp            [BLOCK_Q][BLOCK_K];  dq [BLOCK_Q][HEAD_DIM]


@device
def softmax_backward(p, state, s, dp, slope, b, h, row0, k0, n_k, last, sums, adds):
    """S to P, and dP to dS with scale and slope; 0 where P is 0. adds: gradients by values are summed as well."""
    tx, ty = thread_coord()
    n_q, stats = seq_info(p, b).n_q, stats_row(p, b, row0)
    modify_tile(p, state, s, slope, True, b, h, row0, k0, n_k)
    if HAS_DROPOUT:
        drop_tile(p, dp, b, h, row0, k0)
    for i in range(ROWS_PER_THREAD):
        for j in range(COLUMNS_PER_THREAD):
            row = tx + j * TX if BACKWARD_KEYS else ty + i * TY
            lse, delta = INFINITE, ZERO
            if row0 + row < n_q:
                lse = load(F, number_address(p.bwd_lse, b, h, stats + row), 0)
                delta = load(F, number_address(p.delta, b, h, stats + row), 0)
            p_ij = softmax_exp2((s[i, j] - lse) * LOG2E)
            ds = p_ij * (dp[i, j] - delta)
            if HAS_VALUES:
                if p_ij != ZERO:
                    key = ty + i * TY if BACKWARD_KEYS else tx + j * TX
                    position = row0 + row + seq_info(p, b).q_position
                    if adds:
                        add_values(ds, slope[i, j], b, h, row0 + row, position, k0 + key, p, last, sums)
                    slope[i, j] = score_slope(slope[i, j], b, h, row0 + row, position, k0 + key, p)
            ds *= F(p.softmax_scale)
            if HAS_SCORE:
                ds *= slope[i, j]
            s[i, j], dp[i, j] = p_ij, ZERO if p_ij == ZERO else ds


@device
def ones(factor):
    for i in range(ROWS_PER_THREAD):
        factor[i] = ONE


@device
def dkdv_tile(p, shared):
    """dK and dV of one key tile."""
    block, heads_kv, entries = I(cuda.blockIdx.x), p.heads // GQA_GROUP, num_entries(p)
    head_kv = block % heads_kv
    b, tile = k_tile(p, block // heads_kv % entries, block // (heads_kv * entries), BLOCK_K)
    k0, n_k = tile * BLOCK_K, seq_info(p, b).n_k
    k1 = min(k0 + BLOCK_K, n_k)
    kv = kv_source(p, b, head_kv, n_k)
    k, v = k_rows(kv, k0), v_rows(kv, k0)

    s = cuda.local.array((ROWS_PER_THREAD, COLUMNS_PER_THREAD), F_TYPE)
    dp = cuda.local.array((ROWS_PER_THREAD, COLUMNS_PER_THREAD), F_TYPE)
    slope = cuda.local.array((ROWS_PER_THREAD, COLUMNS_PER_THREAD), F_TYPE)
    factor = cuda.local.array(ROWS_PER_THREAD, F_TYPE)
    dk = cuda.local.array((ROWS_PER_THREAD, K_COLUMNS), F_TYPE)
    dv = cuda.local.array((ROWS_PER_THREAD, V_COLUMNS), F_TYPE)
    last, sums = cuda.local.array(READS, int64), cuda.local.array(READS, F_TYPE)  # nothing
    ones(factor)
    nonfinite, again = False, True
    while again:
        clear(dk, K_COLUMNS)
        clear(dv, V_COLUMNS)
        h = head_kv * GQA_GROUP
        while h < (head_kv + 1) * GQA_GROUP and k0 < n_k:
            walk = walk_queries(p, b, h, k0, k1, seq_info(p, b).n_q)
            while walk.state != EMPTY:
                row0 = walk.tile * BLOCK_Q
                q = q_rows(p, p.q, b, h, row0)
                dout = q_rows(p, p.dout, b, h, row0)
                scores(k, q, CHUNK_QK, s, shared)
                scores(v, dout, CHUNK_V, dp, shared)
                softmax_backward(p, walk.state, s, dp, slope, b, h, row0, k0, n_k, last, sums, False)
                if HAS_DROPOUT:
                    drop_tile(p, s, b, h, row0, k0)
                store_tile(s, shared)
                accumulate(dout, ACC_V, dv, shared, nonfinite)
                cuda.syncthreads()
                store_tile(dp, shared)
                accumulate(q, ACC_QK, dk, shared, nonfinite)
                walk = next_tile(p, walk)
            h += 1
        # Keys past a sequence's length have accumulated nothing and get 0.
        start, end = seq_info(p, b).key_offset, stored_n_k(p, b)
        finite_k = store_accumulator(dk, ACC_QK, factor, p.dk, b, head_kv, start, k0, end)
        finite_v = store_accumulator(dv, ACC_V, factor, p.dv, b, head_kv, start, k0, end)
        again = all_threads_or(not (finite_k and finite_v)) and not nonfinite
        nonfinite = True


@device
def dq_tile(p, shared):
    """dQ of one query tile."""
    block, entries, tiles = I(cuda.blockIdx.x), num_entries(p), num_q_tiles(p, BLOCK_Q)
    h, entry = block % p.heads, block // p.heads % entries
    b, tile = q_tile(p, entry, tiles - 1 - block // (p.heads * entries), BLOCK_Q)
    row0, head_kv, n_k = tile * BLOCK_Q, h // GQA_GROUP, seq_info(p, b).n_k
    if IS_PACKED and row0 >= seq_info(p, b).n_q:
        return
    row1, kv = min(row0 + BLOCK_Q, seq_info(p, b).n_q), kv_source(p, b, head_kv, n_k)
    q = q_rows(p, p.q, b, h, row0)
    dout = q_rows(p, p.dout, b, h, row0)

    s = cuda.local.array((ROWS_PER_THREAD, COLUMNS_PER_THREAD), F_TYPE)
    dp = cuda.local.array((ROWS_PER_THREAD, COLUMNS_PER_THREAD), F_TYPE)
    slope = cuda.local.array((ROWS_PER_THREAD, COLUMNS_PER_THREAD), F_TYPE)
    factor = cuda.local.array(ROWS_PER_THREAD, F_TYPE)
    dq = cuda.local.array((ROWS_PER_THREAD, K_COLUMNS), F_TYPE)
    last, sums = cuda.local.array(READS, int64), cuda.local.array(READS, F_TYPE)
    for n in range(READS):
        last[n] = 0
    ones(factor)
    nonfinite, again = False, True
    while again:
        clear(dq, K_COLUMNS)
        walk = walk_keys(p, b, h, row0, row1, n_k)
        while walk.state != EMPTY:
            k0 = walk.tile * BLOCK_K
            k = k_rows(kv, k0)
            scores(q, k, CHUNK_QK, s, shared)
            scores(dout, v_rows(kv, k0), CHUNK_V, dp, shared)
            softmax_backward(p, walk.state, s, dp, slope, b, h, row0, k0, n_k, last, sums, not nonfinite)
            store_tile(dp, shared)
            accumulate(k, ACC_QK, dq, shared, nonfinite)
            walk = next_tile(p, walk)
        if HAS_VALUES:
            flush_values(last, sums)
        finite = store_accumulator(dq, ACC_QK, factor, p.dq, b, h, seq_info(p, b).row_offset, row0, seq_info(p, b).n_q)
        again = all_threads_or(not finite) and not nonfinite
        nonfinite = True


@kernel(THREADS, BLOCKS_PER_SM)
def simt_backward(p):
    shared = shared_address()
    if BACKWARD_KEYS:
        dkdv_tile(p, shared)
    else:
        dq_tile(p, shared)

# parts: simt/tile
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on the ordinary arithmetic units: weights
# recomputed from the log-sum-exp.
#
# Two passes, each of which owns what it sums, so nothing is added atomically and the bits never change: `keys` takes a
# tile of keys and goes over the queries that see it, for dK and dV; `queries` takes a tile of queries and goes over its
# keys, for dQ. That costs seven products instead of five. BACKWARD_KEYS says which of the two this text is.
#
#     keys:     s, ds transposed [BLOCK_K][BLOCK_Q];  dk [BLOCK_K][HEAD_DIM], dv [BLOCK_K][HEAD_DIM_V]
#     queries:  s, ds            [BLOCK_Q][BLOCK_K];  dq [BLOCK_Q][HEAD_DIM]


@device
def weights_and_gradients(p, state, s, dp, slope, b, h, row0, k0, n_k):
    """Scores s (unscaled) to weights, and dP to dS, times the scale and the slope of the score modification. A weight
    of 0 has a gradient of 0, whatever dP is.
    """
    tx, ty = place()
    modify_tile(p, state, s, slope, True, b, h, row0, p.n_q, k0, n_k)
    if HAS_DROPOUT:
        drop_tile(p, dp, b, h, row0, k0)
    for i in range(ROWS_EACH):
        for j in range(COLUMNS_EACH):
            row = row0 + (tx + j * TX if BACKWARD_KEYS else ty + i * TY)
            shift, delta = INFINITE, ZERO
            if row < p.n_q:
                shift = load(F, number_address(p.bwd_lse, b, h, row), 0)
                delta = load(F, number_address(p.delta, b, h, row), 0)
            weight = weight_of((s[i, j] - shift) * LOG2E)
            gradient = weight * (dp[i, j] - delta) * F(p.softmax_scale)
            if HAS_SCORE:
                gradient *= slope[i, j]
            s[i, j], dp[i, j] = weight, ZERO if weight == ZERO else gradient


@device
def ones(factor):
    for i in range(ROWS_EACH):
        factor[i] = ONE


@device
def keys_tile(p, shared):
    """dK and dV of one tile of keys."""
    block, heads_kv = I(cuda.blockIdx.x), p.heads // GQA_GROUP
    head_kv, b = block % heads_kv, block // heads_kv % p.batch
    k0, n_k = block // (heads_kv * p.batch) * BLOCK_K, keys_of(p, b)
    k1 = min(k0 + BLOCK_K, n_k)
    k, v = rows_of(p.k, b, head_kv, k0, n_k, BLOCK_K), rows_of(p.v, b, head_kv, k0, n_k, BLOCK_K)

    s, dp = cuda.local.array((ROWS_EACH, COLUMNS_EACH), F_TYPE), cuda.local.array((ROWS_EACH, COLUMNS_EACH), F_TYPE)
    slope, factor = cuda.local.array((ROWS_EACH, COLUMNS_EACH), F_TYPE), cuda.local.array(ROWS_EACH, F_TYPE)
    dk, dv = cuda.local.array((ROWS_EACH, WIDTH_QK), F_TYPE), cuda.local.array((ROWS_EACH, WIDTH_V), F_TYPE)
    ones(factor)
    careful, again = False, True
    while again:
        clear(dk, WIDTH_QK)
        clear(dv, WIDTH_V)
        h = head_kv * GQA_GROUP
        while h < (head_kv + 1) * GQA_GROUP and k0 < n_k:
            walk = walk_queries(p, b, h, k0, k1, p.n_q, False)
            while walk.state != EMPTY:
                row0 = walk.tile * BLOCK_Q
                q, dout = rows_of(p.q, b, h, row0, p.n_q, BLOCK_Q), rows_of(p.dout, b, h, row0, p.n_q, BLOCK_Q)
                scores(k, q, CHUNK_QK, s, shared)
                scores(v, dout, CHUNK_V, dp, shared)
                weights_and_gradients(p, walk.state, s, dp, slope, b, h, row0, k0, n_k)
                if HAS_DROPOUT:
                    drop_tile(p, s, b, h, row0, k0)
                store_weights(s, shared)
                accumulate(dout, SUMS_V, dv, shared, careful)
                cuda.syncthreads()
                store_weights(dp, shared)
                accumulate(q, SUMS_QK, dk, shared, careful)
                walk = next_tile(p, walk)
            h += 1
        # Keys past a sequence's length take part in nothing and get 0.
        finite_k = store_sums(dk, SUMS_QK, factor, p.dk, b, head_kv, k0, p.n_k)
        finite_v = store_sums(dv, SUMS_V, factor, p.dv, b, head_kv, k0, p.n_k)
        again = all_threads_or(not (finite_k and finite_v)) and not careful
        careful = True


@device
def queries_tile(p, shared):
    """dQ of one tile of queries."""
    block, tiles = I(cuda.blockIdx.x), (p.n_q + BLOCK_Q - 1) // BLOCK_Q
    h, b = block % p.heads, block // p.heads % p.batch
    row0, head_kv, n_k = (tiles - 1 - block // (p.heads * p.batch)) * BLOCK_Q, h // GQA_GROUP, keys_of(p, b)
    row1 = min(row0 + BLOCK_Q, p.n_q)
    q, dout = rows_of(p.q, b, h, row0, p.n_q, BLOCK_Q), rows_of(p.dout, b, h, row0, p.n_q, BLOCK_Q)

    s, dp = cuda.local.array((ROWS_EACH, COLUMNS_EACH), F_TYPE), cuda.local.array((ROWS_EACH, COLUMNS_EACH), F_TYPE)
    slope, factor = cuda.local.array((ROWS_EACH, COLUMNS_EACH), F_TYPE), cuda.local.array(ROWS_EACH, F_TYPE)
    dq = cuda.local.array((ROWS_EACH, WIDTH_QK), F_TYPE)
    ones(factor)
    careful, again = False, True
    while again:
        clear(dq, WIDTH_QK)
        walk = walk_keys(p, b, h, row0, row1, n_k)
        while walk.state != EMPTY:
            k0 = walk.tile * BLOCK_K
            k = rows_of(p.k, b, head_kv, k0, n_k, BLOCK_K)
            scores(q, k, CHUNK_QK, s, shared)
            scores(dout, rows_of(p.v, b, head_kv, k0, n_k, BLOCK_K), CHUNK_V, dp, shared)
            weights_and_gradients(p, walk.state, s, dp, slope, b, h, row0, k0, n_k)
            store_weights(dp, shared)
            accumulate(k, SUMS_QK, dq, shared, careful)
            walk = next_tile(p, walk)
        finite = store_sums(dq, SUMS_QK, factor, p.dq, b, h, row0, p.n_q)
        again = all_threads_or(not finite) and not careful
        careful = True


@kernel(THREADS, BLOCKS_PER_SM)
def simt_backward(p):
    shared = cuda.shared.array(0, F_TYPE)
    if BACKWARD_KEYS:
        keys_tile(p, shared)
    else:
        queries_tile(p, shared)

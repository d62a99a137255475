"""Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2): P recomputed from the LSE, five products.

A work tile is a split of the key tiles of one key/value head. It goes over its key tiles and, for each, over the query
tiles that see them. The LSE is known, so keys lie along the vector lanes: only K and V are packed, once per key tile,
and Q, dO, dQ, dK, dV are used where they lie. specialise.py puts common.py, the operands and the K/V loader before this
text.

    K^T, V^T  [D][BLOCK_K], [DV][BLOCK_K]      scaled keys, values
    S, dP     [BLOCK_Q][BLOCK_K]               scores, then P; dP, then dS
    dK, dV    [BLOCK_K][D], [BLOCK_K][DV]      accumulators of the key tile
    dQ        dq_accum [split][B][H][N_Q][D]   one accumulator per split, added in a fixed order by bwd_postprocess
"""


@njit(**options)
def dq_accum_at(args, seq, split, b, h, row):
    """Address of a row of dq_accum."""
    batch_stride, head_stride, row_stride = args[DQ_ACCUM + 1], args[DQ_ACCUM + 2], args[DQ_ACCUM + 3]
    entry = split * args[DQ_SPLIT_STRIDE] + b * batch_stride
    return args[DQ_ACCUM] + entry + h * head_stride + (seq.row_offset + row) * row_stride


@njit(**options)
def scores(args, q, k_t, s):
    """S = Q K^T."""
    call_gemm(args[GEMM], q, k_t, s)
    scale_tile(args, s)


@njit(**options)
def backward_q_tile(args, seq, b, h, split, row0, rows, k0, state, k_t, v_t, k, dk, dv, scratch):
    """Some queries against a key tile: adds to dQ, dK and dV."""
    # Tiles and scratch memory.
    d, d_v, n, row_bytes = args[DIM], args[DIM_V], k_t.shape[1], args[BLOCK_K] * ACCUM_SIZE
    at = backward_layout(args[BLOCK_Q], args[BLOCK_K], padded(d), padded(d_v), ACCUM_SIZE, K_PACK)
    s = accum_tile(scratch + at.scores, rows, n, row_bytes)
    ds = accum_tile(scratch + at.ds, rows, n, row_bytes)
    dq = accum_tile(dq_accum_at(args, seq, split, b, h, row0), rows, d, d * ACCUM_SIZE)
    lse, delta = q_stats(args, BWD_LSE, seq, b, h, row0, rows), q_stats(args, DELTA, seq, b, h, row0, rows)

    q = load_tile(args, q_rows(args, Q, seq, b, h, row0, rows, d), scratch + at.q)
    do = load_tile(args, q_rows(args, DOUT, seq, b, h, row0, rows, d_v), scratch + at.do)
    scores(args, q, k_t, s)
    modify(args, seq, state, s, scratch + at.slopes, b, h, row0, k0)
    call_gemm(args[GEMM], do, v_t, ds)  # dP = dO V^T
    if args[DROPOUT] != 0:
        dropout(args, ds, False, b, h, row0, k0)
    softmax_backward(args, s, ds, lse, delta, scratch + at.pairs)
    visit_ds(args, seq, s, ds, scratch + at.slopes, b, h, row0, k0)
    if args[DROPOUT] != 0:
        dropout(args, s, False, b, h, row0, k0)
    accumulate_gradients(args, s, ds, q, do, k, dq, dk, dv, scratch + at.pairs, args[NONFINITE] != 0)


@njit(**options)
def epilogue(args, seq, b, head_kv, k0, n, dk, dv, address):
    """Store dK and dV of a key tile. Returns whether all of them are finite."""
    finite = store_dkv(args, dk, kv_rows(args, DK, seq, b, head_kv, k0, n, args[DIM]), address)
    return finite & store_dkv(args, dv, kv_rows(args, DV, seq, b, head_kv, k0, n, args[DIM_V]), address)


@njit(**options)
def backward_key_tile(args, seq, b, head_kv, split, key_tile, scratch):
    """One key tile against all queries that see it. Returns whether dK and dV are finite."""
    # Tiles and scratch memory.
    d, d_v, block_q, block_k, n_q = args[DIM], args[DIM_V], args[BLOCK_Q], args[BLOCK_K], seq.n_q
    row_bytes, k0 = block_k * ACCUM_SIZE, key_tile * block_k
    n = min(block_k, seq.n_k - k0)
    at = backward_layout(block_q, block_k, padded(d), padded(d_v), ACCUM_SIZE, K_PACK)
    dk = zero_dkv(scratch + at.dk, n, d, row_bytes)
    dv = zero_dkv(scratch + at.dv, n, d_v, row_bytes)

    keys = kv_rows(args, K, seq, b, head_kv, k0, n, d)
    values = kv_rows(args, V, seq, b, head_kv, k0, n, d_v)
    k_t = pack_t(args, keys, args[PACK_SCALE], scratch)  # load_tile
    v_t = pack_t(args, values, ONE, scratch + at.v_t)
    k = pack_tile(args, keys, scratch + at.k)
    tiles = (n_q + block_q - 1) // block_q
    for h in range(head_kv * args[GROUP], (head_kv + 1) * args[GROUP]):
        tile = np.int64(0)
        while tile < tiles and not stopped(args):
            end, state = next_group(args, seq, b, h, k0, k0 + n, tile, tiles, block_q, n_q, False)
            while state != EMPTY and tile < end and not stopped(args):
                row0, last = tile * block_q, min((tile + 1) * block_q, n_q)
                while row0 < last:
                    stop, run = last, state
                    if state == PARTIAL:
                        stop, run = next_run(args, seq, b, h, k0, k0 + n, row0, last, n_q, False)
                    if run != EMPTY:
                        backward_q_tile(
                            args, seq, b, h, split, row0, stop - row0, k0, run, k_t, v_t, k, dk, dv, scratch
                        )  # fmt: skip
                    row0 = stop
                tile += 1
            tile = end
    return epilogue(args, seq, b, head_kv, k0, n, dk, dv, scratch + at.scores)


@njit(fastmath={"reassoc"}, **options)  # sums by vectors
def dot(x, y):
    """The scalar product of two rows."""
    total = ACCUM(0)
    for j in range(len(x)):
        total += widen(x[j]) * widen(y[j])
    return total


@entry(types.void(types.int64, types.int64))
def bwd_preprocess(address, thread):
    """delta = rowsum(dO * O) - dLSE, and bwd_lse: the LSE with +inf for rows without a visible key."""
    args = vector(address, SIZE, 8, np.int64)
    work_tile = next_q_tile(args)
    while work_tile.valid:
        b, h, first = work_tile.b, work_tile.head, work_tile.block * args[BLOCK_Q]
        seq = seq_info(args, b, h)
        count = min(args[BLOCK_Q], seq.n_q - first)
        out = q_rows(args, OUT, seq, b, h, first, count, args[DIM_V])
        dout = q_rows(args, DOUT, seq, b, h, first, count, args[DIM_V])
        lse, bwd_lse = q_stats(args, LSE, seq, b, h, first, count), q_stats(args, BWD_LSE, seq, b, h, first, count)
        delta = q_stats(args, DELTA, seq, b, h, first, count)
        for i in range(count):
            total = dot(out[i], dout[i])
            if args[DLSE] != 0:
                total -= q_stats(args, DLSE, seq, b, h, first, count)[i]
            empty = lse[i] == -np.inf
            delta[i] = ACCUM(0) if empty else total
            bwd_lse[i] = np.inf if empty else lse[i]
        work_tile = next_q_tile(args)


@njit(**options)
def backward_split(args, b, head_kv, split, scratch):
    """A split takes every NUM_SPLITS-th key tile, which balances the splits of a causal mask."""
    for h in range(head_kv * args[GROUP], (head_kv + 1) * args[GROUP]):
        seq = seq_info(args, b, h)
        accum_row(dq_accum_at(args, seq, split, b, h, 0), seq.n_q * args[DIM])[:] = 0
    seq = seq_info(args, b, head_kv * args[GROUP])
    tiles = (seq.n_k + args[BLOCK_K] - 1) // args[BLOCK_K]
    for key_tile in range(split, tiles, args[NUM_SPLITS]):
        if stopped(args):
            break
        if not backward_key_tile(args, seq, b, head_kv, split, key_tile, scratch):
            args[IS_NONFINITE] = 1


@entry(types.void(types.int64, types.int64))
def backward(address, thread):
    """A split of one key/value head, or of several in turn that add to the same gradients."""
    args = vector(address, SIZE, 8, np.int64)
    scratch = args[SCRATCH] + thread * args[SCRATCH_BYTES]
    begin_products(args)
    work_tile = next_kv_split(args)
    while work_tile.valid:
        for b in range(work_tile.b, work_tile.b + args[SERIAL_ENTRIES]):
            for head_kv in range(work_tile.head, work_tile.head + args[SERIAL_HEADS]):
                backward_split(args, b, head_kv, work_tile.block, scratch)
        work_tile = next_kv_split(args)
    end_products(args)


@entry(types.void(types.int64, types.int64))
def bwd_postprocess(address, thread):
    """dQ from its accumulators: the splits are added in their order, and the sum is rounded."""
    args = vector(address, SIZE, 8, np.int64)
    d = args[DIM]
    work_tile = next_q_tile(args)
    while work_tile.valid:
        b, h, first = work_tile.b, work_tile.head, work_tile.block * args[BLOCK_Q]
        seq = seq_info(args, b, h)
        count = min(args[BLOCK_Q], seq.n_q - first)
        dq = q_rows(args, DQ, seq, b, h, first, count, d)
        total = accum_row(dq_accum_at(args, seq, 0, b, h, first), count * d)
        for split in range(1, args[NUM_SPLITS]):
            of_split = accum_row(dq_accum_at(args, seq, split, b, h, first), count * d)
            for i in range(count * d):
                total[i] += of_split[i]
        if not store_rounded(accum_tile(total.ctypes.data, count, d, d * ACCUM_SIZE), dq):
            args[IS_NONFINITE] = 1
        work_tile = next_q_tile(args)

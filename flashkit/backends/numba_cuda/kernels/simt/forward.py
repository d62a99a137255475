# parts: simt/tile
# Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on CUDA cores, for every device and dtype.
#
# A CTA of TX * TY threads takes BLOCK_Q query rows of one head and loops over the key tiles that the mask shows them.
#
#     s (S, P)    [BLOCK_Q][BLOCK_K]      registers; P then goes through shared memory
#     o           [BLOCK_Q][HEAD_DIM_V]   registers, not yet divided by the row sum
#     m, l        [BLOCK_Q]               running row maximum and row sum: registers of the TX threads that share a row
#
# HAS_STATS: also the entropy of each row, log(l) - rowsum(P (S - m)) / l, and m.
#
# CTAs are numbered longest first: the last query tiles, which see the most keys under a causal mask, come first. Heads
# are neighbours, so those of a group share K and V in the L2 cache.


@device
def across_row(x, join):
    """Reduces over the TX threads that share a row."""
    step = TX // 2
    while step > 0:
        x = join(x, shuffle_xor(x, step))
        step //= 2
    return x


@device
def larger(x, y):
    return y if x < y else x


@device
def sum_of(x, y):
    return x + y


@device
def online_softmax(s, m, l, o, total):
    """S to P relative to the running row maximum; rescales l and o to it, and total, the sum of P (S - m) in base 2."""
    for i in range(ROWS_PER_THREAD):
        row_max = m[i]
        for j in range(COLUMNS_PER_THREAD):
            row_max = larger(row_max, s[i, j])
        row_max = across_row(row_max, larger)
        # A row without a visible key so far subtracts 0 instead of -inf, so that -inf stays -inf.
        finite_max = ZERO if row_max == HIDDEN else row_max
        rescale = softmax_exp2((m[i] - finite_max) * LOG2E)
        row_sum = ZERO
        if HAS_STATS:
            total[i] = ZERO if l[i] == ZERO else rescale * (total[i] + (m[i] - row_max) * LOG2E * l[i])
        for j in range(COLUMNS_PER_THREAD):
            below = (s[i, j] - finite_max) * LOG2E
            s[i, j] = softmax_exp2(below)
            row_sum += s[i, j]
            if HAS_STATS:
                total[i] += s[i, j] * (below if below > LOWEST else LOWEST)
        m[i] = row_max
        l[i] = l[i] * rescale + row_sum  # of this thread's keys; the epilogue reduces over the row
        for c in range(V_COLUMNS):
            o[i, c] *= rescale


LOWEST = F(-1e30)  # instead of -inf, which P = 0 makes NaN


@device
def store_statistics(p, b, h, row, row_max, row_sum, total):
    """The entropy and the largest score of a row. total: of all its keys."""
    top = row_max if row_sum == row_sum else row_sum
    if HAS_SINKS:  # one more outcome
        sink = load(F, p.sinks, h)
        if sink != HIDDEN:
            new_max = larger(row_max, sink)
            of_sink, factor = softmax_exp2((sink - new_max) * LOG2E), softmax_exp2((row_max - new_max) * LOG2E)
            total = ZERO if row_sum == ZERO else factor * (total + (row_max - new_max) * LOG2E * row_sum)
            total += of_sink * (sink - new_max) * LOG2E
            row_sum = row_sum * factor + of_sink
    entropy = ZERO if row_sum == ZERO else log(row_sum) - total / row_sum / LOG2E
    store(F, number_address(p.entropy, b, h, q_token(p, b, row)), 0, entropy)
    store(F, number_address(p.max_logit, b, h, q_token(p, b, row)), 0, top)


@device
def epilogue(p, b, h, row0, m, l, o, total):
    """Divides o by the row sums; stores O and the log-sum-exp. Returns whether all of O is finite."""
    tx, ty = thread_coord()
    factor = cuda.local.array(ROWS_PER_THREAD, F_TYPE)
    for i in range(ROWS_PER_THREAD):
        row_max, row_sum, rescaled = m[i], across_row(l[i], sum_of), ONE
        if HAS_STATS:
            all_of_row = across_row(total[i], sum_of)
            if tx == 0 and row0 + ty + i * TY < seq_info(p, b).n_q:
                store_statistics(p, b, h, row0 + ty + i * TY, row_max, row_sum, all_of_row)
        if HAS_SINKS:  # one more logit in the row sum, without a value
            sink = load(F, p.sinks, h)
            if sink != HIDDEN:
                old_max, row_max = row_max, larger(row_max, sink)
                rescaled = softmax_exp2((old_max - row_max) * LOG2E)
                row_sum = row_sum * rescaled + softmax_exp2((sink - row_max) * LOG2E)
        empty = row_sum == ZERO  # no visible key
        factor[i] = ZERO if empty else rescaled / row_sum
        row = row0 + ty + i * TY
        if tx == 0 and row < seq_info(p, b).n_q:
            store(F, number_address(p.lse, b, h, q_token(p, b, row)), 0, HIDDEN if empty else row_max + log(row_sum))
    return store_accumulator(o, ACC_V, factor, p.out, b, h, seq_info(p, b).row_offset, row0, seq_info(p, b).n_q)


@kernel(THREADS, BLOCKS_PER_SM)
def simt_forward(p):
    shared = shared_address()
    block, entries, tiles = I(cuda.blockIdx.x), num_entries(p), num_q_tiles(p, BLOCK_Q)
    h, entry = block % p.heads, block // p.heads % entries
    b, tile = q_tile(p, entry, tiles - 1 - block // (p.heads * entries), BLOCK_Q)
    row0, head_kv, n_k = tile * BLOCK_Q, h // GQA_GROUP, seq_info(p, b).n_k
    if IS_PACKED and row0 >= seq_info(p, b).n_q:
        return
    row1, kv = min(row0 + BLOCK_Q, seq_info(p, b).n_q), kv_source(p, b, head_kv, n_k)
    q = q_rows(p, p.q, b, h, row0)

    s = cuda.local.array((ROWS_PER_THREAD, COLUMNS_PER_THREAD), F_TYPE)
    o = cuda.local.array((ROWS_PER_THREAD, V_COLUMNS), F_TYPE)
    m, l = cuda.local.array(ROWS_PER_THREAD, F_TYPE), cuda.local.array(ROWS_PER_THREAD, F_TYPE)
    total = cuda.local.array(ROWS_PER_THREAD, F_TYPE)
    # An element of P that is 0 times an inf or NaN in a masked row of V is NaN. A CTA with a non-finite O, which is
    # rare, repeats its work and skips the products with 0.
    nonfinite, again = False, True
    while again:
        clear(o, V_COLUMNS)
        for i in range(ROWS_PER_THREAD):
            m[i], l[i], total[i] = HIDDEN, ZERO, ZERO
        walk = walk_keys(p, b, h, row0, row1, n_k)
        while walk.state != EMPTY:
            k0 = walk.tile * BLOCK_K
            scores(q, k_rows(kv, k0), CHUNK_QK, s, shared)
            modify_tile(p, walk.state, s, s, False, b, h, row0, k0, n_k)
            online_softmax(s, m, l, o, total)
            if HAS_DROPOUT:
                drop_tile(p, s, b, h, row0, k0)
            store_tile(s, shared)
            accumulate(v_rows(kv, k0), ACC_V, o, shared, nonfinite)
            walk = next_tile(p, walk)
        finite = epilogue(p, b, h, row0, m, l, o, total)
        again = all_threads_or(not finite) and not nonfinite
        nonfinite = True

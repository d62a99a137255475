# parts: simt/tile
# Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on the ordinary arithmetic units.
#
# A block of TX * TY threads takes BLOCK_Q queries of one head and goes over the tiles of keys that they see.
#
#     s, weights    [BLOCK_Q][BLOCK_K]     scores, then weights: in registers, then in shared memory
#     output        [BLOCK_Q][HEAD_DIM_V]  unscaled: in registers
#     m, l          [BLOCK_Q]              running maximum and sum of each query: in the registers of its TX threads
#
# Blocks are numbered with the last rows first, which under a causal mask see the most, and heads next to each other,
# which share keys where they are grouped.


@device
def across_row(x, join):
    """Reduce over the TX threads that share a row."""
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
def online_softmax(s, m, l, output):
    """Scores to weights relative to the running maximum; what was summed before is rescaled to it."""
    for i in range(ROWS_EACH):
        top = m[i]
        for j in range(COLUMNS_EACH):
            top = larger(top, s[i, j])
        top = across_row(top, larger)
        # A query that has seen no key yet keeps the shift 0, so that -inf - shift stays -inf.
        shift = ZERO if top == HIDDEN else top
        factor = weight_of((m[i] - shift) * LOG2E)
        total = ZERO
        for j in range(COLUMNS_EACH):
            s[i, j] = weight_of((s[i, j] - shift) * LOG2E)
            total += s[i, j]
        m[i] = top
        l[i] = l[i] * factor + total  # of this thread's keys; the row's is formed at the end
        for c in range(WIDTH_V):
            output[i, c] *= factor


@device
def finish(p, b, h, row0, m, l, output):
    """Divide by the sums and store output and log-sum-exp. Returns whether all of it is finite."""
    tx, ty = place()
    factor = cuda.local.array(ROWS_EACH, F_TYPE)
    for i in range(ROWS_EACH):
        top, total, rescaled = m[i], across_row(l[i], sum_of), ONE
        if HAS_SINKS:  # one more logit in the sum, without a value
            sink = load(F, p.sinks, h)
            if sink != HIDDEN:
                old, top = top, larger(top, sink)
                rescaled = weight_of((old - top) * LOG2E)
                total = total * rescaled + weight_of((sink - top) * LOG2E)
        empty = total == ZERO  # no key is visible
        factor[i] = ZERO if empty else rescaled / total
        row = row0 + ty + i * TY
        if tx == 0 and row < p.n_q:
            store(F, number_address(p.lse, b, h, row), 0, HIDDEN if empty else top + log(total))
    return store_sums(output, SUMS_V, factor, p.out, b, h, row0, p.n_q)


@kernel(THREADS, BLOCKS_PER_SM)
def simt_forward(p):
    shared = cuda.shared.array(0, F_TYPE)
    block, tiles = I(cuda.blockIdx.x), (p.n_q + BLOCK_Q - 1) // BLOCK_Q
    h, b = block % p.heads, block // p.heads % p.batch
    row0, head_kv, n_k = (tiles - 1 - block // (p.heads * p.batch)) * BLOCK_Q, h // GQA_GROUP, keys_of(p, b)
    row1 = min(row0 + BLOCK_Q, p.n_q)
    q = rows_of(p.q, b, h, row0, p.n_q, BLOCK_Q)

    s = cuda.local.array((ROWS_EACH, COLUMNS_EACH), F_TYPE)
    output = cuda.local.array((ROWS_EACH, WIDTH_V), F_TYPE)
    m, l = cuda.local.array(ROWS_EACH, F_TYPE), cuda.local.array(ROWS_EACH, F_TYPE)
    # A weight of 0 times an infinity that the mask hides would be NaN: such a block, rare, is done again, carefully.
    careful, again = False, True
    while again:
        clear(output, WIDTH_V)
        for i in range(ROWS_EACH):
            m[i], l[i] = HIDDEN, ZERO
        walk = walk_keys(p, b, h, row0, row1, n_k)
        while walk.state != EMPTY:
            k0 = walk.tile * BLOCK_K
            scores(q, rows_of(p.k, b, head_kv, k0, n_k, BLOCK_K), CHUNK_QK, s, shared)
            modify_tile(p, walk.state, s, s, False, b, h, row0, p.n_q, k0, n_k)
            online_softmax(s, m, l, output)
            if HAS_DROPOUT:
                drop_tile(p, s, b, h, row0, k0)
            store_weights(s, shared)
            accumulate(rows_of(p.v, b, head_kv, k0, n_k, BLOCK_K), SUMS_V, output, shared, careful)
            walk = next_tile(p, walk)
        finite = finish(p, b, h, row0, m, l, output)
        again = all_threads_or(not finite) and not careful
        careful = True

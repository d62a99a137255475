# parts: common/tiles
# What the backward pass needs of each row, computed before it: delta and the log-sum-exp.
#
# From the head or another part: BASE_2, whether kernels compute in base 2.

ROW_VECTOR = 16 // ITEMSIZE  # elements
ROW_VECTORS = -(-HEAD_DIM_V // ROW_VECTOR)
ROW_LANES = 32 if ROW_VECTORS > 16 else 16 if ROW_VECTORS > 8 else 8  # threads of a row
PADDING_LSE, MAX_BWD_LSE = F(1e30), F(46516320)  # the latter 2^26 in base 2, which tells P within a factor of 2^7


@device
def dot_vec(x, y, vec):
    """The dot product of 16 bytes of two rows."""
    total = ZERO
    if ITEMSIZE == 2:
        a, c = load4(np.int32, x, 4 * vec), load4(np.int32, y, 4 * vec)
        for i in range(4):
            total += widen(np.int16(a[i])) * widen(np.int16(c[i]))
            total += widen(np.int16(a[i] >> 16)) * widen(np.int16(c[i] >> 16))
    else:
        for d in range(ROW_VECTOR * vec, ROW_VECTOR * vec + ROW_VECTOR):
            total += widen(load(STORED, x, d)) * widen(load(STORED, y, d))
    return total


@device
def row_dot(p, b, h, row, exists):
    """rowsum(dO * O), in each of the row's lanes."""
    lane, total = I(cuda.threadIdx.x) % ROW_LANES, ZERO
    if exists:
        out, dout = q_row_address(p, p.out, b, h, row), q_row_address(p, p.dout, b, h, row)
        if HEAD_DIM_V % ROW_VECTOR == 0 and (out | dout) % 16 == 0:
            for vec in range(lane, ROW_VECTORS, ROW_LANES):
                total += dot_vec(out, dout, vec)
        else:
            for d in range(lane, HEAD_DIM_V, ROW_LANES):
                total += widen(load(STORED, out, d)) * widen(load(STORED, dout, d))
    step = ROW_LANES // 2
    while step > 0:
        total += shuffle_xor(total, step)
        step //= 2
    return total


@device
def store_row_stats(p, entry, h, at, b, row, exists, total):
    """delta = rowsum(dO * O) - dlse, and bwd_lse, the log-sum-exp with +inf for rows without a visible key, so that
    their P is 0. P is 0 of rows beyond MAX_BWD_LSE, too, if it is computed in base 2. Rows past n_q, up to a multiple
    of the query tile, get a finite bwd_lse that makes their P 0 as well. at: where a head's numbers of the row lie.
    """
    lse = PADDING_LSE
    if exists:
        lse = load(F, number_address(p.lse, b, h, q_token(p, b, row)), 0)
        if p.dlse.data != 0:
            total -= load(F, number_address(p.dlse, b, h, q_token(p, b, row)), 0)
        if lse == HIDDEN:
            total = ZERO
        if lse == HIDDEN or (BASE_2 and abs(lse) > MAX_BWD_LSE):
            lse = INFINITE
        elif BASE_2:
            lse *= LOG2E
    store(F, number_address(p.delta, entry, h, at), 0, total)
    store(F, number_address(p.bwd_lse, entry, h, at), 0, lse)

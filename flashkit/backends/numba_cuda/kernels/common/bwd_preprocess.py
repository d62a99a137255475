# parts: common/tiles
# Backward preprocess and sink gradients, shared by all generations.

VEC_ELEMENTS = 16 // ITEMSIZE
ROW_VECS = -(-HEAD_DIM_V // VEC_ELEMENTS)
LANES = 32 if ROW_VECS > 16 else 16 if ROW_VECS > 8 else 8  # per row
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
        for d in range(VEC_ELEMENTS * vec, VEC_ELEMENTS * vec + VEC_ELEMENTS):
            total += widen(load(STORED, x, d)) * widen(load(STORED, y, d))
    return total


@kernel(128)
def bwd_preprocess(p):
    """delta = rowsum(dO * O) - dlse, and bwd_lse, the log-sum-exp with +inf for rows without a visible key, so that
    their P is 0. It is 0 of rows beyond MAX_BWD_LSE, too, if it is computed in BASE_2. Rows past n_q, up to a multiple
    of the query tile, get a finite bwd_lse that makes their P 0 as well.
    """
    rows, heads = U(p.bwd_lse.head), U(p.heads)  # unsigned quotients take fewer instructions
    index, lane = (U(cuda.blockIdx.x) * U(128) + U(cuda.threadIdx.x)) // U(LANES), I(cuda.threadIdx.x) % LANES
    exists = I(index) < num_entries(p) * p.heads * p.bwd_lse.head
    head = index // rows
    at, h, entry = I(index - head * rows), I(head % heads), I(head // heads) if exists else I(0)
    row, b = at, entry
    if IS_PACKED:
        number = I(U(at) // U(p.row_block))
        tile = q_tile(p, entry, number, p.row_block)
        row, b = at + (tile.tile - number) * p.row_block, tile.b
    total = ZERO
    if exists and row < seq_info(p, b).n_q:
        out, dout = q_row_address(p, p.out, b, h, row), q_row_address(p, p.dout, b, h, row)
        if HEAD_DIM_V % VEC_ELEMENTS == 0 and (out | dout) % 16 == 0:
            for vec in range(lane, ROW_VECS, LANES):
                total += dot_vec(out, dout, vec)
        else:
            for d in range(lane, HEAD_DIM_V, LANES):
                total += widen(load(STORED, out, d)) * widen(load(STORED, dout, d))
    step = LANES // 2
    while step > 0:
        total += shuffle_xor(total, step)
        step //= 2
    if lane == 0 and exists:
        lse = PADDING_LSE
        if row < seq_info(p, b).n_q:
            lse = load(F, number_address(p.lse, b, h, q_token(p, b, row)), 0)
            if p.dlse.data != 0:
                total -= load(F, number_address(p.dlse, b, h, q_token(p, b, row)), 0)
        empty, great = lse == HIDDEN, BASE_2 and row < seq_info(p, b).n_q and abs(lse) > MAX_BWD_LSE
        store(F, number_address(p.delta, entry, h, at), 0, ZERO if empty else total)
        store(F, number_address(p.bwd_lse, entry, h, at), 0, INFINITE if empty or great else lse)


@kernel(256)
def bwd_sinks(p):
    """d lse / d sink is the softmax weight of the sink, 0 in rows without a visible key. One CTA per head; the float64
    reduction has a fixed order.
    """
    part = cuda.shared.array(256, types.float64)
    h, thread = I(cuda.blockIdx.x), cuda.threadIdx.x
    total = 0.0
    if HAS_SINKS:
        sink = load(F, p.sinks, h)
        rows = p.bwd_lse.head if IS_PACKED else p.n_q
        for index in range(thread, num_entries(p) * rows, 256):
            b, row = index // rows, index % rows
            p_sink = exp(sink - load(F, number_address(p.bwd_lse, b, h, row), 0))
            if p_sink != ZERO:
                total -= np.float64(p_sink * load(F, number_address(p.delta, b, h, row), 0))
    part[thread] = total
    half = 128
    while half > 0:
        cuda.syncthreads()
        if thread < half:
            part[thread] += part[thread + half]
        half //= 2
    if thread == 0:
        store(F, p.dsinks, h, F(part[0]))

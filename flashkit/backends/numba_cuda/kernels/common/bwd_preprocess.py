# parts: common/tiles
# What the backward passes of every generation begin and end with: numbers of a row, and gradients of the sinks.

VEC_ELEMENTS = 16 // ITEM
ROW_VECS = -(-HEAD_DIM_V // VEC_ELEMENTS)
LANES = 32 if ROW_VECS > 16 else 16 if ROW_VECS > 8 else 8  # that take a row
NO_ROW = F(1e30)


@device
def of_unit(x, y, unit):
    """Sum of products of 16 bytes of two rows."""
    total = ZERO
    if ITEM == 2:
        a, c = load4(np.int32, x, 4 * unit), load4(np.int32, y, 4 * unit)
        for i in range(4):
            total += widen(np.int16(a[i])) * widen(np.int16(c[i]))
            total += widen(np.int16(a[i] >> 16)) * widen(np.int16(c[i] >> 16))
    else:
        for d in range(VEC_ELEMENTS * unit, VEC_ELEMENTS * unit + VEC_ELEMENTS):
            total += widen(load(STORED, x, d)) * widen(load(STORED, y, d))
    return total


@kernel(128)
def prepare(p):
    """delta = rowsum(dO * O) - dlse, and the log-sum-exp with +inf for rows without keys, whose weights so become 0.
    There may be memory for more rows than n_q; of those the weights become 0 too, by a number that is finite.
    """
    rows, heads = U(p.bwd_lse.head), U(p.heads)  # signed quotients take more instructions
    index, lane = (U(cuda.blockIdx.x) * U(128) + U(cuda.threadIdx.x)) // U(LANES), I(cuda.threadIdx.x) % LANES
    exists = I(index) < p.batch * p.heads * p.bwd_lse.head
    head = index // rows
    row, h, b = I(index - head * rows), I(head % heads), I(head // heads) if exists else I(0)
    total = ZERO
    if exists and row < p.n_q:
        out, dout = row_address(p.out, b, h, row), row_address(p.dout, b, h, row)
        if HEAD_DIM_V % VEC_ELEMENTS == 0 and (out | dout) % 16 == 0:
            for unit in range(lane, ROW_VECS, LANES):
                total += of_unit(out, dout, unit)
        else:
            for d in range(lane, HEAD_DIM_V, LANES):
                total += widen(load(STORED, out, d)) * widen(load(STORED, dout, d))
    step = LANES // 2
    while step > 0:
        total += shuffle_xor(total, step)
        step //= 2
    if lane == 0 and exists:
        lse = NO_ROW
        if row < p.n_q:
            lse = load(F, number_address(p.lse, b, h, row), 0)
            if p.dlse.data != 0:
                total -= load(F, number_address(p.dlse, b, h, row), 0)
        empty = lse == HIDDEN
        store(F, number_address(p.delta, b, h, row), 0, ZERO if empty else total)
        store(F, number_address(p.bwd_lse, b, h, row), 0, INFINITE if empty else lse)


@kernel(256)
def sink_gradients(p):
    """d lse / d sink is the sink's weight, 0 in a row that sees nothing at all. A block takes a head; sums in float64,
    in an order that does not change.
    """
    part = cuda.shared.array(256, types.float64)
    h, thread = I(cuda.blockIdx.x), cuda.threadIdx.x
    total = 0.0
    if HAS_SINKS:
        sink = load(F, p.sinks, h)
        for index in range(thread, p.batch * p.n_q, 256):
            b, row = index // p.n_q, index % p.n_q
            weight = exp(sink - load(F, number_address(p.bwd_lse, b, h, row), 0))
            if weight != ZERO:
                total -= np.float64(weight * load(F, number_address(p.delta, b, h, row), 0))
    part[thread] = total
    half = 128
    while half > 0:
        cuda.syncthreads()
        if thread < half:
            part[thread] += part[thread + half]
        half //= 2
    if thread == 0:
        store(F, p.dsinks, h, F(part[0]))

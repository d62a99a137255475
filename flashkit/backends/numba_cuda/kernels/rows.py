# parts: tiles
# What the backward passes of every generation begin and end with: numbers of a row, and gradients of the sinks.

PER_UNIT = 16 // ITEM
UNITS = -(-HEAD_DIM_V // PER_UNIT)
LANES = 32 if UNITS > 16 else 16 if UNITS > 8 else 8  # that take a row
NO_ROW = F(1e30)


@kernel(128)
def prepare(p):
    """delta = rowsum(dO * O) - dlse, and the log-sum-exp with +inf for rows without keys, whose weights so become 0.
    There may be memory for more rows than n_q; of those the weights become 0 too, by a number that is finite.
    """
    rows = p.shift.head
    index, lane = (I(cuda.blockIdx.x) * 128 + cuda.threadIdx.x) // LANES, I(cuda.threadIdx.x) % LANES
    exists = index < p.batch * p.heads * rows
    row, h, b = index % rows, index // rows % p.heads, index // rows // p.heads if exists else 0
    total = ZERO
    if exists and row < p.n_q:
        out, dout = row_address(p.out, b, h, row), row_address(p.dout, b, h, row)
        if HEAD_DIM_V % 4 == 0 and (out | dout) % (4 * ITEM) == 0:
            for d in range(4 * lane, HEAD_DIM_V, 4 * LANES):
                x, y = load4(STORED, out, d), load4(STORED, dout, d)
                for i in range(4):
                    total += widen(x[i]) * widen(y[i])
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
        store(F, number_address(p.shift, b, h, row), 0, INFINITE if empty else lse)


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
            weight = exp(sink - load(F, number_address(p.shift, b, h, row), 0))
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

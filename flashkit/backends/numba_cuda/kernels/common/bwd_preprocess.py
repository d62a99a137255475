# parts: common/row_stats
# Backward preprocess and sink gradients.


@kernel(128)
def bwd_preprocess(p):
    rows, heads = U(p.bwd_lse.head), U(p.heads)  # unsigned quotients take fewer instructions
    index = (U(cuda.blockIdx.x) * U(128) + U(cuda.threadIdx.x)) // U(ROW_LANES)
    head = index // rows
    stored = I(index) < num_entries(p) * p.heads * p.bwd_lse.head
    at, h, entry = I(index - head * rows), I(head % heads), I(head // heads) if stored else I(0)
    row, b = at, entry
    if IS_PACKED:
        number = I(U(at) // U(p.row_block))
        tile = q_tile(p, entry, number, p.row_block)
        row, b = at + (tile.tile - number) * p.row_block, tile.b
    exists = stored and row < seq_info(p, b).n_q
    total = row_dot(p, b, h, row, exists)
    if stored and I(cuda.threadIdx.x) % ROW_LANES == 0:
        store_row_stats(p, entry, h, at, b, row, exists, total)


@kernel(256)
def bwd_sinks(p):
    """d lse / d sink, the sink's weight, 0 in rows without a key. A CTA per head; the float64 sum has one order."""
    part = cuda.shared.array(256, types.float64)
    h, thread = I(cuda.blockIdx.x), cuda.threadIdx.x
    total = 0.0
    if HAS_SINKS:
        sink = load(F, p.sinks, h)
        rows = p.bwd_lse.head if IS_PACKED else p.n_q
        for index in range(thread, num_entries(p) * rows, 256):
            b, row = index // rows, index % rows
            lse = load(F, number_address(p.bwd_lse, b, h, row), 0)
            p_sink = exp2(sink * LOG2E - lse) if BASE_2 else exp(sink - lse)
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

# parts: common/row_stats
# Backward preprocess and sink gradients.


@kernel(128)
def bwd_preprocess(p):
    rows, heads = U(p.bwd_lse.head), U(p.heads)  # unsigned quotients take fewer instructions
    index = (U(cuda.blockIdx.x) * U(128) + U(cuda.threadIdx.x)) // U(ROW_LANES)
    head = index // rows
    stored = I(index) < p.batch * p.heads * p.bwd_lse.head
    row, h, b = I(index - head * rows), I(head % heads), I(head // heads) if stored else I(0)
    exists = stored and row < p.n_q
    total = row_dot(p, b, h, row, exists)
    if stored and I(cuda.threadIdx.x) % ROW_LANES == 0:
        store_row_stats(p, b, h, row, exists, total)


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
        for index in range(thread, p.batch * p.n_q, 256):
            b, row = index // p.n_q, index % p.n_q
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

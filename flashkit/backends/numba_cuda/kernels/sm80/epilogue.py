# parts: common/tiles common/fragment sm80/layout sm80/mma common/softmax common/epilogue
# The epilogue of the forward pass.


@device
def epilogue(p, base, at, m, l, output):
    """Divides O by the row sums; stores the log-sum-exp, and O by way of shared memory in vectors of 16 bytes."""
    output, factor, nonfinite = normalize_rows(p, at, m, l, output)
    lane, row0 = thread() % 32, thread() // 32 * WARP_ROWS
    staged = base + row0 * CHUNK_ROW
    lanes_sync()
    groups(store_o_fragment, FRAGMENT, to_operand(output), (staged, CHUNK_Q, 0))
    lanes_sync()
    if MAY_HIDE:  # P = 0 may have met inf or NaN in V
        if any_lane(nonfinite):
            accumulate_nonfinite(p, at, m, factor, base, BLOCK_Q)
            lanes_sync()
    target = row_address(p.out, I(at[0]), I(at[1]), I(at[2] + row0))
    for i in range(lane, WARP_ROWS * ROW_VECS_V, 32):
        row, vec = i // ROW_VECS_V, i % ROW_VECS_V
        if at[2] + row0 + row < p.n_q:
            vector = load_vec(staged + vec // 8 * CHUNK_Q + swizzled(row, vec % 8))
            store_vec(target + row * p.out.token * ITEMSIZE + VEC_BYTES * vec, vector)

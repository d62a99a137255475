# parts: sm80/bwd_layout sm80/mma common/bwd_nonfinite
# The epilogue of the backward pass: dK and dV.


@device
def epilogue(p, which, b, head, tile_k, n_k, acc, factor, staged):
    """Stores a warp's accumulator of dK or dV by way of shared memory, in vectors of 16 bytes."""
    dim, target = HEAD_DIM_V if which == DV else HEAD_DIM, p.dv if which == DV else p.dk
    warp, lane = i32(thread() // 32), i32(thread() % 32)
    row0, columns = tile_k * BLOCK_K + warp // ACROSS_KV * 32, (PADDED_V if which == DV else PADDED_QK) // ACROSS_KV
    staged, first = staged + warp // ACROSS_KV * 32 * CHUNK_ROW, warp % ACROSS_KV * columns
    acc = each(scaled_or_zero, acc, listed(key_of_row, ROWS, row0), (factor, n_k))
    groups(store_o_fragment, FRAGMENT, join(pack, acc), (staged, CHUNK_K, first // 8))
    lanes_sync()
    address = row_address(target, I(b), I(head), I(row0))
    for i in range(lane, 4 * columns, 32):
        row, vec = i // (columns // 8), first // 8 + i % (columns // 8)
        if row0 + row < p.n_k and 8 * vec < dim:
            vector = load_vec(staged + (vec >> 3) * CHUNK_K + swizzled(row, vec & 7))
            store_vec(address + row * target.token * ITEMSIZE + VEC_BYTES * vec, vector)
    if MAY_HIDE:  # P or dS = 0 may have met inf or NaN
        if rows_nonfinite(acc):
            for r in range(32):
                recompute_row(p, which, b, head, row0 + r, first, columns, n_k, factor)

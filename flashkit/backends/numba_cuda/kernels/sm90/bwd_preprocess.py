# Before Hopper's backward kernel: for each row delta = rowsum(dO * O) - dlse and the log-sum-exp in base 2; zeros in
# dq_accum of the heads that come first (dq_accum.py clears the others); dq_semaphore. A CTA takes a query tile.

MAX_BWD_LSE = F(46516320)  # 2^26 in base 2, which tells P within a factor of 2^7
ROW_VECS = HEAD_DIM_V // 8
LANES_PER_ROW = 32 if ROW_VECS > 16 else 16 if ROW_VECS > 8 else 8
ROWS_AT_ONCE = 256 // LANES_PER_ROW
VECS_OF_LANE, ROWS_OF_LANE = (ROW_VECS + LANES_PER_ROW - 1) // LANES_PER_ROW, BLOCK_Q // ROWS_AT_ONCE


@device
def query_tile_of_cta(p):
    """Batch entry, head and number of the query tile."""
    tiles, heads = u32(tiles_of_queries(p)), u32(p.heads)
    row = u32(block() // tiles)
    return i32(row // heads), i32(row % heads), i32(block() - row * tiles)


@device
def dq_accum(p, at):
    return p.dq_accum.data + I(at[0] * i32(p.heads) + at[1]) * p.dq_accum.head * 4 + I(at[2]) * BYTES_DQ


@device
def dot_of_word(x, y):
    """Of two elements each."""
    low = widen(np.int16(x & u32(0xFFFF))) * widen(np.int16(y & u32(0xFFFF)))
    return low + widen(np.int16(x >> u32(16))) * widen(np.int16(y >> u32(16)))


@device
def lane_dot(i, args):
    """A lane's part of rowsum(dO * O) of its row number i."""
    out, dout, b, h, row, n_q = args
    row, total = row + i * ROWS_AT_ONCE, ZERO
    if row < n_q:
        x_row, y_row = row_address(out, b, h, row), row_address(dout, b, h, row)
        for r in range(VECS_OF_LANE):
            vec = thread() % LANES_PER_ROW + LANES_PER_ROW * r
            if ROW_VECS % LANES_PER_ROW == 0 or vec < ROW_VECS:
                x, y = load4(np.uint32, x_row, 4 * vec), load4(np.uint32, y_row, 4 * vec)
                for j in range(4):
                    total += dot_of_word(x[j], y[j])
    return total


RowStats = namedtuple("RowStats", "lse dlse bwd_lse delta")


@device
def store_row_stats(i, nonfinite, args):
    """Of a lane's row number i; whether one was non-finite. bwd_lse is +inf for a row without visible keys or beyond
    MAX_BWD_LSE, whose P so becomes 0; NaN for a non-finite row; and great for rows past the end.
    """
    tensors, totals, b, h, row, n_q = args
    row, total, lse_log2 = row + i * ROWS_AT_ONCE, totals[i], F(1e30)
    step = LANES_PER_ROW // 2
    while step > 0:
        total += across(total, step)
        step //= 2
    if thread() % LANES_PER_ROW == 0:
        if row < n_q:
            lse = load(F, number_address(tensors.lse, b, h, row), 0)
            if tensors.dlse.data != 0:
                total -= load(F, number_address(tensors.dlse, b, h, row), 0)
            if lse == HIDDEN:
                lse_log2, total = INFINITE, ZERO
            elif not (is_finite(lse) and is_finite(total)):
                lse_log2 = NAN
            else:
                lse_log2 = INFINITE if abs(lse) > MAX_BWD_LSE else lse * LOG2E
            nonfinite = nonfinite or not is_finite(lse_log2)
        store(F, number_address(tensors.delta, b, h, row), 0, total)
        store(F, number_address(tensors.bwd_lse, b, h, row), 0, lse_log2)
    return nonfinite


@kernel(256, 8)
def bwd_preprocess(p):
    at = query_tile_of_cta(p)
    accum, b, h, row = dq_accum(p, at), I(at[0]), I(at[1]), I(at[2] * BLOCK_Q + thread() // LANES_PER_ROW)
    if block() < clearing_plan(p)[2]:
        for i in range(BYTES_DQ // 4096):  # a constant trip count
            store_vec(accum + 16 * I(thread() + 256 * i), ZEROS)
    totals = listed(lane_dot, ROWS_OF_LANE, (p.out, p.dout, b, h, row, p.n_q))
    tensors = RowStats(p.lse, p.dlse, p.bwd_lse, p.delta)
    args = tensors, totals, b, h, row, p.n_q
    nonfinite = all_threads_or(repeat(store_row_stats, ROWS_OF_LANE, False, args))
    semaphore = dq_semaphore(p, b, h, at[2])
    if thread() == 0:
        store(np.int32, semaphore + SEMAPHORE_FLAGS, 0, i32(1 if nonfinite else 0))
        store(np.int32, semaphore + SEMAPHORE_CLEARED, 0, i32(0))


# --- after the backward kernel ----------------------------------------------------------------------------------------
#
# dq_accum, which lies transposed, to dq. A CTA takes a query tile, a thread 8 columns of a row.


@device
def scaled_dq(g, args):
    address, scale = args
    return load(F, address, 16 * g) * scale


@kernel(256)
def bwd_postprocess(p):
    at, scale = query_tile_of_cta(p), F(p.softmax_scale)
    accum = dq_accum(p, at)
    for turn in range(BLOCK_Q * CHUNKS // 32):
        i = u32(thread() + 256 * turn)
        vec, r, part = i % u32(8), i // u32(8) % u32(BLOCK_Q), i // u32(8 * BLOCK_Q)
        row, column = at[2] * BLOCK_Q + r, 64 * part + 8 * vec
        if not DQ_BY_COLUMNS:
            part, r = r // DQ_PART_ROWS, r % DQ_PART_ROWS
        if row < seq_info(p, I(at[0])).n_q and column < HEAD_DIM:
            warp, half = vec // 2, vec % 2
            address = accum + part * BYTES_DQ_PART + warp * BYTES_DQ_WARP + r // 8 * 512 + r % 8 // 2 * 16
            x = listed(scaled_dq, 8, (address + 8 * half + r % 2 * 4, scale))
            store_vec(row_address(p.dq, I(at[0]), I(at[1]), I(row)) + column * ITEMSIZE, join(pack, x))

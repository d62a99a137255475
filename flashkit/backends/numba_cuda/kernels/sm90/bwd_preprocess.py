# Before and after the Hopper backward pass: numbers of rows, and dQ of its sums. A block takes a tile of queries.

ROW_VECS = HEAD_DIM_V // 8
LANES = 32 if ROW_VECS > 16 else 16 if ROW_VECS > 8 else 8  # that take a row
AT_ONCE = 256 // LANES
ROUNDS, ROWS_OF_LANE = (ROW_VECS + LANES - 1) // LANES, BLOCK_Q // AT_ONCE


@device
def tile_of_block(p):
    """Batch entry, head and number of the block's tile."""
    tiles, heads = u32(tiles_along(p.n_q, BLOCK_Q)), u32(p.heads)
    row = u32(block() // tiles)
    return i32(row // heads), i32(row % heads), i32(block() - row * tiles)


@device
def sums_of(p, at):
    return p.dq_accum.data + I(at[0] * i32(p.heads) + at[1]) * p.dq_accum.head * 4 + I(at[2]) * BYTES_SUMS


@device
def product_of_word(x, y):
    """Of two words of two elements each."""
    low = widen(np.int16(x & u32(0xFFFF))) * widen(np.int16(y & u32(0xFFFF)))
    return low + widen(np.int16(x >> u32(16))) * widen(np.int16(y >> u32(16)))


@device
def lane_sum(i, rest):
    """Of dO * O, a lane's part of its row number i."""
    out, dout, rows, b, h, row = rest
    row, total = row + i * AT_ONCE, ZERO
    if row < rows:
        x_row, y_row = row_address(out, b, h, row), row_address(dout, b, h, row)
        for r in range(ROUNDS):
            unit = thread() % LANES + LANES * r
            if ROW_VECS % LANES == 0 or unit < ROW_VECS:
                x, y = load4(np.uint32, x_row, 4 * unit), load4(np.uint32, y_row, 4 * unit)
                for j in range(4):
                    total += product_of_word(x[j], y[j])
    return total


Numbers = namedtuple("Numbers", "lse dlse shift delta")


@device
def store_numbers(i, odd, rest):
    """Of a lane's row number i; whether one was odd."""
    tensors, totals, rows, b, h, row = rest
    row, total, shift = row + i * AT_ONCE, totals[i], F(1e30)
    step = LANES // 2
    while step > 0:
        total += across(total, step)
        step //= 2
    if thread() % LANES == 0:
        if row < rows:
            lse = load(F, number_address(tensors.lse, b, h, row), 0)
            if tensors.dlse.data != 0:
                total -= load(F, number_address(tensors.dlse, b, h, row), 0)
            if lse == HIDDEN:
                shift, total = INFINITE, ZERO
            elif is_finite(lse) and is_finite(total):
                shift = lse * LOG2E
            else:
                shift = NAN
            odd = odd or not is_finite(shift)
        store(F, number_address(tensors.delta, b, h, row), 0, total)
        store(F, number_address(tensors.shift, b, h, row), 0, shift)
    return odd


@kernel(256, 8)
def bwd_preprocess(p):
    """delta = rowsum(dO * O) - dlse, and the log-sum-exp in base 2, +inf for rows without keys, whose weights so become
    0; NaN where a row's numbers are not finite, for which its tile is noted as odd. Rows past the end get such that
    their weights are 0. Clears the sums of dQ, or those of the first heads, and which tiles of keys are done.
    """
    at = tile_of_block(p)
    sums, b, h, row = sums_of(p, at), I(at[0]), I(at[1]), I(at[2] * BLOCK_Q + thread() // LANES)
    if ORDERED or block() < clearing_of(p)[2]:
        for i in range(BYTES_SUMS // 4096):  # rounds are as many for all threads, so that they need not be counted
            store_vec(sums + 16 * I(thread() + 256 * i), ZEROS)
    totals = listed(lane_sum, ROWS_OF_LANE, (p.out, p.dout, p.n_q, b, h, row))
    tensors = Numbers(p.lse, p.dlse, p.bwd_lse, p.delta)
    odd = all_threads_or(repeat(store_numbers, ROWS_OF_LANE, False, (tensors, totals, p.n_q, b, h, row)))
    marks = dq_semaphore_of(p, b, h, at[2])
    if thread() == 0:
        store(np.int32, marks, 0, i32(1 if odd else 0))
    for i in range(i32(thread()), i32(CLUSTER_SIZE * order_words(p)) if ORDERED else i32(1), i32(256)):
        store(np.int32, marks, 1 + i, i32(0))


@device
def sum_of(g, rest):
    address, scale = rest
    return load(F, address, 16 * g) * scale


@kernel(256)
def bwd_postprocess(p):
    """The sums of dQ, which lie turned, rounded to dq: a thread takes 8 columns of a row."""
    at, scale = tile_of_block(p), F(p.softmax_scale)
    sums = sums_of(p, at)
    for turn in range(BLOCK_Q * chunks_q // 32):
        i = u32(thread() + 256 * turn)
        unit, r, part_of = i % u32(8), i // u32(8) % u32(BLOCK_Q), i // u32(8 * BLOCK_Q)
        row, column = at[2] * BLOCK_Q + r, 64 * part_of + 8 * unit
        if not BY_COLUMNS:
            part_of, r = r // PART_ROWS, r % PART_ROWS
        if row < p.n_q and column < HEAD_DIM:
            warp, half = unit // 2, unit % 2
            address = sums + part_of * BYTES_PART + warp * BYTES_WARP + r // 8 * 512 + r % 8 // 2 * 16
            x = listed(sum_of, 8, (address + 8 * half + r % 2 * 4, scale))
            store_vec(row_address(p.dq, I(at[0]), I(at[1]), I(row)) + column * ITEM, join(pack, x))

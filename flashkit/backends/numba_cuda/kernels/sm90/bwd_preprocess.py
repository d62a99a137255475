# parts: common/row_stats sm90/bwd_layout common/bwd_nonfinite
# What comes before and after Hopper's backward kernel. A CTA takes a query tile.

BASE_2, ZEROS = True, (u32(0),) * 4
ROWS_AT_ONCE = 256 // ROW_LANES
ROWS_OF_THREAD = BLOCK_Q // ROWS_AT_ONCE


@device
def dot_of(i, args):
    p, b, h, row = args
    row = I(row + ROWS_AT_ONCE * i)
    return row_dot(p, I(b), I(h), row, row < p.n_q)


@device
def store_stats_of(i, done, args):
    (p, b, h, row), totals = args
    row = I(row + ROWS_AT_ONCE * i)
    store_row_stats(p, I(b), I(h), row, I(b), row, row < p.n_q, totals[i])
    return done


@kernel(256, 8)
def bwd_preprocess(p):
    """Row statistics, and zeros in dq_accum."""
    b, h, tile = query_tile_of_cta(p)
    accum = dq_accum_at(p, block(), 16 * I(thread()))
    for i in range(BYTES_DQ // 4096):
        store_vec(accum + 4096 * i, ZEROS)
    args = p, b, h, i32(tile * BLOCK_Q + thread() // ROW_LANES)
    totals = listed(dot_of, ROWS_OF_THREAD, args)
    if thread() % ROW_LANES == 0:
        repeat(store_stats_of, ROWS_OF_THREAD, 0, (args, totals))


@device
def scaled_dq(g, args):
    address, scale = args
    return load(F, address, 16 * g) * scale


@kernel(256, 5)
def bwd_postprocess(p):
    """dq_accum, which lies transposed, to dq. A thread takes 8 columns of a row."""
    (b, h, tile), scale, n_q = query_tile_of_cta(p), F(p.softmax_scale), i32(p.n_q)
    accum = dq_accum_at(p, block(), 0)
    for turn in range(BLOCK_Q * CHUNKS // 32):
        i = u32(thread() + 256 * turn)
        vec, r, part = i % u32(8), i // u32(8) % u32(BLOCK_Q), i // u32(8 * BLOCK_Q)
        row, column = i32(tile * BLOCK_Q + r), i32(64 * part + 8 * vec)
        if not DQ_BY_COLUMNS:
            part, r = r // DQ_PART_ROWS, r % DQ_PART_ROWS
        finite = True
        if row < n_q and column < HEAD_DIM:
            warp, half = vec // 2, vec % 2
            address = accum + part * BYTES_DQ_PART + warp * BYTES_DQ_WARP + r // 8 * 512 + r % 8 // 2 * 16
            x = listed(scaled_dq, 8, (address + 8 * half + r % 2 * 4, scale))
            store_vec(row_address(p.dq, I(b), I(h), I(row)) + column * ITEMSIZE, join(pack, x))
            finite = finite_eight(x)
        if MAY_HIDE:
            recompute_dq(p, b, h, row, column, finite, 1)

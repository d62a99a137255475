# parts: sm80/bwd_epilogue
# The postprocess of the backward pass: dQ from dq_accum, which lies in memory as fragments. A CTA takes a query tile, a
# thread eight columns of two rows: the part of the four lanes that share these rows.


@device
def store_eight(p, b, h, row, column, x):
    """Stores eight neighbours of a row that exists."""
    if row < p.n_q and column < HEAD_DIM:
        words = pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])
        store_vec(row_address(p.dq, I(b), I(h), I(row)) + ITEMSIZE * column, words)


@kernel(256, 5)  # registers: occupancy hides the loads, and the recomputation is rare
def bwd_postprocess(p):
    tiles, index = i32(num_q_tiles(p, BLOCK_Q)), i32(block())
    tile, h, b = index % tiles, index // tiles % i32(p.heads), index // tiles // i32(p.heads)
    accum, scale = number_address(p.dq_accum, I(b), I(h), I(tile)), np.float32(p.softmax_scale)
    for i in range(i32(thread()), BLOCK_Q * PADDED_QK // 16, 256):
        four, g, fours_of_warp = i // 8, i % 8, SUMS_Q // 4  # four registers: two of the upper row, two of the lower
        warp, index_in_warp = four // fours_of_warp, four % fours_of_warp
        row = tile * BLOCK_Q + warp // ACROSS_Q * 32 + index_in_warp // 2 % 2 * 16 + g
        column = warp % ACROSS_Q * SUMS_Q + index_in_warp // 4 * 16 + index_in_warp % 2 * 8
        first = I(four) * 128 + g * 16
        x0, y0, z0, w0 = load4(np.float32, accum, first)
        x1, y1, z1, w1 = load4(np.float32, accum, first + 4)
        x2, y2, z2, w2 = load4(np.float32, accum, first + 8)
        x3, y3, z3, w3 = load4(np.float32, accum, first + 12)
        upper = scaled((x0, y0, x1, y1, x2, y2, x3, y3), scale)
        lower = scaled((z0, w0, z1, w1, z2, w2, z3, w3), scale)
        store_eight(p, b, h, row, column, upper)
        store_eight(p, b, h, row + 8, column, lower)
        if MAY_HIDE:  # dS = 0 may have met inf or NaN in K
            recompute_dq(p, b, h, row, column, finite_eight(upper) and finite_eight(lower), 2)

# parts: sm80/dq_semaphore sm80/bwd_nonfinite
# The sums of dQ, which lie as the warps of the backward pass hold them, to dq. A block takes a tile, a thread eight
# columns of two rows: what the four lanes had that shared these rows.


@device
def to_row(p, b, h, row, column, x):
    """Eight neighbours of a row to memory, where it exists."""
    if row < p.n_q and column < HEAD_DIM:
        words = pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])
        store_vec(row_address(p.dq, I(b), I(h), I(row)) + ITEM * column, words)


@device
def finite_eight(x):
    total = ZERO
    for i in range(8):
        total += x[i] * ZERO
    return total == ZERO


@kernel(256, 5)  # reading takes many threads, and the careful part is rare
def bwd_postprocess(p):
    tiles, index = i32((p.n_q + BLOCK_Q - 1) // BLOCK_Q), i32(block())
    tile, h, b = index % tiles, index // tiles % i32(p.heads), index // tiles // i32(p.heads)
    sums, scale = number_address(p.dq_accum, I(b), I(h), I(tile)), np.float32(p.softmax_scale)
    for i in range(i32(thread()), BLOCK_Q * WHOLE // 16, 256):
        four, g, of_warp = i // 8, i % 8, SUMS_Q // 4  # fours of a warp: two of the upper rows, two of the lower
        warp, number = four // of_warp, four % of_warp
        row = tile * BLOCK_Q + warp // ACROSS_Q * 32 + number // 2 % 2 * 16 + g
        column = warp % ACROSS_Q * SUMS_Q + number // 4 * 16 + number % 2 * 8
        at = I(four) * 128 + g * 16
        x0, y0, z0, w0 = load4(np.float32, sums, at)
        x1, y1, z1, w1 = load4(np.float32, sums, at + 4)
        x2, y2, z2, w2 = load4(np.float32, sums, at + 8)
        x3, y3, z3, w3 = load4(np.float32, sums, at + 12)
        upper = scaled((x0, y0, x1, y1, x2, y2, x3, y3), scale)
        lower = scaled((z0, w0, z1, w1, z2, w2, z3, w3), scale)
        to_row(p, b, h, row, column, upper)
        to_row(p, b, h, row + 8, column, lower)
        if MAY_HIDE:  # what is not finite may have met a weight of 0
            odd = vote(not (finite_eight(upper) and finite_eight(lower)))
            while odd != u32(0):
                lane = lowest_one(odd)
                odd = u32(odd & (odd - u32(1)))
                for r in range(2):
                    once_more(p, DQ, b, h, from_lane(row, lane) + 8 * r, from_lane(column, lane), 8, i32(p.n_q), scale)

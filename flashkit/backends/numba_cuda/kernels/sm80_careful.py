# parts: tiles
# Sums of the backward pass by mma.sync once more, from memory and pair by pair, where one is not finite: a hidden pair
# has the weight 0 and the gradient 0, and 0 times NaN is NaN. kernels/sm80_backward.py has the other names.


@device
def dot(x, y, dim):
    total = ZERO
    for d in range(dim):
        total += widen(load(STORED, x, d)) * widen(load(STORED, y, d))
    return total


@device
def pair(p, b, h, query, key):
    """Weight of a pair, after dropout, and its gradient, from memory."""
    q, k = row_address(p.q, b, h, query), row_address(p.k, b, h // GROUP, key)
    s, position = dot(q, k, HEAD_DIM) * np.float32(p.scale), query + offset_of(p, b)
    shift = load(np.float32, number_address(p.shift, b, h, query), 0)
    delta = load(np.float32, number_address(p.delta, b, h, query), 0)
    x = modify(s, PARTIAL, b, h, query, position, key, p)
    w = ZERO if x == HIDDEN else exp2_fast(x * LOG2E - shift * LOG2E)
    dp = dot(row_address(p.dout, b, h, query), row_address(p.v, b, h // GROUP, key), HEAD_DIM_V)
    if HAS_DROPOUT:
        dp = drop(dp, p, b, h, query, key)
    gradient = ZERO if w == ZERO else w * (dp - delta)
    if HAS_SCORE:
        gradient = unless_zero(gradient, score_slope(s, b, h, query, position, key, p))
    if HAS_DROPOUT:
        w = drop(w, p, b, h, query, key)
    return w, gradient


@device
def accumulate_once_more(p, at, n_other, values, factor, end, staged):
    """Sums of a warp's rows up to `end` once more, from memory and pair by pair, leaving out what meets a 0, into the
    tile in shared memory from which they go to memory. values: dV, else dK or dQ.
    """
    lane, row0, b = I(thread() % 32), I(thread() // 32) * 16, I(at[0])
    dim, first = HEAD_DIM_V if values else HEAD_DIM, I(at[1]) * GROUP if BACKWARD_KEYS else I(at[1])
    other = p.dout if values else p.q if BACKWARD_KEYS else p.k
    for r in range(row0, I(end)):
        mine = I(at[2]) + r
        for i in range((dim + 31) // 32):
            column, total = lane + 32 * i, ZERO
            for h in range(first, first + (GROUP if BACKWARD_KEYS else 1)):
                for start in range(0, n_other, 32):
                    query, key = query_and_key(mine, min(start + lane, I(n_other) - 1))
                    w, gradient = pair(p, b, I(h), query, key)
                    w = w if values else gradient
                    for lane_of in range(min(32, n_other - start)):
                        weight = from_lane_float(w, lane_of)
                        row = row_address(other, b, I(h) if BACKWARD_KEYS else I(h) // GROUP, I(start + lane_of))
                        x = widen(load(STORED, row, min(column, dim - 1)))
                        total += ZERO if weight == ZERO else weight * x
            if column < dim:
                unit = swizzled(r - row0, column % 64 // 8) + column % 8 * 2
                store_half(staged + column // 64 * MINE * CHUNK_ROW + unit, pack(total * factor, ZERO))

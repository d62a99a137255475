# parts: common/tiles common/fragment
# Sums of the backward pass by mma.sync once more, from memory and pair by pair, where one is not finite: a hidden pair
# has the weight 0 and the gradient 0, and 0 times NaN is NaN. kernels/sm80_backward.py has the other names.

DQ, DK, DV = 0, 1, 2


@device
def dot(x, y, dim):
    total = ZERO
    for d in range(dim):
        total += widen(load(STORED, x, d)) * widen(load(STORED, y, d))
    return total


@device
def pair(p, b, h, query, key):
    """Weight of a pair, after dropout, and its gradient, from memory."""
    q, k = row_address(p.q, b, h, query), row_address(p.k, b, h // GQA_GROUP, key)
    s, position = dot(q, k, HEAD_DIM) * np.float32(p.softmax_scale), query + offset_of(p, b)
    shift = load(np.float32, number_address(p.bwd_lse, b, h, query), 0)
    delta = load(np.float32, number_address(p.delta, b, h, query), 0)
    x = modify(s, PARTIAL, b, h, query, position, key, p)
    w = ZERO if x == HIDDEN else exp2_fast(x * LOG2E - shift * LOG2E)
    dp = dot(row_address(p.dout, b, h, query), row_address(p.v, b, h // GQA_GROUP, key), HEAD_DIM_V)
    if HAS_DROPOUT:
        dp = drop(dp, p, b, h, query, key)
    gradient = ZERO if w == ZERO else w * (dp - delta)
    if HAS_SCORE:
        slope = score_slope(s, b, h, query, position, key, p)
        gradient = ZERO if gradient == ZERO else gradient * slope
    if HAS_DROPOUT:
        w = drop(w, p, b, h, query, key)
    return w, gradient


@device
def once_more(p, which, b, head, row, first, columns, end, factor):
    """By a warp: columns first ... of one row, where it is before `end`, of dQ, dK or dV, leaving out what meets a 0.
    head: of queries for dQ, else of keys.
    """
    lane, b, row = I(thread() % 32), I(b), I(row)
    if row < end:
        target = p.dq if which == DQ else p.dk if which == DK else p.dv
        other = p.k if which == DQ else p.q if which == DK else p.dout
        dim, n = I(HEAD_DIM_V if which == DV else HEAD_DIM), keys_of(p, b) if which == DQ else p.n_q
        heads = 1 if which == DQ else GQA_GROUP
        for i in range((columns + 31) // 32):
            column, total = min(first + lane + 32 * i, dim - 1), ZERO
            for h in range(I(head) * heads, I(head) * heads + heads):
                for start in range(0, n, 32):
                    there = min(start + lane, n - 1)
                    query, key = (row, there) if which == DQ else (there, row)
                    w, gradient = pair(p, b, I(h), query, key)
                    w = w if which == DV else gradient
                    for lane_of in range(min(I(32), n - start)):
                        weight = from_lane_float(w, lane_of)
                        of_head = I(h) // GQA_GROUP if which == DQ else I(h)
                        x = widen(load(STORED, row_address(other, b, of_head, I(start + lane_of)), column))
                        total += ZERO if weight == ZERO else weight * x
            if lane + 32 * i < columns and first + lane + 32 * i < dim:
                store(STORED, row_address(target, b, I(head), row), column, narrow(total * factor))

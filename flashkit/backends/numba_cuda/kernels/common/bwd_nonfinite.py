# parts: common/score_mod common/softmax
# The non-finite fallback of the backward pass. P or dS = 0 of a masked pair may have met inf or NaN in a tensor core,
# so gradients that are not finite are recomputed from global memory, pair by pair.

DQ, DK, DV = 0, 1, 2


@device
def dot(x, y, dim):
    total = ZERO
    for d in range(dim):
        total += widen(load(STORED, x, d)) * widen(load(STORED, y, d))
    return total


@device
def recompute_pair(p, b, h, query, key):
    """P of a pair after dropout, and its dS."""
    q, k = row_address(p.q, b, h, query), row_address(p.k, b, h // GQA_GROUP, key)
    s, position = dot(q, k, HEAD_DIM) * np.float32(p.softmax_scale), query + seq_info(p, b).q_position
    lse = load(np.float32, number_address(p.bwd_lse, b, h, query), 0)
    delta = load(np.float32, number_address(p.delta, b, h, query), 0)
    x = modify(s, PARTIAL, b, h, query, position, key, p)
    p_pair = ZERO if x == HIDDEN else exp2_fast(x * LOG2E - lse)
    dp = dot(row_address(p.dout, b, h, query), row_address(p.v, b, h // GQA_GROUP, key), HEAD_DIM_V)
    if HAS_DROPOUT:
        dp = drop(dp, p, b, h, query, key)
    ds = ZERO if p_pair == ZERO else p_pair * (dp - delta)
    if HAS_SCORE:
        slope = score_slope(s, b, h, query, position, key, p)
        ds = ZERO if ds == ZERO else ds * slope
    if HAS_DROPOUT:
        p_pair = drop(p_pair, p, b, h, query, key)
    return p_pair, ds


@device
def recompute_row(p, which, b, head, row, first, columns, end, factor):
    """A warp recomputes columns first ... of one row before `end` of dQ, dK or dV, skipping products with 0. head: a
    query head for dQ, else a key/value head.
    """
    # opaque: or what this rare code computes from them is hoisted into the main loop.
    lane, b, head, row = I(opaque(thread() % 32)), I(opaque(b)), opaque(head), I(opaque(row))
    if row < end:
        target = p.dq if which == DQ else p.dk if which == DK else p.dv
        other = p.k if which == DQ else p.q if which == DK else p.dout
        seq, dim = seq_info(p, b), I(HEAD_DIM_V if which == DV else HEAD_DIM)
        n = seq.n_k if which == DQ else seq.n_q
        heads = 1 if which == DQ else GQA_GROUP
        for i in range((columns + 31) // 32):
            column, total = min(first + lane + 32 * i, dim - 1), ZERO
            for h in range(I(head) * heads, I(head) * heads + heads):
                for start in range(0, n, 32):
                    own_index = min(start + lane, n - 1)
                    query, key = (row, own_index) if which == DQ else (own_index, row)
                    p_pair, ds = recompute_pair(p, b, I(h), query, key)
                    own = p_pair if which == DV else ds
                    for lane_of in range(min(I(32), n - start)):
                        factor_i = from_lane_float(own, lane_of)
                        of_head = I(h) // GQA_GROUP if which == DQ else I(h)
                        x = widen(load(STORED, row_address(other, b, of_head, I(start + lane_of)), column))
                        total += ZERO if factor_i == ZERO else factor_i * x
            if lane + 32 * i < columns and first + lane + 32 * i < dim:
                store(STORED, row_address(target, b, I(head), row), column, narrow(total * factor))


@device
def scaled_or_zero(x, row, rest):
    factor, end = rest
    return x * factor if row < end else ZERO  # keys past the sequence's length get 0


@device
def key_of_row(j, first):
    return first + 8 * j + i32(thread() % 32 // 4)


@device
def is_nonfinite(j, so_far, zero):
    return so_far or zero[j] != ZERO


@device
def rows_nonfinite(acc):
    """Whether a warp's accumulator of dK or dV holds inf or NaN."""
    return any_lane(repeat(is_nonfinite, ROWS, False, row_sum(scaled(acc, ZERO), ZERO_ROWS)))


@device
def finite_eight(x):
    total = ZERO
    for i in range(8):
        total += x[i] * ZERO
    return total == ZERO


@device
def recompute_dq(p, b, h, row, column, finite, rows):
    """A warp's gradients that are not finite: eight columns from `column` on, of `row` and the one 8 behind it."""
    nonfinite = vote(not finite)
    while nonfinite != u32(0):
        lane = lowest_set_bit(nonfinite)
        nonfinite = u32(nonfinite & (nonfinite - u32(1)))
        for r in range(rows):
            of_lane, first = from_lane(row, lane) + 8 * r, from_lane(column, lane)
            recompute_row(p, DQ, b, h, of_lane, first, 8, i32(p.n_q), np.float32(p.softmax_scale))

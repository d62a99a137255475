# dP to dS = P * slope * (dP - delta), rounded.


@device
def minus_delta(i, dp, delta):
    d = row_stats_of(i, delta)
    return dp[0] - d[0], dp[1] - d[1], dp[2] - d[2], dp[3] - d[3]


@device
def times_unless_zero(p_slope, x):
    """A masked pair's P is 0, and so its dS, whatever dP is."""
    return ZERO if p_slope == ZERO else p_slope * x


@device
def visit_four(i, ds, rest):
    """Elements 4 i ... 4 i + 3 of a lane to visit_ds: two query rows of two keys."""
    p, at = rest
    for half in range(2):
        for c in range(2):
            row = i32(at.first_row + 8 * i + c)
            visit_ds(ds[2 * half + c], at.b, at.h, row, row + at.q_position, at.keys[half], p)
    return ds


@device
def pack_ds(p, ds, where):
    if VISITS_DS:
        ds = groups(visit_four, 4, ds, (p, fragment_coord(p, *where)))
    return join(pack, ds)


@device
def compute_ds(p, p_slope, dp, unmasked, delta, dropout, where):
    """p_slope: of softmax_p. unmasked: all pairs are visible. where: for visit_ds, arguments of fragment_coord."""
    if HAS_DROPOUT:
        dp = groups(drop_four, 4, dp, (dropout, np.float32(p.dropout_scale)))
    # With few registers each branch loads deltas itself, which leaves some for loading ahead; `fence_operand` keeps
    # LLVM from merging the branches' common beginning.
    if not FEW_REGISTERS:
        dp = groups(minus_delta, 4, dp, delta)
    if unmasked or not CLEARS_KEYS:
        dp = groups(minus_delta, 4, fence_operand(dp), delta) if FEW_REGISTERS else dp
        return pack_ds(p, both(times, p_slope, dp), where)
    dp = groups(minus_delta, 4, dp, delta) if FEW_REGISTERS else dp
    return pack_ds(p, both(times_unless_zero, p_slope, dp), where)

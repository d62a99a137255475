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
def pack_ds(p, ds, where):
    visit_ds(ds, where, p)
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

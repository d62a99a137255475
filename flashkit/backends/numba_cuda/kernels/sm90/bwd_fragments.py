# The dropout mask of a P fragment, regenerated as in the forward pass.
#
# A bit for each element of a lane. A Philox call serves four keys of a row, which lie in several lanes; so each of
# these lanes makes the words of a part of the rows, and they exchange them: of rows 4 m + i, in the order of elements,
# lane i of four has bits 16 * half + 4 m + key % 4.

NO_DROPOUT = (u32(0),) * 4  # in the place of the mask
PHILOX_CALLS = S_REGS // 4  # of a lane


@device
def kept_of_four_keys(seed, threshold, coord, row, key):
    words, bits = philox(seed, I(key) >> 2, row, coord.h, coord.b), u32(0)
    for k in range(4):
        if words[k] >= threshold:
            bits |= u32(1) << u32(k)
    return u32(bits)


@device
def add_kept(j, own, args):
    seed, threshold, coord = args
    half, m, i = j // (S_REGS // 8), j % (S_REGS // 8), i32(thread() % 16 // 4)
    row = coord.first_row + (4 * m + i) // 2 * 8 + i % 2
    return u32(own | kept_of_four_keys(seed, threshold, coord, row, coord.keys[half]) << u32(16 * half + 4 * m))


@device
def exchange_kept(i, own):
    lane = i32(thread() % 32)
    return u32(from_lane(i32(own), (lane & ~12) | 4 * i)) >> u32(lane % 16 // 4)


@device
def dropout_mask(p, coord):
    return listed(exchange_kept, 4, repeat(add_kept, PHILOX_CALLS, u32(0), (seed_of(p), p.dropout_threshold, coord)))


@device
def drop_element(x, mask, i, half, c, scale):
    """Element 4 i + 2 half + c, dropped or scaled."""
    e = 2 * i + c
    return x * scale if mask[e % 4] >> u32(16 * half + e // 4 * 4) & u32(1) != 0 else ZERO


@device
def drop_four(i, x, args):
    mask, scale = args
    return (
        drop_element(x[0], mask, i, 0, 0, scale), drop_element(x[1], mask, i, 0, 1, scale),
        drop_element(x[2], mask, i, 1, 0, scale), drop_element(x[3], mask, i, 1, 1, scale),
    )  # fmt: skip


# --- dS ---------------------------------------------------------------------------------------------------------------
#
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
def compute_ds(p_slope, dp, unmasked, delta, dropout, dropout_scale):
    """p_slope: of softmax_p. unmasked: all pairs are visible."""
    if HAS_DROPOUT:
        dp = groups(drop_four, 4, dp, (dropout, dropout_scale))
    # With few registers each branch loads deltas itself, which leaves some for loading ahead; `fence_operand` keeps
    # LLVM from merging the branches' common beginning.
    if not FEW_REGISTERS:
        dp = groups(minus_delta, 4, dp, delta)
    if unmasked or not (MAY_HIDE or HAS_LENGTHS):
        dp = groups(minus_delta, 4, fence_operand(dp), delta) if FEW_REGISTERS else dp
        return join(pack, both(times, p_slope, dp))
    dp = groups(minus_delta, 4, dp, delta) if FEW_REGISTERS else dp
    return join(pack, both(times_unless_zero, p_slope, dp))

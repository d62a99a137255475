# parts: common/tiles common/fragment sm80/bwd_layout sm80/mma common/softmax sm80/bwd_mma
# modify and softmax of the backward pass in registers: S to P, and dP to dS.


@device
def row_values(j, rest):
    """Of a lane's query row: its index, the log-sum-exp in base 2, and delta."""
    stage_rows, row0 = rest
    row = row0 + 8 * j + i32(thread() % 32 // 4)
    return row, load_f32(stage_rows + 4 * row), load_f32(stage_rows + 4 * BLOCK_Q + 4 * row)


# What modifications and dropout need of Params and of the tile. row0, key0: the first query of the tile, the first key
# of the lane.
TilePairs = namedtuple(
    "TilePairs",
    "values softmax_scale seed dropout_first dropout_head dropout_threshold dropout_scale b h n_q n_k q_position row0 "
    "key0 state",
)


@device
def p_unmasked(x, row, scale_log2):
    """P of a score in a FULL tile without modification."""
    return exp2_fast(x * scale_log2 - row[1])


@device
def pair_of(column, row, pairs):
    """Query and key of an element, clamped to the last ones, for which modifications may read arrays."""
    return I(min(pairs.row0 + row[0], pairs.n_q - 1)), I(min(pairs.key0 + column, pairs.n_k - 1))


@device
def p_modified(x, column, row, pairs):
    """P of a score, modified and masked."""
    query, key = pair_of(column, row, pairs)
    exists = pairs.key0 + column < pairs.n_k and pairs.row0 + row[0] < pairs.n_q
    x, q = x * np.float32(pairs.softmax_scale), query + pairs.q_position
    x = modify(x, pairs.state, pairs.b, pairs.h, query, q, key, pairs)
    return ZERO if x == HIDDEN or not exists else exp2_fast(x * LOG2E - row[1])


@device
def slope_of(x, column, row, pairs):
    query, key = pair_of(column, row, pairs)
    x, q = x * np.float32(pairs.softmax_scale), query + pairs.q_position
    return score_slope(x, pairs.b, pairs.h, query, q, key, pairs)


@device
def dropout_factor(x, column, row, pairs):
    """The factor of dropout: 0 or 1 / (1 - p)."""
    return drop(np.float32(1), pairs, pairs.b, pairs.h, I(pairs.row0 + row[0]), I(pairs.key0 + column))


@device
def times_nonzero(factor, x):
    """factor * x, 0 where factor is: a masked or dropped pair has a gradient of 0, whatever x is."""
    return ZERO if factor == ZERO else factor * x


@device
def store_p(fragment, rows, pairs, at):
    """P after dropout to shared memory; returns the factors of dropout."""
    dropped = fragment
    if HAS_DROPOUT:
        dropped = each_at(dropout_factor, fragment, rows, pairs)
        fragment = both(times_nonzero, dropped, fragment)
    groups(store_fragment, FRAGMENT, join(pack, fragment), at)
    return dropped


@device
def recompute_p(at, full, s, rows, pairs, scale_log2):
    """S to P in shared memory. Returns the factors of dP - delta in dS, and of dropout. Each branch stores P."""
    if full and not HAS_SCORE:
        fragment = each(p_unmasked, s, rows, scale_log2)
        return fragment, store_p(fragment, rows, pairs, at)
    fragment = each_at(p_modified, s, rows, pairs)
    dropped = store_p(fragment, rows, pairs, at)
    if HAS_SCORE:
        fragment = both(times_nonzero, fragment, each_at(slope_of, s, rows, pairs))
    return fragment, dropped


# --- dS ---------------------------------------------------------------------------------------------------------------


@device
def minus_delta(x, row, _):
    return x - row[2]


@device
def compute_ds(at, full, dp, p_slope, dropped, rows):
    """dP to dS = P (dP - delta), which goes to shared memory for the products of dQ and dK."""
    if not MAY_HIDE or (full and not HAS_SCORE and not HAS_DROPOUT):
        ds = both(times, p_slope, each(minus_delta, dp, rows, 0))
        groups(store_fragment, FRAGMENT, join(pack, ds), at)
    else:
        if HAS_DROPOUT:
            dp = both(times_nonzero, dropped, dp)
        ds = both(times_nonzero, p_slope, each(minus_delta, dp, rows, 0))
        groups(store_fragment, FRAGMENT, join(pack, ds), at)

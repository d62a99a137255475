# parts: common/tiles common/fragment
# Score and mask modifications and dropout of an S or P tile in the registers of a warp.

# A masked pair has P = 0, but 0 * NaN is NaN: the epilogue detects outputs that this may have spoilt.
MAY_HIDE = HAS_MASK or HAS_SCORE or HAS_DROPOUT


@device
def softmax_scale_log2(p):
    """The factor that brings scores to base 2; where scores are modified they are scaled before."""
    if HAS_SCORE:
        return LOG2E
    return np.float32(p.softmax_scale * 1.4426950408889634)


Modification = namedtuple("Modification", "values softmax_scale")  # what a pair needs of Params


@device
def modify_full(x, column, row, rest):
    p, b, key, _ = rest
    h, r, q = row
    return modify(x * np.float32(p.softmax_scale) if HAS_SCORE else x, FULL, b, h, r, q, key + column, p)


def make_modify_partial(integer):
    """modify_partial(x, column, row, rest). integer: the type of positions."""

    @device
    def modify_partial(x, column, row, rest):
        p, b, key, n_k = rest
        h, r, q = row
        k = integer(key + column)
        inside = min(k, integer(max(n_k, 1) - 1))  # no array is read beyond its end
        x = modify(x * np.float32(p.softmax_scale) if HAS_SCORE else x, PARTIAL, b, h, r, q, inside, p)
        return x if k < n_k else HIDDEN

    return modify_partial


modify_partial, modify_partial_near = make_modify_partial(I), make_modify_partial(i32)


@device
def row_of_tile(j, rest):
    """Head, row and position of a lane's row; rows past the end stand for the last one."""
    p, at, offset = rest
    row = min(opaque(at[2]) + row_of_lane(j), i32(p.n_q) - 1)
    return at[1], row, row + offset


@device
def modify_tile(p, at, full, s, k0):
    """S, modified, and -inf where masked."""
    if not HAS_SCORE and full:
        return s
    # opaque: or what depends on k0 alone is computed for every tile, whether needed or not.
    offset, k0 = seq_info(p, at[0]).q_position, opaque(k0)
    rows = listed(row_of_tile, ROWS, (p, at, offset))
    rest = Modification(p.values, p.softmax_scale), at[0], k0 + thread() % 4 * 2, seq_info(p, at[0]).n_k
    if HAS_SCORE and full:
        return each_at(modify_full, s, rows, rest)
    return each_at(modify_partial, s, rows, rest)


@device
def dropout_pair(x, y, column, row, rest):
    """Dropout of two neighbouring keys, the first of which is even: four keys share the generator's words."""
    seed, threshold, scale, b, key = rest
    h, r, _ = row
    k = key + column
    words = philox(seed, k >> 2, r, h, b)
    word0, word1 = (words[2], words[3]) if k & 2 else (words[0], words[1])
    return x * scale if word0 >= threshold else ZERO, y * scale if word1 >= threshold else ZERO


@device
def dropout_tile(p, at, s, k0):
    rows = listed(row_of_tile, ROWS, (p, at, 0))
    rest = seed_of(p), p.dropout_threshold, np.float32(p.dropout_scale), at[0], k0 + thread() % 4 * 2
    return pairs_at(dropout_pair, s, rows, rest)

# parts: common/score_mod
# The online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) of an S tile in registers, with flashkit's
# speculative row maximum: exponentials are relative to a row reference m, in base 2, that need not be the maximum, only
# near it.

MAX_SUM = np.float32(32768.0 if STORAGE == "float16" else 1e18)  # row sums up to this are accepted: P fits its type

ZERO_ROWS, NO_REFERENCE = (ZERO,) * ROWS, (HIDDEN,) * ROWS  # row sums and references before the first key


@device
def shift_of(x, _):
    return ZERO if x == HIDDEN else x  # so that -inf stays -inf


@device
def exp2_difference(x, y):
    return exp2_fast(x - y)


@device
def times(x, y):
    return x * y


@device
def online_softmax(s, m, scale_log2):
    """S to P relative to the row maximum so far: P, the maximum, the row sums of P, and the factors that bring O and l
    of the tiles before to it.
    """
    top = across_row(greater, row_max(scaled(s, scale_log2), m))
    shift = alike(shift_of, top, 0)
    s = exponentials(s, shift, scale_log2)
    return s, top, row_sum(s, ZERO_ROWS), both(exp2_difference, m, shift)


@device
def speculative_softmax(s, m, scale_log2):
    """S to P relative to m as it is: P, its row sums, and whether m was near enough in all rows of the warp.

    Where it was not, or a score is NaN, S is needed again: the exponentials have overwritten it.
    """
    s = exponentials(s, m, scale_log2)
    total = row_sum(s, ZERO_ROWS)
    return s, total, all_lanes(repeat(fits, ROWS, True, total))


@device
def fits(j, so_far, total):
    return so_far and total[j] <= MAX_SUM


@device
def has_reference(j, so_far, m):
    return so_far and m[j] != HIDDEN

# parts: common/score_mod
# The online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) of an S tile in registers, with flashkit's
# speculative row maximum: exponentials are relative to a row reference m, in base 2, that need not be the maximum, only
# near it.

MAX_SUM = np.float32(32768.0 if STORAGE == "float16" else 1e18)  # row sums up to this are accepted: P fits its type

MAX_ROW_REF = np.float32(1 << 20)
"""The rounding of greater row references, 2^-24 of them, is no small error of an exponent. They are subtracted from
scores that are scaled and rounded as they are, not in one operation with the scale.
"""

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
    """S to P by the row maximum so far: P, the maximum, row sums, and the factors of O and l before."""
    top = across_row(greater, row_max(scaled(s, scale_log2), m))
    shift = alike(shift_of, top, 0)
    if not all_lanes(repeat(is_not_great, ROWS, True, shift)):
        s, scale_log2 = alike(times_rounded, s, scale_log2), np.float32(1)
    s = exponentials(s, shift, scale_log2)
    return s, top, row_sum(s, ZERO_ROWS), both(exp2_difference, m, shift)


@device
def speculative_softmax(s, m, scale_log2):
    """S to P relative to m, its row sums, and whether m was near enough in all rows; if not, S is needed again."""
    s = exponentials(s, m, scale_log2)
    total = row_sum(s, ZERO_ROWS)
    return s, total, all_lanes(repeat(fits, ROWS, True, total))


@device
def fits(j, so_far, total):
    return so_far and total[j] <= MAX_SUM


@device
def is_not_great(j, so_far, m):
    """Whether row j has a reference, too."""
    return so_far and abs(m[j]) < MAX_ROW_REF

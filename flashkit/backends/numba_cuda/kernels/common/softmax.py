# What happens to scores on their way to weights, and to an output at its end, in the registers of a warp.
#
# A hidden pair has the weight 0, and 0 times NaN is NaN. So where an output is not finite though its sum is, its rows
# are done again, from memory and pair by pair.

# Weights up to this much above the reference are taken as they come: they fit the type that they are rounded to.
LIMIT = np.float32(32768.0 if STORAGE == "float16" else 1e18)

MAY_HIDE = HAS_MASK or HAS_SCORE or HAS_DROPOUT or IS_FLOAT32  # float32 that is split makes infinity NaN


# --- modify -----------------------------------------------------------------------------------------------------------


@device
def softmax_scale_log2(p):
    """What scores are multiplied by to be in base 2; where there is a score modification they are scaled before it."""
    if HAS_SCORE:
        return LOG2E
    return np.float32(p.softmax_scale * 1.4426950408889634)


Modification = namedtuple("Modification", "values softmax_scale")  # what of Params an element needs: fewer arguments to compile


@device
def modify_full(x, column, row, rest):
    p, b, key, _ = rest
    h, r, q = row
    return modify(x * np.float32(p.softmax_scale) if HAS_SCORE else x, FULL, b, h, r, q, key + column, p)


@device
def modify_partial(x, column, row, rest):
    p, b, key, n_k = rest
    h, r, q = row
    k = key + column
    inside = min(k, max(n_k, 1) - 1)  # of what is hidden after all nothing is read beyond an array's end
    x = modify(x * np.float32(p.softmax_scale) if HAS_SCORE else x, PARTIAL, b, h, r, q, inside, p)
    return x if k < n_k else HIDDEN


@device
def row_of_item(j, rest):
    """Head, row and position of a lane's row; those past the end are taken for the last one."""
    p, at, offset = rest
    index = min(opaque(at[2]) + row_of_lane(j), i32(p.n_q) * PACK_GQA - 1)
    row = index // PACK_GQA
    return at[1] + index % PACK_GQA, row, row + offset


@device
def modify_tile(p, at, full, s, k0):
    """Scores as they come from the product, modified; -inf where hidden."""
    if not HAS_SCORE and full:
        return s
    offset, k0 = offset_of(p, at[0]), opaque(k0)  # or what depends on k0 alone is computed for every tile, needed or not
    rows = listed(row_of_item, ROWS, (p, at, offset))
    rest = Modification(p.values, p.softmax_scale), at[0], k0 + thread() % 4 * 2, keys_of(p, at[0])
    if HAS_SCORE and full:
        return each_at(modify_full, s, rows, rest)
    return each_at(modify_partial, s, rows, rest)


# --- softmax ----------------------------------------------------------------------------------------------------------


NOTHING, UNKNOWN = (ZERO,) * ROWS, (HIDDEN,) * ROWS  # sums and references of rows that have met no key


@device
def if_any(x, _):
    return ZERO if x == HIDDEN else x  # so that -inf stays -inf


@device
def ratio(x, y):
    return exp2_fast(x - y)


@device
def times(x, y):
    return x * y


@device
def online_softmax(s, m, unit):
    """Scores to weights relative to the greatest so far; also that, the sum of the weights, and the factor that brings
    sums made before to it."""
    top = across_row(greater, row_max(scaled(s, unit), m))
    shift = alike(if_any, top, 0)
    s = exponentials(s, shift, unit)
    return s, top, row_sum(s, NOTHING), both(ratio, m, shift)


@device
def speculative_softmax(s, m, unit):
    """The same without looking for the greatest: m need not be that, only near it. The weights, their sum, and whether
    it was near enough in all rows of the warp (and no score NaN); else the scores are needed anew.
    """
    s = exponentials(s, m, unit)
    total = row_sum(s, NOTHING)
    return s, total, all_lanes(repeat(is_near, ROWS, True, total))


@device
def is_near(j, so_far, total):
    return so_far and total[j] <= LIMIT


@device
def is_begun(j, so_far, m):
    return so_far and m[j] != HIDDEN


@device
def drop_two(x, y, column, row, rest):
    """Two neighbours, whose keys are a multiple of 2, dropped or scaled: four keys share the generator's words."""
    seed, threshold, scale, b, key = rest
    h, r, _ = row
    k = key + column
    words = philox(seed, k >> 2, r, h, b)
    word0, word1 = (words[2], words[3]) if k & 2 else (words[0], words[1])
    return x * scale if word0 >= threshold else ZERO, y * scale if word1 >= threshold else ZERO


@device
def drop_tile(p, at, s, k0):
    rows = listed(row_of_item, ROWS, (p, at, 0))
    rest = p.seed, p.dropout_threshold, np.float32(p.dropout_scale), at[0], k0 + thread() % 4 * 2
    return pairs_at(drop_two, s, rows, rest)


# --- an item's end ----------------------------------------------------------------------------------------------------


@device
def with_sink(p, h, top, total):
    """One more logit in the sum, without a value; also the factor that this means for the output."""
    sink = load(np.float32, p.sinks, h) * LOG2E
    if sink == HIDDEN:
        return top, total, np.float32(1)
    greatest = greater(top, sink)
    factor = exp2_fast(top - greatest)
    return greatest, total * factor + exp2_fast(sink - greatest), factor


if IS_FLOAT32:

    @device
    def log_of_sum(top, total):
        return LN2 * top + math.log(total)

    @device
    def over(x, total):
        return x / total

else:  # the last bits of float32 make no difference

    @device
    def log_of_sum(top, total):
        return LN2 * (top + log2_fast(total))

    @device
    def over(x, total):
        return x * reciprocal(total)


@device
def finish_row(j, rest):
    """A row's log-sum-exp to memory; the factor of its output, and whether its values need care."""
    p, at, m, l, tainted = rest
    index, top, total = at[2] + row_of_lane(j), m[j], l[j]
    row, h, exists = index // PACK_GQA, at[1] + index % PACK_GQA, index < p.n_q * PACK_GQA
    factor = np.float32(1)
    if HAS_SINKS:
        if exists:
            top, total, factor = with_sink(p, h, top, total)
    empty = total == ZERO  # no key is visible
    if exists and thread() % 4 == 0:
        lse = HIDDEN if empty else log_of_sum(top, total)
        store(np.float32, number_address(p.lse, at[0], h, row), 0, lse)
    finite = abs(total) < np.float32(math.inf)
    spoilt = not abs(tainted[j]) < np.float32(math.inf)
    return ZERO if empty else over(factor, total), spoilt and finite and exists


@device
def factor_of(found, _):
    return found[0]


@device
def is_odd(j, so_far, found):
    return so_far or found[j][1]


@device
def taint(x, y):
    """x, NaN if y is not finite."""
    return x + y * ZERO


@device
def finish_rows(p, at, m, l, output):
    """Log-sum-exps to memory; the output divided by the sums, the factors, and whether it needs care."""
    tainted = NOTHING
    if MAY_HIDE:
        tainted = fold(taint, output, NOTHING)
    found = listed(finish_row, ROWS, (p, at, m, across_row(add, l), tainted))
    factor = alike(factor_of, found, 0)
    return rows_scaled(output, factor), factor, repeat(is_odd, ROWS, False, found)


@device
def accumulate_nonfinite(p, at, m, factor, staged, tile_rows):
    """Output of a warp's rows once more, from memory and pair by pair, leaving out the values of weights that are 0,
    into the tile in shared memory from which it goes to memory. No branch here differs between lanes, or the assembler
    would take nothing after it as uniform.
    """
    lane, row0 = opaque(thread() % 32), opaque(uniform(thread() % GROUP_THREADS // 32)) * WARP_ROWS
    b, n_k, last = at[0], uniform(i32(keys_of(p, at[0]))), i32(p.n_q) * PACK_GQA - 1
    offset = offset_of(p, b)
    for r in range(WARP_ROWS):
        index = min(at[2] + row0 + r, last)
        row, h = index // PACK_GQA, at[1] + index % PACK_GQA
        reference = if_any(from_lane_float(m[r // 8], r % 8 * 4), 0)  # of a row that sees nothing, too
        scale = from_lane_float(factor[r // 8], r % 8 * 4)
        if not IS_FLOAT32:  # weights as they are in the end: far above 1 they may have been what was not finite
            reference -= ZERO if scale == ZERO else log2_fast(scale)
            scale = ZERO if scale == ZERO else np.float32(1)
        q = row_address(p.q, b, h, row)
        for i in range((COLUMNS + 31) // 32):
            column, total = lane + 32 * i, ZERO
            for k0 in range(0, n_k, 32):
                k = min(k0 + lane, n_k - 1)
                key, w = row_address(p.k, b, h // GQA_GROUP, k), ZERO
                for d in range(HEAD_DIM):
                    w += widen(load(STORED, q, d)) * widen(load(STORED, key, d))
                w = modify(w * np.float32(p.softmax_scale), PARTIAL, b, h, row, row + offset, k, p)
                w = exp2_fast(w * LOG2E - reference)
                if HAS_DROPOUT:
                    w = drop(w, p, b, h, row, k)
                for other in range(min(32, n_k - k0)):
                    weight = from_lane_float(w, other)
                    value = row_address(p.v, b, h // GQA_GROUP, k0 + other)
                    x = widen(load(STORED, value, min(column, HEAD_DIM_V - 1)))
                    total += ZERO if weight == ZERO else weight * x
            unit = swizzled(row0 + r, column % PER_CHUNK // VEC_ELEMENTS) + column % VEC_ELEMENTS * ITEM
            store_element(staged + column // PER_CHUNK * tile_rows * CHUNK_ROW + unit, total * scale)

# parts: common/softmax
# The end of a forward work tile: normalisation, log-sum-exp, sinks, and the non-finite fallback.


@device
def with_sink(p, h, top, total):
    """Row maximum and sum with the sink, a logit without a value; and the factor on O that this means."""
    sink = load(np.float32, p.sinks, h) * LOG2E
    if sink == HIDDEN:
        return top, total, np.float32(1)
    greatest = greater(top, sink)
    factor = exp2_fast(top - greatest)
    return greatest, total * factor + exp2_fast(sink - greatest), factor


@device
def normalize_row(j, rest):
    """A row's log-sum-exp to memory; the factor of its output, and whether it needs the non-finite fallback."""
    p, at, m, l, finite_or_nan = rest
    row, top, total = at[2] + row_of_lane(j), m[j], l[j]
    h, exists = at[1], row < p.n_q
    factor = np.float32(1)
    if HAS_SINKS:
        if exists:
            top, total, factor = with_sink(p, h, top, total)
    empty = total == ZERO  # no key is visible
    if exists and thread() % 4 == 0:
        lse = HIDDEN if empty else LN2 * (top + log2_fast(total))
        store(np.float32, number_address(p.lse, at[0], h, row), 0, lse)
    finite = abs(total) < np.float32(math.inf)
    is_nonfinite = not abs(finite_or_nan[j]) < np.float32(math.inf)
    return ZERO if empty else factor * reciprocal(total), is_nonfinite and finite and exists


@device
def factor_of(row, _):
    return row[0]


@device
def any_nonfinite(j, so_far, rows):
    return so_far or rows[j][1]


@device
def nan_if_nonfinite(x, y):
    """x, but NaN if y is not finite."""
    return x + y * ZERO


@device
def normalize_rows(p, at, m, l, output):
    """Log-sum-exps to memory; O / l, the factors, and whether a row needs the non-finite fallback."""
    finite_or_nan = ZERO_ROWS
    if MAY_HIDE:
        finite_or_nan = fold(nan_if_nonfinite, output, ZERO_ROWS)
    rows = listed(normalize_row, ROWS, (p, at, m, across_row(add, l), finite_or_nan))
    factor = alike(factor_of, rows, 0)
    return rows_scaled(output, factor), factor, repeat(any_nonfinite, ROWS, False, rows)


@device
def accumulate_nonfinite(p, at, m, factor, staged, tile_rows):
    """The non-finite fallback: O of a warp's rows again from global memory, pair by pair, without pairs whose P is 0,
    into the tile in shared memory from which it is stored. No branch differs between the lanes of a warp, as the
    assembler would take nothing behind it as uniform.
    """
    lane, row0 = opaque(thread() % 32), opaque(uniform(thread() % GROUP_THREADS // 32)) * WARP_ROWS
    b, n_k, last = at[0], uniform(i32(seq_info(p, at[0]).n_k)), i32(p.n_q) - 1
    offset = seq_info(p, b).q_position
    for r in range(WARP_ROWS):
        row, h = min(at[2] + row0 + r, last), at[1]
        reference = shift_of(from_lane_float(m[r // 8], r % 8 * 4), 0)
        scale = from_lane_float(factor[r // 8], r % 8 * 4)
        # P relative to the log-sum-exp is at most 1: large P may have been what overflowed.
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
            place = swizzled(row0 + r, column % PER_CHUNK // VEC_ELEMENTS) + column % VEC_ELEMENTS * ITEMSIZE
            store_half(staged + column // PER_CHUNK * tile_rows * CHUNK_ROW + place, pack(total * scale, ZERO))

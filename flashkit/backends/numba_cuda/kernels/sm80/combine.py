# parts: common/tiles common/fragment
# Split-KV: combines the splits of a row, weighted by the sum of their P. A CTA takes up to 128 columns of a row, each
# of its warps some of the splits, a lane four columns. The reduction has a fixed order.

PREFETCH = 4  # splits loaded ahead; past the last the last one again, with the weight 0
COLUMN_BLOCKS = -(-HEAD_DIM_V // 128)  # CTAs per row
load_f32 = load_from("shared", types.float32)


@device
def lse_of(p, split, b, h, row):
    """The log-sum-exp of a split, in base 2."""
    return load(np.float32, number_address(p.lse_partial, I(split) * p.batch + b, h, row), 0)


@device
def across_warp(f, x):
    for step in (16, 8, 4, 2, 1):
        x = f(x, across(x, step))
    return x


@device
def recompute_columns(p, b, h, row, reference, column):
    """Recomputes four columns of the row from Q, K and V, pair by pair, skipping rows of V whose P is 0."""
    lane, n_k, position = I(thread() % 32), seq_info(p, b).n_k, row + seq_info(p, b).q_position
    q, x0, x1, x2, x3 = q_row_address(p, p.q, b, h, row), ZERO, ZERO, ZERO, ZERO
    for k0 in range(0, n_k, 32):
        k = min(k0 + lane, n_k - 1)
        key, w = kv_row_address(p, p.k, b, h // GQA_GROUP, k), ZERO
        for d in range(HEAD_DIM):
            w += widen(load(STORED, q, d)) * widen(load(STORED, key, d))
        w = modify(w * np.float32(p.softmax_scale), PARTIAL, b, h, row, position, k, p)
        w = exp2_fast(w * LOG2E - reference)
        if HAS_DROPOUT:
            w = drop(w, p, b, h, row, k)
        for other in range(min(I(32), n_k - k0)):
            weight = from_lane_float(w, other)
            if weight != ZERO and column < HEAD_DIM_V:
                value = kv_row_address(p, p.v, b, h // GQA_GROUP, I(k0 + other))
                x0 += weight * widen(load(STORED, value, column))
                x1 += weight * widen(load(STORED, value, column + 1))
                x2 += weight * widen(load(STORED, value, column + 2))
                x3 += weight * widen(load(STORED, value, column + 3))
    return x0, x1, x2, x3


@kernel(32 * COMBINERS)
def combine(p):
    lane, warp, splits = i32(thread() % 32), i32(thread() // 32), i32(p.num_splits)
    index, rows, heads = u32(block() // u32(COLUMN_BLOCKS)), u32(max_n_q(p)), u32(p.heads)
    head = u32(index // rows)
    b = u32(head // heads)
    row, h, b = I(index - head * rows), I(head - b * heads), I(b)
    if EARLY:
        griddepcontrol_wait()
    row_max = HIDDEN
    for first in range(lane, splits, 32 * PREFETCH):
        for i in range(PREFETCH):
            row_max = greater(row_max, lse_of(p, min(first + 32 * i, splits - 1), b, h, row))
    row_max = across_warp(greater, row_max)
    finite_max = ZERO if row_max == HIDDEN else row_max

    column, base, total = I(block() % u32(COLUMN_BLOCKS)) * 128 + 4 * lane, shared_address(), ZERO
    x0, x1, x2, x3 = ZERO, ZERO, ZERO, ZERO
    for first in range(warp, splits, COMBINERS * PREFETCH):
        for i in range(PREFETCH):
            split = first + COMBINERS * i
            index_clamped = min(split, splits - 1)
            source = number_address(p.o_partial, I(index_clamped) * p.batch + b, h, row)
            y0, y1, y2, y3 = load4(np.float32, source, min(column, HEAD_DIM_V - 4))
            weight = exp2_fast(lse_of(p, index_clamped, b, h, row) - finite_max)
            weight = weight if split < splits else ZERO
            used, total = weight != ZERO, total + weight
            x0, x1 = x0 + weight * y0 if used else x0, x1 + weight * y1 if used else x1
            x2, x3 = x2 + weight * y2 if used else x2, x3 + weight * y3 if used else x3
    mine, totals = base + 16 * thread(), base + 512 * COMBINERS
    store_four(mine, (x0, x1, x2, x3))
    if lane == 0:
        store_word(totals + 4 * warp, as_int(total))
    threads_sync()
    if warp == 0:
        for other in range(1, COMBINERS):
            y = load_vec(mine + 512 * other)
            x0, x1 = x0 + as_float(i32(y[0])), x1 + as_float(i32(y[1]))
            x2, x3 = x2 + as_float(i32(y[2])), x3 + as_float(i32(y[3]))
            total += load_f32(totals + 4 * other)
        factor, reference = np.float32(1), finite_max
        if HAS_SINKS:
            row_max, total, factor = with_sink(p, h, row_max, total)
        empty = total == ZERO  # no visible key
        factor = ZERO if empty else factor / total
        x = x0 * factor, x1 * factor, x2 * factor, x3 * factor
        lse = HIDDEN if empty else row_max * LN2 + math.log(total)
        if column == 0:
            store(np.float32, number_address(p.lse, b, h, q_token(p, b, row)), 0, lse)
        if MAY_HIDE:  # P = 0 may have met inf or NaN in V
            nonfinite = (x[0] + x[1] + x[2] + x[3]) * ZERO != ZERO
            if any_lane(nonfinite and abs(total) < INFINITE):
                x = scaled(recompute_columns(p, b, h, row, reference, column), factor)
        if column < HEAD_DIM_V:
            target = q_row_address(p, p.out, b, h, row)
            for i in range(4):
                store(STORED, target, column + i, narrow(x[i]))

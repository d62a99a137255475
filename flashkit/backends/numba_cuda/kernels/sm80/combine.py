# parts: common/tiles common/fragment
# Parts of a row of output, whose keys other warps went over, made one: each weighs as much as its sum of weights. A
# block takes up to 128 columns of a row: each of its warps some of the parts, a lane four columns. Sums are in an order
# that does not change.

AT_ONCE = 4  # parts that are asked for before one is needed: beyond the last they are the last, with the weight 0
SHARES = -(-HEAD_DIM_V // 128)  # blocks of a row
load_number = load_from("shared", types.float32)


@device
def lse_of(p, part, b, h, row):
    """Of a part, in base 2."""
    return load(np.float32, number_address(p.lse_partial, I(part) * p.batch + b, h, row), 0)


@device
def across_warp(f, x):
    for step in (16, 8, 4, 2, 1):
        x = f(x, across(x, step))
    return x


@device
def carefully(p, b, h, row, reference, column):
    """Four columns of the row from memory, pair by pair, leaving out the values of weights that are 0."""
    lane, n_k, position = I(thread() % 32), keys_of(p, b), row + offset_of(p, b)
    q, x0, x1, x2, x3 = row_address(p.q, b, h, row), ZERO, ZERO, ZERO, ZERO
    for k0 in range(0, n_k, 32):
        k = min(k0 + lane, n_k - 1)
        key, w = row_address(p.k, b, h // GQA_GROUP, k), ZERO
        for d in range(HEAD_DIM):
            w += widen(load(STORED, q, d)) * widen(load(STORED, key, d))
        w = modify(w * np.float32(p.softmax_scale), PARTIAL, b, h, row, position, k, p)
        w = exp2_fast(w * LOG2E - reference)
        if HAS_DROPOUT:
            w = drop(w, p, b, h, row, k)
        for other in range(min(I(32), n_k - k0)):
            weight = from_lane_float(w, other)
            if weight != ZERO and column < HEAD_DIM_V:
                value = row_address(p.v, b, h // GQA_GROUP, I(k0 + other))
                x0 += weight * widen(load(STORED, value, column))
                x1 += weight * widen(load(STORED, value, column + 1))
                x2 += weight * widen(load(STORED, value, column + 2))
                x3 += weight * widen(load(STORED, value, column + 3))
    return x0, x1, x2, x3


@kernel(32 * COMBINERS)
def combine(p):
    lane, warp, parts = i32(thread() % 32), i32(thread() // 32), i32(p.num_splits)
    index, rows, heads = u32(block() // u32(SHARES)), u32(p.n_q), u32(p.heads)
    head = u32(index // rows)
    b = u32(head // heads)
    row, h, b = I(index - head * rows), I(head - b * heads), I(b)
    if EARLY:
        griddepcontrol_wait()
    top = HIDDEN
    for first in range(lane, parts, 32 * AT_ONCE):
        for i in range(AT_ONCE):
            top = greater(top, lse_of(p, min(first + 32 * i, parts - 1), b, h, row))
    top = across_warp(greater, top)
    shift = ZERO if top == HIDDEN else top

    column, base, total = I(block() % u32(SHARES)) * 128 + 4 * lane, shared_address(), ZERO
    x0, x1, x2, x3 = ZERO, ZERO, ZERO, ZERO
    for first in range(warp, parts, COMBINERS * AT_ONCE):
        for i in range(AT_ONCE):
            part = first + COMBINERS * i
            there = min(part, parts - 1)
            source = number_address(p.o_partial, I(there) * p.batch + b, h, row)
            y0, y1, y2, y3 = load4(np.float32, source, min(column, HEAD_DIM_V - 4))
            weight = exp2_fast(lse_of(p, there, b, h, row) - shift)
            weight = weight if part < parts else ZERO
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
            total += load_number(totals + 4 * other)
        factor, reference = np.float32(1), shift
        if HAS_SINKS:
            top, total, factor = with_sink(p, h, top, total)
        empty = total == ZERO  # no key is visible
        factor = ZERO if empty else factor / total
        x = x0 * factor, x1 * factor, x2 * factor, x3 * factor
        lse = HIDDEN if empty else top * LN2 + math.log(total)
        if column == 0:
            store(np.float32, number_address(p.lse, b, h, row), 0, lse)
        if MAY_HIDE:  # what is not finite may have met a weight of 0
            odd = (x[0] + x[1] + x[2] + x[3]) * ZERO != ZERO
            if any_lane(odd and abs(total) < INFINITE):
                x = scaled(carefully(p, b, h, row, reference, column), factor)
        if column < HEAD_DIM_V:
            target = row_address(p.out, b, h, row)
            for i in range(4):
                store(STORED, target, column + i, narrow(x[i]))

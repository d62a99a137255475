# Scores to weights in the registers of a Hopper warp group, and what is done where that went wrong.

# Weights up to this much above the reference are taken as they come: they fit the type that they are rounded to.
LIMIT = np.float32(32768.0 if STORAGE == "float16" else 1e18)

# A hidden pair has the weight 0, but 0 times NaN is NaN: see finish().
MAY_HIDE = HAS_MASK or HAS_SCORE or HAS_DROPOUT

product_of_warp = mma(STORAGE)


# --- modify -------------------------------------------------------------------------------------------------------------


@device
def base_2(p):
    """What scores are multiplied by to be in base 2; where there is a score modification they are scaled before it."""
    if HAS_SCORE:
        return LOG2E
    return np.float32(p.scale * 1.4426950408889634)


@device
def modify_full(x, column, row, rest):
    p, b, key, n_k = rest
    h, r, q = row
    return modify(x * np.float32(p.scale) if HAS_SCORE else x, FULL, b, h, r, q, key + column, p)


@device
def modify_partial(x, column, row, rest):
    p, b, key, n_k = rest
    h, r, q = row
    k = key + column
    x = modify(x * np.float32(p.scale) if HAS_SCORE else x, PARTIAL, b, h, r, q, k, p)
    return x if k < n_k else HIDDEN


@device
def row_of_item(p, at, half, offset):
    """Head, row and position of a lane's row; those past the end are taken for the last one."""
    index = min(here(at[2]) + row_of_lane(half), i32(p.n_q) * PACK - 1)
    row = index // PACK
    return at[1] + index % PACK, row, row + offset


@device
def modify_tile(p, at, full, s, k0):
    """Scores as they come from the product, modified; -inf where hidden."""
    if not HAS_SCORE and full:
        return s
    offset, k0 = offset_of(p, at[0]), here(k0)  # or what depends on k0 alone is computed for every tile, needed or not
    rows = row_of_item(p, at, 0, offset), row_of_item(p, at, 1, offset)
    rest = p, at[0], k0 + thread() % 4 * 2, keys_of(p, at[0])
    if HAS_SCORE and full:
        return each_at(modify_full, s, rows, rest)
    return each_at(modify_partial, s, rows, rest)


# --- softmax ------------------------------------------------------------------------------------------------------------


@device
def online_softmax(s, m, unit):
    """Scores to weights relative to the greatest so far; also that, the sum of the weights, and the factor that brings
    sums made before to it."""
    top = across_row(greater, row_max(scaled(s, unit)))
    top = greater(m[0], top[0]), greater(m[1], top[1])
    # so that -inf stays -inf
    shift = ZERO if top[0] == HIDDEN else top[0], ZERO if top[1] == HIDDEN else top[1]
    rescale = exp2_fast(m[0] - shift[0]), exp2_fast(m[1] - shift[1])
    s = exponentials(s, shift, unit)
    return s, top, row_sum(s), rescale


@device
def optimistic_softmax(s, m, unit):
    """The same without looking for the greatest: m need not be that, only near it. The weights, their sum, and whether it
    was near enough (and no score NaN); else the scores are needed anew."""
    s = exponentials(s, m, unit)
    total = row_sum(s)
    return s, total, all_lanes(total[0] <= LIMIT and total[1] <= LIMIT)


@device
def drop_two(x, y, column, row, rest):
    """Two neighbours, whose keys are a multiple of 2, dropped or scaled: four keys share the generator's words."""
    p, b, key, _ = rest
    h, r, _ = row
    k = key + column
    words = philox(p.seed, k >> 2, r, h, b)
    word0, word1 = (words[2], words[3]) if k & 2 else (words[0], words[1])
    scale, threshold = np.float32(p.kept_scale), u32(p.threshold)
    return x * scale if word0 >= threshold else ZERO, y * scale if word1 >= threshold else ZERO


@device
def drop_tile(p, at, s, k0):
    rows = row_of_item(p, at, 0, 0), row_of_item(p, at, 1, 0)
    return pairs_at(drop_two, s, rows, (p, at[0], k0 + thread() % 4 * 2, 0))


# --- what hardly ever runs ----------------------------------------------------------------------------------------------


@device
def multiply_sixteen(i, sums, rest):
    """Sums of 16 keys by the instruction of a single warp."""
    left, k, unit = rest
    lane = here(thread() % 32)
    key = lane // 16 * 8 + lane % 8
    right = load_matrices(k + 16 * i * CHUNK_ROW + swizzled(key, unit + lane // 8 % 2))
    first = product_of_warp(part(sums, 0, 4), left, right[0], right[1])
    return first + product_of_warp(part(sums, 4, 4), left, right[2], right[3])


@device
def scores_again(q, k):
    """Scores of a warp's 16 rows by instructions of the warp alone, from its tiles in shared memory."""
    lane = here(thread() % 32)
    row = here(thread() % 128 // 32) * 16 + lane % 16
    s = filled(as_float(here(0)), SCORES)
    for step in range(COLUMNS_QK // 16):
        chunk, unit = step // 4, step % 4 * 2
        left = load_matrices(q + chunk * 64 * CHUNK_ROW + swizzled(row, unit + lane // 16))
        s = groups(multiply_sixteen, 8, s, (left, k + chunk * BLOCK_K * CHUNK_ROW, unit))
    return s


@device
def accumulate_carefully(p, at, m, factor, staged):
    """Output of a warp's 16 rows once more, from memory and pair by pair, leaving out the values of weights that are 0.
    No branch here differs between lanes, or the assembler would take nothing after it as uniform."""
    lane, row0 = here(thread() % 32), here(uniform(thread() % 128 // 32)) * 16
    b, n_k, last = at[0], uniform(i32(keys_of(p, at[0]))), i32(p.n_q) * PACK - 1
    offset = offset_of(p, b)
    for r in range(16):
        index = min(at[2] + row0 + r, last)
        row, h = index // PACK, at[1] + index % PACK
        reference = from_lane_float(m[0] if r < 8 else m[1], r % 8 * 4)
        scale = from_lane_float(factor[0] if r < 8 else factor[1], r % 8 * 4)
        q = row_address(p.q, b, h, row)
        for i in range((COLUMNS + 31) // 32):
            column, total = lane + 32 * i, ZERO
            for k0 in range(0, n_k, 32):
                k = min(k0 + lane, n_k - 1)
                key, w = row_address(p.k, b, h // GROUP, k), ZERO
                for d in range(HEAD_DIM):
                    w += widen(load(STORED, q, d)) * widen(load(STORED, key, d))
                w = modify(w * np.float32(p.scale), PARTIAL, b, h, row, row + offset, k, p)
                w = exp2_fast(w * LOG2E - reference)
                if HAS_DROPOUT:
                    w = drop(w, p, b, h, row, k)
                for other in range(min(32, n_k - k0)):
                    weight = from_lane_float(w, other)
                    value = row_address(p.v, b, h // GROUP, k0 + other)
                    x = widen(load(STORED, value, min(column, HEAD_DIM_V - 1)))
                    total += ZERO if weight == ZERO else weight * x
            unit = swizzled(row0 + r, column % 64 // 8) + column % 8 * 2
            store_half(staged + column // 64 * 64 * CHUNK_ROW + unit, pack(total * scale, ZERO))

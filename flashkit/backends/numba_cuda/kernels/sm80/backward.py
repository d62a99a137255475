# parts: common/tiles common/fragment sm80/bwd_layout sm80/load sm80/mma common/softmax sm80/bwd_postprocess
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on tensor cores by mma.sync, from Ampere on:
# weights recomputed from the log-sum-exp, five products.
#
# A block of WARPS warps takes BLOCK_K keys of one head and goes over the tiles of queries that see them.
#
#     K, V           [BLOCK_K][..]       shared memory
#     Q, dO, numbers [2][BLOCK_Q][..]    shared memory: one tile is multiplied while the next one comes
#     s, dp          [32][KEYS_S]        registers of a warp
#     P, dS          [BLOCK_Q][BLOCK_K]  shared memory, between these products and the next
#     dk, dv         [32][SUMS]          registers of a warp
#     dq             [32][SUMS_Q]        registers of a warp, then added to sums in memory: kernels/sm80_order.py
#
# Numbers are those of queries: what their scores are relative to, the log-sum-exp, and delta. Of queries past the last
# the weights are 0 by the number that kernels/rows puts there.
#
# Measured on an H200, bfloat16: two kernels that own what they sum, one for dK and dV, one for dQ, with seven products
# and 16 rows to a warp, take 1.22 times as long with 64 columns, 1.16 with 128.

load_number = load_from("shared", types.float32)


@device
def copy_numbers(stage, p, b, h, row0, wanted):
    """Numbers of a tile's queries on their way: there is memory for whole tiles of them."""
    i = i32(thread())
    numbers = p.bwd_lse if i < BLOCK_Q // 4 else p.delta
    source = number_address(numbers, I(b), I(h), I(row0)) + VEC_BYTES * (i & (BLOCK_Q // 4 - 1))
    copy_unit_if(stage + AT_NUMBERS + VEC_BYTES * i, source, 0, 1, 1 if wanted and i < BLOCK_Q // 2 else 0)


@device
def load_queries(p, stage, b, h, tile):
    row0, n_q = i32(tile) * BLOCK_Q, i32(p.n_q)
    load_tile(stage, p.q, b, h, row0, n_q, BLOCK_Q, HEAD_DIM, WHOLE)
    load_tile(stage + AT_DOUT, p.dout, b, h, row0, n_q, BLOCK_Q, HEAD_DIM_V, WHOLE_V)
    copy_numbers(stage, p, b, h, row0, True)


# --- products ---------------------------------------------------------------------------------------------------------


@device
def sixteen_dims_copying(step, sums, rest):
    """The same while a tile is copied, a few pieces at a step: many at once wait for each other."""
    operands, copy, steps, pieces, dim, columns = rest
    sums = sixteen_dims(step, sums, operands)
    for piece in range((step * pieces + steps - 1) // steps, ((step + 1) * pieces + steps - 1) // steps):
        chunk, row = piece // (BLOCK_Q // ROWS_AT_ONCE), piece % (BLOCK_Q // ROWS_AT_ONCE) * ROWS_AT_ONCE
        copy_rows(copy, chunk, row, BLOCK_Q, dim, columns)
    return sums


@device
def scores(stage, keys, rows, first, copy):
    """s = Q K^T for this warp's 32 queries, from `rows` on, and its keys, from `first` on."""
    operands = stage + rows * CHUNK_ROW, CHUNK_Q, keys + first * CHUNK_ROW, CHUNK_K
    rest = operands, copy, STEPS, PIECES, HEAD_DIM, WHOLE
    return repeat(sixteen_dims_copying, STEPS, filled(ZERO, KEYS_S), rest)


@device
def scores_of_values(stage, values, rows, first, copy):
    """dP = dO V^T"""
    operands = stage + AT_DOUT + rows * CHUNK_ROW, CHUNK_Q, values + first * CHUNK_ROW, CHUNK_K
    rest = operands, copy, STEPS_V, PIECES_V, HEAD_DIM_V, WHOLE_V
    return repeat(sixteen_dims_copying, STEPS_V, filled(ZERO, KEYS_S), rest)


@device
def store_weights(i, words, at):
    """16 keys of 32 queries, packed, to P or dS."""
    for j in range(LEFT):
        store_word(at + (j // 4 * 16 + j % 2 * 8) * PITCH + (2 * i + j // 2 % 2) * VEC_BYTES, i32(words[j]))


@device
def sixteen_queries(step, sums, rest):
    weights, b, first = rest
    at = weights + 16 * step * PITCH
    left = load_matrices_turned(at) + load_matrices_turned(at + 2 * VEC_BYTES)
    return groups(of_columns, SIXTEEN, sums, (left, b, CHUNK_Q, first, 16 * step))


@device
def keys_of_warp(weights):
    """Where a lane begins to read the columns of weights that are its warp's 32 keys."""
    lane = i32(thread() % 32)
    return weights + (lane // 16 * 8 + lane % 8) * PITCH + i32(thread() // 32) // ACROSS_KV * 64 + lane // 8 % 2 * VEC_BYTES


@device
def accumulate_keys(sums, weights, rows, first):
    """sums += weights^T rows, for this warp's 32 keys and its columns, from unit `first` on."""
    return repeat(sixteen_queries, STEPS_KV, sums, (keys_of_warp(weights), rows, first))


@device
def sixteen_queries_adding(step, dq, sums, rest):
    rest, there = rest
    groups(add_four, 4, dq, there + ADDED * 128 * step)
    return sixteen_queries(step, sums, rest)


@device
def accumulate_keys_adding(sums, weights, rows, first, dq, there):
    """The same, and dq is added to its sums in memory, a few at a step: many at once fill the way there."""
    return chain(sixteen_queries_adding, ADDED, dq, sums, ((keys_of_warp(weights), rows, first), there))


@device
def sixteen_keys(step, sums, rest):
    gradients, keys, first = rest
    left = ldmatrix_x4(gradients + 32 * step) + ldmatrix_x4(gradients + 32 * step + 16 * PITCH)
    return groups(of_columns, SIXTEEN, sums, (left, keys, CHUNK_K, first, 16 * step))


@device
def gradients_of_queries(gradients, keys):
    """dq = dS K, of this block's keys, for this warp's 32 queries and its columns."""
    warp, lane = i32(thread() // 32), i32(thread() % 32)
    rows, first = warp // ACROSS_Q * 32 + lane % 16, warp % ACROSS_Q * (SUMS_Q // 8)
    rest = gradients + rows * PITCH + lane // 16 * VEC_BYTES, keys, first
    return repeat(sixteen_keys, STEPS_Q, filled(ZERO, SUMS_Q), rest)


# --- weights and their gradients --------------------------------------------------------------------------------------
#
# What belongs to a lane's rows, queries, are tuples: index, what scores are relative to, in base 2, and delta.


@device
def row_here(j, rest):
    numbers, row0 = rest
    row = row0 + 8 * j + i32(thread() % 32 // 4)
    return row, load_number(numbers + 4 * row) * LOG2E, load_number(numbers + 4 * BLOCK_Q + 4 * row)


# What of Params and of the place a pair needs; row0, key0: the tile's first query, the lane's first key.
Pairs = namedtuple("Pairs", "values scale seed threshold kept_scale b h n_q n_k offset row0 key0 state")


@device
def usual_weight(x, row, unit):
    """Nothing is hidden."""
    return exp2_fast(x * unit - row[1])


@device
def place(column, row, pairs):
    """Query and key of an element; modifications may read what has no element there: the last ones then."""
    return I(min(pairs.row0 + row[0], pairs.n_q - 1)), I(min(pairs.key0 + column, pairs.n_k - 1))


@device
def weight(x, column, row, pairs):
    query, key = place(column, row, pairs)
    exists = pairs.key0 + column < pairs.n_k and pairs.row0 + row[0] < pairs.n_q
    x = modify(x * np.float32(pairs.scale), pairs.state, pairs.b, pairs.h, query, query + pairs.offset, key, pairs)
    return ZERO if x == HIDDEN or not exists else exp2_fast(x * LOG2E - row[1])


@device
def slope_at(x, column, row, pairs):
    query, key = place(column, row, pairs)
    return score_slope(x * np.float32(pairs.scale), pairs.b, pairs.h, query, query + pairs.offset, key, pairs)


@device
def kept_at(x, column, row, pairs):
    """What dropout multiplies by."""
    return drop(np.float32(1), pairs, pairs.b, pairs.h, I(pairs.row0 + row[0]), I(pairs.key0 + column))


@device
def less_delta(x, row, _):
    return x - row[2]


@device
def unless_zero(weight, x):
    """A weight of 0, of a pair that is hidden or dropped, has a gradient of 0, whatever x is."""
    return ZERO if weight == ZERO else weight * x


@device
def store_dropped(weights, rows, pairs, at):
    """Weights after dropout to P; what dropout multiplies by."""
    kept = weights
    if HAS_DROPOUT:
        kept = each_at(kept_at, weights, rows, pairs)
        weights = both(unless_zero, kept, weights)
    groups(store_weights, LEFT, join(pack, weights), at)
    return kept


@device
def weights_to(at, full, s, rows, pairs, unit):
    """Scores to weights, which go to P; what their gradients are multiplied by, and what dropout does. Weights are
    stored in each branch: while exponentials are computed there is time for it.
    """
    if full and not HAS_SCORE:
        weights = each(usual_weight, s, rows, unit)
        return weights, store_dropped(weights, rows, pairs, at)
    weights = each_at(weight, s, rows, pairs)
    kept = store_dropped(weights, rows, pairs, at)
    if HAS_SCORE:
        weights = both(unless_zero, weights, each_at(slope_at, s, rows, pairs))
    return weights, kept


@device
def gradients_to(at, full, dp, steep, kept, rows):
    """dP to dS."""
    if not MAY_HIDE or (full and not HAS_SCORE and not HAS_DROPOUT):
        ds = both(times, steep, each(less_delta, dp, rows, 0))
        groups(store_weights, LEFT, join(pack, ds), at)
    else:
        if HAS_DROPOUT:
            dp = both(unless_zero, kept, dp)
        ds = both(unless_zero, steep, each(less_delta, dp, rows, 0))
        groups(store_weights, LEFT, join(pack, ds), at)


# --- the end ----------------------------------------------------------------------------------------------------------


@device
def settled(x, row, rest):
    factor, end = rest
    return x * factor if row < end else ZERO  # keys past a sequence's length get 0


@device
def key_of_lane(j, first):
    return first + 8 * j + i32(thread() % 32 // 4)


@device
def sum_is_odd(j, so_far, zero):
    return so_far or zero[j] != ZERO


@device
def finish(p, which, b, head, tile_k, n_k, sums, factor, staged):
    """A warp's sums of dK or dV to memory, by way of shared memory, in 16 bytes."""
    dim, target = HEAD_DIM_V if which == DV else HEAD_DIM, p.dv if which == DV else p.dk
    warp, lane = i32(thread() // 32), i32(thread() % 32)
    row0, columns = tile_k * BLOCK_K + warp // ACROSS_KV * 32, (WHOLE_V if which == DV else WHOLE) // ACROSS_KV
    staged, first = staged + warp // ACROSS_KV * 32 * CHUNK_ROW, warp % ACROSS_KV * columns
    sums = each(settled, sums, listed(key_of_lane, ROWS, row0), (factor, n_k))
    groups(store_piece, LEFT, join(pack, sums), (staged, CHUNK_K, first // 8))
    lanes_sync()
    address = row_address(target, I(b), I(head), I(row0))
    for i in range(lane, 4 * columns, 32):
        row, unit = i // (columns // 8), first // 8 + i % (columns // 8)
        if row0 + row < p.n_k and 8 * unit < dim:
            four = load_vec(staged + (unit >> 3) * CHUNK_K + swizzled(row, unit & 7))
            store_vec(address + row * target.token * ITEM + VEC_BYTES * unit, four)
    if MAY_HIDE:  # what is not finite may have met a weight of 0
        if any_lane(repeat(sum_is_odd, ROWS, False, row_sum(scaled(sums, ZERO), ZERO_ROWS))):
            for r in range(32):
                once_more(p, which, b, head, row0 + r, first, columns, n_k, factor)


@kernel(THREADS, 1)
def sm80_backward(p):
    base = shared_address()
    if thread() == 0:  # from where each tile loads it, or else makes it from float64, anew
        store_word(base + AT_UNIT, as_int(softmax_scale_log2(p)))
    b, head, tile_k, down = take_work(p, base)
    warp, lane = i32(thread() // 32), i32(thread() % 32)
    n_k, offset = i32(keys_of(p, I(b))), offset_of(p, I(b))
    k0, tiles_k = tile_k * BLOCK_K, i32((n_k + BLOCK_K - 1) // BLOCK_K)
    low, high = (0, tile_k) if down else (tile_k + 1, tiles_k)  # tiles that add before this one
    rows, keys = warp // ACROSS_S * 32, warp % ACROSS_S * KEYS_S  # of S that this warp computes
    dk, dv = filled(ZERO, SUMS), filled(ZERO, SUMS_V)
    load_tile(base, p.k, b, head, k0, n_k, BLOCK_K, HEAD_DIM, WHOLE)
    load_tile(base + AT_V, p.v, b, head, k0, n_k, BLOCK_K, HEAD_DIM_V, WHOLE_V)
    if k0 < n_k:
        leave_out(p, b, head, tile_k, n_k)

    h, stage = I(head) * GQA_GROUP, I(0)
    last = h + GQA_GROUP if k0 < n_k else h
    while h < last:
        walk, before = walk_queries(p, I(b), h, I(k0), min(I(k0) + BLOCK_K, I(n_k)), p.n_q, down), I(-1)
        if walk.state != EMPTY:
            load_queries(p, base + AT_QUERIES + stage * BYTES_STAGE, b, h, walk.tile)
            copies_end()
        while walk.state != EMPTY:
            copies_wait(0)
            threads_sync()  # the tile is there for all, and all are done with the one before
            queries, spare = base + AT_QUERIES + stage * BYTES_STAGE, base + AT_QUERIES + (1 - stage) * BYTES_STAGE
            ahead = next_tile(p, walk)
            more = ahead.state != EMPTY
            row0 = i32(ahead.tile) * BLOCK_Q
            of_q = copy_of(spare, p.q, b, h, row0, i32(p.n_q), more)
            of_dout = copy_of(spare + AT_DOUT, p.dout, b, h, row0, i32(p.n_q), more)
            unit = load_number(base + AT_UNIT)
            mine = listed(row_here, ROWS, (queries + AT_NUMBERS, rows))
            full = walk.state == FULL and k0 + BLOCK_K <= n_k
            # The first key is got here, or what follows from it would be kept in registers through all tiles.
            pairs = Pairs(
                p.values, p.softmax_scale, p.seed, p.dropout_threshold, p.dropout_scale, I(b), h, i32(p.n_q), n_k, offset,
                i32(walk.tile) * BLOCK_Q, opaque(k0 + keys + i32(thread() % 4 * 2)), walk.state,
            )  # fmt: skip
            staged = base + AT_P + (rows + lane // 4) * PITCH + 2 * keys + lane % 4 * 4
            s = scores(queries, base, rows, keys, of_q)
            steep, kept = weights_to(staged, full, s, mine, pairs, unit)
            dp = scores_of_values(queries, base + AT_V, rows, keys, of_dout)
            copy_numbers(spare, p, b, h, row0, more)
            copies_end()
            gradients_to(staged + (AT_DS - AT_P), full, dp, steep, kept, mine)
            threads_sync()  # P and dS are there
            if before >= 0 and thread() == THREADS - 1:
                be_done(p, b, h, before, tile_k)
            bits, there, share = bits_at(p, b, h, walk.tile), sums_of(p, b, h, walk.tile, warp), warp % ACROSS_KV
            first, first_v = share * (SUMS // 8), share * (SUMS_V // 8)
            missing = missing_first(bits, low, high)
            if not DQ_FIRST:
                dv = accumulate_keys(dv, base + AT_P, queries + AT_DOUT, first_v)
            dq = gradients_of_queries(base + AT_DS, base)
            wait_for_turn(bits, missing, low, high)
            if DQ_FIRST:
                dv = accumulate_keys_adding(dv, base + AT_P, queries + AT_DOUT, first_v, dq, there)
                dk = accumulate_keys(dk, base + AT_DS, queries, first)
            else:
                dk = accumulate_keys_adding(dk, base + AT_DS, queries, first, dq, there)
            before, stage, walk = walk.tile, 1 - stage, ahead
        threads_sync()  # all have added
        if before >= 0 and thread() == THREADS - 1:
            be_done(p, b, h, before, tile_k)
        h += 1

    copies_end()
    copies_wait(0)  # of a block that sees nothing
    threads_sync()
    finish(p, DK, b, head, tile_k, n_k, dk, np.float32(p.softmax_scale), base)
    finish(p, DV, b, head, tile_k, n_k, dv, np.float32(1), base + AT_V)

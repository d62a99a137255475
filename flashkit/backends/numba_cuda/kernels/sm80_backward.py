# parts: tiles tensor sm80_tile_backward sm80_load softmax sm80_careful
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on tensor cores by mma.sync, from Ampere on.
#
# Two passes, each of which owns what it sums, so nothing is added atomically and the bits never change: `keys` takes
# MINE keys and goes over the queries that see them, for dK and dV; `queries` takes MINE queries and goes over their
# keys, for dQ. That costs seven products instead of five, and saves what two passes over dQ in memory cost.
# BACKWARD_KEYS says which of the two this text is. In both a lane's rows are the block's own, so weights and their
# gradients are left operands where they are:
#
#                         keys                        queries
#     mine                K, V            [MINE]      Q, dO           shared memory; in the end the sums
#     other               Q, dO, numbers  [2][OTHER]  K, V            shared memory: one is multiplied, the next comes
#     s, weights          [16][OTHER]                 the same        registers of a warp
#     dp, gradients       [16][OTHER]                 the same        registers of a warp
#     sums                dK, dV          [16][..]    dQ              registers of a warp
#
# Numbers are those of queries: what their scores are relative to, the log-sum-exp, and delta. Of queries past the last
# the weights are 0 by the number that kernels/rows puts there.


@device
def tensors(p):
    """Mine, then the others'."""
    return (p.k, p.v, p.q, p.dout) if BACKWARD_KEYS else (p.q, p.dout, p.k, p.v)


@device
def place_of(p, index):
    """Batch entry, head (of keys or of queries) and first row of block number `index`: p.splits heads at a time, so
    that what blocks read lies in the L2 cache, and with a causal mask the tiles with most to do first.
    """
    heads = u32(u32(p.heads) // u32(GROUP if BACKWARD_KEYS else 1))
    tiles = u32((u32(p.n_k if BACKWARD_KEYS else p.n_q) + u32(MINE - 1)) // u32(MINE))
    every, most, index = u32(heads * p.batch), u32(p.splits), u32(index)
    first = u32(index // u32(most * tiles) * most)
    rest = u32(index - first * tiles)
    size = u32(min(every - first, most))
    tile = u32(rest // size)
    head = u32(first + rest - tile * size)
    if not BACKWARD_KEYS:
        tile = u32(tiles - u32(1) - tile)
    return i32(head // heads), i32(head % heads), i32(tile * MINE)


@device
def load_mine(p, base, at, count):
    first, second, _, _ = tensors(p)
    load_tile(base, first, at[0], at[1], at[2], count, MINE, HEAD_DIM)
    load_tile(base + BYTES_MINE, second, at[0], at[1], at[2], count, MINE, HEAD_DIM_V)


@device
def load_other(p, stage, b, h, tile, count):
    """A tile of what the block goes over, of query head h."""
    _, _, first, second = tensors(p)
    head, start = h if BACKWARD_KEYS else h // GROUP, tile * OTHER
    load_tile(stage, first, b, head, start, count, OTHER, HEAD_DIM)
    load_tile(stage + BYTES_OTHER, second, b, head, start, count, OTHER, HEAD_DIM_V)
    if BACKWARD_KEYS:  # there is memory for whole tiles of them
        i = i32(thread())
        if i < OTHER // 2:
            numbers = p.shift if i < OTHER // 4 else p.delta
            source = number_address(numbers, I(b), I(h), I(start + i % (OTHER // 4) * 4))
            copy_unit(stage + AT_NUMBERS + UNIT * i, source, 0, 1)


@device
def walk_other(p, b, h, first, count, n_other):
    """Over the tiles that some of the block's rows see, or are seen by."""
    end = min(I(first) + MINE, I(count))
    if BACKWARD_KEYS:
        return walk_queries(p, I(b), I(h), I(first), end, I(n_other))
    return walk_keys(p, I(b), I(h), I(first), end, I(n_other))


# --- products ---------------------------------------------------------------------------------------------------------


@device
def multiply_sixteen(sums, left, right):
    """16 columns of a warp's rows."""
    return product(part(sums, 0, 4), left, right[0], right[1]) + product(part(sums, 4, 4), left, right[2], right[3])


@device
def of_others(i, sums, rest):
    left, other = rest
    return multiply_sixteen(sums, left, load_matrices(other + 16 * i * CHUNK_ROW))


@device
def sixteen_dims(step, s, rest):
    mine, other = rest
    lane, chunk = thread() % 32, step // 4
    left = mine + chunk * MINE * CHUNK_ROW + swizzled(lane % 16, step % 4 * 2 + lane // 16)
    right = other + chunk * OTHER * CHUNK_ROW + swizzled(lane // 16 * 8 + lane % 8, step % 4 * 2 + lane // 8 % 2)
    return groups(of_others, 8, s, (load_matrices(left), right))


@device
def scores(mine, other):
    """s = Q K^T, or its transpose, for the 16 rows of this warp."""
    return repeat(sixteen_dims, STEPS, filled(ZERO, PAIRS), (mine, other))


@device
def scores_of_values(mine, other):
    """dP = dO V^T, or its transpose."""
    return repeat(sixteen_dims, STEPS_V, filled(ZERO, PAIRS), (mine + BYTES_MINE, other + BYTES_OTHER))


@device
def of_columns(i, sums, rest):
    left, other = rest
    lane = thread() % 32
    at = other + i // 4 * OTHER * CHUNK_ROW + swizzled(lane % 16, i % 4 * 2 + lane // 16)
    return multiply_sixteen(sums, left, load_matrices_turned(at))


@device
def sixteen_others(step, weights, sums, other):
    return groups(of_columns, 8, sums, (weights, other + 16 * step * CHUNK_ROW))


@device
def accumulate(sums, weights, other):
    """sums += weights other"""
    return chain(sixteen_others, 4, join(pack, weights), sums, other)


# --- weights and their gradients --------------------------------------------------------------------------------------
#
# A lane's rows are tuples: index, and of queries their two numbers.


if BACKWARD_KEYS:

    @device
    def row_of_mine(j, rest):
        return rest[1][2] + row_of_lane(j), ZERO, ZERO

    @device
    def query_and_key(row, other):
        return other, row

    @device
    def references(column, row, numbers):
        """What scores in base 2 of two neighbours are relative to."""
        two = load_two(numbers + 4 * column)
        return two[0] * LOG2E, two[1] * LOG2E

    @device
    def deltas(column, row, numbers):
        return load_two(numbers + 4 * OTHER + 4 * column)

else:

    @device
    def row_of_mine(j, rest):
        p, at = rest
        row = at[2] + row_of_lane(j)
        shift = load(np.float32, number_address(p.shift, I(at[0]), I(at[1]), I(row)), 0)
        return row, shift * LOG2E, load(np.float32, number_address(p.delta, I(at[0]), I(at[1]), I(row)), 0)

    @device
    def query_and_key(row, other):
        return row, other

    @device
    def references(column, row, numbers):
        return row[1], row[1]

    @device
    def deltas(column, row, numbers):
        return row[2], row[2]


# What of Params and of the place a pair of query and key needs.
Pairs = namedtuple("Pairs", "values scale seed threshold kept_scale b h n_q n_k offset first state")


@device
def usual_weights(x, y, column, row, rest):
    """Of two neighbours, nothing hidden."""
    numbers, unit = rest
    r = references(column, row, numbers)
    return exp2_fast(x * unit - r[0]), exp2_fast(y * unit - r[1])


@device
def weight(x, reference, column, row, pairs):
    query, key = query_and_key(row, pairs.first + column)
    exists, h = key < pairs.n_k and query < pairs.n_q, pairs.h
    query, key = min(query, pairs.n_q - 1), min(key, pairs.n_k - 1)  # modifications may read what has no element there
    x = modify(x * np.float32(pairs.scale), pairs.state, pairs.b, h, query, query + pairs.offset, key, pairs)
    return ZERO if x == HIDDEN or not exists else exp2_fast(x * LOG2E - reference)


@device
def modified_weights(x, y, column, row, rest):
    numbers, pairs = rest
    r = references(column, row, numbers)
    return weight(x, r[0], column, row[0], pairs), weight(y, r[1], column + 1, row[0], pairs)


@device
def slope_at(x, column, row, pairs):
    query, key = query_and_key(row[0], pairs.first + column)
    query, key = min(query, pairs.n_q - 1), min(key, pairs.n_k - 1)
    return score_slope(x * np.float32(pairs.scale), pairs.b, pairs.h, query, query + pairs.offset, key, pairs)


@device
def kept_at(x, column, row, pairs):
    """What dropout multiplies by."""
    query, key = query_and_key(row[0], pairs.first + column)
    return drop(np.float32(1), pairs, pairs.b, pairs.h, query, key)


@device
def less_delta(x, y, column, row, numbers):
    d = deltas(column, row, numbers)
    return x - d[0], y - d[1]


@device
def unless_zero(weight, x):
    """A weight of 0, of a pair that is hidden or dropped, has a gradient of 0, whatever x is."""
    if MAY_HIDE:
        return ZERO if weight == ZERO else weight * x
    return weight * x


@device
def weights_and_slopes(full, s, rows, numbers, pairs, unit):
    """Scores to weights, and to what their gradients are multiplied by."""
    if full and not HAS_SCORE:
        weights = pairs_at(usual_weights, s, rows, (numbers, unit))
    else:
        weights = pairs_at(modified_weights, s, rows, (numbers, pairs))
    if HAS_SCORE:
        return weights, both(unless_zero, weights, each_at(slope_at, s, rows, pairs))
    return weights, weights


# --- the end ----------------------------------------------------------------------------------------------------------


@device
def settled(x, row, rest):
    factor, count = rest
    return x * factor if row[0] < count else ZERO  # keys past a sequence's length get 0


@device
def store_piece(i, words, rest):
    """16 columns of a warp's rows to shared memory."""
    staged, lane = rest
    for j in range(4):
        at = staged + i // 4 * MINE * CHUNK_ROW + swizzled(j % 2 * 8 + lane // 4, i % 4 * 2 + j // 2) + lane % 4 * 4
        store_word(at, i32(words[j]))


@device
def is_odd(j, so_far, zero):
    return so_far or zero[j] != ZERO


@device
def finish(p, at, n_other, values, sums, factor, rows, count, staged, target, dim, limit):
    """Sums of this warp's rows times a factor to memory, by way of shared memory, in 16 bytes."""
    sums = each(settled, sums, rows, (factor, count))
    lane, row0 = thread() % 32, i32(thread() // 32) * 16
    lanes_sync()
    groups(store_piece, 4, join(pack, sums), (staged, lane))
    lanes_sync()
    if MAY_HIDE:  # what is not finite may have met a weight of 0
        if any_lane(repeat(is_odd, ROWS, False, row_sum(scaled(sums, ZERO), NOTHING))):
            accumulate_once_more(p, at, n_other, values, factor, min(row0 + 16, count - at[2]), staged)
            lanes_sync()
    address = row_address(target, I(at[0]), I(at[1]), I(at[2] + row0))
    for i in range(lane, 16 * (dim // 8), 32):
        row, unit = i // (dim // 8), i % (dim // 8)
        if at[2] + row0 + row < limit:
            four = load_unit(staged + unit // 8 * MINE * CHUNK_ROW + swizzled(row, unit % 8))
            store_unit(address + row * target.token * ITEM + UNIT * unit, four)


@kernel(THREADS, BLOCKS_PER_SM)
def sm80_backward(p):
    base, at = shared_address(), place_of(p, block())
    b, n_q, n_k, offset, unit = at[0], i32(p.n_q), i32(keys_of(p, I(at[0]))), offset_of(p, I(at[0])), base_2(p)
    count, n_other = (n_k, n_q) if BACKWARD_KEYS else (n_q, n_k)
    rows, mine = listed(row_of_mine, ROWS, (p, at)), base + thread() // 32 * 16 * CHUNK_ROW
    load_mine(p, base, at, count)

    sums, sums_v = filled(ZERO, SUMS), filled(ZERO, SUMS_V)
    h, stage = I(at[1] * GROUP if BACKWARD_KEYS else at[1]), I(0)
    last = h + (GROUP if BACKWARD_KEYS else 1) if at[2] < count else h
    while h < last:
        walk = walk_other(p, b, h, at[2], count, n_other)
        if walk.state != EMPTY:
            load_other(p, base + AT_OTHER + stage * BYTES_STAGE, b, i32(h), i32(walk.tile), n_other)
        while walk.state != EMPTY:
            copies_end()
            copies_wait(0)
            threads_sync()  # the tile is there for all, and all are done with the one before
            ahead = next_tile(p, walk)
            if ahead.state != EMPTY:
                load_other(p, base + AT_OTHER + (1 - stage) * BYTES_STAGE, b, i32(h), i32(ahead.tile), n_other)
            first, other = i32(walk.tile * OTHER), base + AT_OTHER + stage * BYTES_STAGE
            full = walk.state == FULL and (BACKWARD_KEYS or first + OTHER <= n_k)
            numbers, first = other + AT_NUMBERS + thread() % 4 * 8, first + i32(thread() % 4 * 2)
            pairs = Pairs(
                p.values, p.scale, p.seed, p.threshold, p.kept_scale, b, i32(h), n_q, n_k, offset, first, walk.state
            )
            s = scores(mine, other)
            weights, steep = weights_and_slopes(full, s, rows, numbers, pairs, unit)
            if HAS_DROPOUT:
                kept = each_at(kept_at, weights, rows, pairs)
            if BACKWARD_KEYS:
                dropped = both(unless_zero, kept, weights) if HAS_DROPOUT else weights
                sums_v = accumulate(sums_v, dropped, other + BYTES_OTHER)
            dp = scores_of_values(mine, other)
            if HAS_DROPOUT:
                dp = both(unless_zero, kept, dp)
            dp = pairs_at(less_delta, dp, rows, numbers)
            sums = accumulate(sums, both(unless_zero, steep, dp), other)
            stage, walk = 1 - stage, ahead
        h += 1

    copies_end()
    copies_wait(0)  # of a block that sees nothing
    threads_sync()
    limit, target = i32(p.n_k if BACKWARD_KEYS else p.n_q), p.dk if BACKWARD_KEYS else p.dq
    finish(p, at, n_other, False, sums, np.float32(p.scale), rows, count, mine, target, HEAD_DIM, limit)
    if BACKWARD_KEYS:
        staged = mine + BYTES_MINE
        finish(p, at, n_other, True, sums_v, np.float32(1), rows, count, staged, p.dv, HEAD_DIM_V, limit)

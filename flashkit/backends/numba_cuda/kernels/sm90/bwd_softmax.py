# What happens to pairs in the Hopper backward pass: scores to weights, dP to dS, in the registers of a warp group.
#
# Numbers lie as wgmma leaves them, keys being the rows. Element 4 i + 2 half + c of a lane is key first_of_lane(half)
# of its group's and query 8 i + 2 (lane % 4) + c of the tile. What belongs to queries lies in shared memory; `shift`
# and `delta`: where the number of a lane's first query is.

FAR = 1 << 26
EACH_WAY = KEYS_SHARED or PAIRS > 32  # whether registers are short
EARLY = min(PAIRS // 4, 8)  # of the numbers of queries, those that are read before they are needed


@device
def own_row():
    """Where a lane's first query has its number."""
    return thread() % 4 * 8


@device
def numbers_of(i, address):
    """Of the queries of a lane's elements 4 i ... 4 i + 3."""
    a, b = load_two(address + 32 * i)
    return a, b, a, b


@device
def early_of(i, early, address):
    return early[i] if i < EARLY else numbers_of(i, address)


@device
def place_of(pairs, line, column):
    """Query and key of an element of one of a lane's two keys, `column` after its first query."""
    return i32(pairs.first + column), line


# --- nothing is hidden, or -inf is there already ----------------------------------------------------------------------


@device
def usual_weights(i, s, rest):
    early, shift, unit = rest
    r = early_of(i, early, shift)
    return (
        exp2_fast(fma(s[0], unit, -r[0])), exp2_fast(fma(s[1], unit, -r[1])),
        exp2_fast(fma(s[2], unit, -r[2])), exp2_fast(fma(s[3], unit, -r[3])),
    )  # fmt: skip


# What of Params and of the place of a group's pairs a pair needs: lines: a lane's two keys; first: its first query;
# last: query of all; n_k: of the batch entry; odd: where the bits of keys that are not finite are, of the block's keys,
# from k0 on.
Pairs = namedtuple("Pairs", "values scale b h lines first last n_k offset odd k0")


@device
def pairs_of(p, base, n, number, group):
    """Of tile n of queries, item `number`: from shared memory, since it is asked for rarely, or once a tile, and would
    take registers always. group: where blocks share an item, the block's number.
    """
    tile_desc, slot = tile_desc_of(base, n), work_tile_slot(base, number)
    b, h, k0 = load_word(slot), load_word(tile_desc + 4), load_word(slot + 8)
    first, key0 = (load_word(tile_desc) >> 8) * BLOCK_Q + i32(thread() % 4 * 2), k0 + GROUP_KEYS * group
    k0 = i32(key0 if KEYS_SHARED else k0)
    lines = i32(key0 + first_of_lane(0)), i32(key0 + first_of_lane(1))
    n_k, offset = i32(keys_of(p, I(b))), offset_of(p, I(b))
    return Pairs(p.values, p.softmax_scale, b, h, lines, i32(first), i32(p.n_q - 1), n_k, offset, odd_of(base, number), k0)


@device
def hide_one(x, column, line, pairs):
    query, key = place_of(pairs, line, column)
    query, inside = min(query, pairs.last), min(key, i32(pairs.n_k - 1))  # masks may read what has no element there
    x = modify(x, PARTIAL, pairs.b, pairs.h, query, query + pairs.offset, inside, pairs)
    return x if key < pairs.n_k else HIDDEN


@device
def hide_near(x, column, line, pairs):
    """The same where positions fit 32 bits."""
    query, key = place_of(pairs, line, column)
    query, inside = min(query, pairs.last), min(key, i32(pairs.n_k - 1))
    x = modify(x, PARTIAL, pairs.b, pairs.h, query, i32(query + pairs.offset), inside, pairs)
    return x if key < pairs.n_k else HIDDEN


@device
def hide(s, pairs):
    if HAS_MASK:
        near = abs(pairs.offset) < FAR and pairs.last < FAR and pairs.n_k < FAR
        if all_lanes(near):
            return each_at(hide_near, s, pairs.lines, pairs)
    return each_at(hide_one, s, pairs.lines, pairs)


# --- modifications, dropout, numbers that are not finite --------------------------------------------------------------


@device
def weigh(x, lse, column, line, pairs):
    """The weight of a pair, and the factor of dP - delta in dS: that times the slope of the score modification."""
    (query, key), slope = place_of(pairs, line, column), np.float32(1)
    exists, bit = key < pairs.n_k and query <= pairs.last, u32(key - pairs.k0)
    query, key = min(query, pairs.last), min(key, i32(pairs.n_k - 1))
    position, x = query + pairs.offset, x * np.float32(pairs.scale)
    if HAS_SCORE:
        slope = score_slope(x, pairs.b, pairs.h, query, position, key, pairs)
    x = modify(x, PARTIAL, pairs.b, pairs.h, query, position, key, pairs)
    hidden = x == HIDDEN or not exists
    w = ZERO if hidden else exp2_fast(x * LOG2E - lse)
    # A score of a key that is not finite is -inf or has made its row's sum infinite or NaN.
    if load_word(pairs.odd + bit // u32(32) * u32(4)) >> i32(bit % u32(32)) & 1 != 0:
        w = ZERO if hidden or is_finite(lse) else NAN
    if HAS_SCORE:
        return w, w * slope if w != ZERO else ZERO
    return w, w


@device
def weigh_four(i, s, rest):
    shift, pairs = rest
    r, column, (low, high) = numbers_of(i, shift), 8 * i, pairs.lines
    return (
        weigh(s[0], r[0], column, low, pairs), weigh(s[1], r[1], column + 1, low, pairs),
        weigh(s[2], r[2], column, high, pairs), weigh(s[3], r[3], column + 1, high, pairs),
    )  # fmt: skip


# Which of a lane's weights are kept, a bit for each. A call of the generator is for four keys of a query, which several
# lanes have; each of them makes the words for a part of the queries: of queries 4 m + i, in the order of a lane's
# elements, lane i of four has bits 16 * half + 4 m + key % 4.


ALL_KEPT = (u32(0),) * 4  # where nobody asks
CALLS = PAIRS // 4  # of the generator, by a lane


@device
def four_bits(seed, threshold, pairs, query, key):
    words, bits = philox(seed, I(key) >> 2, query, pairs.h, pairs.b), u32(0)
    for k in range(4):
        if words[k] >= threshold:
            bits |= u32(1) << u32(k)
    return u32(bits)


@device
def keep_some(j, own, rest):
    seed, threshold, pairs = rest
    half, m, i = j // (PAIRS // 8), j % (PAIRS // 8), i32(thread() % 16 // 4)
    query = pairs.first + (4 * m + i) // 2 * 8 + i % 2
    return u32(own | four_bits(seed, threshold, pairs, query, pairs.lines[half]) << u32(16 * half + 4 * m))


@device
def kept_of(i, own):
    lane = i32(thread() % 32)
    return u32(from_lane(i32(own), (lane & ~12) | 4 * i)) >> u32(lane % 16 // 4)


@device
def kept_bits(p, pairs):
    return listed(kept_of, 4, repeat(keep_some, CALLS, u32(0), (p.seed, p.dropout_threshold, pairs)))


@device
def keep(x, kept, i, half, c, factor):
    """Element 4 i + 2 half + c, dropped or scaled."""
    e = 2 * i + c
    return x * factor if kept[e % 4] >> u32(16 * half + e // 4 * 4) & u32(1) != 0 else ZERO


@device
def keep_four(i, x, rest):
    kept, factor = rest
    return (
        keep(x[0], kept, i, 0, 0, factor), keep(x[1], kept, i, 0, 1, factor),
        keep(x[2], kept, i, 1, 0, factor), keep(x[3], kept, i, 1, 1, factor),
    )  # fmt: skip


# --- steps ------------------------------------------------------------------------------------------------------------


@device
def any_weights(p, pairs, s, shift):
    """Of a tile that may have anything."""
    kept, both_numbers = ALL_KEPT, groups(weigh_four, 4, s, (shift, pairs))
    w, s = alike(first_of, both_numbers, 0), alike(second_of, both_numbers, 0)
    if HAS_DROPOUT:
        kept = kept_bits(p, pairs)
        w = groups(keep_four, 4, w, (kept, np.float32(p.dropout_scale)))
    return s, join(pack, w), kept


@device
def weights(p, base, n, number, tile_desc, group, even, s, early, shift, unit):
    """Scores to weights, and these rounded, dropped ones as 0; which are kept, and whether nothing is hidden. With a
    score modification the weights stay as what dP - delta is multiplied by, times its slope.
    """
    full, kept = i32(tile_desc & 3 << 2 * group) == i32(FULL << 2 * group), ALL_KEPT
    if MAY_HIDE:
        if HAS_SCORE or HAS_DROPOUT or not even or tile_desc & ODD != 0:
            s, w, kept = any_weights(p, pairs_of(p, base, n, number, group), s, shift)
            return s, w, kept, False
    if not full:
        s = hide(s, pairs_of(p, base, n, number, group))
    s = groups(usual_weights, 4, s, (early, shift, unit))
    return s, join(pack, s), kept, full


@device
def less_delta(i, dp, delta):
    d = numbers_of(i, delta)
    return dp[0] - d[0], dp[1] - d[1], dp[2] - d[2], dp[3] - d[3]


@device
def unless_zero(weight, x):
    """A weight of 0, of a pair that is hidden, has a gradient of 0, whatever x is."""
    return ZERO if weight == ZERO else weight * x


@device
def gradients(p, s, dp, plain, delta, kept):
    """dP to dS, rounded. plain: nothing is hidden."""
    if HAS_DROPOUT:
        dp = groups(keep_four, 4, dp, (kept, np.float32(p.dropout_scale)))
    # Where registers are short each way reads its numbers of queries itself, which leaves some for reading ahead; with
    # `fence_operand` LLVM does not take together what both begin with.
    if not EACH_WAY:
        dp = groups(less_delta, 4, dp, delta)
    if plain or not CLEANS_KEYS:
        dp = groups(less_delta, 4, fence_operand(dp), delta) if EACH_WAY else dp
        return join(pack, both(times, s, dp))
    dp = groups(less_delta, 4, dp, delta) if EACH_WAY else dp
    return join(pack, both(unless_zero, s, dp))

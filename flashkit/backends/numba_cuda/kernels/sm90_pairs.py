# What happens to pairs in the Hopper backward pass: scores to weights, dP to dS, in the registers of a warp group.
#
# They lie turned: keys are the rows, of which a lane has two (`half`), queries the columns. Of columns 8 i ... 8 i + 7
# a lane has four elements, 4 i + 2 half + c: key first_of_lane(half), query 8 i + 2 (lane % 4) + c. What belongs to
# queries lies in shared memory; `shift` and `delta`: where the numbers of a lane's first query are.


FAR = 1 << 26


@device
def numbers_of(i, address):
    """Of the two queries that a lane has of eight."""
    return load_two(address + 32 * i)


# --- nothing is hidden, or -inf is there already ----------------------------------------------------------------------


@device
def usual_weights(i, s, rest):
    early, shift, unit = rest
    r = early[i] if i < EARLY else numbers_of(i, shift)
    return (
        exp2_fast(fma(s[0], unit, -r[0])), exp2_fast(fma(s[1], unit, -r[1])),
        exp2_fast(fma(s[2], unit, -r[0])), exp2_fast(fma(s[3], unit, -r[1])),
    )  # fmt: skip


# What of Params and of the place of a group's pairs a pair needs: its query and its keys of a lane; last: query of
# all; n_k: of the batch entry; odd: where the bits of keys that are not finite are, bit: of a lane's keys among them.
Pairs = namedtuple("Pairs", "values scale b h query keys last n_k offset odd bits")


@device
def pairs_of(p, at, group, odd, h, row0):
    """By instructions that stay where they are: this hardly ever is needed, or once a tile."""
    b, k0 = here(at[0]), here(at[2]) + GROUP_KEYS * group
    query = here(row0) + i32(thread() % 4 * 2)
    bits = GROUP_KEYS * group + first_of_lane(0), GROUP_KEYS * group + first_of_lane(1)
    keys = i32(k0 + first_of_lane(0)), i32(k0 + first_of_lane(1))
    n_k, offset = i32(keys_of(p, I(b))), offset_of(p, I(b))
    return Pairs(p.values, p.scale, b, here(h), i32(query), keys, i32(p.n_q - 1), n_k, offset, odd, bits)


@device
def hide_one(x, column, key, pairs):
    query = min(i32(pairs.query + column), pairs.last)  # masks may read what has no element there
    inside = min(key, i32(pairs.n_k - 1))
    x = modify(x, PARTIAL, pairs.b, pairs.h, query, query + pairs.offset, inside, pairs)
    return x if key < pairs.n_k else HIDDEN


@device
def hide_near(x, column, key, pairs):
    """The same where positions fit 32 bits."""
    query = min(i32(pairs.query + column), pairs.last)
    inside = min(key, i32(pairs.n_k - 1))
    x = modify(x, PARTIAL, pairs.b, pairs.h, query, i32(query + pairs.offset), inside, pairs)
    return x if key < pairs.n_k else HIDDEN


@device
def hide(s, pairs):
    if HAS_MASK:
        near = abs(pairs.offset) < FAR and pairs.last < FAR and pairs.n_k < FAR
        if all_lanes(near):
            return each_at(hide_near, s, pairs.keys, pairs)
    return each_at(hide_one, s, pairs.keys, pairs)


# --- modifications, dropout, numbers that are not finite --------------------------------------------------------------


@device
def weigh(x, lse, column, half, pairs):
    """The weight of a pair, and the factor of dP - delta in dS: that times the slope of the score modification."""
    query, key, slope = pairs.query + column, pairs.keys[half], np.float32(1)
    exists = key < pairs.n_k and query <= pairs.last
    query, key = min(i32(query), pairs.last), min(key, i32(pairs.n_k - 1))
    position, x = query + pairs.offset, x * np.float32(pairs.scale)
    if HAS_SCORE:
        slope = score_slope(x, pairs.b, pairs.h, query, position, key, pairs)
    x = modify(x, PARTIAL, pairs.b, pairs.h, query, position, key, pairs)
    hidden = x == HIDDEN or not exists
    w = ZERO if hidden else exp2_fast(x * LOG2E - lse)
    # A score of a key that is not finite is -inf or has made its row's sum infinite or NaN.
    bit = pairs.bits[half]
    if load_word(pairs.odd + bit // 32 * 4) >> (bit % 32) & 1 != 0:
        w = ZERO if hidden or is_finite(lse) else NAN
    if HAS_SCORE:
        return w, w * slope if w != ZERO else ZERO
    return w, w


@device
def weigh_four(i, s, rest):
    shift, pairs = rest
    r, column = numbers_of(i, shift), 8 * i
    return (
        weigh(s[0], r[0], column, 0, pairs), weigh(s[1], r[1], column + 1, 0, pairs),
        weigh(s[2], r[0], column, 1, pairs), weigh(s[3], r[1], column + 1, 1, pairs),
    )  # fmt: skip


@device
def first_of(x, _):
    return x[0]


@device
def second_of(x, _):
    return x[1]


# Which of a lane's weights are kept, a bit for each. A call of the generator is for four keys of a query, which four
# lanes have; each of them makes the words for a quarter of the queries: of queries 4 m + i, in the order of a lane's
# elements, lane i of four has bits 16 * half + 4 m + key % 4.


ALL_KEPT, FOURS = (u32(0),) * 4, PAIRS // 4  # where nobody asks; how often a lane calls the generator


@device
def keep_some(j, own, rest):
    seed, threshold, pairs = rest
    half, m, i = j // (PAIRS // 8), j % (PAIRS // 8), i32(thread() % 16 // 4)
    row = pairs.query + (4 * m + i) // 2 * 8 + i % 2
    words = philox(seed, I(pairs.keys[half]) >> 2, row, pairs.h, pairs.b)
    for k in range(4):
        if words[k] >= threshold:
            own |= u32(1) << u32(16 * half + 4 * m + k)
    return u32(own)


@device
def kept_of(i, own):
    lane = i32(thread() % 32)
    return u32(from_lane(i32(own), (lane & ~12) | 4 * i)) >> u32(lane % 16 // 4)


@device
def kept_bits(p, pairs):
    return listed(kept_of, 4, repeat(keep_some, FOURS, u32(0), (p.seed, p.threshold, pairs)))


@device
def keep(x, kept, e, half, factor):
    """Element e of a lane's of a key, dropped or scaled."""
    return x * factor if kept[e % 4] >> u32(16 * half + e // 4 * 4) & u32(1) != 0 else ZERO


@device
def keep_four(i, x, rest):
    kept, factor = rest
    return (
        keep(x[0], kept, 2 * i, 0, factor), keep(x[1], kept, 2 * i + 1, 0, factor),
        keep(x[2], kept, 2 * i, 1, factor), keep(x[3], kept, 2 * i + 1, 1, factor),
    )  # fmt: skip


# --- steps ------------------------------------------------------------------------------------------------------------


@device
def any_weights(p, at, group, odd, h, row0, s, shift):
    """Of a tile that may have anything."""
    pairs, kept = pairs_of(p, at, group, odd, h, row0), ALL_KEPT
    both_numbers = groups(weigh_four, 4, s, (shift, pairs))
    w, s = alike(first_of, both_numbers, 0), alike(second_of, both_numbers, 0)
    if HAS_DROPOUT:
        kept = kept_bits(p, pairs)
        w = groups(keep_four, 4, w, (kept, np.float32(p.kept_scale)))
    return s, join(pack, w), kept


@device
def weights(p, at, group, note, even, odd, h, s, early, shift, unit):
    """Scores to weights, and these rounded, dropped ones as 0; which are kept, and whether nothing is hidden. With a
    score modification the weights stay as what dP - delta is multiplied by, times its slope.
    """
    full, row0, kept = note >> 2 * group & 3 == FULL, (note >> 8) * BLOCK_Q, ALL_KEPT
    if MAY_HIDE:
        if HAS_SCORE or HAS_DROPOUT or not even or note & ODD != 0:
            s, w, kept = any_weights(p, at, group, odd, h, row0, s, shift)
            return s, w, kept, False
    if not full:
        s = hide(s, pairs_of(p, at, group, odd, h, row0))
    s = groups(usual_weights, 4, s, (early, shift, unit))
    return s, join(pack, s), kept, full


@device
def less_delta(i, dp, delta):
    d = numbers_of(i, delta)
    return dp[0] - d[0], dp[1] - d[1], dp[2] - d[0], dp[3] - d[1]


@device
def unless_zero(weight, x):
    """A weight of 0, of a pair that is hidden, has a gradient of 0, whatever x is."""
    return ZERO if weight == ZERO else weight * x


@device
def gradients(p, s, dp, plain, delta, kept):
    """dP to dS, rounded. plain: nothing is hidden."""
    if HAS_DROPOUT:
        dp = groups(keep_four, 4, dp, (kept, np.float32(p.kept_scale)))
    dp = groups(less_delta, 4, dp, delta)
    if plain or not CLEANS_KEYS:
        return join(pack, both(times, s, dp))
    return join(pack, both(unless_zero, s, dp))

# parts: sm90/bwd_fragments
# S to P = exp(S - lse) in the registers of a warp group. P is rounded into a fragment for dV; in the place of S stays P
# times the slope of the score modification, by which dP - delta is multiplied. Dropped elements are 0 in the fragment.
#
# Keys are the rows, as wgmma leaves them: element 4 i + 2 half + c of a lane is key lane_key(half) of the warp group's
# 64 and row 8 i + 2 (lane % 4) + c of the query tile. `lse` and `delta` are addresses of a lane's first row in shared
# memory.

NEAR_POSITIONS = 1 << 26  # positions and their differences fit 32 bits
FEW_REGISTERS = S_REGS > 32
EARLY_LSE = min(S_REGS // 4, 8)  # log-sum-exps that are loaded before they are needed


@device
def lane_stats():
    """Where a lane's first row has its statistics."""
    return thread() % 4 * 8


@device
def row_stats_of(i, address):
    """Log-sum-exps or deltas of the rows of elements 4 i ... 4 i + 3."""
    a, b = load_two(address + 32 * i)
    return a, b, a, b


@device
def lse_of(i, early_lse, address):
    return early_lse[i] if i < EARLY_LSE else row_stats_of(i, address)


# What of Params and of the fragment's place an element needs. keys: a lane's two; first_row: a lane's first; last_row:
# of all; n_k: of the batch entry.
FragmentCoord = namedtuple("FragmentCoord", "values scale b h keys first_row last_row n_k q_position")


@device
def fragment_coord(p, base, n, number, wg):
    """Of query tile n and work tile `number`; from shared memory, as it is needed rarely or once a tile, and would
    always take registers.
    """
    tile_desc, slot = tile_desc_slot(base, n), work_tile_slot(base, number)
    b, h, key0 = load_word(slot), load_word(tile_desc + DESC_HEAD), load_word(slot + 8) + WARPGROUP_KEYS * wg
    first_row, seq = (load_word(tile_desc) >> 8) * BLOCK_Q + i32(thread() % 4 * 2), seq_info(p, I(b))
    keys = i32(key0 + lane_key(0)), i32(key0 + lane_key(1))
    return FragmentCoord(
        p.values, p.softmax_scale, b, h, keys, i32(first_row), i32(seq.n_q - 1), i32(seq.n_k), seq.q_position
    )


# --- masks ------------------------------------------------------------------------------------------------------------


def make_mask_score(position):
    """mask_score(x, column, key, coord): an element `column` rows after the lane's first one, or -inf if it is masked.
    position: the type of positions.
    """

    @device
    def mask_score(x, column, key, coord):
        row = min(i32(coord.first_row + column), coord.last_row)
        inside = min(key, i32(coord.n_k - 1))  # masks may read what has no element there
        x = modify(x, PARTIAL, coord.b, coord.h, row, position(row + coord.q_position), inside, coord)
        return x if key < coord.n_k else HIDDEN

    return mask_score


mask_score, mask_score_near = make_mask_score(I), make_mask_score(i32)


@device
def mask_scores(s, coord):
    """A PARTIAL tile."""
    if HAS_MASK:
        near = abs(coord.q_position) < NEAR_POSITIONS and coord.last_row < NEAR_POSITIONS and coord.n_k < NEAR_POSITIONS
        if all_lanes(near):
            return each_at(mask_score_near, s, coord.keys, coord)
    return each_at(mask_score, s, coord.keys, coord)


# --- S to P -----------------------------------------------------------------------------------------------------------


@device
def softmax_p_one(x, lse, column, key, coord):
    """P of one score, and P times the slope of the score modification."""
    row, slope = i32(coord.first_row + column), np.float32(1)
    exists = key < coord.n_k and row <= coord.last_row
    row, key = min(row, coord.last_row), min(key, i32(coord.n_k - 1))
    position, x = row + coord.q_position, x * np.float32(coord.scale)
    if HAS_SCORE:
        slope = score_slope(x, coord.b, coord.h, row, position, key, coord)
    x = modify(x, PARTIAL, coord.b, coord.h, row, position, key, coord)
    w = ZERO if x == HIDDEN or not exists else exp2_fast(x * LOG2E - lse)
    if HAS_SCORE:
        return w, w * slope if w != ZERO else ZERO
    return w, w


@device
def softmax_p_four(i, s, args):
    lse, coord = args
    r, column, (low, high) = row_stats_of(i, lse), 8 * i, coord.keys
    return (
        softmax_p_one(s[0], r[0], column, low, coord), softmax_p_one(s[1], r[1], column + 1, low, coord),
        softmax_p_one(s[2], r[2], column, high, coord), softmax_p_one(s[3], r[3], column + 1, high, coord),
    )  # fmt: skip


@device
def softmax_p_general(p, coord, s, lse):
    """Any modification, and dropout."""
    dropout, p_and_slope = NO_DROPOUT, groups(softmax_p_four, 4, s, (lse, coord))
    weights, p_slope = alike(first_of, p_and_slope, 0), alike(second_of, p_and_slope, 0)
    if HAS_DROPOUT:
        dropout = dropout_mask(p, coord)
        weights = groups(drop_four, 4, weights, (dropout, np.float32(p.dropout_scale)))
    return p_slope, join(pack, weights), dropout


@device
def softmax_p_plain_four(i, s, args):
    early_lse, lse, scale_log2 = args
    r = lse_of(i, early_lse, lse)
    return (
        exp2_fast(fma(s[0], scale_log2, -r[0])), exp2_fast(fma(s[1], scale_log2, -r[1])),
        exp2_fast(fma(s[2], scale_log2, -r[2])), exp2_fast(fma(s[3], scale_log2, -r[3])),
    )  # fmt: skip


@device
def unless_masked(x, weight):
    return ZERO if x == HIDDEN else weight  # the row's log-sum-exp may be NaN


@device
def softmax_p(p, base, n, number, tile_desc, wg, s, early_lse, lse, scale_log2):
    """P times slope, P as a fragment, the dropout mask, and whether all pairs are visible."""
    full, dropout = i32(tile_desc & 3 << 2 * wg) == i32(FULL << 2 * wg), NO_DROPOUT
    if HAS_SCORE or HAS_DROPOUT:
        s, p_frag, dropout = softmax_p_general(p, fragment_coord(p, base, n, number, wg), s, lse)
        return s, p_frag, dropout, False
    if full:
        s = groups(softmax_p_plain_four, 4, s, (early_lse, lse, scale_log2))
    else:
        s = mask_scores(s, fragment_coord(p, base, n, number, wg))
        s = both(unless_masked, s, groups(softmax_p_plain_four, 4, s, (early_lse, lse, scale_log2)))
    return s, join(pack, s), dropout, full

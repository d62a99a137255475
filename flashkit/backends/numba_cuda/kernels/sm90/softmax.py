# What the softmax of the Hopper forward pass has beyond that of others: a guessed reference, masks in 32 bits.

# How much less earlier weights may count than thought, and the reference still be trusted. float16 weights have no room
# above the greatest, so there a reference is not guessed.
STEADY, GUESSES = np.float32(1e-6), STORAGE != "float16"


FAR = 1 << 26


@device
def near_row(row, _):
    return i32(row[0]), i32(row[1]), i32(row[2])


@device
def hide_near(x, column, row, rest):
    p, b, key, n_k = rest
    k = i32(key + column)
    inside = min(k, i32(max(n_k, 1) - 1))
    x = modify(x, PARTIAL, b, row[0], row[1], row[2], inside, p)
    return x if k < n_k else HIDDEN


@device
def modified(p, at, full, s, k0):
    """modify_tile(); where a mask alone hides pairs, and positions fit, in 32 bits."""
    if HAS_MASK and not HAS_SCORE:
        if full:
            return s
        offset = offset_of(p, at[0])
        if all_lanes(abs(offset) < FAR and p.n_q * PACK_GQA < FAR and p.n_k < FAR):
            rows = alike(near_row, listed(row_of_item, ROWS, (p, at, offset)), 0)
            first, n_k = i32(opaque(k0) + i32(thread() % 4 * 2)), i32(keys_of(p, at[0]))
            return each_at(hide_near, s, rows, (Modification(p.values, p.softmax_scale), at[0], first, n_k))
    return modify_tile(p, at, full, s, k0)


@device
def guess(s, unit):
    """A reference from a tile's first 16 columns, and whether all rows of the warp have one. Whether it is near enough
    the weights' sums will tell.
    """
    m = scaled(across_row(greater, row_max(part(s, 0, 8), UNKNOWN)), unit)
    return m, GUESSES and all_lanes(repeat(is_begun, ROWS, True, m))


@device
def lasts(j, so_far, rest):
    """Whether row j has a reference, and one that has not just grown by much: it may grow again, and another first look
    would be in vain.
    """
    m, rescale, fresh = rest
    return so_far and m[j] != HIDDEN and (fresh or rescale[j] >= STEADY)

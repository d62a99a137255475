# parts: common/softmax
# What the softmax of Hopper's forward pass adds: masks in 32-bit positions, a guessed row reference, and S again after
# a misprediction.

# A guess needs room above the reference, which float16 P has not. After a tile that rescales a row by less than
# MIN_RESCALE the reference may grow again, so the next tile does not speculate.
GUESSES_ROW_REF, MIN_RESCALE = STORAGE != "float16", np.float32(1e-6)
MAX_POSITION = 1 << 26  # up to this, masks are evaluated in 32 bits


@device
def row_in_range(row, _):
    return i32(row[0]), i32(row[1]), i32(row[2])


@device
def modified(p, at, full, s, k0):
    """modify_tile(); a mask without a score modification in 32 bits, where positions fit."""
    if HAS_MASK and not HAS_SCORE:
        if full:
            return s
        offset = seq_info(p, at[0]).q_position
        if all_lanes(abs(offset) < MAX_POSITION and p.n_q < MAX_POSITION and p.n_k < MAX_POSITION):
            rows = alike(row_in_range, listed(row_of_tile, ROWS, (p, at, offset)), 0)
            first, n_k = i32(opaque(k0) + i32(thread() % 4 * 2)), i32(seq_info(p, at[0]).n_k)
            return each_at(modify_partial_near, s, rows, (Modification(p.values, p.softmax_scale), at[0], first, n_k))
    return modify_tile(p, at, full, s, k0)


@device
def guess_row_ref(s, scale_log2):
    """A row reference from a tile's first 16 columns, and whether all rows of the warp have one."""
    m = scaled(across_row(greater, row_max(part(s, 0, 8), NO_REFERENCE)), scale_log2)
    return m, GUESSES_ROW_REF and all_lanes(repeat(is_not_great, ROWS, True, m))


@device
def reference_holds(j, so_far, rest):
    """After the online softmax: whether row j has a reference, and one that has not just grown by much."""
    m, rescale, first_tile = rest
    return is_not_great(j, so_far, m) and (first_tile or rescale[j] >= MIN_RESCALE)


# --- S after a misprediction ------------------------------------------------------------------------------------------

mma_m16n8k16 = mma(STORAGE)


@device
def mma_16_keys(i, accumulators, rest):
    """S of 16 keys by the mma instruction of a single warp."""
    a, k, vec = rest
    lane = opaque(thread() % 32)
    key = lane // 16 * 8 + lane % 8
    b = ldmatrix_x4(k + 16 * i * CHUNK_ROW + swizzled(key, vec + lane // 8 % 2))
    first = mma_m16n8k16(part(accumulators, 0, 4), a, b[0], b[1])
    return first + mma_m16n8k16(part(accumulators, 4, 4), a, b[2], b[3])


@device
def recompute_qk(q, k):
    """S of a warp's 16 rows again, as the exponentials have overwritten it: by the mma instruction of a single warp,
    whose accumulator has wgmma's layout.
    """
    lane = opaque(thread() % 32)
    row = opaque(thread() % 128 // 32) * 16 + lane % 16
    s = filled(as_float(opaque(0)), S_REGS)
    for step in range(COLUMNS_QK // 16):
        chunk, vec = step // 4, step % 4 * 2
        a = ldmatrix_x4(q + chunk * 64 * CHUNK_ROW + swizzled(row, vec + lane // 16))
        s = groups(mma_16_keys, 8, s, (a, k + chunk * BLOCK_K * CHUNK_ROW, vec))
    return s

# Rows and keys of Hopper's backward pass that are not finite, or past the end, are cleared in shared memory before they
# are multiplied (bwd_layout, CLEARS_KEYS).


@device
def still_finite(v, finite, args):
    """Whether 16 bytes of elements are, too: the exponent of a non-finite one is all ones."""
    row, lane = args
    vec, ones = load_vec(row + (v ^ lane & 7) * VEC_BYTES), u32(0x7C00 if STORAGE == "float16" else 0x7F80)
    for i in range(4):
        finite = finite & (vec[i] & ones != ones) & (vec[i] >> u32(16) & ones != ones)
    return finite


@device
def nonfinite_keys(tile, many, word, lane):
    """A bit for each of 32 keys; a lane reads one."""
    row, finite = i32(32 * word + lane), YES
    for c in range(i32(many)):
        finite = repeat(still_finite, 8, finite, (u32(tile + (c * CTA_KEYS + row) * CHUNK_ROW), lane))
    return vote(not finite)


@device
def clear_row(tile, row, rows, many, lane):
    """An eighth of a row, by each of eight lanes."""
    for c in range(many):
        store_zeros(tile + (c * rows + row) * CHUNK_ROW + lane % 8 * VEC_BYTES, 0)


@device
def clear_nonfinite_keys(tile, many, existing, bits):
    """By a warp, in a tile of keys of `many` chunks: clears those that are not finite, and those past the first
    `existing`. bits: where a bit for each of the former goes, or 0.
    """
    lane = opaque(thread() % 32)
    for word in range(i32(NONFINITE_WORDS)):
        nonfinite = u32(0)
        if MAY_HIDE:
            nonfinite = nonfinite_keys(tile, many, word, lane)
        if bits != 0 and lane == 0:
            store_word(bits + 4 * word, i32(nonfinite))
        if nonfinite != 0 or existing < 32 * word + 32:
            for row in range(i32(32 * word + lane // 8), i32(32 * word + 32), i32(4)):
                if nonfinite >> u32(row % 32) & u32(1) != 0 or row >= existing:
                    clear_row(tile, row, CTA_KEYS, many, lane)
    fence_proxy_async()
    lanes_sync()


@device
def clear_nonfinite_rows(tile, lse, many, lane):
    """By a warp, in a tile of Q or dO: the rows whose log-sum-exp, from that address on, is not finite."""
    for row in range(i32(lane // 8), i32(BLOCK_Q), i32(4)):
        if not is_finite(load_float(lse + 4 * row)):
            clear_row(tile, row, BLOCK_Q, many, lane)

# Rows and keys of the Hopper backward pass that are not finite, or past the end, cleared by a warp before they are
# multiplied; sm90_tile_backward.py says why.


@device
def still_finite(u, finite, rest):
    """Whether 16 bytes of elements are, too: a number that is not has an exponent of ones."""
    row, lane = rest
    unit, exponent = load_vec(row + (u ^ lane & 7) * VEC_BYTES), u32(0x7C00 if STORAGE == "float16" else 0x7F80)
    for i in range(4):
        finite = finite & (unit[i] & exponent != exponent) & (unit[i] >> u32(16) & exponent != exponent)
    return finite


@device
def odd_keys(tile, many, word, lane):
    """A bit for each of 32 keys that is not finite; a lane looks at one."""
    row, finite = i32(32 * word + lane), YES
    for c in range(i32(many)):
        finite = repeat(still_finite, 8, finite, (u32(tile + (c * HELD + row) * CHUNK_ROW), lane))
    return vote(not finite)


@device
def clear_row(tile, row, rows, many, lane):
    """Zeros in an eighth of a row, by each of eight lanes."""
    for c in range(many):
        store_zeros(tile + (c * rows + row) * CHUNK_ROW + lane % 8 * VEC_BYTES, 0)


@device
def clean_keys(tile, many, exist, bits):
    """In a tile of keys, `many` chunks of columns, of which keys `exist` are not past the length: the others, and those
    that are not finite, are cleared, by a warp. bits: where a bit for each of the latter goes, or 0.
    """
    lane = opaque(thread() % 32)
    for word in range(i32(ODD_WORDS)):
        odd = u32(0)
        if MAY_HIDE:
            odd = odd_keys(tile, many, word, lane)
        if bits != 0 and lane == 0:
            store_word(bits + 4 * word, i32(odd))
        if odd != 0 or exist < 32 * word + 32:
            for row in range(i32(32 * word + lane // 8), i32(32 * word + 32), i32(4)):
                if odd >> u32(row % 32) & u32(1) != 0 or row >= exist:
                    clear_row(tile, row, HELD, many, lane)
    fence_proxy_async()
    lanes_sync()


@device
def clear_odd_rows(tile, shift, many, lane):
    """Zeros in the rows that are not finite, by one warp."""
    for row in range(i32(lane // 8), i32(BLOCK_Q), i32(4)):
        if not is_finite(load_number(shift + 4 * row)):
            clear_row(tile, row, BLOCK_Q, many, lane)

# Rows and keys of the Hopper backward pass that are not finite, or past the end, cleared by a warp before they are
# multiplied; sm90_tile_backward.py says why.


@device
def still_finite(u, finite, rest):
    """Whether 16 bytes of elements are, too: a number that is not has an exponent of ones."""
    row, lane = rest
    unit, exponent = load_unit(row + (u ^ lane & 7) * UNIT), u32(0x7C00 if STORAGE == "float16" else 0x7F80)
    for i in range(4):
        finite = finite & (unit[i] & exponent != exponent) & (unit[i] >> u32(16) & exponent != exponent)
    return finite


@device
def odd_keys(tile, word, lane):
    """A bit for each of 32 keys that is not finite; a lane looks at one."""
    row, finite = i32(32 * word + lane), YES
    if row < BLOCK_K:
        for c in range(i32(chunks_q)):
            finite = repeat(still_finite, 8, finite, (u32(tile + (c * BLOCK_K + row) * CHUNK_ROW), lane))
    return vote(not finite)


@device
def clear_row(tile, row, rows, many, lane):
    """Zeros in an eighth of a row, by each of eight lanes."""
    for c in range(many):
        store_zeros(tile + (c * rows + row) * CHUNK_ROW + lane % 8 * UNIT, 0)


@device
def clean_keys(p, base, at, number):
    """Keys past the length, and those that are not finite, are cleared, by a warp; the others go by as they are."""
    lane, buffer, bits = here(thread() % 32), stage_of(number, KEY_BUFFERS), odd_of(base, number)
    tile, exist = base + AT_K + buffer * BYTES_K, i32(keys_of(p, I(at[0]))) - at[2]
    await_barrier(base + AT_K_CAME + 8 * buffer, u32(number) // u32(KEY_BUFFERS) & 1)
    for word in range(i32(ODD_WORDS)):
        odd = u32(0)
        if MAY_HIDE:
            odd = odd_keys(tile, word, lane)
        if lane == 0:
            store_word(bits + 4 * word, i32(odd))
        if odd != 0 or exist < 32 * word + 32:
            for row in range(i32(32 * word + lane // 8), i32(min(32 * word + 32, BLOCK_K)), i32(4)):
                if odd >> u32(row % 32) & u32(1) != 0 or row >= exist:
                    clear_row(tile, row, BLOCK_K, chunks_q, lane)
    fence_async()
    lanes_sync()


@device
def clear_odd_rows(tile, shift, many, lane):
    """Zeros in the rows that are not finite, by one warp."""
    for row in range(i32(lane // 8), i32(BLOCK_Q), i32(4)):
        if not is_finite(load_number(shift + 4 * row)):
            clear_row(tile, row, BLOCK_Q, many, lane)

# parts: tensor
# What both passes by mma.sync begin with: tiles on their way to shared memory. THREADS: of a block.
#
# Measured on an H200: with a loop over the tile's units, which each thread divided into row and place anew, two thirds
# of the forward pass's instructions were here, and with 64 columns it ran at 226 TFLOP/s instead of 345.

ROWS_AT_ONCE = THREADS // 8


@device
def load_tile(target, tensor, b, h, first, count, rows, dim, columns):
    """Rows first ... of a head to shared memory, beside what the warps do; those at or past `count`, and columns past
    the head dim up to `columns`, become zeros. Eight threads take the eight units of a row of a chunk, so a
    thread's units lie at the same place of all its rows.
    """
    row, unit = i32(thread() // 8), i32(thread() % 8)
    at, left = target + swizzled(row, unit), i32(count - first - row)
    source = row_address(tensor, I(b), I(h), I(first) + row) + UNIT * unit
    step = tensor.token * (ITEM * ROWS_AT_ONCE)
    for chunk in range((columns + 63) // 64):
        wanted, exist = columns - 64 * chunk, dim - 64 * chunk
        there = source + CHUNK_ROW * chunk
        if wanted >= 64 or 8 * unit < wanted:
            end = left if exist >= 64 or 8 * unit < exist else 0
            for i in range(0, rows, ROWS_AT_ONCE):
                if rows % ROWS_AT_ONCE == 0 or row < rows - i:
                    copy_unit(at + (chunk * rows + i) * CHUNK_ROW, there, i, end)
                there += step

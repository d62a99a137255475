# parts: common/fragment
# What both passes by mma.sync begin with: tiles on their way to shared memory. THREADS: of a block.
#
# Measured on an H200: with a loop over the tile's units, which each thread divided into row and place anew, two thirds
# of the forward pass's instructions were here, and with 64 columns it ran at 226 TFLOP/s instead of 345.

ROWS_AT_ONCE = THREADS // 8

# Rows of a head on their way, as a thread has them. Eight threads take the eight units of a row of a chunk, so a
# thread's units lie at the same place of all its rows; `left`: the rows that exist, from its first one on. Those past
# them, and columns past the head dim, become zeros.
Copy = namedtuple("Copy", "target source step left wanted")


@device
def copy_of(target, tensor, b, h, first, count, wanted):
    row, unit = i32(thread() // 8), i32(thread() % 8)
    source = row_address(tensor, I(b), I(h), I(first) + row) + VEC_BYTES * unit
    step = tensor.token * (ITEM * ROWS_AT_ONCE)
    return Copy(target + swizzled(row, unit), source, step, i32(count - first - row), i32(wanted))


@device
def copy_rows(copy, chunk, row, rows, dim, columns):
    """ROWS_AT_ONCE rows, from `row` of a tile of `rows` rows on, of a chunk of the `columns`."""
    exist, needed, column = dim - PER_CHUNK * chunk, columns - PER_CHUNK * chunk, VEC_ELEMENTS * i32(thread() % 8)
    end = copy.left if exist >= PER_CHUNK or column < exist else 0
    wanted = copy.wanted if needed >= PER_CHUNK or column < needed else 0
    source = copy.source + row // ROWS_AT_ONCE * copy.step + CHUNK_ROW * chunk
    copy_unit_if(copy.target + (chunk * rows + row) * CHUNK_ROW, source, row, end, wanted)


@device
def load_tile(target, tensor, b, h, first, count, rows, dim, columns):
    """Rows first ... of a head to shared memory, beside what the warps do."""
    copy = copy_of(target, tensor, b, h, first, count, True)
    for chunk in range((columns + PER_CHUNK - 1) // PER_CHUNK):  # two loops are unrolled, one of both would not be
        for row in range(0, rows, ROWS_AT_ONCE):
            copy_rows(copy, chunk, row, rows, dim, columns)

# parts: common/tiles common/fragment
# load_tile: tiles from global to shared memory by cp.async. THREADS: of a CTA.

ROWS_AT_ONCE = THREADS // 8

# The copies of a thread. Eight threads copy the eight vectors of a row of a chunk, so a thread's vectors have the same
# position in all its rows, and no index is divided in the loops. `left`: the rows that exist, from its first one on.
# Rows past them, and columns past the head dim, become zeros.
Copy = namedtuple("Copy", "target source step left wanted")


@device
def copy_of(target, tensor, b, h, first, count, wanted):
    row, vec = i32(thread() // 8), i32(thread() % 8)
    source = row_address(tensor, I(b), I(h), I(first + row)) + VEC_BYTES * vec
    step = tensor.token * (ITEMSIZE * ROWS_AT_ONCE)
    return Copy(target + swizzled(row, vec), source, step, i32(count - first - row), i32(wanted))


@device
def copy_rows(copy, chunk, row, rows, dim, columns):
    """Copies ROWS_AT_ONCE rows, from `row` of a tile of `rows` rows on, of one chunk of the `columns`."""
    exist, needed, column = dim - PER_CHUNK * chunk, columns - PER_CHUNK * chunk, VEC_ELEMENTS * i32(thread() % 8)
    end = copy.left if exist >= PER_CHUNK or column < exist else 0
    wanted = copy.wanted if needed >= PER_CHUNK or column < needed else 0
    source = copy.source + row // ROWS_AT_ONCE * copy.step + CHUNK_ROW * chunk
    cp_async_if(copy.target + (chunk * rows + row) * CHUNK_ROW, source, row, end, wanted)


@device
def load_tile(target, tensor, b, h, first, count, rows, dim, columns):
    """Rows first ... of a head to shared memory, asynchronously."""
    copy = copy_of(target, tensor, b, h, first, count, True)
    for chunk in range((columns + PER_CHUNK - 1) // PER_CHUNK):  # nested, so that both loops are unrolled
        for row in range(0, rows, ROWS_AT_ONCE):
            copy_rows(copy, chunk, row, rows, dim, columns)

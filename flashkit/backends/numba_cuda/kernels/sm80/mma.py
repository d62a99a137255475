# parts: common/tiles common/fragment
# Matrix products of a warp by mma.sync: 16 rows, or 32, two tiles of 16 that use the same B operands. The layout of
# accumulators is in ptx/tuples.py. An A operand is four registers of each tile of 16 rows. B operands are addresses in
# shared memory and the bytes from one chunk of 64 columns to the next. A lane reaches further columns by flipping bits
# of its address, so that all addresses follow from one; EVEN: a warp multiplies a power of two of columns, or all of
# them.

# --- load_tile --------------------------------------------------------------------------------------------------------
#
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


# --- products ---------------------------------------------------------------------------------------------------------

# Registers of a lane for 16 columns of an accumulator, and of these as an operand.
SIXTEEN, FRAGMENT = 4 * ROWS, 2 * ROWS
mma_sync = mma(STORAGE)

if ROWS == 4:

    @device
    def mma_16_columns(sums, left, right):
        """sums += left right for 16 columns of all rows: an A operand and a B operand."""
        upper, lower = part(left, 0, 4), part(left, 4, 4)
        a = mma_sync(part(sums, 0, 4), upper, right[0], right[1])
        b = mma_sync(part(sums, 4, 4), upper, right[2], right[3])
        c = mma_sync(part(sums, 8, 4), lower, right[0], right[1])
        return a + b + c + mma_sync(part(sums, 12, 4), lower, right[2], right[3])

    @device
    def load_a(at):
        return ldmatrix_x4(at) + ldmatrix_x4(at + 16 * CHUNK_ROW)

else:

    @device
    def mma_16_columns(sums, left, right):
        a = mma_sync(part(sums, 0, 4), left, right[0], right[1])
        return a + mma_sync(part(sums, 4, 4), left, right[2], right[3])

    @device
    def load_a(at):
        return ldmatrix_x4(at)


@device
def mma_columns_nt(i, sums, rest):
    left, b = rest
    return mma_16_columns(sums, left, ldmatrix_x4(b + 16 * i * CHUNK_ROW))


@device
def mma_step_nt(step, sums, rest):
    """One step of sums += a b^T: 16 columns of the rows of a and of b."""
    a, chunk_a, b, chunk_b = rest
    lane = thread() % 32
    left = ((a + swizzled(lane % 16, lane // 16)) ^ step % 4 * 32) + step // 4 * chunk_a
    right = ((b + swizzled(lane // 16 * 8 + lane % 8, lane // 8 % 2)) ^ step % 4 * 32) + step // 4 * chunk_b
    return groups(mma_columns_nt, SIXTEEN, sums, (load_a(left), right))


@device
def mma_columns_nn(i, sums, rest):
    """sums += left b for 16 columns of b from vector `first` on, and 16 of its rows from `row` on."""
    left, b, chunk_b, first, row = rest
    lane, vec = thread() % 32, first + 2 * i
    if EVEN:
        at = b + (first >> 3) * chunk_b + swizzled(lane % 16, (first & 7) + lane // 16)
        at = (at ^ i % 4 * 32) + i // 4 * chunk_b
    else:
        at = b + (vec >> 3) * chunk_b + swizzled(lane % 16, (vec & 7) + lane // 16)
    return mma_16_columns(sums, left, ldmatrix_x4_trans(at + row * CHUNK_ROW))


@device
def mma_step_rs(step, p_tile, output, rest):
    v, chunk = rest
    return groups(mma_columns_nn, SIXTEEN, output, (p_tile, v, chunk, 0, 16 * step))


@device
def gemm_rs(output, p_tile, v, chunk):
    """output += P V, with P packed in registers."""
    return chain(mma_step_rs, FRAGMENT, p_tile, output, (v, chunk))


@device
def to_operand(fragment):
    """P as an operand, or O as it is stored."""
    return join(pack, fragment)


@device
def store_o_fragment(i, words, rest):
    """16 columns of all rows, packed, to shared memory, from vector `first` of a row on."""
    staged, chunk, first = rest
    lane = i32(thread() % 32)
    for j in range(FRAGMENT):
        row, vec = j // 4 * 16 + j % 2 * 8 + lane // 4, first + 2 * i + j // 2 % 2
        store_word(staged + (vec >> 3) * chunk + swizzled(row, vec & 7) + lane % 4 * 4, i32(words[j]))

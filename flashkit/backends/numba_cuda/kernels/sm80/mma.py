# parts: common/tiles common/fragment
# Matrix products of a warp by mma.sync: 16 rows, or 32, two tiles of 16 that use the same B operands. The layout of
# accumulators is in ptx/tuples.py. An A operand is four registers of each tile of 16 rows. B operands are addresses in
# shared memory and the bytes from one chunk of 64 columns to the next. A lane reaches further columns by flipping bits
# of its address, so that all addresses follow from one.

# --- load_tile --------------------------------------------------------------------------------------------------------

ROWS_AT_ONCE = THREADS // 8


@device
def load_tile(target, tensor, b, h, first, count, rows, dim, columns):
    """Rows first ... of a head from global to shared memory by cp.async. Rows past `count`, and columns past the head
    dim, become zeros.

    Eight threads copy the eight vectors of a row of a chunk, so a thread's vectors have the same position in all its
    rows, and no index is divided in the loops.
    """
    row, vec = i32(thread() // 8), i32(thread() % 8)
    target, left = target + swizzled(row, vec), i32(count - first - row)
    source = row_address(tensor, I(b), I(h), I(first + row)) + VEC_BYTES * vec
    step = tensor.token * (ITEMSIZE * ROWS_AT_ONCE)
    for chunk in range((columns + PER_CHUNK - 1) // PER_CHUNK):  # nested, so that both loops are unrolled
        exist, needed, column = dim - PER_CHUNK * chunk, columns - PER_CHUNK * chunk, VEC_ELEMENTS * vec
        end = left if exist >= PER_CHUNK or column < exist else 0
        wanted = 1 if needed >= PER_CHUNK or column < needed else 0
        for below in range(0, rows, ROWS_AT_ONCE):
            place = target + (chunk * rows + below) * CHUNK_ROW
            cp_async_if(place, source + below // ROWS_AT_ONCE * step + CHUNK_ROW * chunk, below, end, wanted)


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
def mma_keys(i, sums, rest):
    left, k = rest
    return mma_16_columns(sums, left, ldmatrix_x4(k + 16 * i * CHUNK_ROW))


@device
def mma_step_qk(step, sums, rest):
    """One step of S += Q K^T: 16 columns of the rows of both."""
    q, k = rest
    lane = thread() % 32
    left = ((q + swizzled(lane % 16, lane // 16)) ^ step % 4 * 32) + step // 4 * CHUNK_Q
    right = ((k + swizzled(lane // 16 * 8 + lane % 8, lane // 8 % 2)) ^ step % 4 * 32) + step // 4 * CHUNK_K
    return groups(mma_keys, SIXTEEN, sums, (load_a(left), right))


@device
def scores(q, k):
    """S = Q K^T for the rows of this warp."""
    return repeat(mma_step_qk, STEPS, filled(ZERO, SCORES), (q, k))


@device
def mma_columns(i, sums, rest):
    left, v = rest
    at = ((v + swizzled(thread() % 32 % 16, thread() % 32 // 16)) ^ i % 4 * 32) + i // 4 * CHUNK_K
    return mma_16_columns(sums, left, ldmatrix_x4_trans(at))


@device
def mma_step_pv(step, p_tile, output, v):
    return groups(mma_columns, SIXTEEN, output, (p_tile, v + 16 * step * CHUNK_ROW))


@device
def gemm_pv(output, p_tile, v):
    """O += P V, with P packed in registers."""
    return chain(mma_step_pv, FRAGMENT, p_tile, output, v)


@device
def store_o_fragment(i, words, staged):
    """16 columns of all rows of O, packed, to shared memory."""
    lane = i32(thread() % 32)
    for j in range(FRAGMENT):
        row, vec = j // 4 * 16 + j % 2 * 8 + lane // 4, 2 * i + j // 2 % 2
        store_word(staged + (vec >> 3) * CHUNK_Q + swizzled(row, vec & 7) + lane % 4 * 4, i32(words[j]))

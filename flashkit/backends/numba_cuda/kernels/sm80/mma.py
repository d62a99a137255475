# parts: common/fragment sm80/tf32x3
# What kernels by mma.sync multiply: 16 rows of a warp, or 32, two tiles of 16 that use the same right operands. A
# lane's sums are its ROWS rows' (ptx/tuples.py), four registers of each tile for each 8 columns; left operands are four
# registers of each tile. Right operands are addresses in shared memory and the bytes from one chunk of 64 columns to
# the next. A lane gets from columns to further ones by flipping bits of its address, so that all addresses follow from
# one; among a warp's share of the columns it does so where a share is a power of 2, or all of them: EVEN.

SIXTEEN, LEFT = 4 * ROWS, (4 if IS_FLOAT32 else 2) * ROWS  # registers of a lane: of 16 columns of sums; of these as operands

if not IS_FLOAT32 and ROWS == 4:
    product = mma(STORAGE)

    @device
    def multiply_sixteen(sums, left, right):
        """16 columns of all rows: the left operand, and the right one."""
        upper, lower = part(left, 0, 4), part(left, 4, 4)
        a = product(part(sums, 0, 4), upper, right[0], right[1])
        b = product(part(sums, 4, 4), upper, right[2], right[3])
        c = product(part(sums, 8, 4), lower, right[0], right[1])
        return a + b + c + product(part(sums, 12, 4), lower, right[2], right[3])

    @device
    def load_left(at):
        return ldmatrix_x4(at) + ldmatrix_x4(at + 16 * CHUNK_ROW)

elif not IS_FLOAT32:
    product = mma(STORAGE)

    @device
    def multiply_sixteen(sums, left, right):
        a = product(part(sums, 0, 4), left, right[0], right[1])
        return a + product(part(sums, 4, 4), left, right[2], right[3])

    @device
    def load_left(at):
        return ldmatrix_x4(at)


@device
def of_rows(i, sums, rest):
    left, b = rest
    return multiply_sixteen(sums, left, ldmatrix_x4(b + 16 * i * CHUNK_ROW))


@device
def sixteen_dims(step, sums, rest):
    """sums += a b^T: 16 columns of a's rows and of b's rows."""
    a, chunk_a, b, chunk_b = rest
    lane = thread() % 32
    left = ((a + swizzled(lane % 16, lane // 16)) ^ step % 4 * 32) + step // 4 * chunk_a
    right = ((b + swizzled(lane // 16 * 8 + lane % 8, lane // 8 % 2)) ^ step % 4 * 32) + step // 4 * chunk_b
    return groups(of_rows, SIXTEEN, sums, (load_left(left), right))


if not IS_FLOAT32:

    @device
    def of_columns(i, sums, rest):
        """16 columns of b from unit `first` on, of 16 of its rows from `row` on."""
        left, b, chunk_b, first, row = rest
        lane, unit = thread() % 32, first + 2 * i
        if EVEN:
            at = b + (first >> 3) * chunk_b + swizzled(lane % 16, (first & 7) + lane // 16)
            at = (at ^ i % 4 * 32) + i // 4 * chunk_b
        else:
            at = b + (unit >> 3) * chunk_b + swizzled(lane % 16, (unit & 7) + lane // 16)
        return multiply_sixteen(sums, left, load_matrices_turned(at + row * CHUNK_ROW))

    @device
    def sixteen_weights(step, weights, output, rest):
        v, chunk = rest
        return groups(of_columns, SIXTEEN, output, (weights, v, chunk, 0, 16 * step))

    @device
    def accumulate(output, weights, v, chunk):
        """output += weights V, the weights in registers, packed."""
        return chain(sixteen_weights, LEFT, weights, output, (v, chunk))

    @device
    def operand(weights):
        """Weights as they are multiplied, and outputs as they are stored."""
        return join(pack, weights)

    @device
    def store_piece(i, words, rest):
        """16 columns of all rows, packed, to shared memory, from unit `first` of a row on."""
        staged, chunk, first = rest
        lane = i32(thread() % 32)
        for j in range(LEFT):
            row, unit = j // 4 * 16 + j % 2 * 8 + lane // 4, first + 2 * i + j // 2 % 2
            store_word(staged + (unit >> 3) * chunk + swizzled(row, unit & 7) + lane % 4 * 4, i32(words[j]))

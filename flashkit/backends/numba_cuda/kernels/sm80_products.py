# parts: tensor
# What both passes by mma.sync multiply: 32 rows of a warp, two tiles of 16 that use the same right operands. A lane's
# sums are its four rows' (ptx/tuples.py), eight registers of both tiles for each 16 columns. Operands are addresses in
# shared memory and the bytes from one chunk of 64 columns to the next.

product = mma(STORAGE)


@device
def multiply_sixteen(sums, upper, lower, right):
    """16 columns of both tiles of rows: their left operands, and the right one."""
    a = product(part(sums, 0, 4), upper, right[0], right[1])
    b = product(part(sums, 4, 4), upper, right[2], right[3])
    c = product(part(sums, 8, 4), lower, right[0], right[1])
    return a + b + c + product(part(sums, 12, 4), lower, right[2], right[3])


@device
def of_rows(i, sums, rest):
    upper, lower, b = rest
    return multiply_sixteen(sums, upper, lower, load_matrices(b + 16 * i * CHUNK_ROW))


@device
def sixteen_dims(step, sums, rest):
    """sums += a b^T: 16 columns of a's 32 rows and of b's rows."""
    a, chunk_a, b, chunk_b = rest
    lane = thread() % 32
    left = a + step // 4 * chunk_a + swizzled(lane % 16, step % 4 * 2 + lane // 16)
    right = b + step // 4 * chunk_b + swizzled(lane // 16 * 8 + lane % 8, step % 4 * 2 + lane // 8 % 2)
    return groups(of_rows, 16, sums, (load_matrices(left), load_matrices(left + 16 * CHUNK_ROW), right))


@device
def of_columns(i, sums, rest):
    """16 columns of b from unit `first` on, of 16 of its rows."""
    upper, lower, b, chunk_b, first = rest
    lane, unit = thread() % 32, first + 2 * i
    at = b + (unit >> 3) * chunk_b + swizzled(lane % 16, (unit & 7) + lane // 16)
    return multiply_sixteen(sums, upper, lower, load_matrices_turned(at))


@device
def store_piece(i, words, rest):
    """16 columns of both tiles of rows, packed, to shared memory, from unit `first` of a row on."""
    staged, chunk, first = rest
    lane = i32(thread() % 32)
    for j in range(8):
        row, unit = j // 4 * 16 + j % 2 * 8 + lane // 4, first + 2 * i + j // 2 % 2
        store_word(staged + (unit >> 3) * chunk + swizzled(row, unit & 7) + lane % 4 * 4, i32(words[j]))

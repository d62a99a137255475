# parts: common/fragment
# float32 by mma.sync, whose TF32 numbers have 11 bits: each number is the sum of two of them, and a product the sum of
# the three larger of their four products (Ootomo and Yokota 2022, arXiv 2203.03341). What is left out, up to 2^-22 of
# a product, averages out in sums of many. Tensor cores round their sums towards zero: so each step starts from zero
# and is added to the sum on the ordinary units, which round to nearest.
#
# A step is of 8 columns, as many bytes as 16 of other types, so addresses are those of kernels/sm80_products.py. A
# warp has 16 rows. There is no load that turns 32-bit elements; of rows that are summed over, a lane takes 2 t and
# 2 t + 1 in place of t and t + 4, which weights in registers then are operands for, and a lane's words come from all
# banks.

if IS_FLOAT32:
    product = mma("tf32")
    load_number = load_from("shared", types.float32)

    @device
    def high_of(word, _):
        """To the nearest number of TF32; the unit ignores the last 13 bits."""
        return u32(u32(word + u32(0x1000)) & u32(0xFFFFE000))

    @device
    def low_of(word, _):
        return u32(as_int(as_float(i32(word)) - as_float(i32(high_of(word, 0)))))

    @device
    def word_of(x, _):
        return u32(as_int(x))

    @device
    def split(words):
        return alike(high_of, words, 0) + alike(low_of, words, 0)

    @device
    def multiply_eight(sums, left, b0, b1, c0, c1):
        """8 columns: the left operand, upper parts and lower ones, and the right one's."""
        high, fresh = part(left, 0, 4), (ZERO, ZERO, ZERO, ZERO)
        x = product(fresh, part(left, 4, 4), b0, b1)
        return both(add, sums, product(product(x, high, c0, c1), high, b0, b1))

    @device
    def multiply_sixteen(sums, left, right):
        b = split(right)
        a = multiply_eight(part(sums, 0, 4), left, b[0], b[1], b[4], b[5])
        return a + multiply_eight(part(sums, 4, 4), left, b[2], b[3], b[6], b[7])

    @device
    def load_left(at):
        return split(ldmatrix_x4(at))

    @device
    def right_word(e, at):
        return word_of(load_number((at ^ (e // 2 * 32 + e % 2 * 16)) + e % 2 * CHUNK_ROW), 0)

    @device
    def of_columns(i, sums, rest):
        """16 columns of b, of 8 of its rows from `row` on."""
        left, b, chunk_b, _, row = rest
        lane = thread() % 32
        at = b + swizzled(lane % 4 * 2, lane // 16) + lane // 4 % 4 * 4
        at = (at ^ i % 2 * 64) + i // 2 * chunk_b + row * CHUNK_ROW
        return multiply_sixteen(sums, left, listed(right_word, 4, at))

    @device
    def eight_weights(step, weights, output, rest):
        v, chunk = rest
        left = split(alike(word_of, (weights[0], weights[2], weights[1], weights[3]), 0))
        return groups(of_columns, SIXTEEN, output, (left, v, chunk, 0, 8 * step))

    @device
    def accumulate(output, weights, v, chunk):
        """output += weights V, the weights in registers."""
        return chain(eight_weights, 4, weights, output, (v, chunk))

    @device
    def operand(weights):
        return weights

    @device
    def store_piece(i, numbers, rest):
        """16 columns of all rows to shared memory."""
        staged, chunk, _ = rest
        lane = i32(thread() % 32)
        for j in range(8):
            row, unit = j // 2 % 2 * 8 + lane // 4, 4 * i + j // 4 * 2 + lane % 4 // 2
            at = staged + (unit >> 3) * chunk + swizzled(row, unit & 7)
            store_word(at + (lane % 2 * 2 + j % 2) * 4, as_int(numbers[j]))

    # Of infinity the lower part is NaN, and so are its products. So a row whose sum is not finite is summed up again,
    # and its output after that, where it is not finite, as that of any row (kernels/softmax.py).

    @device
    def score_carefully(p, b, h, row, key):
        """In base 2, from memory."""
        q, k, x = row_address(p.q, b, h, row), row_address(p.k, b, h // GQA_GROUP, key), ZERO
        for d in range(HEAD_DIM):
            x += load(F, q, d) * load(F, k, d)
        return modify(x * np.float32(p.softmax_scale), PARTIAL, b, h, row, row + offset_of(p, b), key, p) * LOG2E

    @device
    def row_carefully(j, rest):
        """Reference and sum of a lane's row, which four lanes share: the sum is of every fourth key."""
        p, at = rest
        b, h, row = I(at[0]), I(at[1]), I(min(at[2] + row_of_lane(j), i32(p.n_q) - 1))
        n_k, top, total = keys_of(p, b), HIDDEN, ZERO
        for k in range(I(thread() % 4), n_k, 4):
            top = greater(top, score_carefully(p, b, h, row, k))
        lanes_sync()
        top = greater(top, across(top, 1))
        top = greater(top, across(top, 2))
        shift = if_any(top, 0)
        for k in range(I(thread() % 4), n_k, 4):
            total += exp2_fast(score_carefully(p, b, h, row, k) - shift)
        lanes_sync()
        return top, total

    @device
    def is_infinite(j, so_far, l):
        return so_far or not abs(l[j]) < INFINITE


@device
def finite_sums(p, at, m, l):
    """References and sums of a lane's rows; done again where splitting has made infinity NaN."""
    if IS_FLOAT32:
        if any_lane(repeat(is_infinite, ROWS, False, l)):
            rows = listed(row_carefully, ROWS, (p, at))
            m, l = alike(first_of, rows, 0), alike(second_of, rows, 0)
    return m, l

# parts: common/fragment
# TF32x3: float32 by mma.sync in TF32, which has 11 significant bits. Each operand is the sum of two TF32 values, and a
# product is the sum of the three larger of their four products (Ootomo and Yokota 2022, arXiv 2203.03341). The product
# that is left out, up to 2^-22 of the result, averages out in long sums. Tensor cores round their sums towards zero; so
# each step starts from zero, and FADD, which rounds to nearest, adds it to the accumulator.
#
# A step has 8 columns, as many bytes as 16 columns of 16-bit elements, so the addresses are those of mma.py. A warp has
# 16 rows. ldmatrix cannot transpose 32-bit elements: a lane takes rows 2t and 2t + 1 of B in place of t and t + 4, for
# which P in registers is an A operand, and its words come from all banks.

if IS_FLOAT32:
    mma_sync = mma("float32")
    load_f32 = load_from("shared", types.float32)

    @device
    def high_of(word, _):
        """The nearest TF32 value; the instruction ignores the last 13 bits."""
        return u32(u32(word + u32(0x1000)) & u32(0xFFFFE000))

    @device
    def low_of(word, _):
        return u32(as_int(as_float(i32(word)) - as_float(i32(high_of(word, 0)))))

    @device
    def word_of(x, _):
        return u32(as_int(x))

    @device
    def split_tf32(words):
        return alike(high_of, words, 0) + alike(low_of, words, 0)

    @device
    def mma_8_columns(sums, left, b0, b1, c0, c1):
        """8 columns: high and low part of the A operand, high and low part of the B operand."""
        high, zeros = part(left, 0, 4), (ZERO, ZERO, ZERO, ZERO)
        x = mma_sync(zeros, part(left, 4, 4), b0, b1)
        return both(add, sums, mma_sync(mma_sync(x, high, c0, c1), high, b0, b1))

    @device
    def mma_16_columns(sums, left, right):
        b = split_tf32(right)
        a = mma_8_columns(part(sums, 0, 4), left, b[0], b[1], b[4], b[5])
        return a + mma_8_columns(part(sums, 4, 4), left, b[2], b[3], b[6], b[7])

    @device
    def load_a(at):
        return split_tf32(ldmatrix_x4(at))

    @device
    def right_word(e, at):
        return word_of(load_f32((at ^ (e // 2 * 32 + e % 2 * 16)) + e % 2 * CHUNK_ROW), 0)

    @device
    def mma_columns_nn(i, sums, rest):
        """sums += left b for 16 columns of b and 8 of its rows from `row` on."""
        left, b, chunk_b, _, row = rest
        lane = thread() % 32
        at = b + swizzled(lane % 4 * 2, lane // 16) + lane // 4 % 4 * 4
        at = (at ^ i % 2 * 64) + i // 2 * chunk_b + row * CHUNK_ROW
        return mma_16_columns(sums, left, listed(right_word, 4, at))

    @device
    def mma_step_rs(step, p_tile, output, rest):
        v, chunk = rest
        left = split_tf32(alike(word_of, (p_tile[0], p_tile[2], p_tile[1], p_tile[3]), 0))
        return groups(mma_columns_nn, SIXTEEN, output, (left, v, chunk, 0, 8 * step))

    @device
    def gemm_rs(output, p_tile, v, chunk):
        """output += P V, with P in registers."""
        return chain(mma_step_rs, 4, p_tile, output, (v, chunk))

    @device
    def to_operand(fragment):
        return fragment

    @device
    def store_o_fragment(i, fragment, rest):
        """16 columns of all rows to shared memory."""
        staged, chunk, _ = rest
        lane = i32(thread() % 32)
        for j in range(8):
            row, vec = j // 2 % 2 * 8 + lane // 4, 4 * i + j // 4 * 2 + lane % 4 // 2
            at = staged + (vec >> 3) * chunk + swizzled(row, vec & 7)
            store_word(at + (lane % 2 * 2 + j % 2) * 4, as_int(fragment[j]))

    # The low part of an infinity is NaN, and so are its products. A row whose sum is not finite is recomputed, and its
    # output after that, where it is not finite (common/softmax.py).

    @device
    def score_nonfinite(p, b, h, row, key):
        """The modified score of a pair in base 2, from Q and K."""
        q, k, x = row_address(p.q, b, h, row), row_address(p.k, b, h // GQA_GROUP, key), ZERO
        for d in range(HEAD_DIM):
            x += load(F, q, d) * load(F, k, d)
        position = row + seq_info(p, b).q_position
        return modify(x * np.float32(p.softmax_scale), PARTIAL, b, h, row, position, key, p) * LOG2E

    @device
    def row_nonfinite(j, rest):
        """Row maximum and row sum of a lane's row, which four lanes share: the sum of every fourth key."""
        p, at = rest
        b, h, row = I(at[0]), I(at[1]), I(min(at[2] + row_of_lane(j), i32(seq_info(p, I(at[0])).n_q) - 1))
        n_k, row_max, total = seq_info(p, b).n_k, HIDDEN, ZERO
        for k in range(I(thread() % 4), n_k, 4):
            row_max = greater(row_max, score_nonfinite(p, b, h, row, k))
        lanes_sync()
        row_max = greater(row_max, across(row_max, 1))
        row_max = greater(row_max, across(row_max, 2))
        finite_max = shift_of(row_max, 0)
        for k in range(I(thread() % 4), n_k, 4):
            total += exp2_fast(score_nonfinite(p, b, h, row, k) - finite_max)
        lanes_sync()
        return row_max, total

    @device
    def is_not_finite(j, so_far, l):
        return so_far or not abs(l[j]) < INFINITE


@device
def finite_sums(p, at, m, l):
    """Row references and row sums of a lane's rows, recomputed where TF32x3 has made NaN of inf."""
    if IS_FLOAT32:
        if any_lane(repeat(is_not_finite, ROWS, False, l)):
            rows = listed(row_nonfinite, ROWS, (p, at))
            m, l = alike(first_of, rows, 0), alike(second_of, rows, 0)
    return m, l

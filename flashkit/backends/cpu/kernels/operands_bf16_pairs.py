"""Operands of the products as bf16 pairs (micro/bf16_pairs.py): the functions of operands.py for bfloat16 that is not
widened. specialise.py puts this text before the kernels'.

A word holds two bfloat16 that follow each other along the summed axis. It passes for float32 where only its address
counts.
"""

K_PACK = 2


@njit(**options)
def begin_products(args):
    call_without_arguments(args[BEGIN_PRODUCTS])


@njit(**options)
def end_products(args):
    call_without_arguments(args[END_PRODUCTS])


@njit(**options)
def padded(n):
    """Packing writes whole squares of 16 words."""
    return (n + 15) // 16 * 16


@njit(**options)
def load_tile(args, source, address):
    """Rows as words: in place, or copied to `address` with zeros up to a multiple of LEFT_WORDS."""
    count, width = source.shape
    words = ((width + 1) // 2 + args[LEFT_WORDS] - 1) // args[LEFT_WORDS] * args[LEFT_WORDS]
    if width == 2 * words:
        return accum_tile(source.ctypes.data, count, words, source.strides[0])
    vectors = (words + args[LANES] - 1) // args[LANES]
    copy = accum_tile(address, count, words, vectors * args[LANES] * ACCUM_SIZE)
    call_pack_rows(args[PAD_ROWS], source, copy)
    return copy


@njit(**options)
def load_tile_t(args, source, address):
    """Rows as columns of a left operand: pairs of rows."""
    count, width = source.shape
    words = (count + 1) // 2
    target = accum_tile(address, width, words, padded(words) * ACCUM_SIZE)
    call_pack_rows(args[PACK_ROWS_T], source, target)
    return target


@njit(**options)
def pack_tile(args, source, address):
    """Rows as a right operand: pairs of rows."""
    count, width = source.shape
    target = accum_tile(address, (count + 1) // 2, width, padded(width) * ACCUM_SIZE)
    call_pack_rows(args[PACK_ROWS], source, target)
    return target


@njit(**options)
def load_query(source, target):
    """A row of Q for decoding, padded with zeros."""
    halves = vector(target.ctypes.data, K_PACK * len(target), STORAGE_SIZE, STORAGE)
    for i in range(len(halves)):
        halves[i] = source[i] if i < len(source) else 0


@njit(**options)
def attends_at_once(args):
    """Whether attend_at_once does all that unmodified tiles need."""
    return args[DROPOUT] == 0 and args[HAS_SCORE] == 0


@njit(**options)
def attend_at_once(args, count, q, q_panel, k, v_t, scores, m, l, o, o_panel):
    """All panels of queries against a tile that all of them see. From q on addresses and bytes, but for k and v_t."""
    columns = (count + args[LANES] - 1) // args[LANES] * args[LANES]
    call_attend_bf16_pairs(
        args[ATTEND_BF16_PAIRS], columns, args[PANEL], q, q_panel, k, v_t, scores, m, l, o, o_panel, k.shape[1],
        args[SOFTMAX_SCALE_LOG2],
    )  # fmt: skip


@njit(**options)
def online_softmax(args, s_t, m, l, o_acc):
    """S^T to P^T as bf16 pairs, or in float32 where dropout follows, which P^T is rounded after."""
    if args[DROPOUT] == 0:
        call_online_softmax_bf16_pairs(args[ONLINE_SOFTMAX_BF16_PAIRS], s_t, m, l, o_acc, args[SOFTMAX_SCALE_LOG2])
    else:
        call_online_softmax(args[ONLINE_SOFTMAX], s_t, m, l, o_acc)


@njit(**options)
def halves(words):
    """The numbers of words: (rows, columns, 2)."""
    rows, columns = words.shape
    return tensor3(words.ctypes.data, rows, columns, 2, words.strides[0], words.strides[1], STORAGE_SIZE, STORAGE)


@njit(**options)
def nonfinite_gemm_pairs(a, b, c):
    """c += a @ b over halves of words; a zero in `b` skips its term, so that 0 * NaN and 0 * inf count as 0."""
    for k in range(b.shape[0]):
        for half in range(2):
            for j in range(b.shape[1]):
                y = widen(b[k, j, half])
                if y != 0:
                    for i in range(a.shape[0]):
                        c[i, j] += widen(a[i, k, half]) * y


@njit(**options)
def accumulate(args, v_t, p_t, count, o_acc, nonfinite):
    """O^T += V^T P^T over `count` keys. p_t: bf16 pairs, or float32 after dropout."""
    words, columns = (count + 1) // 2, o_acc.shape[1]
    pairs = accum_tile(p_t.ctypes.data, words, columns, p_t.strides[0])
    if args[DROPOUT] != 0:
        call_round_bf16_pairs(args[ROUND_BF16_PAIRS], p_t, pairs, 0, 0)
    if nonfinite:
        nonfinite_gemm_pairs(halves(v_t), halves(pairs), o_acc)
    else:
        call_gemm(args[GEMM_ADD], v_t, pairs, o_acc)


@njit(**options)
def zero_dkv(address, count, width, row_bytes):
    """The accumulator of dK^T or dV^T of a key tile, set to 0. Transposed, so that P and dS are right operands."""
    acc = accum_tile(address, width, count, row_bytes)
    acc[:] = 0
    return acc


@njit(**options)
def store_dkv(args, acc, target, address):
    """Transpose and round dK or dV of a key tile. Returns whether all of it is finite."""
    count, lanes = target.shape[0], args[LANES]
    check = accum_row(address, lanes)
    ones = accum_row(address + lanes * ACCUM_SIZE, count)
    check[:], ones[:] = 0, 1
    call_unpack_transposed(args[UNPACK_TRANSPOSED], acc, target, ones, check)
    finite = True
    for i in range(lanes):
        finite &= check[i] == 0
    return finite


@njit(**options)
def _rounds_at_once(args):
    """Whether nothing reads P and dS between the softmax and their rounding."""
    return args[VISIT_DS] == 0 and args[DROPOUT] == 0


@njit(**options)
def softmax_backward(args, s, dp, lse, delta, address):
    """S to P and dP to dS as bf16 pairs; dS also as rows at `address`, where nothing reads them before."""
    if _rounds_at_once(args):
        row_bytes = args[BLOCK_K] * STORAGE_SIZE
        call_softmax_backward_bf16_pairs(
            args[SOFTMAX_BACKWARD_BF16_PAIRS], s, dp, lse, delta, args[SCALE], address, row_bytes
        )  # fmt: skip
    else:
        call_softmax_backward(args[SOFTMAX_BACKWARD], s, dp, lse, delta, args[SCALE])


@njit(**options)
def _add_dkv(args, tile, rows, acc, address, nonfinite):
    """acc += rows^T tile, summed over the rows. tile: P or dS in float32, rounded to bf16 pairs in place."""
    count, n = tile.shape
    words, width = (count + 1) // 2, acc.shape[0]
    pairs = accum_tile(tile.ctypes.data, words, n, tile.strides[0])
    source = matrix(rows.ctypes.data, count, width, rows.strides[0], STORAGE_SIZE, STORAGE)
    rows_t = accum_tile(address, width, words, padded(words) * ACCUM_SIZE)
    call_pack_rows(args[PACK_ROWS_T], source, rows_t)
    if nonfinite:
        nonfinite_gemm_pairs(halves(rows_t), halves(pairs), acc)
    else:
        call_gemm(args[GEMM_ADD], rows_t, pairs, acc)


@njit(**options)
def accumulate_gradients(args, p, ds, q, do, k, dq, dk, dv, address, nonfinite):
    """dV^T += dO^T P, dK^T += Q^T dS, dQ += dS K. `address`: scratch memory for dS and one transposed operand."""
    rows, n = ds.shape
    row_bytes = args[BLOCK_K] * STORAGE_SIZE
    if not _rounds_at_once(args):
        call_round_bf16_pairs(args[ROUND_BF16_PAIRS], p, p, 0, 0)
        call_round_bf16_pairs(args[ROUND_BF16_PAIRS], ds, ds, address, row_bytes)
    if n % 2 != 0:
        stored = matrix(address, rows, n + 1, row_bytes, STORAGE_SIZE, STORAGE)
        for i in range(rows):
            stored[i, n] = 0
    ds_words = accum_tile(address, rows, (n + 1) // 2, row_bytes)
    transposed = address + padded(rows) * row_bytes
    _add_dkv(args, p, do, dv, transposed, nonfinite)
    _add_dkv(args, ds, q, dk, transposed, nonfinite)
    if nonfinite:
        nonfinite_gemm_pairs(halves(k.T), halves(ds_words.T), dq.T)
    else:
        call_gemm(args[GEMM_ADD], ds_words, k, dq)

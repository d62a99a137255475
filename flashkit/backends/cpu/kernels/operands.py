"""Operands of the products in the accumulators' dtype, and the sums over them. specialise.py puts this text before the
kernels'; operands_bf16_pairs.py takes its place where bfloat16 is multiplied in pairs.
"""

K_PACK = 1
"""Elements along the summed axis in one element of a packed operand."""


@njit(**options)
def begin_products(args):
    """Before the first product of a kernel."""


@njit(**options)
def end_products(args):
    """After the last."""


@njit(**options)
def padded(n):
    """Rows of scratch memory for a head dim."""
    return n


@njit(**options)
def load_tile(args, source, address):
    """Rows as a left operand: in place, or widened into scratch memory at `address`."""
    count, width = source.shape
    if IN_PLACE:
        return accum_tile(source.ctypes.data, count, width, source.strides[0])
    target = accum_tile(address, count, width, width * ACCUM_SIZE)
    for i in range(count):
        for j in range(width):
            target[i, j] = widen(source[i, j])
    return target


@njit(**options)
def load_tile_t(args, source, address):
    """Rows as columns of a left operand."""
    return load_tile(args, source, address).T


@njit(**options)
def pack_tile(args, source, address):
    """Rows as a right operand."""
    return load_tile(args, source, address)


@njit(**options)
def load_query(source, target):
    """A row of Q for decoding, padded with zeros."""
    for i in range(len(source)):
        target[i] = widen(source[i])
    for i in range(len(source), len(target)):
        target[i] = 0


@njit(**options)
def attends_at_once(args):
    """Whether attend_at_once does all that unmodified tiles need."""
    return False


@njit(**options)
def attend_at_once(args, count, q, q_panel, k, v_t, scores, m, l, o, o_panel):
    """All panels of queries against a tile of keys, of which each query sees all, by one micro-kernel."""


@njit(**options)
def online_softmax(args, s_t, m, l, o_acc):
    """S^T to P^T = e^(S^T - m). m follows the maximum, and rescales l and o_acc, only beyond a threshold."""
    call_online_softmax(args[ONLINE_SOFTMAX], s_t, m, l, o_acc)


@njit(**options)
def accumulate(args, v_t, p_t, count, o_acc, nonfinite):
    """O^T += V^T P^T over `count` keys."""
    if nonfinite:
        nonfinite_gemm(p_t.T, v_t.T, o_acc.T)
    else:
        call_gemm(args[GEMM_ADD], v_t, p_t, o_acc)


@njit(**options)
def zero_dkv(address, count, width, row_bytes):
    """The accumulator of dK or dV of a key tile, set to 0."""
    acc = accum_tile(address, count, width, width * ACCUM_SIZE)
    acc[:] = 0
    return acc


@njit(**options)
def store_dkv(args, acc, target, address):
    """Round dK or dV of a key tile. Returns whether all of it is finite."""
    return store_rounded(acc, target)


@njit(**options)
def softmax_backward(args, s, dp, lse, delta, address):
    """S to P = e^(S - LSE), dP to dS = scale * P * (dP - delta)."""
    call_softmax_backward(args[SOFTMAX_BACKWARD], s, dp, lse, delta, args[SCALE])


@njit(**options)
def _gemm_add(args, a, b, c, nonfinite):
    """c += a @ b."""
    if nonfinite:
        nonfinite_gemm(a, b, c)
    else:
        call_gemm(args[GEMM_ADD], a, b, c)


@njit(**options)
def accumulate_gradients(args, p, ds, q, do, k, dq, dk, dv, address, nonfinite):
    """dV += P^T dO, dK += dS^T Q, dQ += dS K."""
    _gemm_add(args, p.T, do, dv, nonfinite)
    _gemm_add(args, ds.T, q, dk, nonfinite)
    _gemm_add(args, ds, k, dq, nonfinite)

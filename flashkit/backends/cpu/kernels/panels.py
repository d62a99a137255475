"""Panels of queries, whose score tiles have queries along the vector lanes: how they are loaded, multiplied by keys and
stored. specialise.py puts this text before kernels/forward.py and kernels/jvp.py.
"""

import numpy as np
from numba import njit

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.micro_calls import call_gemm, call_pack_transposed, call_unpack_transposed
from flashkit.backends.cpu.tile_ops import scale_tile
from flashkit.backends.cpu.views import double_from_bits


@njit(**options)
def load_q(args, q, q_t):
    """Transpose and scale; columns without a query become 0."""
    call_pack_transposed(args[PACK_TRANSPOSED], q, q_t, args[PACK_SCALE])
    packed = (q.shape[0] + args[LANES] - 1) // args[LANES] * args[LANES]
    for d in range(q_t.shape[0]):
        for i in range(packed, q_t.shape[1]):
            q_t[d, i] = 0


@njit(**options)
def scores(args, k, q_t, s_t):
    """S^T = K Q^T."""
    call_gemm(args[GEMM], k, q_t, s_t)
    scale_tile(args, s_t)


@njit(**options)
def epilogue(args, seq, b, h, first, count, o_acc, m, l, check):
    """Divide by l, transpose and round; store O and the LSE. Returns whether all of O is finite."""
    out = q_rows(args, OUT, seq, b, h, first, count, args[DIM_V])
    lse = q_stats(args, LSE, seq, b, h, first, count)
    scale = ACCUM(double_from_bits(args[SOFTMAX_SCALE]))
    for i in range(count):
        row_max, row_sum, rescale = m[i] * scale, l[i], ACCUM(1)
        if args[SINKS] != 0:
            # The sink is one more logit in the sum, without a value.
            sink = accum_row(args[SINKS], args[HEADS])[h]
            if sink != -np.inf:
                before = row_max
                row_max = max(before, sink)
                rescale = np.exp(before - row_max)
                row_sum = row_sum * rescale + np.exp(sink - row_max)
        if row_sum == 0:  # no key is visible
            lse[i], l[i] = -np.inf, 0
        else:
            lse[i], l[i] = row_max + np.log(row_sum), rescale / row_sum
    for i in range(args[LANES]):
        check[i] = 0
    call_unpack_transposed(args[UNPACK_TRANSPOSED], o_acc, out, l, check)
    finite = True
    for i in range(args[LANES]):
        finite &= check[i] == 0
    return finite

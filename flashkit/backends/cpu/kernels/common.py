"""Views in a kernel's dtypes: tiles in scratch memory, rows of the tensors. specialise.py puts this text before the
kernels' own.

Names that no import brings come from the head that specialise.py writes before all texts: STORAGE and STORAGE_SIZE (the
dtype of the operands), ACCUM and ACCUM_SIZE (of the accumulators), IN_PLACE (whether they are the same), widen, narrow;
KV_STORAGE, KV_SIZE and widen_kv of keys and values, SCALED (whether these have 8 bits and scales), and KV_UNIT
(numbers over what widen_kv makes of them).
"""

import numpy as np
from numba import njit

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.seq_info import row_stats, tokens
from flashkit.backends.cpu.views import matrix, vector


@njit(**options)
def accum_tile(address, rows, columns, row_bytes):
    return matrix(address, rows, columns, row_bytes, ACCUM_SIZE, ACCUM)


@njit(**options)
def accum_row(address, n):
    return vector(address, n, ACCUM_SIZE, ACCUM)


@njit(**options)
def q_rows(args, tensor, seq, b, h, first, count, width):
    """Rows of a tensor that has a row per query, in place: Q, O, dO, dQ."""
    return tokens(args, tensor, b, h, seq.row_offset + first, count, width, STORAGE_SIZE, STORAGE)


@njit(**options)
def q_stats(args, tensor, seq, b, h, first, count):
    """A number per query, in place: LSE, dLSE, delta."""
    return row_stats(args, tensor, seq, b, h, first, count, ACCUM)


@njit(**options)
def store_rounded(acc, target):
    """Round an accumulated tile. Returns whether all of it is finite."""
    finite = True
    for i in range(target.shape[0]):
        for j in range(target.shape[1]):
            finite &= np.isfinite(acc[i, j])
            target[i, j] = narrow(acc[i, j])
    return finite

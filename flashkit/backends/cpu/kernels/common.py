"""Views in a kernel's dtypes: tiles in scratch memory, rows of the tensors. specialise.py puts this text before the
kernels' own, and its imports serve all of them.

Names that no import brings come from the head that specialise.py writes before all texts: STORAGE and STORAGE_SIZE (the
dtype of the operands), ACCUM and ACCUM_SIZE (of the accumulators), IN_PLACE (whether they are the same), widen, narrow;
KV_STORAGE, KV_SIZE and widen_kv of keys and values, SCALED (whether these have 8 bits and scales), and KV_UNIT
(numbers over what widen_kv makes of them).
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.micro_calls import *
from flashkit.backends.cpu.scratch import backward_layout, decode_layout, forward_layout, partial_layout
from flashkit.backends.cpu.seq_info import row_stats, seq_info, tokens
from flashkit.backends.cpu.tile_ops import (
    dropout, entropy_sum, modify, moved, nonfinite_gemm, row_statistics, scale_tile, visit_ds,
)  # fmt: skip
from flashkit.backends.cpu.tile_scheduler import next_kv_heads, next_kv_split, next_q_tile, stopped
from flashkit.backends.cpu.tiling import next_group, next_run
from flashkit.backends.cpu.views import atomic_arrive, double_from_bits, integer_at, matrix, prefetch, tensor3, vector


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

"""Where one sequence of a batch lies and how long it is. Only this module reads sizes, lengths and offsets."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .arguments import CU_SEQLENS_K, CU_SEQLENS_Q, KV_LENGTHS, N_K, N_Q, Q_OFFSETS
from .functions import options
from .views import integer_at, matrix, vector


class SeqInfo(NamedTuple):
    """Sizes and offsets of one (batch entry, head); integers of 64 bits."""

    row_offset: Any  # first row of Q, O and their gradients
    n_q: Any
    key_offset: Any  # first row of K, V and their gradients
    n_k: Any
    first_position: Any  # position of row 0 among the keys, q_offset


@njit(**options)
def seq_info(args: Any, b: int, h: int) -> SeqInfo:
    row_offset, n_q, key_offset = np.int64(0), args[N_Q], np.int64(0)
    if args[CU_SEQLENS_Q] != 0:
        row_offset = integer_at(args[CU_SEQLENS_Q] + 8 * b)
        n_q = integer_at(args[CU_SEQLENS_Q] + 8 * (b + 1)) - row_offset
    if args[CU_SEQLENS_K] != 0:
        key_offset = integer_at(args[CU_SEQLENS_K] + 8 * b)
    return SeqInfo(row_offset, n_q, key_offset, keys_of(args, b), integer_at(args[Q_OFFSETS] + 8 * b))


@njit(**options)
def keys_of(args: Any, b: int) -> Any:
    """Keys of a batch entry: never more than there are."""
    return min(max(integer_at(args[KV_LENGTHS] + 8 * b), 0), args[N_K])


@njit(**options)
def tokens(
    args: Any, tensor: int, b: int, h: int, first: int, count: int, width: int, itemsize: int, dtype: Any
) -> Any:
    """View of tokens first ... first + count - 1 of one head of a tensor: (count, width)."""
    address = args[tensor] + b * args[tensor + 1] + h * args[tensor + 2] + first * args[tensor + 3]
    return matrix(address, count, width, args[tensor + 3], itemsize, dtype)


@njit(**options)
def row_stats(args: Any, tensor: int, seq: SeqInfo, b: int, h: int, first: int, count: int, dtype: Any) -> Any:
    """View of one number per row of a head: LSE, dLSE, delta. (count,)"""
    row = seq.row_offset + first
    address = args[tensor] + b * args[tensor + 1] + h * args[tensor + 2] + row * args[tensor + 3]
    return vector(address, count, args[tensor + 3], dtype)

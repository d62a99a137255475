"""What the kernels do to a tile of scores between the products: scale, modify, dropout; and the products of the
non-finite fallback.

`args` is the argument block (arguments.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ...mods import dropout as philox
from . import arguments as at
from .functions import options
from .micro_calls import call_modify, call_transpose, call_visit_ds
from .seq_info import SeqInfo
from .views import double_from_bits

MULTIPLIER_0, MULTIPLIER_1 = map(np.uint64, philox.MULTIPLIERS)
WEYL_0, WEYL_1 = map(np.uint64, philox.WEYL)
ROUNDS = philox.ROUNDS
LOW32, SHIFT32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit(**options)
def scale_tile(args: Any, tile: Any) -> None:
    """Multiply scores by the part of the scale that neither packing nor the softmax applies."""
    factor = tile.dtype.type(double_from_bits(args[at.TILE_SCALE]))
    if factor != 1:
        for i in range(tile.shape[0]):
            for j in range(tile.shape[1]):
                tile[i, j] *= factor


@njit(**options)
def transpose(micro_kernel: int, source: Any, target: Any) -> None:
    """target = source^T, by the micro-kernel where rows are contiguous."""
    if source.strides[1] == source.itemsize:
        call_transpose(micro_kernel, source, target)
    else:
        for j in range(target.shape[0]):
            for i in range(target.shape[1]):
                target[j, i] = source[i, j]


@njit(**options)
def modify(args: Any, seq: SeqInfo, state: int, tile: Any, extra: int, b: int, h: int, row0: int, k0: int) -> None:
    """Modify and mask a tile in place; masked pairs become -inf. extra: memory for transposed arrays or slopes."""
    if args[at.MODIFY] != 0 and (state == at.PARTIAL or args[at.HAS_SCORE] != 0):
        call_modify(args[at.MODIFY], tile, extra, b, h, row0, row0 + seq.first_position, k0, args[at.VALUES])


@njit(**options)
def visit_ds(args: Any, seq: SeqInfo, p: Any, ds: Any, slopes: int, b: int, h: int, row0: int, k0: int) -> None:
    """Where dS of a tile is complete: the chain rule, and gradients by values. slopes: what `modify` stored."""
    if args[at.VISIT_DS] != 0:
        q0, values = row0 + seq.first_position, args[at.VALUES]
        call_visit_ds(args[at.VISIT_DS], p, ds, slopes, b, h, row0, q0, k0, values, args[at.NONFINITE])


@njit(**options)
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """flashkit.mods.dropout.philox on one counter; 32-bit words in 64-bit integers."""
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> SHIFT32) ^ c1 ^ k0, p1 & LOW32, (p0 >> SHIFT32) ^ c3 ^ k1, p0 & LOW32
        k0, k1 = (k0 + WEYL_0) & LOW32, (k1 + WEYL_1) & LOW32
    return c0, c1, c2, c3


@njit(**options)
def dropout(args: Any, tile: Any, keys_first: bool, b: int, h: int, row0: int, k0: int) -> None:
    """Multiply kept pairs by 1 / (1 - p), set dropped ones to 0. keys_first: the tile's axes are (keys, rows)."""
    seed, limit = np.uint64(args[at.SEED]), np.uint64(args[at.DROPOUT_THRESHOLD])
    key0, key1 = seed & LOW32, seed >> SHIFT32
    factor = tile.dtype.type(double_from_bits(args[at.DROPOUT_SCALE]))
    keys, rows = (tile.shape[0], tile.shape[1]) if keys_first else (tile.shape[1], tile.shape[0])
    row0, k0 = row0 + args[at.DROPOUT_ROW], k0 + args[at.DROPOUT_KEY]
    c2, c3 = np.uint64(h + args[at.DROPOUT_HEAD]), np.uint64(b)
    for group in range(k0 // 4, (k0 + keys + 3) // 4):
        c0 = np.uint64(group) & LOW32
        for i in range(rows):
            words = _philox(c0, np.uint64(row0 + i), c2, c3, key0, key1)
            for lane in range(4):
                j = group * 4 + lane - k0
                if 0 <= j < keys:
                    kept = words[lane] >= limit
                    if keys_first:
                        tile[j, i] = tile[j, i] * factor if kept else 0
                    else:
                        tile[i, j] = tile[i, j] * factor if kept else 0


@njit(fastmath={"reassoc"}, **options)  # sums by vectors
def entropy_sum(s: Any, p: Any, m: Any) -> Any:
    """The sum of P (S - m) over a row."""
    lowest, total = s.dtype.type(-1e30), s.dtype.type(0)  # instead of -inf, which P = 0 makes NaN
    for j in range(len(s)):
        below = s[j] - m
        total += p[j] * (below if below > lowest else lowest)
    return total


@njit(**options)
def moved(total: Any, row_sum: Any, before: Any, m: Any) -> Any:
    """A sum of P (S - m), and of P, relative to another m."""
    return total * 0 if row_sum == 0 else np.exp(before - m) * (total + (before - m) * row_sum)


@njit(**options)
def row_statistics(m: Any, l: Any, total: Any, top: Any, sink: Any) -> Any:
    """Entropy and largest score of a row, from row_max, row_sum and the sum of P (S - m)."""
    if sink != -np.inf:  # one more outcome
        row_max = max(m, sink)
        total = moved(total, l, m, row_max)
        l = (l * 0 if l == 0 else np.exp(m - row_max) * l) + np.exp(sink - row_max)
        total += np.exp(sink - row_max) * (sink - row_max)
    if l == 0:
        return total * 0, top
    entropy = np.log(l) - total / l
    return entropy, top if l == l else l


@njit(**options)
def nonfinite_gemm(a: Any, b: Any, c: Any) -> None:
    """c += a @ b; a zero in `a` skips its term, so that 0 * NaN and 0 * inf count as 0."""
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            x = a[i, k]
            if x != 0:
                for j in range(b.shape[1]):
                    c[i, j] += x * b[k, j]

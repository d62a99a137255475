"""What forward and backward share: views of the operands, states of tiles, dropout and the careful sum.

These run inside the kernels; `args` is the argument block (arguments.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ...mods import dropout as philox
from .arguments import (
    CLASSIFY,
    FULL,
    HAS_SCORE,
    KEPT_SCALE,
    LENGTHS,
    MAX_GROUP,
    MODIFY,
    N_K,
    OFFSETS,
    PARTIAL,
    SEED,
    STRIP,
    THRESHOLD,
    TILE_SCALE,
    VALUES,
)
from .functions import options
from .memory import call_classify, call_modify, call_transpose, double_from_bits, integer_at, matrix

MULTIPLIER_0, MULTIPLIER_1 = map(np.uint64, philox.MULTIPLIERS)
WEYL_0, WEYL_1 = map(np.uint64, philox.WEYL)
ROUNDS = philox.ROUNDS
LOW32, SHIFT32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit(**options)
def tokens(
    args: Any, tensor: int, b: int, h: int, first: int, count: int, width: int, itemsize: int, dtype: Any
) -> Any:
    """Tokens first ... first + count - 1 of one head of an operand, in place: (count, width)."""
    at = args[tensor] + b * args[tensor + 1] + h * args[tensor + 2] + first * args[tensor + 3]
    return matrix(at, count, width, args[tensor + 3], itemsize, dtype)


@njit(**options)
def keys_of(args: Any, b: int) -> int:
    """Keys of a batch entry, never more than there are."""
    return min(max(integer_at(args[LENGTHS] + 8 * b), 0), args[N_K])


@njit(**options)
def offset_of(args: Any, b: int) -> int:
    return integer_at(args[OFFSETS] + 8 * b)


@njit(**options)
def tile_state(args: Any, b: int, h: int, row0: int, row1: int, k0: int, k1: int) -> Any:
    """EMPTY, PARTIAL or FULL for rows row0 ... row1 - 1 and keys k0 ... k1 - 1."""
    if args[CLASSIFY] == 0:
        return FULL
    offset = offset_of(args, b)
    return call_classify(
        args[CLASSIFY], b, h, row0, row1 - 1, row0 + offset, row1 - 1 + offset, k0, k1 - 1, args[VALUES]
    )


@njit(**options)
def next_group(
    args: Any, b: int, h: int, first: int, last: int, tile: int, tiles: int, block: int, n: int, along_keys: bool
) -> Any:
    """The longest aligned group of tiles from `tile` on with one state: (its end, the state).

    The tiles, `block` wide and `n` elements in all, lie along the keys or the rows; first ... last - 1 is the range of
    the other axis. Groups of a power of two are tried from large to small, so a long run of EMPTY or FULL tiles costs
    a few looks at the mask.
    """
    size = args[MAX_GROUP]
    while tile % size != 0:
        size //= 2
    while True:
        end = min(tile + size, tiles)
        start, stop = tile * block, min(end * block, n)
        if along_keys:
            state = tile_state(args, b, h, first, last, start, stop)
        else:
            state = tile_state(args, b, h, start, stop, first, last)
        if state != PARTIAL or size == 1:
            return end, state
        size //= 2


@njit(**options)
def next_run(args: Any, b: int, h: int, first: int, last: int, start: int, stop: int, n: int, along_keys: bool) -> Any:
    """The longest run of strips from `start` on with one state, inside a PARTIAL tile that ends at `stop`: (its end,
    the state). `n`, `first`, `last`: as in next_group.
    """
    if args[MAX_GROUP] == 1:  # a look at this mask costs as much as the strip
        if along_keys:
            return stop, tile_state(args, b, h, first, last, start, stop)
        return stop, tile_state(args, b, h, start, stop, first, last)
    strips = (stop + STRIP - 1) // STRIP
    end, state = next_group(args, b, h, first, last, start // STRIP, strips, STRIP, n, along_keys)
    while end < strips:
        following, other = next_group(args, b, h, first, last, end, strips, STRIP, n, along_keys)
        if other != state:
            break
        end = following
    return min(end * STRIP, stop), state


@njit(**options)
def scale_tile(args: Any, tile: Any) -> None:
    """Multiply scores by what neither packing nor the softmax multiplies by."""
    factor = tile.dtype.type(double_from_bits(args[TILE_SCALE]))
    if factor != 1:
        for i in range(tile.shape[0]):
            for j in range(tile.shape[1]):
                tile[i, j] *= factor


@njit(**options)
def turn(transpose: int, source: Any, target: Any) -> None:
    """target = source^T, by the micro-kernel where rows are contiguous."""
    if source.strides[1] == source.itemsize:
        call_transpose(transpose, source, target)
    else:
        for j in range(target.shape[0]):
            for i in range(target.shape[1]):
                target[j, i] = source[i, j]


@njit(**options)
def modify(args: Any, state: int, tile: Any, beside: int, b: int, h: int, row0: int, k0: int) -> None:
    """Apply score and mask modification to a tile in place; hidden pairs become -inf. `beside`: address of
    room for arrays transposed (forward) or for d score / d s (backward).
    """
    if args[MODIFY] != 0 and (state == PARTIAL or args[HAS_SCORE] != 0):
        q0 = row0 + offset_of(args, b)
        rows, columns = tile.shape
        at, row_stride = tile.ctypes.data, tile.strides[0]
        call_modify(args[MODIFY], at, beside, row_stride, rows, columns, b, h, row0, q0, k0, args[VALUES])


@njit(**options)
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """flashkit.mods.dropout.philox on one counter; 32-bit words in 64-bit integers."""
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> SHIFT32) ^ c1 ^ k0, p1 & LOW32, (p0 >> SHIFT32) ^ c3 ^ k1, p0 & LOW32
        k0, k1 = (k0 + WEYL_0) & LOW32, (k1 + WEYL_1) & LOW32
    return c0, c1, c2, c3


@njit(**options)
def drop(args: Any, tile: Any, keys_first: bool, b: int, h: int, row0: int, k0: int) -> None:
    """Multiply the tile by 1 / (1 - p) where the pair stays, by 0 (select) where it is dropped.

    The tile's axes are (keys, rows) where keys_first holds, else (rows, keys).
    """
    seed, limit = np.uint64(args[SEED]), np.uint64(args[THRESHOLD])
    key0, key1 = seed & LOW32, seed >> SHIFT32
    factor = tile.dtype.type(double_from_bits(args[KEPT_SCALE]))
    keys, rows = (tile.shape[0], tile.shape[1]) if keys_first else (tile.shape[1], tile.shape[0])
    c2, c3 = np.uint64(h), np.uint64(b)
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


@njit(**options)
def careful_product(a: Any, b: Any, c: Any) -> None:
    """c += a @ b where a zero in a leaves its term out, whatever b holds there."""
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            x = a[i, k]
            if x != 0:
                for j in range(b.shape[1]):
                    c[i, j] += x * b[k, j]


@njit(**options)
def careful_product_t(a: Any, b: Any, c: Any) -> None:
    """c += a @ b where a zero in b leaves its term out, whatever a holds there."""
    for k in range(b.shape[0]):
        for j in range(b.shape[1]):
            x = b[k, j]
            if x != 0:
                for i in range(a.shape[0]):
                    c[i, j] += a[i, k] * x

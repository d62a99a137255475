"""The tile scheduler: an atomic counter hands out work tiles, and this file says which one each number stands for.

Threads of unequal speed balance themselves, since each claims the next work tile when it is done with the last. No
result depends on which thread computed it.

Packed sequences begin at any row. The query tiles of sequence b begin at number cu_seqlens[b] // BLOCK_Q + b, which
leaves room for all of them and needs no sums over the sequences before. The numbers that stand for no tile, at most one
for each sequence, are passed over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from . import arguments as at
from .functions import options
from .views import atomic_increment, atomic_integer_at, integer_at


class WorkTile(NamedTuple):
    """A query tile of a query head, or a split of the keys of a key/value head."""

    number: int
    valid: bool  # False after the last one, and where the call is stopped
    b: int
    head: int
    block: int  # number of the query tile, or of the split


class KvWorkTile(NamedTuple):
    """A split of the keys of a key/value head, or several heads of few keys, numbered over all batch entries."""

    number: int
    valid: bool  # as above
    first: int  # heads first ... last - 1
    last: int
    split: Any


@njit(**options)
def stopped(args: Any) -> bool:
    """Whether the kernel shall end early."""
    return args[at.STOP] != 0 and atomic_integer_at(args[at.STOP]) != 0


@njit(**options)
def first_tile(args: Any, b: int) -> int:
    """Number of the first query tile of a packed sequence."""
    return integer_at(args[at.CU_SEQLENS_Q] + 8 * b) // args[at.BLOCK_Q] + b


@njit(**options)
def sequence_of(args: Any, tile: int) -> Any:
    """The packed sequence that a query tile belongs to, by bisection."""
    low, high = np.int64(0), args[at.BATCH]
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(args, middle) <= tile:
            low = middle
        else:
            high = middle
    return low


@njit(**options)
def next_q_tile(args: Any) -> WorkTile:
    """A query tile: every head's last rows, which see the most keys under a causal mask, come first (LPT)."""
    packed = args[at.CU_SEQLENS_Q] != 0
    heads = args[at.HEADS] if packed else args[at.BATCH] * args[at.HEADS]
    while True:
        number = atomic_increment(args.ctypes.data + 8 * at.TILE_COUNTER)
        valid = number < args[at.WORK_TILES] and not stopped(args)
        tile, head = args[at.Q_TILES] - 1 - number // heads, number % heads
        if not (valid and packed):
            return WorkTile(number, valid, head // args[at.HEADS], head % args[at.HEADS], tile)
        b = sequence_of(args, tile)
        block = tile - first_tile(args, b)
        begin = integer_at(args[at.CU_SEQLENS_Q] + 8 * b) + block * args[at.BLOCK_Q]
        if begin < integer_at(args[at.CU_SEQLENS_Q] + 8 * (b + 1)):
            return WorkTile(number, valid, b, head, block)


@njit(**options)
def next_kv_split(args: Any) -> WorkTile:
    """A split of a key/value head, or of the first head of several: all splits of one head follow each other."""
    number = atomic_increment(args.ctypes.data + 8 * at.TILE_COUNTER)
    heads = args[at.HEADS] // args[at.GROUP] // args[at.SERIAL_HEADS]
    head, split = number // args[at.NUM_SPLITS], number % args[at.NUM_SPLITS]
    valid = number < args[at.WORK_TILES] and not stopped(args)
    return WorkTile(number, valid, head // heads * args[at.SERIAL_ENTRIES], head % heads * args[at.SERIAL_HEADS], split)


@njit(**options)
def next_kv_heads(args: Any) -> KvWorkTile:
    """Of the keys of key/value heads, in decoding: all splits of one head follow each other."""
    number = atomic_increment(args.ctypes.data + 8 * at.TILE_COUNTER)
    valid = number < args[at.WORK_TILES] and not stopped(args)
    if args[at.NUM_SPLITS] == 1:
        first = number * args[at.HEADS_PER_TILE]
        last = min(first + args[at.HEADS_PER_TILE], args[at.BATCH] * args[at.HEADS] // args[at.GROUP])
        return KvWorkTile(number, valid, first, last, np.int64(0))
    head = number // args[at.NUM_SPLITS]
    return KvWorkTile(number, valid, head, head + 1, number % args[at.NUM_SPLITS])

"""The tile scheduler: an atomic counter hands out work tiles, and this file says which one each number stands for.

Threads of unequal speed balance themselves, since each claims the next work tile when it is done with the last. No
result depends on which thread computed it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit

from .arguments import BATCH, GROUP, HEADS, NUM_SPLITS, Q_TILES, STOP, TILE_COUNTER, WORK_TILES
from .functions import options
from .views import atomic_increment, atomic_integer_at


class WorkTile(NamedTuple):
    """A query tile of a query head, or a split of the keys of a key/value head."""

    number: int
    valid: bool  # False after the last one, and where the call is stopped
    b: int
    head: int
    block: int  # number of the query tile, or of the split


@njit(**options)
def stopped(args: Any) -> bool:
    """Whether the kernel shall end early."""
    return args[STOP] != 0 and atomic_integer_at(args[STOP]) != 0


@njit(**options)
def next_q_tile(args: Any) -> WorkTile:
    """A query tile: every head's last rows first. Under a causal mask they see the most keys, so this is the
    longest-processing-time-first (LPT) order.
    """
    number = atomic_increment(args.ctypes.data + 8 * TILE_COUNTER)
    heads = args[BATCH] * args[HEADS]
    block, head = args[Q_TILES] - 1 - number // heads, number % heads
    valid = number < args[WORK_TILES] and not stopped(args)
    return WorkTile(number, valid, head // args[HEADS], head % args[HEADS], block)


@njit(**options)
def next_kv_split(args: Any) -> WorkTile:
    """A split of a key/value head: all splits of one head follow each other."""
    number = atomic_increment(args.ctypes.data + 8 * TILE_COUNTER)
    heads_kv = args[HEADS] // args[GROUP]
    head, split = number // args[NUM_SPLITS], number % args[NUM_SPLITS]
    valid = number < args[WORK_TILES] and not stopped(args)
    return WorkTile(number, valid, head // heads_kv, head % heads_kv, split)

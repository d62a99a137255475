"""Block sparsity inside the kernels: which tiles and strips hold visible pairs. No list of tiles is stored.

`args` is the argument block (arguments.py).
"""

from __future__ import annotations

from typing import Any

from numba import njit

from .arguments import CLASSIFY, FULL, MAX_GROUP, PARTIAL, STRIP, VALUES
from .functions import options
from .micro_calls import call_classify
from .seq_info import SeqInfo


@njit(**options)
def tile_state(
    args: Any, seq: SeqInfo, b: int, h: int, first: int, last: int, start: int, stop: int, along_keys: bool
) -> Any:
    """EMPTY, PARTIAL or FULL for rows first ... last - 1 and keys start ... stop - 1, or the other way round."""
    if args[CLASSIFY] == 0:
        return FULL
    row0, row1, k0, k1 = (first, last, start, stop) if along_keys else (start, stop, first, last)
    position = seq.first_position
    return call_classify(
        args[CLASSIFY], b, h, row0, row1 - 1, row0 + position, row1 - 1 + position, k0, k1 - 1, args[VALUES]
    )


@njit(**options)
def next_group(
    args: Any, seq: SeqInfo, b: int, h: int, first: int, last: int, tile: int, tiles: int, block: int, n: int,
    along_keys: bool,
) -> Any:  # fmt: skip
    """The longest aligned group of tiles from `tile` on that have one state: (its end, the state).

    The tiles, `block` wide and `n` elements in all, lie along the keys or the rows; first ... last - 1 is the range of
    the other axis. Groups of a power of two are tried from large to small, so a long run of EMPTY or FULL tiles costs
    a few calls of `classify`.
    """
    size = args[MAX_GROUP]
    while tile % size != 0:
        size //= 2
    while True:
        end = min(tile + size, tiles)
        start, stop = tile * block, min(end * block, n)
        state = tile_state(args, seq, b, h, first, last, start, stop, along_keys)
        if state != PARTIAL or size == 1:
            return end, state
        size //= 2


@njit(**options)
def next_run(
    args: Any, seq: SeqInfo, b: int, h: int, first: int, last: int, start: int, stop: int, n: int, along_keys: bool
) -> Any:
    """The longest run of strips of one state from `start` on, in a PARTIAL tile until `stop`: (its end, the state)."""
    if args[MAX_GROUP] == 1:  # classifying a strip of this mask costs as much as computing it
        return stop, tile_state(args, seq, b, h, first, last, start, stop, along_keys)
    strips = (stop + STRIP - 1) // STRIP
    end, state = next_group(args, seq, b, h, first, last, start // STRIP, strips, STRIP, n, along_keys)
    while end < strips:
        following, other = next_group(args, seq, b, h, first, last, end, strips, STRIP, n, along_keys)
        if other != state:
            break
        end = following
    return min(end * STRIP, stop), state

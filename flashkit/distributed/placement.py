"""Which tokens a rank has: ranges of positions, in one of three orders.

contiguous: one block a rank. zigzag: of twice as many blocks as ranks, one from each end, so that with a causal mask
all ranks have equally many visible pairs. striped: every n-th token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

ORDERS = ("contiguous", "zigzag", "striped")


def ranges_of(order: str, tokens: int, rank: int, ranks: int) -> list[range]:
    """The positions of a rank's tokens, in the order of its array."""
    if order == "striped":
        return [range(rank, tokens, ranks)]
    blocks = ranks if order == "contiguous" else 2 * ranks
    ends = [tokens * n // blocks for n in range(blocks + 1)]
    own = [rank] if order == "contiguous" else [rank, 2 * ranks - 1 - rank]
    return [range(ends[n], ends[n + 1]) for n in own]


def count(ranges: Sequence[range]) -> int:
    """All tokens of these ranges."""
    return sum(map(len, ranges))


def places(ranges: Sequence[range]) -> list[slice]:
    """Where the tokens of each range are in an array that has one range after another."""
    ends = np.cumsum([0, *map(len, ranges)]).tolist()
    return [slice(first, past) for first, past in itertools.pairwise(ends)]


def along(x: Any, axis: int, where: slice | range) -> Any:
    """A view of these tokens."""
    if isinstance(where, range):
        where = slice(where.start, where.stop, where.step)
    index = [slice(None)] * x.ndim
    index[axis] = where
    return x[tuple(index)]

"""The tile lists of a block mask, found by a quadtree.

A square of tiles that is EMPTY or FULL as a whole is not divided further, and neighbouring tiles are stored as runs. A
causal mask of a million tokens takes a few thousand classifications instead of 67 million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from .tile_lists import FULL, PARTIAL, TileLists, compressed, finer, merged

Classify = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(level, group, i, j) -> classes of the squares of 2**level tiles a side, in square rows i and columns j."""

_FIRST = 1024  # squares classified before any is divided: amortizes the cost of a NumPy call
_CHUNK = 1 << 15  # squares classified at once: bounds memory to a few megabytes


def squares(classify: Classify, groups: int, tiles: tuple[int, int]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Every FULL tile once, in squares as large as possible, and every PARTIAL tile, at level 0.

    Parameters
    ----------
    classify
        Classifies squares of tiles.
    groups
        Number of independent masks, b * heads + h.
    tiles
        Rows and columns of tiles.

    Yields
    ------
    level, class, squares
        squares is int64 (3, n): group, row and column, in squares of 2**level tiles a side.
    """
    if 0 in tiles:
        return
    level = 0
    while max(tiles) > 1 << level and groups * math.prod(-(-n >> level) for n in tiles) > _FIRST:
        level += 1
    first = np.indices((groups, *(-(-n >> level) for n in tiles))).reshape(3, -1)
    stack = [(level, first)]  # depth first bounds memory
    while stack:
        level, chunk = stack.pop()
        if chunk.shape[1] > _CHUNK:
            stack.append((level, chunk[:, _CHUNK:]))
            chunk = chunk[:, :_CHUNK]
        states = classify(level, *chunk)
        yield level, FULL, chunk[:, states == FULL]
        rest = chunk[:, states == PARTIAL]
        if level == 0:
            yield level, PARTIAL, rest
        elif rest.size:
            level -= 1
            four = np.repeat(rest, 4, axis=1)
            four[1:] *= 2
            four[1:] += np.tile([[0, 0, 1, 1], [0, 1, 0, 1]], rest.shape[1])
            inside = (four[1] << level < tiles[0]) & (four[2] << level < tiles[1])
            stack.append((level, four[:, inside]))


def tile_lists(classify: Classify, groups: int, tiles: tuple[int, int], by_column: bool) -> TileLists:
    """The FULL and PARTIAL tiles on each row, or on each column, of tiles; groups, classify: see `squares`."""
    across, along = (2, 1) if by_column else (1, 2)
    lines, length = tiles[across - 1], tiles[along - 1]
    pieces: dict[int, list[np.ndarray]] = {FULL: [], PARTIAL: []}
    for level, state, square in squares(classify, groups, tiles):
        if square.size:
            runs = merged(square[0] * (-(-lines >> level)) + square[across], square[along], square[along] + 1)
            pieces[state].append(finer(runs, level, lines, length))
    return TileLists(*(compressed(pieces[state], groups * lines) for state in (FULL, PARTIAL)))

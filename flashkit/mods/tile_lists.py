"""Lists of tiles as runs of neighbouring tiles: what the loop of a kernel over the tiles of a block mask walks.

A quadtree finds them. A square of tiles that is EMPTY or FULL as a whole is not divided further, so a causal mask of a
million tokens takes a few thousand classifications instead of 67 million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Classes of a tile: no pair is visible, some may be, every pair is."""


class Runs(NamedTuple):
    """Tiles start[m] <= t < stop[m] of line n, for indptr[n] <= m < indptr[n + 1], ascending and apart."""

    indptr: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def total(self) -> int:
        """Number of tiles in all runs."""
        return int((self.stop - self.start).sum(dtype=np.int64))

    def lines(self, first: int, last: int) -> Runs:
        """The runs of the lines first <= n < last."""
        low, high = self.indptr[first], self.indptr[last]
        return Runs(self.indptr[first : last + 1] - low, self.start[low:high], self.stop[low:high])

    def expand(self) -> tuple[np.ndarray, np.ndarray]:
        """Tiles instead of runs: line n holds tiles[indptr[n]:indptr[n + 1]]; indptr int64, tiles int32."""
        lengths = (self.stop - self.start).astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        tiles = np.arange(ends[-1]) + np.repeat(self.start - ends[:-1], lengths)
        return ends[self.indptr], tiles.astype(np.int32)


class TileLists(NamedTuple):
    """The FULL tiles, which need no mask, and the PARTIAL ones."""

    full: Runs
    partial: Runs


def merged(line: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Sort runs that do not overlap and join those that touch: int64 (3, n) of line, start, stop."""
    order = np.lexsort((start, line))
    line, start, stop = line[order], start[order], stop[order]
    # One sentinel past the end, so that the last piece of each run is the one before a start.
    opens = np.ones(len(line) + 1, bool)
    opens[1:-1] = (line[1:] != line[:-1]) | (start[1:] != stop[:-1])
    return np.stack([line[opens[:-1]], start[opens[:-1]], stop[opens[1:]]])


def finer(runs: np.ndarray, level: int, lines: int, length: int) -> np.ndarray:
    """Runs of squares of 2**level tiles as runs of tiles on each of their lines."""
    line, start, stop = runs
    side = 1 << level
    group, coarse = np.divmod(line, -(-lines >> level))
    within = (coarse[:, None] << level) + np.arange(side)
    each = (within + group[:, None] * lines, (start << level)[:, None], np.minimum(stop << level, length)[:, None])
    return np.stack(np.broadcast_arrays(*each))[:, within < lines]


def compressed(pieces: list[np.ndarray], lines: int) -> Runs:
    """Compressed sparse rows of these runs."""
    line, start, stop = merged(*np.concatenate(pieces, axis=1)) if pieces else np.zeros((3, 0), np.int64)
    indptr = np.searchsorted(line, np.arange(lines + 1))
    return Runs(indptr.astype(np.int64), start.astype(np.int32), stop.astype(np.int32))


# --- the quadtree -----------------------------------------------------------------------------------------------------

Classify = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(level, group, i, j) -> classes of the squares of 2**level tiles a side, in square rows i and columns j."""

_FIRST = 1024  # squares classified before any is divided: amortizes the cost of a NumPy call
_CHUNK = 1 << 15  # squares classified at once: bounds memory to a few megabytes


def squares(classify: Classify, groups: int, tiles: tuple[int, int]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Every FULL tile once, in squares as large as possible, and every PARTIAL tile, at level 0: (level, class,
    squares), these int64 (3, n): group, row and column, in squares of 2**level tiles a side.

    groups: number of independent masks, b * heads + h. tiles: rows and columns of tiles.
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

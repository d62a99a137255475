"""Lists of tiles as runs of neighbouring tiles: what the loop of a kernel over the tiles of a block mask walks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Classes of a tile: no pair is visible, some may be, every pair is."""


class Runs(NamedTuple):
    """Runs of neighbouring tiles on lines (rows of tiles, or columns).

    Line n holds the tiles start[m] <= t < stop[m] for indptr[n] <= m < indptr[n + 1]; its runs ascend and do not touch.
    indptr: int64 (lines + 1,); start, stop: int32 (runs,).
    """

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
        """Tiles instead of runs: (indptr int64 (lines + 1,), tiles int32 (total,)). Line n holds
        tiles[indptr[n]:indptr[n + 1]].
        """
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

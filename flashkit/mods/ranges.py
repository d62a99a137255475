"""RangeTable: least and greatest elements of an array within boxes of indices, for the bounds of a modification."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class RangeTable:
    """Least and greatest element of an integer or bool array within boxes of indices; exact.

    A binary tree over each axis that the boxes extend along, whose nodes are computed on first use. A box is covered
    by at most two nodes of each size. `table[index]` indexes the array itself, so that one name of an expression's
    environment serves both.
    """

    def __init__(self, array: Any) -> None:
        array = np.asarray(array)
        if array.dtype.kind not in "biu":
            raise TypeError(
                f"bounds of an array of {array.dtype} would be rounded; bool and integer arrays have exact ones"
            )
        # Expressions compute in int64.
        self.array = array.astype(np.int64) if array.dtype == np.uint64 else array
        self._trees: tuple[dict[tuple[int, ...], np.ndarray], ...] = ({}, {})

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def bounds(self, which: int, corners: Sequence[Any]) -> Any:
        """The least (which = 0) or greatest (which = 1) element in each box.

        corners: (low, high) of each axis, inclusive, arrays that broadcast. Bounds of a valid index may be outside of
        the array. Then the part inside counts, or the whole axis if the index may be negative, since NumPy counts
        negative indices from the end.
        """
        shape = np.broadcast_shapes(*map(np.shape, corners))
        flat = [np.broadcast_to(np.asarray(c, np.int64), shape).ravel() for c in corners]
        nodes = [_cover(*pair) for pair in zip(flat[0::2], flat[1::2], self.array.shape)]
        logical = self.array.dtype.kind == "b"
        dtype = np.dtype(bool) if logical else np.dtype(np.int64)
        neutral = which == 0 if logical else getattr(np.iinfo(np.int64), "min" if which else "max")
        result = np.full(math.prod(shape), neutral, dtype)
        better = np.maximum if which else np.minimum
        for combination in itertools.product(*nodes):
            used = np.logical_and.reduce([valid for _, _, valid in combination]).nonzero()[0]
            if used.size:
                tree = self._tree(which, tuple(level for level, _, _ in combination))
                result[used] = better(result[used], tree[tuple(node[used] for _, node, _ in combination)])
        return result.reshape(shape)[()]

    def _tree(self, which: int, levels: tuple[int, ...]) -> np.ndarray:
        """The array with each 2**level neighbours along each axis reduced to one."""
        if not any(levels):
            return self.array
        known = self._trees[which]
        if levels not in known:
            # Halving the contiguous last axis is slowest, so the other axes are halved first.
            axis = max(range(len(levels)), key=lambda a: (levels[a], a))
            finer = self._tree(which, tuple(level - (a == axis) for a, level in enumerate(levels)))
            finer = np.moveaxis(finer, axis, 0)
            pairs = len(finer) // 2
            half = finer[0::2].copy() if len(finer) % 2 else np.empty((pairs, *finer.shape[1:]), finer.dtype)
            (np.maximum if which else np.minimum)(finer[0:-1:2], finer[1::2], out=half[:pairs])
            known[levels] = np.moveaxis(half, 0, axis)
        return known[levels]


def tables(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a modification, on the host, with a RangeTable for each that has exact bounds."""
    host = {name: a.get() if hasattr(a, "get") else np.asarray(a) for name, a in arrays.items()}
    return {name: RangeTable(a) if a.dtype.kind in "biu" else a for name, a in host.items()}


def _cover(low: np.ndarray, high: np.ndarray, n: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Intervals as nodes of a binary tree over n leaves: (level, node of each interval, whether it has one)."""
    if n == 0:
        raise IndexError("a modification reads an array without elements")
    whole = (low < 0) | (low > high) | (low >= n)
    low = np.where(whole, 0, low)
    # Up to the end of the tree, past the array: one large node instead of many for an odd length.
    high = np.where(whole | (high >= n - 1), (1 << (n - 1).bit_length()) - 1, high)
    nodes: list[tuple[int, np.ndarray, np.ndarray]] = []
    for level in itertools.count():
        single, several = low == high, low < high
        if not (single.any() or several.any()):
            return nodes
        for node, valid in ((low, several & (low % 2 == 1)), (high, single | (several & (high % 2 == 0)))):
            valid = valid & (node << level < n)
            if valid.any():
                nodes.append((level, node, valid))
        low, high = np.where(single, 1, (low + 1) >> 1), np.where(single, 0, (high - 1) >> 1)
    raise AssertionError

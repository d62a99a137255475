"""Operations on fragments in the registers of a warp or a warp group.

A fragment is a tuple of a lane's registers in the accumulator layout (ptx/tuples.py): of every eight columns a lane has
two neighbours, in two or four rows; four lanes share a row. Values per row are tuples with an element for each row of
the lane."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .ptx import across, alike, each, exp2_fast, fold, greater

__all__ = ["across_row", "add", "exponentials", "row_max", "row_sum", "rows_scaled", "scaled"]

_device = cuda.jit(device=True, forceinline=True)


@_device
def add(x: Any, y: Any) -> Any:
    return x + y


@_device
def _times(x: Any, factor: Any) -> Any:
    return x * factor


@_device
def _times_row(x: Any, row: Any, _: Any) -> Any:
    return x * row


@_device
def _exponential(x: Any, row: Any, scale: Any) -> Any:
    return exp2_fast(x * scale - row)


@_device
def _of_four_lanes(x: Any, f: Any) -> Any:
    x = f(x, across(x, 1))
    return f(x, across(x, 2))


@_device
def scaled(tile: Any, factor: Any) -> Any:
    """All elements times a scalar."""
    return alike(_times, tile, factor)


@_device
def rows_scaled(tile: Any, factors: Any) -> Any:
    """Each row times its factor."""
    return each(_times_row, tile, factors, 0)


@_device
def exponentials(tile: Any, references: Any, scale: Any) -> Any:
    """2^(x * scale - reference of the row)"""
    return each(_exponential, tile, references, scale)


@_device
def row_max(tile: Any, start: Any) -> Any:
    """Maximum of a lane's elements of each row and `start`; ignores NaN."""
    return fold(greater, tile, start)


@_device
def row_sum(tile: Any, start: Any) -> Any:
    """Sum of a lane's elements of each row and `start`."""
    return fold(add, tile, start)


@_device
def across_row(f: Any, rows: Any) -> Any:
    """Reduces by f(x, y) over the four lanes that share a row."""
    return alike(_of_four_lanes, rows, f)

"""Operations on tiles that lie in the registers of a warp or a warp group: what the steps of attention do to scores.

A tile is a tuple of a lane's registers, laid out as products leave it (ptx/tuples.py): of every eight columns a lane
has two neighbours, in two or four rows; four lanes share a row. What belongs to rows comes in tuples, a number for
each."""

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
def _exponential(x: Any, row: Any, unit: Any) -> Any:
    return exp2_fast(x * unit - row)


@_device
def _of_four_lanes(x: Any, f: Any) -> Any:
    x = f(x, across(x, 1))
    return f(x, across(x, 2))


@_device
def scaled(tile: Any, factor: Any) -> Any:
    """All elements times a number."""
    return alike(_times, tile, factor)


@_device
def rows_scaled(tile: Any, factors: Any) -> Any:
    """Each row times its factor."""
    return each(_times_row, tile, factors, 0)


@_device
def exponentials(tile: Any, shifts: Any, unit: Any) -> Any:
    """2^(x * unit - the row's shift)"""
    return each(_exponential, tile, shifts, unit)


@_device
def row_max(tile: Any, start: Any) -> Any:
    """The greatest of a lane's elements of each row and of what is known of it, NaN left out."""
    return fold(greater, tile, start)


@_device
def row_sum(tile: Any, start: Any) -> Any:
    """The sum of a lane's elements of each row and of what was summed before."""
    return fold(add, tile, start)


@_device
def across_row(f: Any, rows: Any) -> Any:
    """What the four lanes that share a row have for it, joined by f(x, y)."""
    return alike(_of_four_lanes, rows, f)

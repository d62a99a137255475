"""Rotary position embedding on NumPy arrays: calls of kernels/rotary.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ...spec import name_of
from . import objects, specialise
from .threads import ITEMS


def rotate(x: Any, out: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, sign: int) -> None:
    """out = x rotated; x and out (B, H, N, D), tables (P, dims / 2), positions int64 (B, N) below P."""
    sizes = _sizes(x.shape, x.strides, out, cos.shape, interleaved, sign, (0, 0))
    arrays = sizes, x, out, cos, sin, positions, sizes  # there are no places
    _kernel(name_of(x.dtype))(id(arrays) + ITEMS)


class Write:
    """Writes rows of arrays x (B, H, N, D) into pages (pages, H, page, D), for x of one shape and strides."""

    def __init__(
        self, shape: Any, strides: Any, pages: Any, table: tuple[int, int] = (0, 0), interleaved: bool = False
    ) -> None:
        """table: the shape of cosines and sines, (0, 0) for rows that are not rotated."""
        self._kernel, self._pages = _kernel(name_of(pages.dtype)), pages
        places = pages.shape[2], pages.shape[0] * pages.shape[2]
        self._sizes = _sizes(shape, strides, pages, table, interleaved, 1, places)
        self._absent = (self._sizes,) * 3  # arrays, which the kernel does not read

    def __call__(self, x: Any, places: Any, table: tuple[Any, Any, Any] | None = None) -> None:
        """Token (b, n) of x goes into slot places[b, n] % page of page places[b, n] // page. A token whose place lies
        outside the pages, or whose position lies outside the table, is dropped.

        x has the strides of the form, but its axes may be others. table: (cos, sin, positions). places and positions:
        int64, C-contiguous.
        """
        arrays = (self._sizes, x, self._pages, *(table or self._absent), places)
        self._kernel(id(arrays) + ITEMS)


def _sizes(
    shape: Any, strides: Any, out: Any, table: Any, interleaved: bool, sign: int, places: tuple[int, int]
) -> np.ndarray:
    """What kernels/rotary.py lists."""
    rows, half = table
    return np.array((*shape, half, interleaved, sign, rows, *places, *strides[:3], *out.strides[:3]), np.int64)


@cache
def _kernel(dtype: str) -> Callable[..., None]:
    """The entry of kernels/rotary.py, which releases the GIL."""
    functions = objects.kept(specialise.rotary_source, dtype)
    called = ctypes.CFUNCTYPE(None, ctypes.c_int64)(functions["rotary"])
    called.functions = functions  # type: ignore[attr-defined]  # which own the machine code
    return called

"""Rotary position embedding on NumPy arrays: calls of kernels/rotary.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ...spec import name_of
from . import specialise


def rotate(x: Any, out: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, sign: int) -> None:
    """out = x rotated; x and out (B, H, N, D), tables (P, dims / 2), positions int64 (B, N) below P."""
    _run(x, out, (cos, sin, positions), None, interleaved, sign)


def write(x: Any, pages: Any, places: Any, table: tuple[Any, Any, Any] | None, interleaved: bool = False) -> None:
    """x (B, H, N, D), rotated where there is a table (cos, sin, positions), into `pages` (pages, H, page, D): token
    (b, n) into slot places[b, n] % page of page places[b, n] // page. positions and places: int64, C-contiguous.
    """
    _run(x, pages, table, places, interleaved, 1)


def _run(x: Any, out: Any, table: tuple[Any, Any, Any] | None, places: Any, interleaved: bool, sign: int) -> None:
    half, page = (0 if table is None else table[0].shape[1]), (0 if places is None else out.shape[2])
    sizes = np.array((*x.shape, half, interleaved, sign, page, *x.strides[:3], *out.strides[:3]), np.int64)
    # The kernel does not read what is not there, but takes an array for it.
    _kernel(name_of(x.dtype))(sizes, x, out, *(table or (sizes, sizes, sizes)), sizes if places is None else places)


@cache
def _kernel(dtype: str) -> Callable[..., None]:
    """The entry of kernels/rotary.py, which releases the GIL."""
    functions = specialise.rotary(dtype)
    called = ctypes.CFUNCTYPE(None, *[ctypes.py_object] * 7)(functions["rotary"])
    called.functions = functions  # type: ignore[attr-defined]  # which own the machine code
    return called

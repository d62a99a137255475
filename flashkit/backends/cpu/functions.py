"""What kernels and generated code are compiled with: Numba's options, the mark of their entries, and scalar functions
under the names that expr.render uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from . import scratch

options = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

for layout in (scratch._end, scratch.forward_layout, scratch.backward_layout):
    register_jitable(layout)


def entry(signature: Any) -> Callable[[Any], Any]:
    """Marks a function of a kernel's text that is called by address: specialise.py makes a C function of it."""

    def mark(function: Any) -> Any:
        function.signature = signature
        return function

    return mark


@njit(**options)
def minimum(x: Any, y: Any) -> Any:
    return y if y < x or y != y else x


@njit(**options)
def maximum(x: Any, y: Any) -> Any:
    return y if y > x or y != y else x


@njit(**options)
def exp(x: Any) -> Any:
    return math.exp(x)


@njit(**options)
def exp2(x: Any) -> Any:
    return np.exp2(x)


@njit(**options)
def log(x: Any) -> Any:
    return np.log(x)


@njit(**options)
def log2(x: Any) -> Any:
    return np.log2(x)


@njit(**options)
def sqrt(x: Any) -> Any:
    return np.sqrt(x)


@njit(**options)
def tanh(x: Any) -> Any:
    return np.tanh(x)


@njit(**options)
def sin(x: Any) -> Any:
    return np.sin(x)


@njit(**options)
def cos(x: Any) -> Any:
    return np.cos(x)


@njit(**options)
def floor(x: Any) -> Any:
    return np.floor(x)


# Bounds of the elements of an array inside a box of inclusive corners: what interval classification asks for
# (expr.bounds).


@njit(**options)
def load_min1(a: Any, i0: int, i1: int) -> Any:
    best = np.int64(a[i0])
    for i in range(i0, i1 + 1):
        best = min(best, np.int64(a[i]))
    return best


@njit(**options)
def load_max1(a: Any, i0: int, i1: int) -> Any:
    best = np.int64(a[i0])
    for i in range(i0, i1 + 1):
        best = max(best, np.int64(a[i]))
    return best


@njit(**options)
def load_min2(a: Any, i0: int, i1: int, j0: int, j1: int) -> Any:
    best = np.int64(a[i0, j0])
    for i in range(i0, i1 + 1):
        best = min(best, load_min1(a[i], j0, j1))
    return best


@njit(**options)
def load_max2(a: Any, i0: int, i1: int, j0: int, j1: int) -> Any:
    best = np.int64(a[i0, j0])
    for i in range(i0, i1 + 1):
        best = max(best, load_max1(a[i], j0, j1))
    return best


@njit(**options)
def load_min3(a: Any, h0: int, h1: int, i0: int, i1: int, j0: int, j1: int) -> Any:
    best = np.int64(a[h0, i0, j0])
    for h in range(h0, h1 + 1):
        best = min(best, load_min2(a[h], i0, i1, j0, j1))
    return best


@njit(**options)
def load_max3(a: Any, h0: int, h1: int, i0: int, i1: int, j0: int, j1: int) -> Any:
    best = np.int64(a[h0, i0, j0])
    for h in range(h0, h1 + 1):
        best = max(best, load_max2(a[h], i0, i1, j0, j1))
    return best


@njit(**options)
def load_min4(a: Any, b0: int, b1: int, h0: int, h1: int, i0: int, i1: int, j0: int, j1: int) -> Any:
    best = np.int64(a[b0, h0, i0, j0])
    for b in range(b0, b1 + 1):
        best = min(best, load_min3(a[b], h0, h1, i0, i1, j0, j1))
    return best


@njit(**options)
def load_max4(a: Any, b0: int, b1: int, h0: int, h1: int, i0: int, i1: int, j0: int, j1: int) -> Any:
    best = np.int64(a[b0, h0, i0, j0])
    for b in range(b0, b1 + 1):
        best = max(best, load_max3(a[b], h0, h1, i0, i1, j0, j1))
    return best

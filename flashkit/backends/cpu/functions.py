"""Numba's options for kernels and generated code, the mark of their entries, and the scalar functions and array bounds
under the names that codegen.render uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload, register_jitable

from ...mods import expr
from . import scratch
from .views import single_from_bits, vector

options = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

for layout in (
    scratch._end, scratch.forward_layout, scratch.backward_layout, scratch.decode_layout, scratch.partial_layout
):  # fmt: skip
    register_jitable(layout)


def entry(signature: Any) -> Callable[[Any], Any]:
    """Mark a function of a kernel's text that is called by address; specialise.py exports it as a C function."""

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


# exp and tanh of float32 consist of operations that LLVM vectorises, which it cannot do with calls of the C library.
# Polynomials: Chebyshev interpolation, relative error 3e-9 for exp on [-ln 2 / 2, ln 2 / 2], 1e-9 for tanh on
# [0, 0.625].

F32 = np.float32
MAX_INTEGER = F32(expr.graph.MAX_INTEGER)
LOG2E = F32(1.4426950408889634)
LN2_HIGH, LN2_LOW = F32(0.693359375), F32(-2.12194440054690583e-4)  # the first times 2^8 integers is exact
EXP = tuple(map(F32, (
    0.9999999999595206, 1.0000000377447187, 0.5000000107800997, 0.16666415400555498, 0.041666218134384925,
    0.008375135274037467, 0.001394859004612958,
)))  # fmt: skip
TANH = tuple(map(F32, (
    -0.3333333313428204, 0.13333299880514657, -0.05395847224069906, 0.0217627654916943, -0.008324232180576933,
    0.0022707323150987567,
)))  # fmt: skip


@njit(**options)
def to_int(x: Any) -> Any:
    inside = maximum(minimum(x if x == x else F32(0), MAX_INTEGER), -MAX_INTEGER)
    return np.int64(np.int32(inside))  # by way of 32 bits, for vectors of AVX2


@njit(**options)
def _polynomial(x: Any, c: Any) -> Any:
    p = c[len(c) - 1]
    for i in range(len(c) - 2, -1, -1):
        p = p * x + c[i]
    return p


@njit(**options)
def _power_of_two(n: Any) -> Any:
    return single_from_bits(np.int32((n + np.int32(127)) << np.int32(23)))


@njit(**options)
def _exp_single(x: Any) -> Any:
    inside = x if x < F32(89) else F32(89)
    inside = inside if inside > F32(-104) else F32(-104)  # NaN too, for the conversion to an integer below
    whole = np.floor(inside * LOG2E + F32(0.5))
    r = inside - whole * LN2_HIGH
    r = r - whole * LN2_LOW
    # 2^n in two factors: each is a normal number even where the result is denormal or infinite.
    n = np.int32(whole)
    half = n >> np.int32(1)
    y = _polynomial(r, EXP) * _power_of_two(half) * _power_of_two(np.int32(n - half))
    return y if x == x else x


@njit(**options)
def _tanh_single(x: Any) -> Any:
    size = abs(x)
    t = _exp_single(F32(-2) * size)
    far = (F32(1) - t) / (F32(1) + t)
    z = x * x
    near = x + x * z * _polynomial(z, TANH)
    return near if size < F32(0.625) else (-far if x < F32(0) else far)


def _by_type(single: Any, double: Any) -> Any:
    """A function for compiled code: `single` for float32, `double` for all other types."""

    def called(x):  # type: ignore[no-untyped-def]  # Numba compares the names of arguments, and annotations with them
        raise NotImplementedError("only compiled code calls this")

    @overload(called)
    def chosen(x):  # type: ignore[no-untyped-def]
        return (lambda x: single(x)) if x == types.float32 else (lambda x: double(x))

    return called


exp, tanh = _by_type(_exp_single, math.exp), _by_type(_tanh_single, np.tanh)
exp2, log, log2, sqrt, sin, cos, floor = np.exp2, np.log, np.log2, np.sqrt, np.sin, np.cos, np.floor
erf = math.erf


# Bounds of the elements of an array inside a box of inclusive corners, for interval classification (expr.bounds). The
# loops keep the array's own dtype, so that many elements fit a vector.


@njit(**options)
def _contiguous(a: Any, i0: int, i1: int) -> Any:
    """Elements i0 ... i1 of a contiguous array, with a stride that the compiler knows."""
    return vector(a.ctypes.data + i0 * a.itemsize, i1 + 1 - i0, a.itemsize, a.dtype)


def _bounds(better: Any) -> tuple[Any, ...]:
    """The best element in a box of an array of 1 to 4 axes: f(array, first and last index of each axis)."""

    @njit(**options)
    def best_of(a: Any) -> Any:
        best = a[0]
        for i in range(a.shape[0]):
            best = better(best, a[i])
        return np.int64(best)

    @njit(**options)
    def along_a_row(a: Any, first: int, last: int) -> Any:
        return best_of(_contiguous(a, first, last)) if a.strides[0] == a.itemsize else best_of(a[first : last + 1])

    def with_axis(inside: Any) -> Any:
        @njit(**options)
        def along(a: Any, first: int, last: int, *others: Any) -> Any:
            best = inside(a[first], *others)
            for i in range(first + 1, last + 1):
                best = better(best, inside(a[i], *others))
            return best

        return along

    found = [along_a_row]
    for _ in range(3):
        found.append(with_axis(found[-1]))
    return tuple(found)


load_min1, load_min2, load_min3, load_min4 = _bounds(min)
load_max1, load_max2, load_max3, load_max4 = _bounds(max)

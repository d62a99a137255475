"""Numbers that a caller gave: one function for real ones, one for integers. Every public function converts by these."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import numpy as np

from .errors import shown

_REAL = re.compile(r"(torch\.)?(u?int|b?float)\d+\w*|longdouble")
"""Names of the dtypes whose scalars and arrays without axes are real numbers, in any library."""


def number(name: str, value: Any) -> float:
    """A finite real number, of Python or of a library: a scalar, or an array without axes. TypeError if it is none,
    ValueError if it is not finite, or beyond float64. `name` is for the error.

    float() alone takes text and bools, too, and drops the imaginary part of NumPy's complex numbers.
    """
    try:
        real = float(value) if _is_real(value) else None
    except (TypeError, ValueError):
        real = None
    except OverflowError:
        raise ValueError(f"{name}: expected a number within float64, got {shown(value)}") from None
    if real is None:
        raise TypeError(f"{name}: expected a number, got {described(value)}")
    if not math.isfinite(real):
        raise ValueError(f"{name}: expected a finite number, got {shown(value)}")
    return real


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer from `least` to `most`, of any library. TypeError if it is none, as True is; ValueError beyond."""
    expected = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
    try:
        number = operator.index(value) if _is_real(value) else None
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}: expected {expected}, got {described(value)}")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")
    return number


def described(value: Any) -> str:
    """A value of a wrong kind, for an error: text, or the shape and dtype of an array."""
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array"
    if getattr(value, "shape", ()):
        return f"an array of shape {tuple(value.shape)} and dtype {getattr(value, 'dtype', None)}"
    return shown(value)


def _is_real(value: Any) -> bool:
    if isinstance(value, bool | str | bytes | bytearray | np.ma.MaskedArray):
        return False
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return True
    return not getattr(value, "shape", ()) and _REAL.fullmatch(getattr(dtype, "name", None) or str(dtype)) is not None

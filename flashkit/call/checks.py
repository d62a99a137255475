"""Checks of single arguments of attention(). Every error names the argument, what was expected and what came."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import settings
from ..errors import shown
from ..numeric import described, integer
from . import arrays


def choice(name: str, value: Any, options: tuple[str | None, ...]) -> None:
    """Check that a value is one of these; not by ==, which arrays answer for each element."""
    if not isinstance(value, str | None) or value not in options:
        expected = ", ".join(map(repr, options[:-1])) + f" or {options[-1]!r}"
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")


def flag(name: str, value: Any, hint: str = "") -> bool:
    """True or False; hint: continues the error message."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False{hint}, got {described(value)}")
    return bool(value)


def is_deterministic(value: Any) -> bool:
    """Whether the call or the process (FLASHKIT_DETERMINISTIC) asks for deterministic results."""
    return flag("deterministic", value) or bool(settings.DETERMINISTIC.read())


def sides_of(window: Any) -> tuple[Any, Any]:
    """(left, right), as they are."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: expected (left, right), numbers of keys or None for no bound, got {shown(window)}")
    left, right = window
    return left, right


def window_of(window: Any) -> tuple[int | None, int | None]:
    """(left, right)."""
    left, right = (
        None if side is None else integer(f"window[{i}], a number of keys", side, 0)
        for i, side in enumerate(sides_of(window))
    )
    return left, right


def check_out(out: Any, kind: str, dtype: str, wanted: tuple[int, ...]) -> None:
    """Check that the array given as `out` can hold the result."""
    arrays.require("out", out, kind)
    if arrays.dtype_name("out", out) != dtype:
        raise TypeError(f"out: expected dtype {dtype} (q's), got {out.dtype}")
    if out.shape != wanted:
        raise ValueError(f"out: expected shape {wanted}, got {out.shape}")
    if kind == "numpy" and not out.flags.writeable:
        raise ValueError("out: expected a writable array, got a read-only one")
    if out.size and 0 in [stride for stride, n in zip(out.strides, out.shape, strict=True) if n > 1]:
        raise ValueError(f"out: expected memory for each element, got an expanded array of strides {out.strides}")


def can_write(out: Any, *inputs: Any) -> bool:
    """Whether a kernel may write to a checked `out`: addressable, and apart from the inputs."""
    if arrays.addressable(out) is not out or (out.ndim > 4 and not out.flags.c_contiguous):
        return False
    return not any(arrays.may_share(out, x) for x in inputs)

"""`Params` (cuda_common/params.py) as a named tuple for Numba: the argument p of a kernel.

It has the words of `Arguments` in the same order. The host writes 64-bit integers; some fields are read as float64 or
uint64.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from ..cuda_common.params import FIELDS, SCALARS, TENSORS

Tensor = namedtuple("Tensor", "data batch head token")
"""The address, and strides in elements."""

Params = namedtuple("Params", (*(field.name for field in FIELDS), "values"))  # type: ignore[misc]


def numba_type(n_values: int) -> Any:
    """Numba's type of Params with `n_values` values of a modification."""
    from numba.cuda import types

    tensor = types.NamedUniTuple(types.int64, 4, Tensor)
    words = [getattr(types, _kind(field.kind)) for field in SCALARS]
    return types.NamedTuple([*[tensor] * len(TENSORS), *words, types.UniTuple(types.int64, n_values)], Params)


def _kind(kind: str) -> str:
    """Addresses are integers."""
    return kind if kind in ("float64", "uint64") else "int64"

"""`Params` (cuda_common/params.py) for Numba: what a kernel's argument p holds.

The same words in the same order as `Arguments`: the host writes integers, and some of them are read as other numbers.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from ..cuda_common.params import FIELDS, SCALARS, TENSORS

Tensor = namedtuple("Tensor", "data batch head token")
"""Address in bytes; strides in elements."""

Params = namedtuple("Params", (*(field.name for field in FIELDS), "values"))  # type: ignore[misc]



def numba_type(n_values: int) -> Any:
    """Numba's type of Params with so many values of a modification."""
    from numba.cuda import types

    tensor = types.NamedUniTuple(types.int64, 4, Tensor)
    words = [getattr(types, _kind(field.kind)) for field in SCALARS]
    return types.NamedTuple([*[tensor] * len(TENSORS), *words, types.UniTuple(types.int64, n_values)], Params)


def _kind(kind: str) -> str:
    """Addresses are integers."""
    return kind if kind in ("float64", "uint64") else "int64"

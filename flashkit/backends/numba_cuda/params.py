"""`Params` of kernels/params.cuh in Python: what a kernel's argument p holds.

The same words in the same order as `Arguments`: the host writes integers, and some of them are read as other numbers.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from ..cuda_common.arguments import TENSORS, WORDS

Tensor = namedtuple("Tensor", "data batch head token")
"""Address in bytes; strides in elements."""

Params = namedtuple("Params", (*TENSORS, *WORDS, "values"))  # type: ignore[misc]

_KINDS = {"scale": "float64", "kept_scale": "float64", "seed": "uint64", "threshold": "uint64"}  # others: int64


def numba_type(n_values: int) -> Any:
    """Numba's type of Params with so many values of a modification."""
    from numba.cuda import types

    tensor = types.NamedUniTuple(types.int64, 4, Tensor)
    words = [getattr(types, _KINDS.get(name, "int64")) for name in WORDS]
    return types.NamedTuple([*[tensor] * len(TENSORS), *words, types.UniTuple(types.int64, n_values)], Params)

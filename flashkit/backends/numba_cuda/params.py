"""`Params` (cuda_common/params.py) as a named tuple for Numba: the argument p of a kernel.

It has the words of `Arguments` in the same order. The host writes 64-bit integers; some fields are read as float64 or
uint64.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cuda_common.params import FIELDS, SCALARS, TENSORS, VALUES

Tensor = namedtuple("Tensor", "data batch head token")
"""The address, and strides in elements."""

Params = namedtuple("Params", (*(field.name for field in FIELDS), "values"))  # type: ignore[misc]


def numba_type(n_values: int) -> Any:
    """Numba's type of Params with `n_values` values of a modification."""
    from numba.cuda import types

    tensor = types.NamedUniTuple(types.int64, 4, Tensor)
    words = [getattr(types, _kind(field.kind)) for field in SCALARS]
    return types.NamedTuple([*[tensor] * len(TENSORS), *words, types.UniTuple(types.int64, n_values)], Params)


def of(words: Sequence[int]) -> Any:
    """Params of a block's words, for kernels that run as Python."""
    tensors = [Tensor(*words[i : i + 4]) for i in range(0, 4 * len(TENSORS), 4)]
    single = [_read(_kind(field.kind), word) for field, word in zip(SCALARS, words[4 * len(TENSORS) : VALUES])]
    return Params._make([*tensors, *single, tuple(words[VALUES:])])


def _kind(kind: str) -> str:
    """Addresses are integers."""
    return kind if kind in ("float64", "uint64") else "int64"


def _read(kind: str, word: int) -> Any:
    if kind == "float64":
        return struct.unpack("<d", struct.pack("<q", word))[0]
    return np.uint64(word % 2**64) if kind == "uint64" else word

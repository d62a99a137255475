"""Storage of 16 and 8 bits in kernels: widened when loaded, rounded when stored, as micro-kernels do."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from .micro.vector import narrow, widen
from .views import emitted


def _widening(storage: str, given: Any, result: Any) -> Any:
    kind = ir.FloatType() if result is types.float32 else ir.DoubleType()
    return emitted(result, given)(lambda b, x: widen(b, x, storage, kind))


def _narrowing(storage: str) -> Any:
    return emitted(types.uint16, types.float32)(lambda b, x: narrow(b, x, storage))


float16_to_float32, bfloat16_to_float32 = (
    _widening(storage, types.uint16, types.float32) for storage in ("float16", "bfloat16")
)
float32_to_float16, float32_to_bfloat16 = map(_narrowing, ("float16", "bfloat16"))
e4m3_to_float32, e4m3_to_float64 = (_widening("e4m3", types.uint8, kind) for kind in (types.float32, types.float64))
int8_to_float32, int8_to_float64 = (_widening("int8", types.uint8, kind) for kind in (types.float32, types.float64))


@njit
def float32_to_float32(x: Any) -> Any:
    return np.float32(x)


@njit
def float64_to_float64(x: Any) -> Any:
    return np.float64(x)

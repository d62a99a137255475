"""Storage of 16 and 8 bits in kernels: widened when loaded, rounded when stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .micro.vector import widen

_HALF = ir.HalfType()


@intrinsic
def float16_to_float32(typing: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return builder.fpext(builder.bitcast(values[0], _HALF), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float32_to_float16(typing: Any, x: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], _HALF), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def bfloat16_to_float32(typing: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        wide = builder.shl(builder.zext(values[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float32_to_bfloat16(typing: Any, x: Any) -> Any:
    """Round to nearest, ties to even; a NaN stays one."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        i32, i16 = ir.IntType(32), ir.IntType(16)
        bits = b.bitcast(values[0], i32)
        lowest_kept = b.and_(b.lshr(bits, i32(16)), i32(1))
        rounded = b.trunc(b.lshr(b.add(bits, b.add(lowest_kept, i32(0x7FFF))), i32(16)), i16)
        quiet = b.or_(b.trunc(b.lshr(bits, i32(16)), i16), i16(0x40))
        return b.select(b.fcmp_unordered("uno", values[0], values[0]), quiet, rounded)

    return types.uint16(types.float32), codegen


def _from_8_bits(storage: str, result: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return widen(builder, values[0], storage, context.get_data_type(result))

    @intrinsic
    def widened(typing: Any, code: Any) -> Any:
        return result(types.uint8), codegen

    return widened


e4m3_to_float32, e4m3_to_float64 = (_from_8_bits("e4m3", kind) for kind in (types.float32, types.float64))
int8_to_float32, int8_to_float64 = (_from_8_bits("int8", kind) for kind in (types.float32, types.float64))


@njit
def float32_to_float32(x: Any) -> Any:
    return np.float32(x)


@njit
def float64_to_float64(x: Any) -> Any:
    return np.float64(x)

"""Loads, stores, bit casts and warp primitives for kernels.

Kernels take addresses and strides, so compiled code does not depend on the layout of arrays. Types are NumPy's:
`load(np.float32, address, i)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from .ptx.asm import instruction

__all__ = [
    "all_threads_or", "at", "at4", "ballot", "bits_of_half", "bits_of_single", "device",
    "double_of", "functions_of", "half_of", "load", "load4", "lowest_bit", "put", "put4", "shuffle_xor",
    "single_of", "store", "thread_here",
]  # fmt: skip

_GLOBAL = 1  # the address space of device memory
_ALL = 0xFFFFFFFF

device = cuda.jit(device=True, forceinline=True)


# --- device memory ----------------------------------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, kind: Any, address: Any, index: Any) -> Any:
    element = context.get_data_type(kind)
    return builder.gep(builder.inttoptr(address, element.as_pointer(_GLOBAL)), [index])


@intrinsic
def load(typing: Any, kind: Any, address: Any, index: Any) -> Any:
    """Element `index` of the elements of a type that lie from a byte address on."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_pointer(context, builder, kind.dtype, *values[1:]))

    return kind.dtype(kind, types.int64, types.int64), codegen


@intrinsic
def load4(typing: Any, kind: Any, address: Any, index: Any) -> Any:
    """Four elements from `index` on, as a tuple, aligned to their total size, at most 16 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first = _pointer(context, builder, kind.dtype, *values[1:])
        return _four(context, builder, signature.return_type, first)

    return types.UniTuple(kind.dtype, 4)(kind, types.int64, types.int64), codegen


@intrinsic
def store(typing: Any, kind: Any, address: Any, index: Any, value: Any) -> Any:
    """Write an element."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[3], _pointer(context, builder, kind.dtype, *values[1:3]))
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, kind.dtype), codegen


def _four(context: Any, builder: Any, kind: Any, first: Any) -> Any:
    """Loads of four neighbours, which NVVM merges by their alignment."""
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    loaded = []
    for i in range(4):
        pointer = builder.gep(first, [context.get_constant(types.int64, i)])
        loaded.append(builder.load(pointer, align=_alignment(size, i)))
    return context.make_tuple(builder, kind, loaded)


def _alignment(size: int, i: int) -> int:
    return min(4 * size, 16) if i * size % 16 == 0 else size


# --- shared memory ----------------------------------------------------------------------------------------------------


def _element(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(arrayobj.make_array(kind)(context, builder, array).data, [index])


@intrinsic
def at(typing: Any, array: Any, index: Any) -> Any:
    """array[index] of one axis, where the index is not negative."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_element(context, builder, array, *values))

    return array.dtype(array, types.int64), codegen


@intrinsic
def at4(typing: Any, array: Any, index: Any) -> Any:
    """array[index : index + 4] as a tuple, aligned to 16 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _four(context, builder, signature.return_type, _element(context, builder, array, *values))

    return types.UniTuple(array.dtype, 4)(array, types.int64), codegen


@intrinsic
def put(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, where the index is not negative."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], _element(context, builder, array, *values[:2]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen


@intrinsic
def put4(typing: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """array[index : index + 4] = a, b, c, d, aligned to 16 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        size = context.get_abi_sizeof(context.get_data_type(array.dtype))
        first = _element(context, builder, array, *values[:2])
        for i, value in enumerate(values[2:]):
            pointer = builder.gep(first, [context.get_constant(types.int64, i)])
            builder.store(value, pointer, align=_alignment(size, i))
        return context.get_dummy_value()

    return types.void(array, types.int64, *[array.dtype] * 4), codegen


# --- numbers ----------------------------------------------------------------------------------------------------------


@device
def single_of(bits: Any) -> Any:
    """The float32 with these bits, an int32."""
    return libdevice.int_as_float(bits)


@device
def bits_of_single(x: Any) -> Any:
    return libdevice.float_as_int(x)


@device
def double_of(bits: Any) -> Any:
    """The float64 with these bits, an int64."""
    return libdevice.longlong_as_double(bits)


@device
def half_of(bits: Any) -> Any:
    """The float16 with these bits, an int16, as float32."""
    return libdevice.half2float(bits)


@device
def bits_of_half(x: Any) -> Any:
    """A float32 rounded to float16."""
    return libdevice.float2half_rn(x)


def functions_of(number: Any) -> tuple[Callable[..., Any], ...]:
    """exp, exp2, log, log2, sqrt, tanh, sin, cos, floor of float32 or float64 numbers."""
    names = "exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor"
    return tuple(getattr(libdevice, f"{name}f" if number is np.float32 else name) for name in names)


# --- warps and blocks -------------------------------------------------------------------------------------------------


_thread = instruction("mov.u32 $0, %tid.x;", types.int32)


@device
def thread_here() -> Any:
    """Thread index. The volatile read keeps the compiler from hoisting values of it out of all loops, which takes
    registers.
    """
    return np.int64(_thread()) & np.int64(1023)


@device
def shuffle_xor(x: Any, step: Any) -> Any:
    """x of lane ^ step."""
    return cuda.shfl_xor_sync(_ALL, x, step)


@device
def ballot(condition: Any) -> Any:
    """A bit for each lane of the warp whose condition holds."""
    return np.int64(cuda.ballot_sync(_ALL, condition)) & np.int64(_ALL)


@device
def lowest_bit(bits: Any) -> Any:
    """Index of the lowest set bit of a nonzero value."""
    return np.int64(cuda.ffs(bits)) - np.int64(1)


@device
def all_threads_or(condition: Any) -> Any:
    """Whether the condition holds in any thread of the CTA; a barrier."""
    return cuda.syncthreads_or(np.int32(condition)) != 0

"""Loads, stores, bit casts and warp primitives for kernels.

Kernels take addresses and strides, so compiled code does not depend on the layout of arrays. Types are NumPy's:
`load(np.float32, address, i)`. An address of 32 bits, uint32, is one of shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic

from ...mods.expr.graph import FUNCTIONS
from .ptx.asm import NOTHING, instruction

__all__ = [
    "add_double", "add_single", "all_threads_or", "ballot", "bits_of_half", "bits_of_single", "device", "double_of",
    "functions_of", "half_of", "load", "load4", "lowest_bit", "shuffle_xor", "single_of", "store", "store4",
    "thread_here",
]  # fmt: skip

_ALL = 0xFFFFFFFF

device = cuda.jit(device=True, forceinline=True)


# --- memory -----------------------------------------------------------------------------------------------------------


def _wide(address: Any) -> Any:
    return address if address == types.uint32 else types.int64


def _elements(context: Any, builder: Any, signature: Any, values: Sequence[Any], count: int) -> list[tuple[Any, int]]:
    """Pointers to `count` neighbours, aligned to their total size, at most 16 bytes; NVVM merges what is aligned."""
    kind, address, *_ = signature.args
    element, space = context.get_data_type(kind.dtype), 3 if address == types.uint32 else 1
    size = context.get_abi_sizeof(element)
    first = builder.gep(builder.inttoptr(values[1], element.as_pointer(space)), [values[2]])
    if count == 1:
        return [(first, size)]
    return [
        (builder.gep(first, [context.get_constant(types.int64, i)]), min(4 * size, 16) if i * size % 16 == 0 else size)
        for i in range(count)
    ]


@intrinsic
def load(typing: Any, kind: Any, address: Any, index: Any) -> Any:
    """Element `index` of the elements of a type that lie from a byte address on."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        ((pointer, align),) = _elements(context, builder, signature, values, 1)
        return builder.load(pointer, align=align)

    return kind.dtype(kind, _wide(address), types.int64), codegen


@intrinsic
def load4(typing: Any, kind: Any, address: Any, index: Any) -> Any:
    """Four elements from `index` on, as a tuple, aligned to their total size, at most 16 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointers = _elements(context, builder, signature, values, 4)
        loaded = [builder.load(pointer, align=align) for pointer, align in pointers]
        return context.make_tuple(builder, signature.return_type, loaded)

    return types.UniTuple(kind.dtype, 4)(kind, _wide(address), types.int64), codegen


def _store(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    pointers = _elements(context, builder, signature, values, len(values) - 3)
    for value, (pointer, align) in zip(values[3:], pointers):
        builder.store(value, pointer, align=align)
    return context.get_dummy_value()


@intrinsic
def store(typing: Any, kind: Any, address: Any, index: Any, value: Any) -> Any:
    """Write an element."""
    return types.void(kind, _wide(address), types.int64, kind.dtype), _store


@intrinsic
def store4(typing: Any, kind: Any, address: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Write four elements from `index` on, aligned as those of load4()."""
    return types.void(kind, _wide(address), types.int64, *[kind.dtype] * 4), _store


add_single = instruction("red.global.add.f32 [$0], $1;", NOTHING, types.int64, types.float32)
add_double = instruction("red.global.add.f64 [$0], $1;", NOTHING, types.int64, types.float64)
"""add_single(address, x): add to a number of global memory, which other threads add to as well."""


# --- numbers ----------------------------------------------------------------------------------------------------------

half_of, bits_of_half = libdevice.half2float, libdevice.float2half_rn
"""The float16 with these bits, an int16, as float32, and back, rounded."""
single_of, bits_of_single, double_of = libdevice.int_as_float, libdevice.float_as_int, libdevice.longlong_as_double
"""The float32 with these bits, an int32, and back; the float64 with these bits, an int64."""


def functions_of(number: Any) -> tuple[Callable[..., Any], ...]:
    """Those of float32 or float64 numbers that expressions have."""
    return tuple(getattr(libdevice, f"{name}f" if number is np.float32 else name) for name in FUNCTIONS)


# --- warps and blocks -------------------------------------------------------------------------------------------------


_thread = instruction("mov.u32 $0, %tid.x;", types.int32)


@device
def thread_here() -> Any:
    """Thread index, by a volatile read: otherwise values of it are hoisted out of loops and take registers."""
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

"""Memory as kernels see it: array views made from addresses, numbers made from bits, atomic counters.

The compiled signature of a kernel is that of addresses, so it is the same for every stride and layout, and a call boxes
no arrays. These intrinsics turn addresses back into Numba arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT64 = types.int64


def _view(ndim: int) -> Any:
    """Code generation of a view: arguments (address, extents..., byte strides..., dtype)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        kind = signature.return_type
        array = context.make_array(kind)(context, builder)
        shape, strides = values[1 : 1 + ndim], values[1 + ndim : 1 + 2 * ndim]
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        size = context.get_constant(types.intp, 1)
        for extent in shape:
            size = builder.mul(size, extent)
        for name, content in (
            ("data", builder.inttoptr(values[0], array.data.type)),
            ("shape", cgutils.pack_array(builder, shape)),
            ("strides", cgutils.pack_array(builder, strides)),
            ("itemsize", itemsize),
            ("nitems", size),
        ):
            setattr(array, name, content)
        return array._getvalue()

    return codegen


def _view_signature(ndim: int, dtype: Any) -> Any:
    return types.Array(dtype.dtype, ndim, "A")(*[_INT64] * (1 + 2 * ndim), dtype)


@intrinsic
def vector(typing: Any, address: Any, n: Any, stride: Any, dtype: Any) -> Any:
    """The n elements from `address` on, `stride` bytes apart."""
    return _view_signature(1, dtype), _view(1)


@intrinsic
def matrix(typing: Any, address: Any, rows: Any, columns: Any, row_stride: Any, column_stride: Any, dtype: Any) -> Any:
    """rows x columns elements from `address` on; strides in bytes."""
    return _view_signature(2, dtype), _view(2)


@intrinsic
def tensor3(typing: Any, address: Any, n0: Any, n1: Any, n2: Any, s0: Any, s1: Any, s2: Any, dtype: Any) -> Any:
    return _view_signature(3, dtype), _view(3)


@intrinsic
def tensor4(
    typing: Any, address: Any, n0: Any, n1: Any, n2: Any, n3: Any, s0: Any, s1: Any, s2: Any, s3: Any, dtype: Any
) -> Any:
    return _view_signature(4, dtype), _view(4)


@intrinsic
def integer_at(typing: Any, address: Any) -> Any:
    """The 64-bit integer at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return builder.load(builder.inttoptr(values[0], ir.IntType(64).as_pointer()))

    return _INT64(_INT64), codegen


@intrinsic
def atomic_integer_at(typing: Any, address: Any) -> Any:
    """The 64-bit integer at an address, which another thread may write."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], ir.IntType(64).as_pointer()), "monotonic", 8)

    return _INT64(_INT64), codegen


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Bring the cache line of an address near, without waiting for it."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(values[0], pointer), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.none(_INT64), codegen


@intrinsic
def double_from_bits(typing: Any, bits: Any) -> Any:
    """The float64 whose bits are given as an integer."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return builder.bitcast(values[0], ir.DoubleType())

    return types.float64(_INT64), codegen


@intrinsic
def single_from_bits(typing: Any, bits: Any) -> Any:
    """The float32 whose bits are given as a 32-bit integer."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _count_one(ordering: str, context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
    """Atomically add 1 to the integer at an address; returns its previous value."""
    counter = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
    return builder.atomic_rmw("add", counter, ir.IntType(64)(1), ordering)


@intrinsic
def atomic_increment(typing: Any, address: Any) -> Any:
    """Claim the next number of a counter that threads share."""
    return _INT64(_INT64), partial(_count_one, "monotonic")


@intrinsic
def atomic_arrive(typing: Any, address: Any) -> Any:
    """Count an arrival; returns how many came before. The caller sees what the earlier arrivals have written."""
    return _INT64(_INT64), partial(_count_one, "acq_rel")


@intrinsic
def atomic_read(typing: Any, address: Any) -> Any:
    """The 64-bit integer at an address; the caller sees what its writer wrote before it."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return _INT64(_INT64), codegen


@intrinsic
def atomic_exchange(typing: Any, address: Any, new: Any) -> Any:
    """Write the integer at an address; returns its previous value."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", pointer, values[1], "seq_cst")

    return _INT64(_INT64, _INT64), codegen


@intrinsic
def atomic_replace(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Write the integer at an address if it is `old`; returns whether it was."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        found = builder.cmpxchg(pointer, values[1], values[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(_INT64, _INT64, _INT64), codegen

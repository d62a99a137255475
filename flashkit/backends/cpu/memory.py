"""Memory as kernels see it: array views made from addresses, conversions of storage, calls through addresses, the
task counter.

A kernel gets one block of 64-bit integers that describes its arguments (arguments.py), so that its compiled
signature is the same for every strided layout and a call costs no array boxing. These intrinsics turn addresses
back into Numba arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_HALF = ir.HalfType()
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
    """Add 1 to what stands at an address, as no other thread can meanwhile; what was there before."""
    counter = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
    return builder.atomic_rmw("add", counter, ir.IntType(64)(1), ordering)


@intrinsic
def next_task(typing: Any, address: Any) -> Any:
    """Take a number from the shared counter: threads draw tasks until none is left."""
    return _INT64(_INT64), partial(_count_one, "monotonic")


@intrinsic
def arrive(typing: Any, address: Any) -> Any:
    """Count one more at an address; how many were there before. Who counts sees what those before have written."""
    return _INT64(_INT64), partial(_count_one, "acq_rel")


def _indirect_call(arguments: int, result: ir.Type) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        kind = ir.FunctionType(result, [ir.IntType(64)] * arguments)
        called = builder.call(builder.inttoptr(values[0], kind.as_pointer()), list(values[1:]))
        return context.get_dummy_value() if isinstance(result, ir.VoidType) else called

    return codegen


@intrinsic
def call_worker(typing: Any, function: Any, arguments: Any, thread: Any) -> Any:
    """function(arguments, thread) of a kernel's worker, by address."""
    return types.void(*[_INT64] * 3), _indirect_call(2, ir.VoidType())


@intrinsic
def call_parallel_for(
    typing: Any,
    parallel_for: Any,
    function: Any,
    first: Any,
    count: Any,
    step: Any,
    data: Any,
    inner_axes: Any,
    arrays: Any,
    threads: Any,
) -> Any:
    """The loop of a Numba threading layer, by address, as its generalised ufuncs call it."""
    return types.void(*[_INT64] * 9), _indirect_call(8, ir.VoidType())


@intrinsic
def call_modify(
    typing: Any,
    function: Any,
    scores: Any,
    slopes: Any,
    row_stride: Any,
    rows: Any,
    columns: Any,
    b: Any,
    h: Any,
    row0: Any,
    q0: Any,
    k0: Any,
    values: Any,
) -> Any:
    """Modify a score tile in place, by the address of a generated function (modify.py)."""
    return types.void(*[_INT64] * 12), _indirect_call(11, ir.VoidType())


@intrinsic
def call_classify(
    typing: Any, function: Any, b: Any, h: Any, row0: Any, row1: Any, q0: Any, q1: Any, k0: Any, k1: Any, values: Any
) -> Any:
    """EMPTY, PARTIAL or FULL for a tile with these inclusive corners, by the address of a generated function
    (modify.py).
    """
    return _INT64(*[_INT64] * 10), _indirect_call(9, ir.IntType(64))


def _parts(
    context: Any, builder: ir.IRBuilder, kind: types.Array, value: ir.Value
) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
    """Address, shape and byte strides of an array."""
    array = context.make_array(kind)(context, builder, value)
    at = builder.ptrtoint(array.data, ir.IntType(64))
    return at, cgutils.unpack_tuple(builder, array.shape), cgutils.unpack_tuple(builder, array.strides)


@intrinsic
def call_product(typing: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """c = a @ b or c += a @ b by a micro-kernel; a has any strides, b and c have contiguous rows."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (a_at, (m, k), a_strides), (b_at, _, (b_row, _)), (c_at, (_, n), (c_row, _)) = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
        )
        arguments = [values[0], a_at, *a_strides, b_at, b_row, c_at, c_row, m, n, k]
        return _indirect_call(10, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, a, b, c), codegen


def _tile_call(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
    """Call a micro-kernel on a score tile and arrays beside it, of which it gets the addresses."""
    tile, *others = (
        _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
    )
    at, shape, (row, _) = tile
    arguments = [at, row, *shape, *(other[0] for other in others)]
    return _indirect_call(len(arguments), ir.VoidType())(context, builder, signature, [values[0], *arguments])


@intrinsic
def call_column_max(typing: Any, function: Any, s: Any, top: Any) -> Any:
    return types.void(_INT64, s, top), _tile_call


@intrinsic
def call_exponentials(typing: Any, function: Any, s: Any, top: Any, total: Any) -> Any:
    """s to e^(s - top), which total adds up."""
    return types.void(_INT64, s, top, total), _tile_call


@intrinsic
def call_weights_in_pairs(typing: Any, function: Any, s: Any, top: Any, total: Any, rate: Any) -> Any:
    """s to 2^(rate * (s - top)), rounded, in pairs of rows, which total adds up; `rate`: bits of a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, shape, (row, _)), *others = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:4], values[1:4], strict=True)
        )
        arguments = [values[0], s_at, row, *shape, *(other[0] for other in others), values[4]]
        return _indirect_call(7, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, s, top, total, _INT64), codegen


@intrinsic
def call_pack(typing: Any, function: Any, source: Any, target: Any, scale: Any) -> Any:
    """target = scale * source^T; `scale`: bits of a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, shape, (s_row, _)), (t_at, _, (t_row, _)) = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:3], values[1:3], strict=True)
        )
        arguments = [values[0], s_at, s_row, t_at, t_row, *shape, values[3]]
        return _indirect_call(7, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, source, target, _INT64), codegen


def _repack(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
    """Call a micro-kernel that writes a matrix in another order."""
    (s_at, shape, (s_row, _)), (t_at, _, (t_row, _)) = (
        _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
    )
    return _indirect_call(6, ir.VoidType())(context, builder, signature, [values[0], s_at, s_row, t_at, t_row, *shape])


@intrinsic
def call_transpose(typing: Any, function: Any, source: Any, target: Any) -> Any:
    """target = source^T."""
    return types.void(_INT64, source, target), _repack


@intrinsic
def call_pack_rows(typing: Any, function: Any, source: Any, target: Any) -> Any:
    """Pairs of rows to words, by pairs.py's pack_rows or pack_rows_t."""
    return types.void(_INT64, source, target), _repack


@intrinsic
def call_round_pairs(typing: Any, function: Any, s: Any, target: Any, rows: Any, rows_row: Any) -> Any:
    """float32 to pairs of rows in `target`, which may be s itself, and to rows at an address, unless 0."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, shape, (s_row, _)), (t_at, _, (t_row, _)) = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:3], values[1:3], strict=True)
        )
        arguments = [values[0], s_at, s_row, *shape, t_at, t_row, *values[3:]]
        return _indirect_call(8, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, s, target, _INT64, _INT64), codegen


@intrinsic
def call_unpack(typing: Any, function: Any, source: Any, target: Any, factor: Any, check: Any) -> Any:
    """target[i, j] = source[j, i] * factor[i]; where one is not finite, nor is `check`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, _, (s_row, _)), (t_at, shape, (t_row, _)), factor, check = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
        )
        arguments = [values[0], s_at, s_row, t_at, t_row, *shape, factor[0], check[0]]
        return _indirect_call(8, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, source, target, factor, check), codegen


@intrinsic
def call_weights(typing: Any, function: Any, s: Any, dp: Any, lse: Any, delta: Any, scale: Any) -> Any:
    """Scores to weights, dP to dS; `scale`: bits of a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, shape, (row, _)), *others = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:5], values[1:5], strict=True)
        )
        arguments = [values[0], s_at, row, *shape, *(other[0] for other in others), values[5]]
        return _indirect_call(8, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, s, dp, lse, delta, _INT64), codegen


@intrinsic
def call_row_scores(typing: Any, function: Any, q: Any, k: Any, s: Any, d: Any, scale: Any) -> Any:
    """s = scale * q @ k^T over d elements; rows of q are padded; `scale`: bits of a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (q_at, _, (q_row, _)), (k_at, _, (k_row, _)), (s_at, shape, (s_row, _)) = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:4], values[1:4], strict=True)
        )
        arguments = [values[0], q_at, q_row, k_at, k_row, s_at, s_row, *shape, *values[4:]]
        return _indirect_call(10, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, q, k, s, _INT64, _INT64), codegen


@intrinsic
def call_row_weights(typing: Any, function: Any, s: Any, top: Any, total: Any, factor: Any) -> Any:
    return types.void(_INT64, s, top, total, factor), _tile_call


@intrinsic
def call_row_values(typing: Any, function: Any, p: Any, v: Any, o: Any, factor: Any) -> Any:
    """o = o * factor + p @ v."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (p_at, shape, (p_row, _)), (v_at, _, (v_row, _)), (o_at, (_, d), (o_row, _)), factor = (
            _parts(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
        )
        arguments = [values[0], p_at, p_row, v_at, v_row, o_at, o_row, factor[0], *shape, d]
        return _indirect_call(10, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, p, v, o, factor), codegen


# --- storage of 16 bits: widened when loaded, rounded when stored -----------------------------------------------------


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
        odd = b.and_(b.lshr(bits, i32(16)), i32(1))
        rounded = b.trunc(b.lshr(b.add(bits, b.add(odd, i32(0x7FFF))), i32(16)), i16)
        quiet = b.or_(b.trunc(b.lshr(bits, i32(16)), i16), i16(0x40))
        return b.select(b.fcmp_unordered("uno", values[0], values[0]), quiet, rounded)

    return types.uint16(types.float32), codegen


@njit
def float32_to_float32(x: Any) -> Any:
    return np.float32(x)


@njit
def float64_to_float64(x: Any) -> Any:
    return np.float64(x)

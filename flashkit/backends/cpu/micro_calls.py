"""Calls of micro-kernels and generated functions by address, from Numba.

Each intrinsic unpacks array views into the addresses, strides and extents that the C function takes; micro/*.py and
modify.py document their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT64, _WORD, _INT = types.int64, ir.IntType(64), ir.IntType(32)


def _indirect_call(arguments: int, result: ir.Type) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        kind = ir.FunctionType(result, [_WORD] * arguments)
        called = builder.call(builder.inttoptr(values[0], kind.as_pointer()), list(values[1:]))
        return context.get_dummy_value() if isinstance(result, ir.VoidType) else called

    return codegen


@intrinsic
def call_kernel(typing: Any, function: Any, arguments: Any, thread: Any) -> Any:
    """function(arguments, thread) of a kernel."""
    return types.void(*[_INT64] * 3), _indirect_call(2, ir.VoidType())


@intrinsic
def call_without_arguments(typing: Any, function: Any) -> Any:
    return types.void(_INT64), _indirect_call(0, ir.VoidType())


@intrinsic
def call_attend_bf16_pairs(
    typing: Any, function: Any, columns: Any, panel: Any, q: Any, q_panel: Any, k: Any, v: Any, s: Any, m: Any, l: Any,
    o: Any, o_panel: Any, words: Any, scale_log2: Any,
) -> Any:  # fmt: skip
    """Panels of queries against keys and values, views; the others are addresses, bytes and extents."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        function, columns, panel, q, q_panel, k, v, s, m, l, o, o_panel, words, scale_log2 = values
        k_at, (keys, _), (k_row, _) = _fields(context, builder, signature.args[5], k)
        v_at, (o_rows, _), (v_row, _) = _fields(context, builder, signature.args[6], v)
        arguments = [
            columns, panel, q, q_panel, k_at, k_row, v_at, v_row, s, m, l, o, o_panel, keys, words, o_rows, scale_log2,
        ]  # fmt: skip
        return _indirect_call(17, ir.VoidType())(context, builder, signature, [function, *arguments])

    return types.void(*[_INT64] * 5, k, v, *[_INT64] * 7), codegen


@intrinsic
def call_acquire(typing: Any, function: Any, lock: Any) -> Any:
    """Wait for a lock of Python: PyThread_acquire_lock(lock, 1)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        return _indirect_call(2, _INT)(context, builder, signature, [*values, _WORD(1)])

    return types.int32(_INT64, _INT64), codegen


@intrinsic
def call_release(typing: Any, function: Any, lock: Any) -> Any:
    """PyThread_release_lock(lock)."""
    return types.void(_INT64, _INT64), _indirect_call(1, ir.VoidType())


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
    """Modify a score tile in place."""
    return types.void(*[_INT64] * 12), _indirect_call(11, ir.VoidType())


@intrinsic
def call_visit_ds(
    typing: Any,
    function: Any,
    p: Any,
    ds: Any,
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
    """Visit dS of a tile."""
    return types.void(*[_INT64] * 13), _indirect_call(12, ir.VoidType())


@intrinsic
def call_classify(
    typing: Any, function: Any, b: Any, h: Any, row0: Any, row1: Any, q0: Any, q1: Any, k0: Any, k1: Any, values: Any
) -> Any:
    """EMPTY, PARTIAL or FULL for a tile with these inclusive corners."""
    return _INT64(*[_INT64] * 10), _indirect_call(9, ir.IntType(64))


def _fields(
    context: Any, builder: ir.IRBuilder, kind: types.Array, value: ir.Value
) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
    """Address, shape and byte strides of an array."""
    array = context.make_array(kind)(context, builder, value)
    at = builder.ptrtoint(array.data, ir.IntType(64))
    return at, cgutils.unpack_tuple(builder, array.shape), cgutils.unpack_tuple(builder, array.strides)


@intrinsic
def call_gemm(typing: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """c = a @ b or c += a @ b; `a` has any strides, b and c have contiguous rows."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (a_at, (m, k), a_strides), (b_at, _, (b_row, _)), (c_at, (_, n), (c_row, _)) = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
        )
        arguments = [values[0], a_at, *a_strides, b_at, b_row, c_at, c_row, m, n, k]
        return _indirect_call(10, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, a, b, c), codegen


def _tile_call(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
    """Call a micro-kernel on a score tile and on the addresses of other arrays."""
    tile, *others = (
        _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
    )
    at, shape, (row, _) = tile
    arguments = [at, row, *shape, *(other[0] for other in others)]
    return _indirect_call(len(arguments), ir.VoidType())(context, builder, signature, [values[0], *arguments])


@intrinsic
def call_column_max(typing: Any, function: Any, s: Any, m: Any) -> Any:
    return types.void(_INT64, s, m), _tile_call


@intrinsic
def call_exp_sum(typing: Any, function: Any, s: Any, m: Any, l: Any) -> Any:
    """s = e^(s - m); l += column sums."""
    return types.void(_INT64, s, m, l), _tile_call


@intrinsic
def call_online_softmax_bf16_pairs(
    typing: Any, function: Any, s: Any, m: Any, l: Any, o: Any, scale_log2: Any
) -> Any:
    """A step of the online softmax, s to p as bf16 pairs of rows; `scale_log2`: bits of a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, shape, (s_row, _)), m_of, l_of, (o_at, (o_rows, _), (o_row, _)) = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:5], values[1:5], strict=True)
        )
        arguments = [values[0], s_at, s_row, *shape, m_of[0], l_of[0], o_at, o_row, o_rows, values[5]]
        return _indirect_call(10, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, s, m, l, o, _INT64), codegen


@intrinsic
def call_pack_transposed(typing: Any, function: Any, source: Any, target: Any, scale: Any) -> Any:
    """target = scale * source^T; `scale`: bits of a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, shape, (s_row, _)), (t_at, _, (t_row, _)) = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:3], values[1:3], strict=True)
        )
        arguments = [values[0], s_at, s_row, t_at, t_row, *shape, values[3]]
        return _indirect_call(7, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, source, target, _INT64), codegen


def _repack(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
    """Call a micro-kernel that copies a matrix into another layout."""
    (s_at, shape, (s_row, _)), (t_at, _, (t_row, _)) = (
        _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
    )
    return _indirect_call(6, ir.VoidType())(context, builder, signature, [values[0], s_at, s_row, t_at, t_row, *shape])


@intrinsic
def call_transpose(typing: Any, function: Any, source: Any, target: Any) -> Any:
    """target = source^T."""
    return types.void(_INT64, source, target), _repack


@intrinsic
def call_pack_rows(typing: Any, function: Any, source: Any, target: Any) -> Any:
    """bf16 pairs of rows, by pack_rows or pack_rows_t, or padded rows, by pad_rows."""
    return types.void(_INT64, source, target), _repack


@intrinsic
def call_round_bf16_pairs(typing: Any, function: Any, s: Any, target: Any, rows: Any, rows_row: Any) -> Any:
    """float32 to bf16 pairs of rows in `target`, which may be s itself, and to rows at an address, unless 0."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, shape, (s_row, _)), (t_at, _, (t_row, _)) = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:3], values[1:3], strict=True)
        )
        arguments = [values[0], s_at, s_row, *shape, t_at, t_row, *values[3:]]
        return _indirect_call(8, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, s, target, _INT64, _INT64), codegen


@intrinsic
def call_unpack_transposed(typing: Any, function: Any, source: Any, target: Any, factor: Any, check: Any) -> Any:
    """target[i, j] = source[j, i] * factor[i]; `check` becomes NaN where one of them is not finite."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (s_at, _, (s_row, _)), (t_at, shape, (t_row, _)), factor, check = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
        )
        arguments = [values[0], s_at, s_row, t_at, t_row, *shape, factor[0], check[0]]
        return _indirect_call(8, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, source, target, factor, check), codegen


def _softmax_backward(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
    (s_at, shape, (row, _)), *others = (
        _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:5], values[1:5], strict=True)
    )
    arguments = [values[0], s_at, row, *shape, *(other[0] for other in others), *values[5:]]
    return _indirect_call(len(arguments) - 1, ir.VoidType())(context, builder, signature, arguments)


@intrinsic
def call_softmax_backward(typing: Any, function: Any, s: Any, dp: Any, lse: Any, delta: Any, scale: Any) -> Any:
    """S to P, dP to dS; `scale`: bits of a float64."""
    return types.void(_INT64, s, dp, lse, delta, _INT64), _softmax_backward


@intrinsic
def call_softmax_backward_bf16_pairs(
    typing: Any, function: Any, s: Any, dp: Any, lse: Any, delta: Any, scale: Any, rows: Any, rows_row: Any,
    p_words: Any, ds_words: Any, words_row: Any, s_scale: Any,
) -> Any:  # fmt: skip
    """S to P, dP to dS as bf16 pairs, and dS to rows, at addresses; scales: bits of a float64."""
    return types.void(_INT64, s, dp, lse, delta, *[_INT64] * 7), _softmax_backward


@intrinsic
def call_attend_backward_bf16_pairs(
    typing: Any, function: Any, q: Any, k: Any, do: Any, v: Any, p_words: Any, ds_words: Any, lse: Any, delta: Any,
    scale: Any, s_scale: Any, rows: Any, rows_row: Any, chunk: Any,
) -> Any:  # fmt: skip
    """P and dS of a tile as bf16 pairs, in place of scores, and dS as rows; all from `scale` on as numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        q_of, k_of, do_of, v_of, p_of, ds_of, lse_of, delta_of = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:9], values[1:9], strict=True)
        )
        arguments = [values[0]]
        for left, right in ((q_of, k_of), (do_of, v_of)):
            arguments += [left[0], left[2][0], right[0], right[2][0], left[1][1]]
        arguments += [p_of[0], ds_of[0], p_of[2][0], *p_of[1], lse_of[0], delta_of[0], *values[9:]]
        return _indirect_call(22, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, q, k, do, v, p_words, ds_words, lse, delta, *[_INT64] * 5), codegen


@intrinsic
def call_gemv_qk(typing: Any, function: Any, q: Any, k: Any, s: Any, d: Any, scale: Any) -> Any:
    """s = scale * q @ k^T over d elements; rows of q are padded; `scale`: bits of a float64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (q_at, _, (q_row, _)), (k_at, _, (k_row, _)), (s_at, shape, (s_row, _)) = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:4], values[1:4], strict=True)
        )
        arguments = [values[0], q_at, q_row, k_at, k_row, s_at, s_row, *shape, *values[4:]]
        return _indirect_call(10, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, q, k, s, _INT64, _INT64), codegen


@intrinsic
def call_gemv_softmax(typing: Any, function: Any, s: Any, m: Any, l: Any, rescale: Any) -> Any:
    return types.void(_INT64, s, m, l, rescale), _tile_call


@intrinsic
def call_gemv_pv(typing: Any, function: Any, p: Any, v: Any, o: Any, rescale: Any) -> Any:
    """o = o * rescale + p @ v."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        (p_at, shape, (p_row, _)), (v_at, _, (v_row, _)), (o_at, (_, d), (o_row, _)), rescale = (
            _fields(context, builder, kind, value) for kind, value in zip(signature.args[1:], values[1:], strict=True)
        )
        arguments = [values[0], p_at, p_row, v_at, v_row, o_at, o_row, rescale[0], *shape, d]
        return _indirect_call(10, ir.VoidType())(context, builder, signature, arguments)

    return types.void(_INT64, p, v, o, rescale), codegen

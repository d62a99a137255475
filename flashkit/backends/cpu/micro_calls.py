"""Calls of micro-kernels and generated functions by address, from Numba.

micro/*.py and modify.py document the functions and the meaning of their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .views import with_parameters

_FIELDS = {"rows": ("shape", 0), "columns": ("shape", 1), "row": ("strides", 0), "column": ("strides", 1)}


def _call(arguments: str, result: Any = types.void) -> Any:
    """A function for compiled code, f(address of a C function, *parameters), that calls the C function.

    arguments: what the C function gets, in its order. `x` is a number, or the address of an array view; `x.rows` and
    `x.columns` are extents of a view, `x.row` and `x.column` its strides in bytes. The names, in the order in which
    they first appear, are the parameters.
    """
    words = [word.partition(".")[::2] for word in arguments.split()]
    names = list(dict.fromkeys(name for name, _ in words))

    def call(typing: Any, function: Any, *given: Any) -> Any:
        kinds = [kind if isinstance(kind, types.Array) else types.int64 for kind in given]
        return result(types.int64, *kinds), codegen

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
        views = {
            name: context.make_array(kind)(context, builder, value)
            for name, kind, value in zip(names, signature.args[1:], values[1:], strict=True)
            if isinstance(kind, types.Array)
        }
        numbers = dict(zip(names, values[1:], strict=True))

        def argument(name: str, field: str) -> ir.Value:
            if field:
                attribute, axis = _FIELDS[field]
                return cgutils.unpack_tuple(builder, getattr(views[name], attribute))[axis]
            return builder.ptrtoint(views[name].data, ir.IntType(64)) if name in views else numbers[name]

        passed = [argument(*word) for word in words]
        returned = ir.VoidType() if result is types.void else context.get_value_type(result)
        kind = ir.FunctionType(returned, [value.type for value in passed])
        value = builder.call(builder.inttoptr(values[0], kind.as_pointer()), passed)
        return context.get_dummy_value() if result is types.void else value

    return with_parameters(call, ["function", *names])


# Kernels; the locks of Python by which threads of the pool sleep, PyThread_acquire_lock and PyThread_release_lock.
call_kernel = _call("arguments thread")
call_acquire = _call("lock wait", types.int32)
call_release = _call("lock")
call_clock = _call("clock time", types.int32)
call_without_arguments = _call("")

# Functions generated for a modification: scores of a tile in place, dS of a tile, the state of a tile by its inclusive
# corners.
call_modify = _call("tile extra tile.row tile.rows tile.columns b h row0 q0 k0 values")
call_visit_ds = _call("p ds slopes ds.row ds.rows ds.columns b h row0 q0 k0 values again")
call_classify = _call("b h row0 row1 q0 q1 k0 k1 values", types.int64)

# Micro-kernels. Scales are bits of a float64.
call_gemm = _call("a a.row a.column b b.row c c.row a.rows c.columns a.columns")
call_online_softmax = _call("s s.row s.rows s.columns m l o o.row o.rows")
call_online_softmax_stats = _call("s s.row s.rows s.columns m l o o.row o.rows tops sums")
call_softmax_backward = _call("s s.row s.rows s.columns dp lse delta scale")
call_pack_transposed = _call("source source.row target target.row source.rows source.columns scale")
call_unpack_transposed = _call("source source.row target target.row target.rows target.columns factor check")
call_transpose = call_pack_rows = _call("source source.row target target.row source.rows source.columns")
call_gemv_qk = _call("q q.row k k.row s s.row s.rows s.columns d scale")
call_gemv_softmax = _call("s s.row s.rows s.columns m l rescale")
call_gemv_pv = _call("p p.row v v.row o o.row rescale p.rows p.columns o.columns")

# Micro-kernels for bf16 pairs.
call_round_bf16_pairs = _call("s s.row s.rows s.columns target target.row rows rows_row")
call_online_softmax_bf16_pairs = _call("s s.row s.rows s.columns m l o o.row o.rows scale_log2")
call_attend_bf16_pairs = _call("columns panel q q_panel k k.row v v.row s m l o o_panel k.rows words v.rows scale_log2")
call_softmax_backward_bf16_pairs = _call("s s.row s.rows s.columns dp lse delta scale rows rows_row")

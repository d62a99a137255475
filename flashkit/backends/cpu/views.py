"""Memory as kernels see it: array views made from addresses, numbers made from bits or from storage of 16 and 8 bits,
atomic counters.

The compiled signature of a kernel is that of addresses, so it is the same for every stride and layout, and a call boxes
no arrays. These intrinsics turn addresses back into Numba arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .micro.vector import narrow, widen
from .micro.vector import prefetch as emit_prefetch

_INT64 = types.int64


def with_parameters(function: Any, names: Sequence[str]) -> Any:
    """An intrinsic of parameters with these names. Numba reads them from the signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("typing", *names)])
    return intrinsic(function)


def emitted(result: Any, *given: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function of LLVM's builder and values as a function of these types for compiled code."""

    def of(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result is types.none else value

        def typed(typing: Any, *_: Any) -> Any:
            return result(*given), codegen

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return with_parameters(typed, list(inspect.signature(emit).parameters)[1:])

    return of


def _view(ndim: int) -> Any:
    """A view of the elements from an address on: (address, extents..., byte strides..., dtype)."""

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

    def view(typing: Any, *given: Any) -> Any:
        dtype = given[-1]
        return types.Array(dtype.dtype, ndim, "A")(*[_INT64] * (1 + 2 * ndim), dtype), codegen

    return with_parameters(view, ["address", *(f"{of}{axis}" for of in "ns" for axis in range(ndim)), "dtype"])


vector, matrix, tensor3, tensor4 = map(_view, range(1, 5))


def _pointer(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, ir.IntType(64).as_pointer())


@emitted(_INT64, _INT64)
def integer_at(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The 64-bit integer at an address."""
    return b.load(_pointer(b, address))


@emitted(_INT64, _INT64)
def atomic_integer_at(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The 64-bit integer at an address, which another thread may write."""
    return b.load_atomic(_pointer(b, address), "monotonic", 8)


@emitted(types.none, _INT64)
def prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Bring the cache line of an address near, without waiting for it."""
    emit_prefetch(b, address)


@emitted(types.float64, _INT64)
def double_from_bits(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The float64 whose bits are given as an integer."""
    return b.bitcast(bits, ir.DoubleType())


@emitted(types.float32, types.int32)
def single_from_bits(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The float32 whose bits are given as a 32-bit integer."""
    return b.bitcast(bits, ir.FloatType())


@emitted(_INT64, _INT64)
def atomic_increment(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Claim the next number of a counter that threads share."""
    return b.atomic_rmw("add", _pointer(b, address), ir.IntType(64)(1), "monotonic")


@emitted(_INT64, _INT64)
def atomic_arrive(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Count an arrival; returns how many came before. The caller sees what the earlier arrivals have written."""
    return b.atomic_rmw("add", _pointer(b, address), ir.IntType(64)(1), "acq_rel")


@emitted(_INT64, _INT64)
def atomic_read(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The 64-bit integer at an address; the caller sees what its writer wrote before it."""
    return b.load_atomic(_pointer(b, address), "acquire", 8)


@emitted(_INT64, _INT64, _INT64)
def atomic_exchange(b: ir.IRBuilder, address: ir.Value, new: ir.Value) -> ir.Value:
    """Write the integer at an address; returns its previous value."""
    return b.atomic_rmw("xchg", _pointer(b, address), new, "seq_cst")


@emitted(types.boolean, _INT64, _INT64, _INT64)
def atomic_replace(b: ir.IRBuilder, address: ir.Value, old: ir.Value, new: ir.Value) -> ir.Value:
    """Write the integer at an address if it is `old`; returns whether it was."""
    return b.extract_value(b.cmpxchg(_pointer(b, address), old, new, "seq_cst", "seq_cst"), 1)


# --- storage of 16 and 8 bits: widened when loaded, rounded when stored, as micro-kernels do --------------------------


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
float32_to_float32 = emitted(types.float32, types.float32)(lambda b, x: x)
float64_to_float64 = emitted(types.float64, types.float64)(lambda b, x: x)

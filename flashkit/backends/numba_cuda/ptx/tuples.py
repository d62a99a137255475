"""Functions of one element, applied to all registers of a tile, and unrolled loops.

Numba would compile loops over tuples of a hundred registers for minutes. Here it compiles a function once, the
generated code calls it for each register, and LLVM inlines the calls.

A tile has the layout of mma and wgmma accumulators (matrices.py): element 4 i + 2 half + c lies in row `half` of a
lane's two rows, and 8 i + c columns after the lane's first column. A warp with two tiles of 16 rows interleaves them:
eight registers, 16 columns, of one tile, then of the other. `rows` holds a value for each of a lane's two or four rows;
a function gets the value of its element's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.cuda import types
from numba.cuda.extending import intrinsic

from .asm import parts, together

__all__ = [
    "alike", "both", "chain", "each", "each_at", "filled", "fold", "groups", "join", "listed", "pairs_at", "part",
    "repeat",
]  # fmt: skip


def _row(i: int, rows: int) -> int:
    return 2 * (i // 8 % (rows // 2)) + i // 2 % 2


def _column(i: int, rows: int) -> int:
    return i // (4 * rows) * 16 + i // 4 % 2 * 8 + i % 2


class _Call:
    """A device function, resolved for argument types."""

    def __init__(self, typing: Any, f: Any, *kinds: Any) -> None:
        self.f, self.kinds = f, kinds
        self.signature = f.get_call_type(typing, kinds, {})
        self.result = self.signature.return_type

    def of(self, context: Any, builder: Any) -> Callable[..., Any]:
        function = context.get_function(self.f, self.signature)

        def call(*values: Any) -> Any:
            cast = [context.cast(builder, *each) for each in zip(values, self.kinds, self.signature.args)]
            return function(builder, cast)

        return call


def _index(context: Any, i: int) -> Any:
    return context.get_constant(types.int32, i)


@intrinsic
def each(typing: Any, f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """each(f, tile, rows, rest): the tile of f(x, row, rest) for every element x."""
    f_call = _Call(typing, f, tile.dtype, rows[0], rest)
    result = types.UniTuple(f_call.result, tile.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, of = f_call.of(context, builder), parts(builder, arguments[2], rows)
        elements = enumerate(parts(builder, arguments[1], tile))
        results = [call(x, of[_row(i, rows.count)], arguments[3]) for i, x in elements]
        return together(context, builder, results, result)

    return result(f, tile, rows, rest), generate


@intrinsic
def each_at(typing: Any, f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """each_at(f, tile, rows, rest): the tile of f(x, column, row, rest) for every element x."""
    f_call = _Call(typing, f, tile.dtype, types.int32, rows[0], rest)
    result = types.UniTuple(f_call.result, tile.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, of, n = f_call.of(context, builder), parts(builder, arguments[2], rows), rows.count
        elements = enumerate(parts(builder, arguments[1], tile))
        results = [call(x, _index(context, _column(i, n)), of[_row(i, n)], arguments[3]) for i, x in elements]
        return together(context, builder, results, result)

    return result(f, tile, rows, rest), generate


@intrinsic
def pairs_at(typing: Any, f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """pairs_at(f, tile, rows, rest): the tile of f(x, y, column, row, rest), two elements, for neighbours x, y."""
    f_call = _Call(typing, f, tile.dtype, tile.dtype, types.int32, rows[0], rest)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, of, n = f_call.of(context, builder), parts(builder, arguments[2], rows), rows.count
        elements, results = parts(builder, arguments[1], tile), []
        for i in range(0, tile.count, 2):
            value = call(*elements[i : i + 2], _index(context, _column(i, n)), of[_row(i, n)], arguments[3])
            results += parts(builder, value, f_call.result)
        return together(context, builder, results, tile)

    return tile(f, tile, rows, rest), generate


@intrinsic
def fold(typing: Any, f: Any, tile: Any, start: Any) -> Any:
    """fold(f, tile, start): reduces each of a lane's rows by f(x, y), starting from the row's `start`. Two independent
    chains per row halve the latency.
    """
    f_call = _Call(typing, f, tile.dtype, tile.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, rows = f_call.of(context, builder), parts(builder, arguments[2], start)
        strands: dict[tuple[int, int], Any] = {}
        for i, x in enumerate(parts(builder, arguments[1], tile)):
            at = _row(i, start.count), i % 2
            strands[at] = call(strands[at], x) if at in strands else x
        results = [call(call(strands[r, 0], strands[r, 1]), x) for r, x in enumerate(rows)]
        return together(context, builder, results, start)

    return start(f, tile, start), generate


@intrinsic
def join(typing: Any, f: Any, tile: Any) -> Any:
    """join(f, tile): f(x, y) for neighbours x, y in a row: half as many registers."""
    f_call = _Call(typing, f, tile.dtype, tile.dtype)
    result = types.UniTuple(f_call.result, tile.count // 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, elements = f_call.of(context, builder), parts(builder, arguments[1], tile)
        results = [call(*elements[i : i + 2]) for i in range(0, tile.count, 2)]
        return together(context, builder, results, result)

    return result(f, tile), generate


# --- any tuples -------------------------------------------------------------------------------------------------------


@intrinsic
def alike(typing: Any, f: Any, values: Any, rest: Any) -> Any:
    """alike(f, values, rest): the tuple of f(x, rest)."""
    f_call = _Call(typing, f, values.dtype, rest)
    result = types.UniTuple(f_call.result, values.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call = f_call.of(context, builder)
        results = [call(x, arguments[2]) for x in parts(builder, arguments[1], values)]
        return together(context, builder, results, result)

    return result(f, values, rest), generate


@intrinsic
def both(typing: Any, f: Any, left: Any, right: Any) -> Any:
    """both(f, left, right): the tuple of f(x, y), element by element."""
    f_call = _Call(typing, f, left.dtype, right.dtype)
    result = types.UniTuple(f_call.result, left.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call = f_call.of(context, builder)
        pairs = zip(parts(builder, arguments[1], left), parts(builder, arguments[2], right), strict=True)
        return together(context, builder, [call(*pair) for pair in pairs], result)

    return result(f, left, right), generate


@intrinsic
def listed(typing: Any, f: Any, count: Any, rest: Any) -> Any:
    """listed(f, n, rest): the tuple f(0, rest), ..., f(n - 1, rest)."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    f_call = _Call(typing, f, types.int32, rest)
    result = types.UniTuple(f_call.result, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call = f_call.of(context, builder)
        results = [call(_index(context, i), arguments[2]) for i in range(result.count)]
        return together(context, builder, results, result)

    return result(f, count, rest), generate


@intrinsic
def filled(typing: Any, number: Any, count: Any) -> Any:
    """filled(x, n): the tuple of n times x."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    kind = types.unliteral(number)
    result = types.UniTuple(kind, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return together(context, builder, [arguments[0]] * result.count, result)

    return result(kind, count), generate


@intrinsic
def part(typing: Any, values: Any, start: Any, count: Any) -> Any:
    """part(values, i, n): elements i ... i + n - 1."""
    if not (isinstance(start, types.IntegerLiteral) and isinstance(count, types.IntegerLiteral)):
        return None
    first, result = start.literal_value, types.UniTuple(values.dtype, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        elements = parts(builder, arguments[0], values)[first : first + result.count]
        return together(context, builder, elements, result)

    return result(values, start, count), generate


# --- unrolled loops ---------------------------------------------------------------------------------------------------


@intrinsic
def groups(typing: Any, f: Any, size: Any, tile: Any, rest: Any) -> Any:
    """groups(f, n, tile, rest): the tile of f(i, registers, rest) for every n consecutive registers; none if f returns
    nothing.
    """
    if not isinstance(size, types.IntegerLiteral):
        return None
    piece = types.UniTuple(tile.dtype, size.literal_value)
    f_call = _Call(typing, f, types.int32, piece, rest)
    nothing = not isinstance(f_call.result, types.UniTuple)
    result = types.none if nothing else types.UniTuple(f_call.result.dtype, tile.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, elements, results = f_call.of(context, builder), parts(builder, arguments[2], tile), []
        for i in range(tile.count // piece.count):
            registers = together(context, builder, elements[i * piece.count : (i + 1) * piece.count], piece)
            value = call(_index(context, i), registers, arguments[3])
            results += [] if nothing else parts(builder, value, f_call.result)
        return context.get_dummy_value() if nothing else together(context, builder, results, result)

    return result(f, size, tile, rest), generate


@intrinsic
def chain(typing: Any, f: Any, size: Any, values: Any, state: Any, rest: Any) -> Any:
    """chain(f, n, values, state, rest): state = f(i, registers, state, rest) for every n consecutive values, in
    order.
    """
    if not isinstance(size, types.IntegerLiteral):
        return None
    piece, state = types.UniTuple(values.dtype, size.literal_value), types.unliteral(state)
    f_call = _Call(typing, f, types.int32, piece, state, rest)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, elements, value = f_call.of(context, builder), parts(builder, arguments[2], values), arguments[3]
        for i in range(values.count // piece.count):
            registers = together(context, builder, elements[i * piece.count : (i + 1) * piece.count], piece)
            value = call(_index(context, i), registers, value, arguments[4])
        return value

    return state(f, size, values, state, rest), generate


@intrinsic
def repeat(typing: Any, f: Any, count: Any, state: Any, rest: Any) -> Any:
    """repeat(f, n, state, rest): state = f(i, state, rest) for i = 0 ... n - 1, unrolled."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    state = types.unliteral(state)  # a literal True is only the first value
    f_call = _Call(typing, f, types.int32, state, rest)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, value = f_call.of(context, builder), arguments[2]
        for i in range(count.literal_value):
            value = call(_index(context, i), value, arguments[3])
        return value

    return state(f, count, state, rest), generate

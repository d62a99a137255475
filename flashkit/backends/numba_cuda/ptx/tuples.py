"""Functions of a single number, applied to all registers of a tile.

Numba would take minutes for loops over tuples of a hundred registers; here the function is compiled once and called
with each of them, and LLVM puts it in place.

A tile is laid out as products leave it (matrices.py): element 4 i + 2 half + c lies in one of two rows of a lane, `half`
of them, and in column 8 i + c after the lane's first. `rows`: a pair, what belongs to either row; a function gets that of
its element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.cuda import types
from numba.cuda.extending import intrinsic

from .asm import parts, together

__all__ = [
    "each", "each_at", "filled", "fold", "groups", "join", "pairs_at", "part",
]  # fmt: skip


def _half(i: int) -> int:
    return i // 2 % 2


def _column(i: int) -> int:
    return i // 4 * 8 + i % 2


def _callable(typing: Any, f: Any, arguments: Sequence[Any]) -> Any:
    return f.get_call_type(typing, tuple(arguments), {})


def _caller(context: Any, builder: Any, f: Any, signature: Any) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    function = context.get_function(f, signature)

    def call(values: Sequence[Any], kinds: Sequence[Any]) -> Any:
        cast = [context.cast(builder, *each) for each in zip(values, kinds, signature.args)]
        return function(builder, cast)

    return call


@intrinsic
def each(typing: Any, f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """each(f, tile, rows, rest): f(x, row, rest) of every element, as a tile."""
    of_row = rows[0]
    chosen = _callable(typing, f, (tile.dtype, of_row, rest))
    result = types.UniTuple(chosen.return_type, tile.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call = _caller(context, builder, f, chosen)
        pair = [builder.extract_value(arguments[2], i) for i in range(2)]
        kinds = (tile.dtype, of_row, rest)
        made = [
            call((x, pair[_half(i)], arguments[3]), kinds) for i, x in enumerate(parts(builder, arguments[1], tile))
        ]
        return together(context, builder, made, result)

    return result(f, tile, rows, rest), generate


@intrinsic
def each_at(typing: Any, f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """each_at(f, tile, rows, rest): f(x, column, row, rest) of every element, as a tile."""
    of_row = rows[0]
    chosen = _callable(typing, f, (tile.dtype, types.int32, of_row, rest))
    result = types.UniTuple(chosen.return_type, tile.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call = _caller(context, builder, f, chosen)
        pair = [builder.extract_value(arguments[2], i) for i in range(2)]
        kinds = (tile.dtype, types.int32, of_row, rest)
        made = [
            call((x, context.get_constant(types.int32, _column(i)), pair[_half(i)], arguments[3]), kinds)
            for i, x in enumerate(parts(builder, arguments[1], tile))
        ]
        return together(context, builder, made, result)

    return result(f, tile, rows, rest), generate


@intrinsic
def pairs_at(typing: Any, f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """pairs_at(f, tile, rows, rest): f(x, y, column, row, rest) of neighbours in a row, two new numbers, as a tile."""
    of_row = rows[0]
    chosen = _callable(typing, f, (tile.dtype, tile.dtype, types.int32, of_row, rest))

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call = _caller(context, builder, f, chosen)
        pair = [builder.extract_value(arguments[2], i) for i in range(2)]
        kinds = (tile.dtype, tile.dtype, types.int32, of_row, rest)
        elements, made = parts(builder, arguments[1], tile), []
        for i in range(0, tile.count, 2):
            column = context.get_constant(types.int32, _column(i))
            made += parts(
                builder,
                call((elements[i], elements[i + 1], column, pair[_half(i)], arguments[3]), kinds),
                chosen.return_type,
            )
        return together(context, builder, made, tile)

    return tile(f, tile, rows, rest), generate


@intrinsic
def fold(typing: Any, f: Any, tile: Any) -> Any:
    """fold(f, tile): the elements of either row joined by f(x, y), as a pair; in two strands, which do not wait for each
    other."""
    chosen = _callable(typing, f, (tile.dtype, tile.dtype))
    result = types.UniTuple(tile.dtype, 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call = _caller(context, builder, f, chosen)
        kinds = (tile.dtype, tile.dtype)
        strands: list[Any] = [None] * 4
        for i, x in enumerate(parts(builder, arguments[1], tile)):
            strands[i % 4] = x if i < 4 else call((strands[i % 4], x), kinds)
        rows = [call((strands[2 * half], strands[2 * half + 1]), kinds) for half in range(2)]
        return together(context, builder, rows, result)

    return result(f, tile), generate


@intrinsic
def join(typing: Any, f: Any, tile: Any) -> Any:
    """join(f, tile): f(x, y) of neighbours in a row, half as many registers."""
    chosen = _callable(typing, f, (tile.dtype, tile.dtype))
    result = types.UniTuple(chosen.return_type, tile.count // 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, elements = _caller(context, builder, f, chosen), parts(builder, arguments[1], tile)
        made = [call(elements[i : i + 2], (tile.dtype, tile.dtype)) for i in range(0, tile.count, 2)]
        return together(context, builder, made, result)

    return result(f, tile), generate


@intrinsic
def filled(typing: Any, number: Any, count: Any) -> Any:
    """filled(x, n): a tile of n registers, each x."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    kind = types.unliteral(number)
    result = types.UniTuple(kind, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return together(context, builder, [arguments[0]] * result.count, result)

    return result(kind, count), generate


@intrinsic
def part(typing: Any, tile: Any, start: Any, count: Any) -> Any:
    """part(tile, i, n): registers i ... i + n - 1."""
    if not (isinstance(start, types.IntegerLiteral) and isinstance(count, types.IntegerLiteral)):
        return None
    first, result = start.literal_value, types.UniTuple(tile.dtype, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        elements = parts(builder, arguments[0], tile)[first : first + result.count]
        return together(context, builder, elements, result)

    return result(tile, start, count), generate


@intrinsic
def groups(typing: Any, f: Any, size: Any, tile: Any, rest: Any) -> Any:
    """groups(f, n, tile, rest): f(i, registers, rest) of every n neighbouring registers, n new ones, as a tile."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    number, rest = size.literal_value, types.unliteral(rest)
    piece = types.UniTuple(tile.dtype, number)
    chosen = _callable(typing, f, (types.int32, piece, rest))
    nothing = not isinstance(chosen.return_type, types.UniTuple)
    result = types.none if nothing else types.UniTuple(chosen.return_type.dtype, tile.count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        call, elements = _caller(context, builder, f, chosen), parts(builder, arguments[2], tile)
        made = []
        for i in range(0, tile.count, number):
            given = together(context, builder, elements[i : i + number], piece)
            index = context.get_constant(types.int32, i // number)
            new = call((index, given, arguments[3]), (types.int32, piece, rest))
            if not nothing:
                made += parts(builder, new, chosen.return_type)
        return context.get_dummy_value() if nothing else together(context, builder, made, result)

    return result(f, size, tile, rest), generate

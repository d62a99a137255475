"""Functions of one element, applied to all registers of a tile, and unrolled loops.

Numba would compile loops over tuples of a hundred registers for minutes. Here it compiles a function once, the
generated code calls it for each register, and LLVM inlines the calls.

A tile has the layout of mma and wgmma accumulators (instructions.py): element 4 i + 2 half + c lies in row `half` of a
lane's two rows, and 8 i + c columns after the lane's first column. A warp with two tiles of 16 rows interleaves them:
eight registers, 16 columns, of one tile, then of the other. `rows` holds a value for each of a lane's two or four rows;
a function gets the value of its element's row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types

from .asm import intrinsic_of, together
from .instructions import across, exp2_fast, greater

__all__ = [
    "across_row", "add", "alike", "both", "chain", "each", "each_at", "exponentials", "filled", "fold", "groups",
    "join", "listed", "pairs_at", "part", "repeat", "row_max", "row_sum", "rows_scaled", "scaled",
]  # fmt: skip


@dataclass
class Value:
    """A value of a kernel: Numba's type and, once code is generated, LLVM's value. A tuple is a sequence of values."""

    kind: Any
    value: Any = None
    builder: Any = None

    def __len__(self) -> int:
        return int(self.kind.count)

    def __getitem__(self, i: int) -> Value:
        value = None if self.builder is None else self.builder.extract_value(self.value, i)
        return Value(self.kind.dtype, value, self.builder)

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))


class _Code:
    """Where code is generated, or, without a context, types alone are inferred: makes Values and calls functions."""

    def __init__(self, typing: Any, signatures: dict[Any, Any], context: Any = None, builder: Any = None) -> None:
        self.typing, self.signatures, self.context, self.builder = typing, signatures, context, builder

    def value(self, x: Any) -> Value:
        if isinstance(x, Value):
            return x
        if isinstance(x, int):
            return Value(types.int32, self.context and self.context.get_constant(types.int32, x), self.builder)
        kind = types.UniTuple(x[0].kind, len(x)) if x else types.none
        if self.context is None:
            return Value(kind)
        elements = [each.value for each in x]
        value = together(self.context, self.builder, elements, kind) if x else self.context.get_dummy_value()
        return Value(kind, value, self.builder)

    def function(self, f: Any) -> Callable[..., Value]:
        def call(*arguments: Any) -> Value:
            values = [self.value(x) for x in arguments]
            kinds = f, *(x.kind for x in values)
            if kinds not in self.signatures:
                self.signatures[kinds] = f.get_call_type(self.typing, kinds[1:], {})
            signature = self.signatures[kinds]
            if self.context is None:
                return Value(signature.return_type)
            cast = [self.context.cast(self.builder, x.value, x.kind, to) for x, to in zip(values, signature.args)]
            result = self.context.get_function(f, signature)(self.builder, cast)
            return Value(signature.return_type, result, self.builder)

        return call


def unrolled(body: Callable[..., Any]) -> Any:
    """The intrinsic that `body` unrolls: run once for the types and once for the code, with the device function `f` as
    a callable, `int` arguments as constants, and others as Values. It returns a Value or a list of them, a tuple.
    """
    parameters = inspect.signature(body).parameters.values()
    constants = [each.annotation == "int" for each in parameters]
    functions = [each.name == "f" for each in parameters]

    def define(typing: Any, *kinds: Any) -> Any:
        if not all(isinstance(kind, types.IntegerLiteral) for kind, constant in zip(kinds, constants) if constant):
            return None
        kinds = tuple(kind if constant else types.unliteral(kind) for kind, constant in zip(kinds, constants))
        signatures: dict[Any, Any] = {}

        def run(values: Sequence[Any], *where: Any) -> Value:
            code, arguments = _Code(typing, signatures, *where), []
            for kind, value, constant, function in zip(kinds, values, constants, functions):
                arguments.append(
                    kind.literal_value if constant else code.function(kind) if function
                    else Value(kind, value, code.builder)
                )  # fmt: skip
            return code.value(body(*arguments))

        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            return run(arguments, context, builder).value

        return run([None] * len(kinds)).kind(*kinds), generate

    return intrinsic_of(len(constants), define)


def _row(i: int, rows: int) -> int:
    return 2 * (i // 8 % (rows // 2)) + i // 2 % 2


def _column(i: int, rows: int) -> int:
    return i // (4 * rows) * 16 + i // 4 % 2 * 8 + i % 2


# --- tiles ------------------------------------------------------------------------------------------------------------


@unrolled
def each(f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """each(f, tile, rows, rest): the tile of f(x, row, rest) for every element x."""
    return [f(x, rows[_row(i, len(rows))], rest) for i, x in enumerate(tile)]


@unrolled
def each_at(f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """each_at(f, tile, rows, rest): the tile of f(x, column, row, rest) for every element x."""
    n = len(rows)
    return [f(x, _column(i, n), rows[_row(i, n)], rest) for i, x in enumerate(tile)]


@unrolled
def pairs_at(f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    """pairs_at(f, tile, rows, rest): the tile of f(x, y, column, row, rest), two elements, for neighbours x, y."""
    n = len(rows)
    pairs = (f(tile[i], tile[i + 1], _column(i, n), rows[_row(i, n)], rest) for i in range(0, len(tile), 2))
    return [x for pair in pairs for x in pair]


@unrolled
def fold(f: Any, tile: Any, start: Any) -> Any:
    """fold(f, tile, start): each row by f(x, y) from its `start`, in two chains that halve the latency."""
    strands: dict[tuple[int, int], Value] = {}
    for i, x in enumerate(tile):
        at = _row(i, len(start)), i % 2
        strands[at] = f(strands[at], x) if at in strands else x
    return [f(f(strands[r, 0], strands[r, 1]), x) for r, x in enumerate(start)]


@unrolled
def join(f: Any, tile: Any) -> Any:
    """join(f, tile): f(x, y) for neighbours x, y in a row: half as many registers."""
    return [f(tile[i], tile[i + 1]) for i in range(0, len(tile), 2)]


# --- any tuples -------------------------------------------------------------------------------------------------------


@unrolled
def alike(f: Any, values: Any, rest: Any) -> Any:
    """alike(f, values, rest): the tuple of f(x, rest)."""
    return [f(x, rest) for x in values]


@unrolled
def both(f: Any, left: Any, right: Any) -> Any:
    """both(f, left, right): the tuple of f(x, y), element by element."""
    return [f(x, y) for x, y in zip(left, right, strict=True)]


@unrolled
def listed(f: Any, n: int, rest: Any) -> Any:
    """listed(f, n, rest): the tuple f(0, rest), ..., f(n - 1, rest)."""
    return [f(i, rest) for i in range(n)]


@unrolled
def filled(x: Any, n: int) -> Any:
    """filled(x, n): the tuple of n times x."""
    return [x] * n


@unrolled
def part(values: Any, start: int, n: int) -> Any:
    """part(values, i, n): elements i ... i + n - 1."""
    return [values[i] for i in range(start, start + n)]


# --- unrolled loops ---------------------------------------------------------------------------------------------------


@unrolled
def groups(f: Any, n: int, tile: Any, rest: Any) -> Any:
    """groups(f, n, tile, rest): the tile of f(i, registers, rest) for every n registers; none if f returns nothing."""
    found = [f(i // n, [tile[i + j] for j in range(n)], rest) for i in range(0, len(tile), n)]
    return [x for piece in found if piece.kind != types.none for x in piece]


@unrolled
def chain(f: Any, n: int, values: Any, state: Any, rest: Any) -> Any:
    """chain(f, n, values, state, rest): state = f(i, registers, state, rest) for every n values, in order."""
    for i in range(0, len(values), n):
        state = f(i // n, [values[i + j] for j in range(n)], state, rest)
    return state


@unrolled
def repeat(f: Any, n: int, state: Any, rest: Any) -> Any:
    """repeat(f, n, state, rest): state = f(i, state, rest) for i = 0 ... n - 1, unrolled."""
    for i in range(n):
        state = f(i, state, rest)
    return state


# --- fragments: tiles of a warp or a warp group -----------------------------------------------------------------------

_device = cuda.jit(device=True, forceinline=True)


@_device
def add(x: Any, y: Any) -> Any:
    return x + y


@_device
def _times(x: Any, factor: Any) -> Any:
    return x * factor


@_device
def _times_row(x: Any, row: Any, _: Any) -> Any:
    return x * row


@_device
def _exponential(x: Any, row: Any, scale: Any) -> Any:
    return exp2_fast(x * scale - row)


@_device
def _of_four_lanes(x: Any, f: Any) -> Any:
    x = f(x, across(x, 1))
    return f(x, across(x, 2))


@_device
def scaled(tile: Any, factor: Any) -> Any:
    """All elements times a scalar."""
    return alike(_times, tile, factor)


@_device
def rows_scaled(tile: Any, factors: Any) -> Any:
    """Each row times its factor."""
    return each(_times_row, tile, factors, 0)


@_device
def exponentials(tile: Any, references: Any, scale: Any) -> Any:
    """2^(x * scale - reference of the row)"""
    return each(_exponential, tile, references, scale)


@_device
def row_max(tile: Any, start: Any) -> Any:
    """Maximum of a lane's elements of each row and `start`; ignores NaN."""
    return fold(greater, tile, start)


@_device
def row_sum(tile: Any, start: Any) -> Any:
    """Sum of a lane's elements of each row and `start`."""
    return fold(add, tile, start)


@_device
def across_row(f: Any, rows: Any) -> Any:
    """Reduces by f(x, y) over the four lanes that share a row."""
    return alike(_of_four_lanes, rows, f)

"""Products of bf16 pairs by AMX: 16 x 16 tiles in registers (Intel SDM, volume 1, chapter 18).

    tiles 0-3   accumulators, 2 x 2 tiles of c      rows of c    x columns of c
    tiles 4, 5  two tiles of rows of a              rows of a    x words
    tiles 6, 7  two tiles of columns of b           words        x columns of b

The configuration sets the shape of each tile, up to 16 rows of 16 words, so remainders need no padding: a product
consists of at most eight regions (whole tiles and a remainder along each axis). To configure takes as long as dozens of
products of tiles, so a kernel does it once, for whole tiles, and releases them at its end. A region with remainders has
a configuration of its own; the product restores that of whole tiles after it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from .register_block import RegisterBlock
from .vector import I8, I64, Loop, declared

EDGE = 16
"""Rows of a tile, and words of a row."""

SUMS, LEFT, RIGHT = range(4), (4, 5), (6, 7)

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_CONFIGURATION = 64  # bytes: palette at 0, bytes a row at 16 + 2 tile, rows at 48 + tile
_COLUMNS_AT, _ROWS_AT = 16, 48


@cache
def request_permission() -> str:
    """Ask Linux for the use of the tile registers (xstate.rst), once per process: "" or why it refuses."""
    if not sys.platform.startswith("linux"):
        return f"AMX is supported only on Linux, and this is {sys.platform}"
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    return f"the kernel refuses the tile registers of AMX (arch_prctl: errno {ctypes.get_errno()})"


class Instructions:
    """The tile instructions of the CPU."""

    lasting = True
    """Whether tiles stay configured from one product to the next."""

    @staticmethod
    def state(b: ir.IRBuilder) -> ir.Value:
        """Memory that a product passes to its regions: the configuration."""
        return b.ptrtoint(b.alloca(ir.ArrayType(I8, _CONFIGURATION)), I64)

    def __init__(self, b: ir.IRBuilder, state: ir.Value) -> None:
        self.b, self.state_at = b, state

    def _call(self, name: str, *args: ir.Value) -> None:
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
        self.b.call(declared(self.b.module, f"llvm.x86.{name}", kind), args)

    def _pointer(self, address: ir.Value) -> ir.Value:
        return self.b.inttoptr(address, I8.as_pointer())

    def configure(self) -> None:
        self._call("ldtilecfg", self._pointer(self.state_at))

    def zero(self, tile: int) -> None:
        self._call("tilezero", I8(tile))

    def load(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self._call("tileloadd64", I8(tile), self._pointer(address), stride)

    def store(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self._call("tilestored64", I8(tile), self._pointer(address), stride)

    def dot(self, c: int, a: int, b: int) -> None:
        self._call("tdpbf16ps", I8(c), I8(a), I8(b))

    def release(self) -> None:
        self._call("tilerelease")


TILES: dict[str, Any] = {"amx": Instructions}
"""By the way to multiply bfloat16. Tests have one more, in memory: tests/amx_emulation.py."""


def emit_begin(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    """Configure whole tiles."""
    tiles = Instructions(builder, Instructions.state(builder))
    _configure(tiles, I64(EDGE), I64(EDGE), I64(EDGE))


def emit_end(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    """Release the tiles."""
    Instructions(builder, I64(0)).release()


def emit_gemm(
    b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock, *, accumulate: bool, tiles: Any
) -> None:
    """c (+)= a @ b, see bf16_pairs.py; a_col is 4: tiles are loaded by whole rows. Between emit_begin and emit_end."""
    a, a_row, _, b_, b_row, c, c_row, m, n, k = args
    state = tiles.state(b)

    def whole_and_remainder(extent: ir.Value) -> tuple[tuple[ir.Value, ir.Value, ir.Value], ...]:
        """(start, tiles, elements per tile) of the whole tiles and of the remainder."""
        whole = b.lshr(extent, I64(4))
        start = b.shl(whole, I64(4))
        remainder = b.sub(extent, start)
        has_remainder = b.zext(b.icmp_signed(">", remainder, I64(0)), I64)
        return (I64(0), whole, I64(EDGE)), (start, has_remainder, remainder)

    before: ir.Value = I64(int(accumulate))
    for (word, steps, words), of_k in zip(whole_and_remainder(k), (True, False)):
        # With k = 0 the result is 0, and is stored.
        used = b.icmp_signed(">", steps, I64(0))
        if of_k:
            used = b.or_(used, b.icmp_signed("==", k, I64(0)))
        for (i, m_tiles, rows), of_m in zip(whole_and_remainder(m), (True, False)):
            for (j, n_tiles, columns), of_n in zip(whole_and_remainder(n), (True, False)):
                region = _region(b.module, tiles, whole=of_k and of_m and of_n)
                nonempty = b.icmp_signed(">", b.mul(m_tiles, n_tiles), I64(0))
                with b.if_then(b.and_(used, nonempty)):
                    a_at = b.add(b.add(a, b.mul(i, a_row)), b.shl(word, I64(2)))
                    b_at = b.add(b.add(b_, b.mul(word, b_row)), b.shl(j, I64(2)))
                    c_at = b.add(b.add(c, b.mul(i, c_row)), b.shl(j, I64(2)))
                    counts = [m_tiles, n_tiles, steps, rows, columns, words]
                    b.call(region, [state, a_at, a_row, b_at, b_row, c_at, c_row, *counts, before])
        before = b.select(used, I64(1), before)
    if tiles.lasting:
        remainders = b.and_(b.or_(b.or_(m, n), k), I64(EDGE - 1))
        with b.if_then(b.icmp_signed("!=", remainders, I64(0))):
            _configure(tiles(b, state), I64(EDGE), I64(EDGE), I64(EDGE))


def _configure(tiles: Any, rows: ir.Value, columns: ir.Value, words: ir.Value) -> None:
    """Tiles for products of rows x words and words x columns."""
    b = tiles.b

    def put(kind: ir.IntType, at: int, value: ir.Value) -> None:
        pointer = b.inttoptr(b.add(tiles.state_at, I64(at)), kind.as_pointer())
        b.store(b.trunc(value, kind) if kind != I64 else value, pointer)

    for at in range(0, _CONFIGURATION, 8):
        put(I64, at, I64(0))
    put(I8, 0, I64(1))  # the palette that exists
    for group, height, width in ((SUMS, rows, columns), (LEFT, rows, words), (RIGHT, words, columns)):
        for tile in group:
            put(I8, _ROWS_AT + tile, height)
            put(ir.IntType(16), _COLUMNS_AT + 2 * tile, b.shl(width, I64(2)))
    tiles.configure()


def _region(module: ir.Module, tiles: Any, whole: bool) -> ir.Function:
    """A product of tiles of one shape, as a function of its own. whole: of 16 rows, columns and words."""
    name = f"amx_{'whole' if whole else 'region'}_{tiles.__name__}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 14), name)
    function.linkage = "internal"
    function.attributes.add("nounwind")
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    state, a, a_row, b_, b_row, c, c_row, m_tiles, n_tiles, steps, rows, columns, words, add = function.args
    if whole:
        rows = columns = words = I64(EDGE)
    layer = tiles(b, state)
    if not (whole and tiles.lasting):
        _configure(layer, rows, columns, words)
    left, right = LEFT, RIGHT

    def block(high: int, wide: int, i: ir.Value, j: ir.Value) -> None:
        """high x wide tiles of c."""
        each = [(y, x, 2 * y + x) for y in range(high) for x in range(wide)]
        first, along = b.mul(i, rows), b.shl(b.mul(j, columns), I64(2))
        a_rows = [b.add(a, b.mul(b.add(first, b.mul(I64(y), rows)), a_row)) for y in range(high)]
        shifts = [b.add(along, b.shl(b.mul(I64(x), columns), I64(2))) for x in range(wide)]
        c_at = {
            tile: b.add(b.add(c, b.mul(b.add(first, b.mul(I64(y), rows)), c_row)), shifts[x]) for y, x, tile in each
        }
        with b.if_else(b.icmp_signed("!=", add, I64(0))) as (then, otherwise):
            with then:
                for _, _, tile in each:
                    layer.load(tile, c_at[tile], c_row)
            with otherwise:
                for _, _, tile in each:
                    layer.zero(tile)
        with Loop(b, I64(0), steps, 1, [I64(0), b_]) as (_, (a_step, b_step), advance):
            # Each operand is loaded right before its first product.
            for y, x, tile in each:
                if x == 0:
                    layer.load(left[y], b.add(a_rows[y], a_step), a_row)
                if y == 0:
                    layer.load(right[x], b.add(b_step, shifts[x]), b_row)
                layer.dot(tile, left[y], right[x])
            advance([b.add(a_step, I64(4 * EDGE)), b.add(b_step, b.mul(I64(EDGE), b_row))])
        for _, _, tile in each:
            layer.store(tile, c_at[tile], c_row)

    def row_of_blocks(high: int, i: ir.Value) -> None:
        with Loop(b, I64(0), b.sub(n_tiles, I64(1)), 2) as (j, _, _):
            block(high, 2, i, j)
        with Loop(b, b.and_(n_tiles, I64(-2)), n_tiles, 1) as (j, _, _):
            block(high, 1, i, j)

    with Loop(b, I64(0), b.sub(m_tiles, I64(1)), 2) as (i, _, _):
        row_of_blocks(2, i)
    with Loop(b, b.and_(m_tiles, I64(-2)), m_tiles, 1) as (i, _, _):
        row_of_blocks(1, i)
    b.ret_void()
    return function

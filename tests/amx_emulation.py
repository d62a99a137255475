"""AMX's tiles in memory: FLASHKIT_CPU_BF16=emulate runs the code for AMX on any CPU, in a process that imports this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llvmlite import ir

from flashkit import settings
from flashkit.backends.cpu.micro import amx
from flashkit.backends.cpu.micro import compile as micro
from flashkit.backends.cpu.micro.amx import _COLUMNS_AT, _CONFIGURATION, _ROWS_AT, EDGE
from flashkit.backends.cpu.micro.vector import I8, I32, I64, Loop, Memory, declared, fill, fma, splat

METHOD = "emulate"


class Emulation:
    """The state is the configuration followed by eight tiles of 1 KB. What raises #UD on the CPU traps."""

    lasting = False

    @staticmethod
    def state(b: ir.IRBuilder) -> ir.Value:
        return b.ptrtoint(b.alloca(ir.ArrayType(I8, _CONFIGURATION + 8 * 1024)), I64)

    def __init__(self, b: ir.IRBuilder, state: ir.Value) -> None:
        self.b, self.state_at = b, state
        self.memory = Memory(b, ir.FloatType(), EDGE)

    def _tile(self, tile: int) -> ir.Value:
        return self.b.add(self.state_at, I64(_CONFIGURATION + 1024 * tile))

    def _shape(self, tile: int) -> tuple[ir.Value, ir.Value]:
        """Rows, and words of a row."""
        b = self.b
        sizes = []
        for at, kind in ((_ROWS_AT + tile, I8), (_COLUMNS_AT + 2 * tile, ir.IntType(16))):
            pointer = b.inttoptr(b.add(self.state_at, I64(at)), kind.as_pointer())
            sizes.append(b.zext(b.load(pointer), I64))
        return sizes[0], b.lshr(sizes[1], I64(2))

    def _require(self, condition: ir.Value) -> None:
        with self.b.if_then(self.b.not_(condition)):
            self.b.call(declared(self.b.module, "llvm.trap", ir.FunctionType(ir.VoidType(), [])), [])

    def configure(self) -> None:
        for tile in range(8):
            for value in self._shape(tile):
                self._require(self.b.icmp_unsigned("<=", value, I64(EDGE)))
            self.zero(tile)

    def zero(self, tile: int) -> None:
        for row in range(EDGE):
            self.memory.store(fill(self.memory.vector, 0.0), self.b.add(self._tile(tile), I64(64 * row)))

    def _move(self, tile: int, address: ir.Value, stride: ir.Value, to_tile: bool) -> None:
        b = self.b
        rows, columns = self._shape(tile)
        self._require(b.icmp_unsigned(">", b.mul(rows, columns), I64(0)))
        if to_tile:
            self.zero(tile)
        with Loop(b, I64(0), rows, 1) as (i, _, _), Loop(b, I64(0), columns, 1) as (j, _, _):
            inside = b.add(self._tile(tile), b.add(b.shl(i, I64(6)), b.shl(j, I64(2))))
            outside = b.add(address, b.add(b.mul(i, stride), b.shl(j, I64(2))))
            source, target = (outside, inside) if to_tile else (inside, outside)
            word = b.load(b.inttoptr(source, I32.as_pointer()), align=1)
            b.store(word, b.inttoptr(target, I32.as_pointer()), align=1)

    def load(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self._move(tile, address, stride, True)

    def store(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        self._move(tile, address, stride, False)

    def dot(self, c: int, a: int, b_: int) -> None:
        b = self.b
        (rows, columns), (a_rows, words), (b_rows, b_columns) = map(self._shape, (c, a, b_))
        for one, other in ((rows, a_rows), (columns, b_columns), (words, b_rows)):
            self._require(b.icmp_unsigned("==", one, other))
        self._require(b.icmp_unsigned(">", b.mul(b.mul(rows, columns), words), I64(0)))
        word = ir.VectorType(I32, EDGE)

        def halves(x: ir.Value) -> list[ir.Value]:
            low, high = b.shl(x, fill(word, 16)), b.and_(x, fill(word, 0xFFFF0000))
            return [b.bitcast(half, self.memory.vector) for half in (low, high)]

        with Loop(b, I64(0), rows, 1) as (i, _, _):
            sums_at = b.add(self._tile(c), b.shl(i, I64(6)))
            loop = Loop(b, I64(0), words, 1, [self.memory.load(sums_at)])
            with loop as (k, (sums,), advance):
                at = b.add(self._tile(a), b.add(b.shl(i, I64(6)), b.shl(k, I64(2))))
                left = halves(b.bitcast(splat(b, self.memory.load_scalar(at), EDGE), word))
                right = halves(b.bitcast(self.memory.load(b.add(self._tile(b_), b.shl(k, I64(6)))), word))
                for x, y in zip(left, right, strict=True):
                    sums = fma(b, x, y, sums)
                advance([sums])
            self.memory.store(loop.results[0], sums_at)

    def release(self) -> None:
        pass


def _install() -> None:
    """Let the variable name the method, and kernels depend on this file."""
    parse, source = settings.CPU_BF16.parse, micro.source

    def with_this_file(block: Any, gemv_kernels: bool = False) -> Any:
        own = source(block, gemv_kernels)
        return own._replace(text=f"{own.text} {Path(__file__).read_text()}") if block.bf16_pairs == METHOD else own

    object.__setattr__(settings.CPU_BF16, "parse", lambda text: text if text == METHOD else parse(text))
    amx.TILES[METHOD], micro.source = Emulation, with_this_file


_install()

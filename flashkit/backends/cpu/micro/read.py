"""A micro-kernel that reads memory as fast as it can; conventions: vector.py.

    read (memory, lines, times, distance, total)
        total[:] = bitwise or of all vectors of `lines` cache lines, `times` times; prefetches `distance` bytes ahead
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from .register_block import RegisterBlock
from .vector import I64, SIZE, Loop, prefetch

LINE = 64
"""Bytes of a cache line."""


def emit_read(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: RegisterBlock) -> None:
    memory_at, lines, times, distance, total = args
    size = SIZE[block.element]
    vectors = max(1, LINE // (block.lanes * size))
    bits = ir.VectorType(I64, block.lanes * size // 8)
    unroll = 4

    def vector(address: ir.Value) -> ir.Value:
        return b.load(b.inttoptr(address, bits.as_pointer()), align=1)

    def step(at: ir.Value, seen: list[ir.Value]) -> list[ir.Value]:
        prefetch(b, b.add(at, distance))
        return [b.or_(x, vector(b.add(at, I64(v * 64 // vectors)))) for v, x in enumerate(seen)]

    zero = ir.Constant(bits, [0] * bits.count)
    repeat = Loop(b, I64(0), times, 1, [zero] * (unroll * vectors))
    with repeat as (_, before, advance_repeat):
        loop = Loop(b, I64(0), b.sub(lines, I64(unroll - 1)), unroll, before)
        with loop as (i, carried, advance):
            at = b.add(memory_at, b.mul(i, I64(LINE)))
            for x in range(unroll):
                advance(step(b.add(at, I64(x * LINE)), carried[x * vectors : (x + 1) * vectors]))
        advance_repeat(loop.results)
    seen = repeat.results[:vectors]
    for x in range(1, unroll):
        seen = [b.or_(a, c) for a, c in zip(seen, repeat.results[x * vectors : (x + 1) * vectors], strict=True)]
    rest = Loop(b, b.mul(b.sdiv(lines, I64(unroll)), I64(unroll)), lines, 1, seen)
    with rest as (i, carried, advance):
        advance(step(b.add(memory_at, b.mul(i, I64(LINE))), carried))
    for v, x in enumerate(rest.results):
        b.store(x, b.inttoptr(b.add(total, I64(v * 64 // vectors)), bits.as_pointer()), align=1)

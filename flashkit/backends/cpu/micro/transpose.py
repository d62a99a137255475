"""Transposes of tiles, with conversion between the stored and the accumulators' dtype; conventions: vector.py.

    pack_transposed (source, source_row, target, target_row, m, n, scale)
        target[j, i] = scale * source[i, j]; source in storage precision, rows of target padded to whole vectors with 0
    unpack_transposed (source, source_row, target, target_row, m, n, factor, check)
        target[i, j] = source[j, i] * factor[i], target in storage precision; check[:] += 0 * target[:], NaN where an
        element is not finite
    transpose1, transpose4, transpose8 (source, source_row, target, target_row, m, n)
        target[j, i] = source[i, j] for elements of 1, 4 or 8 bytes
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from .register_block import RegisterBlock
from .vector import (
    I32,
    I64,
    SIZE,
    STORED,
    Loop,
    Memory,
    fill,
    fma,
    from_bits,
    narrow,
    prefetch,
    splat,
    transposed,
    widen,
)


def emit_pack_transposed(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    source, source_row, target, target_row, m, n, scale_bits = args
    lanes = shape.lanes
    memory, stored = Memory(b, element, lanes), Memory(b, STORED.get(shape.storage, element), lanes)
    scale = from_bits(b, scale_bits, element)
    scales, zero = splat(b, scale, lanes), fill(memory.vector, 0.0)

    def element_at(i: ir.Value, j: ir.Value) -> ir.Value:
        at = b.add(b.add(source, b.mul(i, source_row)), b.mul(j, I64(stored.size)))
        return widen(b, stored.load_scalar(at), shape.storage, element)

    with Loop(b, I64(0), m, lanes) as (i, _, _):
        with Loop(b, I64(0), b.sub(n, I64(lanes - 1)), lanes) as (j, _, _):
            at = b.add(b.add(source, b.mul(i, source_row)), b.mul(j, I64(stored.size)))
            rows = []
            for x in range(lanes):
                # Past the last row, the first row of the square again: no load leaves the source.
                inside = b.icmp_signed("<", b.add(i, I64(x)), m)
                offset = b.select(inside, b.mul(I64(x), source_row), I64(0))
                row = b.fmul(widen(b, stored.load(b.add(at, offset)), shape.storage, element), scales)
                rows.append(b.select(inside, row, zero))
            to = b.add(b.add(target, b.mul(j, target_row)), b.mul(i, I64(memory.size)))
            for x, row in enumerate(transposed(b, rows)):
                memory.store(row, b.add(to, b.mul(I64(x), target_row)))
        with Loop(b, b.mul(b.sdiv(n, I64(lanes)), I64(lanes)), n, 1) as (j, _, _):
            column = zero
            for x in range(lanes):
                row = b.add(i, I64(x))
                inside = b.icmp_signed("<", row, m)
                value = b.fmul(element_at(b.select(inside, row, i), j), scale)
                column = b.insert_element(column, b.select(inside, value, element(0.0)), I32(x))
            memory.store(column, b.add(b.add(target, b.mul(j, target_row)), b.mul(i, I64(memory.size))))


def emit_unpack_transposed(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    source, source_row, target, target_row, m, n, factor, check = args
    lanes = shape.lanes
    memory, stored = Memory(b, element, lanes), Memory(b, STORED.get(shape.storage, element), lanes)
    zero = fill(memory.vector, 0.0)

    def scaled(i: ir.Value, j: ir.Value) -> ir.Value:
        """Column j of the rows from i on, scaled; non-finite elements mark `check`."""
        at = b.add(b.add(source, b.mul(j, source_row)), b.mul(i, I64(memory.size)))
        value = b.fmul(memory.load(at), memory.load(b.add(factor, b.mul(i, I64(memory.size)))))
        memory.store(fma(b, value, zero, memory.load(check)), check)
        return value

    def address(i: ir.Value, j: ir.Value) -> ir.Value:
        return b.add(b.add(target, b.mul(i, target_row)), b.mul(j, I64(stored.size)))

    with Loop(b, I64(0), b.sub(m, I64(lanes - 1)), lanes) as (i, _, _):
        with Loop(b, I64(0), b.sub(n, I64(lanes - 1)), lanes) as (j, _, _):
            columns = [scaled(i, b.add(j, I64(x))) for x in range(lanes)]
            for x, row in enumerate(transposed(b, columns)):
                stored.store(narrow(b, row, shape.storage), address(b.add(i, I64(x)), j))
        with Loop(b, b.mul(b.sdiv(n, I64(lanes)), I64(lanes)), n, 1) as (j, _, _):
            column = scaled(i, j)
            for x in range(lanes):
                value = b.extract_element(column, I32(x))
                stored.store_scalar(narrow(b, value, shape.storage), address(b.add(i, I64(x)), j))
    rest = b.mul(b.sdiv(m, I64(lanes)), I64(lanes))
    with Loop(b, rest, m, 1) as (i, _, _), Loop(b, I64(0), n, 1) as (j, _, _):
        at = b.add(b.add(source, b.mul(j, source_row)), b.mul(i, I64(memory.size)))
        value = b.fmul(memory.load_scalar(at), memory.load_scalar(b.add(factor, b.mul(i, I64(memory.size)))))
        mark = b.fadd(b.fmul(value, element(0.0)), memory.load_scalar(check))
        memory.store_scalar(mark, check)
        stored.store_scalar(narrow(b, value, shape.storage), address(i, j))


def emit_transpose(
    b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock, *, size: int
) -> None:
    source, source_row, target, target_row, m, n = args
    square = min(16, shape.lanes * SIZE[shape.element] // size)
    memory = Memory(b, ir.IntType(8 * size), square)

    def at(base: ir.Value, row: ir.Value, i: ir.Value, j: ir.Value) -> ir.Value:
        return b.add(b.add(base, b.mul(i, row)), b.mul(j, I64(size)))

    def one_by_one(i: ir.Value, j: ir.Value, j_end: ir.Value) -> None:
        with Loop(b, j, j_end, 1) as (x, _, _):
            memory.store_scalar(memory.load_scalar(at(source, source_row, i, x)), at(target, target_row, x, i))

    # Rows lie too far apart for the hardware prefetcher: each square prefetches the next one, the last square the first
    # one of the tile that follows along the rows.
    whole_m, whole_n = (b.mul(b.sdiv(extent, I64(square)), I64(square)) for extent in (m, n))
    with Loop(b, I64(0), whole_m, square) as (i, _, _):
        with Loop(b, I64(0), whole_n, square) as (j, _, _):
            rows = [memory.load(at(source, source_row, b.add(i, I64(x)), j)) for x in range(square)]
            after = b.add(i, I64(square))
            last = b.icmp_signed(">=", after, whole_m)
            following = b.select(last, at(source, source_row, I64(0), b.add(j, n)), at(source, source_row, after, j))
            for x in range(square):
                prefetch(b, b.add(following, b.mul(I64(x), source_row)))
            for x, row in enumerate(transposed(b, rows)):
                memory.store(row, at(target, target_row, b.add(j, I64(x)), i))
        with Loop(b, i, b.add(i, I64(square)), 1) as (x, _, _):
            one_by_one(x, whole_n, n)
    with Loop(b, whole_m, m, 1) as (i, _, _):
        one_by_one(i, I64(0), n)

"""Softmax on tiles of scores, and its gradient; conventions: vector.py.

    column_max (s, s_row, rows, columns, m)
        m[j] = max(m[j], max_i s[i, j])
    exp_sum (s, s_row, rows, columns, m, l)
        s[i, j] = p = exp(s[i, j] - m[j]); l[j] += sum_i p
    softmax_backward (s, s_row, rows, columns, dp, lse, delta, scale)
        s[i, j] = p = exp(s[i, j] - lse[i]); dp[i, j] = ds = scale * p * (dp[i, j] - delta[i])
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from llvmlite import ir

from .exponentials import exp
from .register_block import RegisterBlock
from .vector import I64, Loop, Memory, at_most, column_groups, fill, from_bits, splat

ROWS_IN_TURN = 4


def column_max(
    b: ir.IRBuilder, memory: Memory, s: ir.Value, row: ir.Value, count: ir.Value, offsets: Sequence[ir.Value],
    start: Sequence[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """The greatest of the start values and of the rows, by vector of columns."""
    width = len(offsets)

    def greater(x: ir.Value, y: ir.Value) -> ir.Value:
        # NaN compares false and is skipped; it propagates through the sum of the exponentials.
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    # Rows take turns among several maxima, each of which waits for its last comparison.
    rows = Loop(b, I64(0), b.sub(count, I64(ROWS_IN_TURN - 1)), ROWS_IN_TURN, [*start] * ROWS_IN_TURN + [s])
    with rows as (_, carried, advance):
        *best, at = carried
        new = []
        for turn in range(ROWS_IN_TURN):
            for v, offset in enumerate(offsets):
                new.append(greater(memory.load(b.add(at, offset)), best[turn * width + v]))
            at = b.add(at, row)
        advance([*new, at])
    *best, at = rows.results
    rest = Loop(
        b, b.and_(count, I64(-ROWS_IN_TURN)), count, 1, [*(reduce(greater, best[v::width]) for v in range(width)), at]
    )
    with rest as (_, carried, advance):
        *best, at = carried
        advance([*(greater(memory.load(b.add(at, o)), x) for o, x in zip(offsets, best)), b.add(at, row)])
    return rest.results[:-1]


def emit_column_max(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    b = builder
    s, row, count, columns, m = args
    memory = Memory(b, element, shape.lanes)

    def group(j: ir.Value, width: int) -> None:
        offsets = [b.mul(b.add(j, I64(v * shape.lanes)), I64(memory.size)) for v in range(width)]
        start = [memory.load(b.add(m, offset)) for offset in offsets]
        for offset, x in zip(offsets, column_max(b, memory, s, row, count, offsets, start)):
            memory.store(x, b.add(m, offset))

    column_groups(b, columns, shape.vectors, shape.lanes, group)


ROWS_PER_SUM = 16
"""Rows that are summed before they are added to l, which rounds less often at the size of l."""


def emit_exp_sum(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    b = builder
    s, row, count, columns, m, l = args
    vectors, lanes = shape.vectors, shape.lanes
    memory = Memory(b, element, lanes)

    def group(j: ir.Value, width: int) -> None:
        offsets = [b.mul(b.add(j, I64(v * lanes)), I64(memory.size)) for v in range(width)]
        row_max = [memory.load(b.add(m, o)) for o in offsets]
        outer = Loop(b, I64(0), count, ROWS_PER_SUM, [*(memory.load(b.add(l, o)) for o in offsets), s])
        with outer as (i, carried, advance_outer):
            *totals, at = carried
            last = at_most(b, b.add(i, I64(ROWS_PER_SUM)), count)
            inner = Loop(b, i, last, 1, [*[fill(memory.vector, 0.0)] * width, at])
            with inner as (_, carried, advance):
                *sums, at = carried
                new = []
                for v in range(width):
                    # Subtract first: the difference is exact near the maximum, where p is large.
                    p = exp(b, b.fsub(memory.load(b.add(at, offsets[v])), row_max[v]))
                    memory.store(p, b.add(at, offsets[v]))
                    new.append(b.fadd(sums[v], p))
                advance([*new, b.add(at, row)])
            *sums, at = inner.results
            advance_outer([*(b.fadd(x, y) for x, y in zip(totals, sums)), at])
        for v in range(width):
            memory.store(outer.results[v], b.add(l, offsets[v]))

    column_groups(b, columns, vectors, lanes, group)


def emit_softmax_backward(
    builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock
) -> None:
    b = builder
    s, row, count, columns, dp, lse, delta, scale_bits = args
    lanes = shape.lanes
    memory = Memory(b, element, lanes)
    scale = splat(b, from_bits(b, scale_bits, element), lanes)
    zero, masked = (fill(memory.vector, x) for x in (0.0, float("-inf")))
    with Loop(b, I64(0), count, 1) as (i, _, _):
        at, across = b.mul(i, I64(memory.size)), b.mul(i, row)
        lse_i, delta_i = (splat(b, memory.load_scalar(b.add(x, at)), lanes) for x in (lse, delta))
        with Loop(b, I64(0), columns, lanes) as (j, _, _):
            offset = b.add(across, b.mul(j, I64(memory.size)))
            s_at, dp_at = b.add(s, offset), b.add(dp, offset)
            score, dp_ij = memory.load(s_at), memory.load(dp_at)
            # A NaN in the LSE reaches the visible pairs of its row and no others.
            p = b.select(b.fcmp_ordered("==", score, masked), zero, exp(b, b.fsub(score, lse_i)))
            ds = b.fmul(b.fmul(p, b.fsub(dp_ij, delta_i)), scale)
            memory.store(p, s_at)
            # A masked pair has no gradient, whatever its key and value hold.
            memory.store(b.select(b.fcmp_ordered("==", p, zero), zero, ds), dp_at)

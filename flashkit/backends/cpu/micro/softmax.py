"""Softmax on tiles of scores, and its gradient; conventions: vector.py.

    column_max (s, s_row, m, n, top)
        top[j] = max(top[j], max_i s[i, j])
    exponentials (s, s_row, m, n, top, total)
        s[i, j] = exp(s[i, j] - top[j]); total[j] += sum_i s[i, j]
    weights (s, s_row, m, n, dp, lse, delta, scale)
        s[i, j] = p = exp(s[i, j] - lse[i]); dp[i, j] = scale * p * (dp[i, j] - delta[i])
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from .vector import I64, Block, Loop, Memory, column_groups, exp, fill, from_bits, splat


def emit_column_max(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
    b = builder
    s, row, count, columns, m = args
    vectors, lanes = shape.vectors, shape.lanes
    memory = Memory(b, element, lanes)

    def group(j: ir.Value, width: int) -> None:
        offsets = [b.mul(b.add(j, I64(v * lanes)), I64(memory.size)) for v in range(width)]
        loop = Loop(b, I64(0), count, 1, [*(memory.load(b.add(m, o)) for o in offsets), s])
        with loop as (_, carried, advance):
            *best, at = carried
            new = []
            for v in range(width):
                value = memory.load(b.add(at, offsets[v]))
                # NaN compares false and is passed over; it shows in the sum of the exponentials.
                new.append(b.select(b.fcmp_ordered(">", value, best[v]), value, best[v]))
            advance([*new, b.add(at, row)])
        for v in range(width):
            memory.store(loop.results[v], b.add(m, offsets[v]))

    column_groups(b, columns, vectors, lanes, group)


ROWS_SUMMED = 16


def emit_exponentials(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
    b = builder
    s, row, count, columns, m, total = args
    vectors, lanes = shape.vectors, shape.lanes
    memory = Memory(b, element, lanes)

    def group(j: ir.Value, width: int) -> None:
        offsets = [b.mul(b.add(j, I64(v * lanes)), I64(memory.size)) for v in range(width)]
        shifts = [memory.load(b.add(m, o)) for o in offsets]
        # Sums of a few rows are added to the total: far fewer roundings at its size than if each weight were.
        outer = Loop(b, I64(0), count, ROWS_SUMMED, [*(memory.load(b.add(total, o)) for o in offsets), s])
        with outer as (i, carried, advance_outer):
            *totals, at = carried
            last = b.add(i, I64(ROWS_SUMMED))
            last = b.select(b.icmp_signed("<", last, count), last, count)
            inner = Loop(b, i, last, 1, [*[fill(memory.vector, 0.0)] * width, at])
            with inner as (_, carried, advance):
                *sums, at = carried
                new = []
                for v in range(width):
                    # The difference first: it is exact where it matters, near the maximum.
                    p = exp(b, b.fsub(memory.load(b.add(at, offsets[v])), shifts[v]))
                    memory.store(p, b.add(at, offsets[v]))
                    new.append(b.fadd(sums[v], p))
                advance([*new, b.add(at, row)])
            *sums, at = inner.results
            advance_outer([*(b.fadd(x, y) for x, y in zip(totals, sums)), at])
        for v in range(width):
            memory.store(outer.results[v], b.add(total, offsets[v]))

    column_groups(b, columns, vectors, lanes, group)


def emit_weights(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
    b = builder
    s, row, count, columns, dp, lse, delta, scale_bits = args
    lanes = shape.lanes
    memory = Memory(b, element, lanes)
    scale = splat(b, from_bits(b, scale_bits, element), lanes)
    zero, hidden = (fill(memory.vector, x) for x in (0.0, float("-inf")))
    with Loop(b, I64(0), count, 1) as (i, _, _):
        at, across = b.mul(i, I64(memory.size)), b.mul(i, row)
        shift, mean = (splat(b, memory.load_scalar(b.add(x, at)), lanes) for x in (lse, delta))
        with Loop(b, I64(0), columns, lanes) as (j, _, _):
            offset = b.add(across, b.mul(j, I64(memory.size)))
            s_at, dp_at = b.add(s, offset), b.add(dp, offset)
            score = memory.load(s_at)
            p = exp(b, b.fsub(score, shift))
            # A row whose log-sum-exp is NaN shows it where it has a key to see, and nowhere else.
            p = b.select(b.fcmp_ordered("==", score, hidden), zero, p)
            ds = b.fmul(b.fmul(p, b.fsub(memory.load(dp_at), mean)), scale)
            memory.store(p, s_at)
            # A hidden pair has no gradient, whatever lies in its key and value.
            memory.store(b.select(b.fcmp_ordered("==", p, zero), zero, ds), dp_at)

"""Softmax on tiles of scores, and its gradient; conventions: vector.py.

online_softmax (s, s_row, rows, columns, m, l, o, o_row, o_rows)
    a step of the online softmax: where a score exceeds m by RESCALE_THRESHOLD, m follows the running maximum, and l
    and o are rescaled; s[i, j] = p = exp(s[i, j] - m[j]), m = 0 for -inf; l[j] += sum_i p
online_softmax_stats (s, s_row, rows, columns, m, l, o, o_row, o_rows, tops, sums)
    likewise, and tops[j] is the running maximum; sums[j] += sum_i p (s[i, j] - m[j]), and follows m as l does
softmax_backward (s, s_row, rows, columns, dp, lse, delta, scale)
    s[i, j] = p = exp(s[i, j] - lse[i]); dp[i, j] = ds = scale * p * (dp[i, j] - delta[i])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product

from llvmlite import ir

from .exponentials import exp
from .register_block import RegisterBlock
from .vector import I64, Loop, Memory, at_most, column_groups, fill, fma, from_bits, splat

ROWS_IN_TURN = 4


def greater(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """NaN compares false and is skipped; it propagates through the sum of the exponentials."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def column_max(
    b: ir.IRBuilder, memory: Memory, s: ir.Value, row: ir.Value, count: ir.Value, offsets: Sequence[ir.Value],
    start: Sequence[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """The greatest of the start values and of the rows, by vector of columns."""
    width = len(offsets)

    # Rows take turns among several maxima, each of which waits for its last comparison.
    rows = Loop(b, I64(0), b.sub(count, I64(ROWS_IN_TURN - 1)), ROWS_IN_TURN, [*start] * ROWS_IN_TURN + [s])
    with rows as (_, carried, advance):
        *best, at = carried
        new = []
        for turn in range(ROWS_IN_TURN):
            for v, offset in enumerate(offsets):
                new.append(greater(b, memory.load(b.add(at, offset)), best[turn * width + v]))
            at = b.add(at, row)
        advance([*new, at])
    *best, at = rows.results
    begin = b.and_(count, I64(-ROWS_IN_TURN))
    rest = Loop(b, begin, count, 1, [*(reduce(partial(greater, b), best[v::width]) for v in range(width)), at])
    with rest as (_, carried, advance):
        *best, at = carried
        advance([*(greater(b, memory.load(b.add(at, o)), x) for o, x in zip(offsets, best)), b.add(at, row)])
    return rest.results[:-1]


RESCALE_THRESHOLD = 8.0
"""How far a score may exceed the row_max that P is relative to before O and l are rescaled. With e^8, or e^16 where the
softmax scales scores by almost 2, no sum comes near overflow, and none loses precision.
"""


def online_softmax(
    b: ir.IRBuilder, memory: Memory, args: Sequence[ir.Value], vectors: int, power: Callable[[ir.Value], ir.Value],
    store_weights: Callable[[list[ir.Value], list[ir.Value]], None], stats: Sequence[ir.Value] = (),
) -> None:  # fmt: skip
    """The step by groups of columns.

    power: from a difference of scores to a factor. store_weights(offsets, row_max) stores P and adds its sums to l, for
    vectors of columns at these offsets. stats: tops and sums.
    """
    s, row, count, columns, m, l, o, o_row, o_rows = args
    lanes = memory.vector.count
    zero, nothing_seen, threshold = (fill(memory.vector, x) for x in (0.0, float("-inf"), RESCALE_THRESHOLD))

    def group(j: ir.Value, width: int) -> None:
        offsets = [b.mul(b.add(j, I64(v * lanes)), I64(memory.size)) for v in range(width)]
        before = [memory.load(b.add(m, offset)) for offset in offsets]
        start = [memory.load(b.add(stats[0], offset)) for offset in offsets] if stats else before
        greatest = column_max(b, memory, s, row, count, offsets, start)
        for offset, x in zip(offsets, greatest if stats else ()):
            memory.store(x, b.add(stats[0], offset))
        exceeds = [b.fcmp_ordered(">", x, b.fadd(y, threshold)) for x, y in zip(greatest, before)]
        moves = b.icmp_signed("!=", b.bitcast(reduce(b.or_, exceeds), ir.IntType(lanes)), ir.IntType(lanes)(0))
        with b.if_then(moves, likely=False):
            factors = [power(b.fsub(x, y)) for x, y in zip(before, greatest)]
            # Nothing seen before, nor now: m stays -inf, whose difference is NaN.
            factors = [b.select(b.fcmp_ordered("==", x, nothing_seen), zero, f) for x, f in zip(before, factors)]
            for offset, x, y, factor in zip(offsets, greatest, before, factors):
                memory.store(x, b.add(m, offset))
                if stats:
                    at, old_l = b.add(stats[1], offset), memory.load(b.add(l, offset))
                    moved = b.fmul(factor, fma(b, b.fsub(y, x), old_l, memory.load(at)))
                    memory.store(b.select(b.fcmp_ordered("==", factor, zero), zero, moved), at)
                memory.store(b.fmul(memory.load(b.add(l, offset)), factor), b.add(l, offset))
            with Loop(b, I64(0), o_rows, 1, [o]) as (_, (at,), advance):
                for offset, factor in zip(offsets, factors):
                    memory.store(b.fmul(memory.load(b.add(at, offset)), factor), b.add(at, offset))
                advance([b.add(at, o_row)])
        row_max = [b.select(moves, x, y) for x, y in zip(greatest, before)]
        # 0 for a query without a visible key so far: e^(-inf - 0) is 0, e^(-inf + inf) would be NaN.
        store_weights(offsets, [b.select(b.fcmp_ordered("==", x, nothing_seen), zero, x) for x in row_max])

    column_groups(b, columns, vectors, lanes, group)


ROWS_PER_SUM = 16
"""Rows that are summed before they are added to l, which rounds less often at the size of l."""


def emit_online_softmax(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    *args, stats = *args[:9], args[9:]
    s, row, count, _, _, l, *_ = args
    memory = Memory(b, element, shape.lanes)
    zero, lowest = fill(memory.vector, 0.0), fill(memory.vector, -1e30)  # instead of -inf, which p = 0 makes NaN

    def store_weights(offsets: list[ir.Value], row_max: list[ir.Value]) -> None:
        totals_at = [l, stats[1]] if stats else [l]
        loaded = [memory.load(b.add(at, o)) for at in totals_at for o in offsets]
        outer = Loop(b, I64(0), count, ROWS_PER_SUM, [*loaded, s])
        with outer as (i, carried, advance_outer):
            *totals, at = carried
            last = at_most(b, b.add(i, I64(ROWS_PER_SUM)), count)
            inner = Loop(b, i, last, 1, [*[zero] * len(loaded), at])
            with inner as (_, carried, advance):
                *sums, at = carried
                new, weighted = [], []
                for v, (offset, m) in enumerate(zip(offsets, row_max)):
                    # Subtract first: the difference is exact near the maximum, where p is large.
                    below = b.fsub(memory.load(b.add(at, offset)), m)
                    p = exp(b, below)
                    memory.store(p, b.add(at, offset))
                    new.append(b.fadd(sums[v], p))
                    if stats:
                        below = b.select(b.fcmp_ordered(">", below, lowest), below, lowest)
                        weighted.append(fma(b, p, below, sums[len(offsets) + v]))
                advance([*new, *weighted, b.add(at, row)])
            *sums, at = inner.results
            advance_outer([*(b.fadd(x, y) for x, y in zip(totals, sums)), at])
        for (at, offset), total in zip(product(totals_at, offsets), outer.results):
            memory.store(total, b.add(at, offset))

    online_softmax(b, memory, args, shape.vectors, lambda difference: exp(b, difference), store_weights, stats)


def emit_softmax_backward(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
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

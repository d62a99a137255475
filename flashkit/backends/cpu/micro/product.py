"""The matrix product of tiles; conventions: vector.py.

    product, product_add (a, a_row, a_col, b, b_row, c, c_row, m, n, k)
        c = a @ b, c += a @ b; rows x vectors x lanes of c are held in registers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from .vector import I64, Block, Loop, Memory, fill, fma, splat

Multiply = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]


MOST_TERMS = 64
"""Of a product, summed before they are added to the result. For head dim 64 and 2,048 tokens errors against float64 are
0.8 to 0.9 times PyTorch's so, and were 2.1 to 2.8 times with one running sum. 32 gains little and costs 3 %.
"""


def emit_product(
    builder: ir.IRBuilder,
    args: Sequence[ir.Value],
    element: ir.Type,
    shape: Block,
    *,
    accumulate: bool,
    multiply: Multiply = fma,
) -> None:
    """c[i, j] (+)= sum_k a[i, k] b[k, j]: panels of vectors x lanes columns, in each blocks of `rows` rows, held in
    registers. multiply(builder, a, b, c): a * b + c of vectors.
    """
    b = builder
    a, a_row, a_col, b_, b_row, c, c_row, m, n, k = args
    rows, vectors, lanes = shape.rows, shape.vectors, shape.lanes
    memory = Memory(b, element, lanes)
    width = lanes * memory.size

    terms = k
    if multiply is fma:  # half of them, so that there are two sums at least, but no more than MOST_TERMS
        terms = b.sdiv(b.add(k, I64(1)), I64(2))
        terms = b.select(b.icmp_signed("<", terms, I64(MOST_TERMS)), terms, I64(MOST_TERMS))

    def block(height: int, columns: int, i: ir.Value, j: ir.Value, mask: ir.Value | None) -> None:
        offset = b.mul(j, I64(memory.size))
        c_rows = [b.add(b.add(c, offset), b.mul(b.add(i, I64(x)), c_row)) for x in range(height)]
        a_rows = [b.add(a, b.mul(b.add(i, I64(x)), a_row)) for x in range(height)]
        zero = fill(memory.vector, 0.0)
        # Sums of a few terms are added to c: far fewer roundings at the size of c than if each term were.
        outer = Loop(b, I64(0), k, terms, [b.add(b_, offset), I64(0)])
        with outer as (first, (b_at, a_at), advance_outer):
            last = b.add(first, terms)
            last = b.select(b.icmp_signed("<", last, k), last, k)
            inner = Loop(b, first, last, 1, [*[zero] * (height * columns), b_at, a_at])
            with inner as (_, carried, advance):
                *sums, b_at, a_at = carried
                right = [memory.load(b.add(b_at, I64(v * width)), mask) for v in range(columns)]
                new = []
                for x in range(height):
                    left = splat(b, memory.load_scalar(b.add(a_rows[x], a_at)), lanes)
                    new += [multiply(b, left, right[v], sums[x * columns + v]) for v in range(columns)]
                advance([*new, b.add(b_at, b_row), b.add(a_at, a_col)])
            *sums, b_at, a_at = inner.results
            fresh = b.icmp_signed("==", first, I64(-1 if accumulate else 0))
            for x in range(height):
                for v in range(columns):
                    at = b.add(c_rows[x], I64(v * width))
                    before = b.select(fresh, zero, memory.load(at, mask))
                    memory.store(b.fadd(before, sums[x * columns + v]), at, mask)
            advance_outer([b_at, a_at])
        if not accumulate:
            with b.if_then(b.icmp_signed("<=", k, I64(0))):
                for x in range(height):
                    for v in range(columns):
                        memory.store(zero, b.add(c_rows[x], I64(v * width)), mask)

    def panel(columns: int, j: ir.Value, mask: ir.Value | None) -> None:
        i: ir.Value = I64(0)
        for height in dict.fromkeys((rows, 4, 1)):
            if height > rows:
                continue
            # The last start of a block of this height, plus one.
            stop = b.sub(m, I64(height - 1))
            with Loop(b, i, stop, height) as (at, _, _):
                block(height, columns, at, j, mask)
            done = b.sdiv(b.sub(m, i), I64(height))
            i = b.add(i, b.mul(done, I64(height)))

    wide = vectors * lanes
    with Loop(b, I64(0), b.sub(n, I64(wide - 1)), wide) as (j, _, _):
        panel(vectors, j, None)
    rest = b.mul(b.sdiv(n, I64(wide)), I64(wide))
    with Loop(b, rest, n, lanes) as (j, _, _):
        panel(1, j, memory.tail_mask(b.sub(n, j)))

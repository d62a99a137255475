"""The matrix product of tiles; conventions: vector.py.

    gemm, gemm_add (a, a_row, a_col, b, b_row, c, c_row, m, n, k)
        c = a @ b, c += a @ b; rows x vectors x lanes of c are held in registers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from .register_block import RegisterBlock
from .vector import I64, Loop, Memory, at_most, fill, fma, row_groups, splat

Multiply = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]

MAX_K_BLOCK = 64
"""Terms summed in registers before they are added to c: blocked sums round less often than one running sum."""


def emit_gemm(
    b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock, *, accumulate: bool,
    multiply: Multiply = fma,
) -> None:  # fmt: skip
    """c[i, j] (+)= sum_k a[i, k] b[k, j], in panels of vectors x lanes columns. multiply(b, x, y, z): x * y + z."""
    a, a_row, a_col, b_, b_row, c, c_row, m, n, k = args
    rows, vectors, lanes = shape.rows, shape.vectors, shape.lanes
    memory = Memory(b, element, lanes)
    width = lanes * memory.size

    one = I64(1)
    k_block = k
    if multiply is fma:  # at least two blocks, of at most MAX_K_BLOCK terms
        k_block = at_most(b, b.sdiv(b.add(k, one), I64(2)), I64(MAX_K_BLOCK))
    k_block = b.select(b.icmp_signed(">", k_block, one), k_block, one)
    k_stop = k if accumulate else b.select(b.icmp_signed(">", k, one), k, one)  # a sum of no terms is stored, too

    def over_terms(body: Callable[[ir.Value, ir.Value], None]) -> None:
        """body(first, end) for each block of terms."""
        with Loop(b, I64(0), k_stop, k_block) as (first, _, _):
            body(first, at_most(b, b.add(first, k_block), k))

    heights = [height for height in dict.fromkeys((rows, 4, 1)) if height <= rows]

    def block(
        columns: int, j: ir.Value, mask: ir.Value | None, i: ir.Value, height: int, first: ir.Value, end: ir.Value
    ) -> None:
        """Terms `first` ... `end` - 1 of a block of c."""
        offset = b.mul(j, I64(memory.size))
        c_rows = [b.add(b.add(c, offset), b.mul(b.add(i, I64(x)), c_row)) for x in range(height)]
        a_rows = [b.add(a, b.mul(b.add(i, I64(x)), a_row)) for x in range(height)]
        zero = fill(memory.vector, 0.0)
        b_at, a_at = b.add(b.add(b_, offset), b.mul(first, b_row)), b.mul(first, a_col)
        loop = Loop(b, first, end, 1, [*[zero] * (height * columns), b_at, a_at])
        with loop as (_, carried, advance):
            *sums, b_at, a_at = carried
            right = [memory.load(b.add(b_at, I64(v * width)), mask) for v in range(columns)]
            new = []
            for x in range(height):
                left = splat(b, memory.load_scalar(b.add(a_rows[x], a_at)), lanes)
                new += [multiply(b, left, right[v], sums[x * columns + v]) for v in range(columns)]
            advance([*new, b.add(b_at, b_row), b.add(a_at, a_col)])
        overwrite = b.icmp_signed("==", first, I64(-1 if accumulate else 0))
        for n_th, total in enumerate(loop.results[:-2]):
            x, v = divmod(n_th, columns)
            at = b.add(c_rows[x], I64(v * width))
            before = b.select(overwrite, zero, memory.load(at, mask))
            memory.store(b.fadd(before, total), at, mask)

    def panel(columns: int, j: ir.Value, mask: ir.Value | None) -> None:
        at = partial(block, columns, j, mask)
        if accumulate:  # blocks of rows share the rows of b of a block of terms, in L1
            over_terms(lambda *terms: row_groups(b, m, heights, lambda i, height: at(i, height, *terms)))
        else:  # a block of c stays in L1 until it is complete
            row_groups(b, m, heights, lambda i, height: over_terms(lambda *terms: at(i, height, *terms)))

    wide = vectors * lanes
    with Loop(b, I64(0), b.sub(n, I64(wide - 1)), wide) as (j, _, _):
        panel(vectors, j, None)
    rest = b.mul(b.sdiv(n, I64(wide)), I64(wide))
    with Loop(b, rest, n, lanes) as (j, _, _):
        panel(1, j, memory.tail_mask(b.sub(n, j)))

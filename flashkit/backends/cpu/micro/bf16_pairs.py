"""Micro-kernels for bf16 pairs: two bfloat16 that follow each other along the summed axis, in one 32-bit word.

CPUs multiply bf16 pairs and add into float32: c[i, j] += a[i, 2k] b[2k, j] + a[i, 2k+1] b[2k+1, j]. The left operand is
bfloat16 with contiguous rows, read as words. The right operand has rows 2k and 2k+1 interleaved (VNNI layout): word
[k][j] holds b[2k, j] and, in its upper half, b[2k+1, j]. An odd count is padded with 0. Conventions: vector.py.

    begin_products, end_products ()
        before the first and after the last product of a kernel, in each thread
    gemm, gemm_add (a, a_row, a_col, b, b_row, c, c_row, m, n, k)
        c = a @ b, c += a @ b in float32; k words. By vectors (AVX512-BF16) here, by tiles in amx.py
    pack_transposed (source, source_row, target, target_row, m, n, scale)
        word [j][i] of target = scale * source[i, 2j], source[i, 2j+1]: rows become columns; scale is a power of two
    pack_rows (source, source_row, target, target_row, m, n)
        word [i][j] of target = source[2i, j], source[2i+1, j]
    pad_rows (source, source_row, target, target_row, m, n)
        the rows of source, with zeros up to whole vectors
    pack_rows_t (source, source_row, target, target_row, m, n)
        word [j][i] of target = source[2i, j], source[2i+1, j]
    online_softmax_bf16_pairs (s, s_row, rows, columns, m, l, o, o_row, o_rows, scale_log2)
        as online_softmax (softmax.py), but p[i, j] = 2^(scale_log2 * (s[i, j] - m[j])), and word [i][j] of
        s = p[2i, j], p[2i+1, j]
    attend_bf16_pairs (columns, panel, q, q_panel, k, k_row, v, v_row, s, m, l, o, o_panel, keys, words, o_rows,
                       scale_log2)
        a tile of keys of which each query sees all: s = k @ q, online_softmax, o += v @ s, panel by panel. A panel has
        up to `panel` of the columns; q_panel and o_panel are the bytes of one; s is memory for the scores of one
    softmax_backward_bf16_pairs (s, s_row, rows, columns, dp, lse, delta, scale, ds_rows, ds_rows_row)
        p[i, j] = exp(s[i, j] - lse[i]), ds[i, j] = scale * p * (dp[i, j] - delta[i]); word [i][j] of s = p[2i, j],
        p[2i+1, j], of dp likewise ds; ds_rows: ds as it is, in bfloat16
    round_bf16_pairs (s, s_row, m, n, target, target_row, rows, rows_row)
        word [i][j] of target = s[2i, j], s[2i+1, j]; rows, unless 0: the same, rows as they are, in bfloat16

Packed targets are padded with zeros to whole squares of 16 words (of `lanes`, on CPUs with shorter vectors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from llvmlite import ir

from . import amx
from .exponentials import LOG2E, exp2, exp2_short, normal_power
from .gemm import emit_gemm
from .register_block import RegisterBlock
from .softmax import online_softmax
from .vector import (
    I16,
    I32,
    I64,
    Loop,
    Memory,
    at_most,
    call,
    declared,
    either,
    fill,
    fma,
    from_bits,
    load_narrow,
    narrow,
    row_groups,
    splat,
    transposed,
    transposed_rows,
)


class Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, a type that llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash("bfloat")


def dot(b: ir.IRBuilder, x: ir.Value, y: ir.Value, sums: ir.Value) -> ir.Value:
    """sums + x * y, x and y vectors of 16 bf16 pairs: vdpbf16ps, which flushes denormals to 0."""
    pairs = ir.VectorType(Bfloat16(), 32)
    kind = ir.FunctionType(sums.type, [sums.type, pairs, pairs])
    function = declared(b.module, "llvm.x86.avx512bf16.dpbf16ps.512", kind)
    return b.call(function, [sums, b.bitcast(x, pairs), b.bitcast(y, pairs)])


def words(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two vectors of 16-bit elements to one of words."""
    kind = ir.VectorType(I32, low.type.count)
    return b.or_(b.zext(low, kind), b.shl(b.zext(high, kind), fill(kind, 16)))


def rounded(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """float32 to bits of bfloat16."""
    if _native(b, x):
        result = ir.VectorType(Bfloat16(), 16)
        function = declared(b.module, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.FunctionType(result, [x.type]))
        return b.bitcast(b.call(function, [x]), ir.VectorType(I16, 16))
    return narrow(b, x, "bfloat16")


def rounded_pairs(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two vectors of float32 to words."""
    if _native(b, low):
        result = ir.VectorType(Bfloat16(), 32)
        kind = ir.FunctionType(result, [low.type] * 2)
        function = declared(b.module, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind)
        halves = ir.VectorType(I16, 32)
        both = b.bitcast(b.call(function, [high, low]), halves)
        order = ir.Constant(ir.VectorType(I32, 32), [lane // 2 + 16 * (lane % 2) for lane in range(32)])
        return b.bitcast(b.shuffle_vector(both, ir.Constant(halves, ir.Undefined), order), ir.VectorType(I32, 16))
    return words(b, narrow(b, low, "bfloat16"), narrow(b, high, "bfloat16"))


def rounded_weights(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """As rounded_pairs, for weights: ties are rounded up, and a NaN need not stay one; half the time on Intel."""
    word = ir.VectorType(I32, low.type.count)
    sixteen, half, upper = (fill(word, x) for x in (16, 0x8000, -0x10000))
    low, high = (b.add(b.bitcast(x, word), half) for x in (low, high))
    if not _native(b, low):
        return b.or_(b.lshr(low, sixteen), b.and_(high, upper))
    # By name, or LLVM makes a permutation of it, which takes three steps.
    select = declared(b.module, "llvm.x86.avx512.pternlog.d.512", ir.FunctionType(word, [word, word, word, I32]))
    return b.call(select, [upper, high, b.lshr(low, sixteen), I32(_SELECT)])


_SELECT = 0xCA  # vpternlog's table of x ? y : z, bit by bit


def _native(b: ir.IRBuilder, x: ir.Value) -> bool:
    return getattr(b.module, "avx512bf16", False) and x.type.count == 16


def _emit_pack_columns(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    source, source_row, target, target_row, m, n, scale_bits = args
    lanes = shape.lanes
    memory, word = Memory(b, element, lanes), ir.VectorType(I32, lanes)
    scale = splat(b, from_bits(b, scale_bits, element), lanes)
    upper, sixteen = fill(word, 0xFFFF0000), fill(word, 16)

    def scaled(row: ir.Value) -> ir.Value:
        # Exact: a power of two changes only the exponent.
        low = b.bitcast(b.fmul(b.bitcast(b.shl(row, sixteen), memory.vector), scale), word)
        high = b.bitcast(b.fmul(b.bitcast(b.and_(row, upper), memory.vector), scale), word)
        return b.bitcast(b.or_(b.lshr(low, sixteen), b.and_(high, upper)), memory.vector)

    def whole_square(i: ir.Value, j: ir.Value, to: ir.Value) -> None:
        at = b.add(b.add(source, b.mul(i, source_row)), b.shl(j, I64(1)))
        for words_before in range(0, lanes, 4):
            rows = transposed_rows(b, b.add(at, I64(4 * words_before)), source_row, lanes, I32, 4)
            for x, row in enumerate(rows):
                memory.store(scaled(row), b.add(to, b.mul(I64(words_before + x), target_row)))

    def ragged_square(i: ir.Value, j: ir.Value, to: ir.Value) -> None:
        rows = []
        for x in range(lanes):
            row = b.add(i, I64(x))
            remaining = b.select(b.icmp_signed("<", row, m), b.sub(n, j), I64(0))
            at = b.add(b.add(source, b.mul(row, source_row)), b.shl(j, I64(1)))
            rows.append(scaled(b.bitcast(load_narrow(b, at, 2 * lanes, remaining), word)))
        for x, row in enumerate(transposed(b, rows)):
            memory.store(row, b.add(to, b.mul(I64(x), target_row)))

    with Loop(b, I64(0), m, lanes) as (i, _, _), Loop(b, I64(0), n, 2 * lanes) as (j, _, _):
        to = b.add(b.add(target, b.mul(b.lshr(j, I64(1)), target_row)), b.shl(i, I64(2)))
        inside = _inside(b, (i, lanes, m), (j, 2 * lanes, n))
        either(b, inside, partial(whole_square, i, j, to), partial(ragged_square, i, j, to))


def _inside(b: ir.IRBuilder, *axes: tuple[ir.Value, int, ir.Value]) -> ir.Value:
    """Whether start + count is at most the end along each axis."""
    return reduce(b.and_, [b.icmp_signed("<=", b.add(start, I64(count)), end) for start, count, end in axes])


def _two_rows(
    b: ir.IRBuilder, source: ir.Value, source_row: ir.Value, i: ir.Value, j: ir.Value, m: ir.Value, n: ir.Value,
    lanes: int,
) -> ir.Value:  # fmt: skip
    """Words of the rows 2i and 2i+1 from column j on."""

    def row(index: ir.Value) -> ir.Value:
        remaining = b.select(b.icmp_signed("<", index, m), b.sub(n, j), I64(0))
        at = b.add(b.add(source, b.mul(index, source_row)), b.shl(j, I64(1)))
        return load_narrow(b, at, lanes, remaining)

    first = b.shl(i, I64(1))
    return words(b, row(first), row(b.add(first, I64(1))))


def _emit_pad_rows(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    source, source_row, target, target_row, m, n = args
    count = 2 * shape.lanes
    halves = Memory(b, I16, count)
    with Loop(b, I64(0), n, count) as (j, _, _):
        remaining, along = b.sub(n, j), b.shl(j, I64(1))
        rows = Loop(b, I64(0), m, 1, [b.add(source, along), b.add(target, along)])
        with rows as (_, (at, to), advance):
            halves.store(load_narrow(b, at, count, remaining), to)
            advance([b.add(at, source_row), b.add(to, target_row)])


def _emit_pack_rows(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    source, source_row, target, target_row, m, n = args
    memory = Memory(b, element, shape.lanes)
    half = b.lshr(b.add(m, I64(1)), I64(1))
    with Loop(b, I64(0), half, 1) as (i, _, _), Loop(b, I64(0), n, shape.lanes) as (j, _, _):
        row = b.bitcast(_two_rows(b, source, source_row, i, j, m, n, shape.lanes), memory.vector)
        memory.store(row, b.add(b.add(target, b.mul(i, target_row)), b.shl(j, I64(2))))


def _emit_pack_rows_t(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    source, source_row, target, target_row, m, n = args
    lanes = shape.lanes
    memory = Memory(b, element, lanes)
    half = b.lshr(b.add(m, I64(1)), I64(1))

    def whole_square(i: ir.Value, j: ir.Value, to: ir.Value) -> None:
        at = b.add(b.add(source, b.mul(b.shl(i, I64(1)), source_row)), b.shl(j, I64(1)))
        for before in range(0, lanes, 8):
            rows = transposed_rows(b, b.add(at, I64(2 * before)), source_row, 2 * lanes, I16, 2)
            for x, row in enumerate(rows):
                memory.store(b.bitcast(row, memory.vector), b.add(to, b.mul(I64(before + x), target_row)))

    def ragged_square(i: ir.Value, j: ir.Value, to: ir.Value) -> None:
        rows = [
            b.bitcast(_two_rows(b, source, source_row, b.add(i, I64(x)), j, m, n, lanes), memory.vector)
            for x in range(lanes)
        ]
        for x, row in enumerate(transposed(b, rows)):
            memory.store(row, b.add(to, b.mul(I64(x), target_row)))

    def square(i: ir.Value, j: ir.Value, to: ir.Value) -> None:
        if lanes < 8:  # columns of half a vector
            ragged_square(i, j, to)
            return
        inside = _inside(b, (b.shl(i, I64(1)), 2 * lanes, m), (j, lanes, n))
        either(b, inside, partial(whole_square, i, j, to), partial(ragged_square, i, j, to))

    with Loop(b, I64(0), half, lanes) as (i, _, _), Loop(b, I64(0), n, lanes) as (j, _, _):
        square(i, j, b.add(b.add(target, b.mul(j, target_row)), b.shl(i, I64(2))))


Exponent = Callable[[ir.Value, int], ir.Value]
"""From scores, and the number of their row or vector, to what 2 is raised to."""

LARGE_SHIFT = 2.0**13
"""Of row references in base 2. Below, their rounding is 3e-4 of a weight at most, and `scale * s - shift` is one
operation. From there on, scores and references are subtracted first, which is exact where weights count.
"""


def _is_large(b: ir.IRBuilder, shifts: Sequence[ir.Value]) -> ir.Value:
    """Whether any lane is."""
    vector, lanes = shifts[0].type, ir.IntType(shifts[0].type.count)
    large = [b.fcmp_unordered(">=", call(b, "llvm.fabs", vector, x), fill(vector, LARGE_SHIFT)) for x in shifts]
    return b.icmp_signed("!=", b.bitcast(reduce(b.or_, large), lanes), lanes(0))


def _emit_online_softmax(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    s, row, count, _, _, l, *_, scale_bits = args
    memory = Memory(b, element, shape.lanes)
    scale_log2, zero = splat(b, from_bits(b, scale_bits, element), shape.lanes), fill(memory.vector, 0.0)

    def store_weights(offsets: list[ir.Value], row_max: list[ir.Value]) -> None:
        shift = [b.fneg(b.fmul(x, scale_log2)) for x in row_max]

        def store(exponent: Exponent) -> None:
            def p_at(at: ir.Value, v: int) -> ir.Value:
                return exp2_short(b, exponent(memory.load(b.add(at, offsets[v])), v))

            start = [memory.load(b.add(l, offset)) for offset in offsets]
            # Words overwrite scores in place: row i of words follows the reading of rows 2i and 2i+1.
            loop = Loop(b, I64(0), b.sub(count, I64(1)), 2, [*start, s, s])
            with loop as (_, carried, advance):
                *sums, at, to = carried
                new = []
                for v in range(len(offsets)):
                    low, high = p_at(at, v), p_at(b.add(at, row), v)
                    memory.store(b.bitcast(rounded_weights(b, low, high), memory.vector), b.add(to, offsets[v]))
                    new.append(b.fadd(sums[v], b.fadd(low, high)))
                advance([*new, b.add(at, b.shl(row, I64(1))), b.add(to, row)])
            last = Loop(b, I64(0), b.and_(count, I64(1)), 1, loop.results[: len(offsets)])
            with last as (_, sums, advance):
                at, to = loop.results[len(offsets) :]
                new = []
                for v in range(len(offsets)):
                    low = p_at(at, v)
                    memory.store(b.bitcast(rounded_weights(b, low, zero), memory.vector), b.add(to, offsets[v]))
                    new.append(b.fadd(sums[v], low))
                advance(new)
            for v in range(len(offsets)):
                memory.store(last.results[v], b.add(l, offsets[v]))

        either(
            b, _is_large(b, shift),
            lambda: store(lambda score, v: b.fmul(b.fsub(score, row_max[v]), scale_log2)),
            lambda: store(lambda score, v: fma(b, score, scale_log2, shift[v])), likely=False,
        )  # fmt: skip

    online_softmax(
        b, memory, args[:-1], shape.vectors, lambda difference: exp2(b, b.fmul(difference, scale_log2)), store_weights
    )  # fmt: skip


def _emit_attend(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    columns, panel, q, q_panel, k, k_row, v, v_row, s, m, l, o, o_panel, keys, words, o_rows, scale_log2 = args
    gemm, online_softmax, gemm_add = (
        b.module.globals[name] for name in ("gemm", "online_softmax_bf16_pairs", "gemm_add")
    )
    row = b.shl(panel, I64(2))
    with Loop(b, I64(0), columns, panel, [q, o, m, l]) as (first, (q_at, o_at, m_at, l_at), advance):
        width = at_most(b, b.sub(columns, first), panel)
        b.call(gemm, [k, k_row, I64(4), q_at, row, s, row, keys, width, words])
        b.call(online_softmax, [s, row, keys, width, m_at, l_at, o_at, row, o_rows, scale_log2])
        pairs = b.lshr(b.add(keys, I64(1)), I64(1))
        b.call(gemm_add, [v, v_row, I64(4), s, row, o_at, row, o_rows, width, pairs])
        advance([b.add(q_at, q_panel), b.add(o_at, o_panel), b.add(m_at, row), b.add(l_at, row)])


def _emit_softmax_backward(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    s, row, count, columns, dp, lse, delta, scale_bits, ds_rows, ds_rows_row = args
    lanes = shape.lanes
    memory, halves = Memory(b, element, lanes), Memory(b, I16, lanes)
    scale = splat(b, from_bits(b, scale_bits, element), lanes)
    zero, masked, log2e = (fill(memory.vector, x) for x in (0.0, float("-inf"), LOG2E))

    def element_of(at: ir.Value, exponent: Exponent, i: int, minus_delta: ir.Value) -> tuple[ir.Value, ir.Value]:
        """P and dS of a vector."""
        score = memory.load(b.add(s, at))
        x = exponent(score, i)
        # A NaN in the LSE reaches the visible pairs of its row and no others. A masked pair has no gradient, whatever
        # its key and value hold.
        used = b.and_(b.fcmp_unordered("!=", score, masked), normal_power(b, x))
        p = exp2_short(b, x, used)
        ds = b.fmul(p, fma(b, memory.load(b.add(dp, at)), scale, minus_delta))
        return p, b.select(used, ds, zero)

    def along_rows(i: ir.Value, minus_delta: Sequence[ir.Value], exponent: Exponent) -> None:
        with Loop(b, I64(0), columns, lanes) as (j, _, _):
            along = b.shl(j, I64(2))
            at = [b.add(b.mul(b.add(i, I64(x)), row), along) for x in range(len(minus_delta))]
            pairs = [element_of(at[x], exponent, x, each) for x, each in enumerate(minus_delta)]
            to = b.add(b.mul(b.lshr(i, I64(1)), row), along)
            for target, values in zip((s, dp), zip(*pairs)):
                words_of = rounded_pairs(b, values[0], values[1] if len(pairs) == 2 else zero)
                memory.store(b.bitcast(words_of, memory.vector), b.add(target, to))
            for x, (_, ds) in enumerate(pairs):
                line = b.add(ds_rows, b.mul(b.add(i, I64(x)), ds_rows_row))
                halves.store(rounded(b, ds), b.add(line, b.shl(j, I64(1))))

    def pair(i: ir.Value, count: int) -> None:
        at = [b.shl(b.add(i, I64(x)), I64(2)) for x in range(count)]
        minus_lse, deltas = ([splat(b, memory.load_scalar(b.add(x, y)), lanes) for y in at] for x in (lse, delta))
        minus_lse, minus_delta = [b.fneg(x) for x in minus_lse], [b.fneg(b.fmul(x, scale)) for x in deltas]
        shift = [b.fmul(x, log2e) for x in minus_lse]
        store = partial(along_rows, i, minus_delta)
        either(
            b, _is_large(b, shift),
            lambda: store(lambda score, x: b.fmul(b.fadd(score, minus_lse[x]), log2e)),
            lambda: store(lambda score, x: fma(b, score, log2e, shift[x])), likely=False,
        )  # fmt: skip

    row_groups(b, count, (2, 1), pair)


def _emit_round_bf16_pairs(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: RegisterBlock) -> None:
    s, s_row, count, columns, target, target_row, rows, rows_row = args
    lanes = shape.lanes
    memory, halves = Memory(b, element, lanes), Memory(b, I16, lanes)
    zero = fill(memory.vector, 0.0)
    store_rows = b.icmp_signed("!=", rows, I64(0))

    def pair(i: ir.Value, count: int) -> None:
        with Loop(b, I64(0), columns, lanes) as (j, _, _):
            at = b.add(b.add(s, b.mul(i, s_row)), b.shl(j, I64(2)))
            values = [memory.load(at), memory.load(b.add(at, s_row)) if count == 2 else zero]
            to = b.add(b.add(target, b.mul(b.lshr(i, I64(1)), target_row)), b.shl(j, I64(2)))
            memory.store(b.bitcast(rounded_pairs(b, *values), memory.vector), to)
            with b.if_then(store_rows):
                for x, value in enumerate(values[:count]):
                    line = b.add(rows, b.mul(b.add(i, I64(x)), rows_row))
                    halves.store(rounded(b, value), b.add(line, b.shl(j, I64(1))))

    row_groups(b, count, (2, 1), pair)


KERNELS: dict[str, tuple[int, Callable[..., None]]] = {
    "pack_transposed": (7, _emit_pack_columns),
    "pad_rows": (6, _emit_pad_rows),
    "pack_rows": (6, _emit_pack_rows),
    "pack_rows_t": (6, _emit_pack_rows_t),
    "online_softmax_bf16_pairs": (10, _emit_online_softmax),
    "softmax_backward_bf16_pairs": (10, _emit_softmax_backward),
    "round_bf16_pairs": (8, _emit_round_bf16_pairs),
}


def kernels(method: str) -> dict[str, tuple[int, Callable[..., None]]]:
    """Name: number of arguments, emitter, in place of those for widened operands. method: of bf16.py."""

    def gemm(*args: Any, accumulate: bool) -> None:
        if method == "avx512bf16":
            emit_gemm(*args, accumulate=accumulate, multiply=dot)
        else:
            amx.emit_gemm(*args, accumulate=accumulate, tiles=amx.TILES[method])

    def nothing(*_: Any) -> None:
        pass

    return KERNELS | {
        "begin_products": (0, amx.emit_begin if method == "amx" else nothing),
        "end_products": (0, amx.emit_end if method == "amx" else nothing),
        "gemm": (10, lambda *args: gemm(*args, accumulate=False)),
        "gemm_add": (10, lambda *args: gemm(*args, accumulate=True)),
        "attend_bf16_pairs": (17, _emit_attend),
    }

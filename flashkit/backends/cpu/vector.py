"""Vector micro-kernels, emitted as LLVM vector IR.

LLVM's auto-vectoriser keeps the accumulators of a matrix product in memory, at a third of the machine's rate; here
they are vector values from the start. All arguments are 64-bit integers: addresses, strides in bytes, extents. The
column axis of b, of c and of every score tile is contiguous; nothing else is assumed, and vectors are loaded and
stored unaligned. Score tiles are padded to whole vectors.

    product, product_add (a, a_row, a_col, b, b_row, c, c_row, m, n, k)
        c = a @ b, c += a @ b; rows x vectors x lanes of c are held in registers
    column_max (s, s_row, m, n, top)
        top[j] = max(top[j], max_i s[i, j])
    exponentials (s, s_row, m, n, top, total)
        s[i, j] = exp(s[i, j] - top[j]); total[j] += sum_i s[i, j]
    pack (source, source_row, target, target_row, m, n, scale)
        target[j, i] = scale * source[i, j]; source in storage precision, rows of target padded to whole vectors with 0
    unpack (source, source_row, target, target_row, m, n, factor, check)
        target[i, j] = source[j, i] * factor[i], target in storage precision; check[:] += 0 * target[:], NaN if one
        is not finite
    transpose1, transpose4, transpose8 (source, source_row, target, target_row, m, n)
        target[j, i] = source[i, j] for elements of so many bytes
    weights (s, s_row, m, n, dp, lse, delta, scale)
        s[i, j] = p = exp(s[i, j] - lse[i]); dp[i, j] = scale * p * (dp[i, j] - delta[i])

micro.py compiles them for this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
STORED = {"float16": I16, "bfloat16": I16}
"""How elements lie in memory where that is not how they are computed with."""
LOG2E = 1.4426950408889634

# 2^r on [-1/2, 1/2]: Chebyshev interpolation in 40 digits; relative error 2.5e-9 and, coefficients rounded, 2e-17.
EXP2_COEFFICIENTS = {
    "float": (
        1.0,
        0.6931472067028326,
        0.24022650922288757,
        0.05550327226670302,
        0.009618056678524637,
        0.0013400428177615838,
        0.0001546144469856913,
    ),
    "double": (
        1.0,
        0.6931471805599453,
        0.24022650695910072,
        0.0555041086648217,
        0.009618129107628484,
        0.0013333558146390353,
        0.00015403530393362755,
        1.5252733856293466e-05,
        1.3215486815999978e-06,
        1.0178051192960649e-07,
        7.054894386348348e-09,
        4.456675341049206e-10,
        2.5733568308756892e-11,
    ),
}
EXP_COEFFICIENTS = {
    name: tuple(c / math.log(2) ** k for k, c in enumerate(coefficients))
    for name, coefficients in EXP2_COEFFICIENTS.items()
}
# Below these the result is 0 rather than a denormal: a denormal weight costs a hundred cycles wherever it is used.
EXP2_UNDERFLOW = {"float": -126.0, "double": -1022.0}
SIZE = {"float": 4, "double": 8}
MANTISSA_BITS = {"float": 23, "double": 52}
EXPONENT_BIAS = {"float": 127, "double": 1023}


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    )


def fill(vector: ir.VectorType, value: float | int) -> ir.Constant:
    return ir.Constant(vector, [vector.element(value)] * vector.count)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic; its name is completed by the vector type it works on."""
    suffix = f"v{result.count}{'f32' if str(result.element) == 'float' else 'f64'}"
    full = f"{name}.{suffix}" + (".p0" if ".masked." in name else "")
    return builder.call(declared(builder.module, full, ir.FunctionType(result, [a.type for a in args])), args)


def declared(module: ir.Module, name: str, kind: ir.FunctionType) -> ir.Function:
    return module.globals[name] if name in module.globals else ir.Function(module, kind, name)


def from_bits(builder: ir.IRBuilder, bits: ir.Value, element: ir.Type) -> ir.Value:
    """The number whose bits, as a float64, are given."""
    number = builder.bitcast(bits, ir.DoubleType())
    return number if str(element) == "double" else builder.fptrunc(number, element)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at an address, which need not be valid, for reading."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    function = declared(
        builder.module, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    )
    builder.call(function, [pointer, I32(0), I32(3), I32(1)])


def fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(builder, "llvm.fma", x.type, x, y, z)


class Memory:
    """Addresses in bytes, loads and stores of one vector or scalar type."""

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, lanes: int) -> None:
        self.builder, self.element = builder, element
        self.vector = ir.VectorType(element, lanes)
        self.size = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}[str(element)]

    def at(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        b = self.builder
        if mask is None:
            return b.load(self.at(address, self.vector), align=self.size)
        return call(
            b,
            "llvm.masked.load",
            self.vector,
            self.at(address, self.vector),
            I32(self.size),
            mask,
            fill(self.vector, 0.0),
        )

    def store(self, value: ir.Value, address: ir.Value, mask: ir.Value | None = None) -> None:
        b = self.builder
        if mask is None:
            b.store(value, self.at(address, self.vector), align=self.size)
        else:
            name = f"llvm.masked.store.v{self.vector.count}{'f32' if self.size == 4 else 'f64'}.p0"
            args = [value, self.at(address, self.vector), I32(self.size), mask]
            b.call(declared(b.module, name, ir.FunctionType(ir.VoidType(), [a.type for a in args])), args)

    def load_scalar(self, address: ir.Value) -> ir.Value:
        return self.builder.load(self.at(address, self.element), align=self.size)

    def store_scalar(self, value: ir.Value, address: ir.Value) -> None:
        self.builder.store(value, self.at(address, self.element), align=self.size)

    def tail_mask(self, remaining: ir.Value) -> ir.Value:
        """Lanes below `remaining`."""
        lanes = self.vector.count
        indices = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        return self.builder.icmp_signed("<", indices, splat(self.builder, self.builder.trunc(remaining, I32), lanes))


def load_halves(b: ir.IRBuilder, address: ir.Value, count: int, remaining: ir.Value) -> ir.Value:
    """`count` 16-bit numbers, those from `remaining` on 0 and not read."""
    kind, lanes = ir.VectorType(I16, count), ir.VectorType(I32, count)
    mask = b.icmp_signed("<", ir.Constant(lanes, list(range(count))), splat(b, b.trunc(remaining, I32), count))
    args = [b.inttoptr(address, kind.as_pointer()), I32(2), mask, fill(kind, 0)]
    signature = ir.FunctionType(kind, [a.type for a in args])
    return b.call(declared(b.module, f"llvm.masked.load.v{count}i16.p0", signature), args)


class Loop:
    """`for index in range(start, stop, step)` with values carried in registers; use as `with Loop(...) as (index,
    carried, advance)`.
    """

    def __init__(
        self,
        builder: ir.IRBuilder,
        start: ir.Value,
        stop: ir.Value,
        step: int | ir.Value,
        carried: Sequence[ir.Value] = (),
    ) -> None:
        self.builder, self.start, self.stop, self.initial = builder, start, stop, list(carried)
        self.step = I64(step) if isinstance(step, int) else step

    def __enter__(self) -> tuple[ir.Value, list[ir.Value], Callable[[list[ir.Value]], None]]:
        b = self.builder
        self.before = b.block
        self.body, self.exit = b.append_basic_block("body"), b.append_basic_block("exit")
        b.cbranch(b.icmp_signed("<", self.start, self.stop), self.body, self.exit)
        b.position_at_end(self.body)
        self.index = b.phi(I64)
        self.index.add_incoming(self.start, self.before)
        self.carried = []
        for value in self.initial:
            phi = b.phi(value.type)
            phi.add_incoming(value, self.before)
            self.carried.append(phi)
        self.next: list[ir.Value] = []
        return self.index, self.carried, self.next.extend

    def __exit__(self, *error: Any) -> None:
        b = self.builder
        following = b.add(self.index, self.step)
        last = b.block
        b.cbranch(b.icmp_signed("<", following, self.stop), self.body, self.exit)
        self.index.add_incoming(following, last)
        b.position_at_end(self.exit)
        self.results = []
        for initial, phi, value in zip(self.initial, self.carried, self.next, strict=True):
            phi.add_incoming(value, last)
            result = b.phi(initial.type)
            result.add_incoming(initial, self.before)
            result.add_incoming(value, last)
            self.results.append(result)


def exp2(builder: ir.IRBuilder, x: ir.Value, coefficients: Sequence[float] = ()) -> ir.Value:
    """2^x for a vector of x <= 127: exactly 0 below the normal numbers and at -inf, NaN at NaN.

    coefficients: of a polynomial other than EXP2_COEFFICIENTS.
    """
    b, coefficients = builder, coefficients or EXP2_COEFFICIENTS[str(x.type.element)]
    if not _is_native(b, x.type):
        return _power(b, x, _whole(b, x), lambda whole: b.fsub(x, whole), coefficients)
    r = _avx512(b, "reduce", x, I32(_REDUCE_TO_NEAREST))
    return _power(b, x, b.fsub(x, r), lambda whole: r, coefficients)


def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x likewise, within about one unit in the last place: the multiple of ln 2 is taken off x itself, since
    x log2(e) would carry its own rounding error, which grows with x.
    """
    b, vector = builder, x.type
    in_twos = b.fmul(x, fill(vector, LOG2E))
    ln2 = fill(vector, -math.log(2))
    coefficients = EXP_COEFFICIENTS[str(vector.element)]
    return _power(b, in_twos, _whole(b, in_twos), lambda whole: fma(b, whole, ln2, x), coefficients)


def _is_native(b: ir.IRBuilder, vector: ir.VectorType) -> bool:
    return getattr(b.module, "avx512", False) and vector.count * SIZE[str(vector.element)] == 64


def _whole(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The nearest integer, of an x that _power can take a power of two with."""
    if not _is_native(b, x.type):
        # The comparison is false for NaN, which so reaches the integer conversion as a harmless number, and the
        # polynomial as NaN.
        underflow = fill(x.type, EXP2_UNDERFLOW[str(x.type.element)])
        x = b.select(b.fcmp_ordered(">", x, underflow), x, underflow)
    return call(b, "llvm.rint", x.type, x)


def _power(
    b: ir.IRBuilder, x: ir.Value, whole: ir.Value, rest: Callable[[ir.Value], ir.Value], coefficients: Sequence[float]
) -> ir.Value:
    """2^whole times the polynomial of the rest; 0 where x, the exponent, is below the normal numbers'."""
    vector, name = x.type, str(x.type.element)
    r = rest(whole)
    p: ir.Value = fill(vector, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        p = fma(b, p, r, fill(vector, c))
    if _is_native(b, vector):
        power = _avx512(b, "scalef", p, whole)
    else:
        integers = ir.VectorType(I32 if name == "float" else I64, vector.count)
        exponent = b.add(b.fptosi(whole, integers), fill(integers, EXPONENT_BIAS[name]))
        power = b.fmul(p, b.bitcast(b.shl(exponent, fill(integers, MANTISSA_BITS[name])), vector))
    return b.select(b.fcmp_ordered("<", x, fill(vector, EXP2_UNDERFLOW[name])), fill(vector, 0.0), power)


_REDUCE_TO_NEAREST = 8  # vreduceps' immediate: x - round(x), no exception flagged
_ROUNDING_OF_MODE = 4


def _avx512(builder: ir.IRBuilder, name: str, x: ir.Value, y: ir.Value) -> ir.Value:
    """An AVX-512 instruction that LLVM has no portable name for: `reduce` (x minus its nearest integer) or `scalef` (x
    times 2 to the floor of y).
    """
    b, vector = builder, x.type
    single = str(vector.element) == "float"
    full = f"llvm.x86.avx512.mask.{name}.p{'s' if single else 'd'}.512"
    every = ir.IntType(vector.count)(-1)
    args = [x, y, fill(vector, 0.0), every, I32(_ROUNDING_OF_MODE)]
    return b.call(declared(b.module, full, ir.FunctionType(vector, [a.type for a in args])), args)


# --- product ----------------------------------------------------------------------------------------------------------


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


def column_groups(
    b: ir.IRBuilder, columns: ir.Value, vectors: int, lanes: int, emit: Callable[[ir.Value, int], None]
) -> None:
    """Go over the columns `vectors` vectors at a time, the rest one by one: several at once hide each other's
    latency.
    """
    wide = vectors * lanes
    with Loop(b, I64(0), b.sub(columns, I64(wide - 1)), wide) as (j, _, _):
        emit(j, vectors)
    with Loop(b, b.mul(b.sdiv(columns, I64(wide)), I64(wide)), columns, lanes) as (j, _, _):
        emit(j, 1)


def _emit_column_max(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
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


def _emit_exponentials(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
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


def _emit_weights(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
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


# --- transposes -------------------------------------------------------------------------------------------------------


def widen(b: ir.IRBuilder, x: ir.Value, storage: str, element: ir.Type) -> ir.Value:
    """Elements as they are stored, bits of 16 where `storage` says so, to elements as they are computed with."""
    scalar = not isinstance(x.type, ir.VectorType)
    to = element if scalar else ir.VectorType(element, x.type.count)
    if storage == "float16":
        half = ir.HalfType() if scalar else ir.VectorType(ir.HalfType(), x.type.count)
        return b.fpext(b.bitcast(x, half), to)
    if storage == "bfloat16":
        word = I32 if scalar else ir.VectorType(I32, x.type.count)
        sixteen = I32(16) if scalar else fill(word, 16)
        return b.bitcast(b.shl(b.zext(x, word), sixteen), to)
    return x


def narrow(b: ir.IRBuilder, x: ir.Value, storage: str) -> ir.Value:
    """The way back, to nearest, ties to even; a NaN stays one."""
    scalar = not isinstance(x.type, ir.VectorType)

    def of(kind: ir.Type) -> ir.Type:
        return kind if scalar else ir.VectorType(kind, x.type.count)

    def number(kind: ir.Type, value: int) -> ir.Value:
        return kind(value) if scalar else fill(of(kind), value)

    if storage == "float16":
        return b.bitcast(b.fptrunc(x, of(ir.HalfType())), of(I16))
    if storage == "bfloat16":
        bits = b.bitcast(x, of(I32))
        high = b.lshr(bits, number(I32, 16))
        carried = b.add(bits, b.add(b.and_(high, number(I32, 1)), number(I32, 0x7FFF)))
        rounded = b.trunc(b.lshr(carried, number(I32, 16)), of(I16))
        quiet = b.or_(b.trunc(high, of(I16)), number(I16, 0x40))
        return b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return x


def transposed(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """A square of vectors transposed in registers: blocks of half the size change places, then their halves."""
    n = len(rows)
    rows = list(rows)
    step = n // 2
    while step:
        low = [lane if not lane & step else n + lane - step for lane in range(n)]
        high = [lane + step if not lane & step else n + lane for lane in range(n)]
        for i in range(n):
            if not i & step:
                x, y = rows[i], rows[i + step]
                rows[i] = b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, n), low))
                rows[i + step] = b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, n), high))
        step //= 2
    return rows


def _emit_pack(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
    b = builder
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
                # Past the last row its own address again: never outside the source.
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


def _emit_unpack(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block) -> None:
    b = builder
    source, source_row, target, target_row, m, n, factor, check = args
    lanes = shape.lanes
    memory, stored = Memory(b, element, lanes), Memory(b, STORED.get(shape.storage, element), lanes)
    zero = fill(memory.vector, 0.0)

    def scaled(i: ir.Value, j: ir.Value) -> ir.Value:
        """Column j's values of the rows from i on, ready to be stored; what is not finite marks `check`."""
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


def _emit_transpose(
    builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, shape: Block, *, size: int
) -> None:
    b = builder
    source, source_row, target, target_row, m, n = args
    square = min(16, shape.lanes * SIZE[shape.element] // size)
    memory = Memory(b, ir.IntType(8 * size), square)

    def at(base: ir.Value, row: ir.Value, i: ir.Value, j: ir.Value) -> ir.Value:
        return b.add(b.add(base, b.mul(i, row)), b.mul(j, I64(size)))

    def one_by_one(i: ir.Value, j: ir.Value, j_end: ir.Value) -> None:
        with Loop(b, j, j_end, 1) as (x, _, _):
            memory.store_scalar(memory.load_scalar(at(source, source_row, i, x)), at(target, target_row, x, i))

    # Rows lie far apart, so the hardware foresees nothing: while one square of rows is turned the next is fetched, at
    # the end the first of the tile that follows along the row.
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


# --- the module -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """What micro-kernels are made for: the element ("float" or "double"), the register block rows x vectors x lanes of
    it, and how operands are stored.
    """

    element: str
    rows: int
    vectors: int
    lanes: int
    storage: str = ""  # "float16" or "bfloat16" where the operands are stored in 16 bits
    pairs: str = ""  # how pairs of bfloat16 are multiplied, where they are (bf16.py)


KERNELS: dict[str, tuple[int, Callable[..., None]]] = {
    "product": (10, partial(emit_product, accumulate=False)),
    "product_add": (10, partial(emit_product, accumulate=True)),
    "column_max": (5, _emit_column_max),
    "exponentials": (6, _emit_exponentials),
    "pack": (7, _emit_pack),
    "unpack": (8, _emit_unpack),
    "weights": (8, _emit_weights),
    **{f"transpose{size}": (6, partial(_emit_transpose, size=size)) for size in (1, 4, 8)},
}
"""Name: number of arguments, emitter."""


class MicroModule(ir.Module):  # type: ignore[misc]
    """A module of micro-kernels for a CPU with these features, by LLVM's names."""

    def __init__(self, name: str, triple: str, features: str) -> None:
        super().__init__(name)
        self.triple = triple
        self.avx512 = {"+avx512f", "+avx512dq"} <= set(features.split(","))
        self.avx512bf16 = self.avx512 and "+avx512bf16" in features.split(",")


def module(block: Block, triple: str, features: str, kernels: dict[str, tuple[int, Callable[..., None]]]) -> ir.Module:
    """Micro-kernels for a register block, as C functions of 64-bit integers."""
    result = MicroModule("flashkit_micro", triple, features)
    element = ir.FloatType() if block.element == "float" else ir.DoubleType()
    for name, (arguments, emit) in kernels.items():
        function = ir.Function(result, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
        function.attributes.add("nounwind")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        emit(builder, list(function.args), element, block)
        builder.ret_void()
    return result

"""What vector micro-kernels are made of, as LLVM vector IR.

LLVM's auto-vectoriser keeps the accumulators of a matrix product in memory, at a third of the machine's rate; here
they are vector values from the start. The micro-kernels stand in product.py, softmax.py and transposes.py (those for
few queries in gemv.py, for bfloat16 in pairs.py and amx.py); micro.py compiles them for this machine. All arguments are
64-bit integers: addresses, strides in bytes, extents. The column axis of b, of c and of every score tile is contiguous;
nothing else is assumed, and vectors are loaded and stored unaligned. Score tiles are padded to whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

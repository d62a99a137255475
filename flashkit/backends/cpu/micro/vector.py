"""Building blocks of the micro-kernels: LLVM vector IR.

LLVM's auto-vectoriser keeps the accumulators of a matrix product in memory. Here they are vector values from the start,
so they stay in registers. The micro-kernels are in gemm.py, softmax.py and transpose.py, those for few queries in
gemv.py, those for bfloat16 in bf16_pairs.py and amx.py; compile.py compiles them for this machine.

All arguments are 64-bit integers: addresses, strides in bytes, extents. The columns of b, of c and of every score tile
are contiguous, and score tiles are padded to whole vectors. Nothing else is assumed; loads and stores are unaligned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
STORED = {"float16": I16, "bfloat16": I16, "e4m3": I8, "int8": I8}
"""LLVM types of the dtypes that are stored in 16 or 8 bits."""
SIZE = {"float": 4, "double": 8}
E4M3_UNIT = 256.0
"""Numbers of e4m3 over what `widen` makes of them; scales make up for it."""


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
    function = declared(builder.module, f"{name}.{suffix}", ir.FunctionType(result, [a.type for a in args]))
    return builder.call(function, args)


def declared(module: ir.Module, name: str, kind: ir.FunctionType) -> ir.Function:
    return module.globals[name] if name in module.globals else ir.Function(module, kind, name)


def at_most(builder: ir.IRBuilder, count: ir.Value, most: ir.Value) -> ir.Value:
    """The lesser of two signed integers."""
    return builder.select(builder.icmp_signed("<", count, most), count, most)


def from_bits(builder: ir.IRBuilder, bits: ir.Value, element: ir.Type) -> ir.Value:
    """A number of type `element` from the bits of a float64."""
    number = builder.bitcast(bits, ir.DoubleType())
    return number if str(element) == "double" else builder.fptrunc(number, element)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at an address, which need not be valid, for reading."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    function = declared(
        builder.module, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    )
    builder.call(function, [pointer, I32(0), I32(3), I32(1)])


def fma(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(builder, "llvm.fma", x.type, x, y, z)


class Memory:
    """Loads and stores of one vector and scalar type at byte addresses."""

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, lanes: int) -> None:
        self.builder, self.element = builder, element
        self.vector = ir.VectorType(element, lanes)
        self.size = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}[str(element)]

    def at(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """Lanes outside of the mask are 0 and are not read."""
        if mask is None:
            return self.builder.load(self.at(address, self.vector), align=self.size)
        zeros = ir.Constant(self.vector, None)
        return self._masked("load", self.vector, self.at(address, self.vector), I32(self.size), mask, zeros)

    def store(self, value: ir.Value, address: ir.Value, mask: ir.Value | None = None) -> None:
        if mask is None:
            self.builder.store(value, self.at(address, self.vector), align=self.size)
        else:
            self._masked("store", ir.VoidType(), value, self.at(address, self.vector), I32(self.size), mask)

    def _masked(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        element = {"float": "f32", "double": "f64"}.get(str(self.element), str(self.element))
        full = f"llvm.masked.{name}.v{self.vector.count}{element}.p0"
        function = declared(self.builder.module, full, ir.FunctionType(result, [a.type for a in args]))
        return self.builder.call(function, args)

    def load_scalar(self, address: ir.Value) -> ir.Value:
        return self.builder.load(self.at(address, self.element), align=self.size)

    def store_scalar(self, value: ir.Value, address: ir.Value) -> None:
        self.builder.store(value, self.at(address, self.element), align=self.size)

    def tail_mask(self, remaining: ir.Value) -> ir.Value:
        """Lanes below `remaining`."""
        lanes = self.vector.count
        indices = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        return self.builder.icmp_signed("<", indices, splat(self.builder, self.builder.trunc(remaining, I32), lanes))


def load_narrow(
    b: ir.IRBuilder, address: ir.Value, count: int, remaining: ir.Value, element: ir.IntType = I16
) -> ir.Value:  # fmt: skip
    """`count` elements of 16 or 8 bits; those from `remaining` on are 0 and are not read."""
    memory = Memory(b, element, count)
    return memory.load(address, memory.tail_mask(remaining))


class Loop:
    """`with Loop(...) as (index, carried, advance)`: index from start to stop, values carried in registers."""

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


def either(
    b: ir.IRBuilder, condition: ir.Value, then: Callable[[], None], otherwise: Callable[[], None],
    likely: bool | None = None,
) -> None:  # fmt: skip
    """Emit a branch."""
    with b.if_else(condition, likely) as (holds, fails):
        with holds:
            then()
        with fails:
            otherwise()


def row_groups(b: ir.IRBuilder, m: ir.Value, heights: Sequence[int], emit: Callable[[ir.Value, int], None]) -> None:
    """Emit loops over m rows, the greatest possible height at a time."""
    i: ir.Value = I64(0)
    for height in heights:
        with Loop(b, i, b.sub(m, I64(height - 1)), height) as (at, _, _):
            emit(at, height)
        i = b.add(i, b.mul(b.sdiv(b.sub(m, i), I64(height)), I64(height)))


def column_groups(
    b: ir.IRBuilder, columns: ir.Value, vectors: int, lanes: int, emit: Callable[[ir.Value, int], None]
) -> None:
    """Emit a loop over the columns, `vectors` vectors at a time to hide latency, then one at a time."""
    wide = vectors * lanes
    with Loop(b, I64(0), b.sub(columns, I64(wide - 1)), wide) as (j, _, _):
        emit(j, vectors)
    with Loop(b, b.mul(b.sdiv(columns, I64(wide)), I64(wide)), columns, lanes) as (j, _, _):
        emit(j, 1)


def _like(x: ir.Value, element: ir.Type) -> ir.Type:
    """A scalar of this type, or a vector with as many lanes as x."""
    return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


def _number(kind: ir.Type, value: int) -> ir.Value:
    return fill(kind, value) if isinstance(kind, ir.VectorType) else kind(value)


def widen(b: ir.IRBuilder, x: ir.Value, storage: str, element: ir.Type) -> ir.Value:
    """Stored elements, integers of 16 or 8 bits where `storage` names a dtype, to elements of the accumulators'."""
    to, word, half = (_like(x, kind) for kind in (element, I16, ir.HalfType()))
    if storage == "int8":
        return b.sitofp(b.sext(x, _like(x, I32)), to)
    if storage == "e4m3":
        # The bits of a float16, whose exponent has another bias: E4M3_UNIT times less, for subnormal numbers too. 0x7F
        # is NaN.
        wide = b.sext(x, word)
        bits = b.and_(b.shl(wide, _number(word, 7)), _number(word, 0xBFFF - 0x10000))
        is_nan = b.icmp_signed("==", b.and_(wide, _number(word, 0x7F)), _number(word, 0x7F))
        return b.fpext(b.bitcast(b.select(is_nan, _number(word, 0x7E00), bits), half), to)
    if storage == "float16":
        return b.fpext(b.bitcast(x, half), to)
    if storage == "bfloat16":
        bits = b.zext(x, _like(x, I32))
        return b.bitcast(b.shl(bits, _number(bits.type, 16)), to)
    return x


def narrow(b: ir.IRBuilder, x: ir.Value, storage: str) -> ir.Value:
    """The inverse of widen, rounded to nearest, ties to even; a NaN stays one."""
    word = _like(x, I16)
    if storage == "float16":
        return b.bitcast(b.fptrunc(x, _like(x, ir.HalfType())), word)
    if storage == "bfloat16":
        bits = b.bitcast(x, _like(x, I32))
        odd = b.and_(b.lshr(bits, _number(bits.type, 16)), _number(bits.type, 1))
        carried = b.add(bits, b.add(odd, _number(bits.type, 0x7FFF)))
        quiet = b.or_(bits, _number(bits.type, 0x400000))
        found = b.select(b.fcmp_unordered("uno", x, x), quiet, carried)
        return b.trunc(b.lshr(found, _number(bits.type, 16)), word)
    return x


def transposed(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose a square of vectors in registers: swap off-diagonal blocks of half the size, then of a quarter, ..."""
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


LANE_BYTES = 16
"""Of a lane of x86's registers. Instructions that rearrange elements within lanes take the least time."""


def transposed_rows(
    b: ir.IRBuilder, source: ir.Value, source_row: ir.Value, count: int, element: ir.Type, size: int
) -> list[ir.Value]:
    """The first columns of `count` rows, as many as a lane of x86's registers holds, transposed lane by lane."""
    square = LANE_BYTES // size
    rows = [b.add(source, b.mul(I64(x), source_row)) for x in range(count)]
    columns = [_lanes(b, rows[x::square], ir.VectorType(element, square)) for x in range(square)]
    for _ in range(square.bit_length() - 1):
        pairs = zip(columns[: square // 2], columns[square // 2 :])
        columns = [_interleaved(b, x, y, square, high) for x, y in pairs for high in (False, True)]
    return columns


def _lanes(b: ir.IRBuilder, addresses: Sequence[ir.Value], lane: ir.VectorType) -> ir.Value:
    """A vector of what lies at these addresses, a lane from each."""
    parts = [b.load(b.inttoptr(at, lane.as_pointer()), align=1) for at in addresses]
    while len(parts) > 1:
        both = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [b.shuffle_vector(x, y, both) for x, y in zip(parts[::2], parts[1::2])]
    return parts[0]


def _interleaved(b: ir.IRBuilder, x: ir.Value, y: ir.Value, square: int, high: bool) -> ir.Value:
    """The low or the high halves of lanes of `square` elements."""
    count = x.type.count
    half = [lane + high * square // 2 for lane in range(count) if lane % square < square // 2]
    order = [place for lane in half for place in (lane, count + lane)]
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, count), order))

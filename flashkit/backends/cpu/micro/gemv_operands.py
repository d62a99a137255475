"""How the gemv micro-kernels load and multiply K and V: widened, or as bf16 pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from .bf16_pairs import dot, rounded
from .exponentials import LOG2E, exp, exp2_short
from .register_block import RegisterBlock
from .vector import I16, I32, I64, SIZE, STORED, Memory, fill, fma, load_narrow, splat, widen

LoadP = Callable[[ir.Value], list[ir.Value]]


class Widened:
    """A vector of elements at a time, widened to the accumulators' dtype."""

    keys = 1
    """Rows of V that one step of gemv_pv multiplies."""
    strip = 8
    """Rows of V that all rows and columns of O accumulate before the next ones: few, so that reads rarely pause."""

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, block: RegisterBlock) -> None:
        self.builder, self.element, self.storage, self.lanes = builder, element, block.storage, block.lanes
        self.memory = Memory(builder, STORED.get(block.storage, element), block.lanes)
        self.size, self.elements = self.memory.size, block.lanes
        self.multiply = partial(fma, builder)

    def load(self, address: ir.Value, remaining: ir.Value | None = None) -> ir.Value:
        """`elements` elements of a key; those from `remaining` on are 0 and are not read."""
        b, memory = self.builder, self.memory
        if remaining is None:
            return widen(b, memory.load(address), self.storage, self.element)
        if self.storage:
            narrow = load_narrow(b, address, self.lanes, remaining, memory.element)
            return widen(b, narrow, self.storage, self.element)
        return memory.load(address, memory.tail_mask(remaining))

    def exp(self, x: ir.Value) -> ir.Value:
        return exp(self.builder, x)

    def columns(
        self, address: ir.Value, following: ir.Value, vectors: int, remaining: ir.Value | None
    ) -> list[ir.Value]:
        """Vectors of columns of a row of V. following: address of the next row, which Bf16Pairs multiplies too."""
        b = self.builder
        return [self.load(b.add(address, I64(v * self.lanes * self.size)), remaining) for v in range(vectors)]

    def in_order(self, sums: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Sums over `columns` in the order of the columns of O."""
        return sums

    def p_of(self, rows: Sequence[ir.Value], first: ir.Value, stop: ir.Value) -> LoadP:
        """For a strip of keys: a function from the key to P of each row, as vectors."""
        b, scalar = self.builder, Memory(self.builder, self.element, self.lanes)
        return lambda j: [
            splat(b, scalar.load_scalar(b.add(row, b.mul(j, I64(scalar.size)))), self.lanes) for row in rows
        ]


class Bf16Pairs(Widened):
    """bf16 pairs: two elements of a key, or two rows of V. Twice as many elements are multiplied, none widened."""

    keys, strip = 2, 16

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, block: RegisterBlock) -> None:
        super().__init__(builder, element, block)
        self.vector = ir.VectorType(element, block.lanes)
        self.elements = 2 * block.lanes
        self.multiply = partial(dot, builder)
        # Columns of the two vectors that two rows of 2 * lanes halves give, in the order of the unpack instructions: it
        # is cheaper than the order of memory.
        self._unpacked = [[c for c in range(2 * block.lanes) if c // 4 % 2 == upper] for upper in (0, 1)]
        self.words = [stack_buffer(builder, ir.VectorType(I16, block.lanes), 1) for _ in range(2)]

    def load(self, address: ir.Value, remaining: ir.Value | None = None) -> ir.Value:
        return self.builder.bitcast(self._halves(address, self.elements, remaining), self.vector)

    def exp(self, x: ir.Value) -> ir.Value:
        """To the precision of bfloat16."""
        return exp2_short(self.builder, self.builder.fmul(x, fill(self.vector, LOG2E)))

    def columns(
        self, address: ir.Value, following: ir.Value, vectors: int, remaining: ir.Value | None
    ) -> list[ir.Value]:
        b, lanes = self.builder, self.lanes
        wide = 2 * lanes if vectors > 1 else lanes
        found = []
        for at in range(0, vectors * lanes, wide):
            offset = I64(at * self.size)
            first, second = (self._halves(b.add(x, offset), wide, remaining) for x in (address, following))
            for columns in self._unpacked if vectors > 1 else [range(lanes)]:
                places = [column + wide * value for column in columns for value in (0, 1)]
                both = b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 2 * lanes), places))
                found.append(b.bitcast(both, self.vector))
        return found

    def in_order(self, sums: Sequence[ir.Value]) -> Sequence[ir.Value]:
        if len(sums) == 1:
            return sums
        b, found = self.builder, []
        unpacked = [column for half in self._unpacked for column in half]
        for low, high in zip(sums[::2], sums[1::2], strict=True):
            for start in (0, self.lanes):
                places = [unpacked.index(column) for column in range(start, start + self.lanes)]
                found.append(b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, self.lanes), places)))
        return found

    def p_of(self, rows: Sequence[ir.Value], first: ir.Value, stop: ir.Value) -> LoadP:
        b, memory = self.builder, Memory(self.builder, self.element, self.lanes)
        mask = memory.tail_mask(b.sub(stop, first))
        for row, words in zip(rows, self.words, strict=False):
            p = memory.load(b.add(row, b.mul(first, I64(memory.size))), mask)
            b.store(rounded(b, p), words, align=64)

        def pair(j: ir.Value) -> list[ir.Value]:
            place = b.lshr(b.sub(j, first), I64(1))
            at = [b.gep(b.bitcast(words, self.element.as_pointer()), [place]) for words in self.words[: len(rows)]]
            return [splat(b, b.load(x, align=4), self.lanes) for x in at]

        return pair

    def _halves(self, address: ir.Value, count: int, remaining: ir.Value | None) -> ir.Value:
        if remaining is None:
            return Memory(self.builder, I16, count).load(address)
        return load_narrow(self.builder, address, count, remaining)


def operands_of(builder: ir.IRBuilder, element: ir.Type, block: RegisterBlock) -> Widened:
    return (Bf16Pairs if block.bf16_pairs == "avx512bf16" else Widened)(builder, element, block)


def stack_buffer(b: ir.IRBuilder, kind: ir.Type, count: int) -> ir.Value:
    """Memory for vectors on the stack."""
    with b.goto_entry_block():
        buffer = b.alloca(kind, count)
    buffer.align = 64
    return buffer


def vector_registers(block: RegisterBlock) -> int:
    """Vector registers: AVX2 has 16, AVX-512 and NEON 32."""
    return 16 if block.lanes * SIZE[block.element] == 32 else 32


def sum_lanes(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """A vector of the lane sums of a power of two of vectors: two become one of sums of their halves, and so on."""
    lanes, count = vectors[0].type.count, len(vectors)
    width = lanes

    def pick(x: ir.Value, y: ir.Value, upper: int) -> ir.Value:
        half = width // 2
        places = []
        for lane in range(lanes):
            base, inside = lane // width * width, lane % width
            places.append(base + upper * half + inside % half + (lanes if inside >= half else 0))
        return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, lanes), places))

    while len(vectors) > 1:
        middle = len(vectors) // 2
        pairs = list(zip(vectors[:middle], vectors[middle:], strict=True))
        vectors = [b.fadd(pick(x, y, 0), pick(x, y, 1)) for x, y in pairs]
        width //= 2
    left = vectors[0]
    while width > 1:
        left = b.fadd(pick(left, left, 0), pick(left, left, 1))
        width //= 2
    apart = [x * (lanes // count) for x in range(count)]
    return b.shuffle_vector(left, left, ir.Constant(ir.VectorType(I32, count), apart))

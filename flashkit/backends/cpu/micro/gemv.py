"""Vector micro-kernels for few queries: products of a handful of rows with all keys and values, which are read once.

With one query a head there is nothing to keep in cache and nothing to multiply twice: the time is that of reading k
and v. So elements of a key or value lie along the lanes, as they lie in memory, rows of queries, whatever heads they
are of, share what is read, and memory is gone through in its own order: the hardware fetches ahead of a reader that
does so and of no other. Conventions: vector.py.

    row_scores (q, q_row, k, k_row, s, s_row, m, n, d, scale)
        s[i, j] = scale * sum_c q[i, c] k[j, c]; rows of q as load_query packs them, padded to whole vectors
    row_weights (s, s_row, m, n, top, total, factor)
        s[i, j] = exp(s[i, j] - t), where t is the greatest of top[i] and the row; factor[i] = exp(top[i] - t),
        total[i] = total[i] factor[i] + sum_j s[i, j], top[i] = t
    row_values (p, p_row, v, v_row, o, o_row, factor, m, n, d)
        o[i, c] = o[i, c] factor[i] + sum_j p[i, j] v[j, c]
    read (memory, lines, times, ahead, total)
        total[:] = bitwise or of all vectors of `lines` lines of 64 bytes, again and again: as fast as memory is read

k and v are in storage precision; their rows need not follow each other. `Widened` and `Paired` are the two ways to
multiply them. Only `read` fetches by instruction, `ahead` bytes before its turn. In the others that cost a tenth to a
quarter on the machine where it was tried (Zen 4), and did not make up for another order: four keys abreast, or half of
each value at a time, need fewer loads and took up to twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from .bf16_pairs import EXP2_SHORT, dot, rounded
from .vector import (
    I16,
    I32,
    I64,
    LOG2E,
    SIZE,
    STORED,
    Block,
    Loop,
    Memory,
    exp,
    exp2,
    fill,
    fma,
    from_bits,
    load_halves,
    prefetch,
    splat,
    widen,
)

LINE = 64
"""Bytes that memory is read by."""

Weights = Callable[[ir.Value], list[ir.Value]]


# --- how k and v are multiplied ---------------------------------------------------------------------------------------


class Widened:
    """A vector of elements at a time, in computing precision."""

    keys = 1
    """Values that a step of row_values takes in."""
    strip = 8
    """Values that all rows and columns of o take in before the next ones: few, so that reading never pauses for long.
    """

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, block: Block) -> None:
        self.builder, self.element, self.storage, self.lanes = builder, element, block.storage, block.lanes
        self.memory = Memory(builder, STORED.get(block.storage, element), block.lanes)
        self.size, self.elements = self.memory.size, block.lanes
        self.multiply = partial(fma, builder)

    def load(self, address: ir.Value, remaining: ir.Value | None = None) -> ir.Value:
        """`elements` elements of a key; those from `remaining` on are 0 and not read."""
        b, memory = self.builder, self.memory
        if remaining is None:
            return widen(b, memory.load(address), self.storage, self.element)
        if self.storage:
            return widen(b, load_halves(b, address, self.lanes, remaining), self.storage, self.element)
        return memory.load(address, memory.tail_mask(remaining))

    def exp(self, x: ir.Value) -> ir.Value:
        return exp(self.builder, x)

    def columns(
        self, address: ir.Value, following: ir.Value, vectors: int, remaining: ir.Value | None
    ) -> list[ir.Value]:
        """Vectors of a value's columns. following: address of the next value's, which Paired takes in too."""
        b = self.builder
        return [self.load(b.add(address, I64(v * self.lanes * self.size)), remaining) for v in range(vectors)]

    def in_order(self, sums: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Of what was multiplied by `columns`, in the order of o."""
        return sums

    def weights(self, rows: Sequence[ir.Value], first: ir.Value, stop: ir.Value) -> Weights:
        """For a strip of values: from a value's index to the weights that each row multiplies it by."""
        b, scalar = self.builder, Memory(self.builder, self.element, self.lanes)
        return lambda j: [
            splat(b, scalar.load_scalar(b.add(row, b.mul(j, I64(scalar.size)))), self.lanes) for row in rows
        ]


class Paired(Widened):
    """bfloat16 as it is, two neighbours along the summed axis at a time (pairs.py): elements of a key, two values.

    Twice as many products an instruction, and none to widen; weights are rounded to bfloat16.
    """

    keys, strip = 2, 16

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, block: Block) -> None:
        super().__init__(builder, element, block)
        self.vector = ir.VectorType(element, block.lanes)
        self.elements = 2 * block.lanes
        self.multiply = partial(dot, builder)
        # Columns of the two vectors that come of two times as many halves: as instructions unpack them, four of each
        # eight; in the order of memory it takes a third longer.
        self._unpacked = [[c for c in range(2 * block.lanes) if c // 4 % 2 == upper] for upper in (0, 1)]
        self.words = [_buffer(builder, ir.VectorType(I16, block.lanes), 1) for _ in range(2)]

    def load(self, address: ir.Value, remaining: ir.Value | None = None) -> ir.Value:
        return self.builder.bitcast(self._halves(address, self.elements, remaining), self.vector)

    def exp(self, x: ir.Value) -> ir.Value:
        """As exact as weights that are rounded to bfloat16 need."""
        return exp2(self.builder, self.builder.fmul(x, fill(self.vector, LOG2E)), EXP2_SHORT)

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

    def weights(self, rows: Sequence[ir.Value], first: ir.Value, stop: ir.Value) -> Weights:
        b, memory = self.builder, Memory(self.builder, self.element, self.lanes)
        mask = memory.tail_mask(b.sub(stop, first))
        for row, words in zip(rows, self.words, strict=False):
            weights = memory.load(b.add(row, b.mul(first, I64(memory.size))), mask)
            b.store(rounded(b, weights), words, align=64)

        def pair(j: ir.Value) -> list[ir.Value]:
            place = b.lshr(b.sub(j, first), I64(1))
            at = [b.gep(b.bitcast(words, self.element.as_pointer()), [place]) for words in self.words[: len(rows)]]
            return [splat(b, b.load(x, align=4), self.lanes) for x in at]

        return pair

    def _halves(self, address: ir.Value, count: int, remaining: ir.Value | None) -> ir.Value:
        if remaining is None:
            return Memory(self.builder, I16, count).load(address)
        return load_halves(self.builder, address, count, remaining)


def _way(builder: ir.IRBuilder, element: ir.Type, block: Block) -> Widened:
    return (Paired if block.pairs == "avx512bf16" else Widened)(builder, element, block)


def _buffer(b: ir.IRBuilder, kind: ir.Type, count: int) -> ir.Value:
    """Room for vectors on the stack."""
    with b.goto_entry_block():
        room = b.alloca(kind, count)
    room.align = 64
    return room


def _registers(block: Block) -> int:
    """Vector registers: AVX2 has 16, AVX-512 and NEON 32."""
    return 16 if block.lanes * SIZE[block.element] == 32 else 32


def _heights(b: ir.IRBuilder, m: ir.Value, heights: Sequence[int], emit: Callable[[ir.Value, int], None]) -> None:
    """Go over m rows, the greatest possible height at once."""
    i: ir.Value = I64(0)
    for height in heights:
        with Loop(b, i, b.sub(m, I64(height - 1)), height) as (at, _, _):
            emit(at, height)
        i = b.add(i, b.mul(b.sdiv(b.sub(m, i), I64(height)), I64(height)))


# --- scores -----------------------------------------------------------------------------------------------------------

_WHOLE = (64, 128)
"""Head dims for which the loop over the keys holds queries in registers."""


def _emit_row_scores(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: Block) -> None:
    b = builder
    q, q_row, k, k_row, s, s_row, m, n, d, scale_bits = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), _way(b, element, block)
    width = lanes * memory.size
    zero, scale = fill(memory.vector, 0.0), splat(b, from_bits(b, scale_bits, element), lanes)
    heights = (4, 2, 1) if _registers(block) == 32 else (2, 1)
    # Each key's sums, lane by lane. A loop over keys that stores them keeps the order of memory, which LLVM's scheduler
    # does not where several keys are written out one after the other.
    room = _buffer(b, memory.vector, heights[0] * lanes)
    for x in range(heights[0] * lanes):
        b.store(zero, b.gep(room, [I64(x)]), align=width)

    def one_key(queries: list[ir.Value], k_at: ir.Value) -> list[ir.Value]:
        """The sums of a key's products with some queries, lane by lane."""

        def step(
            c: ir.Value, sums: Sequence[ir.Value], vectors: int, remaining: ir.Value | None = None
        ) -> list[ir.Value]:
            for v in range(vectors):
                at = b.add(c, I64(v * stored.elements))
                key = stored.load(b.add(k_at, b.mul(at, I64(stored.size))), remaining)
                offset = b.mul(b.sdiv(at, I64(stored.elements)), I64(width))
                sums = [
                    stored.multiply(memory.load(b.add(query, offset)), key, total)
                    for query, total in zip(queries, sums, strict=True)
                ]
            return list(sums)

        sums: Sequence[ir.Value] = [zero] * len(queries)
        done: ir.Value = I64(0)
        for vectors in (4, 1):
            wide = vectors * stored.elements
            loop = Loop(b, done, b.sub(d, I64(wide - 1)), wide, sums)
            with loop as (c, carried, advance):
                advance(step(c, carried, vectors))
            sums = loop.results
            done = b.mul(b.sdiv(d, I64(wide)), I64(wide))
        loop = Loop(b, done, d, stored.elements, sums)
        with loop as (c, carried, advance):
            advance(step(c, carried, 1, b.sub(d, c)))
        return loop.results

    def whole_key(queries: list[list[ir.Value]], k_at: ir.Value) -> list[ir.Value]:
        """The same for queries in registers."""
        sums: list[ir.Value] = [zero] * len(queries)
        for v in range(len(queries[0])):
            key = stored.load(b.add(k_at, I64(v * stored.elements * stored.size)))
            sums = [stored.multiply(query[v], key, total) for query, total in zip(queries, sums, strict=True)]
        return sums

    def group(j: ir.Value, count: ir.Value, vectors: int, i: ir.Value, height: int) -> None:
        """The scores of `height` rows and `count` keys, a vector at most. vectors: of a query, 0 for any number."""
        q_at = [b.add(q, b.mul(b.add(i, I64(x)), q_row)) for x in range(height)]
        held = [[memory.load(b.add(at, I64(v * width))) for v in range(vectors)] for at in q_at]
        with Loop(b, I64(0), count, 1) as (y, _, _):
            k_at = b.add(k, b.mul(b.add(j, y), k_row))
            for x, total in enumerate(whole_key(held, k_at) if vectors else one_key(q_at, k_at)):
                b.store(total, b.gep(room, [b.add(y, I64(x * lanes))]), align=width)
        for x in range(height):
            sums = [b.load(b.gep(room, [I64(x * lanes + y)]), align=width) for y in range(lanes)]
            to = b.add(b.add(s, b.mul(b.add(i, I64(x)), s_row)), b.mul(j, I64(memory.size)))
            memory.store(b.fmul(_across(b, sums), scale), to, memory.tail_mask(count))

    def keys(vectors: int, heights: Sequence[int]) -> None:
        with Loop(b, I64(0), n, lanes) as (j, _, _):
            left = b.sub(n, j)
            count = b.select(b.icmp_signed("<", left, I64(lanes)), left, I64(lanes))
            _heights(b, m, heights, lambda i, height: group(j, count, vectors, i, height))

    usual = b.icmp_signed("==", b.srem(m, I64(heights[0])), I64(0))
    other = usual.type(1)
    for vectors in sorted({dim // stored.elements for dim in _WHOLE if dim // stored.elements <= 8}):
        here = b.and_(usual, b.icmp_signed("==", d, I64(vectors * stored.elements)))
        other = b.and_(other, b.not_(here))
        with b.if_then(here):
            keys(vectors, heights[:1])
    with b.if_then(other):
        keys(0, heights)


def _across(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sum of each vector's lanes, the sums side by side: a power of two of vectors, at most as many as lanes.

    Two vectors become one whose halves are their own halves added, and so on. When one is left, it is folded.
    """
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


# --- weights ----------------------------------------------------------------------------------------------------------


def _emit_row_weights(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: Block) -> None:
    b = builder
    s, s_row, m, n, top, total, factor = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), _way(b, element, block)
    hidden, zero = fill(memory.vector, float("-inf")), fill(memory.vector, 0.0)

    def over(
        row: ir.Value, start: ir.Value, take: Callable[[ir.Value, ir.Value, ir.Value], ir.Value],
        join: Callable[[ir.Value, ir.Value], ir.Value],
    ) -> ir.Value:  # fmt: skip
        """take(address, scores, so far) for a row's vectors, four side by side as far as they go, joined into one."""
        four = I64(4 * lanes)
        loop = Loop(b, I64(0), b.sub(n, I64(4 * lanes - 1)), 4 * lanes, [start] * 4)
        with loop as (j, carried, advance):
            at = [b.add(row, b.mul(b.add(j, I64(v * lanes)), I64(memory.size))) for v in range(4)]
            advance([take(x, memory.load(x), so_far) for x, so_far in zip(at, carried, strict=True)])
        first, second, third, fourth = loop.results
        so_far = join(join(first, second), join(third, fourth))
        rest = Loop(b, b.mul(b.sdiv(n, four), four), n, lanes, [so_far])
        with rest as (j, (so_far,), advance):
            # Past the end nothing is visible; the row is padded, so reading and writing there is no harm.
            x = b.add(row, b.mul(j, I64(memory.size)))
            advance([take(x, b.select(memory.tail_mask(b.sub(n, j)), memory.load(x), hidden), so_far)])
        return rest.results[0]

    def greater(x: ir.Value, y: ir.Value) -> ir.Value:
        # NaN compares false and is passed over; it shows in the sum.
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def greatest(vector: ir.Value) -> ir.Value:
        best = b.extract_element(vector, I32(0))
        for lane in range(1, lanes):
            best = greater(b.extract_element(vector, I32(lane)), best)
        return best

    with Loop(b, I64(0), m, 1) as (i, _, _):
        row, offset = b.add(s, b.mul(i, s_row)), b.mul(i, I64(memory.size))
        before = memory.load_scalar(b.add(top, offset))
        after = greatest(over(row, splat(b, before, lanes), lambda _, x, best: greater(x, best), greater))
        # A row that has seen no key yet keeps the shift 0, so that -inf - shift stays -inf.
        unseen = b.fcmp_ordered("==", after, element(float("-inf")))
        shift = splat(b, b.select(unseen, element(0.0), after), lanes)

        def exponential(x: ir.Value, shift: ir.Value = shift) -> ir.Value:
            return stored.exp(b.fsub(x, shift))

        def weigh(at: ir.Value, x: ir.Value, sums: ir.Value) -> ir.Value:
            weight = exponential(x)
            memory.store(weight, at)
            return b.fadd(sums, weight)

        added = b.extract_element(_across(b, [over(row, zero, weigh, b.fadd)]), I32(0))
        scaled = b.extract_element(exponential(splat(b, before, lanes)), I32(0))
        memory.store_scalar(after, b.add(top, offset))
        memory.store_scalar(scaled, b.add(factor, offset))
        sum_at = b.add(total, offset)
        memory.store_scalar(b.fadd(b.fmul(memory.load_scalar(sum_at), scaled), added), sum_at)


# --- values -----------------------------------------------------------------------------------------------------------


def _emit_row_values(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: Block) -> None:
    b = builder
    p, p_row, v, v_row, o, o_row, factor, m, n, d = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), _way(b, element, block)
    width = lanes * memory.size
    zero = fill(memory.vector, 0.0)

    def o_row_at(i: ir.Value) -> ir.Value:
        return b.add(o, b.mul(i, o_row))

    with Loop(b, I64(0), m, 1) as (i, _, _):
        scale = splat(b, memory.load_scalar(b.add(factor, b.mul(i, I64(memory.size)))), lanes)
        with Loop(b, I64(0), d, lanes) as (c, _, _):
            at, mask = b.add(o_row_at(i), b.mul(c, I64(memory.size))), memory.tail_mask(b.sub(d, c))
            memory.store(b.fmul(memory.load(at, mask), scale), at, mask)

    def strip(first: ir.Value, stop: ir.Value) -> None:
        """All rows and columns for values first ... stop - 1."""

        def panel(i: ir.Value, height: int, c: ir.Value, vectors: int, remaining: ir.Value | None) -> None:
            """`height` rows by `vectors` vectors of o in registers."""
            o_at = [b.add(o_row_at(b.add(i, I64(x))), b.mul(c, I64(memory.size))) for x in range(height)]
            p_at = [b.add(p, b.mul(b.add(i, I64(x)), p_row)) for x in range(height)]
            weights = stored.weights(p_at, first, stop)
            start = [zero] * (height * vectors)
            v_start = b.add(b.add(v, b.mul(first, v_row)), b.mul(c, I64(stored.size)))
            loop = Loop(b, first, stop, stored.keys, [*start, v_start])
            with loop as (j, carried, advance):
                *sums, v_at = carried
                # Past the end the weight is 0, and the value itself, once more, stands for the one that is missing.
                last = b.icmp_signed("==", b.add(j, I64(1)), stop)
                following = b.add(v_at, b.select(last, I64(0), v_row))
                value = stored.columns(v_at, following, vectors, remaining)
                new = []
                for x, weight in enumerate(weights(j)):
                    new += [stored.multiply(weight, value[y], sums[x * vectors + y]) for y in range(vectors)]
                advance([*new, b.add(v_at, b.mul(v_row, I64(stored.keys)))])
            mask = None if remaining is None else memory.tail_mask(remaining)
            for x in range(height):
                for y, total in enumerate(stored.in_order(loop.results[x * vectors : (x + 1) * vectors])):
                    # Added when the strip is complete, which rounds less often at the size of o.
                    at = b.add(o_at[x], I64(y * width))
                    memory.store(b.fadd(memory.load(at, mask), total), at, mask)

        def rows(i: ir.Value, height: int) -> None:
            """All columns, as many vectors of them at once as registers allow."""
            c: ir.Value = I64(0)
            for vectors in (x for x in (8, 4, 2, 1) if x <= most[height]):
                wide = vectors * lanes
                with Loop(b, c, b.sub(d, I64(wide - 1)), wide) as (at, _, _):
                    panel(i, height, at, vectors, None)
                c = b.mul(b.sdiv(d, I64(wide)), I64(wide))
            with Loop(b, c, d, lanes) as (at, _, _):
                panel(i, height, at, 1, b.sub(d, at))

        # Whole values of the usual head dims, in the order of memory, and again from cache for the next rows.
        most = {2: 8, 1: 8} if _registers(block) == 32 else {2: 4, 1: 8}
        _heights(b, m, list(most), rows)

    with Loop(b, I64(0), n, stored.strip) as (first, _, _):
        stop = b.add(first, I64(stored.strip))
        strip(first, b.select(b.icmp_signed("<", stop, n), stop, n))


# --- reading ----------------------------------------------------------------------------------------------------------


def _emit_read(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: Block) -> None:
    b = builder
    memory_at, lines, times, ahead, total = args
    size = SIZE[block.element]
    vectors = max(1, LINE // (block.lanes * size))
    bits = ir.VectorType(I64, block.lanes * size // 8)
    unroll = 4

    def vector(address: ir.Value) -> ir.Value:
        return b.load(b.inttoptr(address, bits.as_pointer()), align=1)

    def step(at: ir.Value, seen: list[ir.Value]) -> list[ir.Value]:
        prefetch(b, b.add(at, ahead))
        return [b.or_(x, vector(b.add(at, I64(v * 64 // vectors)))) for v, x in enumerate(seen)]

    zero = ir.Constant(bits, [0] * bits.count)
    again = Loop(b, I64(0), times, 1, [zero] * (unroll * vectors))
    with again as (_, before, pass_on):
        loop = Loop(b, I64(0), b.sub(lines, I64(unroll - 1)), unroll, before)
        with loop as (i, carried, advance):
            at = b.add(memory_at, b.mul(i, I64(LINE)))
            for x in range(unroll):
                advance(step(b.add(at, I64(x * LINE)), carried[x * vectors : (x + 1) * vectors]))
        pass_on(loop.results)
    seen = again.results[:vectors]
    for x in range(1, unroll):
        seen = [b.or_(a, c) for a, c in zip(seen, again.results[x * vectors : (x + 1) * vectors], strict=True)]
    rest = Loop(b, b.mul(b.sdiv(lines, I64(unroll)), I64(unroll)), lines, 1, seen)
    with rest as (i, carried, advance):
        advance(step(b.add(memory_at, b.mul(i, I64(LINE))), carried))
    for v, x in enumerate(rest.results):
        b.store(x, b.inttoptr(b.add(total, I64(v * 64 // vectors)), bits.as_pointer()), align=1)


KERNELS: dict[str, tuple[int, Callable[..., None]]] = {
    "row_scores": (10, _emit_row_scores),
    "row_weights": (7, _emit_row_weights),
    "row_values": (10, _emit_row_values),
    "read": (5, _emit_read),
}
"""Name: number of arguments, emitter."""

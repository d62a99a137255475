"""Vector micro-kernels for few queries: products of a handful of rows with all keys and values, which are read once.

With one query a head there is nothing to keep in cache and nothing to multiply twice: the time is that of reading k
and v. So elements of a key or value lie along the lanes, as they lie in memory, rows of queries, whatever heads they
are of, share what is read, and memory is gone through in its own order. Conventions: vector.py.

    row_scores (q, q_row, k, k_row, s, s_row, m, n, d)
        s[i, j] = sum_c q[i, c] k[j, c]; rows of q in computing precision, padded with zeros to whole vectors
    row_weights (s, s_row, m, n, top, total, factor)
        s[i, j] = exp(s[i, j] - t), where t is the greatest of top[i] and the row; factor[i] = exp(top[i] - t),
        total[i] = total[i] factor[i] + sum_j s[i, j], top[i] = t
    row_values (p, p_row, v, v_row, o, o_row, factor, m, n, d)
        o[i, c] = o[i, c] factor[i] + sum_j p[i, j] v[j, c]
    read (memory, lines, times, ahead, total)
        total[:] = bitwise or of all vectors of `lines` lines of 64 bytes, again and again: as fast as memory is read

k and v are in storage precision, widened in registers; their rows need not follow each other. Only `read` fetches by
instruction, `ahead` bytes before its turn. In the other two that cost a tenth to a quarter on the machine where it was
tried (Zen 4): what the hardware fetches on its own, given rows in the order of memory, is more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from .vector import (
    I8,
    I32,
    I64,
    SIZE,
    STORED,
    Block,
    Loop,
    Memory,
    exp,
    fill,
    fma,
    splat,
    widen,
)

LINE = 64
"""Bytes that memory is read by."""


class Rows(Memory):
    """Vectors of operands as they are stored, widened when they are loaded."""

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, block: Block) -> None:
        super().__init__(builder, STORED.get(block.storage, element), block.lanes)
        self.computed, self.storage = element, block.storage
        self.bytes = block.lanes * self.size

    def load_wide(self, address: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        if mask is None or self.storage == "":
            return widen(self.builder, self.load(address, mask), self.storage, self.computed)
        b = self.builder
        args = [self.at(address, self.vector), I32(self.size), mask, ir.Constant(self.vector, [0] * self.vector.count)]
        name = f"llvm.masked.load.v{self.vector.count}i16.p0"
        kind = ir.FunctionType(self.vector, [a.type for a in args])
        function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        return widen(b, b.call(function, args), self.storage, self.computed)


def _fetch(b: ir.IRBuilder, address: ir.Value) -> None:
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = b.module.globals.get("llvm.prefetch.p0") or ir.Function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.inttoptr(address, pointer), I32(0), I32(3), I32(1)])  # to read, into all levels, data


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


def _emit_row_scores(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: Block) -> None:
    b = builder
    q, q_row, k, k_row, s, s_row, m, n, d = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), Rows(b, element, block)
    zero = fill(memory.vector, 0.0)

    def one_key(q_at: list[ir.Value], k_at: ir.Value) -> list[ir.Value]:
        """The sums of a key's products with some queries, lane by lane. One key after the other, in the order of
        memory, though four abreast would need fewer loads of queries: in that order the hardware fetches ahead.
        """

        def step(c: ir.Value, sums: list[ir.Value], vectors: int, mask: ir.Value | None = None) -> list[ir.Value]:
            """One vector of elements after the other from c on."""
            for v in range(vectors):
                at = b.add(c, I64(v * lanes))
                key = stored.load_wide(b.add(k_at, b.mul(at, I64(stored.size))), mask)
                offset = b.mul(at, I64(memory.size))
                sums = [
                    fma(b, memory.load(b.add(query, offset)), key, total)
                    for query, total in zip(q_at, sums, strict=True)
                ]
            return sums

        sums: list[ir.Value] = [zero] * len(q_at)
        done: ir.Value = I64(0)
        for vectors in (4, 1):
            wide = vectors * lanes
            loop = Loop(b, done, b.sub(d, I64(wide - 1)), wide, sums)
            with loop as (c, carried, advance):
                advance(step(c, list(carried), vectors))
            sums = loop.results
            done = b.mul(b.sdiv(d, I64(wide)), I64(wide))
        loop = Loop(b, done, d, lanes, sums)
        with loop as (c, carried, advance):
            advance(step(c, list(carried), 1, memory.tail_mask(b.sub(d, c))))
        return loop.results

    def group(i: ir.Value, height: int, j: ir.Value, keys: int) -> None:
        """The scores of `height` rows and `keys` keys, their sums side by side in registers."""
        q_at = [b.add(q, b.mul(b.add(i, I64(x)), q_row)) for x in range(height)]
        sums = [[zero] * keys for _ in range(height)]
        for y in range(keys):
            for x, total in enumerate(one_key(q_at, b.add(k, b.mul(b.add(j, I64(y)), k_row)))):
                sums[x][y] = total
        for x in range(height):
            to = b.add(b.add(s, b.mul(b.add(i, I64(x)), s_row)), b.mul(j, I64(memory.size)))
            for first in range(0, keys, lanes):
                part = sums[x][first : first + lanes]
                at = b.add(to, I64(first * memory.size))
                b.store(_across(b, part), memory.at(at, ir.VectorType(element, len(part))), align=memory.size)

    # Sums that do not wait for each other hide the latency of a multiply-add.
    plan = ((4, 4), (2, 8), (1, 8)) if _registers(block) == 32 else ((2, 4), (1, 4))

    def keys_of(j: ir.Value, keys: int) -> None:
        def rows(i: ir.Value, height: int) -> None:
            if keys == 1 or (height, keys) in plan:
                group(i, height, j, keys)
            else:
                for first in range(0, keys, dict(plan)[height]):
                    group(i, height, b.add(j, I64(first)), dict(plan)[height])

        _heights(b, m, [height for height, _ in plan], rows)

    most = max(keys for _, keys in plan)
    with Loop(b, I64(0), b.sub(n, I64(most - 1)), most) as (j, _, _):
        keys_of(j, most)
    with Loop(b, b.mul(b.sdiv(n, I64(most)), I64(most)), n, 1) as (j, _, _):
        keys_of(j, 1)


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
    memory = Memory(b, element, lanes)
    hidden, zero = fill(memory.vector, float("-inf")), fill(memory.vector, 0.0)

    def scores(row: ir.Value, j: ir.Value) -> ir.Value:
        """Past the end nothing is visible; the row is padded, so reading there is no harm."""
        value = memory.load(b.add(row, b.mul(j, I64(memory.size))))
        return b.select(memory.tail_mask(b.sub(n, j)), value, hidden)

    def greatest(vector: ir.Value) -> ir.Value:
        best = b.extract_element(vector, I32(0))
        for lane in range(1, lanes):
            x = b.extract_element(vector, I32(lane))
            best = b.select(b.fcmp_ordered(">", x, best), x, best)
        return best

    with Loop(b, I64(0), m, 1) as (i, _, _):
        row, offset = b.add(s, b.mul(i, s_row)), b.mul(i, I64(memory.size))
        before = memory.load_scalar(b.add(top, offset))
        loop = Loop(b, I64(0), n, lanes, [splat(b, before, lanes)])
        with loop as (j, (best,), advance):
            value = scores(row, j)
            # NaN compares false and is passed over; it shows in the sum.
            advance([b.select(b.fcmp_ordered(">", value, best), value, best)])
        after = greatest(loop.results[0])
        # A row that has seen no key yet keeps the shift 0, so that -inf - shift stays -inf.
        unseen = b.fcmp_ordered("==", after, element(float("-inf")))
        shift = splat(b, b.select(unseen, element(0.0), after), lanes)

        def exponential(x: ir.Value, shift: ir.Value = shift) -> ir.Value:
            return exp(b, b.fsub(x, shift))

        loop = Loop(b, I64(0), n, lanes, [zero])
        with loop as (j, (sums,), advance):
            weight = exponential(scores(row, j))
            memory.store(weight, b.add(row, b.mul(j, I64(memory.size))))
            advance([b.fadd(sums, weight)])
        added = b.extract_element(_across(b, [loop.results[0]]), I32(0))
        scaled = b.extract_element(exponential(splat(b, before, lanes)), I32(0))
        memory.store_scalar(after, b.add(top, offset))
        memory.store_scalar(scaled, b.add(factor, offset))
        sum_at = b.add(total, offset)
        memory.store_scalar(b.fadd(b.fmul(memory.load_scalar(sum_at), scaled), added), sum_at)


# --- values -----------------------------------------------------------------------------------------------------------


_STRIP = 8
"""Values that all rows and columns of o take in before the next ones: few, so that reading never pauses for long."""


def _emit_row_values(builder: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: Block) -> None:
    b = builder
    p, p_row, v, v_row, o, o_row, factor, m, n, d = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), Rows(b, element, block)
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

        def panel(i: ir.Value, height: int, c: ir.Value, vectors: int, mask: ir.Value | None) -> None:
            """`height` rows by `vectors` vectors of o in registers."""
            o_at = [b.add(o_row_at(b.add(i, I64(x))), b.mul(c, I64(memory.size))) for x in range(height)]
            p_at = [b.add(p, b.mul(b.add(i, I64(x)), p_row)) for x in range(height)]
            start = [zero] * (height * vectors)
            v_start = b.add(b.add(v, b.mul(first, v_row)), b.mul(c, I64(stored.size)))
            loop = Loop(b, first, stop, 1, [*start, v_start])
            with loop as (j, carried, advance):
                *sums, v_at = carried
                value = [stored.load_wide(b.add(v_at, I64(y * stored.bytes)), mask) for y in range(vectors)]
                offset = b.mul(j, I64(memory.size))
                new = []
                for x in range(height):
                    weight = splat(b, memory.load_scalar(b.add(p_at[x], offset)), lanes)
                    new += [fma(b, weight, value[y], sums[x * vectors + y]) for y in range(vectors)]
                advance([*new, b.add(v_at, v_row)])
            for x in range(height):
                for y in range(vectors):
                    # Added when the strip is complete, which rounds less often at the size of o.
                    at = b.add(o_at[x], I64(y * width))
                    memory.store(b.fadd(memory.load(at, mask), loop.results[x * vectors + y]), at, mask)

        def rows(i: ir.Value, height: int) -> None:
            """All columns, as many vectors of them at once as registers allow."""
            c: ir.Value = I64(0)
            for vectors in (x for x in (8, 4, 2, 1) if x <= most[height]):
                wide = vectors * lanes
                with Loop(b, c, b.sub(d, I64(wide - 1)), wide) as (at, _, _):
                    panel(i, height, at, vectors, None)
                c = b.mul(b.sdiv(d, I64(wide)), I64(wide))
            with Loop(b, c, d, lanes) as (at, _, _):
                panel(i, height, at, 1, memory.tail_mask(b.sub(d, at)))

        most = {4: 4, 2: 8, 1: 8} if _registers(block) == 32 else {2: 4, 1: 8}
        _heights(b, m, list(most), rows)

    with Loop(b, I64(0), n, _STRIP) as (first, _, _):
        stop = b.add(first, I64(_STRIP))
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
        _fetch(b, b.add(at, ahead))
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
    "row_scores": (9, _emit_row_scores),
    "row_weights": (7, _emit_row_weights),
    "row_values": (10, _emit_row_values),
    "read": (5, _emit_read),
}
"""Name: number of arguments, emitter."""

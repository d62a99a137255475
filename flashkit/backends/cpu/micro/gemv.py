"""Micro-kernels for few queries: a handful of rows times all keys and values, which are read once.

With so few rows the time is that of reading K and V. So elements of a key or value lie along the lanes, as they do in
memory, all rows share each load, whatever heads they belong to, and K and V are read in the order of memory, which the
hardware prefetcher needs. Conventions: vector.py.

    gemv_qk (q, q_row, k, k_row, s, s_row, m, n, d, scale)
        s[i, j] = scale * sum_c q[i, c] k[j, c]; rows of q are packed by load_query and padded to whole vectors
    gemv_softmax (s, s_row, rows, n, m, l, rescale)
        m_new = max(m[i], max_j s[i, j]); s[i, j] = exp(s[i, j] - m_new); rescale[i] = exp(m[i] - m_new);
        l[i] = l[i] rescale[i] + sum_j s[i, j]; m[i] = m_new
    gemv_pv (p, p_row, v, v_row, o, o_row, rescale, m, n, d)
        o[i, c] = o[i, c] rescale[i] + sum_j p[i, j] v[j, c]

K and V are in storage precision (gemv_operands.py); their rows need not be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from .gemv_operands import operands_of, stack_buffer, sum_lanes, vector_registers
from .read import emit_read
from .register_block import RegisterBlock
from .softmax import greater
from .vector import I1, I32, I64, Loop, Memory, fill, from_bits, row_groups, splat

# --- S = Q K^T --------------------------------------------------------------------------------------------------------

_HEAD_DIMS_IN_REGISTERS = (64, 128)
"""Head dims whose queries stay in registers during the loop over the keys."""


def _emit_qk(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: RegisterBlock) -> None:
    q, q_row, k, k_row, s, s_row, m, n, d, scale_bits = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), operands_of(b, element, block)
    width = lanes * memory.size
    zero, scale = fill(memory.vector, 0.0), splat(b, from_bits(b, scale_bits, element), lanes)
    heights = (4, 2, 1) if vector_registers(block) == 32 else (2, 1)
    # Sums of each key, lane by lane. A loop over keys that stores them reads keys in the order of memory. With unrolled
    # keys, LLVM's scheduler reorders the loads.
    buffer = stack_buffer(b, memory.vector, heights[0] * lanes)
    with b.if_then(b.icmp_signed("!=", b.srem(n, I64(lanes)), I64(0))):  # the last vector of keys leaves some of them
        for x in range(heights[0] * lanes):
            b.store(zero, b.gep(buffer, [I64(x)]), align=width)

    def one_key(queries: list[ir.Value], k_at: ir.Value) -> list[ir.Value]:
        """Products of a key with some queries, summed lane by lane."""

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
        """As one_key, with the queries in registers."""
        sums: list[ir.Value] = [zero] * len(queries)
        for v in range(len(queries[0])):
            key = stored.load(b.add(k_at, I64(v * stored.elements * stored.size)))
            sums = [stored.multiply(query[v], key, total) for query, total in zip(queries, sums, strict=True)]
        return sums

    def group(j: ir.Value, count: ir.Value, vectors: int, i: ir.Value, height: int) -> None:
        """Scores of `height` rows and up to a vector of keys. vectors: vectors per query, 0 for any number."""
        q_at = [b.add(q, b.mul(b.add(i, I64(x)), q_row)) for x in range(height)]
        held = [[memory.load(b.add(at, I64(v * width))) for v in range(vectors)] for at in q_at]
        with Loop(b, I64(0), count, 1) as (y, _, _):
            k_at = b.add(k, b.mul(b.add(j, y), k_row))
            for x, total in enumerate(whole_key(held, k_at) if vectors else one_key(q_at, k_at)):
                b.store(total, b.gep(buffer, [b.add(y, I64(x * lanes))]), align=width)
        for x in range(height):
            sums = [b.load(b.gep(buffer, [I64(x * lanes + y)]), align=width) for y in range(lanes)]
            to = b.add(b.add(s, b.mul(b.add(i, I64(x)), s_row)), b.mul(j, I64(memory.size)))
            memory.store(b.fmul(sum_lanes(b, sums), scale), to, memory.tail_mask(count))

    def keys(vectors: int, heights: Sequence[int]) -> None:
        with Loop(b, I64(0), n, lanes) as (j, _, _):
            left = b.sub(n, j)
            count = b.select(b.icmp_signed("<", left, I64(lanes)), left, I64(lanes))
            row_groups(b, m, heights, lambda i, height: group(j, count, vectors, i, height))

    general = I1(1)
    for vectors in sorted({dim // stored.elements for dim in _HEAD_DIMS_IN_REGISTERS if dim // stored.elements <= 8}):
        whole = b.icmp_signed("==", d, I64(vectors * stored.elements))
        for height, fits in ((heights[0], b.srem(m, I64(heights[0]))), (1, b.sub(m, I64(1)))):
            special = b.and_(b.icmp_signed("==", fits, I64(0)), whole)
            general = b.and_(general, b.not_(special))
            with b.if_then(special):
                keys(vectors, (height,))
    with b.if_then(general):
        keys(0, heights)


# --- online softmax ---------------------------------------------------------------------------------------------------


def _emit_softmax(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: RegisterBlock) -> None:
    s, s_row, rows, n, m, l, rescale = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), operands_of(b, element, block)
    masked, zero = fill(memory.vector, float("-inf")), fill(memory.vector, 0.0)

    def over(
        row: ir.Value, start: ir.Value, take: Callable[[ir.Value, ir.Value, ir.Value], ir.Value],
        join: Callable[[ir.Value, ir.Value], ir.Value],
    ) -> ir.Value:  # fmt: skip
        """Fold take(address, scores, so far) over the vectors of a row, four at a time, and join the results."""
        four = I64(4 * lanes)
        loop = Loop(b, I64(0), b.sub(n, I64(4 * lanes - 1)), 4 * lanes, [start] * 4)
        with loop as (j, carried, advance):
            at = [b.add(row, b.mul(b.add(j, I64(v * lanes)), I64(memory.size))) for v in range(4)]
            advance([take(x, memory.load(x), so_far) for x, so_far in zip(at, carried, strict=True)])
        first, second, third, fourth = loop.results
        so_far = join(join(first, second), join(third, fourth))
        rest = Loop(b, b.mul(b.sdiv(n, four), four), n, lanes, [so_far])
        with rest as (j, (so_far,), advance):
            # Elements past the end are masked; the row is padded, so they can be read and written.
            x = b.add(row, b.mul(j, I64(memory.size)))
            advance([take(x, b.select(memory.tail_mask(b.sub(n, j)), memory.load(x), masked), so_far)])
        return rest.results[0]

    def greatest(vector: ir.Value) -> ir.Value:
        half = lanes // 2
        while half:
            places = ir.Constant(ir.VectorType(I32, lanes), [(lane + half) % lanes for lane in range(lanes)])
            vector, half = greater(b, b.shuffle_vector(vector, vector, places), vector), half // 2
        return b.extract_element(vector, I32(0))

    with Loop(b, I64(0), rows, 1) as (i, _, _):
        row, offset = b.add(s, b.mul(i, s_row)), b.mul(i, I64(memory.size))
        m_old = memory.load_scalar(b.add(m, offset))
        m_new = greatest(over(row, splat(b, m_old, lanes), lambda _, x, best: greater(b, x, best), partial(greater, b)))
        # 0 for a row without a visible key so far: e^(-inf - 0) is 0, e^(-inf + inf) would be NaN.
        unseen = b.fcmp_ordered("==", m_new, element(float("-inf")))
        m_safe = splat(b, b.select(unseen, element(0.0), m_new), lanes)

        def exponential(x: ir.Value, m_safe: ir.Value = m_safe) -> ir.Value:
            return stored.exp(b.fsub(x, m_safe))

        def store_p(at: ir.Value, x: ir.Value, sums: ir.Value) -> ir.Value:
            p = exponential(x)
            memory.store(p, at)
            return b.fadd(sums, p)

        row_sum = b.extract_element(sum_lanes(b, [over(row, zero, store_p, b.fadd)]), I32(0))
        factor = b.extract_element(exponential(splat(b, m_old, lanes)), I32(0))
        memory.store_scalar(m_new, b.add(m, offset))
        memory.store_scalar(factor, b.add(rescale, offset))
        l_at = b.add(l, offset)
        memory.store_scalar(b.fadd(b.fmul(memory.load_scalar(l_at), factor), row_sum), l_at)


# --- O = O * rescale + P V --------------------------------------------------------------------------------------------


def _emit_pv(b: ir.IRBuilder, args: Sequence[ir.Value], element: ir.Type, block: RegisterBlock) -> None:
    p, p_row, v, v_row, o, o_row, rescale, m, n, d = args
    lanes = block.lanes
    memory, stored = Memory(b, element, lanes), operands_of(b, element, block)
    width = lanes * memory.size
    zero = fill(memory.vector, 0.0)

    def o_row_at(i: ir.Value) -> ir.Value:
        return b.add(o, b.mul(i, o_row))

    with Loop(b, I64(0), m, 1) as (i, _, _):
        scale = splat(b, memory.load_scalar(b.add(rescale, b.mul(i, I64(memory.size)))), lanes)
        with Loop(b, I64(0), d, lanes) as (c, _, _):
            at, mask = b.add(o_row_at(i), b.mul(c, I64(memory.size))), memory.tail_mask(b.sub(d, c))
            memory.store(b.fmul(memory.load(at, mask), scale), at, mask)

    def strip(first: ir.Value, stop: ir.Value) -> None:
        """All rows and columns of O, for rows first ... stop - 1 of V."""

        def panel(i: ir.Value, height: int, c: ir.Value, vectors: int, remaining: ir.Value | None) -> None:
            """`height` rows by `vectors` vectors of O in registers."""
            o_at = [b.add(o_row_at(b.add(i, I64(x))), b.mul(c, I64(memory.size))) for x in range(height)]
            p_at = [b.add(p, b.mul(b.add(i, I64(x)), p_row)) for x in range(height)]
            load_p = stored.p_of(p_at, first, stop)
            start = [zero] * (height * vectors)
            v_start = b.add(b.add(v, b.mul(first, v_row)), b.mul(c, I64(stored.size)))
            loop = Loop(b, first, stop, stored.keys, [*start, v_start])
            with loop as (j, carried, advance):
                *sums, v_at = carried
                # Past the last row P is 0; the last row, loaded again, stands in for the missing one.
                last = b.icmp_signed("==", b.add(j, I64(1)), stop)
                following = b.add(v_at, b.select(last, I64(0), v_row))
                value = stored.columns(v_at, following, vectors, remaining)
                new = []
                for x, p_x in enumerate(load_p(j)):
                    new += [stored.multiply(p_x, value[y], sums[x * vectors + y]) for y in range(vectors)]
                advance([*new, b.add(v_at, b.mul(v_row, I64(stored.keys)))])
            mask = None if remaining is None else memory.tail_mask(remaining)
            for x in range(height):
                for y, total in enumerate(stored.in_order(loop.results[x * vectors : (x + 1) * vectors])):
                    # Strips are summed before they are added to O, which rounds less often at the size of O.
                    at = b.add(o_at[x], I64(y * width))
                    memory.store(b.fadd(memory.load(at, mask), total), at, mask)

        def rows(i: ir.Value, height: int) -> None:
            """All columns of `height` rows, as many vectors at a time as registers allow."""
            c: ir.Value = I64(0)
            for vectors in (x for x in (8, 4, 2, 1) if x <= most[height]):
                wide = vectors * lanes
                with Loop(b, c, b.sub(d, I64(wide - 1)), wide) as (at, _, _):
                    panel(i, height, at, vectors, None)
                c = b.mul(b.sdiv(d, I64(wide)), I64(wide))
            with Loop(b, c, d, lanes) as (at, _, _):
                panel(i, height, at, 1, b.sub(d, at))

        # Common head dims fit: rows of V are read whole, in the order of memory, and from cache for the next rows of O.
        most = {2: 8, 1: 8} if vector_registers(block) == 32 else {2: 4, 1: 8}
        row_groups(b, m, list(most), rows)

    with Loop(b, I64(0), n, stored.strip) as (first, _, _):
        stop = b.add(first, I64(stored.strip))
        strip(first, b.select(b.icmp_signed("<", stop, n), stop, n))


KERNELS: dict[str, tuple[int, Callable[..., None]]] = {
    "gemv_qk": (10, _emit_qk),
    "gemv_softmax": (7, _emit_softmax),
    "gemv_pv": (10, _emit_pv),
    "read": (5, emit_read),
}
"""Name: number of arguments, emitter."""

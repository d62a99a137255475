"""Faults in the micro-kernels of the CPU backend: LLVM IR for products, the softmax, transposes."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_cpu_kernels.py",
    "tests/conformance/test_decode.py",
    "tests/unit/test_cpu_bf16_pairs.py",
    "tests/conformance/test_steps.py",
    "tests/conformance/test_edges.py -k 'cpu'",
)

MICRO = "flashkit/backends/cpu/micro"

FAULTS = (
    Fault(
        "gemm: the last row is left out", f"{MICRO}/gemm.py",
        "b.sub(m, I64(height - 1))",
        "b.sub(m, I64(height))",
        core="ragged tile",
    ),
    Fault(
        "gemm: the first block of terms is overwritten", f"{MICRO}/gemm.py",
        "I64(-1 if accumulate else 0)",
        "I64(0)",
    ),
    Fault(
        "gemm: a sum of no terms is not stored", f"{MICRO}/gemm.py",
        "k_stop = k if accumulate else",
        "k_stop = k if not accumulate else",
    ),
    Fault(
        "gemm: the tail is not masked", f"{MICRO}/gemm.py",
        "panel(1, j, memory.tail_mask(b.sub(n, j)))",
        "panel(1, j, None)",
        core="ragged tile",
    ),
    Fault(
        "softmax: NaN takes the maximum", f"{MICRO}/softmax.py",
        'return b.select(b.fcmp_ordered(">", x, y), x, y)',
        'return b.select(b.fcmp_unordered(">", x, y), x, y)',
    ),
    Fault(
        "softmax: the maximum without the last rows", f"{MICRO}/softmax.py",
        "b, b.and_(count, I64(-ROWS_IN_TURN)), count, 1,",
        "b, count, count, 1,",
    ),
    Fault(
        "softmax: the scale of dS", f"{MICRO}/softmax.py",
        "ds = b.fmul(b.fmul(p, b.fsub(dp_ij, delta_i)), scale)",
        "ds = b.fmul(p, b.fsub(dp_ij, delta_i))",
        core="scale",
    ),
    Fault(
        "softmax: delta is added", f"{MICRO}/softmax.py",
        "b.fsub(dp_ij, delta_i)",
        "b.fadd(dp_ij, delta_i)",
        core="gradient",
    ),
    Fault(
        "softmax: a masked pair of a NaN row", f"{MICRO}/softmax.py",
        'p = b.select(b.fcmp_ordered("==", score, masked), zero, exp(b, b.fsub(score, lse_i)))',
        "p = exp(b, b.fsub(score, lse_i))",
    ),
    Fault(
        "softmax: dP of masked pairs", f"{MICRO}/softmax.py",
        'memory.store(b.select(b.fcmp_ordered("==", p, zero), zero, ds), dp_at)',
        "memory.store(ds, dp_at)",
    ),
    Fault(
        "softmax: l begins anew", f"{MICRO}/softmax.py",
        "outer = Loop(b, I64(0), count, ROWS_PER_SUM, [*(memory.load(b.add(l, o)) for o in offsets), s])",
        "outer = Loop(b, I64(0), count, ROWS_PER_SUM, [*(fill(memory.vector, 0.0) for o in offsets), s])",
    ),
    Fault(
        "exponentials: denormals", f"{MICRO}/exponentials.py",
        'EXP2_UNDERFLOW = {"float": -126.0, "double": -1022.0}',
        'EXP2_UNDERFLOW = {"float": -149.0, "double": -1074.0}',
    ),
    Fault(
        "exponentials: a coefficient", f"{MICRO}/exponentials.py",
        "        0.009618056678524637,\n",
        "        0.009618956678524637,\n",
    ),
    Fault(
        "exponentials: ln 2", f"{MICRO}/exponentials.py",
        "ln2 = fill(vector, -math.log(2))",
        "ln2 = fill(vector, -0.6931)",
    ),
    Fault(
        "pack: rows past the end are not 0", f"{MICRO}/transpose.py",
        "rows.append(b.select(inside, row, zero))",
        "rows.append(row)",
    ),
    Fault(
        "pack: the remainder is not scaled", f"{MICRO}/transpose.py",
        "value = b.fmul(element_at(b.select(inside, row, i), j), scale)",
        "value = element_at(b.select(inside, row, i), j)",
    ),
    Fault(
        "unpack: the remainder is not checked", f"{MICRO}/transpose.py",
        "        memory.store_scalar(mark, check)\n",
        "",
    ),
    Fault(
        "unpack: another row's factor", f"{MICRO}/transpose.py",
        "value = b.fmul(memory.load_scalar(at), memory.load_scalar(b.add(factor, b.mul(i, I64(memory.size)))))",
        "value = b.fmul(memory.load_scalar(at), memory.load_scalar(b.add(factor, b.mul(rest, I64(memory.size)))))",
    ),
    Fault(
        "transpose: the rest of a row", f"{MICRO}/transpose.py",
        "            one_by_one(x, whole_n, n)\n",
        "            one_by_one(x, n, n)\n",
    ),
    Fault(
        "gemv: the score of a NaN key", f"{MICRO}/gemv.py",
        'return b.select(b.fcmp_ordered(">", x, y), x, y)',
        'return b.select(b.fcmp_unordered(">", x, y), x, y)',
    ),
    Fault(
        "gemv: elements past the end count", f"{MICRO}/gemv.py",
        "b.select(memory.tail_mask(b.sub(n, j)), memory.load(x), masked)",
        "memory.load(x)",
    ),
    Fault(
        "gemv: O is not rescaled", f"{MICRO}/gemv.py",
        "memory.store(b.fmul(memory.load(at, mask), scale), at, mask)",
        "memory.store(memory.load(at, mask), at, mask)",
        core="rescale",
    ),
    Fault(
        "gemv: l is not rescaled", f"{MICRO}/gemv.py",
        "b.fadd(b.fmul(memory.load_scalar(l_at), factor), row_sum)",
        "b.fadd(memory.load_scalar(l_at), row_sum)",
    ),
    Fault(
        "gemv: scores are not scaled", f"{MICRO}/gemv.py",
        "memory.store(b.fmul(sum_lanes(b, sums), scale), to,",
        "memory.store(sum_lanes(b, sums), to,",
    ),
    Fault("gemv: a row without keys", f"{MICRO}/gemv.py", "b.select(unseen, element(0.0), m_new)", "m_new"),
    Fault(
        "bf16 pairs: an odd last row counts twice", f"{MICRO}/bf16_pairs.py",
        "memory.load(b.add(at, s_row)) if two else zero",
        "memory.load(b.add(at, s_row)) if two else memory.load(at)",
    ),
    Fault(
        "bf16 pairs: low and high are swapped", f"{MICRO}/bf16_pairs.py",
        "return b.or_(b.zext(low, kind), b.shl(b.zext(high, kind), fill(kind, 16)))",
        "return b.or_(b.zext(high, kind), b.shl(b.zext(low, kind), fill(kind, 16)))",
    ),
    Fault(
        "bf16 pairs: the maximum lags behind", f"{MICRO}/bf16_pairs.py",
        "RESCALE_THRESHOLD = 8.0",
        "RESCALE_THRESHOLD = 80.0",
    ),
    Fault(
        "bf16 pairs: one vector decides whether the maximum moves", f"{MICRO}/bf16_pairs.py",
        "b.bitcast(reduce(b.or_, exceeds), ir.IntType(lanes))",
        "b.bitcast(exceeds[0], ir.IntType(lanes))",
    ),
    Fault(
        "bf16 pairs: l is not rescaled", f"{MICRO}/bf16_pairs.py",
        "memory.store(b.fmul(memory.load(b.add(l, offset)), factor), b.add(l, offset))",
        "pass",
    ),
    Fault(
        "bf16 pairs: O is not rescaled", f"{MICRO}/bf16_pairs.py",
        "memory.store(b.fmul(memory.load(b.add(at, offset)), factor), b.add(at, offset))",
        "pass",
    ),
    Fault(
        "bf16 pairs: the new maximum where it did not move", f"{MICRO}/bf16_pairs.py",
        "row_max = [b.select(moves, x, y) for x, y in zip(greatest, before)]",
        "row_max = greatest",
    ),
    Fault(
        "bf16 pairs: 2^x by another base", f"{MICRO}/exponentials.py",
        "0.6954241731944327,",
        "0.6984241731944327,",
    ),
    Fault(
        "bf16 pairs: scores are not scaled", f"{MICRO}/bf16_pairs.py",
        "s_scale_log2 = b.fmul(s_scale, log2e)",
        "s_scale_log2 = log2e",
    ),
    Fault(
        "bf16 pairs: weights are truncated", f"{MICRO}/bf16_pairs.py",
        "(fill(word, x) for x in (16, 0x8000, -0x10000))",
        "(fill(word, x) for x in (16, 0, -0x10000))",
    ),
    Fault(
        "bf16 pairs: no reference is large", f"{MICRO}/bf16_pairs.py",
        "LARGE_SHIFT = 2.0**13",
        "LARGE_SHIFT = float(\"inf\")",
    ),
    Fault(
        "bf16 pairs: one vector decides whether references are large", f"{MICRO}/bf16_pairs.py",
        "b.bitcast(reduce(b.or_, large), lanes)",
        "b.bitcast(large[0], lanes)",
    ),
    Fault(
        "bf16 pairs: large references are not scaled", f"{MICRO}/bf16_pairs.py",
        "b.fmul(fma(b, score, s_scale, minus_lse), log2e)",
        "b.fmul(b.fadd(score, minus_lse), log2e)",
    ),
    Fault(
        "bf16 pairs: the scale of delta", f"{MICRO}/bf16_pairs.py",
        "[b.fneg(b.fmul(x, scale)) for x in deltas]",
        "[b.fneg(x) for x in deltas]",
        core="gradient",
    ),
    Fault(
        "bf16 pairs: a masked pair of a NaN row", f"{MICRO}/bf16_pairs.py",
        'used = b.and_(b.fcmp_unordered("!=", score, masked), normal_power(b, x))',
        "used = normal_power(b, x)",
    ),
    Fault(
        "bf16 pairs: dP of masked pairs", f"{MICRO}/bf16_pairs.py",
        "return p, b.select(used, ds, zero)",
        "return p, ds",
    ),
    Fault(
        "exponentials: no weight where the power is NaN", f"{MICRO}/exponentials.py",
        'return b.fcmp_unordered(">=", x, fill(x.type, EXP2_UNDERFLOW',
        'return b.fcmp_ordered(">=", x, fill(x.type, EXP2_UNDERFLOW',
    ),
    Fault(
        "bf16 pairs: delta of the first chunk", f"{MICRO}/bf16_pairs.py",
        "strides = [q_row, do_row, I64(4), I64(4), b.lshr(words_row, I64(1))",
        "strides = [q_row, do_row, I64(4), I64(0), b.lshr(words_row, I64(1))",
    ),
    Fault(
        "bf16 pairs: squares with a ragged edge are whole", f"{MICRO}/bf16_pairs.py",
        "return reduce(b.and_, [b.icmp_signed(\"<=\", b.add(start, I64(count)), end) for",
        "return reduce(b.or_, [b.icmp_signed(\"<=\", b.add(start, I64(count)), end) for",
    ),
    Fault(
        "bf16 pairs: rows are padded with what follows them", f"{MICRO}/bf16_pairs.py",
        "halves.store(load_narrow(b, at, count, remaining), to)",
        "halves.store(load_narrow(b, at, count, I64(count)), to)",
    ),
    Fault(
        "transposes within lanes: halves exchanged", f"{MICRO}/vector.py",
        "half = [lane + high * square // 2 for",
        "half = [lane + (not high) * square // 2 for",
    ),
    Fault(
        "amx: the remainder of the terms replaces c", f"{MICRO}/amx.py",
        "before = b.select(used, I64(1), before)",
        "before = b.select(used, before, before)",
    ),
    Fault(
        "amx: four tiles of b, the second step of a is the first", f"{MICRO}/amx.py",
        "b.add(a_at, I64(4 * step * EDGE))",
        "a_at",
    ),
    Fault(
        "amx: four tiles of b for sums that go on", f"{MICRO}/amx.py",
        'b.and_(of_four, b.icmp_signed("==", add, I64(0)))',
        "of_four",
    ),
    Fault(
        "amx: an odd tile of rows is left out", f"{MICRO}/amx.py",
        "with Loop(b, b.and_(m_tiles, I64(-2)), m_tiles, 1) as (i, _, _):",
        "with Loop(b, m_tiles, m_tiles, 1) as (i, _, _):",
    ),
    Fault(
        "vector: the tail has one element more", f"{MICRO}/vector.py",
        'self.builder.icmp_signed("<", indices, splat(',
        'self.builder.icmp_signed("<=", indices, splat(',
    ),
    Fault("vector: bfloat16 is truncated", f"{MICRO}/vector.py", "number(I32, 0x7FFF)", "number(I32, 0)"),
    Fault(
        "vector: NaN is rounded to infinity", f"{MICRO}/vector.py",
        'found = b.select(b.fcmp_unordered("uno", x, x), quiet, carried)',
        "found = carried",
    ),
)  # fmt: skip

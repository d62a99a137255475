"""Faults in the host code of the CPU backend: argument blocks, launches, passes, plans, generated code."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/conformance/test_steps.py",
    "tests/unit/test_cpu_kernels.py",
    "tests/unit/test_planned.py",
    "tests/conformance/test_edges.py -k 'cpu'",
    "tests/conformance/test_conformance.py -k 'cpu and (boundary or alone)'",
    "tests/conformance/test_decode.py",
    "tests/unit/test_cpu_bf16_pairs.py",
    "tests/unit/test_memory_safety_calls.py",
    "tests/conformance/test_conformance.py -k 'cpu and (pairs or many or finite)'",
)

CPU = "flashkit/backends/cpu"
BLOCK, LAUNCH, PASSES, MODIFY = (f"{CPU}/{name}.py" for name in ("argument_block", "launch", "passes", "modify"))
CALL = f"{CPU}/kernels/launch.py"
OF_PAGES = "tests/unit/test_kv_cache.py -k row"

FAULTS = (
    Fault(
        "gradients by the strides of the first out", "flashkit/backends/cpu/passes.py",
        "anew = (at.OUT, operands.out), (at.DOUT", "anew = (at.DOUT",
        "tests/unit/test_planned.py -k repeated_pull_backs",
    ),
    Fault(
        "the scale's sign", BLOCK,
        "rest = 2 * math.frexp(abs(scale))[0]",
        "rest = 2 * math.frexp(scale)[0]",
        "tests/unit/test_cpu_bf16_pairs.py -k scale",
        core="scale",
    ),
    Fault(
        "the scale's mantissa is left out", BLOCK,
        "in_tile, in_softmax = (rest, 1.0) if scores_whole else (1.0, rest)",
        "in_tile, in_softmax = (1.0, 1.0) if scores_whole else (1.0, rest)",
    ),
    Fault(
        "modifications see scores without the mantissa", BLOCK,
        "whole = scores_whole or spec.score is not None or bool(operands.dropout_p)",
        "whole = scores_whole or bool(operands.dropout_p)",
    ),
    Fault(
        "sinks of the caller's dtype", "flashkit/call/checks.py",
        "return sinks.astype(dtype) if copied else sinks",
        "return sinks",
        "tests/conformance/test_edges.py -k 'cpu and sinks'",
    ),
    Fault("the seed's upper half", BLOCK, "operands.seed & (2**64 - 1)", "operands.seed & (2**32 - 1)"),
    Fault("dropped weights are not made up for", BLOCK, "1 / (1 - operands.dropout_p)", "1 / 1"),
    Fault(
        "strides of arrays in reverse", BLOCK,
        "entries += [self.address(array), *array.shape, *array.strides]",
        "entries += [self.address(array), *array.shape, *array.strides[::-1]]",
    ),
    Fault(
        "FULL tiles are not scored", BLOCK,
        "args[at.HAS_SCORE], args[at.TRANSPOSED_TILES] = spec.score is not None, plan.transposed_tiles",
        "args[at.HAS_SCORE], args[at.TRANSPOSED_TILES] = 0, plan.transposed_tiles",
    ),
    Fault(
        "no scratch for transposed arrays", BLOCK,
        "args[at.HAS_SCORE], args[at.TRANSPOSED_TILES] = spec.score is not None, plan.transposed_tiles",
        "args[at.HAS_SCORE], args[at.TRANSPOSED_TILES] = spec.score is not None, 0",
    ),
    Fault(
        "forward: scratch of one thread", LAUNCH,
        "return _launch(args, int(args[at.SCRATCH_BYTES]) * thread_count, thread_count)",
        "return _launch(args, int(args[at.SCRATCH_BYTES]), thread_count)",
    ),
    Fault(
        "decode: keys of the last split", CALL,
        "args[NUM_SPLITS] = max((longest + args[SPLIT_KEYS] - 1) // args[SPLIT_KEYS], 1)",
        "args[NUM_SPLITS] = max(longest // args[SPLIT_KEYS], 1)",
    ),
    Fault(
        "decode: one slot of partial results", LAUNCH,
        "slots = max(thread_count, heads * max_splits if max_splits > 1 else 1)",
        "slots = 1",
    ),
    Fault(
        "decode: the last heads, too few for a work tile", CALL,
        "(heads + per_tile - 1) // per_tile * args[NUM_SPLITS]",
        "max(heads // per_tile, 1) * args[NUM_SPLITS]",
        "tests/conformance/test_decode.py -k share_work_tiles",
    ),
    Fault("decode: splits of the shortest sequence", CALL, "max(longest, n), keys + n", "n, keys + n"),
    Fault("decode: few keys on all threads", CALL, "if keys < args[SERIAL_KEYS]:", "if False:"),
    Fault(
        "pages in a row: any page follows", f"{CPU}/kernels/kv_loader.py",
        "and integer_at(entry + 8) == page + 1", "and integer_at(entry + 8) > page", OF_PAGES,
    ),
    Fault(
        "pages in a row: one stride for all pools", BLOCK,
        "all(x.strides[0] == x.shape[2] * x.strides[2] for x in pools if x is not None)", "True", OF_PAGES,
    ),
    Fault(
        "pages in a row: strides of scales do not count", BLOCK,
        "pools = operands.k, operands.v, operands.k_pe, operands.k_scale, operands.v_scale",
        "pools = operands.k, operands.v, operands.k_pe", "tests/unit/test_quantised_cache.py -k pages_in_a_row",
    ),
    Fault(
        "pages in a row: strides of k_pe do not count", BLOCK,
        "pools = operands.k, operands.v, operands.k_pe, operands.k_scale, operands.v_scale",
        "pools = operands.k, operands.v, operands.k_scale, operands.v_scale",
        "tests/conformance/test_latent.py -k pages_in_a_row",
    ),
    Fault(
        "decode: words of a query", LAUNCH,
        "words = sum(rounded(width, k_pack * lanes) // k_pack for width in parts)",
        "words = sum(width // k_pack for width in parts)",
    ),
    Fault(
        "a work tile is left out", BLOCK,
        "return tiles, tiles * self.heads * self.batch",
        "return tiles, max(tiles * self.heads * self.batch - 1, 1)",
    ),
    Fault(
        "bf16 head dims are not padded", LAUNCH,
        "return (rounded(d, 16), rounded(dv, 16)) if plan.bf16_pairs else (d, dv)",
        "return (d, dv)",
    ),
    Fault(
        "backward: gradients past the lengths", PASSES,
        "            gradients.dk[entry, :, end:], gradients.dv[entry, :, end:] = 0, 0\n",
        "            pass\n",
        core="lengths",
    ),
    Fault(
        "backward: dQ in place of 16 bits", PASSES,
        "if num_splits == 1 and gradients.dq.dtype == accumulator:",
        "if num_splits == 1:",
    ),
    Fault(
        "backward: dQ in place is not checked", PASSES,
        "if args[at.IS_NONFINITE] == 0 and not np.isfinite(gradients.dq).all():",
        "if args[at.IS_NONFINITE] == 0 and False:",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault(
        "small pull-backs: the strides of the first out", PASSES, "form = op.out.strides, to.dout.strides,",
        "form = to.dout.strides,", "tests/unit/test_planned.py -k small_pull_backs",
    ),
    Fault(
        "small pull-backs: gradients may be infinite", PASSES, "return not nonfinite", "return True",
        "tests/unit/test_planned.py -k small_pull_backs",
    ),
    Fault(
        "small pull-backs: dQ is not checked", CALL, " or not is_finite(args[DQ], numbers, size)", "",
        "tests/unit/test_planned.py -k small_pull_backs",
    ),
    Fault(
        "small pull-backs: half of dQ is checked", CALL, "singles = vector(address, numbers, 4, np.int32)",
        "numbers //= 2\n        singles = vector(address, numbers, 4, np.int32)",
        "tests/unit/test_planned.py -k small_pull_backs",
    ),
    Fault(
        "small pull-backs: no dlse", PASSES, "absent = template if dlse is None else dlse", "absent = template",
        "tests/unit/test_planned.py -k small_pull_backs",
    ),
    Fault(
        "dsinks: the sign", PASSES,
        "-np.where(weight == 0, 0, weight * delta)",
        "np.where(weight == 0, 0, weight * delta)",
        core="sink",
    ),
    Fault(
        "dsinks: a weight of 0", PASSES,
        "np.where(weight == 0, 0, weight * delta)",
        "(weight * delta)",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault("dsinks: summed over heads", PASSES, ".sum((0, 2), np.float64)", ".sum((0, 2), np.float64)[::-1]"),
    Fault(
        "a plan for one key", f"{CPU}/plan.py",
        "enough = problem.n_k >= DECODE_MIN_KEYS or",
        "enough = True or",
    ),
    Fault(
        "all problems decode", f"{CPU}/plan.py",
        "problem.n_q < DECODE_QUERIES and",
        "problem.n_q <= DECODE_QUERIES and",
    ),
    Fault(
        "16-bit storage is another dtype", f"{CPU}/micro/register_block.py",
        'storage = "" if dtype == accumulator else dtype',
        'storage = "" if dtype == accumulator else "float16"',
    ),
    # generated code
    Fault(
        "modify: the mask shows what it hides", MODIFY,
        '({results[0]}) if ({results[1]}) else HIDDEN"',
        'HIDDEN if ({results[1]}) else ({results[0]})"',
    ),
    Fault(
        "modify: rows are positions", MODIFY,
        '"row = row0 + {row}; q = q0 + {row}"',
        '"row = q0 + {row}; q = q0 + {row}"',
        core="offset",
    ),
    Fault("modify: keys from the tile's start", MODIFY, '"key": f"k = k0 + {key}"', '"key": f"k = {key}"'),
    Fault(
        "modify: transposed arrays from the first row", MODIFY,
        "{last}0 : {last}0 + width, k0 : k0 + count",
        "0 : width, k0 : k0 + count",
    ),
    Fault("modify: transposed arrays share scratch", MODIFY, '            "extra_at += count * width * 8",\n', ""),
    Fault(
        "modify: a row before the position", MODIFY,
        "if len(index) < 2 or index[-1] is not expr.K or not (index[-2] is expr.ROW or index[-2] is expr.Q):",
        "if len(index) < 2 or not (index[-2] is expr.ROW or index[-2] is expr.Q):",
    ),
    Fault(
        "modify: leading indices that move", MODIFY,
        "return all(id(node) not in moving for node in expr.walk(index[:-2]))",
        "return True",
    ),
    Fault(
        "classify: FULL and EMPTY", MODIFY,
        "return {int(EMPTY)} if {is_empty} else",
        "return {int(FULL)} if {is_empty} else",
    ),
    Fault("classify: PARTIAL counts as FULL", MODIFY, "else {int(PARTIAL)})", "else {int(FULL)})"),
    Fault(
        "visit_ds: a slope of NaN where P is 0", MODIFY,
        "ds[j, i] * slopes[j, i] if p[j, i] != 0 else F(0)",
        "ds[j, i] * slopes[j, i]",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault("visit_ds: is not called", f"{CPU}/tile_ops.py", "if args[VISIT_DS] != 0:", "if args[VISIT_DS] == 1:"),
    Fault("uint64 is float64", MODIFY, '"uint64": "int64"', '"uint64": "float64"'),
    Fault(
        "scalars: floats are integers", MODIFY,
        'value = fields[0] if slot.kind == "int" else f"F(double_from_bits({fields[0]}))"',
        "value = fields[0]",
    ),
    Fault(
        "scalars: words of a slot", MODIFY,
        "return 1 if slot.ndim is None else 1 + 2 * slot.ndim",
        "return 1 if not slot.ndim else 1 + 2 * slot.ndim - (slot.ndim > 3)",
    ),
    Fault(
        "functions: exp beyond its range", f"{CPU}/functions.py",
        "inside = x if x < F32(89) else F32(89)",
        "inside = x",
    ),
    Fault(
        "functions: tanh near 0", f"{CPU}/functions.py",
        "return near if size < F32(0.625) else",
        "return near if size < F32(2.625) else",
    ),
    Fault(
        "functions: bounds of three axes", f"{CPU}/functions.py",
        "best = min(best, load_min2(a[h], i0, i1, j0, j1))",
        "best = load_min2(a[h], i0, i1, j0, j1)",
    ),
    Fault("functions: bounds of a row", f"{CPU}/functions.py", "_greatest(a[i0 : i1 + 1])", "_greatest(a[i0:i1])"),
    Fault(
        "functions: bounds of a contiguous row", f"{CPU}/functions.py",
        "i0 * a.itemsize, i1 + 1 - i0, a.itemsize",
        "i0 * a.itemsize, max(i1 - i0, 1), a.itemsize",
    ),
    Fault(
        "scratch memory is too small", f"{CPU}/scratch_pool.py",
        "return scratch if scratch.size >= size else Scratch(size)",
        "return scratch",
    ),
)  # fmt: skip

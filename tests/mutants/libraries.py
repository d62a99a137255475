"""Faults in what stands around the calls: merge, pickles, and the modules for JAX, Dask and ONNX."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_merge.py tests/unit/test_pickling.py", "tests/libraries/test_onnx.py",
    "tests/libraries/test_dask.py -m 'not slow'", "tests/libraries/test_jax.py",
)  # fmt: skip

MERGE, PICKLED, GRAPH, MOD, JAX, DASK, ONNX = (
    "flashkit/call/merge.py", "flashkit/call/pickled_plan.py", "flashkit/mods/expr/graph.py", "flashkit/mods/mod.py",
    "flashkit/jax.py", "flashkit/dask.py", "flashkit/onnx.py",
)  # fmt: skip
OF_MERGE, OF_PICKLES = "tests/unit/test_merge.py", "tests/unit/test_pickling.py"
OF_JAX, OF_ONNX = "tests/libraries/test_jax.py", "tests/libraries/test_onnx.py"
OF_DASK = "tests/libraries/test_dask.py -m 'not slow'"

FAULTS = (
    Fault("merge: rows without keys show", MERGE, "            term[lse == -math.inf] = 0", "            pass",
          OF_MERGE),
    Fault("merge: accumulates in the dtype", MERGE, "xp.zeros(parts[0][0].shape, wide)", "xp.zeros_like(parts[0][0])",
          OF_MERGE),
    Fault("merge: no reference", MERGE, "xp.exp(score - reference)", "xp.exp(score)", OF_MERGE),
    Fault("merge: -inf as the reference", MERGE, "xp.where(greatest == -math.inf, xp.zeros_like(greatest), greatest)",
          "greatest", OF_MERGE),
    Fault("merge: weights of bnhd", MERGE, 'if layout == "bnhd" and out.ndim > 2:', "if False:", OF_MERGE),
    Fault("merge: float32 for float64", MERGE, 'wide = "float64" if', 'wide = "float32" if', OF_MERGE),
    Fault("pickled: operands later in the list", GRAPH, "0 <= place < len(nodes) for place",
          "place < len(nodes) for place", OF_PICKLES),
    Fault("expressions of any kinds", GRAPH, "fits = value is None and (*kinds, kind) in KINDS.get(op, ())",
          "fits = value is None and op in KINDS", OF_PICKLES),
    Fault("indices of any kind", GRAPH, 'bool(args) and set(kinds) == {"int"}', "True", OF_PICKLES),
    Fault("pickled: graphs are not checked", MOD, "    check_traced(graph, kind)", "    pass", OF_PICKLES),
    Fault("pickled: values are not checked", MOD, "Mod(kind, graph, params, arrays).snapshot()",
          "Mod(kind, graph, params, arrays)", OF_PICKLES),
    Fault("integers of any size", MOD, "abs(params[name]) > expr.MAX_PARAM", "False", OF_PICKLES),
    Fault("pickled plans without the scale", PICKLED, "        operands.scale, operands.q_offset[own]",
          "        None, operands.q_offset[own]", OF_PICKLES),
    Fault("pickled plans without lengths", PICKLED, "operands.kv_lengths[own] if has_lengths else None", "None",
          OF_PICKLES),
    Fault("pickled plans without the mask", PICKLED, "mask if operands.blocks is None else None", "None", OF_PICKLES),
    Fault("pickled plans of aligned arrays", PICKLED, "+ (0 if place else 1)", "", OF_PICKLES),
    Fault("pickled plans without return_lse", PICKLED, "return_lse is True", "False", OF_PICKLES),
    Fault("pickled plans of packed calls", PICKLED, "slice(-1 if spec.packed else None)", "slice(None)", OF_PICKLES),
    Fault("jax: vmap of functions as batch axes", JAX,
          "flat = not static.numbers_entries and not {", "flat = not {", OF_JAX + " -k vmap"),
    Fault("jax: vmap of sinks as batch axes", JAX, '{"alibi_slopes", "sinks", "seed"}', '{"alibi_slopes", "seed"}',
          OF_JAX + " -k vmap"),
    Fault("jax: dlse is dropped", JAX, 'arrays["dlse"] = dlse', "pass", OF_JAX + " -k bits"),
    Fault("jax: a gradient of bias", JAX, 'CONSTANT = "alibi_slopes", "bias", "mask"',
          'CONSTANT = "alibi_slopes", "mask"', OF_JAX + " -k refused"),
    Fault("jax: the default offset", JAX, "        check_default_offset(None", "        (lambda *_: None)(None",
          OF_JAX + " -k errors"),
    Fault("jax: seeds are dropped", JAX, 'options["seed"] = int(arrays["seed"]) % 2**64', 'options["seed"] = 0',
          OF_JAX + " -k 'seed or dropout'"),
    Fault("jax: lse in the shape of bhnd", JAX, "else (*q.shape[:-3], q.shape[-2], q.shape[-3])", "else q.shape[:-1]",
          OF_JAX + " -k layouts"),
    Fault("dask: rows are not moved", DASK, "offsets[inside] + (row.start - key.start)", "offsets[inside] - key.start",
          OF_DASK),
    Fault("dask: keys are not moved", DASK, "offsets[inside] + (row.start - key.start)", "offsets[inside] + row.start",
          OF_DASK),
    Fault("dask: q is moved by rows", DASK, 'expr.Q: "k"}', 'expr.Q: "row"}', OF_DASK),
    Fault("dask: sinks of each part", DASK, '"sinks": None if partial else', '"sinks":', OF_DASK),
    Fault("dask: lengths are not moved", DASK, "np.clip(lengths[inside] - key.start,", "np.clip(lengths[inside],",
          OF_DASK),
    Fault("dask: queries are not moved", DASK, "np.clip(queries[inside] - row.start,", "np.clip(queries[inside],",
          OF_DASK),
    Fault("dask: one chunk for all heads", DASK, "values[..., heads.start : heads.stop]", "values[..., : len(heads)]",
          OF_DASK),
    Fault("dask: chunks of one entry are skipped", DASK, ".all((0, 1))", ".any((0, 1))", OF_DASK),
    Fault("dask: nothing is skipped", DASK, "return any_key & ~np", "return any_key | ~np", OF_DASK),
    Fault("dask: offsets of the first entry", DASK, "if local.size and (local == local[0]).all() else local",
          "if local.size else local", OF_DASK),
    Fault("dask: entries apart", DASK, "                _require_neighbours(inside)", "                pass", OF_DASK),
    Fault("dask: keys are held", DASK, "if not hold_kv and i:", "if False:", OF_DASK),
    Fault("onnx: top-left with a past", ONNX, "        offset = past_key.shape[2]", "        offset = 0", OF_ONNX),
    Fault("onnx: top-left with lengths", ONNX, "        offset = nonpad_kv_seqlen - q.shape[2]", "        offset = 0",
          OF_ONNX),
    Fault("onnx: keys past the mask", ONNX, "        keys = attn_mask.shape[-1]\n", "", OF_ONNX),
    Fault("onnx: precision is ignored", ONNX, "[x if wide is None else x.astype(wide) for", "[x for", OF_ONNX),
    Fault("onnx: weights of rows without keys", ONNX, "xp.where(scores == -xp.inf, 0, xp.exp(scores - rows))",
          "xp.exp(scores)", OF_ONNX),
    Fault("onnx: windows of one side", ONNX, "visible &= key >= place - left", "pass", OF_ONNX),
)  # fmt: skip

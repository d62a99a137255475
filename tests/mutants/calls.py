"""Faults in what a call goes through: the public functions, checks, plans, the dispatcher, the spec."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_planned.py tests/unit/test_bad_input.py",
    "tests/unit/test_memory_safety_calls.py tests/unit/test_dispatch.py",
    "tests/conformance/test_edges.py -k 'not cpu'",
    "tests/conformance/test_edges.py -k 'cpu'",
    "tests/unit/test_wrapping.py",
    "tests/conformance/test_conformance.py -k '(cpu or reference) and (alone or pairs)'",
)

CALL = "flashkit/call"
API, CHECKS, SHAPE, PLANNED, CACHE, POSITIONS, ARRAYS, COMPOSE, ARGUMENTS, VJP, SEQUENCES = (
    "flashkit/api.py", *(f"{CALL}/{name}.py" for name in (
        "checks", "shape", "planned", "plan_cache", "positions", "arrays", "compose", "arguments", "vjp", "sequences")),
)  # fmt: skip
NUMERIC = "flashkit/numeric.py"
NUMBERS, FORMS = "tests/unit/test_numbers.py", "tests/unit/test_forms.py"

FAULTS = (
    Fault(
        "keys without the precision", API,
        "return_lse, deterministic, precision, backend\n",
        "return_lse, deterministic, backend\n",
    ),
    Fault(
        "keys without the scale", API,
        "options = scale, causal, q_offset, window, softcap, seed, return_lse,",
        "options = causal, q_offset, window, softcap, seed, return_lse,",
    ),
    Fault(
        "keys of pull-backs without the scale", API,
        "        (scale, causal, q_offset, window, softcap, seed, return_lse,",
        "        (causal, q_offset, window, softcap, seed, return_lse,",
    ),
    Fault("pull-backs of calls with sinks are cached", API, "if others or not _is_constant(", "if not _is_constant("),
    Fault("pull-backs share lengths", CACHE, "is np.ndarray and not recorded:", "is np.ndarray:"),
    Fault("pull-backs keep the caller's arrays", PLANNED, "(x.view() for x in (four(q)", "(x for x in (four(q)"),
    Fault(
        "pull-backs with the bias of the first", PLANNED,
        'and (not anew or getattr(backend, "takes_arrays", False))', "",
    ),
    Fault("keys without the layout", CACHE, "(*options, layout, block_mask,", "(*options, block_mask,"),
    Fault("keys without the block mask", CACHE, "(*options, layout, block_mask,", "(*options, layout,"),
    Fault("keys without lengths", CACHE, "packed, kv_lengths is None)", "packed)"),
    Fault("keys without offsets", CACHE, "block_mask, packed, kv_lengths", "block_mask, kv_lengths"),
    Fault("offsets of a key that change", CACHE, "copies if len(copies) == 2 else copies[0]", "cu_seqlens"),
    Fault(
        "lengths beside a bias in a cached plan", CACHE,
        "        if differ:\n            return None\n        others =", "        others =",
    ),
    Fault("a plan for arrays of offsets", API, "(q_offset is None or type(q_offset) is int)", "True"),
    Fault("a plan for dropout", API, "        and dropout_p == 0\n", ""),
    Fault(
        "sinks are constant", API,
        "q_lengths is page_table is sinks is None",
        "q_lengths is page_table is None",
    ),
    Fault(
        "out shares memory in a vjp", API,
        "if arrays.kind_of(array) == problem.array_kind and arrays.share_memory(out, array):",
        "if arrays.kind_of(array) == problem.array_kind and arrays.same_address(out, array):",
        "tests/unit/test_bad_input.py -k reads_its_inputs",
    ),
    Fault("dsinks of the computing dtype", VJP, "dsinks = dsinks.astype(self._sinks_dtype, copy=False)", "pass"),
    Fault(
        "dlse of any dtype", VJP,
        'self._checked("dlse", dlse, shape.sizes_of_rows(op.lse.shape), op.lse.dtype)',
        'self._checked("dlse", dlse, shape.sizes_of_rows(op.lse.shape), dlse.dtype)',
    ),
    Fault(
        "no queries: gradients are not cleared", VJP,
        "                if tensor is not None:\n                    tensor[...] = 0\n",
        "                pass\n",
    ),
    Fault("out is not written", API, "    if not arrays.same_address(out, result):\n        out[...] = result\n", ""),
    Fault(
        "wrt in the order of q, k, v", VJP,
        "for name in wrt])\n\n    def fill",
        "for name in sorted(wrt)])\n\n    def fill",
    ),
    Fault("seed: 2^64", CHECKS, 'integer("seed", seed, 0, 2**64 - 1)', 'integer("seed", seed, 0, 2**64)', NUMBERS),
    Fault("a window of length 0", CHECKS, 'a number of keys", side, 0)', 'a number of keys", side, 1)'),
    Fault("bools are numbers", NUMERIC, "isinstance(value, bool | str", "isinstance(value, str", NUMBERS),
    Fault("text is a number", NUMERIC, "bool | str | bytes", "bool | bytes", NUMBERS),
    Fault("any dtype is of numbers", NUMERIC, "_REAL.fullmatch(getattr(dtype", "re.match('', getattr(dtype", NUMBERS),
    Fault("arrays with axes are numbers", NUMERIC, 'not getattr(value, "shape", ()) and _REAL', "_REAL", NUMBERS),
    Fault("numbers that are not finite", NUMERIC, "if not math.isfinite(found):", "if False:"),
    Fault("integers too small", NUMERIC, "if found < least or", "if", NUMBERS),
    Fault("integers too great", NUMERIC, "found > most)", "False)", NUMBERS),
    Fault(
        "differences of offsets", SEQUENCES, "(given[1:] < given[:-1]).any()", "(np.diff(given) < 0).any()", NUMBERS,
    ),
    Fault("the last offset is not checked", SEQUENCES, "given[-1] > tokens or", "", NUMBERS),
    Fault("the first offset is not checked", SEQUENCES, "given[0] != 0 or", "", NUMBERS),
    Fault(
        "unsigned integers of another order of bytes wrap", POSITIONS,
        'array.dtype.kind == "u" and array.itemsize == 8', "array.dtype == np.uint64", NUMBERS,
    ),
    Fault(
        "integers are checked where the caller changes them", POSITIONS, "np.array(array) if copied else array.view()",
        "array.view()",
    ),
    Fault(
        "attention reads the caller's forms", API,
        "        q, k, v = q.view(), k.view(), v.view()\n    entry", "        pass\n    entry", FORMS,
    ),
    Fault(
        "planned calls read the caller's forms", PLANNED,
        "            q, k, v = q.view(), k.view(), v.view()\n        if arrays", "            pass\n        if arrays",
        FORMS,
    ),
    Fault(
        "checks read the caller's forms", ARGUMENTS,
        "    q, k, v = q.view(), k.view(), v.view()  # before", "    # before", FORMS,
    ),
    Fault(
        "views of arguments are the arguments", ARRAYS,
        "    return array.view()\n\n\ndef own_forms", "    return array\n\n\ndef own_forms", FORMS,
    ),
    Fault(
        "out that is read-only", CHECKS,
        'if kind == "numpy" and not out.flags.writeable:',
        'if kind != "numpy" and not out.flags.writeable:',
    ),
    Fault(
        "out over an input", CHECKS,
        "return not any(arrays.may_share(out, x) for x in inputs)",
        "return True",
        "tests/conformance/test_edges.py -k test_out_may",
    ),
    Fault(
        "out over a bias", ARGUMENTS,
        "read = [q, k, v, *values.values(), *([]",
        "read = [q, k, v, *([]",
        "tests/conformance/test_edges.py -k test_out_may",
    ),
    Fault(
        "out of one element many times", CHECKS,
        "or 0 in [s for s, n in zip(out.strides, out.shape, strict=True) if n > 1]:",
        "or False:",
        "tests/unit/test_memory_safety_calls.py -k may_write",
    ),
    Fault("a block mask of other heads", CHECKS, "if count not in (1, n):", "if count > n:"),
    Fault(
        "bias with several batch axes, partly broadcast", SHAPE,
        "if any(n != 1 for n in array.shape[:-3]):",
        "if all(n != 1 for n in array.shape[:-3]):",
    ),
    Fault(
        "arrays of five axes are not joined", SHAPE,
        "if array.ndim > 3 and len(shape.batch) != 1:",
        "if array.ndim > 3 and len(shape.batch) == 0:",
    ),
    Fault(
        "a bias of more axes than the call", SHAPE,
        "if array.ndim > len(wanted) or any(",
        "if any(",
        "tests/unit/test_bad_input.py -k 'bias'",
    ),
    Fault("heads that do not divide", SHAPE, "or (heads_k and heads % heads_k):", "or (heads_k and heads < heads_k):"),
    Fault("values of other heads", SHAPE, "        if heads_v != heads_k:\n", "        if heads_v < heads_k:\n"),
    Fault(
        "two axes of bnhd", SHAPE,
        'array = array[None] if self.layout == "bhnd" else array[:, None]',
        "array = array[None]",
    ),
    Fault(
        "planned: an axis of length 2 has other strides", PLANNED,
        "if any(n > 1 and a != b for",
        "if any(n > 2 and a != b for",
    ),
    Fault(
        "planned: another dtype", PLANNED,
        "            if array.dtype != dtype:\n",
        "            if array.dtype.itemsize != dtype.itemsize:\n",
    ),
    Fault(
        "planned: another alignment", PLANNED,
        "if arrays.layout(array)[-1] != place:",
        "if arrays.layout(array)[-1] is None:",
    ),
    Fault(
        "planned: out over an input", PLANNED,
        "not any(arrays.may_share(out, x) for x in (*read, *self._values))",
        "not any(arrays.may_share(out, x) for x in self._values)",
        "tests/unit/test_planned.py -k test_out",
    ),
    Fault(
        "planned: out over a bias", PLANNED,
        "for x in (*read, *self._values))",
        "for x in read[:3])",
        "tests/unit/test_planned.py -k test_out",
    ),
    Fault("planned: out of other strides", PLANNED, "fits = arrays.contiguous(out) and not any(", "fits = not any("),
    Fault(
        "planned: arrays that are not addressable", PLANNED,
        "self._copied = not all(map(arrays.same_address, given, fours))",
        "self._copied = False",
    ),
    Fault(
        "planned: lse is not returned", PLANNED,
        "return (out, lse) if self._return_lse else out",
        "return (out, lse) if self._return_lse and not self._copies else out",
    ),
    Fault(
        "planned: offsets stay", PLANNED,
        "elif self._follows is None or given is None:",
        "elif True:",
    ),
    Fault("planned: indices are proved once", PLANNED, "        if self._values:\n", "        if False:\n"),
    Fault("planned: pages of the plan's lengths", PLANNED, "        check_pages(table, lengths, *k.shape[:2])\n", ""),
    Fault("planned: tables of any width", PLANNED, "if table.shape != own.page_table.shape:", "if False:"),
    Fault(
        "planned: right-padded calls", PLANNED,
        "if n_q > 1 and isinstance(self._follows, int)",
        "if n_q < 1 and isinstance(self._follows, int)",
    ),
    Fault("cache: plans grow without end", CACHE, "of_v[after:], of_k[at].bit_length(),", "of_v[after:],"),
    Fault("cache: any number of values", CACHE, "of_k[axis] == of_v[axis] >= MIN_KEYS", "of_k[axis] >= MIN_KEYS"),
    Fault("cache: many queries grow", CACHE, "FEW_QUERIES, MIN_KEYS = 8, 16", "FEW_QUERIES, MIN_KEYS = 64, 16"),
    Fault(
        "cache: the layout of v", CACHE,
        "layouts = arrays.layouts(q, k, v), of_others",
        "layouts = arrays.layouts(q, k, v)[:2], of_others",
    ),
    Fault(
        "cache: the layout of other arrays", CACHE,
        "arrays.layouts(q, k, v), of_others",
        "arrays.layouts(q, k, v), len(of_others)",
    ),
    Fault(
        "cache: types of options", CACHE,
        "return layouts, options, tuple(map(type, options)), dispatch.state(), keys_axis",
        "return layouts, options, dispatch.state(), keys_axis",
    ),
    Fault(
        "cache: what chooses the backend", CACHE,
        "tuple(map(type, options)), dispatch.state()",
        "tuple(map(type, options))",
    ),
    Fault(
        "cache: arrays that were copied", CACHE,
        "return names if all(len(each) == 1 for each in found) and",
        "return names if",
    ),
    Fault("cache: oldest first", CACHE, "        found.last_use = next(_ticks)\n", "        pass\n"),
    Fault(
        "cache: large masks", CACHE,
        "for array in block_mask.mod.arrays.values()) <= _MAX_MASK_BYTES",
        "for array in block_mask.mod.arrays.values()) >= 0",
    ),
    Fault(
        "layout: strides", ARRAYS,
        "return kind, array.shape, array.strides, array.dtype, array.flags.aligned",
        "return kind, array.shape, array.dtype, array.dtype, array.flags.aligned",
    ),
    Fault(
        "layout: alignment", ARRAYS,
        "return kind, array.shape, array.strides, array.dtype, array.flags.aligned",
        "return kind, array.shape, array.strides, array.dtype, True",
    ),
    Fault(
        "misaligned arrays are addressable", ARRAYS,
        "aligned = not isinstance(array, np.ndarray) or array.flags.aligned",
        "aligned = True",
        "tests/unit/test_memory_safety_calls.py -k may_address",
    ),
    Fault("arrays of swapped bytes", ARRAYS, "    if not dtype.isnative:\n", "    if dtype.isnative and False:\n"),
    Fault(
        "memory that may be shared", ARRAYS,
        "return isinstance(b, np.ndarray) and np.may_share_memory(a, b)",
        "return isinstance(b, np.ndarray) and same_address(a, b)",
    ),
    Fault(
        "masked arrays are arrays", ARRAYS,
        "if isinstance(array, np.ma.MaskedArray | np.matrix):",
        "if isinstance(array, np.matrix):",
    ),
    Fault(
        "offsets below -2^48", POSITIONS,
        "not (offsets.min() >= -MAX_POSITION and offsets.max() <= MAX_POSITION)",
        "not offsets.max() <= MAX_POSITION",
    ),
    Fault(
        "offsets above 2^48", POSITIONS,
        "not (offsets.min() >= -MAX_POSITION and offsets.max() <= MAX_POSITION)",
        "not offsets.min() >= -MAX_POSITION",
    ),
    Fault(
        "lengths beyond the keys", POSITIONS,
        "found.view(np.uint64).max() > most:",
        "found.view(np.uint64).max() > most + 1:",
    ),
    Fault(
        "negative lengths", POSITIONS,
        "found.view(np.uint64).max() > most:",
        "found.max() > most:",
    ),
    Fault(
        "unsigned integers beyond 64 bits", POSITIONS,
        "and array.size and array.max() > INT64[1]:",
        "and array.size and array.max() > 2**64:",
    ),
    Fault("indices: the last element", COMPOSE, "if low < 0 or high >= n:", "if low < 0 or high > n:"),
    Fault("indices: below 0", COMPOSE, "if low < 0 or high >= n:", "if high >= n:"),
    Fault("indices: the last query", COMPOSE, '"q1": greatest[:, None] + last_row', '"q1": greatest[:, None]'),
    Fault(
        "slots of two modifications", COMPOSE,
        'names[node.value] = f"v{len(named)}"',
        'names[node.value] = f"v{len(names)}"',
    ),
    Fault(
        "score modifications in reverse", COMPOSE,
        "for graph in renamed[: len(scores)]:",
        "for graph in renamed[: len(scores)][::-1]:",
        "tests/conformance/test_edges.py -k formulas",
    ),
    Fault(
        "masks of functions are not checked", ARGUMENTS,
        '        given.append(mods.trace(mask_mod, "mask").snapshot())\n        masks.append(given[-1])\n',
        '        masks.append(mods.trace(mask_mod, "mask").snapshot())\n',
    ),
    Fault(
        "the highest precision is a precision", ARGUMENTS,
        'None if precision == "highest" else precision',
        "precision",
    ),
    Fault(
        "the scale of v's head dim", ARGUMENTS,
        "1 / math.sqrt(d) if scale is None",
        "1 / math.sqrt(dv) if scale is None",
        "tests/conformance/test_edges.py -k formulas",
        core="scale",
    ),
    Fault(
        "dispatch: keys without the kind of array", "flashkit/dispatch.py",
        "        problem.array_kind,\n        problem.batch",
        "        problem.batch",
    ),
    Fault("dispatch: keys without the heads", "flashkit/dispatch.py", "        problem.heads,\n", ""),
    Fault(
        "dispatch: keys without the forced backend", "flashkit/dispatch.py",
        "        problem.n_k.bit_length(),\n        only,\n",
        "        problem.n_k.bit_length(),\n",
    ),
    Fault("dispatch: keys without the keys", "flashkit/dispatch.py", "        problem.n_k.bit_length(),\n", ""),
    Fault(
        "dispatch: the slowest first", "flashkit/dispatch.py",
        "key=lambda c: (not c.verdict.ok, c.last_resort, c.seconds, c.name)",
        "key=lambda c: (not c.verdict.ok, c.last_resort, -c.seconds, c.name)",
    ),
    Fault(
        "dispatch: last resorts first", "flashkit/dispatch.py",
        "(not c.verdict.ok, c.last_resort, c.seconds, c.name)",
        "(not c.verdict.ok, c.seconds, c.name)",
    ),
    Fault(
        "dispatch: the process before the block", "flashkit/dispatch.py",
        "    if (block := _forced.get()) is not None:\n        return block\n",
        '    if (block := _forced.get()) is not None and not settings.BACKEND.read():\n        return '
        "block\n",
    ),
    Fault("dispatch: forget is not seen", "flashkit/dispatch.py", "        _generation += 1\n", ""),
    Fault(
        "spec: keys without the slots", "flashkit/spec.py",
        'if f.name not in ("score", "mask")]',
        'if f.name not in ("score", "mask", "slots")]',
    ),
    Fault(
        "spec: FLOPs of the backward pass", "flashkit/spec.py",
        'return forward if direction == "forward" else 2.5 * forward',
        'return forward if direction == "forward" else 2 * forward',
        "tests/unit/test_dispatch.py -k flops",
    ),
    Fault(
        "spec: an array of another dtype", "flashkit/spec.py",
        "if len(array.strides) != slot.ndim or name_of(array.dtype) != slot.dtype:",
        "if len(array.strides) != slot.ndim:",
    ),
)  # fmt: skip

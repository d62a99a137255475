"""Faults in arrays quantised to 8 bits, and in calls that take them."""

from __future__ import annotations

from . import Fault

TESTS = "tests/unit/test_quantized.py", "tests/unit/test_quantised_cache.py"

QUANTIZED, LOANS, PLANNED = (f"flashkit/call/{name}.py" for name in ("quantized", "loans", "planned"))
API, REFERENCE = "flashkit/api.py", "flashkit/reference.py"

CPU, CACHE = "flashkit/backends/cpu", "flashkit/cache"
DECODE, LOADER = f"{CPU}/kernels/decode.py", f"{CPU}/kernels/kv_loader.py"
IN_PLACE, POOLS = "flashkit/call/in_place.py", f"{CACHE}/pools.py"
OF_CACHE = "tests/unit/test_quantised_cache.py"
DENSE, ENGINE, TRACES = (f"{OF_CACHE} -k {name}" for name in ("dense_arrays", "engine", "'traces and int8'"))
OTHERS, PAGES = f"{OF_CACHE} -k other_keys", f"{OF_CACHE} -k only_pages"

FAULTS = (
    Fault("keys without their scales", DECODE, "s[i, done + j] *= scale[j] * KV_UNIT", "pass", DENSE),
    Fault("values without their scales", DECODE, "p[i, done + j] * (scale[j] * KV_UNIT)", "p[i, done + j]", DENSE),
    Fault("e4m3 without its unit", DECODE, "*= scale[j] * KV_UNIT", "*= scale[j]", DENSE),
    Fault("hidden scales of NaN", DECODE, "0 if p[i, done + j] == 0 else p", "p", f"{OF_CACHE} -k nan_shows"),
    Fault("scales of the first page", LOADER, "entry * args[scales + 1]", "0 * args[scales + 1]", ENGINE),
    Fault("scales of the first head", LOADER, "head_kv * args[scales + 2]", "0 * args[scales + 2]", ENGINE),
    Fault("scales of the first token", LOADER, "base + row * args[scales + 3]", "base", ENGINE),
    Fault("NaN of e4m3 is a number in kernels", f"{CPU}/micro/vector.py", "b.select(is_nan, number(0x7E00), bits)",
          "bits", f"{OF_CACHE} -k nan_shows"),
    Fault("8 bits as pairs", f"{CPU}/plan.py", ' == "avx512bf16" and not self.problem.spec.kv_format else',
          ' == "avx512bf16" else', TRACES),
    Fault("appended scales are lost", POOLS, "    scale[at] = quantised.scale.swapaxes(1, 2)\n", "", TRACES),
    Fault("rotated keys are read in place", IN_PLACE, "x.seed is None and ", "", OTHERS),
    Fault("smooth keys are read in place", IN_PLACE, "x.mean is None and ", "", OTHERS),
    Fault("values in the keys' format", IN_PLACE, " and k.format == v.format", "", OTHERS),
    Fault("all pages are dequantised", LOANS, "if not 0 < len(pages) < count:", "if True:", PAGES),
    Fault("a page that does not exist is another", LOANS, "np.where(table < 0, table, len(pages))", "0", PAGES),
    Fault("ties away from zero", QUANTIZED, "bits + 0x7FFFF + ((bits >> 20) & 1)", "bits + 0x80000"),
    Fault("subnormals begin late", QUANTIZED, "np.float32(2**-6)", "np.float32(2**-7)"),
    Fault("e4m3 overflows to NaN", QUANTIZED, "xp.minimum(abs(values), np.float32(448))", "abs(values)"),
    Fault("the sign of 0", QUANTIZED, "(values.view(np.int32) >> 24) & 0x80", "(values < 0) * 0x80"),
    Fault("NaN is a number", QUANTIZED, "xp.where(xp.isnan(values), 0x7F, codes)", "codes"),
    Fault("infinity is a number", QUANTIZED, "xp.where(xp.isfinite(values), values, np.float32(np.nan))", "values"),
    Fault("NaN in int8 is 0", QUANTIZED, "np.float32(0 if dtype == \"e4m3\" else np.nan)", "np.float32(0)"),
    Fault(
        "NaN takes its group along", QUANTIZED,
        'np.float32(0 if dtype == "e4m3" else np.nan)',
        "np.float32(np.nan)",
    ),
    Fault("int8 is truncated", QUANTIZED, "xp.clip(xp.rint(values), -127, 127)", "xp.clip(values, -127, 127)"),
    Fault(
        "scales of zeros", QUANTIZED,
        "np.float32(LARGEST[dtype]), np.float32(LEAST_SCALE))",
        "np.float32(LARGEST[dtype]), np.float32(0))",
    ),
    Fault("the mean counts NaN", QUANTIZED, "xp.where(finite, values, np.float32(0)).sum", "values.sum"),
    Fault(
        "the mean over all tokens", QUANTIZED,
        "xp.maximum(finite.sum(tokens, keepdims=True), 1)",
        "xp.float32(x.shape[tokens])",
    ),
    Fault("the mean is lost", QUANTIZED, "                values += self.mean\n", "                pass\n"),
    Fault(
        "the rotation is not undone", QUANTIZED,
        "rotation(self.shape[-1], self.seed).T.astype",
        "rotation(self.shape[-1], self.seed).astype",
    ),
    Fault(
        "one rotation for all seeds", QUANTIZED,
        "philox((np.arange(d), 0, 0, 0), seed)[0]",
        "philox((np.arange(d), 0, 0, 0), 0)[0]",
    ),
    Fault("a rotation without signs", QUANTIZED, "np.where(words & 1, -1.0, 1.0)", "np.ones(d)"),
    Fault("Hartley without sines", QUANTIZED, "np.cos(angles) + np.sin(angles)", "np.cos(angles)"),
    Fault(
        "blocks begin one late", QUANTIZED,
        "    padded[: len(first)] = first\n",
        "    padded[1 : len(first)] = first[:-1]\n",
    ),
    Fault("the axis of tokens", QUANTIZED, "return HEADS_AND_TOKENS[layout][1] if ndim > 2 else -2", "return -2"),
    Fault("scales in float64", QUANTIZED, "wide, xp = DTYPES[name_of(wanted)].accumulator", "wide, xp = \"float32\""),
    Fault("a scale of any shape", QUANTIZED, "if self.scale.shape != wanted:", "if False:"),
    Fault("fp8 rotates v", LOANS, 'rotate=name != "v"', "rotate=True"),
    Fault("fp8 with a scale for a head", LOANS, 'FP8_PER: Per = "token"', 'FP8_PER: Per = "head"'),
    Fault("fp8 of float32", LOANS, "found not in FP8_DTYPES", "False"),
    Fault("precision is lost", LOANS, "return None if self.fp8 else value", "return None"),
    Fault(
        "dtypes differ", LOANS,
        "if (found := arrays.dtype_name(name, x)) != self.dtype:",
        "if (found := arrays.dtype_name(name, x)) == 0:",
    ),
    Fault("results in float32", LOANS, "        if result.dtype == dtype:\n", "        if True:\n"),
    Fault("dsinks of q's dtype", LOANS, 'x if name == "sinks" else self._rounded(x)', "self._rounded(x)"),
    Fault("dout of any dtype", LOANS, "if arrays.dtype_name(name, value) != self.dtype:", "if False:"),
    Fault("out is not checked", LOANS, "        check_out(out, self.kind, self.dtype, result.shape)\n", ""),
    Fault("out is not written", LOANS, "        out[...] = self._rounded(result)\n", ""),
    Fault("explain makes arrays", API, "described=not measure)) is not None", "described=False)) is not None"),
    Fault("one loan for a vjp", API, "lent._loans = (loan, *lent._loans)", "lent._loans = (loan,)"),
    Fault("out over a bias", API, 'if out is not None and borrowed["out"] is None:', "if False:"),
    Fault(
        "plans without fp8", API,
        "return QuantisingPlan(made) if isinstance(loan, Dequantised) and loan.fp8 else made",
        "return made",
    ),
    Fault(
        "a plan as its own", PLANNED,
        "planned = self if isinstance(loan, foreign.Loan) else self._planned",
        "planned = self._planned",
    ),
    Fault(
        "pickles without fp8", PLANNED,
        "return QuantisingPlan, (self._planned,)",
        "return copyreg._reduce(self._planned)",
    ),
    Fault("fp8 in prepare", "flashkit/call/arguments.py", 'if precision == "fp8":  #', 'if precision == "fp9":  #'),
    Fault("fp8 in PyTorch", "flashkit/torch.py", 'if precision == "fp8":', 'if precision == "fp9":'),
    Fault(
        "fp8 in a cache", "flashkit/cache/layer.py",
        'if options.get("precision") == "fp8":',
        'if options.get("precision") == "fp9":',
    ),
    Fault("the nearest number", REFERENCE, "(up < down) | ((up == down) & (above % 2 == 0))", "up <= down"),
    Fault("the reference's mean", REFERENCE, "* scale) @ turn.T + mean", "* scale) @ turn.T"),
)  # fmt: skip

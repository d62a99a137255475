"""Faults in KV caches and rotary embedding: pages, steps, layers, planned steps, tables, the CPU's kernel."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_kv_cache.py",
    "tests/unit/test_cascade.py",
    "tests/unit/test_rotary.py",
    "tests/emulator/test_kv_cache.py",
)

PAGES, STEPS, LAYER, CACHE, PLANS = (
    f"flashkit/cache/{name}.py" for name in ("pages", "steps", "layer", "kv_cache", "step_plans")
)
CASCADE, ON_CASCADE = "flashkit/cache/cascade.py", "tests/unit/test_cascade.py"
APPLY, TABLES, KERNEL = "flashkit/rope/apply.py", "flashkit/rope/tables.py", "flashkit/backends/cpu/kernels/rotary.py"

FAULTS = (
    Fault("a shared page is written", PAGES, "self._references[page] - uses[page] > 1", "False"),
    Fault(
        "the last owner copies too",
        PAGES,
        "                uses[page] += 1\n                copied",
        "                copied",
    ),
    Fault("a copied page keeps its reference", PAGES, "self._references[self.table[at]] -= 1", "pass"),
    Fault("a fork holds no reference", PAGES, "self._references[own[own >= 0]] += 1", "pass"),
    Fault(
        "a fork begins at 0", PAGES, "self.table[into], self.first[into] = own, self.first[i]", "self.table[into] = own"
    ),
    Fault("pages are not counted before", PAGES, "if needed > free:", "if needed > free + 1:"),
    Fault("pages behind a window do not count", PAGES, "len(self._free) + int(idle)", "len(self._free)"),
    Fault(
        "a window loses a page too many",
        PAGES,
        "np.maximum(self.lengths - self.left, 0) // self.page",
        "-(-np.maximum(self.lengths - self.left, 0) // self.page)",
    ),
    Fault(
        "cheap steps after a fork or a trim",
        PAGES,
        "self._spare = self.lengths.copy(), 0",
        "_ = self.lengths.copy(), 0",
    ),
    Fault(
        "cheap steps into the next page", PAGES, "int((-grown % self.page).min())", "int((-grown % self.page).max())"
    ),
    Fault("cheap steps of any counts", PAGES, "if counts is self.one_each and self._spare:", "if self._spare:"),
    Fault(
        "changes of pages are not seen", PLANS, "if self._changes != self.pages.changes:", "if self._changes == -1:"
    ),
    Fault(
        "writers of another layout", LAYER, "key = arrays.layout(k), arrays.layout(v), layout", "key = k.shape, v.shape"
    ),
    Fault("trim keeps the last page", PAGES, "if column >= stop", "if column > stop"),
    Fault("a freed window begins later", PAGES, "self.first[i] = stop = 0", "stop = 0"),
    Fault("the table is a column short", PAGES, "1 << (columns - 1).bit_length()", "1 << columns.bit_length() - 1"),
    Fault("lengths change in place", PAGES, "self.lengths, self._spare = self.lengths.copy(), 0", "self._spare = 0"),
    Fault("pages are not copied", LAYER, "pool[:, copy.target] = pool[:, copy.source]", "pass"),
    Fault("one pool's pages are copied", LAYER, "for pool in self._all:", "for pool in self._all[:1]:"),
    Fault("a later layer's counts are not compared", LAYER, "not np.array_equal(counts, step.counts)", "False"),
    Fault(
        "a layer may append twice",
        STEPS,
        "late = [number for number, written in enumerate(self._written) if written != self._opened]",
        "late = []",
    ),
    Fault(
        "a layer attends before it appends",
        STEPS,
        "if self._written[layer] != self._opened:\n            raise",
        "if False:\n            raise",
    ),
    Fault(
        "forks in the middle of a step",
        STEPS,
        "            if written != self._opened:\n                raise",
        "            if False:\n                raise",
    ),
    Fault("a short table of angles", STEPS, "end > len(table.cos)", "end > len(table.cos) + 1"),
    Fault(
        "positions of a step begin at 0",
        STEPS,
        "np.repeat(before - offsets[:-1], counts)",
        "np.repeat(-offsets[:-1], counts)",
    ),
    Fault("lengths can be written", STEPS, "view.flags.writeable = False", "pass"),
    Fault("a device's arrays are new", STEPS, "if table.shape == self.pages.table.shape:", "if False:"),
    Fault(
        "dropped pages are not readable",
        STEPS,
        "self.table if self.pages.left is None else self.xp.maximum(self.table, 0)",
        "self.table",
    ),
    Fault("a wider window than the cache's", LAYER, "left is None or left > own[0]", "left is None"),
    Fault(
        "the window is not applied",
        LAYER,
        "    if given is None:\n        return own",
        "    if given is None:\n        return None, None",
    ),
    Fault(
        "values are rotated",
        LAYER,
        "        self._v(v, step.slots)",
        "        self._v(k, step.slots)",
    ),
    Fault(
        "queries keep their place",
        LAYER,
        "q = self._turned(q.swapaxes(0, 1)[None], turn, step)[0].swapaxes(0, 1)",
        "pass",
    ),
    Fault(
        "one table for all",
        LAYER,
        "if self._table is not None and self._table[0] == key:",
        "if self._table is not None:",
    ),
    Fault("trims behind the window", CACHE, "self._pages.oldest(i, length - int(n)) < first", "False"),
    Fault("forks into tokens", CACHE, "        if self._pages.lengths[target]:\n", "        if False:\n"),
    Fault(
        "plans without their options",
        PLANS,
        "arrays.layout(q), values, tuple([type(x) for _, x in values]), self._keys",
        "arrays.layout(q), self._keys",
    ),
    Fault("plans without the backend", PLANS, "self._keys, dispatch.state()", "self._keys"),
    Fault("plans for any length", PLANS, "in values]), self._keys,", "in values]),"),
    Fault("lengths of the last step", PLANS, "if self._version != version:", "if self._version == -1:"),
    Fault(
        "the table of the last step", PLANS, "            self._table[...] = xp.asarray(", "            _ = xp.asarray("
    ),
    Fault(
        "offsets of the keys",
        PLANS,
        "self._xp.subtract(self._lengths, queries, out",
        "self._xp.subtract(self._lengths, 0, out",
    ),
    Fault(
        "angles the other way", KERNEL, "sign, half, tokens = ACCUM(a[SIGN])", "sign, half, tokens = -ACCUM(a[SIGN])"
    ),
    Fault("the rest of a head", KERNEL, "range(2 * half, x.shape[0])", "range(2 * half + 1, x.shape[0])"),
    Fault("slots of another size", KERNEL, "slots[b * tokens + n] % a[PAGE]", "slots[b * tokens + n] % (a[PAGE] + 1)"),
    Fault("positions of the first sequence", KERNEL, "at = where[b * tokens + n]", "at = where[n]"),
    Fault("the expression's sign", APPLY, "table.sin[positions] * sign", "table.sin[positions]"),
    Fault("positions on a device are not clamped", APPLY, "xp.clip(whole, 0, max(rows - 1, 0), out=whole)", "whole"),
    Fault("a position behind the table", APPLY, "if low < 0 or high >= most:", "if low < 0 or high > most:"),
    Fault("a negative position", APPLY, "if low < 0 or high", "if high"),
    Fault("an overlapping out", APPLY, "can_write(out, x, table.cos, table.sin)", "can_write(out)"),
    Fault(
        "a linear factor",
        TABLES,
        '_plain(dims, base) / scaling.take("factor")',
        '_plain(dims, base) * scaling.take("factor")',
    ),
    Fault("llama3 keeps the long waves", TABLES, "kept + (1 - kept) / factor", "1 - kept + kept / factor"),
    Fault(
        "yarn without its factor", TABLES, "plain / factor * interpolated, attention)", "plain / factor * interpolated)"
    ),
    Fault("yarn's bounds are whole", TABLES, "    if whole:\n", "    if True:\n"),
    Fault("cascade: the rest has the prefix's length", CASCADE, "self.lengths[at] -= tokens", "pass", ON_CASCADE),
    Fault(
        "cascade: the rest begins at its first page",
        CASCADE,
        "pages.table[at, columns:]",
        "pages.table[at, :-columns]",
        ON_CASCADE,
    ),
    Fault("cascade: queries lie in the prefix", CASCADE, "lengths[at] - MOST_TOKENS, 0", "lengths[at], 0", ON_CASCADE),
    Fault("cascade: pages that follow others", CASCADE, ".cumprod(1).sum(1)", ".sum(1)", ON_CASCADE),
    Fault(
        "cascade: the shortest bounds the prefix",
        CASCADE,
        "np.arange(len(at)) * ranked",
        "np.arange(len(at))",
        ON_CASCADE,
    ),
    Fault("cascade: short sequences have the prefix", CASCADE, "at[common >= columns]", "at", ON_CASCADE),
    Fault(
        "cascade: the log-sum-exp of the rest",
        CASCADE,
        "result4[at], lse[at] = merge",
        "result4[at], _ = merge",
        ON_CASCADE,
    ),
    Fault(
        "cascade: a prefix without softcap",
        CASCADE,
        '("scale", "softcap", "backend"',
        '("scale", "backend"',
        ON_CASCADE,
    ),
    Fault(
        "cascade: a prefix without scale",
        CASCADE,
        '("scale", "softcap", "backend"',
        '("softcap", "backend"',
        ON_CASCADE,
    ),
    Fault("cascade: one plan for all prefixes", CASCADE, "prefix.tokens, prefix.pages.tobytes(), ", "", ON_CASCADE),
    Fault(
        "cascade: plans outlive the choice of a backend",
        CASCADE,
        "prefix.pages.tobytes(), dispatch.state()",
        "prefix.pages.tobytes()",
        ON_CASCADE,
    ),
    Fault(
        "cascade: the rest of another step",
        CASCADE,
        "(version, rows), self._number + 1",
        "(version, rows), self._number",
        ON_CASCADE,
    ),
    Fault("cascade: windows have prefixes", CASCADE, 'options.get("window") is not None or', "", ON_CASCADE),
    Fault(
        "cascade: rows of a head do not count",
        CASCADE,
        "tokens >= rows * least_tokens",
        "tokens >= least_tokens",
        ON_CASCADE,
    ),
    Fault("cascade: the first reader saves too", CASCADE, "(len(at) - 1) * tokens", "len(at) * tokens", ON_CASCADE),
    Fault(
        "cascade: sequences keep the order of heads",
        CASCADE,
        "return out.swapaxes(0, 1).reshape(",
        "return out.reshape(",
        ON_CASCADE,
    ),
)

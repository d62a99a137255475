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
    Fault("a shared page is written", PAGES, "if references[page] > 1:", "if False:"),
    Fault(
        "a copied page keeps its reference",
        PAGES,
        "                references[page] -= 1\n                copied",
        "                copied",
    ),
    Fault("a fork holds no reference", PAGES, "references[own[own >= 0]] += 1", "pass"),
    Fault("a fork begins at 0", PAGES, "first[into] = first[i]", "pass"),
    Fault(
        "pages are not counted before",
        PAGES,
        "        if len(rows) > room:\n            raise",
        "        if len(rows) > room + 1:\n            raise",
    ),
    Fault("pages behind a window do not count", PAGES, "room = len(dropped.free)", "pass"),
    Fault(
        "pages behind a window are taken first",
        PAGES,
        "        room = len(self.free)  #",
        "        room = len(dropped.free)  #",
    ),
    Fault(
        "an append takes the pages behind the window unannounced",
        PAGES,
        "self if room == len(self.free) else dropped",
        "self",
    ),
    Fault(
        "a window loses a page too many",
        PAGES,
        "np.maximum(self.lengths - self.left - self.rollback, 0) // self.page",
        "-(-np.maximum(self.lengths - self.left - self.rollback, 0) // self.page)",
    ),
    Fault("a margin is not held", PAGES, "self.lengths - self.left - self.rollback", "self.lengths - self.left"),
    Fault(
        "cheap steps after a fork or a trim",
        PAGES,
        "longest=int(lengths.max()), spare=0)",
        "longest=int(lengths.max()))",
    ),
    Fault(
        "cheap steps into the next page", PAGES, "int((-grown % self.page).min())", "int((-grown % self.page).max())"
    ),
    Fault("cheap steps of any counts", PAGES, "if each and self.spare:", "if self.spare:"),
    Fault("changes of pages are not seen", PLANS, "if self._table_of is not table:", "if self._table_of is None:"),
    Fault("a table changes in place", PAGES, "            return self.table.copy()", "            return self.table"),
    Fault(
        "a refused call leaves the lengths of its plan",
        PLANS,
        "        self._filled = None\n        self._lengths",
        "        self._lengths",
    ),
    Fault(
        "writers of another layout", LAYER, "key = arrays.layout(k), arrays.layout(v), layout", "key = k.shape, v.shape"
    ),
    Fault("trim keeps the last page", PAGES, "columns >= -(-left // self.page)", "columns > -(-left // self.page)"),
    Fault("a freed window begins later", PAGES, "if left == 0 and self.first[i]:", "if False:"),
    Fault("the table is a column short", PAGES, "1 << (columns - 1).bit_length()", "1 << columns.bit_length() - 1"),
    Fault("lengths change in place", PAGES, "lengths = self.lengths.copy()", "lengths = self.lengths"),
    Fault("pages are not copied", STEPS, "pool[:, copy.target] = pool[:, copy.source]", "pass"),
    Fault(
        "one pool's pages are copied",
        STEPS,
        "for pool in self.memory:\n                pool[:, copy",
        "for pool in self.memory[:1]:\n                pool[:, copy",
    ),
    Fault("a later layer's counts are not compared", LAYER, "not np.array_equal(counts, step.counts)", "False"),
    Fault(
        "a layer may append twice",
        STEPS,
        "if missing and not missing >> layer & 1:",
        "if False:",
    ),
    Fault(
        "a layer attends before it appends",
        STEPS,
        "if self.state.missing >> layer & 1:\n            raise",
        "if False:\n            raise",
    ),
    Fault("forks in the middle of a step", STEPS, "if missing := self.state.missing:", "if missing := 0:"),
    Fault(
        "a step is published before it is written",
        LAYER,
        "            steps.copy_pages(copy)",
        "            steps.publish(state)\n            steps.copy_pages(copy)",
    ),
    Fault("two calls at a time", STEPS, 'if users.setdefault("call", me) is not me:', "if False:"),
    Fault("keep moves keys alone", STEPS, "(self.memory, values, strict=True)", "(self.memory[:1], values)"),
    Fault("a fork has no draft", CACHE, "settled[target] = settled[i]", "pass"),
    Fault(
        "older queries than the window has keys for",
        LAYER,
        "(late := (seen < begin) & (counts > 0)).any()",
        "(late := seen < 0).any()",
    ),
    Fault("a short table of angles", STEPS, "end > len(table.cos)", "end > len(table.cos) + 1"),
    Fault(
        "positions of a step begin at 0",
        STEPS,
        "np.repeat(before - offsets[:-1], counts)",
        "np.repeat(-offsets[:-1], counts)",
    ),
    Fault("lengths can be written", CACHE, "return array.copy() if isinstance", "return array if isinstance"),
    Fault(
        "a device's arrays are new",
        STEPS,
        "            lengths[...] = self.xp.asarray(pages.lengths)",
        "            lengths = self.xp.asarray(pages.lengths)",
    ),
    Fault(
        "dropped pages are not readable",
        STEPS,
        "table if self.state.pages.left is None else self.xp.maximum(table, 0)",
        "table",
    ),
    Fault("a wider window than the cache's", LAYER, "left is None or left > own[0]", "left is None"),
    Fault(
        "the window is not applied",
        LAYER,
        "    if window is None:\n        return own",
        "    if window is None:\n        return None, None",
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
        "q = self._rotated(q.swapaxes(0, 1)[None], rotation, step)[0].swapaxes(0, 1)",
        "pass",
    ),
    Fault(
        "one table for all",
        LAYER,
        "if self._table is not None and self._table[0] == key:",
        "if self._table is not None:",
    ),
    Fault("trims behind the window", CACHE, "max(length - int(n) - (pages.left or 0), 0) < first", "False"),
    Fault("forks into tokens", CACHE, "        if pages.lengths[target]:\n", "        if False:\n"),
    Fault(
        "plans without their options",
        PLANS,
        "arrays.layout(q), values, tuple([type(x) for _, x in values]), self._keys",
        "arrays.layout(q), self._keys",
    ),
    Fault("plans without the backend", PLANS, "self._keys, dispatch.state()", "self._keys"),
    Fault("plans for any length", PLANS, "in values]), self._keys,", "in values]),"),
    Fault("lengths of the last step", PLANS, "if self._filled is not pages:", "if self._filled is None:"),
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
    Fault("slots of another size", KERNEL, "slot // a[PAGE], slot % a[PAGE]", "slot // a[PAGE], slot % (a[PAGE] + 1)"),
    Fault("positions of the first sequence", KERNEL, "position = where[b * tokens + n]", "position = where[n]"),
    Fault("slots outside the pages", KERNEL, "if slot < 0 or slot >= a[SLOTS]:", "if slot < 0 or slot > a[SLOTS]:"),
    Fault("negative slots", KERNEL, "if slot < 0 or slot", "if slot"),
    Fault("positions outside the table", KERNEL, "position >= a[ROWS]:", "position > a[ROWS]:"),
    Fault("the expression's sign", APPLY, "table.sin[positions] * sign", "table.sin[positions]"),
    Fault("positions on a device are not clamped", APPLY, "xp.clip(whole, 0, max(rows - 1, 0), out=whole)", "whole"),
    Fault("a position behind the table", APPLY, "if low < 0 or high >= most:", "if low < 0 or high > most:"),
    Fault("a negative position", APPLY, "if low < 0 or high", "if high"),
    Fault("an overlapping out", APPLY, "can_write(own, x, table.cos, table.sin)", "can_write(own)"),
    Fault(
        "a linear factor",
        TABLES,
        '_plain(dims, base) / scaling.take("factor")',
        '_plain(dims, base) * scaling.take("factor")',
    ),
    Fault("a scaling by one position too few", APPLY, "longest = int(where.max()) + 1", "longest = int(where.max())"),
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
    Fault("cascade: queries lie in the prefix", CASCADE, "lengths[at] - MAX_TOKENS, 0", "lengths[at], 0", ON_CASCADE),
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
        "cascade: the prefixes of another step",
        CASCADE,
        "if self._prefixes_for[0] is not pages or",
        "if self._found[0] is None or",
        ON_CASCADE,
    ),
    Fault(
        "cascade: the first prefix alone has the backend",
        CASCADE,
        'tensors, options.get("backend"), True)',
        'given, options.pop("backend", None), True)',
        ON_CASCADE,
    ),
    Fault("cascade: windows have prefixes", CASCADE, 'options.get("window") is not None or', "", ON_CASCADE),
    Fault(
        "cascade: rows of a head do not count",
        CASCADE,
        "tokens >= rows * min_tokens",
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

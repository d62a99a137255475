"""Random calls, as choices of tests/cases.py.

What kernels and generated functions are compiled for comes from a pool, which a run draws first, so that a run of many
calls compiles little. Everything else is drawn for each call.
"""

from random import Random
from typing import Any

import cases

Choice = dict[str, str]

COMPILED = ("dtype", "causal", "window", "softcap", "alibi", "bias", "mask", "block_mask", "score_mod", "mask_mod")
"""Factors that every backend compiles code for."""

COMPILED_CUDA = ("heads", "dims", "sequences", "kv_lengths", "dropout", "sinks", "deterministic")
"""Factors that kernels for a CUDA device are compiled for besides."""

ON_CPU = ("cpu", "reference")
"""Backends that take NumPy's arrays."""

ROUTES = ("vjp", "attention", "plan")
"""How a call is repeated; its bits must be the same."""

_BATCH = {"sequences": "batch", "data": "normal"}
ENTRIES: dict[str, Choice] = {
    "merge": _BATCH | {"block_mask": "no", "score_mod": "no", "mask_mod": "no", "dropout": "no"}, "weights": _BATCH,
    "rotary": _BATCH, "cache": _BATCH, "pages": _BATCH, "codes": {"data": "normal"}, "derivatives": {"data": "normal"},
}  # fmt: skip
"""Public functions that are called instead of attention, and what they do not take; see entries.py."""

ENTRIES_CUDA = ("codes", "derivatives")
"""Those for arrays on a GPU."""

HOSTILE = ("contents", "integers", "forms", "exchange", "writer", "overlap", "numbers", "signals")
"""What happens to the arguments of a hostile call; see hostile.py."""

MAX_SCORES = 100_000
"""Of most calls."""

MAX_ELEMENTS = 4_000_000
"""Of q."""


def pool(seed: int, graphs: int, cuda: bool) -> list[Choice]:
    """What a run compiles code for."""
    made = []
    for number in range(graphs):
        r = Random(f"{seed} graph {number}")
        row = {"dtype": r.choice(cases.FACTORS["dtype"])}
        for factor in r.sample(COMPILED[1:], r.choice([0, 1, 1, 1, 2, 2, 3, 5, 9])):
            row[factor] = _level(r, factor)
        if row.get("score_mod", "").startswith("random"):  # of a score of -inf it may make NaN, by the definition too
            finite = {"with -inf": "full", "float with -inf": "float"}
            row = {factor: finite.get(level, level) for factor, level in row.items()}
        if cuda:
            row |= {factor: _sizes(r, factor) for factor in COMPILED_CUDA}
            row["sequences"] = possible_form(row)
        made.append(row)
    return made


def possible_form(choice: Choice) -> str:
    """The form of the call's sequences, or the nearest that fits the choice: packed ones have no pairwise arrays."""
    form, pairwise = choice["sequences"], {choice.get("bias", "no"), choice.get("mask", "no")} != {"no"}
    return form.replace("packed", "padded") if pairwise else form


def _level(r: Random, factor: str) -> str:
    """A level other than the plain one."""
    if factor in ("score_mod", "mask_mod") and r.random() < 0.5:
        return f"random {r.randrange(10**6)}"
    if factor == "score_mod" and r.random() < 0.4:
        return "array by array"
    return r.choice(cases.FACTORS[factor][1:])


def _some(r: Random, share: float, levels: list[str], otherwise: str = "no") -> str:
    return r.choice(levels) if r.random() < share else otherwise


def _head_dim(r: Random) -> int:
    kind = r.random()
    if kind < 0.55:
        return r.randint(1, 24)
    if kind < 0.9:
        return max(1, r.choice([16, 32, 48, 64, 80, 96, 128]) + r.choice([-1, 0, 0, 1, 3]))
    return r.randint(1, 512)


def _sizes(r: Random, factor: str) -> str:
    """Levels that are drawn for each call on a CPU."""
    if factor == "heads":
        heads_kv = r.choice([1, 1, 1, 2, 2, 3, 4])
        return f"{heads_kv * r.choice([1, 1, 1, 2, 2, 3, 4, 7])}:{heads_kv}"
    if factor == "dims":
        d = _head_dim(r)
        return str(d) if r.random() < 0.6 else f"{d}/{_head_dim(r)}"
    if factor == "sequences":
        return _some(r, 0.4, ["padded", "packed", "paged", "padded, paged", "packed, paged"], "batch")
    if factor == "kv_lengths":
        return _some(r, 0.3, ["yes", "any", "any"])
    return _some(r, 0.5 if factor == "deterministic" else 0.2, ["yes"])


def _tokens(r: Random, most: int) -> int:
    kind = r.random()
    if kind < 0.02:
        return 0
    if kind < 0.45:
        n = r.randint(1, 33)
    elif kind < 0.8:
        n = r.choice([16, 32, 48, 64, 96, 128, 192, 256]) + r.choice([-2, -1, 0, 1, 1, 2])
    else:
        n = int(2 ** r.uniform(0, 11.5))
    return max(1, min(n, most))


def _storage(r: Random, has_heads: bool, form: str) -> str:
    known = ["gaps", "reversed", "misaligned", "last axis apart"]
    if has_heads:
        known += ["swapped", "shared heads"]
    kinds = ["packed", "strides", "strides", "aliased", r.choice(known)]
    drawn = [_numbered(r, r.choice(kinds)) for _ in "qkvo"]
    of_pools = [_numbered(r, r.choice(["packed", "gaps", "reversed", "swapped", "rows", "rows"])) for _ in "kv"]
    if "packed" in form:  # these are stored once, as rectangles or as one axis of tokens
        drawn = [kind.replace("aliased", "strides").replace("shared heads", "gaps") for kind in drawn]
    if "paged" in form:
        drawn[1:3] = of_pools
    return "/".join(drawn)


def _numbered(r: Random, kind: str) -> str:
    return f"{kind} {r.randrange(10**6)}" if kind in ("strides", "rows", "aliased") else kind


def _layouts(choice: Choice, cuda: bool) -> list[str]:
    """Those that fit the form of the sequences."""
    form = choice["sequences"]
    if "packed" in form:
        return ["bhnd"]
    if "paged" in form:
        return ["bhnd", "bnhd"]
    layouts = [*cases.FACTORS["layout"], "bhnd", "bhnd", "three axes, bnhd", "two axes, bnhd"]
    if cuda and choice["heads"] != "1:1":
        layouts = [layout for layout in layouts if not layout.startswith("two")]
    return layouts


def call(seed: int, number: int, compiled: list[Choice], cuda: bool = False, hostile: float = 0.1) -> Choice:
    """Call `number` of a run. hostile: their share."""
    r = Random(f"{seed} call {number}")
    choice = dict(r.choice(compiled))
    for factor in COMPILED_CUDA:
        choice.setdefault(factor, _sizes(r, factor))
    form = choice["sequences"] = possible_form(choice)
    if form == "packed":
        choice["kv_lengths"] = "no"
    layout = choice["layout"] = r.choice(_layouts(choice, cuda))
    few = layout.startswith(("two", "three"))
    choice["batch"] = "1" if few else str(r.choice([1, 1, 2, 3, 5]))
    if layout.startswith("two"):
        choice["heads"] = "1:1"
    rows = (2 if layout.startswith("five") else 1) * int(choice["batch"]) * int(choice["heads"].partition(":")[0])
    most = int(MAX_SCORES * (1 if r.random() < 0.98 else 10)) // rows
    n_q = r.randint(1, 9) if r.random() < 0.2 else _tokens(r, 1200)  # few: decoding
    n_q = min(n_q, max(1, MAX_ELEMENTS // (rows * max(map(int, choice["dims"].split("/"))))))
    n_k = _tokens(r, max(1, most // max(n_q, 1)))
    if choice.get("block_mask", "no") != "no":
        n_q, n_k = max(n_q, 1), max(n_k, 1)
    choice["sizes"] = f"{min(n_q, max(most, 1))}x{n_k}"
    choice["storage"] = _storage(r, not layout.startswith("two"), form)
    choice["behind"] = r.choice(["numbers", "nan"])
    choice["page"] = str(r.choice([1, 2, 5, 16, 17, 64]))
    choice["arrays"] = _numbered(r, r.choice(["packed", "strides", "strides", "aliased"]))
    choice["out"] = _numbered(r, r.choice(["new", "new", "poisoned", "poisoned, with gaps", "strides"]))
    choice["scale"] = _some(r, 0.2, ["0.3", "-0.5", "0", "1.7"], "default")
    choice["q_offset"] = _some(r, 0.3, ["0", "array", str(r.randint(-300, 300)), "5"], "default")
    choice["dlse"] = _some(r, 0.4, ["yes"])
    choice["data"] = _some(r, 0.15, ["large", "nonfinite"], "normal")
    choice["again"], choice["passes"] = r.choice(ROUTES), r.choice(["both"] * 4 + ["forward"])
    if "paged" in form:  # has no gradients
        choice["again"], choice["passes"] = r.choice(ROUTES[1:]), "forward"
    choice["threads"] = str(r.choice([1, 1, 1, 1, 2, 3]))
    choice["hostile"] = _some(r, hostile, list(HOSTILE))
    if choice["hostile"] == "no" and r.random() < 0.15:
        entry = choice["entry"] = r.choice(ENTRIES_CUDA if cuda else list(ENTRIES))
        choice |= ENTRIES[entry]
    choice["seed"] = str(r.randrange(10**9))
    return choice


OWN = {
    "entry": "attention", "again": "vjp", "passes": "both", "deterministic": "no", "threads": "1", "hostile": "no",
    "seed": "0",
}  # fmt: skip
"""What cases.py does not know, and its plain levels."""

PLAIN: Choice = cases.PLAIN | OWN


def split(choice: Choice) -> tuple[Choice, dict[str, Any]]:
    """A choice for cases.build, and the rest; in one order, since a call's random numbers follow from it."""
    known, own = ({f: choice.get(f, x) for f, x in levels.items()} for levels in (cases.PLAIN, OWN))
    return known, own


PLAIN_GRAPH: Choice = {factor: PLAIN[factor] for factor in COMPILED}
"""No feature that code is generated for."""

"""Random graphs of integers that wrap: whether an index that is taken lies within its array, and the classes of tiles.

The truth is NumPy's int64 at every position of a small call. A graph follows from a seed and a number.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import random_exprs

from flashkit.call.compose import check_indices
from flashkit.mods import Mod, expr
from flashkit.mods.expr import Expr
from flashkit.mods.ranges import RangeTable

BATCH, HEADS, N_Q, N_K = 2, 2, 7, 9
OFFSETS = [0, -5, 3, 2**31, 2**48 - 20, -(2**48)]
MOST = 2**62
"""Elements of an array, none of which takes memory."""


def positions(offsets: np.ndarray) -> dict[str, Any]:
    """At all pairs of the call."""
    b, h, row, k = np.ogrid[:BATCH, :HEADS, :N_Q, :N_K]
    return {"b": b, "h": h, "row": row, "q": row + offsets[:, None, None, None], "k": k}


def is_taken(mod: Mod, offsets: np.ndarray, elements: int) -> bool:
    """Whether a call takes the modification with a `table` of so many elements."""
    table = np.broadcast_to(np.int8(0), (elements,))
    try:
        check_indices(replace(mod, arrays={**mod.arrays, "table": table}), BATCH, HEADS, N_Q, N_K, offsets, offsets)
    except ValueError:
        return False
    return True


def evaluate(graphs: Sequence[Expr], env: dict[str, Any]) -> list[Any]:
    """As codegen.evaluate, by the same text of each operation; compiling the text of a graph takes longer than this."""
    known: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for node in expr.walk(graphs):
            args = [known[a] for a in node.args]
            if node.op == "const":
                known[node] = {"int": np.int64, "bool": np.bool_, "float": np.float64}[node.kind](node.value)
            elif node.op in ("symbol", "param"):
                known[node] = np.asarray(env[node.value], np.int64)[()]
            elif node.op == "load":
                known[node] = np.asarray(env[node.value][tuple(args)]).astype(np.int64)
            elif node.op in ("load_min", "load_max"):
                known[node] = env[node.value].bounds(node.op == "load_max", args)
            else:
                known[node] = MEANING[node.op](*args)
    return [known[graph] for graph in graphs]


MEANING: dict[str, Callable[..., Any]] = {
    op: eval(f"lambda x=None, y=None, z=None: {row.numpy.format('x', 'y', 'z')}", {"np": np, "F": np.float64})
    for op, row in expr.OPS.items()
}
TABLES = {name: RangeTable(array) for name, array in random_exprs.WIDE_ARRAYS.items()}


def check_index(r: Random, whole: bool = True) -> tuple[str, bool]:
    """(what is wrong, whether the index has bounds). whole: what refuses a call is asked as well."""
    mod, offsets = random_exprs.wide_score(r), np.array(r.choices(OFFSETS, k=BATCH))
    (index,) = next(node.args for node in expr.walk([mod.expr]) if node.op == "load" and node.value == "table")
    (values,) = evaluate([index], {**positions(offsets), **mod.params, **mod.arrays})
    least, greatest = int(np.min(values)), int(np.max(values))
    what = f"{least} to {greatest}, of offsets {offsets}: {index}"
    if whole:
        elements = MOST if least < 0 else min(greatest, MOST)  # too few, if there are any
        if elements and (least < 0 or greatest >= elements) and is_taken(mod, offsets, elements):
            return f"an array of {elements} elements is taken at {what}", False
    if (bounds := expr.bounds(index)) is None:
        return "", False
    ends = {"row0": 0, "row1": N_Q - 1, "q0": offsets[:, None], "q1": offsets[:, None] + N_Q - 1}
    entries = {"b": np.arange(BATCH)[:, None], "h": np.arange(HEADS)}
    low, high = evaluate(bounds, {**ends, **entries, "k0": 0, "k1": N_K - 1, **mod.params, **TABLES})
    low, high = int(np.min(low)), int(np.max(high))
    if not low <= least <= greatest <= high:
        return f"bounds {low} and {high} do not hold {what}", False
    return "", expr.INT64[0] < low or high < expr.INT64[1]


def _rectangles() -> np.ndarray:
    """(first row, last row, first key, last key) of tiles: the whole call, single pairs and what lies between."""
    r = Random(3)
    pairs = lambda n: sorted((r.randrange(n), r.randrange(n)))
    return np.array([(0, N_Q - 1, 0, N_K - 1), *((*pairs(N_Q), *pairs(N_K)) for _ in range(60))]).T


RECTANGLES = _rectangles()


def check_mask(r: Random) -> tuple[str, bool]:
    """(what is wrong, whether a tile of several pairs is EMPTY or FULL)."""
    mod, offsets = random_exprs.wide_mask(r), np.array(r.choices(OFFSETS, k=BATCH))
    (values,) = evaluate([mod.expr], {**positions(offsets), **mod.params, **mod.arrays})
    seen = np.zeros((BATCH, HEADS, N_Q + 1, N_K + 1), np.int64)
    seen[..., 1:, 1:] = np.broadcast_to(values, (BATCH, HEADS, N_Q, N_K)).cumsum(2).cumsum(3)
    row0, row1, k0, k1 = RECTANGLES
    pairs = (row1 - row0 + 1) * (k1 - k0 + 1)
    visible = seen[..., row1 + 1, k1 + 1] - seen[..., row0, k1 + 1] - seen[..., row1 + 1, k0] + seen[..., row0, k0]
    b, h, offset = np.arange(BATCH)[:, None, None], np.arange(HEADS)[:, None], offsets[:, None, None]
    corners = {"row0": row0, "row1": row1, "q0": row0 + offset, "q1": row1 + offset, "k0": k0, "k1": k1}
    narrow = expr.int32_arrays({name: array.dtype for name, array in mod.arrays.items()})
    states = evaluate(expr.classify(mod.expr, narrow), {**corners, "b": b, "h": h, **mod.params, **TABLES})
    empty, full = (np.broadcast_to(state, visible.shape) for state in states)
    wrong = (empty & (visible > 0)) | (full & (visible < pairs))
    if wrong.any():
        at = np.argwhere(wrong)[0]
        return f"tile {RECTANGLES[:, at[2]]} of entry and head {at[:2]}, of offsets {offsets}: {mod}", False
    return "", bool(((empty | full) & (pairs > 1)).any())


WHOLE = 16
"""Of so many indices one is given to what refuses calls; the others' bounds are looked at alone."""


def checked(seed: int, first: int, last: int) -> Iterator[dict[str, Any]]:
    """Each graph of these numbers, as an index and as two masks; whether something is proven about it, and findings."""
    for number in range(first, last):
        index = partial(check_index, whole=number % WHOLE == 0)
        for kind, check in (("index", index), ("mask", check_mask), ("another mask", check_mask)):
            problem, proven = check(Random(f"{seed} {number} {kind}"))
            yield {"seed": seed, "number": number, "kind": kind, "problem": problem, "proven": proven}

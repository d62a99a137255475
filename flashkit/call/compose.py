"""The modifications of a call as one score graph and one mask graph, the check of their indices, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .. import mods
from ..mods import Mod, codegen, expr
from ..mods.expr import INT64, Expr
from ..mods.ranges import tables
from ..mods.tracing import values_of
from ..spec import AttentionSpec, Operands, Slot
from . import arrays


def compose(
    scores: dict[str, Mod], masks: Sequence[Mod]
) -> tuple[Expr | None, Expr | None, tuple[Slot, ...], dict[str, Any], dict[str, Any], dict[str, str]]:
    """Score and mask graph, their slots, values of these (params, arrays), and slots of scores by `Operands.names`."""
    if not scores and not masks:
        return None, None, (), {}, {}, {}
    score, mask, named = _compose_graphs(tuple(m.expr for m in scores.values()), tuple(m.expr for m in masks))
    every, options = (*scores.values(), *masks), tuple(scores)
    slots, params, values, names = [], {}, {}, {}
    for index, old, new, kind, ndim in named:
        mod = every[index]
        if index < len(options):
            names[f"score.{old}" if options[index] == "score_mod" else options[index]] = new
        if ndim is None:
            params[new] = mod.params[old]
            slots.append(Slot(new, kind))
        else:
            values[new] = mod.arrays[old]
            slots.append(Slot(new, kind, ndim, values[new].dtype.name))
    return score, mask, tuple(slots), params, values, names


MAX_NODES = 1000
"""Operations, positions and constants of a call's modifications: compiling takes about 10 ms for each."""


@lru_cache(maxsize=1024)
def _compose_graphs(
    scores: tuple[Expr, ...], masks: tuple[Expr, ...]
) -> tuple[Expr | None, Expr | None, tuple[tuple[int, str, str, Any, int | None], ...]]:
    """The graphs joined. Slots are named by their order, so that calls with equal features have equal graphs."""
    named: list[tuple[int, str, str, Any, int | None]] = []
    renamed = []
    for index, graph in enumerate((*scores, *masks)):
        names: dict[str, str] = {}
        for node in expr.walk([graph]):
            if node.op in ("param", "load") and node.value not in names:
                names[node.value] = f"v{len(named)}"
                named.append(
                    (index, node.value, names[node.value], node.kind, len(node.args) if node.op == "load" else None)
                )
        renamed += expr.rename([graph], names)
    score: Expr = expr.S
    for graph in renamed[: len(scores)]:
        score = mods.after(score, graph)
    visible = expr.TRUE
    for graph in renamed[len(scores) :]:
        visible = visible & graph
    count = len(expr.walk([score, visible]))
    if count > MAX_NODES:
        raise ValueError(
            f"modifications: expected at most {MAX_NODES} different operations, which compile in reasonable time, got "
            f"{count}; pass numbers in an array by name, which takes a few operations"
        )
    return None if score is expr.S else score, None if visible is expr.TRUE else visible, tuple(named)


def is_checked_once(mod: Mod) -> bool:
    """Whether what is checked of a modification is the same for other contents of its arrays."""
    values, indexing = values_of(mod.expr)
    return not indexing and all(ndim is None or kind != "int" for _, ndim, kind in values)


def check_indices(
    mod: Mod, batch: int, heads: int, n_q: Any, n_k: int, least: np.ndarray, greatest: np.ndarray
) -> None:  # fmt: skip
    """ValueError unless every index that a modification computes is within its array, at all positions of the call:
    kernels do not check them. An index that may overflow can be any int64, unless clip() or % bounds it.

    n_q may be (B,). least, greatest: (B,), the range of each batch entry's q_offset.
    """
    loads = [node for node in expr.walk([mod.expr]) if node.op == "load"]
    if not loads or 0 in (batch, heads, np.max(n_q, initial=0), n_k):
        return
    last_row = np.maximum(np.broadcast_to(n_q, (batch,)), 1)[:, None] - 1
    env: dict[str, Any] = {
        "b": np.arange(batch)[:, None], "h": np.arange(heads), "row0": 0, "row1": last_row, "k0": 0, "k1": n_k - 1,
        "q0": least[:, None], "q1": greatest[:, None] + last_row, **mod.params,
    }  # fmt: skip
    # Arrays that indices are read from. Reading one on a device synchronizes, as the bounds check requires.
    read = {inner.value for node in loads for inner in expr.walk(node.args) if inner.op == "load"}
    env |= tables({name: mod.arrays[name] for name in read})
    for node in loads:
        array = mod.arrays[node.value]
        for axis, index in enumerate(node.args):
            n, bounds = array.shape[axis], expr.bounds(index)
            low, high = (0, n) if bounds is None else _extremes(bounds, env)
            if low < 0 or high >= n:
                reach = f"runs from {low} to {high}"
                if bounds is None:
                    reach = "cannot be bounded"
                elif INT64[0] == low or INT64[1] == high:
                    reach += " (it may overflow, or its bounds do)"
                raise ValueError(
                    f"{mod.kind}_mod: expected an index from 0 to {n - 1} of axis {axis} of {node.value} (shape "
                    f"{array.shape}), got one that {reach}; use {node.value}[clip(index, 0, {n - 1})]"
                )


def _extremes(bounds: tuple[Expr, Expr], env: dict[str, Any]) -> tuple[int, int]:
    low, high = (np.asarray(codegen.evaluate(bound, env)) for bound in bounds)
    return int(low.min()), int(high.max())


def modified(spec: AttentionSpec, operands: Operands, b: int, s: Any) -> tuple[Any, Any]:
    """The scores (Hq, Nq, Nk) of a batch entry, modified, and which pairs are visible; neither packed nor paged."""
    xp: Any = arrays.namespace("numpy" if isinstance(s, np.ndarray) else "cupy")
    heads, n_q, n_k = s.shape
    row, keys = xp.arange(n_q)[:, None], xp.arange(n_k)
    env = {"s": s, "b": b, "h": xp.arange(heads)[:, None, None], "row": row, "q": row + operands.q_offset[b], "k": keys}
    visible = xp.ones(s.shape, bool) & (keys < operands.kv_lengths[b])
    env |= operands.params | operands.arrays
    if spec.mask is not None:
        visible = visible & codegen.evaluate(spec.mask, env, s.dtype)
    return s if spec.score is None else codegen.evaluate(spec.score, env, s.dtype), visible

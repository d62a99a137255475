"""Statistics of the weights of a call: the entropy and the largest logit of each row, which kernels compute beside the
output, and the weight of each key.

The weight of key j is the sum of exp(S_ij - lse_i) over the queries i: the normaliser of another attention, in which
keys and queries change places and -lse is one more bias. So a second forward pass computes it as its log-sum-exp, with
the same kernels and masks, without values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import dispatch
from ..errors import shown
from ..mods import expr
from ..mods.expr import Array, Expr
from ..spec import AttentionSpec, Operands, Problem, Slot, Stats, Tokens
from . import arrays
from .arguments import Prepared, prepare
from .call import Call
from .planned import Once
from .plans import plan_with

STATISTICS = "entropy", "key_weight", "max_logit"

_VALUE_COLUMNS = 8  # of the values, which are never read: the fewest that all kernels take


def names_of(return_stats: Any) -> tuple[str, ...]:
    """The statistics asked for, checked."""
    known = ", ".join(map(repr, STATISTICS))
    if not isinstance(return_stats, tuple | list):
        raise TypeError(f"return_stats: expected a tuple of {known}, got {shown(return_stats)}")
    for name in return_stats:
        if not isinstance(name, str) or name not in STATISTICS:
            raise ValueError(f"return_stats: expected {known}, got {shown(name)}")
    return tuple(return_stats)


def with_statistics(call: Call, backend: str | None, names: tuple[str, ...]) -> tuple[Any, ...]:
    """out, lse and the statistics of these names, native ones."""
    call.dequantise()
    call.require_arrays()
    made = partial(_prepared, call, "entropy" in names or "max_logit" in names)
    if "key_weight" in names:
        planned: Any = Once(made(), backend, True)
    else:
        planned = plan_with(call, backend, dict.fromkeys(Stats._fields), made)
    if not isinstance(planned, Once):
        found = {name: planned.like_lse() for name in Stats._fields}
        out, lse = planned.run_on(call.q, call.k, call.v, None, *call.per_call.arrays, *found.values())
        return out, lse, *(found[name] for name in names)
    out, lse = planned.run(call)
    problem, operands, shape = planned.problem, planned.operands, planned.shape
    found = {} if operands.stats is None else {name: shape.rows(x) for name, x in operands.stats._asdict().items()}
    if "key_weight" in names:
        weight = key_weight(problem, operands, backend)
        found["key_weight"] = weight if problem.spec.paged and problem.spec.packed else shape.rows(weight)
    return out, lse, *(found[name] for name in names)


def _prepared(call: Call, has_stats: bool) -> Prepared:
    """The call, prepared, with arrays for the statistics of its rows if it has these."""
    prepared = prepare(call.q, call.k, call.v, out=call.out, **call.options)
    if not has_stats:
        return prepared
    problem, operands, _ = prepared
    xp: Any = arrays.namespace(problem.array_kind)
    operands.stats = Stats(*(xp.empty(operands.lse.shape, operands.lse.dtype) for _ in range(2)))
    return prepared._replace(problem=replace(problem, spec=replace(problem.spec, stats=True)))


def key_weight(problem: Problem, operands: Operands, backend: str | None) -> Any:
    """The weight of each key for each query head, (B, Hq, Nk), given operands.lse of a forward pass."""
    spec, xp, lengths = problem.spec, arrays.namespace(problem.array_kind), operands.kv_lengths
    keys, entries = _gathered(xp, operands, problem.n_k), len(operands.k)
    if spec.paged:
        entries = len(operands.page_table)
        lengths = lengths[:entries]
    room = keys.shape[2]
    offsets: tuple[Any, Any] | None = None
    if spec.packed:
        offsets, keys = _exchanged(xp, operands, keys)
    result = xp.zeros(keys.shape[:3], operands.lse.dtype)
    if 0 not in (result.size, operands.lse.size):
        swapped, exchanged = _swapped(problem, operands, keys, offsets, result)
        chosen, plan = dispatch.plan(swapped, backend)
        chosen.forward(plan, exchanged)
        xp.exp(result, out=result)
    if spec.paged and spec.packed:
        result = result.reshape((result.shape[1], entries, room)).swapaxes(0, 1)
    if spec.kv_lengths and (spec.paged or not spec.packed):
        exist = xp.arange(room) < xp.asarray(lengths)[:, None]
        result = xp.where(exist[:, None], result, result.dtype.type(0))
    return result


def _gathered(xp: Any, operands: Operands, most: int) -> Any:
    """The keys of each query head, (B, Hq, Nk, D); in pages as many as the longest sequence has."""
    keys = operands.k
    if operands.page_table is not None:
        table = xp.clip(operands.page_table, 0, len(keys) - 1)
        entries, (heads, page, d) = len(table), keys.shape[1:]
        keys = keys[table].swapaxes(1, 2).reshape((entries, heads, table.shape[1] * page, d))[:, :, :most]
    group = operands.q.shape[1] // max(keys.shape[1], 1)
    return keys if group == 1 else xp.repeat(keys, group, axis=1)


def _exchanged(xp: Any, operands: Operands, keys: Any) -> tuple[tuple[Any, Any], Any]:
    """Where packed sequences begin in the keys and in the queries, and the keys packed."""
    assert operands.cu_seqlens is not None
    of_q, of_k = operands.cu_seqlens
    if of_k is None:  # each sequence has all that its pages have room for
        entries, heads, room, d = keys.shape
        of_k = xp.minimum(xp.arange(entries + 2), entries) * room
        keys = keys.swapaxes(0, 1).reshape((1, heads, entries * room, d))
    of_q, of_k = xp.array(of_q), xp.array(of_k)
    of_q[-1:], of_k[-1:] = of_q[-2:-1], keys.shape[2]  # keys behind the last sequence see no query
    return (of_k, of_q), keys


def _swapped(
    problem: Problem, operands: Operands, keys: Any, offsets: tuple[Any, Any] | None, lse: Any
) -> tuple[Problem, Operands]:
    """The call in which keys ask and queries answer, biased by -lse of `operands`; it writes its own to `lse`."""
    spec, q, xp = problem.spec, operands.q, arrays.namespace(problem.array_kind)
    entries = problem.batch
    values = q[..., : min(_VALUE_COLUMNS, spec.head_dim)]
    own = operands.lse
    # An empty row counts for no key: its bias is -inf, and not +inf.
    taken = {"lse": xp.where(own == -np.inf, own.dtype.type(np.inf), own)}
    slots = [Slot("lse", "float", 3, own.dtype.name)]
    position = expr.K
    if spec.score is not None or spec.mask is not None:
        position = Array("positions", 1, "int")[expr.B] + expr.K
        taken["positions"] = xp.asarray(operands.q_offset, np.int64)
        slots.append(Slot("positions", "int", 1, "int64"))
    of_row = Array("lse", 3, "float")[expr.B, expr.H, expr.K]
    if spec.packed:
        of_row = Array("lse", 3, "float")[0, expr.H, Array("starts", 1, "int")[expr.B] + expr.K]
        taken["starts"] = xp.asarray(offsets[1], np.int64)  # type: ignore[index]
        slots.append(Slot("starts", "int", 1, "int64"))
    new = {id(expr.ROW): expr.K, id(expr.K): expr.ROW, id(expr.Q): position}

    def exchanged(graph: Expr) -> Expr:
        return expr.substitute([graph], lambda node: new.get(id(node), node))[0]

    score = exchanged(expr.S if spec.score is None else spec.score) - of_row
    mask = None if spec.mask is None else exchanged(spec.mask)
    lengths = np.full(entries, problem.n_q) if offsets is None else offsets[1][1:] - offsets[1][:-1]
    read = {node.value for node in expr.walk([score, *([] if mask is None else [mask])]) if node.op == "load"}
    new_spec = AttentionSpec(
        spec.dtype, spec.head_dim, values.shape[-1], 1, score, mask,
        (*spec.slots, *(slot for slot in slots if slot.name in read)), kv_lengths=spec.packed,
        deterministic=spec.deterministic, precision=spec.precision, packed=spec.packed,
    )  # fmt: skip
    tokens = Tokens(keys.shape[2], q.shape[2], keys.shape[2] * problem.n_q) if spec.packed else None
    swapped = Problem(new_spec, entries, problem.heads, problem.n_k, problem.n_q, problem.array_kind, tokens)
    out = xp.empty((*keys.shape[:3], values.shape[-1]), q.dtype)
    return swapped, Operands(
        keys, q, values, operands.scale, np.zeros(entries, np.int64), lengths, operands.params,
        operands.arrays | {name: x for name, x in taken.items() if name in read}, out=out, lse=lse,
        cu_seqlens=offsets,
    )  # fmt: skip

"""The steps of attention on tiles, under the names that they have in every backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..mods import dropout, expr
from .heads import FULL, Head, load_tile

quiet = np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore")  # log(0) and inf - inf occur


def scores(q: np.ndarray, k: np.ndarray, scale: Any) -> np.ndarray:
    """S = scale * q k^T, (rows, keys)."""
    return matmul(q, k.T) * scale


def modify(head: Head, s: np.ndarray, rows: slice, keys: slice, state: int = 1) -> np.ndarray:
    """The score modification, then -inf where the mask hides a key. A FULL tile has no hidden pair."""
    if head.spec.score is not None:
        s = head.evaluate(head.spec.score, rows, keys, s)
    if head.spec.mask is not None and state != FULL:
        s = select(head.evaluate(head.spec.mask, rows, keys), s, otherwise=-np.inf)
    return s


def softmax(s: np.ndarray, sink: Any) -> tuple[np.ndarray, np.ndarray]:
    """(P, lse) of each row. The sink is one more logit in the sum, without a value."""
    m = np.maximum(row_max(s), sink)
    e = np.exp(s - finite(m)[:, None])
    l = row_sum(e) + np.exp(sink - finite(m))
    p = e / select(l != 0, l, otherwise=1)[:, None]
    return select(s != -np.inf, p), finite(m) + np.log(l)


def online_softmax(s: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, ...]:
    """(P, m_new, l_new, rescale) of one more tile of scores: P = exp(S - m_new), rescale = exp(m_old - m_new)."""
    m_new = np.maximum(m, row_max(s))
    p = np.exp(s - finite(m_new)[:, None])
    rescale = np.exp(m - finite(m_new))
    return p, m_new, rescale * l + row_sum(p), rescale


def accumulate(o_acc: np.ndarray, rescale: np.ndarray, p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """o_acc relative to the new row_max, plus P v."""
    return o_acc * rescale[:, None] + weighted_sum(p, v)


def epilogue(o_acc: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(O, lse) of rows that have seen all their keys."""
    return o_acc / select(l != 0, l, otherwise=1)[:, None], finite(m) + np.log(l)


def initial(head: Head, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(o_acc, m, l) of rows that have seen no key: the sink is their first logit."""
    m = np.full(rows.stop - rows.start, head.sink)
    return np.zeros((m.size, head.spec.head_dim_v), head.dtype), m, np.exp(m - finite(m))


def drop(head: Head, x: np.ndarray, rows: slice, keys: slice) -> np.ndarray:
    """Dropout of P, or of dP: dropped elements become 0, kept ones are multiplied by 1 / (1 - dropout_p)."""
    if not head.spec.dropout:
        return x
    operands, row, key = head.operands, np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
    keep = dropout.keep(operands.seed, operands.dropout_p, head.b, head.h, row[:, None], key)
    return select(keep, x / x.dtype.type(1 - operands.dropout_p))


# --- backward ---------------------------------------------------------------------------------------------------------


def recompute_p(s: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """P = exp(S - lse), from modified scores and the lse of the forward pass."""
    return select(s != -np.inf, np.exp(s - finite(lse)[:, None]))


def row_delta(head: Head, do: np.ndarray, rows: slice) -> np.ndarray:
    """delta = rowsum(dO * O) - dlse. dlse belongs here since d lse / dS = P, and dS = P * (dP - delta)."""
    delta = row_sum(do * load_tile(head, "out", rows))
    return delta - load_tile(head, "dlse", rows) if "dlse" in head.memory else delta


def tile_gradients(
    head: Head, q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray,
    s: np.ndarray, p: np.ndarray, delta: np.ndarray, rows: slice, keys: slice,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """What a tile adds to (dq, dk, dv): dS = P * (dP - delta). s: scores before modification; p: P before dropout."""
    dp = drop(head, matmul(do, v.T), rows, keys)
    ds = p * (dp - delta[:, None])
    add_value_gradients(head, s, p, ds, rows, keys)
    if head.spec.score is not None:
        ds = ds * head.evaluate(expr.derivative(head.spec.score), rows, keys, s)
    ds = select(p != 0, ds) * head.scale
    return weighted_sum(ds, k), weighted_sum(ds.T, q), weighted_sum(drop(head, p, rows, keys).T, do)


def add_value_gradients(head: Head, s: np.ndarray, p: np.ndarray, ds: np.ndarray, rows: slice, keys: slice) -> None:
    """What a tile adds to the gradients by the values that the score modification reads."""
    values = head.values or {}
    for read in head.spec.reads if values else ():
        index = tuple(head.evaluate(i, rows, keys) for i in read.indices)
        terms = select(p != 0, ds * head.evaluate(read.slope, rows, keys, s))
        np.add.at(values[read.name], index, terms if index else terms.sum())


def add_sink_gradient(head: Head, dsinks: np.ndarray | None, lse: np.ndarray, delta: np.ndarray) -> None:
    """P of the sink is exp(sink - lse), and its dP is 0, since it has no value."""
    if dsinks is not None and head.sink != -np.inf:
        dsinks[head.h] -= row_sum(np.exp(head.sink - lse) * delta)


# --- arithmetic in which masked elements have no effect ---------------------------------------------------------------


def select(condition: Any, x: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """x where the condition holds, else the number."""
    return np.where(condition, x, x.dtype.type(otherwise))


def finite(m: np.ndarray) -> np.ndarray:
    """m, with 0 for -inf: exp(s - m) of a row that has seen no key is then exp(-inf - 0) = 0, not NaN."""
    return select(m != -np.inf, m)


def row_max(s: np.ndarray) -> np.ndarray:
    return s.max(axis=1, initial=s.dtype.type(-np.inf))


def row_sum(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis; 16-bit dtypes are accumulated in float32 and rounded once."""
    return x.sum(axis=-1, dtype=x.dtype if x.dtype.itemsize >= 4 else np.float32).astype(x.dtype)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in their dtype, accumulated as in `row_sum`."""
    if a.dtype.itemsize >= 4:
        return a @ b
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)


def weighted_sum(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """w @ x, in which a weight of 0 skips a row of x whatever it holds: 0 * NaN and 0 * inf count as 0."""
    is_finite = np.isfinite(x).all(axis=1)
    if is_finite.all():
        return matmul(w, x)
    total = matmul(w[:, is_finite], x[is_finite])
    for j in np.flatnonzero(~is_finite):
        total += select(w[:, j : j + 1] != 0, w[:, j : j + 1] * x[j])
    return total

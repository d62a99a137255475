"""The definition of attention, and FlashAttention in plain NumPy. All else in flashkit is tested against this file.

    s = scale * q k^T    s' = modify(s), -inf where a key is hidden    p = softmax(s')    out = p v   lse = log sum e^s'

`standard` computes just that and stores the matrix of scores, Nq x Nk numbers. FlashAttention gives the same result
with one tile of it at a time, because the softmax of a row can be computed piece by piece: of the keys seen so far keep
their greatest score m, the sum l of exp(s' - m) and the sum acc of exp(s' - m) * v. A new tile that raises m multiplies
both sums by exp(m_old - m_new) first. At the end out = acc / l and lse = m + log(l). The backward pass stores no p
either: it computes s' again, tile by tile, and p = exp(s' - lse).

Two loop orders do this. FlashAttention-1 (Dao et al. 2022, arXiv 2205.14135, Algorithms 1 and 4) has the tiles of K and
V in the outer loop, so the running results of all queries are read and written in every round. FlashAttention-2 (Dao
2023, arXiv 2307.08691, Algorithms 1 and 2) has the tiles of Q outside: a result stays in fast memory until it is done,
is divided by l once, and of m and l only lse is saved. Here fast memory is a local variable, slow memory an array
behind `load_tile` and `store_tile`, and `Traffic` counts what moves between the two.

The steps have the same names in every backend: load_tile, scores, modify, online_softmax, accumulate, finish.

At the edges, here and in every backend:
- A row with no visible key has out 0, lse -inf (with a sink: the sink's logit) and gradients 0.
- What is hidden is selected away, never multiplied by 0: NaN and inf in hidden keys or past kv_lengths do not show.
- NaN in a visible input shows in out and lse of the rows that see it, and nowhere else. A score of +inf makes NaN
  of its row (inf - inf).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from .mods import codegen, dropout, expr
from .mods.expr import Expr
from .spec import AttentionSpec, Operands


class Grads(NamedTuple):
    """Gradients by q, k, v and the sinks, in their shapes; dsinks is None where there are no sinks."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None


quiet = np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore")  # log(0) and inf - inf are meant


# --- standard attention: the definition -------------------------------------------------------------------------------


@quiet
def standard(spec: AttentionSpec, operands: Operands, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Attention by its formula: out (B, Hq, Nq, Dv) in `dtype`, and lse (B, Hq, Nq) in float32, or float64 for float64.

    In float64 this is the definition. In another dtype it is the plain computation in that precision, every
    intermediate result rounded to it: the yardstick for the error of a kernel.
    """
    out, lse = _empty_results(spec, operands, dtype)
    for head in chain.from_iterable(groups(spec, operands, dtype)):
        q, k, v = (load_tile(head, name) for name in ("q", "k", "v"))
        s = modify(head, scores(q, k, head.scale), *head.everything)
        p, lse[head.b, head.h] = softmax(s, head.sink)
        out[head.b, head.h] = weighted_sum(drop(head, p, *head.everything), v)
    return out, lse


@quiet
def standard_gradients(
    spec: AttentionSpec, operands: Operands, dout: Any, dlse: Any = None, dtype: Any = np.float64
) -> Grads:
    """Gradients of sum(dout * out) + sum(dlse * lse) by the formulas, in `dtype` throughout."""
    grads = _zero_gradients(spec, operands, dtype)
    for head in chain.from_iterable(groups(spec, operands, dtype, dout=dout, dlse=dlse)):
        q, k, v, do = (load_tile(head, name) for name in ("q", "k", "v", "dout"))
        s = scores(q, k, head.scale)
        p, lse = softmax(modify(head, s, *head.everything), head.sink)
        out = weighted_sum(drop(head, p, *head.everything), v)
        delta = row_sum(do * out) - (load_tile(head, "dlse") if "dlse" in head.memory else 0)
        dq, dk, dv = tile_gradients(head, q, k, v, do, s, p, delta, *head.everything)
        grads.dq[head.b, head.h] = dq
        grads.dk[head.b, head.kv_head, : head.n_k] += dk  # summed over the query heads that share k and v
        grads.dv[head.b, head.kv_head, : head.n_k] += dv
        add_sink_gradient(head, grads.dsinks, lse, delta)
    return grads


def softmax(s: np.ndarray, sink: Any) -> tuple[np.ndarray, np.ndarray]:
    """(p, lse) of each row. The sink is one more logit, which takes its share of the weight and has no value."""
    m = np.maximum(row_max(s), sink)
    e = np.exp(s - finite(m)[:, None])
    l = row_sum(e) + np.exp(sink - finite(m))
    p = e / select(l != 0, l, otherwise=1)[:, None]
    return select(s != -np.inf, p), finite(m) + np.log(l)


# --- the steps --------------------------------------------------------------------------------------------------------


def load_tile(head: Head, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Bring rows of an array from slow to fast memory, in the computing precision."""
    tile = head.memory[name][rows].astype(head.dtype)
    head.traffic.reads[name] += tile.size
    return tile


def store_tile(head: Head, name: str, rows: slice, tile: np.ndarray) -> None:
    """Write rows of an array back to slow memory."""
    head.memory[name][rows] = tile
    head.traffic.writes[name] += tile.size


def scores(q: np.ndarray, k: np.ndarray, scale: Any) -> np.ndarray:
    """s = scale * q k^T, (rows, keys)."""
    return matmul(q, k.T) * scale


def modify(head: Head, s: np.ndarray, rows: slice, keys: slice, state: int = 1) -> np.ndarray:
    """s': the score modification, then -inf where the mask hides a key. A FULL tile has nothing to hide."""
    if head.spec.score is not None:
        s = head.evaluate(head.spec.score, rows, keys, s)
    if head.spec.mask is not None and state != FULL:
        s = select(head.evaluate(head.spec.mask, rows, keys), s, otherwise=-np.inf)
    return s


def online_softmax(s: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, ...]:
    """Take in one more tile of scores: (p, m, l, correction), p = exp(s - m_new), correction = exp(m_old - m_new)."""
    m_new = np.maximum(m, row_max(s))
    p = np.exp(s - finite(m_new)[:, None])
    correction = np.exp(m - finite(m_new))
    return p, m_new, correction * l + row_sum(p), correction


def accumulate(acc: np.ndarray, correction: np.ndarray, p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The sum of weighted values so far, made relative to the new maximum, plus this tile's."""
    return acc * correction[:, None] + weighted_sum(p, v)


def finish(acc: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of rows that have seen all their keys."""
    return acc / select(l != 0, l, otherwise=1)[:, None], finite(m) + np.log(l)


def start(head: Head, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(acc, m, l) of rows that have seen no key yet, only the sink: it comes first and brings no value."""
    m = np.full(rows.stop - rows.start, head.sink)
    return np.zeros((m.size, head.spec.head_dim_v), head.dtype), m, np.exp(m - finite(m))


# --- FlashAttention, forward ------------------------------------------------------------------------------------------


@quiet
def flash_attention_1(
    spec: AttentionSpec, operands: Operands, block_q: int = 64, block_k: int = 64,
    dtype: Any = None, traffic: Traffic | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """K and V outside: a tile of them is read once; out, m, l of all queries pass through slow memory every time.

    (out, lse) as from `standard`, computed in `dtype`: by default float64 for float64 operands, else float32.
    """
    out, lse = _empty_results(spec, operands, dtype or spec.lse_dtype)
    m, l = np.empty_like(lse), np.empty_like(lse)
    for head in chain.from_iterable(groups(spec, operands, out.dtype, traffic, out=out, lse=lse, m=m, l=l)):
        states = tile_states(head, block_q, block_k)
        for rows in blocks(head.n_q, block_q):
            for name, tile in zip(("out", "m", "l"), start(head, rows)):
                store_tile(head, name, rows, tile)
        for j, keys in enumerate(blocks(head.n_k, block_k)):
            k, v = load_tile(head, "k", keys), load_tile(head, "v", keys)
            for i, rows in enumerate(blocks(head.n_q, block_q)):
                if states[i, j] == EMPTY:
                    continue
                q, o_i, m_i, l_i = (load_tile(head, name, rows) for name in ("q", "out", "m", "l"))
                s = modify(head, scores(q, k, head.scale), rows, keys, states[i, j])
                acc = o_i * l_i[:, None]
                p, m_i, l_i, correction = online_softmax(s, m_i, l_i)
                acc = accumulate(acc, correction, drop(head, p, rows, keys), v)
                for name, tile in (("out", finish(acc, m_i, l_i)[0]), ("m", m_i), ("l", l_i)):
                    store_tile(head, name, rows, tile)
        for rows in blocks(head.n_q, block_q):
            m_i, l_i = load_tile(head, "m", rows), load_tile(head, "l", rows)
            store_tile(head, "lse", rows, finite(m_i) + np.log(l_i))
    return out, lse


@quiet
def flash_attention_2(
    spec: AttentionSpec, operands: Operands, block_q: int = 64, block_k: int = 64,
    dtype: Any = None, traffic: Traffic | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Q outside: acc, m, l stay in fast memory; the tiles of K and V are read again for each tile of Q.

    (out, lse) as from `standard`, computed in `dtype`: by default float64 for float64 operands, else float32.
    """
    out, lse = _empty_results(spec, operands, dtype or spec.lse_dtype)
    for head in chain.from_iterable(groups(spec, operands, out.dtype, traffic, out=out, lse=lse)):
        states = tile_states(head, block_q, block_k)
        for i, rows in enumerate(blocks(head.n_q, block_q)):
            q = load_tile(head, "q", rows)
            acc, m, l = start(head, rows)
            for j, keys in enumerate(blocks(head.n_k, block_k)):
                if states[i, j] == EMPTY:
                    continue
                k, v = load_tile(head, "k", keys), load_tile(head, "v", keys)
                s = modify(head, scores(q, k, head.scale), rows, keys, states[i, j])
                p, m, l, correction = online_softmax(s, m, l)
                acc = accumulate(acc, correction, drop(head, p, rows, keys), v)
            for name, tile in zip(("out", "lse"), finish(acc, m, l)):
                store_tile(head, name, rows, tile)
    return out, lse


# --- FlashAttention, backward -----------------------------------------------------------------------------------------


@quiet
def flash_attention_1_backward(
    spec: AttentionSpec, operands: Operands, dout: Any, dlse: Any = None, block_q: int = 64, block_k: int = 64,
    dtype: Any = None, traffic: Traffic | None = None,
) -> Grads:  # fmt: skip
    """Gradients from operands.out and .lse. The rows' delta is computed from out and dout again in each tile.

    Algorithm 4 reads m and l; p needs no more than lse = m + log(l), so that is what is read here.
    """
    return _backward(spec, operands, dout, dlse, block_q, block_k, dtype, traffic, keep_delta=False)


@quiet
def flash_attention_2_backward(
    spec: AttentionSpec, operands: Operands, dout: Any, dlse: Any = None, block_q: int = 64, block_k: int = 64,
    dtype: Any = None, traffic: Traffic | None = None,
) -> Grads:  # fmt: skip
    """Gradients from operands.out and .lse. The rows' delta is computed once, before all else, and kept."""
    return _backward(spec, operands, dout, dlse, block_q, block_k, dtype, traffic, keep_delta=True)


def _backward(
    spec: AttentionSpec, operands: Operands, dout: Any, dlse: Any, block_q: int, block_k: int,
    dtype: Any, traffic: Traffic | None, keep_delta: bool,
) -> Grads:  # fmt: skip
    """Both papers have K and V outside: dk and dv of a tile stay in fast memory, and dq passes through slow memory."""
    grads = _zero_gradients(spec, operands, dtype or spec.lse_dtype)
    memory = {"out": operands.out, "lse": operands.lse, "dout": dout, "dlse": dlse, **grads._asdict()}
    memory["delta"] = np.empty(operands.lse.shape, grads.dq.dtype)
    for group in groups(spec, operands, grads.dq.dtype, traffic, **memory):
        states = [tile_states(head, block_q, block_k) for head in group]
        for head in group:
            for rows in blocks(head.n_q, block_q):
                store_tile(head, "dq", rows, np.zeros_like(head.memory["dq"][rows]))
                if keep_delta or spec.sinks:
                    delta = row_delta(head, load_tile(head, "dout", rows), rows)
                if keep_delta:
                    store_tile(head, "delta", rows, delta)
                if spec.sinks:
                    add_sink_gradient(head, grads.dsinks, load_tile(head, "lse", rows), delta)
        for j, keys in enumerate(blocks(group[0].n_k, block_k)):
            k, v = load_tile(group[0], "k", keys), load_tile(group[0], "v", keys)
            dk, dv = np.zeros_like(k), np.zeros_like(v)
            for g, head in enumerate(group):
                for i, rows in enumerate(blocks(head.n_q, block_q)):
                    if states[g][i, j] == EMPTY:
                        continue
                    q, do, dq, lse = (load_tile(head, name, rows) for name in ("q", "dout", "dq", "lse"))
                    delta = load_tile(head, "delta", rows) if keep_delta else row_delta(head, do, rows)
                    s = scores(q, k, head.scale)
                    p = weights(modify(head, s, rows, keys, states[g][i, j]), lse)
                    tile_dq, tile_dk, tile_dv = tile_gradients(head, q, k, v, do, s, p, delta, rows, keys)
                    store_tile(head, "dq", rows, dq + tile_dq)
                    dk, dv = dk + tile_dk, dv + tile_dv
            store_tile(group[0], "dk", keys, dk)
            store_tile(group[0], "dv", keys, dv)
    return grads


def weights(s: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """p = exp(s' - lse): the weights once more, from the scores and what the forward pass saved."""
    return select(s != -np.inf, np.exp(s - finite(lse)[:, None]))


def row_delta(head: Head, do: np.ndarray, rows: slice) -> np.ndarray:
    """delta = rowsum(dout * out) - dlse. The gradient by lse joins here: d lse / ds' = p; ds' = p * (dp - delta)."""
    delta = row_sum(do * load_tile(head, "out", rows))
    return delta - load_tile(head, "dlse", rows) if "dlse" in head.memory else delta


def tile_gradients(
    head: Head, q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray,
    s: np.ndarray, p: np.ndarray, delta: np.ndarray, rows: slice, keys: slice,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """A tile's part of (dq, dk, dv). s: the scores before modification; p: the weights before dropout.

    Softmax gives ds' = p * (dp - rowsum(p * dp)), and rowsum(p * dp) = rowsum(dout * out), for which no p is needed.
    """
    dp = drop(head, matmul(do, v.T), rows, keys)
    ds = p * (dp - delta[:, None])
    if head.spec.score is not None:
        ds = ds * head.evaluate(expr.derivative(head.spec.score), rows, keys, s)
    ds = select(p != 0, ds) * head.scale
    return weighted_sum(ds, k), weighted_sum(ds.T, q), weighted_sum(drop(head, p, rows, keys).T, do)


def add_sink_gradient(head: Head, dsinks: np.ndarray | None, lse: np.ndarray, delta: np.ndarray) -> None:
    """The sink's weight is exp(sink - lse), and its dp is 0, for it has no value."""
    if dsinks is not None and head.sink != -np.inf:
        dsinks[head.h] -= row_sum(np.exp(head.sink - lse) * delta)


# --- arithmetic that keeps hidden what is hidden ----------------------------------------------------------------------


def select(condition: Any, x: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """x where the condition holds, else the number."""
    return np.where(condition, x, x.dtype.type(otherwise))


def finite(m: np.ndarray) -> np.ndarray:
    """m, with 0 for -inf: then exp(s - m) of a row that has seen no key is exp(-inf - 0) = 0, not NaN."""
    return select(m != -np.inf, m)


def row_max(s: np.ndarray) -> np.ndarray:
    return s.max(axis=1, initial=s.dtype.type(-np.inf))


def row_sum(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis; sums of 16-bit numbers are carried in float32 and rounded once."""
    return x.sum(axis=-1, dtype=x.dtype if x.dtype.itemsize >= 4 else np.float32).astype(x.dtype)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in their dtype, sums carried as in `row_sum`."""
    if a.dtype.itemsize >= 4:
        return a @ b
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)


def weighted_sum(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """w @ x, in which a weight of exactly 0 leaves a row of x out whatever it holds: 0 * NaN counts as 0."""
    usual = np.isfinite(x).all(axis=1)
    if usual.all():
        return matmul(w, x)
    total = matmul(w[:, usual], x[usual])
    for j in np.flatnonzero(~usual):
        total += select(w[:, j : j + 1] != 0, w[:, j : j + 1] * x[j])
    return total


def drop(head: Head, x: np.ndarray, rows: slice, keys: slice) -> np.ndarray:
    """Dropout of weights, or of their gradients dp: some become 0, the others grow by 1 / (1 - dropout_p)."""
    if not head.spec.dropout:
        return x
    operands, row, key = head.operands, np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
    keep = dropout.keep(operands.seed, operands.dropout_p, head.b, head.h, row[:, None], key)
    return select(keep, x / x.dtype.type(1 - operands.dropout_p))


# --- slow memory: one head's part of the arrays, and its tiles --------------------------------------------------------


@dataclass
class Traffic:
    """Elements that moved between slow and fast memory, by the name of the array."""

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)

    @property
    def by_array(self) -> dict[str, int]:
        return dict(self.reads + self.writes)

    @property
    def total(self) -> int:
        return self.reads.total() + self.writes.total()


@dataclass
class Head:
    """One query head of one batch entry. memory: its part of each array, rows first, without keys that do not exist."""

    spec: AttentionSpec
    operands: Operands
    dtype: np.dtype
    b: int
    h: int
    memory: dict[str, np.ndarray]
    traffic: Traffic

    def __post_init__(self) -> None:
        self.n_q, self.n_k = len(self.memory["q"]), len(self.memory["k"])
        self.everything = slice(0, self.n_q), slice(0, self.n_k)
        self.kv_head = self.h // self.spec.group
        self.offset = int(self.operands.q_offset[self.b])
        self.scale = self.dtype.type(self.operands.scale)
        self.sink = self.dtype.type(self.operands.sinks[self.h] if self.spec.sinks else -np.inf)

    @cached_property
    def env(self) -> dict[str, Any]:
        """What the symbols, params and arrays of a modification stand for, except those that vary within the head."""
        params = {name: x if isinstance(x, int) else self.dtype.type(x) for name, x in self.operands.params.items()}
        return {"b": self.b, "h": self.h, **params, **self.operands.arrays}

    def evaluate(self, graph: Expr, rows: slice, keys: slice, s: np.ndarray | None = None) -> np.ndarray:
        """A modification on the pairs of a tile, (rows, keys), in the computing precision."""
        row, k = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
        value = codegen.evaluate(graph, {**self.env, "s": s, "row": row, "q": row + self.offset, "k": k}, self.dtype)
        return np.broadcast_to(np.asarray(value, bool if graph.kind == "bool" else self.dtype), (row.size, k.size))


def groups(
    spec: AttentionSpec, operands: Operands, dtype: Any, traffic: Traffic | None = None, **more: np.ndarray | None
) -> Iterator[list[Head]]:
    """For each key/value head of each batch entry, the query heads that share it. more: more arrays of slow memory."""
    arrays = {"q": operands.q, "k": operands.k, "v": operands.v, **more}
    traffic = traffic or Traffic()
    for b, kv_head in np.ndindex(operands.k.shape[:2]):
        group = []
        for h in range(kv_head * spec.group, (kv_head + 1) * spec.group):
            memory = {}
            for name, x in arrays.items():
                if x is not None and name != "dsinks":
                    of_keys = name in ("k", "v", "dk", "dv")
                    memory[name] = x[b, kv_head, : int(operands.kv_lengths[b])] if of_keys else x[b, h]
            group.append(Head(spec, operands, np.dtype(dtype), b, h, memory, traffic))
        yield group


def blocks(n: int, size: int) -> Iterator[slice]:
    """0 .. n in pieces of `size`, the last as long as is left."""
    return (slice(first, min(first + size, n)) for first in range(0, n, size))


EMPTY, PARTIAL, FULL = range(3)


def tile_states(head: Head, block_q: int, block_k: int) -> np.ndarray:
    """(tiles of rows, tiles of keys): EMPTY where no pair is visible, FULL where all are, else PARTIAL.

    Bounds of the mask over each tile decide (`expr.classify`); no pair is looked at. `standard` does without.
    """
    row0, k0 = np.arange(0, head.n_q, block_q)[:, None], np.arange(0, head.n_k, block_k)
    if head.spec.mask is None:
        return np.full((row0.size, k0.size), FULL)
    row1, k1 = np.minimum(row0 + block_q, head.n_q) - 1, np.minimum(k0 + block_k, head.n_k) - 1
    env = {**head.env, **{name: Bounded(x) for name, x in head.operands.arrays.items()}, "row0": row0, "row1": row1}
    env |= {"q0": row0 + head.offset, "q1": row1 + head.offset, "k0": k0, "k1": k1}
    empty, full = (codegen.evaluate(graph, env) for graph in head.spec.tile_state)
    return np.broadcast_to(np.where(full, FULL, np.where(empty, EMPTY, PARTIAL)), (row0.size, k0.size))


@dataclass
class Bounded:
    """An array that answers what `expr.bounds` asks of it: its least and its greatest element in a box of indices."""

    array: np.ndarray

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def bounds(self, which: int, corners: tuple[Any, ...]) -> np.ndarray:
        """The least (which 0) or greatest (1) element; corners: lowest and highest index of each axis, broadcast."""
        corners = np.broadcast_arrays(*corners)
        array = self.array if self.array.dtype.kind == "b" else self.array.astype(np.int64)  # as modifications compute
        result = np.empty(corners[0].shape, array.dtype)
        for i in np.ndindex(result.shape):
            # Bounds of an index can be wider than the values it takes; the whole axis is a safe answer then.
            box = tuple(
                slice(low[i], high[i] + 1) if 0 <= low[i] <= high[i] < n else slice(None)
                for low, high, n in zip(corners[::2], corners[1::2], array.shape)
            )
            result[i] = (np.min, np.max)[which](array[box])
        return result


def _empty_results(spec: AttentionSpec, operands: Operands, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    shape = operands.q.shape[:3]
    lse_dtype = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return np.empty((*shape, spec.head_dim_v), dtype), np.empty(shape, lse_dtype)


def _zero_gradients(spec: AttentionSpec, operands: Operands, dtype: Any) -> Grads:
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (operands.q, operands.k, operands.v))
    return Grads(dq, dk, dv, np.zeros(operands.q.shape[1], dtype) if spec.sinks else None)

"""Slow memory: the arrays of one query head, its tiles, and what moves between them and fast memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..devices.lazy import cached_property
from ..mods import codegen
from ..mods.expr import Expr
from ..mods.ranges import tables
from ..spec import AttentionSpec, Operands


class Grads(NamedTuple):
    """Gradients with respect to q, k, v and the sinks, in their shapes; dsinks is None where there are no sinks."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None


@dataclass
class Traffic:
    """Elements that move between slow and fast memory, by the name of the array."""

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.reads.total() + self.writes.total()


@dataclass
class Head:
    """One query head of one batch entry. memory: its slice of each array, rows first, keys up to kv_lengths."""

    spec: AttentionSpec
    operands: Operands
    dtype: np.dtype
    b: int
    h: int
    memory: dict[str, np.ndarray]
    traffic: Traffic
    values: dict[str, np.ndarray] | None = None  # gradients by values of the score modification

    def __post_init__(self) -> None:
        self.n_q, self.n_k = len(self.memory["q"]), len(self.memory["k"])
        self.everything = _, self.keys = slice(0, self.n_q), slice(0, self.n_k)
        self.kv_head = self.h // self.spec.group
        self.offset = int(self.operands.q_offset[self.b])
        self.scale = self.dtype.type(self.operands.scale)
        self.sink = self.dtype.type(self.operands.sinks[self.h] if self.spec.sinks else -np.inf)

    @cached_property
    def env(self) -> dict[str, Any]:
        """Values of a modification's symbols, scalars and arrays, except positions."""
        params = {name: x if isinstance(x, int) else self.dtype.type(x) for name, x in self.operands.params.items()}
        return {"b": self.b, "h": self.h, **params, **self.operands.arrays}

    def evaluate(self, graph: Expr, rows: slice, keys: slice, s: np.ndarray | None = None) -> np.ndarray:
        """A modification's graph on the pairs of a tile, (rows, keys), in the dtype of the computation."""
        row, k = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
        if not k.size:  # queries behind packed sequences are of no batch entry, whose arrays could be read
            return np.empty((row.size, 0), bool if graph.kind == "bool" else self.dtype)
        value = codegen.evaluate(graph, {**self.env, "s": s, "row": row, "q": row + self.offset, "k": k}, self.dtype)
        dtype: Any = {"bool": bool, "int": np.int64, "float": self.dtype}[graph.kind]
        return np.broadcast_to(np.asarray(value, dtype), (row.size, k.size))


def load_tile(head: Head, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Copy rows of an array from slow to fast memory, converted to the dtype of the computation."""
    tile = head.memory[name][rows].astype(head.dtype)
    head.traffic.reads[name] += tile.size
    return tile


def store_tile(head: Head, name: str, rows: slice, tile: np.ndarray) -> None:
    """Copy rows to slow memory."""
    head.memory[name][rows] = tile
    head.traffic.writes[name] += tile.size


def groups(
    spec: AttentionSpec, operands: Operands, dtype: Any, traffic: Traffic | None = None,
    values: dict[str, np.ndarray] | None = None, **more: np.ndarray | None,
) -> Iterator[list[Head]]:
    """For each key/value head of each batch entry, its query heads. more: further arrays in slow memory."""
    queries = {"q": operands.q, **{name: x for name, x in more.items() if name not in ("dk", "dv", "dsinks")}}
    keys = {"k": operands.k, "v": operands.v, **{name: x for name, x in more.items() if name in ("dk", "dv")}}
    traffic = traffic or Traffic()
    for b, kv_head in np.ndindex(len(operands.q_offset), operands.k.shape[1]):
        of_keys = {name: keys_of(operands, x, b, kv_head) for name, x in keys.items() if x is not None}
        if operands.k_pe is not None:
            of_keys["k"] = np.concatenate([of_keys["k"], keys_of(operands, operands.k_pe, b, kv_head)], axis=1)
        group = []
        for h in range(kv_head * spec.group, (kv_head + 1) * spec.group):
            of_rows = {name: rows_of(operands, x, b, h) for name, x in queries.items() if x is not None}
            group.append(Head(spec, operands, np.dtype(dtype), b, h, of_rows | of_keys, traffic, values))
        yield group


def rows_of(operands: Operands, x: np.ndarray, b: int, h: int) -> np.ndarray:
    """The rows of sequence b and head h, in an array of queries; packed sequences follow each other."""
    if operands.cu_seqlens is None:
        return x[b, h]
    begin, end = operands.cu_seqlens[0][b : b + 2]
    return x[0, h, begin:end]


def keys_of(operands: Operands, x: np.ndarray, b: int, kv_head: int) -> np.ndarray:
    """The rows of sequence b and head h, in an array of keys, up to kv_lengths; pages are gathered."""
    n = int(operands.kv_lengths[b])
    if operands.page_table is not None:
        page = x.shape[2]
        pages = operands.page_table[b, : -(-n // page)] if n else []
        return np.concatenate([x[:0, kv_head].reshape(0, x.shape[3]), *(x[i, kv_head] for i in pages)])[:n]
    if operands.cu_seqlens is None:
        return x[b, kv_head, :n]
    begin = operands.cu_seqlens[1][b]
    return x[0, kv_head, begin : begin + n]


def rows_of_keys(operands: Operands, x: np.ndarray, head: Head) -> np.ndarray:
    """The numbers of the keys of a head, in an array (B, Hq, Nk) that has one for each."""
    if operands.cu_seqlens is None or operands.page_table is not None:
        return x[head.b : head.b + 1, head.h, : head.n_k]
    begin = operands.cu_seqlens[1][head.b]
    return x[0, head.h, begin : begin + head.n_k]


def blocks(n: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover 0 .. n; the last may be shorter."""
    return (slice(first, min(first + size, n)) for first in range(0, n, size))

EMPTY, PARTIAL, FULL = range(3)


def tile_states(head: Head, block_q: int, block_k: int) -> np.ndarray:
    """EMPTY, FULL or PARTIAL by tile of rows and of keys, from bounds of the mask (`expr.classify`) alone."""
    row0, k0 = np.arange(0, head.n_q, block_q)[:, None], np.arange(0, head.n_k, block_k)
    if head.spec.mask is None or not (head.n_q and head.n_k):
        return np.full((row0.size, k0.size), FULL)
    row1, k1 = np.minimum(row0 + block_q, head.n_q) - 1, np.minimum(k0 + block_k, head.n_k) - 1
    env = {**head.env, **tables(head.operands.arrays), "row0": row0, "row1": row1}
    env |= {"q0": row0 + head.offset, "q1": row1 + head.offset, "k0": k0, "k1": k1}
    empty, full = (codegen.evaluate(graph, env) for graph in head.spec.tile_state)
    return np.broadcast_to(np.where(full, FULL, np.where(empty, EMPTY, PARTIAL)), (row0.size, k0.size))


def empty_results(spec: AttentionSpec, operands: Operands, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    shape = operands.q.shape[:3]
    lse_dtype = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return np.empty((*shape, spec.head_dim_v), dtype), np.empty(shape, lse_dtype)


def zero_gradients(spec: AttentionSpec, operands: Operands, dtype: Any) -> Grads:
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (operands.q, operands.k, operands.v))
    return Grads(dq, dk, dv, np.zeros(operands.q.shape[1], dtype) if spec.sinks else None)

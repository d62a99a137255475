"""Which queries and keys belong together: a batch of rectangles, sequences that follow each other, keys in pages; and
the lengths and offsets that say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import shown, warn
from ..mods import Mod, expr
from ..mods.expr import INT64, MAX_POSITION, Expr, Q, uses
from ..mods.tracing import as_array
from ..numeric import described
from ..spec import MAX_HEAD_DIM, Tokens
from . import arrays
from .checks import choice
from .shape import FORMS, HEADS_AND_TOKENS, LAYOUTS, Shape

OFFSETS = "integers (sequences + 1,), from 0 up to the number of tokens,"


@dataclass(slots=True)
class Sequences:
    """The sequences of a call; packed ones have one more: queries behind the caller's, which see no key."""

    shape: Shape
    batch: int  # the caller's sequences
    n_q: Any  # queries of each sequence, int64 (B,), or of all; None where offsets are on a device
    most_q: int  # queries of the longest, or a bound where offsets are on a device
    most_k: int  # keys, likewise
    room: int  # keys that a bias or mask has
    lengths: Any  # keys of each sequence, int64 (B,), or (B + 1,) with those of the extra
    cu_seqlens: tuple[Any, Any] | None = None  # see Operands
    page_table: Any = None
    offsets: Any = None  # positions of the first queries, int64 (B,) or (B + 1,); None: those of lengths on a device
    has_offsets: bool = False  # whether the caller gave them
    queries: Any = None  # n_q, or the caller's q_lengths, int64 (B,)
    masks: tuple[Mod, ...] = ()  # that hide the rows behind q_lengths
    pads: bool = False  # whether lengths may be those of padded queries, whose default offsets are checked

    @property
    def extra(self) -> int:
        """Sequences besides the caller's."""
        return int(self.cu_seqlens is not None)

    @property
    def differ(self) -> bool:
        """Whether sequences may differ in length without padding."""
        return self.cu_seqlens is not None or self.page_table is not None

    def tokens(self, n_q: int) -> Tokens | None:
        """All queries, keys and pairs, where sequences differ in length and lengths are on the host. n_q: of q."""
        if not self.extra:
            return None
        if not (isinstance(self.n_q, np.ndarray) and isinstance(self.lengths, np.ndarray)):
            return Tokens(n_q, self.most_k, n_q * self.most_k)  # as if all tokens were one sequence's
        return Tokens(n_q, int(self.lengths.sum()), int(self.n_q @ self.lengths))

    def with_extra(self, values: Any) -> Any:
        """One integer for each of the caller's sequences, and 0 for the extra, unless it has its own."""
        if not self.extra or len(values) > self.batch:
            return values
        found = (np if isinstance(values, np.ndarray) else arrays.namespace("cupy")).empty(self.batch + 1, np.int64)
        found[:-1], found[-1:] = values, 0
        return found

    def reach(self) -> tuple[np.ndarray, np.ndarray]:
        """See `q_offset_range`."""
        return q_offset_range(self.offsets, self.has_offsets, self.batch, self.most_q, self.most_k)

    def offsets_for(self, kind: str, n_q: int, *graphs: Expr | None) -> Any:
        """Checked offsets for these graphs; default ones on a device, two launches, are 0 where none reads them."""
        if self.pads:
            check_default_offset(self.lengths, n_q, graphs)
        if self.offsets is not None:
            return self.offsets
        if not are_read(*graphs):
            return np.zeros(self.batch, np.int64)
        return q_offsets_of(None, kind, self.shape, self.batch, self.lengths, self.queries, self.most_k)


def sequences_of(q: Any, k: Any, v: Any, kind: str, o: Any, copied: bool) -> Sequences:
    """The sequences of a call with options o; ValueError or TypeError if the arguments disagree."""
    found = _laid_out(q, k, v, kind, o.layout, o.kv_lengths, o.cu_seqlens, o.page_table, copied)
    shape, batch, queries = found.shape, found.batch, found.n_q
    if o.q_lengths is not None:
        if found.extra:
            raise ValueError("expected q_lengths or cu_seqlens, which gives the lengths, not both")
        queries = _counts("q_lengths", o.q_lengths, kind, shape, batch, found.most_q, "queries", copied)
        queries = queries.astype(np.int64, copy=False)
        found.masks = (Mod("mask", expr.Array("q_lengths", 1, "int")[expr.B] > expr.ROW, {}, {"q_lengths": queries}),)
    if o.q_offset is not None or (found.offsets is None and isinstance(found.lengths, np.ndarray)):
        found.offsets = q_offsets_of(o.q_offset, kind, shape, batch, found.lengths, queries, found.most_k, copied)
    found.queries, found.has_offsets = queries, o.q_offset is not None
    found.pads = o.q_offset is o.q_lengths is o.page_table is None and o.kv_lengths is not None
    return found


def _laid_out(
    q: Any, k: Any, v: Any, kind: str, layout: str, kv_lengths: Any, cu_seqlens: Any, page_table: Any, copied: bool
) -> Sequences:
    """The sequences as arrays say where they lie."""
    if cu_seqlens is None and page_table is None:
        shape = shape_of(q, k, v, layout)
        n_q, n_k = (x.shape[-2 if x.ndim == 2 else HEADS_AND_TOKENS[layout][1]] for x in (q, k))
        batch = math.prod(shape.batch)
        return Sequences(shape, batch, n_q, n_q, n_k, n_k, kv_lengths_of(kv_lengths, kind, shape, batch, n_k, copied))
    for name, array in (("q", q), ("k", k), ("v", v))[: 1 if page_table is not None else 3]:
        if cu_seqlens is not None and array.ndim != 3:
            raise ValueError(f"{name}: expected shape (tokens, heads, head_dim) with cu_seqlens, got {array.shape}")
    if page_table is None:
        if kv_lengths is not None:
            raise ValueError("expected kv_lengths or cu_seqlens, which gives the lengths, not both")
        shape = shape_of(q, k, v, "bnhd")
        cu_q, cu_k = _both(cu_seqlens, kind, len(q), len(k))
        if not (isinstance(cu_q, np.ndarray) and isinstance(cu_k, np.ndarray)):
            return _on_device(shape, q, len(k), cu_q, cu_k)
        n_q, lengths = cu_q[1:-1] - cu_q[:-2], cu_k[1:-1] - cu_k[:-2]
        most_k = _most(lengths, len(k))
        return Sequences(shape, len(n_q), n_q, _most(n_q, len(q)), most_k, most_k, lengths, (cu_q, cu_k))
    if kv_lengths is None:
        raise ValueError("kv_lengths: expected integers (B,), the keys of each sequence, beside page_table, got None")
    layout = layout if cu_seqlens is None else "bnhd"
    shape = _shape_of_paged(q, k, v, layout, cu_seqlens is not None, copied)
    batch, n_q, cu = q.shape[0], q.shape[HEADS_AND_TOKENS[layout][1]], None
    if cu_seqlens is not None:
        if isinstance(cu_seqlens, tuple):
            raise TypeError("cu_seqlens: expected one array beside page_table, the offsets of the queries, got a tuple")
        cu_q = offsets_of("cu_seqlens", cu_seqlens, kind, len(q), "q")
        cu, on_host = (cu_q, None), isinstance(cu_q, np.ndarray)
        batch = len(cu_q) - (2 if on_host else 1)
        n_q = cu_q[1:-1] - cu_q[:-2] if on_host else None
    pages, page = k.shape[:2]
    table = table_of(page_table, kind, batch)
    room = table.shape[1] * page
    lengths = kv_lengths_of(kv_lengths, kind, shape, batch, room)
    check_pages(table, lengths, pages, page)
    if n_q is None:
        return _on_device(shape, q, room, cu_q, lengths, table)
    return Sequences(shape, batch, n_q, _most(n_q, len(q)), _most(lengths, room), room, lengths, cu, table)


MAX_HEADS = 128
"""The most heads of known models; where there are more, and more than tokens, the axes may be exchanged."""


def shape_of(q: Any, k: Any, v: Any, layout: str) -> Shape:
    """The shape of a call; ValueError if q, k and v disagree."""
    choice("layout", layout, LAYOUTS)
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    if problem := disagreement(shapes, layout):
        hint = "" if q.ndim == 2 or disagreement(shapes, other) else f"; did you mean layout={other!r}?"
        raise ValueError(f"{problem} (layout={layout!r}: {FORMS[layout]}{hint})")
    if q.ndim > 3 and _looks_exchanged(shapes, layout) and not disagreement(shapes, other):
        heads, tokens = (q.shape[axis] for axis in HEADS_AND_TOKENS[layout])
        warn(
            f"q has {heads} heads of {tokens} tokens (shape {q.shape}, layout={layout!r}: {FORMS[layout]}); "
            f"layout={other!r} reads {tokens} heads of {heads} tokens"
        )
    return Shape(q.ndim, tuple(q.shape[:-3]), layout)


def disagreement(shapes: dict[str, tuple[int, ...]], layout: str) -> str:
    """Why these shapes of q, k and v disagree, or nothing."""
    q, k, v = shapes.values()
    for name, shape in shapes.items():
        if len(shape) < 2:
            return f"{name}: expected shape {FORMS[layout]} or (tokens, head_dim), got {shape}"
        if len(shape) != len(q):
            return f"{name}: expected {len(q)} axes, as q has (shape {q}), got {len(shape)} (shape {shape})"
        if shape[:-3] != q[:-3]:
            return f"{name}: expected batch axes {q[:-3]} (q's), got {shape[:-3]} (shape {shape})"
        if not 1 <= shape[-1] <= MAX_HEAD_DIM:
            return f"{name}: expected a head dim of 1 to {MAX_HEAD_DIM}, got {shape[-1]} (shape {shape})"
    if k[-1] != q[-1]:
        return f"k: expected head dim {q[-1]} (q's; only v's may differ), got {k[-1]} (shape {k})"
    head_axis, token_axis = HEADS_AND_TOKENS[layout] if len(q) > 2 else (None, -2)
    if v[token_axis] != k[token_axis]:
        return f"v: expected {k[token_axis]} tokens (k's), got {v[token_axis]} (shape {v})"
    if head_axis is not None:
        heads, heads_k, heads_v = (shape[head_axis] for shape in (q, k, v))
        if heads_v != heads_k:
            return f"v: expected {heads_k} heads (k's), got {heads_v} (shape {v})"
        if (heads_k == 0 and heads != 0) or (heads_k and heads % heads_k):
            return f"q: expected a multiple of k's {heads_k} heads, got {heads} (shape {q})"
    return ""


def _looks_exchanged(shapes: dict[str, tuple[int, ...]], layout: str) -> bool:
    """Whether heads and tokens of q and k have numbers, or a ratio, that only exchanged axes have."""
    (heads, tokens), (heads_k, tokens_k) = ([shapes[x][axis] for axis in HEADS_AND_TOKENS[layout]] for x in "qk")
    if heads <= tokens or heads_k <= tokens_k or 0 in (tokens, tokens_k):
        return False
    return heads > MAX_HEADS or (heads == heads_k and tokens > tokens_k and tokens % tokens_k == 0)


def _on_device(shape: Shape, q: Any, n_k: int, cu_q: Any, keys: Any, table: Any = None) -> Sequences:
    """The sequences of offsets of which at least one array is on a device. keys: offsets, or lengths with a table."""
    from ..backends.cuda_common.cu_seqlens import derive

    # Offsets on the host have one more, for what follows the caller's.
    cu_q, keys = (x[:-1] if isinstance(x, np.ndarray) and table is None else x for x in (cu_q, keys))
    derived = derive(cu_q, len(q), keys, n_k, table is not None)
    cu = derived.q, None if table is not None else derived.k
    return Sequences(shape, len(cu_q) - 1, None, len(q), n_k, n_k, derived.lengths, cu, table, derived.positions)


def _most(counts: Any, bound: int) -> int:
    if isinstance(counts, int):
        return counts
    return int(counts.max(initial=0)) if isinstance(counts, np.ndarray) else bound


def _both(value: Any, kind: str, tokens_q: int, tokens_k: int) -> tuple[Any, Any]:
    """cu_seqlens of q and k."""
    pair = isinstance(value, tuple)
    if pair and len(value) != 2:
        raise TypeError(f"cu_seqlens: expected an array or two, (of q, of k), got a tuple of {len(value)}")
    names = ("cu_seqlens[0]", "cu_seqlens[1]") if pair else ("cu_seqlens", "cu_seqlens")
    given_q, given_k = value if pair else (value, value)
    cu_q, cu_k = (
        offsets_of(names[0], given_q, kind, tokens_q, "q"),
        offsets_of(names[1], given_k, kind, tokens_k, "k"),
    )
    of_q, of_k = (len(x) - isinstance(x, np.ndarray) for x in (cu_q, cu_k))
    if of_q != of_k:
        raise ValueError(f"cu_seqlens: expected as many offsets for k as for q, {of_q}, got {of_k}")
    if isinstance(cu_k, np.ndarray):
        cu_k[-1:] = cu_k[-2:-1]
    return cu_q, cu_k


def offsets_of(name: str, value: Any, kind: str, tokens: int, of: str) -> Any:
    """Checked offsets, a copy with the number of tokens behind it; on a device those, which are not read."""
    offsets, on_device = integers_of(name, value, kind, OFFSETS)
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"{name}: expected {OFFSETS} got shape {offsets.shape}")
    if on_device:
        return offsets
    # Neighbours are compared, as their differences may wrap. With them the two ends bound all.
    if offsets[0] != 0 or offsets[-1] > tokens or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"{name}: expected {OFFSETS} here {tokens} of {of}, none less than the one before, got {shown(value)}"
        )
    return np.append(offsets, tokens)


def _shape_of_paged(q: Any, k: Any, v: Any, layout: str, packed: bool, read: bool) -> Shape:
    """The shape of a call with pages. read: they are, and are no stand-ins of a call that is only described."""
    choice("layout", layout, LAYOUTS)
    if not packed and q.ndim != 4:
        raise ValueError(
            "q: expected four axes with page_table, or (tokens, heads, head_dim) with cu_seqlens too, got shape "
            f"{q.shape}"
        )
    for name, array in (("k", k), ("v", v)):
        if array.ndim != 4 or array.shape[:3] != k.shape[:3] or 0 in array.shape[:2]:
            raise ValueError(
                f"{name}: expected shape (pages, page, heads, head_dim) with page_table, no axis of pages empty, and "
                f"that of k, {k.shape}, but for the head dim, got {array.shape}"
            )
        if read and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
            raise ValueError(f"{name}: expected a contiguous last axis with page_table, got strides {array.strides}")
        if array.shape[1] > MAX_PAGE:
            raise ValueError(f"{name}: expected pages of up to {MAX_PAGE} tokens, got {array.shape[1]}")
    of_q = q.shape if layout == "bnhd" else (q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    entries = of_q[:-3]
    shapes = {"q": of_q, "k": (*entries, *k.shape[1:]), "v": (*entries, *v.shape[1:])}
    if problem := disagreement(shapes, "bnhd"):
        raise ValueError(f"{problem} (q: {FORMS[layout]}; k and v, with page_table: (pages, page, heads, head_dim))")
    return Shape(q.ndim, tuple(q.shape[:-3]), layout, paged=True)


MAX_PAGE = 1 << 16
"""Tokens of a page, at most."""


def table_of(value: Any, kind: str, batch: int) -> Any:
    """page_table, int64 (B, pages of a sequence): a copy, or on a device the caller's array if it is that or int32."""
    what = "integers (B, pages of a sequence), numbers of pages,"
    given, on_device = integers_of("page_table", value, kind, what)
    if given.ndim != 2 or given.shape[0] != batch:
        raise ValueError(f"page_table: expected {what} of shape ({batch}, ...), got shape {given.shape}")
    if on_device:
        return read_in_place(arrays.namespace(kind), given)
    return np.ascontiguousarray(given)


def check_pages(table: Any, lengths: Any, pages: int, page: int) -> None:
    """Check the entries of sequences' keys; those behind the last key are not looked at, nor any on a device."""
    if not (isinstance(table, np.ndarray) and isinstance(lengths, np.ndarray)):
        return
    wrong = (np.arange(table.shape[1]) * page < lengths[:, None]) & ((table < 0) | (table >= pages))
    if wrong.any():
        b, i = (int(x[0]) for x in wrong.nonzero())
        raise ValueError(
            f"page_table[{b}, {i}]: expected 0 to {pages - 1}, since batch entry {b} of {lengths[b]} keys has some "
            f"there, got {table[b, i]}"
        )


# --- one integer for each batch entry ---------------------------------------------------------------------------------


def _spread(value: Any, batch: int, copied: bool) -> np.ndarray:
    """int64 (B,) from one integer or B of them; a view where `copied` is False."""
    spread = np.broadcast_to(np.asarray(value, np.int64), (batch,))
    return spread.copy() if copied else spread


def integers_of(name: str, value: Any, kind: str, what: str, copied: bool = True) -> tuple[Any, bool]:
    """Integers that a caller gave, and whether they lie on the device of q, where they are not read.

    Those on the host are int64, and a copy unless `copied` is False: the caller's array may change at any time. A check
    reads the copy, and compares: differences of such integers may wrap.
    """
    if kind != "numpy" and arrays.kind_of(value) == kind:
        if value.dtype.kind not in "iu":
            raise TypeError(f"{name}: expected {what}, got {described(value)}")
        return value.view(), True
    array = as_array(name, value, what)
    array = np.array(array) if copied else array.view()
    if array.dtype.kind not in "iu":
        far = array.dtype.kind == "O" and not array.ndim and isinstance(value, int)
        problem: type[Exception] = ValueError if far else TypeError
        raise problem(f"{name}: expected {what} within int64, got {described(value) if array.ndim else shown(value)}")
    if array.dtype.kind == "u" and array.itemsize == 8 and array.size and array.max() > INT64[1]:
        raise ValueError(f"{name}: expected {what} within int64, got {array.max()}")
    return array.astype(np.int64, copy=False), False


def read_in_place(xp: Any, array: Any) -> Any:
    """Integers on a device as kernels read them: the array itself if it is contiguous int64 or int32, else a copy."""
    if array.dtype == np.uint64:
        array = xp.minimum(array, np.uint64(INT64[1]))  # which kernels clamp further; others would wrap below 0
    aligned = array.data.ptr % array.dtype.itemsize == 0
    return xp.ascontiguousarray(array if aligned else array.copy(), np.int32 if array.dtype == np.int32 else np.int64)


def _per_entry(name: str, value: Any, kind: str, shape: Shape, batch: int, what: str, copied: bool) -> Any:
    """int64 (B,) from an integer or integers, one for each batch entry, as a copy unless `copied` is False.

    Integers on the device of q stay there, because reading them synchronizes with the device. The result may be the
    caller's array then, of int64 or int32.
    """
    array, on_device = integers_of(name, value, kind, what, copied)
    if array.ndim and array.shape not in ((batch,), shape.batch):
        raise ValueError(f"{name}: expected {what} of shape ({batch},), got shape {array.shape}")
    if not on_device and copied and array.shape == (batch,):
        return array
    flat = array.reshape(-1) if array.ndim else array
    if not on_device:
        return _spread(flat, batch, copied)
    xp = arrays.namespace(kind)
    return read_in_place(xp, xp.broadcast_to(flat, (batch,)))


def _counts(name: str, value: Any, kind: str, shape: Shape, batch: int, most: int, of: str, copied: bool) -> Any:
    """int64 (B,): how many of the `most` queries or keys each batch entry has."""
    what = f"integers (B,), the number of {of} of each batch entry,"
    counts = _per_entry(name, value, kind, shape, batch, what, copied)
    # As unsigned numbers, negative ones are the largest.
    if isinstance(counts, np.ndarray) and counts.size and counts.view(np.uint64).max() > most:
        raise ValueError(
            f"{name}: expected 0 to {most}, the number of {of}, got values from {counts.min()} to {counts.max()}"
        )
    return counts


def kv_lengths_of(value: Any, kind: str, shape: Shape, batch: int, n_k: int, copied: bool = True) -> Any:
    if value is None:
        return _spread(n_k, batch, copied)
    return _counts("kv_lengths", value, kind, shape, batch, n_k, "keys", copied)


def q_offsets_of(
    value: Any, kind: str, shape: Shape, batch: int, lengths: Any, n_q: Any, n_k: int, copied: bool = True
) -> Any:
    """Position of each entry's first query, clamped on a device. n_q: queries of each entry, or of all."""
    if value is None:
        if isinstance(lengths, np.ndarray) and isinstance(n_q, int | np.ndarray):
            return lengths - n_q if copied else _spread(arrays.without_repeats(lengths) - n_q, batch, copied)
        xp = arrays.namespace(kind)
        offsets = xp.clip(xp.asarray(lengths, np.int64), 0, n_k)  # as kernels clamp them
        offsets -= n_q if isinstance(n_q, int) else xp.asarray(n_q)  # in place: a captured call allocates no more
        return offsets
    offsets = _per_entry("q_offset", value, kind, shape, batch, "an integer, or integers (B,),", copied)
    if not isinstance(offsets, np.ndarray):
        offsets = offsets.astype(np.int64, copy=False)
        own = None if arrays.same_address(offsets, value) else offsets
        return arrays.namespace(kind).clip(offsets, -MAX_POSITION, MAX_POSITION, out=own)
    if offsets.size and not (offsets.min() >= -MAX_POSITION and offsets.max() <= MAX_POSITION):
        raise ValueError(f"q_offset: expected positions within 2^48, got {shown(value)}")
    return offsets


def are_read(*graphs: Expr | None) -> bool:
    """Whether modifications depend on the positions of queries."""
    return any(graph is not None and uses(graph, Q) for graph in graphs)


def check_default_offset(lengths: Any, n_q: int, graphs: Iterable[Expr | None]) -> None:
    """ValueError where the default offset, kv_lengths - Nq, may put queries that are padded before the first key, and
    the modifications depend on the position of a query: a length other than 0 is below n_q; or lengths are on a device,
    where they are not read, and n_q is above 1.
    """
    if isinstance(lengths, np.ndarray):
        short = lengths[(lengths > 0) & (lengths < n_q)]
        problem = f"kv_lengths has {short[0]}, less than the {n_q} queries" if short.size else ""
    else:
        problem = f"kv_lengths lie on a device and are not read, and there are {n_q} queries" if n_q > 1 else ""
    if problem and are_read(*graphs):
        raise ValueError(
            f"q_offset: expected one with causal, window, alibi_slopes or functions of q, since {problem}; pass 0 "
            "where queries are padded on the right like the keys, kv_lengths - Nq where the last query is at the last "
            "key"
        )


def q_offset_range(offsets: Any, given: bool, batch: int, n_q: int, n_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest possible offset of each batch entry. Offsets on a device are not read."""
    if isinstance(offsets, np.ndarray):
        return offsets, offsets
    low, high = (-MAX_POSITION, MAX_POSITION) if given else (-n_q, n_k - n_q)
    return np.full(batch, low), np.full(batch, high)

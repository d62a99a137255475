"""Lengths and offsets: one integer for each batch entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import shown
from ..mods.expr import INT64, MAX_POSITION, Expr, Q, uses
from ..mods.tracing import as_array
from ..numeric import described
from . import arrays
from .shape import Shape


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


def queries_of(value: Any, kind: str, shape: Shape, batch: int, n_q: Any, most: int, copied: bool = True) -> Any:
    """q_lengths, or the queries of each sequence: int64 (B,), or one number."""
    if value is None:
        return n_q
    counts = _counts("q_lengths", value, kind, shape, batch, most, "queries", copied)
    return counts.astype(np.int64, copy=False)


def q_offsets_of(
    value: Any, kind: str, shape: Shape, batch: int, lengths: Any, n_q: Any, n_k: int, copied: bool = True
) -> Any:
    """Position of each batch entry's first query. On a device, offsets beyond the bounds are clamped, not errors.
    n_q: queries of each entry, or of all.
    """
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
    """Refuse the default offset, kv_lengths - Nq, where it may put queries that are padded before the first key.

    Parameters
    ----------
    lengths
        kv_lengths of a call without q_offset.
    n_q
        Queries of each batch entry.
    graphs
        The call's modifications; the offset only matters where they depend on the position of a query.

    Raises
    ------
    ValueError
        A length other than 0 is below n_q; or lengths are on a device, where they are not read, and n_q is above 1.
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

"""Shapes of the arguments: the caller's axes as (B, H, N, D), and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..errors import warn
from ..mods.tracing import DTYPES
from ..spec import MAX_HEAD_DIM
from . import arrays
from .checks import choice

FORMS = {"bhnd": "(..., heads, tokens, head_dim)", "bnhd": "(..., tokens, heads, head_dim)"}
LAYOUTS = tuple(FORMS)
HEADS_AND_TOKENS = {"bhnd": (-3, -2), "bnhd": (-2, -3)}
"""Axes of heads and of tokens."""

MAX_HEADS = 128
"""The most heads of known models; where there are more, and more than tokens, the axes may be exchanged."""


class Shape:
    """How the caller's arrays map to (B, H, N, D).

    Axes before the last three are batch axes; missing axes have length 1.
    """

    def __init__(self, ndim: int, batch: tuple[int, ...], layout: str, paged: bool = False) -> None:
        self.ndim, self.batch, self.layout, self.paged = ndim, batch, layout, paged

    def four_axes(self, array: Any) -> Any:
        """View as (B, H, N, D)."""
        if self.ndim == 2:
            array = array[None] if self.layout == "bhnd" else array[:, None]
        if self.layout == "bnhd":
            array = array.swapaxes(-3, -2)
        return array.reshape((math.prod(self.batch), *array.shape[-3:])) if array.ndim != 4 else array

    def to_four(self, array: Any) -> Any:
        """As (B, H, N, D) with an addressable last axis: a view, or a copy."""
        return arrays.addressable(self.four_axes(array))

    def keys_to_four(self, array: Any) -> Any:
        """K or V as (B, H, N, D), or as (pages, H, page, D)."""
        return array.swapaxes(1, 2) if self.paged else self.to_four(array)

    def like(self, tensor: Any) -> Any:
        """A (B, H, N, D) tensor in the caller's shape, as a view."""
        if self.layout == "bnhd":
            tensor = tensor.swapaxes(1, 2)
        tail = tensor.shape[1:]
        if self.ndim == 2:
            return tensor[0, 0] if self.layout == "bhnd" else tensor[0, :, 0]
        return tensor.reshape((*self.batch, *tail)) if self.ndim != 4 else tensor

    def sizes(self, four: tuple[int, int, int, int]) -> tuple[int, ...]:
        """The caller's shape of a (B, H, N, D) tensor of these sizes."""
        _, heads, n, d = four
        if self.ndim == 2:
            return n, d
        return (*self.batch, heads, n, d) if self.layout == "bhnd" else (*self.batch, n, heads, d)

    def sizes_of_rows(self, three: tuple[int, int, int]) -> tuple[int, ...]:
        """The caller's shape of (B, H, N) numbers."""
        _, heads, n = three
        return (n,) if self.ndim == 2 else (*self.batch, heads, n)

    def rows(self, values: Any) -> Any:
        """(B, H, N) numbers, one for each query, in the caller's shape."""
        return (
            values[0, 0]
            if self.ndim == 2
            else values.reshape((*self.batch, *values.shape[1:]))
            if self.ndim != 4
            else values
        )

    def empty(
        self, make: Callable[[tuple[int, ...], Any], Any], batch: int, heads: int, n: int, d: int, dtype: Any
    ) -> Any:
        """A (B, H, N, D) tensor that is C-contiguous in the caller's layout; make(shape, dtype) gives a new array."""
        if self.layout == "bnhd":
            return make((batch, n, heads, d), dtype).swapaxes(1, 2)
        return make((batch, heads, n, d), dtype)


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
    """Whether q and k have more heads than tokens, and so many heads, or tokens in such a ratio, as only exchanged axes
    have: the heads of q and k would be equal, and q's tokens a multiple of k's, as heads of a group are.
    """
    (heads, tokens), (heads_k, tokens_k) = ([shapes[x][axis] for axis in HEADS_AND_TOKENS[layout]] for x in "qk")
    if heads <= tokens or heads_k <= tokens_k or 0 in (tokens, tokens_k):
        return False
    return heads > MAX_HEADS or (heads == heads_k and tokens > tokens_k and tokens % tokens_k == 0)


def pairwise(name: str, array: Any, kind: str, shape: Shape, full: tuple[int, ...], dtypes: str) -> Any:
    """An array that broadcasts to (B, Hq, Nq, Nk), with at most four axes."""
    array = arrays.own_form(name, array, kind)
    dtype_kind = DTYPES.get(array.dtype.name, " ")[0]
    if dtype_kind not in dtypes:
        words = {"f": "a floating dtype up to float64 (added to the scores)", "b": "bool (True = attend)"}
        raise TypeError(f"{name}: expected {' or '.join(words[x] for x in dtypes)}, got {array.dtype}")
    wanted, (batch, _, n_q, n_k) = (*shape.batch, *full[1:]), full
    axes = wanted[-array.ndim :] if array.ndim else ()
    keys_of_entries = array.ndim == 2 and array.shape == (batch, n_k) and batch > 1
    hint = f"{name}[:, None, None, :] is one of the keys of each batch entry, (B, Nk)"
    if array.ndim > len(wanted) or any(n not in (1, m) for n, m in zip(array.shape, axes, strict=True)):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to (..., Hq, Nq, Nk) = {wanted} with layout={shape.layout!r}, "
            f"got {array.shape}{f'; {hint}' if keys_of_entries else ''}"
        )
    if keys_of_entries and n_q == batch:
        warn(
            f"{name} of shape {array.shape} is read as (Nq, Nk), the pairs of all batch entries, and {batch} is the "
            f"number of batch entries too; {hint}, and {name}[None, None] one of pairs"
        )
    if array.ndim > 3 and len(shape.batch) != 1:
        rest = array.shape[-3:]
        if any(n != 1 for n in array.shape[:-3]):
            array = arrays.namespace(kind).broadcast_to(array, (*shape.batch, *rest))
        array = array.reshape((math.prod(array.shape[:-3]), *rest))
    return array if array.ndim else array.reshape(1)

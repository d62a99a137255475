"""Shapes of the arguments: the caller's axes as (B, H, N, D), and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..mods.tracing import DTYPES
from ..spec import MAX_HEAD_DIM
from . import arrays
from .checks import choice

LAYOUTS = ("bhnd", "bnhd")


class Shape:
    """How the caller's arrays map to (B, H, N, D).

    Axes before the last three are batch axes; missing axes have length 1.
    """

    def __init__(self, ndim: int, batch: tuple[int, ...], layout: str) -> None:
        self.ndim, self.batch, self.layout = ndim, batch, layout

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

    def like(self, tensor: Any) -> Any:
        """A (B, H, N, D) tensor in the caller's shape, as a view."""
        if self.layout == "bnhd":
            tensor = tensor.swapaxes(1, 2)
        tail = tensor.shape[1:]
        if self.ndim == 2:
            return tensor[0, 0] if self.layout == "bhnd" else tensor[0, :, 0]
        return tensor.reshape((*self.batch, *tail)) if self.ndim != 4 else tensor

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
    """The shape of a call; ValueError if q, k and v do not fit each other."""
    choice("layout", layout, LAYOUTS)
    form = "(..., heads, tokens, head_dim)" if layout == "bhnd" else "(..., tokens, heads, head_dim)"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim < 2:
            raise ValueError(f"{name} has shape {array.shape}; {form} fits, or (tokens, head_dim)")
        if array.ndim != q.ndim:
            raise ValueError(
                f"{name} has {array.ndim} axes {array.shape}, q has {q.ndim} {q.shape}; "
                f"q, k and v have equally many, {form}"
            )
        if array.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name} has batch axes {array.shape[:-3]} (shape {array.shape}), q has {q.shape[:-3]}; they are equal"
            )
        if not 1 <= array.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {array.shape[-1]} (shape {array.shape}); 1 to {MAX_HEAD_DIM} fits")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k has head dim {k.shape[-1]} (shape {k.shape}), q has {q.shape[-1]}; they are equal (only v's may differ)"
        )
    head_axis, token_axis = (-3, -2) if layout == "bhnd" else (-2, -3)
    if q.ndim == 2:
        token_axis = -2
    if v.shape[token_axis] != k.shape[token_axis]:
        raise ValueError(
            f"v has {v.shape[token_axis]} tokens (shape {v.shape}), k has {k.shape[token_axis]}; they are equal"
        )
    if q.ndim > 2:
        heads, heads_k, heads_v = (x.shape[head_axis] for x in (q, k, v))
        if heads_v != heads_k:
            raise ValueError(f"v has {heads_v} heads (shape {v.shape}), k has {heads_k}; they are equal")
        if (heads_k == 0 and heads != 0) or (heads_k and heads % heads_k):
            raise ValueError(f"q has {heads} heads (shape {q.shape}), k has {heads_k}; a multiple of k's heads fits")
    return Shape(q.ndim, tuple(q.shape[:-3]), layout)


def pairwise(name: str, array: Any, kind: str, shape: Shape, full: tuple[int, ...], dtypes: str) -> Any:
    """An array that broadcasts to (B, Hq, Nq, Nk), with at most four axes."""
    arrays.require(name, array, kind)
    dtype_kind = DTYPES.get(array.dtype.name, " ")[0]
    if dtype_kind not in dtypes:
        words = {"f": "a floating dtype up to float64 (added to the scores)", "b": "bool (True = attend)"}
        raise TypeError(f"{name} has dtype {array.dtype}; {' or '.join(words[x] for x in dtypes)} fits")
    wanted = (*shape.batch, *full[1:])
    axes = wanted[-array.ndim :] if array.ndim else ()
    if array.ndim > len(wanted) or any(n not in (1, m) for n, m in zip(array.shape, axes, strict=True)):
        raise ValueError(f"{name} has shape {array.shape}; what broadcasts to (..., Hq, Nq, Nk) = {wanted} fits")
    if array.ndim > 3 and len(shape.batch) != 1:
        rest = array.shape[-3:]
        if any(n != 1 for n in array.shape[:-3]):
            array = arrays.namespace(kind).broadcast_to(array, (*shape.batch, *rest))
        array = array.reshape((math.prod(array.shape[:-3]), *rest))
    return array if array.ndim else array.reshape(1)

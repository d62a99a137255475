"""Shapes of the arguments: the caller's axes as (B, H, N, D), and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from . import arrays

FORMS = {"bhnd": "(..., heads, tokens, head_dim)", "bnhd": "(..., tokens, heads, head_dim)"}
LAYOUTS = tuple(FORMS)
HEADS_AND_TOKENS = {"bhnd": (-3, -2), "bnhd": (-2, -3)}
"""Axes of heads and of tokens."""


class Shape:
    """How the caller's arrays map to (B, H, N, D). Axes before the last three are batch axes; missing ones are 1."""

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
        if self.ndim == 2:
            return tensor[0, 0] if self.layout == "bhnd" else tensor[0, :, 0]
        return tensor.reshape((*self.batch, *tensor.shape[1:])) if self.ndim != 4 else tensor

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

    def value_like(self, gradient: Any, shape: tuple[int, ...]) -> Any:
        """The gradient by an array of a modification in its own shape, from which it may have been broadcast over batch
        axes.
        """
        if gradient.size != math.prod(shape):
            batch = (1,) * (len(self.batch) + 3 - len(shape)) + shape[:-3]
            axes = tuple(i for i, n in enumerate(batch) if n == 1)
            gradient = gradient.reshape((*self.batch, *gradient.shape[1:])).sum(axes)
        return gradient.reshape(shape)

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

"""The passes of a rank: attention of its queries to chunks of keys as they come, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from .. import api
from .placement import along, places
from .whole import OF_ROWS, Whole


class Attempt:
    """Runs steps until one fails; transfers go on, so that no rank waits, and the error is told at the end."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """The result of this step, or None."""
        if self.error is None:
            try:
                return step(*arguments)
            except Exception as error:
                self.error = error
        return None


def wide_of(dtype: Any) -> np.dtype:
    """The dtype in which partial results are added."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def add_scaled(total: Any, part: Any, a: Any = 1.0, b: Any = 1.0) -> None:
    """total = a * total + b * part, in place. a, b: numbers, or arrays that broadcast. part may be overwritten."""
    if not isinstance(total, np.ndarray):
        return _kernel(part.dtype.name, total.dtype.name)(*_plain(part), a, b, total, total)
    part = part.astype(total.dtype, copy=False)
    if np.ndim(a):
        total *= a
    if np.ndim(b):
        part = np.multiply(part, b, out=part if part.shape == total.shape else None)
    total += part


@cache
def _kernel(part: str, total: str) -> Any:
    """The sum as one kernel of CuPy, which reads bfloat16 as integers."""
    import cupy

    read = "__uint_as_float((unsigned)part << 16)" if part == "bfloat16" else f"({_C_TYPES[total]})part"
    kind = "uint16" if part == "bfloat16" else part
    names = f"{kind} part, {total} a, {total} b, {total} before"
    return cupy.ElementwiseKernel(names, f"{total} total", f"total = a * before + b * {read}", "flashkit_add_scaled")


_C_TYPES = {"float32": "float", "float64": "double"}


def _plain(part: Any) -> tuple[Any, ...]:
    return (part.view(np.uint16) if part.dtype.name == "bfloat16" else part,)


class Rows:
    """Attention of a chunk of queries to the keys so far: the sum of partial outputs, weighted by log-sum-exps."""

    def __init__(self, whole: Any, q: Any) -> None:
        """whole: a `Whole`, or what has its xp, axes and sinks."""
        self.whole, self.q = whole, q
        self.out: Any = None
        self.lse: Any = None

    def add(self, out: Any, lse: Any) -> None:
        """Merge a partial result."""
        if self.out is None:
            self.out, self.lse = out.astype(wide_of(out.dtype)), lse
            return
        xp = self.whole.xp
        low, high = xp.minimum(self.lse, lse), xp.maximum(self.lse, lse)
        with np.errstate(all="ignore"):  # rows without a key in both: -inf - -inf
            total = high + xp.log1p(xp.where(low == -np.inf, 0, xp.exp(low - high)))
            weights = [self._weight(x, total) for x in (self.lse, lse)]
        add_scaled(self.out, out, *weights)
        self.lse = total

    def _weight(self, lse: Any, total: Any) -> Any:
        weight = self.whole.xp.exp(lse - total)
        weight = self.whole.xp.where(lse == -np.inf, 0, weight).astype(lse.dtype)
        axes = self.whole.axes
        return (weight.swapaxes(-1, -2) if axes.heads == -2 else weight)[..., None]

    def result(self) -> tuple[Any, Any]:
        """out in the dtype of q, and lse, with sinks."""
        xp, whole = self.whole.xp, self.whole
        if self.out is None:
            self.out = xp.zeros((*self.q.shape[:-1], whole.v_dim), wide_of(self.q.dtype))
            self.lse = xp.full(rows_shape(self.q, whole), -np.inf, whole.lse_dtype)
        if whole.sinks is not None:
            nothing = xp.zeros((1,) * self.out.ndim, self.out.dtype)
            self.add(nothing, xp.broadcast_to(_by_row(whole.sinks, self.lse), self.lse.shape))
        return self.out.astype(self.q.dtype, copy=False), self.lse


def rows_shape(q: Any, whole: Whole) -> tuple[int, ...]:
    """The shape of lse for these queries."""
    if q.ndim == 2:
        return q.shape[:-1]
    heads, tokens = q.shape[whole.axes.heads], q.shape[whole.axes.tokens]
    return (*q.shape[:-3], heads, tokens)


def forward(whole: Whole, q: Any, rows: Sequence[range]) -> tuple[Callable[..., None], Callable[[], tuple[Any, Any]]]:
    """(add, result): add(k, v, keys) attends to keys at these positions, result() gives out and lse."""
    axis, own = whole.axes.tokens, places(rows)
    parts = [Rows(whole, along(q, axis, place)) for place in own]

    def add(k: Any, v: Any, keys: Sequence[range]) -> None:
        for part, where, place in zip(parts, rows, own, strict=True):
            for each, at in zip(keys, places(keys), strict=True):
                options = whole.chunk(where, place, each)
                if options is not None:
                    k_j, v_j = along(k, axis, at), along(v, axis, at)
                    part.add(*api.attention(part.q, k_j, v_j, return_lse=True, **options))

    def result() -> tuple[Any, Any]:
        found = [part.result() for part in parts]
        if len(found) == 1:
            return found[0]
        out = whole.xp.empty((*q.shape[:-1], whole.v_dim), q.dtype)
        lse = whole.xp.empty(rows_shape(q, whole), whole.lse_dtype)
        for place, (out_i, lse_i) in zip(own, found, strict=True):
            along(out, axis, place)[...], along(lse, -1, place)[...] = out_i, lse_i
        return out, lse

    return add, result


def backward(
    whole: Whole, q: Any, rows: Sequence[range], out: Any, lse: Any, dout: Any, dlse: Any, dq: Any
) -> Callable[..., None]:  # fmt: skip
    """add(k, v, keys, dk, dv) adds to the gradients of these keys, and to dq."""
    axis, own, xp = whole.axes.tokens, places(rows), whole.xp

    def of(x: Any, place: slice, along_axis: int) -> Any:
        return None if x is None else xp.ascontiguousarray(along(x, along_axis, place))

    parts = [
        (along(q, axis, place), *(of(x, place, axis) for x in (out, dout)), *(of(x, place, -1) for x in (lse, dlse)))
        for place in own
    ]

    def add(k: Any, v: Any, keys: Sequence[range], dk: Any, dv: Any) -> None:
        for (q_i, out_i, dout_i, lse_i, dlse_i), where, place in zip(parts, rows, own, strict=True):
            for each, at in zip(keys, places(keys), strict=True):
                options = whole.chunk(where, place, each)
                if options is None:
                    continue
                vjp = api.vjp_of(q_i, along(k, axis, at), along(v, axis, at), out_i, lse_i, **options)
                of_q, of_k, of_v = vjp(dout_i, dlse_i)
                for total, gradient, i in ((dq, of_q, place), (dk, of_k, at), (dv, of_v, at)):
                    add_scaled(along(total, axis, i), gradient)

    return add


def _by_row(sinks: Any, lse: Any) -> Any:
    return sinks if lse.ndim == 1 else sinks[:, None]


def sink_gradient(whole: Whole, out: Any, lse: Any, dout: Any, dlse: Any) -> np.ndarray:
    """The gradient of the sinks by the rows of this rank, on the host."""
    wide = wide_of(out.dtype)
    delta = (out.astype(wide) * dout.astype(wide)).sum(-1)
    if whole.axes.heads == OF_ROWS.heads:
        delta = delta.swapaxes(-1, -2)
    delta = delta if dlse is None else delta - dlse
    sinks = _by_row(whole.sinks, lse)
    weights = whole.xp.where(sinks == -np.inf, 0, whole.xp.exp(sinks - lse))
    total = -(weights * delta).sum(axis=(*range(lse.ndim - 2), -1)).reshape(-1)
    return np.asarray(total.get() if hasattr(total, "get") else total)

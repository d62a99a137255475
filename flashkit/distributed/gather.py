"""All keys and values on every rank, which pays where they have few heads. Their gradients are sums over the ranks, in
the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .passes import Attempt, backward, forward, wide_of
from .placement import along, count, put, ranges_of, taken
from .transport import Transport
from .whole import Whole


class Gather:
    """The transfers of a rank; see `ring.Ring`."""

    def __init__(
        self, whole: Whole, transport: Transport, order: str, q: Any, k: Any, v: Any, gradients: bool = False
    ) -> None:  # fmt: skip
        self._whole, self._transport, self._q = whole, transport, q
        xp, rank, ranks = whole.xp, transport.rank, transport.ranks
        self._rows = ranges_of(order, whole.tokens[0], rank, ranks)
        self._of_ranks = [ranges_of(order, whole.tokens[1], each, ranks) for each in range(ranks)]
        self._own = [xp.ascontiguousarray(x) for x in (k, v)]
        self._arriving = [[self._empty(x, each, x.dtype) for x in (k, v)] for each in range(ranks)]
        self._all = [self._empty(x, None, x.dtype) for x in (k, v)]
        if gradients:
            wide = wide_of(k.dtype)
            self._sums = [self._empty(x, None, wide) for x in (k, v)]
            self._leaving = [[self._empty(x, each, wide) for x in (k, v)] for each in range(ranks)]
            self._parts = [[self._empty(x, rank, wide) for x in (k, v)] for _ in range(ranks)]

    def forward(self, attempt: Attempt) -> Callable[[], tuple[Any, Any]]:
        """As of `Ring`."""
        add, result = forward(self._whole, self._q, self._rows)
        self._collect(attempt)
        attempt(self._each, lambda k, v, keys, *_: add(k, v, keys))
        return result

    def backward(
        self, attempt: Attempt, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Callable[[], tuple[Any, Any, Any]]:  # fmt: skip
        """As of `Ring`."""
        xp, axis, rank = self._whole.xp, self._whole.axes.tokens, self._transport.rank
        dq = attempt(xp.zeros, self._q.shape, wide_of(self._q.dtype))
        add = attempt(backward, self._whole, self._q, self._rows, out, lse, dout, dlse, dq)
        self._collect(attempt)

        def compute() -> None:
            for x in self._sums:
                x[...] = 0
            self._each(add)
            for ranges, parts in zip(self._of_ranks, self._leaving, strict=True):
                for part, x in zip(parts, self._sums, strict=True):
                    part[...] = taken(xp, x, axis, ranges)

        attempt(compute)
        self._exchange(self._leaving, self._parts)
        self._parts[rank] = self._leaving[rank]

        def result() -> tuple[Any, Any, Any]:
            dk, dv = self._parts[0]
            for parts in self._parts[1:]:
                dk += parts[0]
                dv += parts[1]
            return dq, dk, dv

        return result

    def _collect(self, attempt: Attempt) -> None:
        self._exchange([self._own] * self._transport.ranks, self._arriving)
        self._arriving[self._transport.rank] = self._own
        axis = self._whole.axes.tokens
        for ranges, parts in zip(self._of_ranks, self._arriving, strict=True):
            for x, part in zip(self._all, parts, strict=True):
                attempt(put, x, axis, ranges, part)

    def _each(self, add: Callable[..., None]) -> None:
        """add(k, v, keys, dk, dv) for all keys, in chunks of the step of the queries."""
        step, axis, tokens = self._rows[0].step, self._whole.axes.tokens, self._whole.tokens[1]
        for first in range(step):
            keys = range(first, tokens, step)
            totals = [along(x, axis, keys) for x in getattr(self, "_sums", ())]
            add(*(along(x, axis, keys) for x in self._all), [keys], *totals)

    def _exchange(self, leaving: list[list[Any]], arriving: list[list[Any]]) -> None:
        other = [rank for rank in range(self._transport.ranks) if rank != self._transport.rank]
        sends = [(rank, x) for rank in other for x in leaving[rank]]
        self._transport.exchange(sends, [(rank, x) for rank in other for x in arriving[rank]]).wait()

    def _empty(self, x: Any, rank: int | None, dtype: Any) -> Any:
        shape = list(x.shape)
        tokens = self._whole.tokens[1] if rank is None else count(self._of_ranks[rank])
        shape[self._whole.axes.tokens] = tokens
        return self._whole.xp.empty(tuple(shape), dtype)

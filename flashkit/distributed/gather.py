"""All keys and values on every rank, which pays where they have few heads. Their gradients are summed over the ranks in
the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .all_to_all import AllToAll, finished
from .passes import Attempt, backward, forward, wide_of
from .placement import along, ranges_of
from .transport import Transport
from .whole import Whole


class Gather:
    """The transfers of a rank; see `ring.RingAttention`."""

    def __init__(
        self, whole: Whole, transport: Transport, order: str, q: Any, k: Any, v: Any, gradients: bool = False
    ) -> None:  # fmt: skip
        self._whole, self._q, self._given = whole, q, [whole.xp.ascontiguousarray(x) for x in (k, v)]
        ranks = range(transport.ranks)
        rows, keys = ([ranges_of(order, n, rank, transport.ranks) for rank in ranks] for n in whole.tokens)
        self._rows = rows[transport.rank]

        def make(x: Any, dtype: Any, scatter: bool) -> AllToAll:
            return AllToAll(whole.xp, transport, x.shape, dtype, whole.axes.tokens, keys, scatter=scatter)

        self._inputs = [make(x, x.dtype, scatter=False) for x in (k, v)]
        self._gradients = [make(x, wide_of(x.dtype), scatter=True) for x in (k, v) if gradients]

    def forward(self, attempt: Attempt) -> Callable[[], tuple[Any, Any]]:
        """As of `RingAttention`."""
        k, v = finished(each.collect(attempt, x) for each, x in zip(self._inputs, self._given, strict=True))
        add, result = forward(self._whole, self._q, self._rows)
        attempt(self._each, add, k, v)
        return result

    def backward(
        self, attempt: Attempt, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Callable[[], tuple[Any, Any, Any]]:  # fmt: skip
        """As of `RingAttention`."""
        k, v = finished(each.collect(attempt, x) for each, x in zip(self._inputs, self._given, strict=True))

        def compute() -> tuple[Any, Any, Any]:
            dq, dk, dv = (self._whole.xp.zeros(x.shape, wide_of(x.dtype)) for x in (self._q, k, v))
            self._each(backward(self._whole, self._q, self._rows, out, lse, dout, dlse, dq), k, v, dk, dv)
            return dq, dk, dv

        dq, *sums = attempt(compute) or (None, None, None)
        dk, dv = finished(each.scatter(attempt, x) for each, x in zip(self._gradients, sums, strict=True))
        return lambda: (dq, dk, dv)

    def _each(self, add: Callable[..., None], k: Any, v: Any, *sums: Any) -> None:
        """add(k, v, keys, dk, dv) for all keys, in chunks of the step of the queries."""
        step, axis, tokens = self._rows[0].step, self._whole.axes.tokens, self._whole.tokens[1]
        for first in range(step):
            keys = range(first, tokens, step)
            k_i, v_i, *sums_i = (along(x, axis, keys) for x in (k, v, *sums))
            add(k_i, v_i, [keys], *sums_i)

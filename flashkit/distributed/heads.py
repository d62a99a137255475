"""All tokens of some heads on each rank: an all-to-all before attention and one after it. One rank's heads are computed
as on one device. Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509.

Fewer KV heads than ranks are copied to all ranks that have query heads of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from .all_to_all import AllToAll, finished
from .passes import Attempt, backward, forward, wide_of
from .placement import ranges_of
from .transport import Transport
from .whole import OF_ROWS, Whole


def check_heads(whole: Whole, ranks: int) -> None:
    """Refuse heads that cannot be spread evenly over so many ranks."""
    if whole.axes.heads is None or whole.heads % ranks or (whole.heads_kv % ranks and ranks % whole.heads_kv):
        raise UnsupportedError(
            f"method='heads': expected a number of heads that {ranks} ranks divide, and one of KV heads that they "
            f"divide or that divides them, got {whole.heads} and {whole.heads_kv}; use method='ring'"
        )


class Heads:
    """The transfers of a rank; see `ring.RingAttention`."""

    def __init__(
        self, whole: Whole, transport: Transport, order: str, q: Any, k: Any, v: Any, gradients: bool = False
    ) -> None:  # fmt: skip
        xp, ranks, axes = whole.xp, transport.ranks, whole.axes
        check_heads(whole, ranks)
        group, each = whole.heads // whole.heads_kv, whole.heads // ranks
        of_q = [range(n * each, (n + 1) * each) for n in range(ranks)]
        of_k = [range(heads.start // group, (heads.stop - 1) // group + 1) for heads in of_q]
        self._part = whole.of_heads(of_q[transport.rank])
        rows, keys = ([ranges_of(order, n, rank, ranks) for rank in range(ranks)] for n in whole.tokens)

        def make(
            shape: Any, dtype: Any, tokens: Any, heads: Any, axes: Any = axes, *, scatter: bool = False
        ) -> AllToAll:  # fmt: skip
            spread = axes.heads, heads
            return AllToAll(xp, transport, shape, dtype, axes.tokens, tokens, spread, scatter=scatter)

        given: Any = (q, rows, of_q), (k, keys, of_k), (v, keys, of_k)
        self._given = q, k, v
        self._inputs = [make(x.shape, x.dtype, *place) for x, *place in given]
        of_out: Any = (*q.shape[:-1], v.shape[-1]), q.dtype, rows, of_q
        of_lse: Any = (*q.shape[:-3], whole.heads, q.shape[axes.tokens]), whole.lse_dtype, rows, of_q, OF_ROWS
        self._results = [make(*each, scatter=True) for each in (of_out, of_lse) if not gradients]
        self._recorded = [make(*each) for each in (of_out, of_lse, of_out, of_lse) if gradients]
        sums: Any = [(x.shape, wide_of(x.dtype), *place) for x, *place in given if gradients]
        self._gradients = [make(*each, scatter=True) for each in sums]

    def forward(self, attempt: Attempt) -> Callable[[], tuple[Any, Any]]:
        """As of `RingAttention`."""
        q, k, v = finished(each.collect(attempt, x) for each, x in zip(self._inputs, self._given, strict=True))

        def compute() -> tuple[Any, Any]:
            add, result = forward(self._part, q, [range(self._part.tokens[0])])
            add(k, v, [range(self._part.tokens[1])])
            return result()

        found = attempt(compute) or (None, None)
        out, lse = finished(each.scatter(attempt, x) for each, x in zip(self._results, found, strict=True))
        return lambda: (out, lse)

    def backward(
        self, attempt: Attempt, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Callable[[], tuple[Any, Any, Any]]:  # fmt: skip
        """As of `RingAttention`."""
        recorded = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
        moves = zip((*self._inputs, *self._recorded), (*self._given, *recorded), strict=False)
        q, k, v, out, lse, dout, *of_lse = finished(each.collect(attempt, x) for each, x in moves)
        dlse = of_lse[0] if of_lse else None

        def compute() -> list[Any]:
            sums = [self._part.xp.zeros(x.shape, wide_of(x.dtype)) for x in (q, k, v)]
            add = backward(self._part, q, [range(self._part.tokens[0])], out, lse, dout, dlse, sums[0])
            add(k, v, [range(self._part.tokens[1])], *sums[1:])
            return sums

        sums = attempt(compute) or [None] * 3
        dq, dk, dv = finished(each.scatter(attempt, x) for each, x in zip(self._gradients, sums, strict=True))
        return lambda: (dq, dk, dv)

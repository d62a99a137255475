"""The methods "heads" and "gather": all-to-alls before and after attention, which a rank computes as one device does.

heads: each rank gets all tokens of some heads. Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509. Fewer KV
heads than ranks are copied to all ranks that have query heads of theirs.

gather: each rank gets all keys and values, which pays where they have few heads. Its queries and results stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import UnsupportedError
from .all_to_all import AllToAll
from .passes import Attempt, backward, forward, wide_of
from .placement import along, ranges_of
from .transport import Transport
from .whole import OF_ROWS, Axes, Whole


def check_heads(whole: Whole, ranks: int) -> None:
    """Refuse heads that cannot be spread evenly over so many ranks."""
    if whole.axes.heads is None or whole.heads % ranks or (whole.heads_kv % ranks and ranks % whole.heads_kv):
        raise UnsupportedError(
            f"method='heads': expected a number of heads that {ranks} ranks divide, and one of KV heads that they "
            f"divide or that divides them, got {whole.heads} and {whole.heads_kv}; use method='ring'"
        )


class Collected:
    """The transfers of a rank, as of `ring.RingAttention`; gradients are summed in the order of ranks."""

    def __init__(
        self, whole: Whole, transport: Transport, order: str, q: Any, k: Any, v: Any, gradients: bool = False, *,
        spreads_heads: bool,
    ) -> None:  # fmt: skip
        rank, ranks, axes = transport.rank, transport.ranks, whole.axes
        rows, keys = ([ranges_of(order, n, each, ranks) for each in range(ranks)] for n in whole.tokens)
        of_q = of_k = None
        self._part, self._rows, self._given = whole, rows[rank], (q, k, v)
        if spreads_heads:
            check_heads(whole, ranks)
            group, each = whole.heads // whole.heads_kv, whole.heads // ranks
            of_q = [range(n * each, (n + 1) * each) for n in range(ranks)]
            of_k = [range(heads.start // group, (heads.stop - 1) // group + 1) for heads in of_q]
            self._part, self._rows = whole.of_heads(of_q[rank]), [range(whole.tokens[0])]
        else:
            self._given = q, *map(whole.xp.ascontiguousarray, (k, v))

        def make(
            shape: Any, dtype: Any, tokens: Any, heads: Any, axes: Axes = axes, *, scatter: bool = False
        ) -> AllToAll | None:  # fmt: skip
            """None for what stays on its rank."""
            if tokens is rows and heads is None:
                return None
            spread: Any = None if heads is None else (axes.heads, heads)
            return AllToAll(whole.xp, transport, shape, dtype, axes.tokens, tokens, spread, scatter=scatter)

        given: Any = (q, rows, of_q), (k, keys, of_k), (v, keys, of_k)
        self._inputs = [make(x.shape, x.dtype, *place) for x, *place in given]
        of_out: Any = (*q.shape[:-1], v.shape[-1]), q.dtype, rows, of_q
        of_lse: Any = (*q.shape[:-3], whole.heads, q.shape[axes.tokens]), whole.lse_dtype, rows, of_q, OF_ROWS
        self._results = [make(*each, scatter=True) for each in (of_out, of_lse) if not gradients]
        self._recorded = [make(*each) for each in (of_out, of_lse, of_out, of_lse) if gradients]
        sums: Any = [(x.shape, wide_of(x.dtype), *place) for x, *place in given if gradients]
        self._gradients = [make(*each, scatter=True) for each in sums]

    def forward(self, attempt: Attempt) -> Callable[[], tuple[Any, Any]]:
        """As of `RingAttention`."""
        q, k, v = _moved(attempt, AllToAll.collect, self._inputs, self._given)

        def compute() -> tuple[Any, Any]:
            add, result = forward(self._part, q, self._rows)
            self._each(add, k, v)
            return result()

        found = attempt(compute) or (None, None)
        out, lse = _moved(attempt, AllToAll.scatter, self._results, found)
        return lambda: (out, lse)

    def backward(
        self, attempt: Attempt, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Callable[[], tuple[Any, Any, Any]]:  # fmt: skip
        """As of `RingAttention`."""
        moves, recorded = (*self._inputs, *self._recorded), (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
        q, k, v, out, lse, dout, *of_lse = _moved(attempt, AllToAll.collect, moves, (*self._given, *recorded))
        dlse = of_lse[0] if of_lse else None

        def compute() -> list[Any]:
            dq, dk, dv = sums = [self._part.xp.zeros(x.shape, wide_of(x.dtype)) for x in (q, k, v)]
            self._each(backward(self._part, q, self._rows, out, lse, dout, dlse, dq), k, v, dk, dv)
            return sums

        sums = attempt(compute) or [None] * 3
        dq, dk, dv = _moved(attempt, AllToAll.scatter, self._gradients, sums)
        return lambda: (dq, dk, dv)

    def _each(self, add: Callable[..., None], k: Any, v: Any, *sums: Any) -> None:
        """add(k, v, keys, dk, dv) for all keys, in chunks of the step of the queries."""
        step, axis, tokens = self._rows[0].step, self._part.axes.tokens, self._part.tokens[1]
        for first in range(step):
            keys = range(first, tokens, step)
            k_i, v_i, *sums_i = (along(x, axis, keys) for x in (k, v, *sums))
            add(k_i, v_i, [keys], *sums_i)


def _moved(attempt: Attempt, move: Any, transfers: Iterable[AllToAll | None], given: Iterable[Any]) -> list[Any]:
    """What these transfers, all under way together, make of arrays; what has none stays as it is."""
    started = [x if each is None else move(each, attempt, x) for each, x in zip(transfers, given, strict=False)]
    return [x() if callable(x) else x for x in started]

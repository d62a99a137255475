"""All tokens of some heads on each rank: an all-to-all before attention and one after it. One rank's heads are computed
as on one device. Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509.

Fewer KV heads than ranks are copied to all ranks that have query heads of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from .passes import Attempt, backward, forward, wide_of
from .placement import along, count, put, ranges_of, taken
from .transport import Transport
from .whole import OF_ROWS, Axes, Whole


class Heads:
    """The transfers of a rank; see `ring.Ring`."""

    def __init__(
        self, whole: Whole, transport: Transport, order: str, q: Any, k: Any, v: Any, gradients: bool = False
    ) -> None:  # fmt: skip
        self._whole, self._transport = whole, transport
        xp, ranks, axes = whole.xp, transport.ranks, whole.axes
        if axes.heads is None or whole.heads % ranks or (whole.heads_kv % ranks and ranks % whole.heads_kv):
            raise UnsupportedError(
                f"method='heads': expected a number of heads that {ranks} ranks divide, and one of KV heads that they "
                f"divide or that divides them, got {whole.heads} and {whole.heads_kv}; use method='ring'"
            )
        group, each = whole.heads // whole.heads_kv, whole.heads // ranks
        of_q = [range(n * each, (n + 1) * each) for n in range(ranks)]
        of_k = [range(heads.start // group, (heads.stop - 1) // group + 1) for heads in of_q]
        of_ranks = [[ranges_of(order, n, rank, ranks) for rank in range(ranks)] for n in whole.tokens]
        own = transport.rank
        self._part = whole.of_heads(of_q[own], len(of_k[own]))
        places = [(of_q, of_ranks[0]), (of_k, of_ranks[1]), (of_k, of_ranks[1])]
        self._inputs = [
            _Exchange(xp, transport, axes, *place, x.shape, x.dtype) for place, x in zip(places, (q, k, v), strict=True)
        ]
        self._given = q, k, v
        shape = (*q.shape[:-1], v.shape[-1])
        lse_shape = (*q.shape[:-3], whole.heads, q.shape[axes.tokens])
        of_out = _Exchange(xp, transport, axes, *places[0], shape, q.dtype)
        of_lse = _Exchange(xp, transport, OF_ROWS, *places[0], lse_shape, whole.lse_dtype)
        self._rows = [range(whole.tokens[0])]
        self._keys = [range(whole.tokens[1])]
        self._results = [of_out, of_lse]
        self._gradients: list[_Exchange] = []
        if gradients:
            self._out, self._lse = (x.copied() for x in self._results)
            self._gradients = [_Exchange(xp, transport, axes, *place, x.shape, wide_of(q.dtype))
                               for place, x in zip(places, (q, k, v), strict=True)]  # fmt: skip

    def forward(self, attempt: Attempt) -> Callable[[], tuple[Any, Any]]:
        """As of `Ring`."""
        q, k, v = (each.to_heads(attempt, x) for each, x in zip(self._inputs, self._given, strict=True))

        def compute() -> tuple[Any, Any]:
            add, result = forward(self._part, q, self._rows)
            add(k, v, self._keys)
            return result()

        out, lse = attempt(compute) or (None, None)
        of_out, of_lse = self._results
        found = of_out.to_tokens(attempt, out), of_lse.to_tokens(attempt, lse)
        return lambda: found

    def backward(
        self, attempt: Attempt, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Callable[[], tuple[Any, Any, Any]]:  # fmt: skip
        """As of `Ring`."""
        q, k, v = (each.to_heads(attempt, x) for each, x in zip(self._inputs, self._given, strict=True))
        of_out, of_lse = self._results
        out, dout = self._out.to_heads(attempt, out), of_out.to_heads(attempt, dout)
        lse = self._lse.to_heads(attempt, lse)
        dlse = None if dlse is None else of_lse.to_heads(attempt, dlse)

        def compute() -> list[Any]:
            wide = wide_of(q.dtype)
            sums = [self._part.xp.zeros(x.shape, wide) for x in (q, k, v)]
            backward(self._part, q, self._rows, out, lse, dout, dlse, sums[0])(k, v, self._keys, *sums[1:])
            return sums

        sums = attempt(compute) or [None] * 3
        found = [each.to_tokens(attempt, x) for each, x in zip(self._gradients, sums, strict=True)]
        return lambda: (found[0], found[1], found[2])


class _Exchange:
    """The all-to-all of an array: from all heads of a rank's tokens to all tokens of a rank's heads, and back.

    heads, tokens: of each rank.
    """

    def __init__(
        self, xp: Any, transport: Transport, axes: Axes, heads: list[range], tokens: list[list[range]],
        shape: tuple[int, ...], dtype: Any,
    ) -> None:  # fmt: skip
        self._given = xp, transport, axes, heads, tokens, shape, dtype
        self._xp, self._transport, self._axes, self._heads, self._tokens = xp, transport, axes, heads, tokens
        self._shape, own = list(shape), transport.rank
        ranks = range(transport.ranks)
        self._by_heads = [xp.empty(self._sizes(len(heads[rank]), count(tokens[own])), dtype) for rank in ranks]
        self._by_tokens = [xp.empty(self._sizes(len(heads[own]), count(tokens[rank])), dtype) for rank in ranks]
        self._of_heads = xp.empty(self._sizes(len(heads[own]), sum(map(count, tokens))), dtype)
        self._of_tokens = xp.empty(tuple(shape), dtype)

    def copied(self) -> _Exchange:
        """One like this, with memory of its own."""
        return _Exchange(*self._given)

    def to_heads(self, attempt: Attempt, x: Any) -> Any:
        """All tokens of the rank's heads."""
        axis = self._axes.heads
        assert axis is not None
        for part, heads in zip(self._by_heads, self._heads, strict=True):
            attempt(lambda: part.__setitem__(..., along(x, axis, heads)))  # noqa: B023
        self._move(self._by_heads, self._by_tokens)
        for part, ranges in zip(self._by_tokens, self._tokens, strict=True):
            attempt(put, self._of_heads, self._axes.tokens, ranges, part)
        return self._of_heads

    def to_tokens(self, attempt: Attempt, x: Any) -> Any:
        """All heads of the rank's tokens; the sum over the ranks that have a head."""
        axis = self._axes.heads
        assert axis is not None
        for part, ranges in zip(self._by_tokens, self._tokens, strict=True):
            attempt(lambda: part.__setitem__(..., taken(self._xp, x, self._axes.tokens, ranges)))  # noqa: B023
        self._move(self._by_tokens, self._by_heads)
        covered = 0
        for part, heads in zip(self._by_heads, self._heads, strict=True):
            own = along(self._of_tokens, axis, heads)
            if heads.start >= covered:
                attempt(lambda: own.__setitem__(..., part))  # noqa: B023
            else:
                attempt(lambda: own.__iadd__(part))  # noqa: B023
            covered = heads.stop
        return self._of_tokens

    def _move(self, leaving: list[Any], arriving: list[Any]) -> None:
        own = self._transport.rank
        other = [rank for rank in range(self._transport.ranks) if rank != own]
        self._transport.exchange(
            [(rank, leaving[rank]) for rank in other], [(rank, arriving[rank]) for rank in other]
        ).wait()
        arriving[own][...] = leaving[own]

    def _sizes(self, heads: int, tokens: int) -> tuple[int, ...]:
        shape = list(self._shape)
        assert self._axes.heads is not None
        shape[self._axes.heads], shape[self._axes.tokens] = heads, tokens
        return tuple(shape)

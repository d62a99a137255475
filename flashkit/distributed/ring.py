"""RingAttention: keys and values go from rank to rank, each transfer behind the attention to the chunk before.

    rank r, step s: attention of the rank's queries to the keys of rank r - s, while these go to rank r + 1

In the backward pass the gradients of keys and values follow them, one step behind, and gather each rank's part in
float32; from the last rank they go home. Liu, Zaharia and Abbeel, 2023, arXiv
2310.01889; zigzag: Zhu, ring-flash-attention.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from .passes import Attempt, backward, forward, wide_of
from .placement import count, ranges_of
from .transport import Pending, Transport
from .whole import Whole


class RingAttention:
    """The transfers of a rank, whose memory is allocated before the first. gradients: for the backward pass."""

    def __init__(
        self, whole: Whole, transport: Transport, order: str, q: Any, k: Any, v: Any, gradients: bool = False
    ) -> None:  # fmt: skip
        self._whole, self._transport = whole, transport
        rank, ranks = transport.rank, transport.ranks
        self._rows = ranges_of(order, whole.tokens[0], rank, ranks)
        self._keys = [ranges_of(order, whole.tokens[1], each, ranks) for each in range(ranks)]
        self._next, self._previous = (rank + 1) % ranks, (rank - 1) % ranks
        self._q, self._own = q, (whole.xp.ascontiguousarray(k), whole.xp.ascontiguousarray(v))
        self._hops = self._count_hops(order)
        most = max(map(count, self._keys))
        needed = min(self._hops - 1, 2)
        self._buffers = [self._room(most, (k.dtype, v.dtype)) for _ in range(needed)]
        if gradients:
            wide = wide_of(k.dtype)
            self._sums = [self._room(most, (wide, wide)) for _ in range(2)]
            self._arriving = self._room(most, (wide, wide)) if ranks > 1 else self._sums[0]

    def forward(self, attempt: Attempt) -> Callable[[], tuple[Any, Any]]:
        """What gives out and lse of the rank's queries."""
        add, result = forward(self._whole, self._q, self._rows)
        for _, source, (k, v) in self._steps():
            attempt(add, k, v, self._keys[source])
        return result

    def backward(
        self, attempt: Attempt, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Callable[[], tuple[Any, Any, Any]]:  # fmt: skip
        """What gives dq, dk and dv of the rank, in the dtype of sums."""
        xp, rank, ranks = self._whole.xp, self._transport.rank, self._transport.ranks
        dq = attempt(xp.zeros, self._q.shape, wide_of(self._q.dtype))
        add = attempt(backward, self._whole, self._q, self._rows, out, lse, dout, dlse, dq)
        arrival: Pending | None = None
        for step, source, (k, v) in self._steps():
            sums = self._shaped(self._sums[step % 2], source)
            for x in sums:
                attempt(x.fill, 0)
            attempt(lambda: add(k, v, self._keys[source], *sums))  # noqa: B023
            if arrival is not None:
                arrival.wait()
                for total, x in zip(sums, self._shaped(self._arriving, source), strict=True):
                    attempt(operator.iadd, total, x)
            last = step == self._hops - 1
            to, of = (source, (rank + step) % ranks) if last else (self._next, self._previous)
            arriving = self._shaped(self._arriving, rank if last else (source - 1) % ranks)
            if to == rank:
                arriving = sums
            else:
                arrival = self._transport.exchange([(to, x) for x in sums], [(of, x) for x in arriving])
        if self._hops > 1 and arrival is not None:
            arrival.wait()
        return lambda: (dq, *arriving)

    def _steps(self) -> Any:
        """(step, rank of the keys, (k, v)), while the next ones arrive."""
        rank, ranks = self._transport.rank, self._transport.ranks
        current: Any = self._own
        for step in range(self._hops):
            source, pending = (rank - step) % ranks, None
            if step < self._hops - 1:
                arriving = self._shaped(self._buffers[step % len(self._buffers)], (source - 1) % ranks)
                pending = self._transport.exchange(
                    [(self._next, x) for x in current], [(self._previous, x) for x in arriving]
                )  # fmt: skip
            yield step, source, current
            if pending is not None:
                pending.wait()
                current = arriving

    def _count_hops(self, order: str) -> int:
        """Steps until no rank sees what arrives, by causal masks, windows and lengths: the same on all ranks."""
        ranks, whole = self._transport.ranks, self._whole
        queries = [ranges_of(order, whole.tokens[0], each, ranks) for each in range(ranks)]
        for step in range(ranks - 1, 0, -1):
            for rank in reversed(range(ranks)):
                for rows in queries[rank]:
                    if any(whole.sees(rows, keys) for keys in self._keys[(rank - step) % ranks]):
                        return step + 1
        return 1

    def _room(self, tokens: int, dtypes: tuple[Any, Any]) -> list[Any]:
        """Memory for keys and values of so many tokens."""
        shapes = [self._shape(x, tokens) for x in self._own]
        return [self._whole.xp.empty(math.prod(n), dtype) for n, dtype in zip(shapes, dtypes, strict=True)]

    def _shaped(self, room: list[Any], source: int) -> list[Any]:
        """This memory as arrays of the keys and values of a rank."""
        shapes = [self._shape(x, count(self._keys[source])) for x in self._own]
        return [memory[: math.prod(n)].reshape(n) for memory, n in zip(room, shapes, strict=True)]

    def _shape(self, x: Any, tokens: int) -> tuple[int, ...]:
        shape = list(x.shape)
        shape[self._whole.axes.tokens] = tokens
        return tuple(shape)

"""All-to-alls between an array of a rank's tokens and one of all tokens: gathers, scatters with sums, and exchanges of
tokens for heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .passes import Attempt
from .placement import along, count, places
from .transport import Transport

Views = list[Any]


class AllToAll:
    """The transfers of one array of this shape. Its memory is allocated here, before the first transfer.

    axis: of its tokens. tokens: the positions of each rank's tokens. heads: (axis, the heads of each rank) if a rank
    gets all tokens of these heads alone. Several ranks may have a head.
    """

    def __init__(
        self, xp: Any, transport: Transport, shape: Sequence[int], dtype: Any, axis: int,
        tokens: Sequence[Sequence[range]], heads: tuple[int, Sequence[range]] | None = None,
    ) -> None:  # fmt: skip
        self._transport, self._axis, self._tokens, self._heads = transport, axis, tokens, heads
        self._ranks = range(transport.ranks)
        self._own = xp.empty(tuple(shape), dtype)
        sizes = list(shape)
        sizes[axis] = sum(map(count, tokens))
        if heads is not None:
            sizes[heads[0]] = len(heads[1][transport.rank])
        self._all = xp.empty(tuple(sizes), dtype)

        def empty(views: Views) -> Views:
            return [xp.empty(x.shape, dtype) for x in views]

        self._of_own = [empty(self._views_of_own(self._own, rank)) for rank in self._ranks]
        self._of_all = [empty(self._views_of_all(self._all, rank)) for rank in self._ranks]

    def collect(self, attempt: Attempt, own: Any) -> Any:
        """All tokens, of the rank's heads; memory of this object."""
        self._move(attempt, own, self._views_of_own, self._of_own, self._of_all)
        for rank in self._ranks:
            attempt(_copy, self._of_all[rank], lambda rank=rank: self._views_of_all(self._all, rank))
        return self._all

    def scatter(self, attempt: Attempt, every: Any) -> Any:
        """All heads of the rank's tokens, summed over the ranks that have a head, in their order; as `collect`."""
        self._move(attempt, every, self._views_of_all, self._of_all, self._of_own)
        for rank in self._ranks:
            first = rank == 0 if self._heads is None else self._heads[1][rank] not in self._heads[1][:rank]
            attempt(_copy, self._of_own[rank], lambda rank=rank: self._views_of_own(self._own, rank), not first)
        return self._own

    def _move(
        self, attempt: Attempt, x: Any, views: Callable[[Any, int], Views], leaving: list[Views], arriving: list[Views]
    ) -> None:  # fmt: skip
        for rank in self._ranks:
            attempt(lambda rank=rank: _copy(views(x, rank), lambda: leaving[rank]))
        other = [rank for rank in self._ranks if rank != self._transport.rank]
        sends, receives = ([(rank, x) for rank in other for x in each[rank]] for each in (leaving, arriving))
        self._transport.exchange(sends, receives).wait()
        _copy(leaving[self._transport.rank], lambda: arriving[self._transport.rank])

    def _views_of_own(self, own: Any, rank: int) -> Views:
        """What goes to a rank, or comes from it, of the array of the rank's tokens, range by range;"""
        part = own if self._heads is None else along(own, self._heads[0], self._heads[1][rank])
        return [along(part, self._axis, place) for place in places(self._tokens[self._transport.rank])]

    def _views_of_all(self, every: Any, rank: int) -> Views:
        """and of the array of all tokens."""
        return [along(every, self._axis, where) for where in self._tokens[rank]]


def _copy(sources: Views, targets: Callable[[], Views], add: bool = False) -> None:
    for source, target in zip(sources, targets(), strict=True):
        if add:
            target += source
        else:
            target[...] = source

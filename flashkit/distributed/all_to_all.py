"""All-to-alls between an array of a rank's tokens and one of all tokens: gathers, scatters with sums, and exchanges of
tokens for heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .passes import Attempt
from .placement import along, count, places
from .transport import Pending, Transport


class AllToAll:
    """The transfers of one array of this shape, in one direction. Its memory is allocated here, before the first.

    axis: of its tokens. tokens: the positions of each rank's tokens. heads: (axis, the heads of each rank) if a rank
    gets all tokens of these heads alone. Several ranks may have a head. scatter: whether `scatter` follows, and not
    `collect`.
    """

    def __init__(
        self, xp: Any, transport: Transport, shape: Sequence[int], dtype: Any, axis: int,
        tokens: Sequence[Sequence[range]], heads: tuple[int, Sequence[range]] | None = None, *, scatter: bool = False,
    ) -> None:  # fmt: skip
        self._transport, self._axis, self._tokens, self._heads = transport, axis, tokens, heads
        self._rank, ranks = transport.rank, range(transport.ranks)
        self._others = [rank for rank in ranks if rank != self._rank]

        def empty(tokens: int, rank: int) -> Any:
            """Memory for so many tokens of this rank's heads."""
            sizes = list(shape)
            sizes[axis] = tokens
            if heads is not None:
                sizes[heads[0]] = len(heads[1][rank])
            return xp.empty(tuple(sizes), dtype)

        of_own = {rank: empty(shape[axis], rank) for rank in self._others if scatter or heads is not None}
        of_all = {rank: empty(count(tokens[rank]), self._rank) for rank in self._others}
        self._leaving, self._arriving = (of_all, of_own) if scatter else (of_own, of_all)
        self._result = xp.empty(tuple(shape), dtype) if scatter else empty(sum(map(count, tokens)), self._rank)

    def collect(self, attempt: Attempt, own: Any) -> Callable[[], Any]:
        """Start to collect `own`, contiguous unless heads are spread; what is returned waits for all tokens."""
        for rank, message in self._leaving.items():
            attempt(_copy, self._of_heads(own, rank), message)
        pending = self._exchange(self._leaving or dict.fromkeys(self._others, own))

        def finish() -> Any:
            pending.wait()
            for rank, part in {self._rank: attempt(self._of_heads, own, self._rank), **self._arriving}.items():
                attempt(self._spread, part, self._result, rank)
            return self._result

        return finish

    def scatter(self, attempt: Attempt, every: Any) -> Callable[[], Any]:
        """Start to scatter; what is returned waits for the rank's tokens, summed in the order of ranks."""
        for rank, message in self._leaving.items():
            attempt(self._pack, every, rank, message)
        pending = self._exchange(self._leaving)

        def finish() -> Any:
            pending.wait()
            for rank in range(self._transport.ranks):
                attempt(self._add, every, rank)
            return self._result

        return finish

    def _exchange(self, leaving: dict[int, Any]) -> Pending:
        return self._transport.exchange([*leaving.items()], [*self._arriving.items()])

    def _of_heads(self, own: Any, rank: int) -> Any:
        """What a rank gets of the array of the own tokens."""
        return own if self._heads is None else along(own, self._heads[0], self._heads[1][rank])

    def _spread(self, part: Any, every: Any, rank: int) -> None:
        """Copy this rank's tokens to their positions among all."""
        for place, where in zip(places(self._tokens[rank]), self._tokens[rank], strict=True):
            along(every, self._axis, where)[...] = along(part, self._axis, place)

    def _pack(self, every: Any, rank: int, part: Any, add: bool = False) -> None:
        """Copy this rank's tokens from their positions, or add them."""
        for place, where in zip(places(self._tokens[rank]), self._tokens[rank], strict=True):
            _copy(along(every, self._axis, where), along(part, self._axis, place), add)

    def _add(self, every: Any, rank: int) -> None:
        """Add what a rank has for the own tokens to the result; the first rank that has these heads sets it."""
        first = rank == 0 if self._heads is None else self._heads[1][rank] not in self._heads[1][:rank]
        part = self._of_heads(self._result, rank)
        if rank == self._rank:
            self._pack(every, rank, part, add=not first)
        else:
            _copy(self._arriving[rank], part, add=not first)


def finished(transfers: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of several transfers that are under way together."""
    return [finish() for finish in [*transfers]]


def _copy(source: Any, target: Any, add: bool = False) -> None:
    if add:
        target += source
    else:
        target[...] = source

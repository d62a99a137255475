"""Shared-prefix decoding, as FlashInfer's cascade: pages that sequences share are read once for all of them.

The queries of all these sequences are rows of one call over the shared pages. A second call has the rest of each
sequence, and `merge` combines the two. The query heads of a group are rows of the first call too: its keys precede all
queries, so a causal mask hides none, and no row needs a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import dispatch
from ..call import arrays, plans
from ..call.arguments import prepare
from ..call.checks import check_out
from ..call.merge import merge
from ..call.planned import Planned
from ..options import OPTIONS
from .pages import PageTable
from .pools import Pools
from .step_plans import MAX_TOKENS, Rest, StepPlans

MIN_BYTES, MIN_TOKENS = 12 << 20, 1024
"""Where it pays on the CPU: bytes of keys and values of a layer that are not read again, beside which the second call
and merging count little; and tokens of the prefix for each query row of a key/value head. The more rows use a key
anyway, the less of the time is that of reading. docs/notes/cpu.md has the measurements.
"""

QUERIES = 64
"""Rows of a key/value head that are queries of one head; fewer are heads of one token each, which decoding packs."""


_BY_POSITION = frozenset(name for name, option in OPTIONS.items() if option.by_position and name != "causal")
"""Options that depend on positions, which rows of the shared pages lack. A causal mask hides no key of a prefix."""


class Prefix(NamedTuple):
    """Tokens at the beginning of several sequences, in whole pages that these share."""

    sequences: np.ndarray
    pages: np.ndarray  # int64 (columns,)
    tokens: int


class Cascade:
    """Attention of the next step's queries where sequences share pages.

    token_bytes: of a token's keys and values in a layer. asked: whether to read shared pages once; None: where it pays,
    on the CPU.
    """

    def __init__(self, pages: PageTable, kind: str, token_bytes: int, asked: bool | None) -> None:
        self._kind, self._token_bytes = kind, token_bytes
        self._minima = (MIN_BYTES, MIN_TOKENS) if asked is None else (1, 0)
        self._off = asked is False or pages.left is not None or (asked is None and kind != "numpy")
        self._prefixes: list[Prefix] = []
        self._rest: Rest | None = None  # where there are prefixes
        self._rest_plans = StepPlans(pages, kind)
        self._owner = object()  # part of the keys of its plans
        self._prefixes_for: tuple[PageTable | None, int] = None, 0  # what prefixes are for: pages, and rows of a head
        self._unshared: Any = None  # references without shared pages, which most appends leave as they are

    def attend(self, q: Any, pools: Pools, options: dict[str, Any], pages: PageTable, out: Any) -> Any:
        """The result of `Layer.attend`; None unless few queries end sequences that share pages, in any position."""
        if self._unshared is pages.references or self._off or q.ndim != 4:
            return None
        if any(options[name] is not None for name in _BY_POSITION & options.keys()):
            return None
        tokens_first = options.get("layout") == "bnhd"
        q4 = q.swapaxes(1, 2) if tokens_first else q
        rows = q4.shape[1] * q4.shape[2] // pools.k.shape[2]
        if self._prefixes_for[0] is not pages or self._prefixes_for[1] != rows:
            self._find(pages, rows)
        if self._rest is None:
            return None
        planned = self._rest_plans.find(q, pools, {**options, "return_lse": True}, self._rest)
        if planned is None:
            return None
        result, lse = planned(q, pools.k, pools.v)
        result4 = result.swapaxes(1, 2) if tokens_first else result
        plain = {name: x for name, x in options.items() if name not in ("causal", "layout", "return_lse")}
        for prefix in self._prefixes:
            at = prefix.sequences
            of_prefix = self._attend_prefix(prefix, q4[at], pools, plain)
            result4[at], lse[at] = merge((result4[at], lse[at]), of_prefix)
        if out is not None:
            check_out(out, self._kind, arrays.dtype_name("q", q), result.shape)
            out[...] = result
            result = out
        return (result, lse) if options.get("return_lse") else result

    def _attend_prefix(self, prefix: Prefix, q: Any, pools: Pools, options: dict[str, Any]) -> Any:
        """(out, lse) of queries (sequences, Hq, Nq, D) over the keys of the prefix."""
        sequences, heads, n, d = q.shape
        rows = q.reshape(sequences, pools.k.shape[2], -1, d).swapaxes(0, 1)  # those of each key/value head
        heads_kv, _, each, _ = rows.shape
        count = sequences * each
        decoded = count < QUERIES or pools.kv_format
        rows = rows.reshape((1, heads_kv * count, 1, d) if decoded else (1, heads_kv, count, d))
        of_prefix = prefix.tokens, prefix.pages.tobytes()
        key = self._owner, arrays.layout(rows), tuple(options.items()), of_prefix, dispatch.state()
        planned: Planned | None = plans.get(key)
        if planned is None:
            table, lengths = prefix.pages[None], np.array([prefix.tokens])
            rest = {name: x for name, x in options.items() if name != "backend"}
            k, v, memory = pools.k, pools.v, pools.memory
            prepared = prepare(rows, k, v, page_table=table, kv_lengths=lengths, memory=memory, **rest)
            planned = Planned(prepared, (rows, k, v), options.get("backend"), True)
            plans.put(key, planned)
        out, lse = (x.reshape(heads_kv, sequences, each, -1) for x in planned(rows, pools.k, pools.v))
        return out.swapaxes(0, 1).reshape(sequences, heads, n, -1), lse.swapaxes(0, 1).reshape(sequences, heads, n)

    def _find(self, pages: PageTable, rows: int) -> None:
        """The prefixes of these pages, for `rows` query rows of a key/value head and sequence."""
        self._prefixes_for = None, 0
        if not pages.shares:
            self._unshared = pages.references
        self._prefixes = [*self._shared(pages, rows)] if pages.shares else []
        self._rest = Rest(pages, self._prefixes) if self._prefixes else None
        self._prefixes_for = pages, rows

    def _shared(self, pages: PageTable, rows: int) -> Iterator[Prefix]:
        """Prefixes that are worth a call: among sequences of one first page, what most tokens are saved by."""
        table, lengths = pages.table, pages.lengths
        firsts, counts = np.unique(table[lengths > 0, 0], return_counts=True)
        for first in firsts[counts > 1]:
            at = np.flatnonzero((table[:, 0] == first) & (lengths > 0))
            # Columns that each shares with the longest, without the tokens of the queries, which a causal mask hides.
            longest = table[at[lengths[at].argmax()]]
            common = (table[at] == longest).cumprod(1).sum(1)
            common = np.minimum(common, np.maximum(lengths[at] - MAX_TOKENS, 0) // pages.page)
            ranked = np.sort(common)[::-1]
            columns = int(ranked[(np.arange(len(at)) * ranked).argmax()])
            at = at[common >= columns]
            tokens, (min_bytes, min_tokens) = columns * pages.page, self._minima
            if (len(at) - 1) * tokens * self._token_bytes >= min_bytes and tokens >= rows * min_tokens:
                yield Prefix(at, longest[:columns].astype(np.int64), tokens)

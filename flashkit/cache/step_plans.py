"""Planned calls of attention for steps of few tokens: a layer's `attend` costs a look-up, whatever the lengths are.

A plan is for a number of keys, the next power of two; its lengths, offsets and table are arrays that each step fills
once for all layers. Kernels read them when they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import dispatch
from ..call import arrays, plans
from ..call.arguments import Prepared, prepare
from ..call.planned import Planned
from ..call.sequences import are_read, offsets_of
from ..errors import UnsupportedError
from ..options import OPTIONS, PLAIN, Role
from .pages import PageTable
from .pools import Pools

MAX_TOKENS = 16
"""Queries of a sequence; beyond it a call's own work hides its preparation."""

CONSTANT = {"backend", "return_lse"}.union(name for name, option in OPTIONS.items() if option.role is Role.CONSTANT)
"""Options that are numbers, flags and names: a planned step takes no others."""


class Rest:
    """The sequences without their prefixes (sequences, pages, tokens): what `StepPlans` reads of a PageTable."""

    def __init__(self, pages: PageTable, prefixes: Iterable[tuple[np.ndarray, np.ndarray, int]]) -> None:
        self.page, self.lengths, self.table = pages.page, pages.lengths.copy(), pages.table.copy()
        for at, shared, tokens in prefixes:
            columns = len(shared)
            self.lengths[at] -= tokens
            self.table[at, : self.table.shape[1] - columns] = pages.table[at, columns:]
        self.longest = int(self.lengths.max())


Pages = PageTable | Rest


class Entry:
    """A plan and the arrays that it reads, packed ones with one more element; None for positions it does not read."""

    def __init__(self, planned: Planned, cu_seqlens: Any, lengths: Any, positions: Any) -> None:
        self.planned, self.cu_seqlens, self.lengths, self.positions = planned, cu_seqlens, lengths, positions
        self.last_use = 0
        self.pages: Pages | None = None  # whose positions it has


class StepPlans:
    """The plans of a cache for queries at the end of all sequences."""

    def __init__(self, pages: Pages, kind: str) -> None:
        self._kind, self._xp = kind, arrays.namespace(kind)
        self._owner = object()  # part of the keys of plans that read these arrays
        self._lengths = self._xp.zeros(len(pages.lengths), np.int64)
        self._table = self._xp.zeros(pages.table.shape, np.int64)
        self._filled: Pages | None = None  # whose lengths and table these are; None while they are written
        self._table_of: np.ndarray | None = None
        self._keys = 0  # that plans are for now

    def find(self, q: Any, pools: Pools, options: dict[str, Any], pages: Pages) -> Planned | None:
        """The plan for q (B, Hq, Nq, D), by layout, or (T, Hq, D) with cu_seqlens on the host; None without one."""
        offsets = queries = None
        if q.ndim == 4:
            queries = q.shape[1 if options.get("layout") == "bnhd" else 2]
            if not 0 < queries <= MAX_TOKENS:
                return None
        else:
            if (offsets := self._offsets(q, pools, options)) is None:
                return None
            options = {name: x for name, x in options.items() if name != "cu_seqlens"}
        types = tuple(map(type, options.values()))
        if not CONSTANT.issuperset(options):
            return None
        if not PLAIN.issuperset(types) and not all(map(_is_plain, options.values())):
            return None
        if self._filled is not pages:
            self._fill(pages)
        key = self._owner, arrays.layout(q), tuple(options.items()), types, self._keys, dispatch.state()
        entry: Entry | None = plans.get(key)
        if entry is None:
            try:
                entry = self._made(q, pools, options, offsets)
            except UnsupportedError:
                if not pools.kv_format:
                    raise
                return None  # only decoding reads 8 bits
            self._fill(pages)
            plans.put(key, entry)
        if offsets is not None:
            entry.cu_seqlens[:-1], entry.lengths[:-1] = offsets, pages.lengths
            if entry.positions is not None:
                entry.positions[:-1] = pages.lengths - (offsets[1:] - offsets[:-1])
        elif entry.positions is not None and entry.pages is not pages:
            entry.pages = None
            self._xp.subtract(self._lengths, queries, out=entry.positions)
            entry.pages = pages
        return entry.planned

    def _offsets(self, q: Any, pools: Pools, options: dict[str, Any]) -> Any:
        """Checked offsets of few packed queries, int64 (B + 1,); None where there is no plan for such queries."""
        given: Any = options.get("cu_seqlens")
        if self._kind != "numpy" or pools.kv_format or q.ndim != 3 or type(given) not in (np.ndarray, list):
            return None
        count, shape = len(self._lengths), (len(given),) if type(given) is list else given.shape
        if not 0 < len(q) <= MAX_TOKENS * count or shape != (count + 1,):
            return None
        return offsets_of("cu_seqlens", given, "numpy", len(q), "q")[:-1]

    def _made(self, q: Any, pools: Pools, options: dict[str, Any], offsets: Any) -> Entry:
        rest = {name: x for name, x in options.items() if name not in ("backend", "return_lse")}
        if offsets is not None:
            rest["cu_seqlens"] = np.full(len(offsets), len(q))  # a backend may take the plan's sizes from these,
            rest["cu_seqlens"][0] = 0
        self._filled = None
        self._lengths[...] = self._keys  # and from those
        k, v, table, memory = pools.k, pools.v, self._table, pools.memory
        problem, operands, shape = prepare(q, k, v, page_table=table, kv_lengths=self._lengths, memory=memory, **rest)
        cu_seqlens = None
        if offsets is None:
            operands.kv_lengths = self._lengths
        else:
            cu_seqlens = operands.cu_seqlens[0]  # type: ignore[index]
        operands.page_table, is_read = table, are_read(problem.spec.score, problem.spec.mask)
        if is_read and offsets is None:
            operands.q_offset = self._lengths - q.shape[1 if options.get("layout") == "bnhd" else 2]
        backend, return_lse = options.get("backend"), options.get("return_lse", False)
        planned = Planned(Prepared(problem, operands, shape), (q, k, v), backend, return_lse)
        return Entry(planned, cu_seqlens, operands.kv_lengths, operands.q_offset if is_read else None)

    def _fill(self, pages: Pages) -> None:
        """The lengths and the table of this step, for all plans and layers."""
        table, xp = pages.table, self._xp
        self._filled = None
        if self._table_of is not table:
            self._table_of = None
            if self._table.shape != table.shape:
                self._owner = object()  # earlier plans read the previous array
                self._table = xp.zeros(table.shape, np.int64)
            # Page 0 for pages that a window has dropped, and behind a sequence: kernels want a page for every key.
            self._table[...] = xp.asarray(np.maximum(table, 0))
            self._table_of = table
        self._lengths[...] = xp.asarray(pages.lengths)
        most = 1 << max(pages.longest - 1, 0).bit_length()
        self._keys = min(most, table.shape[1] * pages.page)
        self._filled = pages


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))

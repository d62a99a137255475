"""Planned calls of attention for steps of few tokens: a layer's `attend` costs a look-up, whatever the lengths are.

A plan is for a number of keys, the next power of two; its lengths, offsets and table are arrays that each step fills
anew, once for all layers. Kernels read them when they run.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from .. import dispatch
from ..call import arrays
from ..call.arguments import Prepared, prepare
from ..call.planned import Planned
from ..call.positions import are_read
from ..errors import UnsupportedError
from .pools import Pools

MOST_TOKENS = 16
"""Queries of a sequence; beyond it a call's own work hides its preparation."""

MAX_PLANS = 32

_CONSTANT = frozenset(
    ("scale", "causal", "window", "softcap", "layout", "deterministic", "precision", "backend", "return_lse")
)
"""Options that are numbers, flags and names."""

_PLAIN = (int, float, bool, str, type(None))


class Entry:
    """A plan and the positions of its first queries, as of a step; None where nothing reads them."""

    def __init__(self, planned: Planned, offsets: Any) -> None:
        self.planned, self.offsets, self.version = planned, offsets, -1


class Pages(Protocol):
    """What of a PageTable is read here."""

    page: int
    lengths: np.ndarray
    table: np.ndarray
    longest: int
    changes: int  # of the table


class StepPlans:
    """The plans of a cache for queries at the end of all sequences.

    Attributes
    ----------
    pages : Pages
        The sequences, of a table of one shape.
    """

    def __init__(self, pages: Pages, kind: str) -> None:
        self.pages: Pages = pages
        self._kind, self._xp = kind, arrays.namespace(kind)
        self._plans: OrderedDict[Any, Entry] = OrderedDict()
        self._lengths = self._xp.zeros(len(pages.lengths), np.int64)
        self._table = self._xp.zeros(pages.table.shape, np.int64)
        self._version = self._changes = -1
        self._keys = 0  # that plans are for now

    def find(self, q: Any, pools: Pools, options: dict[str, Any], version: int) -> Planned | None:
        """The plan for q (B, Hq, Nq, D), or by layout, and options of `attention` but `out`; None where there is none.
        version: a number that changes with the lengths and the table.
        """
        if q.ndim != 4 or not _CONSTANT.issuperset(options) or not all(map(_is_plain, options.values())):
            return None
        queries = q.shape[1 if options.get("layout") == "bnhd" else 2]
        if not 0 < queries <= MOST_TOKENS:
            return None
        if self._version != version:
            self._fill(version)
        values = tuple(options.items())
        key = arrays.layout(q), values, tuple([type(x) for _, x in values]), self._keys, dispatch.state()
        found = self._plans.get(key)
        if found is None:
            try:
                found = self._made(q, pools, options, queries)
            except UnsupportedError:
                if not pools.kv_format:
                    raise
                return None  # only decoding reads 8 bits
            self._plans[key] = found
            self._fill(version)
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        if found.offsets is not None and found.version != version:
            self._xp.subtract(self._lengths, queries, out=found.offsets)
            found.version = version
        return found.planned

    def _made(self, q: Any, pools: Pools, options: dict[str, Any], queries: int) -> Entry:
        rest = {name: x for name, x in options.items() if name not in ("backend", "return_lse")}
        self._lengths[...] = self._keys  # a backend may take the plan's sizes from them
        k, v, table, memory = pools.k, pools.v, self._table, pools.memory
        problem, operands, shape = prepare(q, k, v, page_table=table, kv_lengths=self._lengths, memory=memory, **rest)
        operands, offsets = replace(operands, kv_lengths=self._lengths, page_table=table), None
        if are_read(problem.spec.score, problem.spec.mask):
            offsets = operands.q_offset = self._lengths - queries
        backend, return_lse = options.get("backend"), options.get("return_lse", False)
        return Entry(Planned(Prepared(problem, operands, shape), (q, k, v), backend, return_lse), offsets)

    def _fill(self, version: int) -> None:
        """The lengths and the table of this step, for all plans and layers."""
        lengths, table, xp = self.pages.lengths, self.pages.table, self._xp
        if self._changes != self.pages.changes:
            if self._table.shape != table.shape:
                self._table = xp.zeros(table.shape, np.int64)
                self._plans.clear()
            # Page 0 for pages that a window has dropped, and behind a sequence: kernels want a page for every key.
            self._table[...] = xp.asarray(np.maximum(table, 0))
            self._changes = self.pages.changes
        self._lengths[...] = xp.asarray(lengths)
        most = 1 << max(self.pages.longest - 1, 0).bit_length()
        self._keys = min(most, table.shape[1] * self.pages.page)
        self._version = version


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(x) in _PLAIN for x in value))

"""The table of pages: which page of a pool holds which tokens of each sequence. It holds integers on the host, no keys.

A page has references, one from each sequence whose tokens it holds. Sequences that share a prefix share its pages; a
sequence that appends to a page with several references gets a copy of it first. With a window, pages that no later
query sees go back to the pool, so that a sequence holds a ring of pages.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from ..errors import OutOfPagesError


class Copy(NamedTuple):
    """Pages to copy before tokens are written: page source[i] to page target[i]."""

    source: list[int]
    target: list[int]


class PageTable:
    """Lengths, pages and references of sequences.

    Attributes
    ----------
    lengths : array
        int64 (B,), a new array after each change.
    table : array
        int32 (B, columns): the page of tokens c * page ... c * page + page - 1 of a sequence, or -1. It grows by powers
        of two.
    first : array
        int64 (B,): the first column whose tokens exist still; 0 without a window.
    one_each : array
        int64 (B,): the counts of a step that appends a token to each sequence. This very array makes such steps cheap.
    longest, changes : int
        The greatest length, and how often the table has changed.
    """

    def __init__(self, sequences: int, pages: int, page: int, left: int | None) -> None:
        self.page, self.left = page, left
        self.lengths = np.zeros(sequences, np.int64)
        self.table = np.full((sequences, min(8, max(pages, 1))), -1, np.int32)
        self.first = np.zeros(sequences, np.int64)
        self._references = np.zeros(pages, np.int64)
        self._free = list(range(pages - 1, -1, -1))
        self._rows = np.arange(sequences)
        self.one_each, self.changes, self.longest = np.ones(sequences, np.int64), 0, 0
        self._spare = 0  # tokens that each sequence can append to its last page, after a step of one_each
        self._slots = self._rows  # of the last such step

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def shares(self) -> bool:
        """Whether a page belongs to several sequences."""
        return bool((self._references > 1).any())

    def append(self, counts: np.ndarray) -> Copy:
        """Make room for counts (B,) more tokens of each sequence.

        Raises
        ------
        OutOfPagesError
            There are too few free pages; nothing has changed.
        """
        lengths, grown = self.lengths, self.lengths + counts
        copy = Copy([], [])
        if counts is self.one_each and self._spare:
            self._spare -= 1
            self.lengths, self._slots, self.longest = grown, self._slots + 1, self.longest + 1
            return copy
        last = np.minimum(lengths // self.page, self.table.shape[1] - 1)  # the column of the first new token
        partial = lengths % self.page > 0
        shared = partial & (self._references[self.table[self._rows, last]] > 1)
        held = -(-lengths // self.page)
        if ((counts > 0) & (shared | (-(-grown // self.page) > held))).any():
            copy = self._extend(np.flatnonzero(counts), grown, held, shared)
        self.lengths, self.longest, self._spare = grown, int(grown.max()), 0
        if counts is self.one_each:  # each sequence has its last page for itself now
            self._spare, self._slots = int((-grown % self.page).min()), self._slots_at(self._rows, lengths)
        return copy

    def slots(self, counts: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slots page * size + offset of the tokens of the last append, at these positions, sequence after sequence."""
        return self._slots if counts is self.one_each else self._slots_at(np.repeat(self._rows, counts), positions)

    def _slots_at(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.table[rows, positions // self.page] * np.int64(self.page) + positions % self.page

    def fork(self, i: int, into: int) -> None:
        """The empty sequence `into` becomes sequence i; they share all pages."""
        own = self.table[i]
        self._references[own[own >= 0]] += 1
        self.table[into], self.first[into] = own, self.first[i]
        self._set_length(into, int(self.lengths[i]))
        self.changes += 1

    def trim(self, i: int, n: int) -> None:
        """Drop the last n tokens of sequence i."""
        left = int(self.lengths[i]) - n
        stop = -(-left // self.page)
        if left == 0:
            self.first[i] = stop = 0
        self._release([(i, int(column)) for column in np.flatnonzero(self.table[i] >= 0) if column >= stop])
        self._set_length(i, left)

    def oldest(self, i: int, length: int) -> int:
        """The first position that a query at position `length` of sequence i sees."""
        return 0 if self.left is None else max(0, length - self.left)

    def _set_length(self, i: int, length: int) -> None:
        self.lengths, self._spare = self.lengths.copy(), 0
        self.lengths[i] = length
        self.longest = int(self.lengths.max())

    def _extend(self, active: np.ndarray, grown: np.ndarray, held: np.ndarray, shared: np.ndarray) -> Copy:
        """Pages for `active` sequences: those behind the window are released, shared last pages copied, new ones taken.

        All of it is counted before anything changes.
        """
        released: list[tuple[int, int]] = []
        if self.left is not None:
            kept = np.maximum(self.lengths - self.left, 0) // self.page
            released = [(int(i), column) for i in active for column in range(self.first[i], min(kept[i], held[i]))]
        uses = Counter(int(self.table[at]) for at in released)
        idle = sum(self._references[page] == times for page, times in uses.items())
        copied = []
        for i in active[shared[active]]:
            page = int(self.table[i, held[i] - 1])
            if self._references[page] - uses[page] > 1:
                uses[page] += 1
                copied.append((i, held[i] - 1))
        fresh = [(i, column) for i in active for column in range(held[i], -(-grown[i] // self.page))]
        needed, free = len(copied) + len(fresh), len(self._free) + int(idle)
        if needed > free:
            raise OutOfPagesError(
                f"{int((grown - self.lengths).sum())} more tokens need {needed} pages of {self.page}, and {free} of "
                f"{len(self._references)} are free; free(i) and trim(i, n) return pages, or pages= of the cache is more"
            )
        self._release(released)
        for i in active if released else ():
            self.first[i] = max(self.first[i], min(kept[i], held[i]))
        self._widen(int(-(-grown.max() // self.page)))
        copy = Copy([int(self.table[at]) for at in copied], [])
        for at in copied:
            self._references[self.table[at]] -= 1
            copy.target.append(self._take(at))
        for at in fresh:
            self._take(at)
        return copy

    def _take(self, at: tuple[int, int]) -> int:
        page = self._free.pop()
        self.table[at], self._references[page] = page, 1
        self.changes += 1
        return page

    def _release(self, places: list[tuple[int, int]]) -> None:
        for at in places:
            page = int(self.table[at])
            self.table[at] = -1
            self._references[page] -= 1
            self.changes += 1
            if self._references[page] == 0:
                self._free.append(page)

    def _widen(self, columns: int) -> None:
        sequences, width = self.table.shape
        if columns > width:
            wider = np.full((sequences, 1 << (columns - 1).bit_length()), -1, np.int32)
            wider[:, :width] = self.table
            self.table = wider
            self.changes += 1

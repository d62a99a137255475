"""The table of pages: which page of a pool holds which tokens of each sequence. It holds integers on the host, no keys.

A page has references, one from each sequence whose tokens it holds. Sequences that share a prefix share its pages; a
sequence that appends to a page with several references gets a copy of it first. With a window, pages that no later
query sees go back to the pool, so that a sequence holds a ring of pages.

A table is a value: a change makes another one, and the arrays of both stay as they are. So a cache that an error or a
signal stops midway still has the previous table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import OutOfPagesError


class Copy(NamedTuple):
    """Pages to copy before tokens are written: page source[i] to page target[i]."""

    source: np.ndarray
    target: np.ndarray


NO_COPY = Copy(np.empty(0, np.int32), np.empty(0, np.int32))

MIN_COLUMNS = 8
"""Of a table, where there are as many pages."""


class Growth(NamedTuple):
    """What an append makes: the new table, pages to copy before, and the table that holds while tokens are written."""

    pages: PageTable
    copy: Copy
    before: PageTable


class PageTable(NamedTuple):
    """Lengths, pages and references of sequences. No array of it is ever written."""

    page: int  # tokens of a page
    left: int | None  # keys before a query that its window shows; None: all
    rollback: int  # tokens before the last append whose queries find all of these
    lengths: np.ndarray  # int64 (B,)
    # int32 (B, columns): the page of tokens c * page ... c * page + page - 1 of a sequence, or -1. Its width grows by
    # powers of two.
    table: np.ndarray
    first: np.ndarray  # int64 (B,): the first column whose tokens exist still; 0 without a window
    references: np.ndarray  # int32 (pages,)
    free: np.ndarray  # int32: pages without references, the next one last
    one_each: np.ndarray  # int64 (B,): the counts of a step that appends a token to each sequence
    longest: int = 0  # the greatest length
    spare: int = 0  # tokens that each sequence can append to its last page, after a step of one_each
    slots: np.ndarray = NO_COPY.source  # int64 (B,): those of the last such step

    @classmethod
    def empty(cls, sequences: int, pages: int, page: int, left: int | None = None, rollback: int = 0) -> PageTable:
        """Sequences without tokens."""
        zeros = np.zeros(sequences, np.int64)
        table = np.full((sequences, min(MIN_COLUMNS, pages)), -1, np.int32)
        free = np.arange(pages - 1, -1, -1, dtype=np.int32)
        return cls(page, left, rollback, zeros, table, zeros, np.zeros(pages, np.int32), free, np.ones_like(zeros))

    @property
    def shares(self) -> bool:
        """Whether a page belongs to several sequences."""
        return bool((self.references > 1).any())

    def append(self, counts: np.ndarray) -> Growth:
        """Make room for counts (B,) more tokens of each sequence; OutOfPagesError if there are too few free pages."""
        lengths, each = self.lengths, counts is self.one_each
        if each and self.spare:
            pages = PageTable(  # in a fifth of the time of _replace, with sums in half the time of those with 1
                self.page, self.left, self.rollback, lengths + counts, self.table, self.first, self.references,
                self.free, counts, self.longest + 1, self.spare - 1, self.slots + counts,
            )  # fmt: skip
            return Growth(pages, NO_COPY, self)
        if int(counts.max()) > len(self.references) * self.page:  # before lengths are added, which may overflow int64
            raise self._out_of_pages(counts, sum(-(-int(n) // self.page) for n in counts), len(self.free))
        grown = lengths + counts
        held, needed = -(-lengths // self.page), -(-grown // self.page)
        last = np.minimum(lengths // self.page, self.table.shape[1] - 1)  # the column of the first new token
        shared = (lengths % self.page > 0) & (self.references[self._at(last)] > 1)
        growth = Growth(self, NO_COPY, self)
        if ((counts > 0) & (shared | (needed > held))).any():
            growth = self._extended(counts, held, needed, shared)
        pages = growth.pages._replace(lengths=grown, longest=int(grown.max()), spare=0)
        if each:  # each sequence has its last page for itself now
            pages = pages._replace(spare=int((-grown % self.page).min()), slots=pages.slots_at(None, lengths))
        return growth._replace(pages=pages)

    def slots_at(self, rows: np.ndarray | None, positions: np.ndarray) -> np.ndarray:
        """Slots page * size + offset of the tokens at these positions of sequences; rows: None for one of each."""
        columns = positions // self.page
        pages = self._at(columns) if rows is None else self.table[rows, columns]
        return pages * np.int64(self.page) + positions % self.page

    def fork(self, i: int, into: int) -> PageTable:
        """The empty sequence `into` becomes sequence i; they share all pages."""
        table, first, references = self.table.copy(), self.first.copy(), self.references.copy()
        own = table[into] = table[i]
        first[into] = first[i]
        references[own[own >= 0]] += 1
        return self._replace(table=table, first=first, references=references)._resized(into, int(self.lengths[i]))

    def trim(self, i: int, n: int) -> PageTable:
        """Drop the last n tokens of sequence i."""
        left = int(self.lengths[i]) - n
        columns = np.flatnonzero(self.table[i] >= 0)
        columns = columns[columns >= -(-left // self.page)]
        pages = self._released(np.full(len(columns), i), columns)
        if left == 0 and self.first[i]:
            pages = pages._replace(first=np.where(np.arange(len(self.first)) == i, 0, self.first))
        return pages._resized(i, left)

    def begin(self, i: int) -> int:
        """The first position of sequence i whose key exists still."""
        return int(self.first[i]) * self.page

    def _at(self, columns: np.ndarray) -> np.ndarray:
        """The page of a column of each sequence."""
        return self.table[np.arange(len(columns)), columns]

    def _resized(self, i: int, length: int) -> PageTable:
        lengths = self.lengths.copy()
        lengths[i] = length
        return self._replace(lengths=lengths, longest=int(lengths.max()), spare=0)

    def _extended(self, counts: np.ndarray, held: np.ndarray, needed: np.ndarray, shared: np.ndarray) -> Growth:
        """Pages for new tokens: some leave the window, shared last ones are copied. held, needed: before and after."""
        active = np.flatnonzero(counts)
        dropped = self._dropped(active, held)
        references = dropped.references.copy()
        copied = []
        for i in active[shared[active]]:
            page = self.table[i, held[i] - 1]
            if references[page] > 1:  # the last owner keeps the page
                references[page] -= 1
                copied.append(i)
        new = needed[active] - held[active]
        rows = np.concatenate([np.array(copied, np.int64), np.repeat(active, new)])
        columns = np.concatenate([held[copied] - 1, *map(np.arange, held[active], needed[active])])
        room = len(self.free)  # what the window drops is taken last: until the append is done, queries may need it
        if len(rows) > room:
            room = len(dropped.free)
        if len(rows) > room:
            raise self._out_of_pages(counts, len(rows), room)
        taken = dropped.free[room - len(rows) : room][::-1]
        table = dropped._widened(int(needed.max()))
        copy = Copy(self.table[copied, held[copied] - 1], taken[: len(copied)]) if copied else NO_COPY
        table[rows, columns], references[taken] = taken, 1
        free = np.concatenate([dropped.free[: room - len(rows)], dropped.free[room:]])
        pages = dropped._replace(table=table, references=references, free=free)
        return Growth(pages, copy, self if room == len(self.free) else dropped)

    def _dropped(self, active: np.ndarray, held: np.ndarray) -> PageTable:
        """Without the pages of `active` sequences that no later query sees."""
        if self.left is None:
            return self
        kept = np.maximum(self.lengths - self.left - self.rollback, 0) // self.page
        first = self.first.copy()
        first[active] = np.maximum(first, np.minimum(kept, held))[active]
        columns = np.arange(self.table.shape[1])
        gone = (columns >= self.first[:, None]) & (columns < first[:, None])
        return self._released(*gone.nonzero())._replace(first=first) if gone.any() else self

    def _released(self, rows: np.ndarray, columns: np.ndarray) -> PageTable:
        """Without the pages at these places of the table."""
        if not len(rows):
            return self
        table, references, pages = self.table.copy(), self.references.copy(), self.table[rows, columns]
        table[rows, columns] = -1
        np.subtract.at(references, pages, 1)
        idle = np.unique(pages[references[pages] == 0])[::-1]
        return self._replace(table=table, references=references, free=np.concatenate([self.free, idle]))

    def _widened(self, columns: int) -> np.ndarray:
        """A copy of the table with this many columns or more."""
        sequences, width = self.table.shape
        if columns <= width:
            return self.table.copy()
        wider = np.full((sequences, 1 << (columns - 1).bit_length()), -1, np.int32)
        wider[:, :width] = self.table
        return wider

    def _out_of_pages(self, counts: np.ndarray, needed: int, free: int) -> OutOfPagesError:
        return OutOfPagesError(
            f"{sum(map(int, counts))} more tokens need {needed} pages of {self.page}, and {free} of "
            f"{len(self.references)} are free; free(i) and trim(i, n) return pages, KVCache(pages=n) has more"
        )

"""What the layers of a cache share: the table of pages, and the tokens that the model is appending.

A step is one append by every layer. The first layer to append opens the step, which does the bookkeeping for all of
them; the others only write. Sequences are forked, trimmed and freed between steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..call import arrays
from ..rope.apply import Table
from .cascade import Cascade
from .pages import Copy, PageTable
from .step_plans import StepPlans


class Step(NamedTuple):
    """The tokens of one append."""

    counts: np.ndarray  # int64 (B,): new tokens of each sequence
    offsets: np.ndarray  # int64 (B + 1,): cu_seqlens
    positions: np.ndarray  # int64 (T,): within the sequences, on the host
    end: int  # the greatest position and 1
    slots: Any  # int64 (T,), of the cache's library: page * size + offset
    where: Any  # positions, of the cache's library
    each: int  # tokens of each sequence where all have equally many, else 0


class Steps:
    """The steps of a cache with this many layers.

    Attributes
    ----------
    pages : PageTable
        The table on the host.
    lengths, table, positions : array
        Its contents and those of the last step as the caller sees them, of the cache's library. On a device lengths and
        table stay the same arrays while the table's width does, so that a captured CUDA graph follows them.
    plans : StepPlans
        Planned calls for these; `version` changes with them.
    cascade : Cascade
        The same where sequences share pages.
    readable : array
        The table with page 0 for pages that a window has dropped: attention wants a page for every key, visible or not.
    """

    def __init__(self, pages: PageTable, layers: int, kind: str, cascade: Cascade) -> None:
        self.pages, self.kind, self.xp, self.cascade = pages, kind, arrays.namespace(kind), cascade
        self._opened, self._written = 0, [0] * layers  # numbers of steps
        self._last: Step | None = None
        self._on_device: Any = None  # lengths and table
        if kind != "numpy":
            self._on_device = self.xp.asarray(pages.lengths), self.xp.asarray(pages.table)
        self.plans, self.version = StepPlans(pages, kind), 0
        self._one_each = np.arange(len(pages.lengths) + 1)

    @property
    def lengths(self) -> Any:
        return _read_only(self.pages.lengths) if self._on_device is None else self._on_device[0]

    @property
    def table(self) -> Any:
        return _read_only(self.pages.table) if self._on_device is None else self._on_device[1]

    @property
    def positions(self) -> Any:
        where = self.last().where
        return _read_only(where) if self._on_device is None else where

    @property
    def readable(self) -> Any:
        return self.table if self.pages.left is None else self.xp.maximum(self.table, 0)

    def current(self, layer: int) -> Step | None:
        """The open step that this layer has yet to write; None if it would open one.

        Raises
        ------
        ValueError
            It would, but another layer has not written the last one.
        """
        if self._written[layer] == self._opened:
            late = [number for number, written in enumerate(self._written) if written != self._opened]
        else:
            late = [layer] if self._written[layer] < self._opened - 1 else []
        if late:
            raise ValueError(f"layer {late[0]} has not appended the tokens of this step; a layer appends once a step")
        return None if self._written[layer] == self._opened else self._last

    def open(self, counts: np.ndarray, table: Table | None) -> tuple[Step, Copy]:
        """Begin a step of counts (B,) new tokens; the pages to copy before they are written.

        Raises
        ------
        OutOfPagesError, ValueError
            There are too few free pages, or the table of rotary angles is too short. Nothing has changed.
        """
        before = self.pages.lengths
        if counts is self.pages.one_each:
            offsets, positions, each, end = self._one_each, before, 1, self.pages.longest + 1
        else:
            offsets = np.zeros(len(counts) + 1, np.int64)
            counts.cumsum(out=offsets[1:])
            each = int(counts[0]) if (counts == counts[0]).all() else 0
            positions = np.arange(offsets[-1]) + np.repeat(before - offsets[:-1], counts)
            end = int(positions.max(initial=-1)) + 1
        check_rows(table, end)
        copy = self.pages.append(counts)
        slots, where = self.xp.asarray(self.pages.slots(counts, positions)), self.xp.asarray(positions)
        self._last = Step(counts, offsets, positions, end, slots, where, each)
        self._opened += 1
        self._publish()
        return self._last, copy

    def wrote(self, layer: int) -> None:
        self._written[layer] = self._opened

    def last(self) -> Step:
        """The last step; ValueError if sequences have changed since."""
        if self._last is None:
            raise ValueError(
                "the cache has had no append, or was changed since by fork, trim or free; give cu_seqlens, or q as "
                "(B, Hq, Nq, D)"
            )
        return self._last

    def check_written(self, layer: int) -> None:
        if self._written[layer] != self._opened:
            raise ValueError(f"layer {layer} has not appended the tokens of this step yet; append, then attend")

    def check_between(self, what: str) -> None:
        """Check that all layers have the same tokens."""
        for layer, written in enumerate(self._written):
            if written != self._opened:
                raise ValueError(f"{what} in the middle of a step: layer {layer} has not appended its tokens yet")

    def changed(self) -> None:
        """Sequences have changed: the order of the last append says nothing about queries any more."""
        self._last = None
        self._publish()

    def _publish(self) -> None:
        self.version += 1
        if self._on_device is None:
            return
        (lengths, table), xp = self._on_device, self.xp
        lengths[...] = xp.asarray(self.pages.lengths)
        if table.shape == self.pages.table.shape:
            table[...] = xp.asarray(self.pages.table)
        else:
            self._on_device = xp.asarray(self.pages.lengths), xp.asarray(self.pages.table)


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def check_rows(table: Table | None, end: int) -> None:
    """Check that a table of rotary angles has the positions before `end`."""
    if table is not None and end > len(table.cos):
        raise ValueError(f"rotary has {len(table.cos)} rows; position {end - 1} of a sequence needs more")

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
    slots: Any  # int64 (T,), of the cache's library: page * size + offset
    where: Any  # positions, of the cache's library
    each: int  # tokens of each sequence where all have equally many, else 0


class Steps:
    """The steps of a cache with this many layers.

    Attributes
    ----------
    pages : PageTable
        The table on the host.
    lengths, table : array
        Its contents as the caller sees them, of the cache's library. On a device they stay the same arrays while the
        table's width does, so that a captured CUDA graph follows them.
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
        self.lengths, self.table = self._published(pages.lengths), self._published(pages.table)
        self.readable = self.table
        self.plans, self.version = StepPlans(pages, kind), 0

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
        offsets = np.zeros(len(counts) + 1, np.int64)
        counts.cumsum(out=offsets[1:])
        tokens = int(offsets[-1])
        each = int(counts[0]) if tokens == counts[0] * len(counts) and (counts == counts[0]).all() else 0
        positions = before if each == 1 else np.arange(tokens) + np.repeat(before - offsets[:-1], counts)
        check_rows(table, positions)
        copy = self.pages.append(counts)
        slots = self.pages.slots(counts, positions)
        self._last = Step(counts, offsets, positions, self.xp.asarray(slots), self._published(positions), each)
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
        lengths, table = self.pages.lengths, self.pages.table
        self.version += 1
        if self.kind == "numpy" or self.table.shape != table.shape:
            self.lengths, self.table = self._published(lengths), self._published(table)
        else:
            self.lengths[...], self.table[...] = self.xp.asarray(lengths), self.xp.asarray(table)
        self.readable = self.table if self.pages.left is None else self.xp.maximum(self.table, 0)

    def _published(self, array: np.ndarray) -> Any:
        """On the device, or as a view that cannot be written."""
        if self.kind != "numpy":
            return self.xp.asarray(array)
        view = array.view()
        view.flags.writeable = False
        return view


def check_rows(table: Table | None, positions: np.ndarray) -> None:
    """Check that a table of rotary angles has these positions."""
    if table is not None and positions.size and positions.max() >= len(table.cos):
        raise ValueError(f"rotary has {len(table.cos)} rows; position {positions.max()} of a sequence needs more")

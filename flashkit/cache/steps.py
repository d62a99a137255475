"""What the layers of a cache share: the table of pages, and the tokens that the model is appending.

A step is one append by every layer. The first layer to append opens the step, which does the bookkeeping for all of
them; the others only write. Sequences are forked, trimmed and freed between steps.

All of it is one value, a `State`. A method computes the next one, has the kernels run that it needs, and publishes it
by one assignment, so an error or a signal leaves the previous state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

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


class State(NamedTuple):
    """What a cache holds. No array of it is ever written."""

    pages: PageTable  # on the host
    settled: np.ndarray  # int64 (B,): lengths before the last append, whose tokens `keep` chooses from
    step: Step | None = None  # the last append; None if sequences have changed since
    missing: int = 0  # a bit for each layer that has yet to write the step


class Steps:
    """The steps of a cache with this many layers.

    memory: of all layers, (layers, pages, Hkv, page, width), of keys and values, or of keys alone where these hold the
    values.
    """

    def __init__(self, pages: PageTable, layers: int, kind: str, cascade: Cascade, memory: list[Any]) -> None:
        self.kind, self.xp, self.cascade, self.memory = kind, arrays.namespace(kind), cascade, memory
        self.state = State(pages, pages.lengths)
        self.plans = StepPlans(pages, kind)  # for queries at the end of all sequences
        self.users = dict[str, object]()  # the call that uses the cache; see `one_at_a_time`
        self._all = (1 << layers) - 1
        self.one_each = np.arange(len(pages.lengths) + 1)  # offsets of a step that appends a token to each sequence
        self._shown: Any = None  # on a device: lengths, table, and the pages that they are of
        if kind != "numpy":
            self._shown = self.xp.asarray(pages.lengths), self.xp.asarray(pages.table), pages

    @property
    def on_call(self) -> tuple[Any, Any]:
        """Lengths and table of the cache's library; on a device the same arrays while the width stays, for graphs."""
        pages = self.state.pages
        return (pages.lengths, pages.table) if self._shown is None else self._show(pages)

    @property
    def readable(self) -> Any:
        """The table with page 0 for those that a window has dropped: attention wants a page for every key."""
        table = self.on_call[1]
        return table if self.state.pages.left is None else self.xp.maximum(table, 0)

    def current(self, layer: int) -> Step | None:
        """The open step that this layer has yet to write, or None. ValueError if another has not written the last."""
        missing = self.state.missing
        if missing and not missing >> layer & 1:
            raise ValueError(
                f"layer {_lowest(missing)} has not appended the tokens of this step; each layer appends once per step"
            )
        return self.state.step if missing else None

    def opened(self, counts: np.ndarray, table: Table | None) -> tuple[State, Copy]:
        """The state with a step of counts (B,), and pages to copy before. OutOfPagesError; ValueError for the table."""
        state = self.state
        before = state.pages.lengths
        growth = state.pages.append(counts)
        pages = growth.pages
        if counts is pages.one_each:
            offsets, positions, each, end = self.one_each, before, 1, pages.longest
            on_host = pages.slots
        else:
            offsets = np.zeros(len(counts) + 1, np.int64)
            counts.cumsum(out=offsets[1:])
            each = int(counts[0]) if (counts == counts[0]).all() else 0
            positions = np.arange(offsets[-1]) + np.repeat(before - offsets[:-1], counts)
            end = int(positions.max(initial=-1)) + 1
            on_host = pages.slots_at(np.repeat(np.arange(len(counts)), counts), positions)
        check_rows(table, end)
        step = Step(counts, offsets, positions, end, self.xp.asarray(on_host), self.xp.asarray(positions), each)
        if growth.before is not state.pages:
            self.publish(state._replace(pages=growth.before))
        return State(pages, before, step, self._all), growth.copy

    def wrote(self, state: State, layer: int) -> None:
        """A layer has written the step of this state."""
        self.publish(State(state.pages, state.settled, state.step, state.missing & ~(1 << layer)))

    def last(self) -> Step:
        """The last step; ValueError if sequences have changed since."""
        if self.state.step is None:
            raise ValueError(
                "the cache has had no append, or was changed since by fork, trim, keep or free; pass cu_seqlens, or q "
                "as (B, Hq, Nq, D)"
            )
        return self.state.step

    def check_written(self, layer: int) -> None:
        if self.state.missing >> layer & 1:
            raise ValueError(f"layer {layer} has not appended the tokens of this step yet; append, then attend")

    def check_between(self, what: str) -> None:
        """Check that all layers have the same tokens."""
        if missing := self.state.missing:
            layer = _lowest(missing)
            raise ValueError(f"{what} in the middle of a step: layer {layer} has not appended its tokens yet")

    def changed(self, pages: PageTable, settled: np.ndarray | None = None) -> None:
        """Sequences have changed: the order of the last append says nothing about queries any more."""
        self.publish(State(pages, np.minimum(self.state.settled if settled is None else settled, pages.lengths)))

    def copy_pages(self, copy: Copy) -> None:
        """In all layers."""
        if len(copy.source):
            for pool in self.memory:
                pool[:, copy.target] = pool[:, copy.source]

    def keep(self, i: int, begin: int, positions: np.ndarray) -> None:
        """Sequence i becomes its tokens before `begin` and those at these positions, which ascend from there on. The
        state in between has the tokens that stay where they are and none of the others.

        OutOfPagesError if the tokens lie in pages that other sequences share, and there is no free page for a copy.
        """
        state = self.state
        pages = state.pages
        stay = int((positions == begin + np.arange(len(positions))).sum())  # the first ones
        moved = positions[stay:]
        trimmed = pages.trim(i, int(pages.lengths[i]) - begin - stay)
        growth = trimmed.append(np.where(np.arange(len(pages.lengths)) == i, len(moved), 0))
        settled = np.where(np.arange(len(pages.lengths)) == i, growth.pages.lengths, state.settled)
        if len(moved):
            source = np.divmod(pages.slots_at(np.full(len(moved), i), moved), pages.page)
            rows = np.arange(begin + stay, begin + len(positions))
            target = np.divmod(growth.pages.slots_at(np.full(len(moved), i), rows), pages.page)
            values = [pool[:, source[0], :, source[1]] for pool in self.memory]
            self.changed(growth.before)
            self.copy_pages(growth.copy)
            for pool, value in zip(self.memory, values, strict=True):
                pool[:, target[0], :, target[1]] = value
        self.changed(growth.pages, settled)

    def publish(self, state: State) -> None:
        """Make this the state; the last that a change of the cache does."""
        if self._shown is not None:
            self._show(state.pages)
        self.state = state

    def _show(self, pages: PageTable) -> tuple[Any, Any]:
        """Lengths and table on the device, of these pages."""
        lengths, table, shown = self._shown
        if shown is not pages:
            self._shown = lengths, table, None
            lengths[...] = self.xp.asarray(pages.lengths)
            if table.shape != pages.table.shape:
                table = self.xp.asarray(pages.table)
            elif shown is None or shown.table is not pages.table:
                table[...] = self.xp.asarray(pages.table)
            self._shown = lengths, table, pages
        return lengths, table


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


F = TypeVar("F", bound=Callable[..., Any])


def one_at_a_time(method: F) -> F:
    """A method of a cache or of a layer that refuses to run while another one does.

    A lock would stay taken if a signal handler raised between its acquisition and the block that releases it. The call
    registers within that block, and it leaves by instructions after which Python runs no signal handler.
    """

    @wraps(method)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        users, me = self._steps.users, object()
        try:
            if users.setdefault("call", me) is not me:
                raise RuntimeError(
                    f"{method.__name__}: expected one call of a cache at a time, got one during another; give each "
                    "thread a cache of its own, or guard the cache with a lock"
                )
            return method(self, *args, **kwargs)
        finally:
            if "call" in users and users["call"] is me:
                del users["call"]

    return cast(F, guarded)


def check_rows(table: Table | None, end: int) -> None:
    """Check that a table of rotary angles has the positions before `end`."""
    if table is not None and end > len(table.cos):
        raise ValueError(f"rotary: expected tables of {end} rows or more (position {end - 1}), got {len(table.cos)}")

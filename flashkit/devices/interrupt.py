"""Work that takes seconds in native code, and signals.

Python runs signal handlers on the main thread, between two of its instructions. So the main thread does not do such
work itself: it waits for a thread that does, and a handler runs at once. If it raises, as Ctrl-C does, the work is
stopped or goes on without the main thread. An exception never arises within the work, where it could leave a lock
taken or data half written.
"""

from __future__ import annotations

import _thread
import atexit
import contextvars
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_POLL = 0.1
"""Seconds after which the main thread looks whether it is still in its process. On Windows signals wait for it too."""


class _Work(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function, self.process = function, os.getpid()
        self.cancelled = self.started = self.over = False
        self.ended = threading.Lock()
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended.acquire()

    def run(self) -> None:
        # `run_off_main_thread` sets `cancelled` and then reads `started`: one of the two threads sees the other.
        self.started = True
        _running.add(self)
        try:
            if not self.cancelled:
                self.result = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.over = True
            _running.discard(self)
            self.ended.release()

    def wait(self) -> None:
        """Wait for the end, in the process that it runs in; a child that a handler forks does not have the thread."""
        while self.started and not self.over and os.getpid() == self.process:
            self.ended.acquire(timeout=_POLL)


_running: set[_Work[Any]] = set()


@atexit.register
def _wait_for_all() -> None:
    """Compilations that main threads have left end before Python does: their files are for later processes."""
    for work in tuple(_running):
        work.wait()


def run_off_main_thread(function: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """The result of `function()`, during which signal handlers run. Raises what the function raises, or a handler.

    On the main thread another thread calls the function, in the same context. It has to own what it uses, memory above
    all: the main thread may leave before it ends. In a child that a handler has forked, where the other thread does not
    exist, it is called once more.

    stop: makes the function end soon. A handler's exception then waits for that, whatever other handlers raise; without
    `stop` it does not. It is a function of C, such as a partial of one, which no handler breaks off.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return function()
    work = _Work(function)
    try:
        try:
            # One call of C. Python's own threads are started in several steps, which a handler's exception breaks.
            _thread.start_new_thread(contextvars.copy_context().run, (work.run,))
        except RuntimeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # a handler's
                raise
            return function()  # no thread can be started: a limit is reached, or Python is about to end
        while not work.over:
            if os.getpid() != work.process:
                return function()
            work.ended.acquire(timeout=_POLL)
    except BaseException as first:
        last: BaseException = first
        # Other handlers may raise meanwhile, the next one already here. Each of them waits again, and the last of their
        # exceptions leaves. Python runs no handler before the call of `stop`, which is within the inner `try`.
        while stop is not None:
            try:
                work.cancelled = True
                stop()
                work.wait()
                break
            except BaseException as later:
                last = later
        try:
            raise last
        finally:
            del last  # its traceback refers to this frame
    if work.error is not None:
        try:
            raise work.error
        finally:
            work.error = None  # its traceback refers to this frame
    result: T = work.result
    return result

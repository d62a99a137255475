"""Work that takes seconds in native code, and signals.

Python runs signal handlers on the main thread, between two of its instructions. So the main thread does not do such
work itself: it waits for a thread that does, and a handler runs at once. If it raises, as Ctrl-C does, the work is
stopped or goes on without the main thread. An exception never arises within the work, where it could leave a lock
taken or data half written.
"""

from __future__ import annotations

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
        self.function, self.started, self.ended = function, False, threading.Lock()
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended.acquire()

    def run(self) -> None:
        self.started = True
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.release()


def apart(function: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """The result of `function()`, during which signal handlers run.

    On the main thread another thread calls the function. It has to own what it uses, memory above all: the main thread
    may leave before it ends.

    Parameters
    ----------
    function
        Called once; in a child that a signal handler has forked, where the other thread does not exist, once more.
    stop
        Makes the function end soon. A handler's exception then waits for that; without `stop` it does not.

    Returns
    -------
    object
        What the function returns.

    Raises
    ------
    BaseException
        What the function, or a signal handler meanwhile, raises.

    Examples
    --------
    >>> from flashkit.devices.interrupt import apart
    >>> apart(lambda: 3)
    3
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    work, process = _Work(function), os.getpid()
    try:
        try:
            threading.Thread(target=work.run, name="flashkit").start()
        except RuntimeError:  # no thread can be started: a limit is reached, or Python is about to end
            return function()
        while not work.ended.acquire(timeout=_POLL):
            if os.getpid() != process:
                return function()
    except BaseException:
        if stop is not None:
            stop()
            while work.started and not work.ended.acquire(timeout=_POLL):
                pass
        raise
    if work.error is not None:
        try:
            raise work.error
        finally:
            work.error = None  # its traceback refers to this frame
    result: T = work.result
    return result

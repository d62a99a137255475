"""Locks that are free in a forked child.

A child process has copies of all locks and only the thread that forked. A lock that another thread held stays taken in
the child for ever. So a fork first takes the locks of this module and those of Numba and LLVM, and both processes
release them. It waits for at most one compilation, or for the minute that one waits for the same file from another
process. Locks are reentrant: a thread may fork, or a signal handler may call attention, where it holds one.
"""

from __future__ import annotations

import _thread
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from operator import attrgetter
from typing import Any

_OUTER, _COMPILER, _INNER = range(3)
"""The order of locks, Numba's and LLVM's before the inner ones: who holds a lock waits only for those after it."""

_FOREIGN_LOCKS = {
    "numba.core.compiler_lock": attrgetter("global_compiler_lock._lock"),
    "llvmlite.binding.ffi": attrgetter("lib._lock._lock"),
}
"""Locks of modules. A fork takes them where these are imported, and imports nothing itself."""

_locks: dict[int, list[Any]] = {_OUTER: [], _COMPILER: [], _INNER: []}
"""This module's locks by rank."""

_forks: dict[int, list[_Fork]] = {}
"""The forks in progress by thread. A fork that runs the hooks twice has two entries."""


class _Fork:
    """What a fork takes: the locks that its thread did not hold already."""

    def __init__(self) -> None:
        self.locks: list[Any] = []
        self.interrupted = False

    def take(self) -> None:
        for lock in _in_order():
            if not lock._is_owned():
                self.locks.append(lock)
            while not lock._is_owned():
                try:
                    lock.acquire()
                except KeyboardInterrupt:  # a hook cannot end the fork, so the interrupt comes after it
                    self.interrupted = True

    def release(self) -> None:
        for lock in reversed(self.locks):
            if lock._is_owned():
                lock.release()


def _in_order() -> Iterator[Any]:
    yield from _locks[_OUTER]
    yield from _locks[_COMPILER]
    for module, lock in _FOREIGN_LOCKS.items():
        with suppress(KeyError, AttributeError):  # not imported, or not to its end
            yield lock(sys.modules[module])
    yield from _locks[_INNER]


def _lock(rank: int) -> Any:
    made = threading.RLock()
    _locks[rank].append(made)
    return made


def outer_lock() -> Any:
    """A lock whose holder may wait for Numba and LLVM, but does not compile."""
    return _lock(_OUTER)


def inner_lock() -> Any:
    """A lock whose holder waits for no other."""
    return _lock(_INNER)


imports = outer_lock()
"""Held where functions import modules: a child forked during an import finds the import system's lock taken."""

_compiler = _lock(_COMPILER)


@contextmanager
def compiling() -> Iterator[None]:
    """One thread at a time compiles and loads machine code. A fork goes before the threads that wait for their turn."""
    if _compiler._is_owned():
        yield
        return
    _compiler.acquire()
    while _forks:
        _compiler.release()
        time.sleep(0.001)
        _compiler.acquire()
    try:
        yield
    finally:
        _compiler.release()


@cache
def go_before(module: str) -> None:
    """Import a module that takes locks of its own at a fork, and have a fork take the locks above first. Otherwise a
    thread that compiles could wait for the module's lock, and a fork that holds it for the thread.

    Call it before `compiling`, if what is compiled uses the module.
    """
    with imports:
        importlib.import_module(module)
    _register()


def _register() -> None:
    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def _before() -> None:
    fork = _Fork()
    _forks.setdefault(threading.get_ident(), []).append(fork)
    fork.take()


def _after_in_parent() -> None:
    if _after():  # not from this thread, whose hooks swallow exceptions
        _thread.start_new_thread(_thread.interrupt_main, ())


def _after_in_child() -> None:
    own = threading.get_ident()
    for thread in [thread for thread in _forks if thread != own]:
        del _forks[thread]  # forks that other threads of the parent have started
    _after()


def _after() -> bool:
    """Whether the fork was interrupted."""
    own = threading.get_ident()
    if not (forks := _forks.get(own)):
        return False  # registered while this fork was waiting
    fork = forks.pop()
    if not forks:
        del _forks[own]
    fork.release()
    return fork.interrupted


_register()

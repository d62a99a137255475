"""Run a kernel on the calling thread or on several, from any number of Python threads.

The workers of the pool are flashkit's own, native threads that Python does not know, and they sleep by Python's locks:
kernels/launch.py has what they do. Those of OpenMP, which Numba would use, spin: beside another process that needs the
cores a call then takes many times as long, and how they wait is one setting for all libraries of the process. A forked
child has no workers, so it runs on its own thread.

A call that takes long runs on a thread of its own, and the main thread waits for it (flashkit.devices.interrupt). A
signal handler that raises stops it: kernels read a word between tiles, and end early where it is not 0.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ... import settings
from ...devices import host, interrupt
from ...devices.forking import outer_lock
from . import arguments as at
from . import objects, specialise

SERIAL_FLOPS = 1e7
"""Work of a tenth of a millisecond, of which a thread that has to be woken would save little."""

LONG_FLOPS = 3e10
"""Work of one thread that takes two tenths of a second to three seconds; from there on signals are looked for."""


class Pool(NamedTuple):
    """Running workers."""

    workers: np.ndarray  # (n, WORKER_WORDS) int64; it stays as long as the process
    functions: dict[str, int]  # which own the machine code that they run


_lock = outer_lock()
_pool: Pool | None = None
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _forked or _pool is not None


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def count() -> int:
    """Threads that a call uses: FLASHKIT_NUM_THREADS, at most what numba.set_num_threads allows the calling thread."""
    if _forked:
        return 1
    allowed, numba = most(), sys.modules.get("numba.np.ufunc.parallel")
    if getattr(numba, "_is_initialized", False):
        allowed = min(allowed, numba.get_num_threads())  # type: ignore[union-attr]
    wanted = settings.NUM_THREADS.read() if settings.NUM_THREADS.raw() else None
    return allowed if wanted is None else min(allowed, wanted)


@cache
def most() -> int:
    """Threads of the process's calls: NUMBA_NUM_THREADS, or the cores that it may use."""
    wanted = os.environ.get("NUMBA_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else host.cpu_count()


def is_long(flops: float, threads: int) -> bool:
    """Whether the call takes so long that signals are looked for."""
    return flops >= LONG_FLOPS * threads


def interruptible(launch: Callable[[int], None]) -> None:
    """Call `launch`, which owns all memory of its kernels, with a value for STOP. A handler that raises stops them."""
    stop = np.zeros(1, np.int64)
    interrupt.run_off_main_thread(lambda: launch(stop.__array_interface__["data"][0]), partial(stop.fill, 1))


def set_pool(arguments: np.ndarray) -> None:
    """Write the pool's address and size to an argument block. The first call starts the workers."""
    global _pool
    if _pool is None:
        with _lock:
            if _pool is None:
                _pool = _start(most() - 1)
    arguments[at.WORKERS], arguments[at.NUM_WORKERS] = _pool.workers.ctypes.data, len(_pool.workers)


def _start(number: int) -> Pool:
    python, functions = ctypes.pythonapi, objects.kept(specialise.launcher_source)
    memory = np.zeros((number + 1, int(at.WORKER_WORDS)), np.int64)
    skipped = -memory.ctypes.data % 64 // 8  # whole cache lines
    workers = memory.reshape(-1)[skipped:][: number * int(at.WORKER_WORDS)].reshape(number, -1)
    workers[:, at.STATE] = at.ABSENT
    allocate = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThread_allocate_lock", python))
    acquire = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(("PyThread_acquire_lock", python))
    start = ctypes.PYFUNCTYPE(ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)(("PyThread_start_new_thread", python))
    for worker in workers:
        for word in at.WAKE, at.ENDED:
            lock = int(allocate() or 0)
            acquire(lock, 1)
            worker[word] = lock
        for word, name in (at.ACQUIRE, "PyThread_acquire_lock"), (at.RELEASE, "PyThread_release_lock"):
            worker[word] = _address(python, name)
        if hasattr(time, "CLOCK_MONOTONIC"):  # not on Windows
            system = ctypes.CDLL(None)
            worker[at.YIELD], worker[at.CLOCK] = _address(system, "sched_yield"), _address(system, "clock_gettime")
        worker[at.STATE] = at.FREE
        if start(functions["work"], worker.ctypes.data) == _NO_THREAD:  # a limit is reached
            worker[at.STATE] = at.ABSENT
            break
    return Pool(workers, functions)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


_NO_THREAD = ctypes.c_ulong(-1).value  # PYTHREAD_INVALID_THREAD_ID


ITEMS = tuple.__basicsize__
"""Bytes in a tuple before its objects' addresses. Kernels get a tuple: an argument of ctypes takes 0.2 microseconds."""


@cache
def entry(name: str) -> Callable[..., Any]:
    """A function of kernels/launch.py, of integers; it releases the GIL."""
    integers = {"launch": 2, "call": 5, "pull_back": 6}[name]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * integers)(objects.kept(specialise.launcher_source)[name])

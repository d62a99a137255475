"""Running a worker on the caller's thread or on several, safely from any number of Python threads.

Numba's OpenMP and TBB layers take concurrent calls; its own workqueue does not and aborts the process, so under it
a lock guards the parallel path and whoever finds it taken works alone. After a fork the child's thread pool is gone
(OpenMP would end the child without a word), so a forked child works alone too.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np

from . import specialise
from .arguments import COUNTER, TASKS

SERIAL_FLOPS = 2e6
"""Work below this (about 20 microseconds) is not worth waking a thread for."""

_workqueue_lock = threading.Lock()
_started = False
_forked = False


def _after_fork() -> None:
    global _forked, _workqueue_lock
    _forked = _forked or ("numba" in sys.modules and layer() is not None)
    _workqueue_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def count() -> int:
    """Threads that a call uses: FLASHKIT_NUM_THREADS, at most what numba.set_num_threads allows on this thread."""
    if _forked:
        return 1
    allowed = _launched_threads()
    wanted = os.environ.get("FLASHKIT_NUM_THREADS", "")
    if not wanted:
        return allowed
    if not wanted.isdigit() or int(wanted) < 1:
        raise ValueError(f"FLASHKIT_NUM_THREADS is a number of threads, 1 or more; got {wanted!r}")
    return min(allowed, int(wanted))


def layer() -> str | None:
    """Numba's threading layer once it runs, else None."""
    import numba

    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def _launched_threads() -> int:
    """Threads that Numba may use here; the first question starts its pool.

    Starting an OpenMP pool, Numba allows nested parallel regions for the whole process. PyTorch in the same process
    shares the library and then runs twenty times slower, so the level goes back to one, OpenMP's default, unless the
    user asks for more. A pool that was there before is the user's own and stays as it is.
    """
    import numba

    ours = layer() is None
    allowed = int(numba.get_num_threads())
    if ours and layer() == "omp" and "OMP_NESTED" not in os.environ and "OMP_MAX_ACTIVE_LEVELS" not in os.environ:
        # Not found where the OpenMP library is linked in or older than the function.
        with suppress(ImportError, OSError, AttributeError):
            omppool = importlib.import_module("numba.np.ufunc.omppool")
            ctypes.CDLL(omppool.__file__).omp_set_max_active_levels(1)
    return allowed


def run(worker: Any, arguments: np.ndarray, tasks: int, threads: int) -> None:
    """Run `worker` (a C function of the argument block and a thread's number) until its `tasks` are done."""
    global _started
    launcher = specialise.launcher()
    arguments[COUNTER], arguments[TASKS] = 0, tasks
    call = (worker.address, arguments.__array_interface__["data"][0], threads)
    if threads == 1 or tasks == 1:
        launcher.run_serial(*call)
    elif _started and layer() != "workqueue":
        launcher.run_parallel(*call)
    elif _workqueue_lock.acquire(blocking=not _started):
        try:
            launcher.run_parallel(*call)
            _started = True
        finally:
            _workqueue_lock.release()
    else:
        launcher.run_serial(*call)

"""Running a kernel on the caller's thread or on several, safely from any number of Python threads.

The pool of threads is Numba's: its OpenMP or TBB layer, which take concurrent calls, or else its own workqueue, which
does not and aborts the process, so under it a lock guards the parallel path and whoever finds it taken works alone.
A pool is an extension module of Numba that works without the rest of it, so it is loaded alone where Numba is not
imported anyway; a Numba that is imported later finds the same one, and its set_num_threads is heeded. After a fork the
child's threads are gone (OpenMP would end the child without a word), so a forked child works alone too.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...devices import host
from . import specialise
from .arguments import PARALLEL_FOR, SHARE, TASKS, WORKER

SERIAL_FLOPS = 2e6
"""Work below this (about 20 microseconds) is not worth waking a thread for."""


class Pool(NamedTuple):
    """A threading layer that runs."""

    layer: str  # "omp", "tbb" or "workqueue"
    parallel_for: int  # address of its loop
    limit: Callable[[], int]  # threads that numba.set_num_threads allows on this thread


_lock = threading.Lock()
_workqueue_lock = threading.Lock()
_pool: Pool | None = None
_forked = False


def _after_fork() -> None:
    global _forked, _lock, _workqueue_lock
    _forked = _forked or layer() is not None
    _lock, _workqueue_lock = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def count() -> int:
    """Threads that a call uses: FLASHKIT_NUM_THREADS, at most what numba.set_num_threads allows on this thread."""
    if _forked:
        return 1
    allowed = pool().limit()
    if not host.variable("FLASHKIT_NUM_THREADS"):
        return allowed
    wanted = os.environ["FLASHKIT_NUM_THREADS"]
    if not wanted.isdigit() or int(wanted) < 1:
        raise ValueError(f"FLASHKIT_NUM_THREADS is a number of threads, 1 or more; got {wanted!r}")
    return min(allowed, int(wanted))


def layer() -> str | None:
    """The threading layer once it runs, flashkit's or that of a Numba that is used beside it, else None."""
    if _pool is not None:
        return _pool.layer
    if (numba := sys.modules.get("numba")) is not None:
        with suppress(ValueError, AttributeError):  # not started; not imported to its end
            return str(numba.threading_layer())
    return None


def run(worker: int, arguments: np.ndarray, tasks: int, threads: int) -> None:
    """Run `worker` (address of a C function of the argument block and a thread's number) until its `tasks` are done."""
    threads = max(1, min(threads, tasks))
    arguments[WORKER], arguments[TASKS] = worker, tasks
    if threads > 1:
        arguments[PARALLEL_FOR], arguments[SHARE] = parallel_for()
    with alone(threads) as allowed:
        entry("launch")(arguments.__array_interface__["data"][0], allowed)


def concurrent(threads: int) -> bool:
    """Whether calls on so many threads may start while others run."""
    return threads == 1 or pool().layer != "workqueue"


@contextmanager
def alone(threads: int) -> Iterator[int]:
    """How many of so many threads may be used now: one where the workqueue is busy."""
    if concurrent(threads):
        yield threads
    elif _workqueue_lock.acquire(blocking=False):
        try:
            yield threads
        finally:
            _workqueue_lock.release()
    else:
        yield 1


def parallel_for() -> tuple[int, int]:
    """Addresses of the pool's loop and of the function that it gets."""
    return pool().parallel_for, specialise.launcher()["share"]


@cache
def entry(name: str) -> Callable[..., None]:
    """A function of kernels/launch.py, of integers and then NumPy arrays. Other Python threads run meanwhile."""
    integers, arrays = {"launch": (2, 0), "call": (3, 5)}[name]
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * integers, *[ctypes.py_object] * arrays)
    return kind(specialise.launcher()[name])


# --- the pool ---------------------------------------------------------------------------------------------------------


def pool() -> Pool:
    """The running pool; the first question starts it."""
    global _pool
    if _pool is None:
        with _lock:
            if _pool is None:
                _pool = _start()
    return _pool


def _start() -> Pool:
    running = layer()
    found = None if "numba" in sys.modules else _find()
    if found is None:
        import numba

        numba.get_num_threads()  # starts the pool
        name = str(numba.threading_layer())
        module = sys.modules[f"numba.np.ufunc.{_MODULES[name]}"]
    else:
        name, module = found
        threads = int(os.environ.get("NUMBA_NUM_THREADS", host.cpu_count()))
        for function in (module.launch_threads, module.set_num_threads):
            ctypes.CFUNCTYPE(None, ctypes.c_int)(function)(threads)
    if running is None and name == "omp":
        _unnest(module)
    return Pool(name, module.parallel_for, ctypes.CFUNCTYPE(ctypes.c_int)(module.get_num_threads))


def _unnest(omppool: Any) -> None:
    """Take back what the start of an OpenMP pool does to the whole process.

    Numba allows nested parallel regions. PyTorch in the same process shares the library and then runs twenty times
    slower, so the level goes back to one, OpenMP's default, unless the user asks for more. A pool that was there
    before is the user's own and stays as it is.
    """
    if "OMP_NESTED" not in os.environ and "OMP_MAX_ACTIVE_LEVELS" not in os.environ:
        # Not found where the OpenMP library is linked in or older than the function.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(omppool.__file__).omp_set_max_active_levels(1)


_MODULES = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}


def _find() -> tuple[str, Any] | None:
    """The layer that Numba would choose, and its module; None where Numba itself has to be asked."""
    wanted = os.environ.get("NUMBA_THREADING_LAYER", "default").lower()
    order = os.environ.get("NUMBA_THREADING_LAYER_PRIORITY", " ".join(_MODULES)).split()
    threads = os.environ.get("NUMBA_NUM_THREADS", "1")
    if sorted(order) != sorted(_MODULES) or not threads.isdigit() or os.path.exists(".numba_config.yaml"):
        return None
    for name in order if wanted == "default" else [wanted] if wanted in _MODULES else []:
        with suppress(ImportError, OSError):
            if name != "tbb" or _tbb_fits():
                return name, _extension(_MODULES[name])
    return None


def _extension(name: str) -> Any:
    for place in _numba_places():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = place / "np" / "ufunc" / (name + suffix)
            if path.exists():
                found = importlib.util.spec_from_file_location(f"numba.np.ufunc.{name}", path)
                assert found is not None and found.loader is not None
                module = importlib.util.module_from_spec(found)
                found.loader.exec_module(module)
                return module
    raise ImportError(name)


def _numba_places() -> Iterator[Path]:
    found = importlib.util.find_spec("numba")
    yield from map(Path, (found and found.submodule_search_locations) or ())


def _tbb_fits() -> bool:
    """Whether TBB is there, of the version (2021.6) from which on Numba takes it."""
    name = {"win32": "tbb12.dll", "darwin": "libtbb.12.dylib"}.get(sys.platform, "libtbb.so.12")
    return bool(ctypes.CDLL(name).TBB_runtime_interface_version() >= 12060)

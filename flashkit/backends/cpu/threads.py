"""Run a kernel on the calling thread or on several, from any number of Python threads.

The thread pool is Numba's. Its OpenMP and TBB layers take concurrent calls. Its workqueue aborts the process on one, so
there a lock guards the parallel path, and a call that finds the lock taken runs on its own thread. A layer is an
extension module that works without the rest of Numba, so it is loaded alone where Numba is not imported. A Numba that
is imported later finds the same pool, and its set_num_threads applies. A forked child has no pool threads, and OpenMP
would end it, so it runs on its own thread too.

A call that takes long runs on a thread of its own, and the main thread waits for it (flashkit.devices.interrupt). A
signal handler that raises stops it: kernels read a word between tiles, and end early where it is not 0.
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
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import settings
from ...devices import host, interrupt
from ...devices.forking import outer_lock
from . import specialise
from .arguments import GET_NUM_THREADS, PARALLEL_FOR, SET_NUM_THREADS, THREAD_MAIN

SERIAL_FLOPS = 1e7
"""Work of a tenth of a millisecond. Threads would save a part of it, and where other processes take the cores, a call
waits milliseconds for a thread that is not running.
"""

LONG_FLOPS = 3e10
"""Work of one thread that takes two tenths of a second to three seconds; from there on signals are looked for. The
thread that a call runs on then has a new team of OpenMP threads, which costs some milliseconds.
"""


class Pool(NamedTuple):
    """A running threading layer."""

    layer: str  # "omp", "tbb" or "workqueue"
    parallel_for: int  # addresses of its loop, and of the functions for what the calling thread may use
    get_num_threads: int
    set_num_threads: int
    limit: Callable[[], int]  # numba.get_num_threads of the calling thread


_lock = outer_lock()
_workqueue_lock = threading.RLock()
_pool: Pool | None = None
_forked = False


def _after_fork() -> None:
    global _forked, _workqueue_lock
    _forked = _forked or layer() is not None
    _workqueue_lock = threading.RLock()  # no fork waits for a kernel


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def count() -> int:
    """Threads that a call uses: FLASHKIT_NUM_THREADS, at most what numba.set_num_threads allows the calling thread."""
    if _forked:
        return 1
    allowed = pool().limit()
    wanted = settings.NUM_THREADS.read() if settings.NUM_THREADS.raw() else None
    return allowed if wanted is None else min(allowed, wanted)


def layer() -> str | None:
    """The running threading layer, flashkit's or the one that Numba has started itself; else None."""
    if _pool is not None:
        return _pool.layer
    if (numba := sys.modules.get("numba")) is not None:
        with suppress(ValueError, AttributeError):  # not started; not imported to its end
            return str(numba.threading_layer())
    return None


def is_long(flops: float, threads: int) -> bool:
    """Whether the call takes so long that signals are looked for."""
    return flops >= LONG_FLOPS * threads


def interruptible(launch: Callable[[int], None]) -> None:
    """Call `launch`, which runs kernels and owns all memory that they use, with a value for STOP. A signal handler that
    raises stops them.
    """
    stop = np.zeros(1, np.int64)
    interrupt.run_off_main_thread(lambda: launch(stop.__array_interface__["data"][0]), partial(stop.fill, 1))


def concurrent(threads: int) -> bool:
    """Whether a call on `threads` threads may start while others run."""
    return threads == 1 or (not _forked and pool().layer != "workqueue")


@contextmanager
def exclusive(threads: int) -> Iterator[int]:
    """The number of threads that the call may use: `threads`, or one while the workqueue is busy."""
    if concurrent(threads):
        yield threads
    elif _forked:  # in the middle of a call
        yield 1
    elif _workqueue_lock.acquire(blocking=False):
        try:
            yield threads
        finally:
            _workqueue_lock.release()
    else:
        yield 1


def set_pool(arguments: np.ndarray) -> None:
    """Write the addresses of the pool's functions, and of the one that its loop runs, to an argument block."""
    running = pool()
    arguments[PARALLEL_FOR], arguments[THREAD_MAIN] = running.parallel_for, specialise.launcher()["thread_main"]
    arguments[GET_NUM_THREADS], arguments[SET_NUM_THREADS] = running.get_num_threads, running.set_num_threads


@cache
def entry(name: str) -> Callable[..., Any]:
    """A function of kernels/launch.py, of integers and then NumPy arrays; it releases the GIL."""
    integers, arrays = {"launch": (2, 0), "call": (4, 8), "pull_back": (5, 10)}[name]
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * integers, *[ctypes.py_object] * arrays)
    return kind(specialise.launcher()[name])


# --- the pool ---------------------------------------------------------------------------------------------------------


def pool() -> Pool:
    """The pool; the first call starts it."""
    global _pool
    if _pool is None:
        with _lock:
            if _pool is None:
                _pool = _start()
    return _pool


def _start() -> Pool:
    running = layer()
    layer_module = None if "numba" in sys.modules else _find()
    if layer_module is None:
        import numba

        numba.get_num_threads()  # starts the pool
        name = str(numba.threading_layer())
        module = sys.modules[f"numba.np.ufunc.{_MODULES[name]}"]
    else:
        name, module = layer_module
        threads = int(os.environ.get("NUMBA_NUM_THREADS", host.cpu_count()))
        for function in (module.launch_threads, module.set_num_threads):
            ctypes.CFUNCTYPE(None, ctypes.c_int)(function)(threads)
    if running is None and name == "omp":
        _disable_nesting(module)
    limit: Callable[[], int] = ctypes.CFUNCTYPE(ctypes.c_int)(module.get_num_threads)
    addresses = module.parallel_for, module.get_num_threads, module.set_num_threads
    if (processors := host.cpu_count()) < limit() and "NUMBA_NUM_THREADS" not in os.environ:
        return Pool(name, *addresses, lambda: min(limit(), processors))  # Numba does not know quotas
    return Pool(name, *addresses, limit)


def _disable_nesting(omppool: Any) -> None:
    """Restore OpenMP's default of one level of parallel regions.

    Starting Numba's OpenMP pool allows nested regions in the whole process, and PyTorch, which shares the library, then
    runs many times slower. The user's environment takes precedence, and so does a pool that Numba started before.
    """
    if "OMP_NESTED" not in os.environ and "OMP_MAX_ACTIVE_LEVELS" not in os.environ:
        # The function is missing where the OpenMP library is linked statically or is older.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(omppool.__file__).omp_set_max_active_levels(1)


_MODULES = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}


def _find() -> tuple[str, Any] | None:
    """The layer that Numba would choose, and its module; None where only Numba itself can tell."""
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
                module_spec = importlib.util.spec_from_file_location(f"numba.np.ufunc.{name}", path)
                assert module_spec is not None and module_spec.loader is not None
                module = importlib.util.module_from_spec(module_spec)
                module_spec.loader.exec_module(module)
                return module
    raise ImportError(name)


def _numba_places() -> Iterator[Path]:
    module_spec = importlib.util.find_spec("numba")
    yield from map(Path, (module_spec and module_spec.submodule_search_locations) or ())


def _tbb_fits() -> bool:
    """Whether TBB is installed in a version that Numba accepts, 2021.6 or later."""
    name = {"win32": "tbb12.dll", "darwin": "libtbb.12.dylib"}.get(sys.platform, "libtbb.so.12")
    return bool(ctypes.CDLL(name).TBB_runtime_interface_version() >= 12060)

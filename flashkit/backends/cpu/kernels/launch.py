"""Run a worker on one thread or on several; the only code that Numba's threading layer sees."""

from numba import njit, prange

from flashkit.backends.cpu.memory import call_worker


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def run_serial(worker, arguments, threads):
    call_worker(worker, arguments, 0)


@njit("void(int64, int64, int64)", nogil=True, parallel=True, cache=True)
def run_parallel(worker, arguments, threads):
    for thread in prange(threads):
        call_worker(worker, arguments, thread)

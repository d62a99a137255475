"""Measured peaks of this CPU: FLOP/s and bandwidth, by the micro-kernels that attention uses.

`peak_flops` times `gemm`, c = a @ b, with one row of a and c (strides of 0) and b in L1, so that its multiply-adds
are the limit. `bandwidth` times `read`, which prefetches far ahead as the decode kernel does; without prefetching one
thread does not reach the bandwidth.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ...devices.io_model import CpuTile
from .micro.compile import addresses, kernels
from .micro.read import LINE
from .micro.register_block import RegisterBlock

SAMPLE = 0.02
"""Seconds of one sample, approximately."""

MAX_SECONDS = 0.5
"""Seconds after which a measurement takes no further sample."""

PREFETCH_DISTANCE = 8192
"""Bytes between what is read and what is prefetched."""


def peak_flops(dtype: str, tile: CpuTile, threads: int, *, depth: int = 128, samples: int = 15) -> float:
    """The best FLOP/s of `gemm` in the tile's register block on all threads, operands in L1. depth: of the sums."""
    block, kind = RegisterBlock.of(dtype, tile), np.dtype(dtype)
    width = block.vectors * block.lanes
    rows = max(1, round(SAMPLE * 1e11 / (2 * width * depth * block.rows))) * block.rows

    gemm = _function("gemm", block)

    def work() -> tuple[Callable[[], None], object]:
        a, b, c = np.ones(depth, kind), np.ones((depth, width), kind), np.empty(width, kind)
        at = [x.ctypes.data for x in (a, b, c)]
        return lambda: gemm(at[0], 0, a.itemsize, at[1], b.strides[0], at[2], 0, rows, width, depth), (a, b, c)

    return 2.0 * rows * width * depth * threads / min(_in_parallel(work, threads, samples))


def bandwidth(nbytes: int, lanes: int, threads: int, *, samples: int = 15) -> float:
    """The bytes/s that all threads together read, each from an array of its own of about nbytes / threads: from main
    memory if the arrays are larger than the last-level cache, from L2 if they are smaller than a core's. lanes: float32
    numbers of a vector.
    """
    lines = max(1, nbytes // threads // LINE)
    times = max(1, round(SAMPLE * 2e10 / (LINE * lines)))

    def work() -> tuple[Callable[[], None], object]:
        array = np.ones(lines * LINE, np.uint8)
        return reader(array, lanes, times), array

    return float(LINE) * lines * times * threads / min(_in_parallel(work, threads, samples))


def reader(array: np.ndarray, lanes: int, times: int = 1) -> Callable[[], None]:
    """A function that reads the whole cache lines of a contiguous array `times` times."""
    function = _function("read", RegisterBlock("float", 1, 1, lanes), gemv_kernels=True)
    seen = np.empty(LINE, np.uint8)
    arguments = array.ctypes.data, array.nbytes // LINE, times, PREFETCH_DISTANCE, seen.ctypes.data
    return lambda keep=(array, seen): function(*arguments)  # type: ignore[misc]


def _function(name: str, block: RegisterBlock, gemv_kernels: bool = False) -> Callable[..., None]:
    """A micro-kernel; ctypes releases the GIL during its calls."""
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * kernels(block, gemv_kernels)[name][0])
    return kind(addresses(block, gemv_kernels)[name])


def _in_parallel(work: Callable[[], tuple[Callable[[], None], object]], threads: int, samples: int) -> list[float]:
    """Seconds that all threads together take in each of up to `samples` rounds; each thread makes its own work."""
    times: list[float] = []
    barrier = threading.Barrier(threads, action=lambda: times.append(time.perf_counter()))

    def run() -> None:
        call, _arrays = work()
        call()
        barrier.wait()
        # The barrier's action alone appends to `times`, so every thread sees the same list here and stops in the
        # same round.
        while len(times) <= samples and times[-1] - times[0] < MAX_SECONDS:
            call()
            barrier.wait()

    others = [threading.Thread(target=run) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    return [end - start for start, end in pairwise(times)]

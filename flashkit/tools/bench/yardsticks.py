"""The yardsticks of a CPU case: rates that flashkit's own rate is compared with, timed in the same rounds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from ...api import plan
from ...spec import Direction
from .cases import Arrays, Case, dense, dense_flops
from .contender import Yardstick, with_flashkit

SMALL = 128
"""Queries and keys up to which the overhead of a call over its kernel is measured."""

SIZE = 2048
"""Rows, columns and depth of the matrix product that long cases are compared with."""


def yardsticks(
    case: Case, arrays: Arrays, direction: Direction, baselines: Collection[str], threads: int
) -> dict[str, Yardstick]:
    """The yardsticks of a case, by name.

    sgemm, bf16_gemm: PyTorch's matrix product in float32 and in bfloat16, for long cases of these dtypes. dense:
    flashkit without the mask, for masked cases. read: all threads read as many bytes as keys and values have, for
    decoding. kernel, planned: the compiled kernel alone and the call of `flashkit.plan`, for small cases.
    """
    by_name: dict[str, Yardstick] = {}
    product = {"float32": "sgemm", "bfloat16": "bf16_gemm"}.get(case.dtype)
    if product and "torch" in baselines and case.n_q >= SIZE and not case.masked:
        import torch

        a, b, out = torch.randn(3, SIZE, SIZE).to(getattr(torch, case.dtype)).unbind()
        by_name[product] = Yardstick(partial(torch.matmul, a, b, out=out), 2.0 * SIZE**3)
    if case.masked:
        call = with_flashkit(dense(case), arrays, direction, 0).call
        by_name["dense"] = Yardstick(call, dense_flops(case, direction))
    if max(case.n_q, case.keys) <= SMALL and direction == "forward" and not case.masked:
        q, k, v, _ = arrays
        by_name["planned"] = Yardstick(partial(plan(q, k, v, **case.options), q, k, v))
        by_name["kernel"] = Yardstick(_kernel(case, q, k, v))
    if case.n_q == 1:
        by_name["read"] = Yardstick(read(arrays[1:3], threads), float(arrays[1].nbytes + arrays[2].nbytes), "byte")
    return by_name


def read(arrays: Sequence[np.ndarray], threads: int) -> Callable[[], object]:
    """All threads together read these arrays, a part each."""
    from ...backends.cpu.peaks import reader
    from ...devices import host

    lanes = host.lanes_of(host.cpu_features())
    parts = [np.array_split(array.view(np.uint8).reshape(-1), threads) for array in arrays]
    loops = [[reader(part, lanes) for part in own] for own in zip(*parts)]
    pool = ThreadPoolExecutor(threads)

    def work(own: list[Callable[[], None]]) -> None:
        for loop in own:
            loop()

    return lambda: list(pool.map(work, loops))


def _kernel(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Callable[[], object]:
    """The compiled kernel alone, launched with the argument block that a call has left in its scratch memory."""
    from ...backends.cpu import arguments, scratch_pool, threads

    out, planned = np.empty_like(q, shape=case.shapes[3]), plan(q, k, v, return_lse=True, backend="cpu", **case.options)
    expected, _ = planned(q, k, v)
    _, lse = planned(q, k, v, out=out)
    memory = scratch_pool.acquire(0)  # the scratch memory that was returned last
    block = (ctypes.c_int64 * int(arguments.SIZE)).from_address(memory.address)
    if block[int(arguments.OUT)] != out.ctypes.data:  # as after a call without queries, which starts no kernel
        raise RuntimeError(f"a call of {case.label} leaves no argument block of its kernel behind")
    block[int(arguments.STOP)] = 0  # the word there belonged to the call
    workers = threads.count() if block[int(arguments.WORKERS)] else 1
    launch, address = threads.entry("launch"), memory.address
    out[...] = 0

    def start() -> object:
        launch(address, workers)
        return memory, planned, q, k, v, out, lse  # the block points into these: the closure keeps them alive

    start()
    if not np.array_equal(out, expected):
        raise RuntimeError("the argument block that a call leaves behind is not that of its kernel")
    return start

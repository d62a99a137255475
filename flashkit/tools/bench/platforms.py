"""The platforms of the benchmark: this CPU, and the CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...spec import Direction, Verdict
from . import cases
from .baselines import BASELINES, REQUIRES
from .cases import Case
from .contender import Contender, Yardstick
from .environment import cuda_machine, machine
from .yardsticks import yardsticks


@dataclass(frozen=True)
class Platform:
    """The CPU or a CUDA device. is_cpu: load, idle threads and memory matter. synchronize: waits for calls."""

    suites: Mapping[str, Sequence[Case]]
    quick: Sequence[Case]
    baselines: Mapping[str, Contender]
    requires: Mapping[str, tuple[str, ...]]
    arrays: Callable[[Case], Any]
    machine: Callable[..., dict[str, Any]]
    yardsticks: Callable[[Case, Any, Direction, Sequence[str], int], dict[str, Yardstick]]
    synchronize: Callable[[], object] = lambda: None
    is_cpu: bool = True


def cpu() -> Platform:
    return Platform(cases.SUITES, cases.QUICK, BASELINES, REQUIRES, Case.arrays, machine, yardsticks)


def cuda() -> Platform:
    """The current CUDA device. RuntimeError if the CuPy backend is not available; the message says why."""
    from ... import dispatch
    from . import baselines_cuda

    backend = dispatch.registry().get("cupy_raw")
    verdict = backend.available() if backend else Verdict(False, "cupy_raw is not installed")
    if not verdict:
        raise RuntimeError(verdict.reason)
    import cupy

    return Platform(
        cases.CUDA_SUITES, cases.CUDA_QUICK, baselines_cuda.BASELINES, baselines_cuda.REQUIRES,
        partial(Case.arrays, library=cupy), cuda_machine, baselines_cuda.yardsticks,
        cupy.cuda.runtime.deviceSynchronize, is_cpu=False,
    )  # fmt: skip


PLATFORMS = {"cpu": cpu, "cuda": cuda}

"""Trials: a target's problem with its arrays, results against the reference, and timings."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ...call.arguments import prepare
from ...call.explanation import visible_pairs
from ...devices import timing
from ...devices.schema import Kind, TileRow
from ...devices.timing import Timing
from ...spec import Direction, Gradients
from ..bench.cases import Case
from ..bench.measure import by_the_reference
from .log import MeasuredPeaks
from .targets import DROP, Effort, Target

VERIFIED_TOKENS = 777
"""Tokens of the problem that is verified. No tile divides it, so the last tile of each row and column is ragged."""

SLACK = 4.0
"""A result may have this many times the error of the plain computation: its sums are taken in another order, and the
maximum of a few errors varies. A wrong tile is off by thousands of times that error."""


class Task:
    """A target's problem, arrays, and expected results, of the first and last heads that share no keys."""

    plan: Any = None

    def __init__(self, case: Case, direction: Direction, arrays: Sequence[Any]) -> None:
        *inputs, dout = arrays
        self.direction = direction
        self.problem, self.operands, _ = prepare(*inputs, **case.options)
        self.gradients = Gradients(dout, None, *(x.copy() for x in inputs))

    @property
    def flops(self) -> float:
        return self.problem.flops(self.direction, visible_pairs(self.problem, self.operands))

    @property
    def results(self) -> dict[str, Any]:
        op, g = self.operands, self.gradients
        return {"out": op.out, "lse": op.lse} if self.direction == "forward" else {"dq": g.dq, "dk": g.dk, "dv": g.dv}

    def complaint(self, run: Callable[[], object]) -> str:
        """The first result of `run` that is wrong, in a sentence; empty if all are right."""
        for array in self.results.values():
            array.fill(np.nan)  # an element that is not written fails
        run()
        for name, array in self.results.items():
            exact, allowed = self.expected[name]
            error = _error(self._verified(array), exact)
            if not error <= allowed:
                return f"{name} is off by {error:.3g}, {allowed:.3g} is allowed"
        return ""

    @cached_property
    def expected(self) -> dict[str, tuple[np.ndarray, float]]:
        """For each result the reference in float64 and the largest absolute error that is allowed.

        The tolerance is SLACK times the error of the plain computation in the same precision, and one rounding of the
        largest value. For float64, which the reference itself computes in, that error is scaled from float32's.
        """
        dtype = self.operands.q.dtype
        coarse = np.dtype(np.float32) if dtype == np.float64 else dtype
        exact, plain = self._computed(np.float64), self._computed(coarse)
        eps, coarse_eps = (float(ml_dtypes.finfo(each).eps) for each in (dtype, coarse))
        return {
            name: (x, SLACK * eps / coarse_eps * _error(plain[name], x) + eps * float(np.abs(x).max()))
            for name, x in exact.items()
        }

    def _computed(self, dtype: Any) -> dict[str, np.ndarray]:
        spec, names = self.problem.spec, ("q", "k", "v", "out", "lse")
        arrays: dict[str, Any] = {name: self._verified(getattr(self.operands, name)) for name in names}
        operands, dout = replace(self.operands, **arrays), self._verified(self.gradients.dout)
        return by_the_reference(spec, operands, self.direction, dout, dtype)

    def _verified(self, x: Any) -> np.ndarray:
        """The heads that are verified, in NumPy."""
        array: np.ndarray = x if isinstance(x, np.ndarray) else x.get()
        return array if self.problem.spec.group > 1 else array[:, [0, -1]]


def _error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - exact).max())


class Tuner(ABC):
    """A backend that can be tuned on the device it runs on, and its trials.

    tile: the type of its tiles. levels: names of the memories whose bandwidth is measured, the slowest first. sram:
    which of them tiles of K and V are read from. following: the target after each.
    """

    backend: str
    kind: Kind
    tile: Any
    levels: tuple[str, str, str]
    sram: Literal["l1", "l2"]
    tokens: int

    def __init__(self) -> None:
        self.tasks: dict[tuple[Any, bool], Task] = {}
        self.following: dict[Target, Target] = {}

    def begin(self, effort: Effort, targets: Sequence[Target]) -> None:
        """Before the trials of these targets."""
        self.tokens, self.following = effort.tokens, dict(itertools.pairwise(targets))

    @abstractmethod
    def effort(self, quick: bool) -> Effort: ...

    @abstractmethod
    def targets(self, effort: Effort, dtypes: Sequence[str] | None) -> list[Target]: ...

    @abstractmethod
    def measure_peaks(self) -> MeasuredPeaks: ...

    @abstractmethod
    def table(self, target: Target) -> str:
        """The tile table of a profile that attention asks for this target."""

    @abstractmethod
    def conditions(self, target: Target) -> str:
        """The conditions of the measurement, for the `why` of a profile's row."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the software that the speed depends on."""

    @abstractmethod
    def identity(self) -> Any:
        """The device, versions and kernel sources that a log is valid for."""

    @abstractmethod
    def in_use(self, target: Target) -> Any:
        """The tile that attention uses now."""

    @abstractmethod
    def row_in_use(self, target: Target) -> TileRow | None:
        """The profile's row that decided about it, before anything is written."""

    @abstractmethod
    def candidates(self, target: Target) -> Sequence[Any]:
        """Possible tiles, ranked by a model, the best first."""

    @abstractmethod
    def new_task(self, target: Target, small: bool) -> Task:
        """The problem that is timed, or a small one that is verified; for a backward pass after its forward pass."""

    @abstractmethod
    def call(self, target: Target, tile: Any, task: Task) -> Callable[[], object]:
        """The pass with this tile."""

    def synchronize(self) -> None:  # noqa: B027  (a CPU has nothing to wait for)
        """Wait for a device that runs asynchronously."""

    def task(self, target: Target, small: bool = False) -> Task:
        key = target.problem, small
        if key not in self.tasks:
            # Problems are tuned one after another, so the arrays of other problems can be freed.
            self.tasks = {k: task for k, task in self.tasks.items() if k[0] == target.problem}
            self.tasks[key] = self.new_task(target, small)
        return self.tasks[key]

    def flops(self, target: Target) -> float:
        """FLOPs of the problem that is timed."""
        return self.task(target).flops

    def verify(self, target: Target, tile: Any) -> str:
        """What is wrong with the results of this tile; empty if they are right."""
        task = self.task(target, small=True)
        return task.complaint(self.call(target, tile, task))

    def time(self, target: Target, tiles: Sequence[Any], rounds: int, budget: float) -> dict[Any, Timing]:
        """Interleaved timings; budget: seconds."""
        calls = {tile: self.call(target, tile, self.task(target)) for tile in tiles}
        return timing.interleaved(calls, rounds=rounds, budget=budget, drop=DROP, synchronize=self.synchronize)

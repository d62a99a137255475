"""Trials on this CPU for `flashkit autotune`: results held against the definition, times, bandwidths, peak rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ...backends.cpu import measured_peaks, objects, threads
from ...backends.cpu.backend import CpuBackend
from ...call.arguments import prepare
from ...call.explanation import visible_pairs
from ...devices import host, io_model, profiles, timing
from ...devices.io_model import CpuTile
from ...devices.timing import Timing
from ...spec import ITEMSIZE, Gradients
from ..bench.baselines import Case
from . import search as tune
from .log import Rates
from .search import DROP, Effort, Target, digits
from .trials import Truth

VERIFIED_TOKENS = 777
"""A number of tokens that no tile divides: the last tile of each row and column is a partial one."""


class Cpu:
    """The CPU backend; see tune.Subject."""

    backend, kind, tile = "cpu", "cpu", CpuTile
    levels = "main memory", "L2", "L1"
    sram = "l2"

    def note(self, target: Target) -> str:
        return f"{threads.count()} threads"

    def effort(self, quick: bool) -> Effort:
        return tune.QUICK if quick else tune.FULL

    def targets(self, effort: Effort, dtypes: Sequence[str] | None) -> list[Target]:
        return effort.targets(dtypes)

    def bench(self, effort: Effort, targets: Sequence[Target]) -> CpuBench:
        return CpuBench(effort)

    def rates(self) -> Rates:
        return measure_rates()

    def versions(self) -> dict[str, str]:
        return timing.versions()

    def identity(self) -> Any:
        features = sorted(host.cpu_features())
        return features, host.cpu_caches(), threads.count(), self.versions(), objects.fingerprint()


class CpuBench:
    """Verifies and times tiles of the CPU backend on this machine."""

    def __init__(self, effort: Effort) -> None:
        self.backend, self.profile = CpuBackend(), profiles.for_device("cpu")
        self.tokens, self.threads = effort.tokens, threads.count()
        self._problems: dict[tuple[Target, int], _Task] = {}

    def in_use(self, target: Target) -> CpuTile:
        plan = self.task(target, self.tokens).plan
        return plan.tile if target.direction == "forward" else plan.backward_tile

    def candidates(self, target: Target) -> list[CpuTile]:
        memory = {"l1d": self.profile.memory.l1d or 32 << 10, "l2": self.profile.memory.l2 or 256 << 10}
        lanes = host.lanes_of(self.profile.device.features)
        d = target.head_dim
        return io_model.candidates("cpu", memory, target.dtype, d, d, target.direction, lanes=lanes)

    def flops(self, target: Target) -> float:
        task = self.task(target, self.tokens)
        return task.problem.flops(target.direction, visible_pairs(task.problem, task.operands))

    def verify(self, target: Target, tile: CpuTile) -> str:
        task = self.task(target, VERIFIED_TOKENS)
        task.call(tile)()
        return task.complaint()

    def time(self, target: Target, tiles: Sequence[CpuTile], rounds: int, budget: float) -> dict[CpuTile, Timing]:
        task = self.task(target, self.tokens)
        return timing.interleaved({t: task.call(t) for t in tiles}, rounds=rounds, budget=budget, drop=DROP)

    def task(self, target: Target, tokens: int) -> _Task:
        key = target, tokens
        if key not in self._problems:
            # One target after the other: the arrays of the last one are let go.
            self._problems = {k: task for k, task in self._problems.items() if k[0] == target}
            self._problems[key] = _Task(self.backend, self.profile, target, tokens, heads=2 * self.threads)
        return self._problems[key]


class _Task:
    """A target's problem with its arrays, and what its results should be.

    heads: two for each thread, so that the backend cuts no block of queries to give every thread some.
    """

    def __init__(self, backend: Any, profile: Any, target: Target, tokens: int, heads: int) -> None:
        case = Case(tokens, target.head_dim, max(heads, 4), target.dtype, target.causal)
        self.backend, self.target = backend, target
        *inputs, dout = case.arrays()
        self.problem, self.operands, _ = prepare(*inputs, causal=target.causal)
        self.plan = backend.plan(self.problem, profile)
        self.gradients = Gradients(dout, None, *(np.empty_like(x) for x in inputs))
        if target.direction == "backward":  # which reads the results of the forward pass
            backend.forward(self.plan, self.operands)

    def call(self, tile: CpuTile) -> Callable[[], None]:
        """What is timed."""
        if self.target.direction == "forward":
            plan = replace(self.plan, tile=tile)
            return lambda: self.backend.forward(plan, self.operands)
        plan = replace(self.plan, backward_tile=tile)
        return lambda: self.backend.backward(plan, self.operands, self.gradients)

    @property
    def results(self) -> dict[str, np.ndarray]:
        """What the last call has computed, of the first and the last head."""
        op, g = self.operands, self.gradients
        if self.target.direction == "forward":
            return {"out": op.out[:, [0, -1]], "lse": op.lse[:, [0, -1]]}
        return {"dq": g.dq[:, [0, -1]], "dk": g.dk[:, [0, -1]], "dv": g.dv[:, [0, -1]]}

    @cached_property
    def truth(self) -> Truth:
        op = self.operands
        two = replace(op, **{name: getattr(op, name)[:, [0, -1]] for name in ("q", "k", "v", "out", "lse")})
        return Truth(self.problem.spec, two, self.target.direction, self.gradients.dout[:, [0, -1]])

    def complaint(self) -> str:
        """Which result is wrong, or nothing."""
        return self.truth.complaint(self.results)


def measure_rates(samples: int = 15) -> Rates:
    """Bandwidths and peak rates of this CPU by flashkit's own micro-kernels, on as many threads as a call uses."""
    profile, count = profiles.for_device("cpu"), threads.count()
    memory, lanes = profile.memory, host.lanes_of(profile.device.features)
    l1, l2, l3 = memory.l1d or 32 << 10, memory.l2 or 256 << 10, memory.l3 or 8 << 20
    flops, bandwidth = measured_peaks.multiply, measured_peaks.read
    peaks = {dtype: max(flops(dtype, tile, count, samples=samples) for tile in _blocks(dtype, lanes, l1, l2))
             for dtype in ("float32", "float64")}  # fmt: skip
    # 16-bit numbers are widened and computed with in float32.
    peaks |= {dtype: peaks["float32"] for dtype in ITEMSIZE if dtype not in peaks}
    main = min(max(8 * l3, 256 << 20), 2 << 30)  # of four times the last cache a part was still found in it
    main_gbs, l2_gbs, l1_gbs = (
        bandwidth(size, lanes, count, samples=samples) / 1e9 for size in (main, l2 // 2 * count, l1 // 2 * count)
    )
    peak_tflops = {dtype: digits(rate / 1e12) for dtype, rate in peaks.items()}
    return Rates(digits(main_gbs), digits(l2_gbs), digits(l1_gbs), peak_tflops, timing.now())


def _blocks(dtype: str, lanes: int, l1: int, l2: int) -> list[CpuTile]:
    """Tiles of the three likeliest register blocks: which of them is the fastest, only the CPU can tell."""
    ranked: list[CpuTile] = io_model.candidates("cpu", {"l1d": l1, "l2": l2}, dtype, 128, 128, lanes=lanes)
    return list({(tile.rows, tile.vectors): tile for tile in reversed(ranked)}.values())[-3:]

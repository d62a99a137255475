"""Trials on this CPU: verification and timing of tiles, measured peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ...backends.cpu import bf16, objects, peaks, threads
from ...backends.cpu.backend import CpuBackend
from ...backends.cpu.plan import choose_tile
from ...call.arguments import prepare
from ...call.explanation import visible_pairs
from ...devices import host, io_model, profiles, timing
from ...devices.io_model import CpuTile
from ...devices.schema import Kind, TileRow
from ...devices.timing import Timing
from ...spec import ITEMSIZE, Gradients
from ..bench import environment
from ..bench.cases import Case
from .log import MeasuredPeaks, four_digits
from .targets import DROP, Effort, Target
from .verification import Expected

QUICK = Effort(("float32",), (64, 128), tokens=1024, blocks=9, shapes=5, rounds=9, budget=100.0)
FULL = Effort(
    ("float32", "float64", "float16", "bfloat16"), (64, 128, 256), tokens=2048, blocks=12, shapes=8, rounds=9,
    budget=1800.0,
)  # fmt: skip

VERIFIED_TOKENS = 777
"""Tokens of the problem that is verified. No tile divides it, so the last tile of each row and column is ragged."""


def by_amx(target: Target) -> bool:
    """Whether AMX multiplies for this target, which has tables of its own."""
    return target.dtype == "bfloat16" and bf16.select().name == "amx"


class TunableCpu:
    """The CPU backend as a TunableBackend."""

    backend = "cpu"
    kind: Kind = "cpu"
    tile: Any = CpuTile
    levels = "main memory", "L2", "L1"
    sram: Literal["l1", "l2"] = "l2"

    def effort(self, quick: bool) -> Effort:
        return QUICK if quick else FULL

    def targets(self, effort: Effort, dtypes: Sequence[str] | None) -> list[Target]:
        return effort.targets(dtypes)

    def runner(self, effort: Effort, targets: Sequence[Target]) -> CpuRunner:
        return CpuRunner(effort)

    def measure_peaks(self) -> MeasuredPeaks:
        return measure_peaks()

    def table(self, target: Target) -> str:
        return f"cpu_amx.{target.direction}" if by_amx(target) else f"cpu.{target.direction}"

    def conditions(self, target: Target) -> str:
        return f"{threads.count()} threads"

    def versions(self) -> dict[str, str]:
        return environment.versions()

    def identity(self) -> Any:
        features = sorted(host.cpu_features())
        return features, host.cpu_caches(), threads.count(), self.versions(), objects.fingerprint()


class CpuRunner:
    """Verifies and times tiles of the CPU backend."""

    def __init__(self, effort: Effort) -> None:
        self.backend, self.profile = CpuBackend(), profiles.for_device("cpu")
        self.tokens, self.threads = effort.tokens, threads.count()
        self._tasks: dict[tuple[Target, int], _Task] = {}

    def in_use(self, target: Target) -> CpuTile:
        plan = self.task(target, self.tokens).plan
        return plan.tile if target.direction == "forward" else plan.backward_tile

    def row_in_use(self, target: Target) -> TileRow | None:
        problem = self.task(target, self.tokens).plan.problem
        return choose_tile(problem, self.profile, target.direction, amx=by_amx(target))[1]

    def candidates(self, target: Target) -> list[CpuTile]:
        memory = io_model.cpu_memory(self.profile)
        lanes = host.lanes_of(self.profile.device.features)
        d = target.head_dim
        if by_amx(target):
            return io_model.amx_candidates(d, d, target.direction, **memory)
        return io_model.candidates(target.dtype, d, d, target.direction, lanes=lanes, **memory)

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
        if key not in self._tasks:
            # Targets are tuned one after another, so the arrays of other targets can be freed.
            self._tasks = {k: task for k, task in self._tasks.items() if k[0] == target}
            self._tasks[key] = _Task(self.backend, self.profile, target, tokens, heads=2 * self.threads)
        return self._tasks[key]


class _Task:
    """A target's problem with its arrays and its expected results.

    heads: two for each thread, so that the backend does not shrink a block of queries to occupy all threads.
    """

    def __init__(self, backend: Any, profile: Any, target: Target, tokens: int, heads: int) -> None:
        case = Case(tokens, target.head_dim, max(heads, 4), target.dtype, target.causal)
        self.backend, self.target = backend, target
        *inputs, dout = case.arrays()
        self.problem, self.operands, _ = prepare(*inputs, causal=target.causal)
        self.plan = backend.plan(self.problem, profile)
        self.gradients = Gradients(dout, None, *(np.empty_like(x) for x in inputs))
        if target.direction == "backward":  # it reads out and lse
            backend.forward(self.plan, self.operands)

    def call(self, tile: CpuTile) -> Callable[[], None]:
        """The pass with this tile."""
        if self.target.direction == "forward":
            plan = replace(self.plan, tile=tile)
            return lambda: self.backend.forward(plan, self.operands)
        plan = replace(self.plan, backward_tile=tile)
        return lambda: self.backend.backward(plan, self.operands, self.gradients)

    @property
    def results(self) -> dict[str, np.ndarray]:
        """The results of the last call, for the first and the last head."""
        op, g = self.operands, self.gradients
        if self.target.direction == "forward":
            return {"out": op.out[:, [0, -1]], "lse": op.lse[:, [0, -1]]}
        return {"dq": g.dq[:, [0, -1]], "dk": g.dk[:, [0, -1]], "dv": g.dv[:, [0, -1]]}

    @cached_property
    def expected(self) -> Expected:
        op = self.operands
        two = replace(op, **{name: getattr(op, name)[:, [0, -1]] for name in ("q", "k", "v", "out", "lse")})
        return Expected(self.problem.spec, two, self.target.direction, self.gradients.dout[:, [0, -1]])

    def complaint(self) -> str:
        """The first result of the last call that is wrong; empty if all are right."""
        return self.expected.complaint(self.results)


def measure_peaks(samples: int = 15) -> MeasuredPeaks:
    """Bandwidths and peak FLOP/s by flashkit's own micro-kernels, on as many threads as a call uses."""
    profile, count = profiles.for_device("cpu"), threads.count()
    memory, lanes = profile.memory, host.lanes_of(profile.device.features)
    l1, l2, l3 = memory.l1d or 32 << 10, memory.l2 or 256 << 10, memory.l3 or 8 << 20
    flops = {
        dtype: max(peaks.peak_flops(dtype, tile, count, samples=samples) for tile in _blocks(dtype, lanes, l1, l2))
        for dtype in ("float32", "float64")
    }
    flops |= {dtype: flops["float32"] for dtype in ITEMSIZE if dtype not in flops}  # 16-bit types compute in float32
    main = min(max(8 * l3, 256 << 20), 2 << 30)  # large enough that the last-level cache serves almost none of it
    main_gbs, l2_gbs, l1_gbs = (
        peaks.bandwidth(size, lanes, count, samples=samples) / 1e9 for size in (main, l2 // 2 * count, l1 // 2 * count)
    )
    peak_tflops = {dtype: four_digits(value / 1e12) for dtype, value in flops.items()}
    return MeasuredPeaks(
        four_digits(main_gbs), four_digits(l2_gbs), four_digits(l1_gbs), peak_tflops, environment.now()
    )


def _blocks(dtype: str, lanes: int, l1: int, l2: int) -> list[CpuTile]:
    """Tiles of the three register blocks that rank highest; the fastest of them gives the peak."""
    ranked = io_model.candidates(dtype, 128, 128, l1d=l1, l2=l2, lanes=lanes)
    return list({(tile.rows, tile.vectors): tile for tile in reversed(ranked)}.values())[-3:]

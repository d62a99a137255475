"""Tiles on this CPU, and its measured peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ...backends.cpu import bf16, objects, peaks, threads
from ...backends.cpu.backend import CpuBackend
from ...backends.cpu.plan import choose_tile
from ...devices import host, io_model, profiles
from ...devices.io_model import CpuTile
from ...devices.schema import Kind, TileRow
from ...spec import ITEMSIZE
from ..bench import environment
from ..bench.cases import Case
from .log import MeasuredPeaks, four_digits
from .targets import Effort, Target
from .trials import VERIFIED_TOKENS, Task, Tuner

QUICK = Effort(("float32",), (64, 128), tokens=1024, blocks=9, shapes=5, rounds=9, budget=100.0)
FULL = Effort(
    ("float32", "float64", "float16", "bfloat16"), (64, 128, 256), tokens=2048, blocks=12, shapes=8, rounds=9,
    budget=1800.0,
)  # fmt: skip


def by_amx(target: Target) -> bool:
    """Whether AMX multiplies for this target, which has tables of its own."""
    return target.dtype == "bfloat16" and bf16.select().name == "amx"


class CpuTuner(Tuner):
    """The CPU backend."""

    backend = "cpu"
    kind: Kind = "cpu"
    tile: Any = CpuTile
    levels = "main memory", "L2", "L1"
    sram: Literal["l1", "l2"] = "l2"

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.profile = CpuBackend(), profiles.for_device("cpu")

    def effort(self, quick: bool) -> Effort:
        return QUICK if quick else FULL

    def targets(self, effort: Effort, dtypes: Sequence[str] | None) -> list[Target]:
        return effort.targets(dtypes)

    def measure_peaks(self) -> MeasuredPeaks:
        """Bandwidths and peak FLOP/s by flashkit's own micro-kernels, on as many threads as a call uses."""
        memory, lanes, count = self.profile.memory, host.lanes_of(self.profile.device.features), threads.count()
        l1, l2, l3 = memory.l1d or 32 << 10, memory.l2 or 256 << 10, memory.l3 or 8 << 20
        flops = {
            dtype: max(peaks.peak_flops(dtype, tile, count) for tile in _blocks(dtype, lanes, l1, l2))
            for dtype in ("float32", "float64")
        }
        flops = dict.fromkeys(ITEMSIZE, flops["float32"]) | flops  # 16-bit types compute in float32
        main = min(max(8 * l3, 256 << 20), 2 << 30)  # large enough that the last-level cache serves almost none of it
        main_gbs, l2_gbs, l1_gbs = (
            peaks.bandwidth(size, lanes, count) / 1e9 for size in (main, l2 // 2 * count, l1 // 2 * count)
        )
        peak_tflops = {dtype: four_digits(value / 1e12) for dtype, value in flops.items()}
        return MeasuredPeaks(
            four_digits(main_gbs), four_digits(l2_gbs), four_digits(l1_gbs), peak_tflops, environment.now()
        )

    def table(self, target: Target) -> str:
        return f"cpu_amx.{target.direction}" if by_amx(target) else f"cpu.{target.direction}"

    def conditions(self, target: Target) -> str:
        return f"{threads.count()} threads"

    def versions(self) -> dict[str, str]:
        return environment.versions()

    def identity(self) -> Any:
        features = sorted(host.cpu_features())
        return features, host.cpu_caches(), threads.count(), self.versions(), objects.fingerprint()

    def in_use(self, target: Target) -> CpuTile:
        plan = self.task(target).plan
        return plan.tile if target.direction == "forward" else plan.backward_tile

    def row_in_use(self, target: Target) -> TileRow | None:
        return choose_tile(self.task(target).problem, self.profile, target.direction, amx=by_amx(target))[1]

    def candidates(self, target: Target) -> list[CpuTile]:
        memory, d = io_model.cpu_memory(self.profile), target.head_dim
        if by_amx(target):
            return io_model.amx_candidates(d, d, target.direction, **memory)
        lanes = host.lanes_of(self.profile.device.features)
        return io_model.candidates(target.dtype, d, d, target.direction, lanes=lanes, **memory)

    def new_task(self, target: Target, small: bool) -> Task:
        # Two heads for each thread, so that the backend does not shrink a block of queries to occupy all threads.
        tokens, heads = VERIFIED_TOKENS if small else self.tokens, max(2 * threads.count(), 4)
        case = Case(tokens, target.head_dim, heads, target.dtype, target.causal)
        task = Task(case, target.direction, case.arrays())
        task.plan = self.kernels.plan(task.problem, self.profile)
        if target.direction == "backward":  # it reads out and lse
            self.kernels.forward(task.plan, task.operands)
        return task

    def call(self, target: Target, tile: CpuTile, task: Task) -> Callable[[], object]:
        if target.direction == "forward":
            return partial(self.kernels.forward, replace(task.plan, tile=tile), task.operands)
        plan = replace(task.plan, backward_tile=tile)
        return partial(self.kernels.backward, plan, task.operands, task.gradients)


def _blocks(dtype: str, lanes: int, l1: int, l2: int) -> list[CpuTile]:
    """Tiles of the three register blocks that rank highest; the fastest of them gives the peak."""
    ranked = io_model.candidates(dtype, 128, 128, l1d=l1, l2=l2, lanes=lanes)
    return list({(tile.rows, tile.vectors): tile for tile in reversed(ranked)}.values())[-3:]

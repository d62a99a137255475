"""Tiles on a CUDA device: each kernel generation's candidates, and measured peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ... import dispatch
from ...backends.cuda_common import device, launch
from ...backends.cuda_common.arguments import Arguments
from ...backends.cuda_common.backend import CudaBackend
from ...backends.cuda_common.generation import IN_ROW, Choice, Generation, Pass, TileTables
from ...call.arguments import prepare
from ...devices import host, profiles, timing
from ...devices.schema import Kind, TileRow
from ...spec import ITEMSIZE, Problem, dtype_of
from ..bench import environment
from ..bench.cases import Case
from .log import MeasuredPeaks, four_digits
from .targets import Effort, Target
from .trials import VERIFIED_TOKENS, Task, Tuner

QUICK = Effort(("bfloat16", "float16", "float32"), (64, 128), tokens=2048, blocks=12, shapes=0, rounds=7, budget=150.0)
FULL = Effort(
    ("bfloat16", "float16", "float32", "float64"), (64, 96, 128, 192, 256), tokens=4096, blocks=24, shapes=0, rounds=9,
    budget=1200.0,
)  # fmt: skip

TOKENS, WIDTH = 16384, 2048
"""Of the problem that is timed: tokens of all batch entries, and heads times head dim, enough to fill a device."""

DECODED_KEYS = 32768


@dataclass(frozen=True)
class CudaTile:
    """A tile of a kernel generation, in the form of logs and profiles: its numbers by name, in order."""

    generation: str
    numbers: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, generation: str, tile: Any) -> CudaTile:
        numbers = {"block_q": tile.block_q, "block_k": tile.block_k, **asdict(tile)}
        return cls(generation, tuple(numbers.items()))

    @property
    def block_q(self) -> int:
        return dict(self.numbers)["block_q"]

    @property
    def block_k(self) -> int:
        return dict(self.numbers)["block_k"]

    @property
    def shape(self) -> str:
        return self.generation

    @property
    def row(self) -> dict[str, Any]:
        inside = {name: value for name, value in self.numbers if name in IN_ROW}
        rest = {name: value for name, value in self.numbers if name not in IN_ROW}
        return {"generation": self.generation, **inside, "options": rest}

    def __str__(self) -> str:
        rest = ", ".join(f"{name} {n}" for name, n in self.numbers if name not in ("block_q", "block_k"))
        return f"{self.block_q} x {self.block_k}, {rest}"


class CudaTuner(Tuner):
    """A backend of CUDA kernels. Threads compile the candidates, and while a target is timed those of the next one."""

    kind: Kind = "cuda"
    tile: Any = CudaTile
    levels = "device memory", "L2", "shared memory"
    sram: Literal["l1", "l2"] = "l1"

    def __init__(self, kernels: CudaBackend) -> None:
        super().__init__()
        self.kernels, self.backend = kernels, kernels.name
        self.profile, self.device = profiles.for_device("cuda"), device.current()
        self.compiled: dict[tuple[Target, CudaTile], Future[Pass]] = {}
        self.pool = ThreadPoolExecutor(host.cpu_count(), initializer=launch.stream)
        self.problems: dict[Target, Problem] = {}

    def effort(self, quick: bool) -> Effort:
        return QUICK if quick else FULL

    def targets(self, effort: Effort, dtypes: Sequence[str] | None) -> list[Target]:
        """A target for each generation that supports the problem, the newest first, as far slower ones are given up."""
        dense = effort.targets(dtypes)
        full = (target for target in dense if target.direction == "forward" and not target.causal)
        targets = []
        for target in [*dense, *(replace(each, few=True) for each in full)]:
            problem = problem_of(target, effort.tokens)
            tables = self.tables(target)
            for generation in self.kernels.allowed(target.direction):
                able = generation.supports(problem, self.device, target.direction)
                if able and next(tables.choices(generation, problem), None):
                    targets.append(replace(target, generation=generation.name))
        return targets

    def measure_peaks(self) -> MeasuredPeaks:
        """Bandwidths by kernels that read, peak FLOP/s by cuBLAS."""
        import cupy

        from ...backends.cuda_common import peaks

        free, l2 = cupy.cuda.Device(self.device.ordinal).mem_info[0], (host.cuda_device() or {}).get("l2", 4 << 20)
        readers = peaks.Readers(self.device)
        size = min(max(32 * l2, 1 << 30), free // 4) // 4096 * 4096
        main, middle, fast = readers.memory(size), readers.memory(l2 // 3 // 4096 * 4096, 50), readers.shared()
        synchronize = cupy.cuda.get_current_stream().synchronize

        def per_second(work: tuple[Callable[[], None], float]) -> float:
            taken = timing.interleaved({"": work[0]}, rounds=5, synchronize=synchronize)
            return work[1] / taken[""].best

        flops = {dtype: four_digits(per_second(peaks.product(dtype_of(dtype))) / 1e12) for dtype in ITEMSIZE}
        main_gbs, l2_gbs, shared_gbs = (four_digits(per_second(work) / 1e9) for work in (main, middle, fast))
        return MeasuredPeaks(main_gbs, l2_gbs, shared_gbs, flops, environment.now())

    def table(self, target: Target) -> str:
        return f"{self.backend}.{target.direction}"

    def conditions(self, target: Target) -> str:
        if target.few:
            return f"1 query, {DECODED_KEYS} keys, 32 heads on 8"
        return f"{TOKENS} tokens in all, {WIDTH} columns of all heads"

    def versions(self) -> dict[str, str]:
        from ... import __version__

        return {"flashkit": __version__, **environment.cuda_versions()}

    def identity(self) -> Any:
        return host.cuda_device(), self.versions(), self.kernels.sources()

    def in_use(self, target: Target) -> CudaTile:
        return CudaTile.of(target.generation, self.choice(target).tile)

    def row_in_use(self, target: Target) -> TileRow | None:
        return self.choice(target).row

    def choice(self, target: Target) -> Choice:
        return next(self.tables(target).choices(self.generation(target), self.problem(target)))

    def tables(self, target: Target) -> TileTables:
        return TileTables(self.backend, self.profile, self.device, target.direction)

    def candidates(self, target: Target) -> list[CudaTile]:
        found = self.listed(target)
        for each in (target, self.following.get(target)):
            for tile in self.listed(each) if each else ():
                self.start(each, tile)  # type: ignore[arg-type]
        return found

    def listed(self, target: Target) -> list[CudaTile]:
        generation = self.generation(target)
        tiles = generation.candidates(self.problem(target), self.device, target.direction)
        return [CudaTile.of(generation.name, tile) for tile in tiles]

    def generation(self, target: Target) -> Generation:
        return next(g for g in self.kernels.generations if g.name == target.generation)

    def new_task(self, target: Target, small: bool) -> Task:
        import cupy

        case = case_of(target, self.tokens, small)
        task = Task(case, target.direction, case.arrays(cupy))
        if target.direction == "backward":  # it reads out and lse
            backend, plan = dispatch.plan(task.problem, self.backend)
            backend.forward(plan, task.operands)
        return task

    def call(self, target: Target, tile: CudaTile, task: Task) -> Callable[[], object]:
        made, spec = self.made(target, tile), task.problem.spec

        def run() -> None:
            arguments = Arguments(spec, task.operands)
            if target.direction == "backward":
                arguments.gradients(task.gradients)
            made.run(arguments, launch.stream())

        return run

    def synchronize(self) -> None:
        import cupy

        cupy.cuda.get_current_stream().synchronize()

    def problem(self, target: Target) -> Problem:
        if target not in self.problems:
            self.problems[target] = problem_of(target, self.tokens)
        return self.problems[target]

    def start(self, target: Target, tile: CudaTile) -> Future[Pass]:
        """Start to compile and load a tile's kernels, in a thread."""
        key = target, tile
        if key not in self.compiled:
            self.compiled[key] = self.pool.submit(self.plan, target, tile)
        return self.compiled[key]

    def plan(self, target: Target, tile: CudaTile) -> Pass:
        """A tile's kernels."""
        generation, problem, row = self.generation(target), self.problem(target), TileRow(**tile.row)
        found = generation.tile(problem, row, self.device, target.direction)
        if found is None:
            raise ValueError(f"{tile} does not fit")
        return generation.plan(problem, Choice(found, row, "tried"), self.tables(target))

    def made(self, target: Target, tile: CudaTile) -> Pass:
        """A tile's kernels. Raises ValueError if the generation replaces the tile by another one."""
        made = self.start(target, tile).result()
        if CudaTile.of(tile.generation, made.tile) != tile:
            raise ValueError(f"{tile} was replaced: {made.why}")
        return made


def case_of(target: Target, tokens: int, small: bool = False) -> Case:
    """The problem that is timed, or a small one that is verified."""
    d, dtype = target.head_dim, target.dtype
    if target.few and small:
        return Case(1, d, 4, dtype, n_k=3333, heads_kv=1)
    if target.few:
        return Case(1, d, 32, dtype, n_k=DECODED_KEYS, heads_kv=8)
    if small:
        return Case(VERIFIED_TOKENS, d, 2, dtype, target.causal)
    return Case(tokens, d, max(1, WIDTH // d), dtype, target.causal, batch=max(1, TOKENS // tokens))


def problem_of(target: Target, tokens: int) -> Problem:
    """The problem that kernels are chosen and compiled for, made of arrays without memory."""
    case = case_of(target, tokens)
    one = np.ones(target.head_dim, dtype_of(target.dtype))
    stand_ins = (np.broadcast_to(one, shape) for shape in case.shapes[:3])
    return replace(prepare(*stand_ins, **case.options)[0], array_kind="cupy")

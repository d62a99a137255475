"""The generation for every CUDA device and dtype: CUDA cores, kernels/simt/."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..base import EXTRAS
from .arguments import Arguments
from .bwd_preprocess import BwdPreprocess
from .device import Device
from .generation import Choice, Generation, Kernels, Kind, Pass, TileTables
from .launch import check_grid
from .memory import SmemLayout, Workspace

Part = str
"""A kernel: "forward", or with tangents "jvp", or of the backward pass "dkdv" or "dq"."""

MAX_REGISTERS = 224


@dataclass(frozen=True)
class SimtTile:
    """A tile and how the threads of a CTA share it; kernels/simt/tile documents the numbers."""

    block_q: int
    block_k: int
    threads_x: int
    threads_y: int
    chunk: int = 32
    keys: int = 32
    blocks: int = 1  # CTAs per SM that their registers allow

    def __post_init__(self) -> None:
        if self.threads_x not in (8, 16, 32) or self.threads % 32:
            raise ValueError(f"{self=}: expected threads_x 8, 16 or 32 and threads_x * threads_y a multiple of 32")
        if self.chunk < 4 or self.chunk % 4 or self.keys < 4 or self.keys % 4:
            raise ValueError(f"{self=}: expected chunk and keys multiples of 4")

    @property
    def threads(self) -> int:
        return self.threads_x * self.threads_y

    def constants(self, part: Part, spec: AttentionSpec) -> dict[str, int]:
        """Constants of the kernel's head."""
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "TX": self.threads_x, "TY": self.threads_y,
            "CHUNK": self.chunk, "KEYS": self.keys, "BLOCKS_PER_SM": self.blocks,
            "BACKWARD_KEYS": part == "dkdv", **self.smem(part, spec).constants(),
        }  # fmt: skip

    def shape(self, part: Part) -> tuple[int, int]:
        """Rows and columns of the tile: query rows and keys, transposed in "dkdv"."""
        return (self.block_k, self.block_q) if part == "dkdv" else (self.block_q, self.block_k)

    @staticmethod
    def widths(part: Part, spec: AttentionSpec) -> tuple[int, ...]:
        """Of the accumulators: O, with tangents O and dO, dK and dV, or dQ."""
        d, dv = spec.head_dim, spec.head_dim_v
        return {"forward": (dv,), "jvp": (dv, dv), "dkdv": (d, dv), "dq": (d,)}[part]

    def accumulator_columns(self, dim: int) -> int:
        """Columns that a row of an accumulator is padded to."""
        return -(-dim // (4 * self.threads_x)) * 4 * self.threads_x

    def smem(self, part: Part, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA: two stages of operands, then a tile of P or dS."""
        size = ITEMSIZE[spec.lse_dtype]
        rows, columns = self.shape(part)
        widest = self.accumulator_columns(max(self.widths(part, spec)))
        stage = max((rows + columns) * (self.chunk + 16 // size), self.keys * widest)
        pitch = columns + (self.threads_x if self.threads_x < 32 else 0)
        return SmemLayout(STAGES=2 * stage * size, P=rows * pitch * size)

    def shared_memory(self, part: Part, spec: AttentionSpec) -> int:
        """Bytes of shared memory of a CTA."""
        return self.smem(part, spec).bytes

    def registers(self, part: Part, spec: AttentionSpec) -> int:
        """Estimated registers of a thread: tiles, accumulators, operands of a step and a constant rest."""
        rows, columns = self.shape(part)
        r, c = rows // self.threads_y, columns // self.threads_x
        accumulators = sum(self.accumulator_columns(dim) // self.threads_x for dim in self.widths(part, spec))
        values = r * c * {"forward": 1, "jvp": 3}.get(part, 2) + r * accumulators + 4 * r + 4 + 2 * r
        return values * ITEMSIZE[spec.lse_dtype] // 4 + 40

    def fitted(
        self, spec: AttentionSpec, device: Device, direction: Direction, ctas_per_sm: int = 0
    ) -> SimtTile | None:  # fmt: skip
        """As of `SmemTile`; with as many CTAs per SM as its registers allow."""
        part = _part(spec, direction)
        fits = replace(self, blocks=1) in candidates(part) and self.cost(part, spec, device) < float("inf")
        return _resident(self, part, spec, device) if fits else None

    def cost(self, part: Part, spec: AttentionSpec, device: Device) -> float:
        """Instructions per pair of query and key, weighted by latency hiding; infinite where the tile does not fit."""
        rows, columns = self.shape(part)
        if rows % self.threads_y or columns % self.threads_x or columns % self.keys:
            return float("inf")
        shared, registers = self.shared_memory(part, spec), self.registers(part, spec)
        if shared > device.shared_per_block or registers > MAX_REGISTERS:
            return float("inf")
        resident = min(
            (device.shared_per_sm - 1024) // (shared + 1024), device.registers_per_sm // (registers * self.threads), 16
        )
        if resident < 1:
            return float("inf")
        r, c = rows // self.threads_y, columns // self.threads_x
        scores = {"forward": 1, "jvp": 3}.get(part, 2)
        outputs = self.widths(part, spec) if part != "jvp" else (spec.head_dim_v,) * 3
        # A step of four columns: r + c vector loads for 4 r c multiply-adds. Each chunk costs a barrier.
        chunks = -(-spec.head_dim // self.chunk) + len(outputs) * -(-columns // self.keys)
        work = scores * spec.head_dim * (1 + (r + c) / (4 * r * c) * 2)
        for dim in outputs:
            width = self.accumulator_columns(dim) // self.threads_x
            work += self.accumulator_columns(dim) * (1 + (r + width) / (4 * r * width) * 4)
        work += 600 * chunks / (r * c)
        return work * (1 + 1.5 / (resident * self.threads / 32))


@cache
def candidates(part: Part) -> dict[SimtTile, None]:
    """All tiles for which the kernels compile, in order."""
    return dict.fromkeys(_candidates(part))


def _candidates(part: Part) -> Iterator[SimtTile]:
    for threads_x, threads, r, c in itertools.product((8, 16, 32), (128, 256), (8, 4, 2, 1), (8, 4, 2)):
        threads_y = threads // threads_x
        rows, columns = r * threads_y, c * threads_x
        for chunk, keys in ((32, 32), (32, 16), (16, 16), (16, 8), (8, 4)):
            if columns % keys == 0:
                block_q, block_k = (columns, rows) if part == "dkdv" else (rows, columns)
                yield SimtTile(block_q, block_k, threads_x, threads_y, chunk, keys)


@lru_cache(maxsize=1024)
def choose(part: Part, spec: AttentionSpec, device: Device) -> SimtTile:
    """The tile of least cost in the model."""
    best = min(candidates(part), key=lambda tile: tile.cost(part, spec, device))
    if best.cost(part, spec, device) == float("inf"):
        raise ValueError(f"no tile of {part} fits {device}")
    return _resident(best, part, spec, device)


def _resident(tile: SimtTile, part: Part, spec: AttentionSpec, device: Device) -> SimtTile:
    """The tile with as many CTAs per SM as its registers allow."""
    return replace(tile, blocks=device.registers_per_sm // (tile.registers(part, spec) * tile.threads))


class _Kernel:
    """One kernel with its tile."""

    def __init__(self, of: Pass, part: Part, tile: SimtTile) -> None:
        self.tile, direction = tile, "backward" if part.startswith("d") else "forward"
        library = of.compiled(f"simt/{direction}", tile.constants(part, of.spec))
        self.kernel = library.kernel(f"simt_{direction}", of.device, tile.shared_memory(part, of.spec))

    def launch(self, arguments: Arguments, tiles: int, heads: int, stream: int) -> None:
        """Launches a CTA for each tile, head and batch entry."""
        blocks = tiles * heads * arguments.entries
        check_grid(blocks)
        if blocks:
            self.kernel.launch(blocks, self.tile.threads, arguments, stream)


class SimtForward(Pass):
    """The forward pass."""

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        self.forward = _Kernel(self, _part(self.spec, "forward"), self.tile)

    def run(self, arguments: Arguments, stream: int) -> None:
        self.forward.launch(arguments, arguments.q_tiles(self.tile.block_q), arguments.heads, stream)


class SimtBackward(Pass):
    """The backward pass: preprocess, then dK and dV, then dQ, then the sinks."""

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        self.dkdv = _Kernel(self, "dkdv", self.tile)
        self.dq = _Kernel(self, "dq", choose("dq", self.spec, self.device))
        self.preprocess = BwdPreprocess(self, base_2=False)

    def geometry(self, arguments: Arguments) -> tuple[Workspace, int]:
        return self.preprocess.geometry(arguments)

    def launch(self, arguments: Arguments, geometry: tuple[Workspace, int], stream: int) -> None:
        workspace, preprocess_ctas = geometry
        held = workspace.allocate(arguments, stream)
        self.preprocess.run(arguments, stream, preprocess_ctas)
        self.dkdv.launch(arguments, arguments.k_tiles(self.dkdv.tile.block_k), arguments.heads_kv, stream)
        for terms in (-1, arguments.log2_terms) if arguments.spec.orders_sums else (0,):
            if terms:
                arguments.words[-1] = terms
            self.dq.launch(arguments, arguments.q_tiles(self.dq.tile.block_q), arguments.heads, stream)
        self.preprocess.sink_gradients(arguments, stream)
        del held


def _part(spec: AttentionSpec, direction: Direction) -> Part:
    """Of a direction, the kernel whose tile rows and candidates are."""
    if direction == "backward":
        return "dkdv"
    return "jvp" if spec.jvp else "forward"


MAX_CANDIDATES = 8
"""Tiles that the tuner tries: the best of the hundreds that the model ranks."""

_MODEL = "least cost by the model of registers and shared memory"


def _best(part: Part, problem: Problem, device: Device) -> list[SimtTile]:
    """Tiles worth trying. In the backward pass they are for dK and dV; the model chooses the tile of dQ."""
    costs = {tile: tile.cost(part, problem.spec, device) for tile in candidates(part)}
    return sorted((tile for tile, cost in costs.items() if cost < float("inf")), key=costs.__getitem__)[:MAX_CANDIDATES]


class Simt(Generation):
    """Kernels for every device, dtype and feature."""

    name = "simt"

    def __init__(self, kernels: Kernels, left_out: Collection[str] = ("fp8",)) -> None:
        """left_out: of `base.EXTRAS`."""
        super().__init__(kernels)
        self.takes = EXTRAS.keys() - left_out

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        return Verdict(True)

    def kind(self, problem: Problem, direction: Direction) -> Kind:
        part, plan = _part(problem.spec, direction), SimtForward if direction == "forward" else SimtBackward
        # Rows are of kernels that need fewer registers than those with tangents.
        return Kind(SimtTile, plan, partial(_best, part), _MODEL, has_rows=part != "jvp")

    def model(self, problem: Problem, device: Device, direction: Direction) -> Choice:
        return Choice(choose(_part(problem.spec, direction), problem.spec, device), None, _MODEL)

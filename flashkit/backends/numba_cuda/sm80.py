"""The generation for tensor cores by mma.sync in Python, from Ampere on: kernels/sm80/."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...devices.schema import TileRow
from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler
from ..cuda_common.arguments import ROW_TENSORS, Arguments, addresses, aligned, strides_are_vector_multiples
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Generation, Kernels, TileTables, supports_16bit, tile_of
from ..cuda_common.launch import check_grid
from ..cuda_common.memory import SmemLayout, SmemTile, bytes_of_keys, heads_per_l2_group, stage_constants
from ..cuda_common.params import AT
from ..cuda_common.verify import Fallback

THREADS = 128
_ADDRESSES, _HEADS_PER_L2_GROUP = addresses(ROW_TENSORS), AT["heads_per_l2_group"]
MAX_DIM = 256
_L2_BYTES = 24_000_000  # of K and V of the heads that CTAs work on at the same time


def row_bytes(dim: int, spec: AttentionSpec) -> int:
    """Bytes of a row in shared memory: whole chunks of 128 bytes."""
    return -(-dim * ITEMSIZE[spec.dtype] // 128) * 128


@dataclass(frozen=True)
class Tile(SmemTile):
    """A tile of the forward pass: query rows, 16 or 32 for each of four warps; keys; stages of K and V in shared
    memory.
    """

    block_q: int
    block_k: int
    stages: int = 2

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128) or self.block_k % 16 or not 16 <= self.block_k <= 128:
            raise ValueError(f"{self=}: expected block_q 64 or 128, block_k a multiple of 16 up to 128")
        if self.stages not in (1, 2):
            raise ValueError(f"{self=}: expected one or two stages")

    def stage(self, spec: AttentionSpec) -> SmemLayout:
        """A stage of K and V."""
        k, v = (self.block_k * row_bytes(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(STAGE_K=k, STAGE_V=v)

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA. O reuses the memory of Q."""
        row = max(row_bytes(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(Q=self.block_q * row, KV=self.stages * self.stage(spec).bytes)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether shared memory suffices, and registers for a lane's part of O."""
        registers = self.block_q == 64 or (spec.head_dim_v <= 128)
        return registers and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        resident = device.shared_per_sm // (self.shared_memory(spec) + 1024)
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "STAGES": self.stages,
            "BLOCKS_PER_SM": min(resident, 2),
            **self.smem(spec).constants(), **stage_constants(self.stage(spec)),
        }  # fmt: skip


class Forward:
    """The forward pass."""

    def __init__(self, generation: Sm80, problem: Problem, choice: Choice, tables: TileTables) -> None:
        spec, device, (tile, _, self.why) = problem.spec, tables.device, choice
        self.tile = tile
        constants = tuple(tile.constants(spec, device).items())
        library = generation.kernels("sm80/forward", spec, constants, compiler.target(device.capability))
        self.libraries = [library]
        self._kernel = library.kernel("sm80_forward", device, tile.shared_memory(spec))
        older = partial(tables.plan, generation.below, problem)
        self._fallback = Fallback(older, spec, device, "forward")  # for rows that are not aligned to 16 bytes

    def geometry(self, arguments: Arguments) -> tuple[int, int] | None:
        """CTAs and heads per L2 group; None: shapes or strides need the fallback."""
        supported = arguments.n_k and arguments.positive_scale
        if not (supported and strides_are_vector_multiples(arguments, ROW_TENSORS)):
            return None
        heads = arguments.entries * arguments.heads
        blocks = arguments.q_tiles(self.tile.block_q) * heads
        check_grid(blocks)
        return blocks, heads_per_l2_group(heads, _L2_BYTES // bytes_of_keys(arguments))

    def run(self, arguments: Arguments, stream: int) -> None:
        geometry = arguments.known(self, self.geometry)
        if geometry is None or not aligned(arguments, _ADDRESSES):
            return self._fallback.run(arguments, stream)
        blocks, arguments.words[_HEADS_PER_L2_GROUP] = geometry
        if blocks:
            self._kernel.launch(blocks, THREADS, arguments, stream)
        return None


def on_tensor_cores(spec: AttentionSpec, direction: Direction) -> Verdict:
    """Whether the kernels for tensor cores, of Ampere and of Hopper, support q, k and v of this kind."""
    if direction == "backward" and spec.deterministic:
        return Verdict(False, "deterministic gradients run on the simt kernels, which add in one order")
    return supports_16bit(spec, MAX_DIM)


class Sm80(Generation):
    """The forward pass on tensor cores: float16 and bfloat16. `below`: the generation that takes all other problems."""

    name = "sm80"
    directions: tuple[Direction, ...] = ("forward",)

    def __init__(self, kernels: Kernels, below: Generation) -> None:
        self.kernels, self.below = kernels, below

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        if device.capability < (8, 0):
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, older than sm_80")
        if direction == "backward":
            return Verdict(False, "gradients run on the sm90 or the simt kernels")
        return on_tensor_cores(problem.spec, direction)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Tile]:
        shapes: list[tuple[int, ...]] = [(128, keys) for keys in (64, 32, 96, 48, 128, 16)]
        shapes += [(64, keys, 1) for keys in (64, 32, 16)]
        return [tile for each in shapes if (tile := Tile(*each)).fits(problem.spec, device)]

    def tile(self, problem: Problem, row: TileRow, device: Device, direction: Direction) -> Tile | None:
        return tile_of(Tile, row, problem.spec, lambda tile, spec: tile if tile.fits(spec, device) else None)

    def plan(self, problem: Problem, choice: Choice, tables: TileTables) -> Forward:
        return Forward(self, problem, choice, tables)

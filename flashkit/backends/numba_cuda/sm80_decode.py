"""Split-KV for few queries on tensor cores by mma.sync, from Ampere on: kernels/sm80/decode.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...spec import AttentionSpec, Problem
from ..cuda_common import compiler
from ..cuda_common.arguments import Arguments, rows_are_vector_aligned
from ..cuda_common.device import Device
from ..cuda_common.fallback import Fallback
from ..cuda_common.generation import Generation, Kernels
from ..cuda_common.launch import check_grid
from ..cuda_common.params import AT
from ..cuda_common.smem import SmemLayout, stage_constants

ROWS = 16  # of a warp
MIN_TILES_PER_SPLIT = 2
COMBINERS = 16  # warps of `combine`
COMBINED_BYTES = COMBINERS * (32 * 16 + 4)  # of shared memory: four columns a lane, and a row sum a warp
OWN_DECODE = "measured on an H200; split along the keys"


def _row_bytes(dim: int) -> int:
    """Bytes of a row in shared memory: whole chunks of 128 bytes."""
    return -(-dim // 64) * 128


@dataclass(frozen=True)
class DecodeTile:
    """The key tile of a warp, the stages in its shared memory, and the warps of a CTA."""

    block_k: int = 64
    warps: int = 2
    stages: int = 3

    def __post_init__(self) -> None:
        if self.block_k % 16 or not 16 <= self.block_k <= 128 or self.stages < 2 or not 1 <= self.warps <= 8:
            raise ValueError(f"{self=}: block_k is a multiple of 16 up to 128, stages two or more, warps up to 8")

    @property
    def block_q(self) -> int:
        return ROWS

    def stage(self, spec: AttentionSpec) -> SmemLayout:
        """A stage of K and V."""
        stage = SmemLayout()
        stage.add("STAGE_K", self.block_k * _row_bytes(spec.head_dim))
        stage.add("STAGE_V", self.block_k * _row_bytes(spec.head_dim_v))
        return stage

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a warp."""
        smem = SmemLayout()
        smem.add("Q", ROWS * _row_bytes(spec.head_dim))
        smem.add("KV", self.stages * self.stage(spec).bytes)
        return smem

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory of a CTA."""
        return self.warps * self.smem(spec).bytes

    def resident(self, spec: AttentionSpec, device: Device) -> int:
        """Resident CTAs per SM."""
        return min(device.shared_per_sm // (self.shared_memory(spec) + 1024), 8 // self.warps)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        return self.shared_memory(spec) <= device.shared_per_block and self.resident(spec, device) > 0

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        constants = self.smem(spec).constants()
        constants["BYTES_WARP"] = constants.pop("SHARED_BYTES")
        return {
            "BLOCK_K": self.block_k, "WARPS": self.warps, "STAGES": self.stages,
            "BLOCKS_PER_SM": self.resident(spec, device), "FAST_MATH": True, "EARLY": device.supports_pdl,
            "COMBINERS": COMBINERS, **constants, **stage_constants(self.stage(spec)),
        }  # fmt: skip


def decode_tiles(spec: AttentionSpec, device: Device) -> list[DecodeTile]:
    """The tiles that fit; the fastest first."""
    shapes = [(64, 2, 3), (64, 1, 3), (32, 4, 3), (32, 2, 3), (32, 2, 4), (16, 2, 4), (16, 1, 2)]
    if max(spec.head_dim, spec.head_dim_v) > 128:
        shapes.insert(0, (32, 2, 3))
    tiles = [DecodeTile(*each) for each in dict.fromkeys(shapes)]
    return [tile for tile in tiles if tile.fits(spec, device)]


class Decode:
    """The forward pass of few queries: a warp takes a split of the keys, a second kernel combines the splits."""

    def __init__(
        self, kernels: Kernels, below: Generation, problem: Problem, device: Device, tile: DecodeTile | None, why: str
    ) -> None:
        spec = problem.spec
        self.tile = tile or decode_tiles(spec, device)[0]  # supports() refuses specs without a tile
        self.why = why
        constants = tuple(self.tile.constants(spec, device).items())
        library = kernels("sm80/decode", spec, constants, compiler.target(device.capability))
        self.libraries = [library]
        self._kernel = library.kernel("sm80_decode", device, self.tile.shared_memory(spec))
        self._combine = library.kernel("combine", device, COMBINED_BYTES)
        self._column_blocks = -(-spec.head_dim_v // 128)  # CTAs of `combine` per row
        self._early_launch = device.supports_pdl
        self._slots = device.sms * self.tile.resident(spec, device) * self.tile.warps
        self._fallback = Fallback(partial(below.plan, problem, None, device, "forward"), spec, device, "forward")

    def run(self, arguments: Arguments, stream: int) -> None:
        spec, tile = arguments.spec, self.tile
        supported = arguments.n_k and arguments.positive_scale
        if not (supported and rows_are_vector_aligned(arguments, ("q", "k", "v"))):
            return self._fallback.run(arguments, stream)
        rows = arguments.batch * arguments.heads * arguments.n_q
        if not rows:
            return None
        work_tiles = -(-arguments.n_q * spec.group // ROWS) * arguments.heads_kv * arguments.batch
        max_splits = -(-arguments.n_k // (MIN_TILES_PER_SPLIT * tile.block_k))
        splits = -(-max(1, min(self._slots // work_tiles, max_splits)) // tile.warps) * tile.warps
        check_grid(work_tiles * splits // tile.warps, rows * self._column_blocks)
        held = arguments.allocate_partials(splits)
        arguments.words[AT["num_splits"]] = splits
        self._kernel.launch(work_tiles * splits // tile.warps, 32 * tile.warps, arguments, stream, self._early_launch)
        self._combine.launch(rows * self._column_blocks, 32 * COMBINERS, arguments, stream, self._early_launch)
        del held
        return None

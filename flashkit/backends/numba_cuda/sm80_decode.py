"""Few queries on tensor cores by mma.sync, from Ampere on: the keys are split; kernels/sm80_decode.py."""

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

ROWS = 16  # of a warp
LEAST_TILES = 2  # of keys, for a warp
COMBINERS = 16  # warps that join the parts of a row
COMBINED_BYTES = COMBINERS * (32 * 16 + 4)  # of shared memory: sums of four columns a lane, and of weights
OWN_DECODE = "measured on an H200; split along the keys"


@dataclass(frozen=True)
class DecodeTile:
    """A warp's tile of keys, of which `stages` are in its shared memory, and the warps of a block."""

    block_k: int = 64
    warps: int = 2
    stages: int = 3

    def __post_init__(self) -> None:
        if self.block_k % 16 or not 16 <= self.block_k <= 128 or self.stages < 2 or not 1 <= self.warps <= 8:
            raise ValueError(f"{self=}: block_k is a multiple of 16 up to 128, stages two or more, warps up to 8")

    @property
    def block_q(self) -> int:
        return ROWS

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block: kernels/sm80_tile_decode.py."""
        q, v = -(-spec.head_dim // 64), -(-spec.head_dim_v // 64)
        return self.warps * 128 * (ROWS * q + self.stages * self.block_k * (q + v))

    def resident(self, spec: AttentionSpec, device: Device) -> int:
        """Blocks that a multiprocessor holds at once."""
        return min(device.shared_per_sm // (self.shared_memory(spec) + 1024), 8 // self.warps)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        return self.shared_memory(spec) <= device.shared_per_block and self.resident(spec, device) > 0

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        return {
            "BLOCK_K": self.block_k, "WARPS": self.warps, "STAGES": self.stages, "HAS_LENGTHS": spec.kv_lengths,
            "BLOCKS_PER_SM": self.resident(spec, device), "FAST_MATH": True, "EARLY": device.supports_pdl,
            "COMBINERS": COMBINERS,
        }  # fmt: skip


def decode_tiles(spec: AttentionSpec, device: Device) -> list[DecodeTile]:
    """Those that fit, the fastest on an H200 first: tiles of 32 keys are 1 to 5 % slower, four stages of them 14 %."""
    numbers = [(64, 2, 3), (64, 1, 3), (32, 4, 3), (32, 2, 3), (32, 2, 4), (16, 2, 4), (16, 1, 2)]
    if max(spec.head_dim, spec.head_dim_v) > 128:
        numbers.insert(0, (32, 2, 3))
    tiles = [DecodeTile(*each) for each in dict.fromkeys(numbers)]
    return [tile for tile in tiles if tile.fits(spec, device)]


class Decode:
    """The forward pass of few queries: a warp takes a part of the keys, a second kernel joins the parts."""

    def __init__(
        self, kernels: Kernels, below: Generation, problem: Problem, device: Device, tile: DecodeTile | None, why: str
    ) -> None:
        spec = problem.spec
        self.tile = tile or decode_tiles(spec, device)[0]  # supports() has asked
        self.why = why
        constants = tuple(self.tile.constants(spec, device).items())
        library = kernels("sm80/decode", spec, constants, compiler.target(device.capability))
        self.libraries = [library]
        self._kernel = library.kernel("sm80_decode", device, self.tile.shared_memory(spec))
        self._combine = library.kernel("combine", device, COMBINED_BYTES)
        self._shares = -(-spec.head_dim_v // 128)  # blocks of a row of `combine`
        self._early = device.supports_pdl
        self._slots = device.sms * self.tile.resident(spec, device) * self.tile.warps
        self._spare = Fallback(partial(below.plan, problem, None, device, "forward"), spec, device, "forward")

    def run(self, arguments: Arguments, stream: int) -> None:
        spec, tile = arguments.spec, self.tile
        usual = arguments.n_k and arguments.positive_scale
        if not (usual and rows_are_vector_aligned(arguments, ("q", "k", "v"))):
            return self._spare.run(arguments, stream)
        rows = arguments.batch * arguments.heads * arguments.n_q
        if not rows:
            return None
        items = -(-arguments.n_q * spec.group // ROWS) * arguments.heads_kv * arguments.batch
        most = -(-arguments.n_k // (LEAST_TILES * tile.block_k))
        parts = -(-max(1, min(self._slots // items, most)) // tile.warps) * tile.warps
        check_grid(items * parts // tile.warps, rows * self._shares)
        held = arguments.allocate_partials(parts)
        arguments.words[AT["num_splits"]] = parts
        self._kernel.launch(items * parts // tile.warps, 32 * tile.warps, arguments, stream, self._early)
        self._combine.launch(rows * self._shares, 32 * COMBINERS, arguments, stream, self._early)
        del held
        return None

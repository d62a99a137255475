"""The generation for tensor cores by mma.sync in Python, from Ampere on: kernels/sm80/."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler
from ..cuda_common.arguments import (
    ROW_TENSORS,
    Arguments,
    addresses,
    aligned,
    strides_are_vector_multiples,
)
from ..cuda_common.device import Device
from ..cuda_common.fallback import Fallback
from ..cuda_common.generation import Generation, Kernels, supports_16bit, tile_of
from ..cuda_common.l2_swizzle import bytes_of_keys, heads_per_l2_group
from ..cuda_common.launch import check_grid
from ..cuda_common.params import AT
from ..cuda_common.sm80_bwd_launch import OrderedBackward, Shaped
from ..cuda_common.smem import SmemLayout, stage_constants

THREADS = 128
_ADDRESSES, _HEADS_PER_L2_GROUP = addresses(ROW_TENSORS), AT["heads_per_l2_group"]
_BACKWARD_ROWS = "q", "k", "v", "dout", "dq", "dk", "dv"
_BACKWARD_ADDRESSES = addresses(_BACKWARD_ROWS)
MAX_DIM = 256
_L2_BYTES = 24_000_000  # of K and V of the heads that CTAs work on at the same time
_WHY = "the largest that fits"
_WHY_BACKWARD = "as in CUDA C++"


def row_bytes(dim: int, spec: AttentionSpec) -> int:
    """Bytes of a row in shared memory: whole chunks of 128 bytes."""
    return -(-dim * ITEMSIZE[spec.dtype] // 128) * 128


@dataclass(frozen=True)
class Tile:
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
        stage = SmemLayout()
        stage.add("STAGE_K", self.block_k * row_bytes(spec.head_dim, spec))
        stage.add("STAGE_V", self.block_k * row_bytes(spec.head_dim_v, spec))
        return stage

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA. O reuses the memory of Q."""
        smem = SmemLayout()
        smem.add("Q", self.block_q * max(row_bytes(dim, spec) for dim in (spec.head_dim, spec.head_dim_v)))
        smem.add("KV", self.stages * self.stage(spec).bytes)
        return smem

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory of a CTA."""
        return self.smem(spec).bytes

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


def forward_tiles(spec: AttentionSpec, device: Device) -> list[Tile]:
    """The tiles that fit; the fastest first."""
    most = max(spec.head_dim, spec.head_dim_v)
    tiles = [Tile(64, 64, 1)] if most > 128 else []
    tiles += [Tile(128, keys) for keys in (64, 32, 96, 48, 128, 16)]
    tiles += [Tile(64, keys, 1) for keys in (64, 32, 16)]
    return [tile for tile in dict.fromkeys(tiles) if tile.fits(spec, device)]


class Forward:
    """The forward pass."""

    def __init__(self, generation: Sm80, problem: Problem, device: Device, tile: Tile, why: str) -> None:
        spec = problem.spec
        self.generation, self.problem, self.device = generation, problem, device
        self.tile, self.why = tile, why
        constants = tuple(tile.constants(spec, device).items())
        library = generation.kernels("sm80/forward", spec, constants, compiler.target(device.capability))
        self.libraries = [library]
        self._kernel = library.kernel("sm80_forward", device, tile.shared_memory(spec))
        fallback = partial(generation.below.plan, problem, None, device, "forward")
        self._fallback = Fallback(fallback, spec, device, "forward")  # for rows that are not aligned to 16 bytes

    def shaped(self, arguments: Arguments) -> tuple[int, int] | None:
        """CTAs and heads per L2 group; None: shapes or strides need the fallback."""
        supported = arguments.n_k and arguments.positive_scale
        if not (supported and strides_are_vector_multiples(arguments, ROW_TENSORS)):
            return None
        heads = arguments.entries * arguments.heads
        blocks = arguments.q_tiles(self.tile.block_q) * heads
        check_grid(blocks)
        return blocks, heads_per_l2_group(heads, _L2_BYTES // bytes_of_keys(arguments))

    def run(self, arguments: Arguments, stream: int) -> None:
        shaped = arguments.known(self, self.shaped)
        if shaped is None or not aligned(arguments, _ADDRESSES):
            return self._fallback.run(arguments, stream)
        blocks, arguments.words[_HEADS_PER_L2_GROUP] = shaped
        if blocks:
            self._kernel.launch(blocks, THREADS, arguments, stream)
        return None


@dataclass(frozen=True)
class BackwardTile:
    """A tile of the backward pass and its warps, each of which has 32 rows of every product:
    kernels/sm80/bwd_layout.py.
    """

    block_q: int
    block_k: int
    warps: int = 8

    def __post_init__(self) -> None:
        across_s, across_kv = (self.warps * 32 / rows for rows in (self.block_q, self.block_k))
        if self.block_q % 32 or self.block_k % 64 or across_s % 1 or across_kv % 1:
            raise ValueError(
                f"{self=}: expected warps that share the tile in groups of 32 rows, block_k a multiple of 64"
            )
        if self.block_k / across_s % 16 or 64 / across_kv % 16:
            raise ValueError(f"{self=}: expected at least 16 keys and columns for a warp")

    def stage(self, spec: AttentionSpec) -> SmemLayout:
        """A stage of Q and dO, with bwd_lse and delta of their rows; swizzled tiles begin on 1024 bytes."""
        stage = SmemLayout()
        stage.add("STAGE_Q", self.block_q * row_bytes(spec.head_dim, spec))
        stage.add("STAGE_DOUT", self.block_q * row_bytes(spec.head_dim_v, spec))
        stage.add("STAGE_ROWS", 1024 * -(-self.block_q // 128))
        return stage

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA; SCALE holds the softmax scale."""
        fragments = self.block_q * (2 * self.block_k + 16)
        smem = SmemLayout()
        smem.add("K", self.block_k * row_bytes(spec.head_dim, spec))
        smem.add("V", self.block_k * row_bytes(spec.head_dim_v, spec))
        smem.add("QDO", 2 * self.stage(spec).bytes)
        smem.add("P", fragments)
        smem.add("DS", fragments)
        smem.add("TILE_COUNTER", 4)
        smem.add("SCALE", 4)
        smem.add("END", 8)
        return smem

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory of a CTA."""
        return self.smem(spec).bytes

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        columns = 64 * -(-spec.head_dim // 64) * self.block_q / (32 * self.warps)  # of dQ for a warp
        return columns % 16 == 0 and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.warps,
            "VECTOR_ADDS": device.capability >= (9, 0),
            **self.smem(spec).constants(), **stage_constants(self.stage(spec)),
        }  # fmt: skip


def backward_tiles(spec: AttentionSpec, device: Device) -> list[BackwardTile]:
    """The tiles that fit; the fastest first. Modifications and dropout take registers from the accumulators."""
    more = spec.dropout or spec.score is not None or max(spec.head_dim, spec.head_dim_v) > 64
    pairs = [(64, 128), (128, 128)] if more else [(128, 128), (64, 128)]
    if max(spec.head_dim, spec.head_dim_v) > 128:  # registers for the accumulators
        pairs = [(64, 64)]
    tiles = [*(BackwardTile(*pair) for pair in pairs), BackwardTile(64, 64, 4), BackwardTile(32, 64, 4)]
    return [tile for tile in tiles if tile.fits(spec, device)]


class Backward(OrderedBackward):
    """The backward pass."""

    def __init__(self, generation: Sm80, problem: Problem, device: Device, tile: BackwardTile, why: str) -> None:
        spec = problem.spec
        columns = 64 * -(-spec.head_dim // 64)
        super().__init__(generation.kernels, spec, device, tile, why, tile.constants(spec, device), columns)
        fallback = partial(generation.below.plan, problem, None, device, "backward")
        self._fallback = Fallback(fallback, spec, device, "backward")  # for rows that are not aligned to 16 bytes

    def shaped(self, arguments: Arguments) -> Shaped | None:
        supported = arguments.n_k and strides_are_vector_multiples(arguments, _BACKWARD_ROWS)
        return super().shaped(arguments) if supported else None

    def run(self, arguments: Arguments, stream: int) -> None:
        if arguments.known(self, self.shaped) is None or not aligned(arguments, _BACKWARD_ADDRESSES):
            return self._fallback.run(arguments, stream)
        return super().run(arguments, stream)


def on_tensor_cores(spec: AttentionSpec) -> Verdict:
    """Whether the kernels for tensor cores, of Ampere and of Hopper, support q, k and v of this kind."""
    if spec.packed:
        return Verdict(False, "packed sequences run on the simt kernels")
    if spec.paged:
        return Verdict(False, "paged keys run on the simt kernels")
    return supports_16bit(spec, MAX_DIM)


class Sm80(Generation):
    """Kernels for tensor cores: float16 and bfloat16. `below`: the generation that takes all other problems."""

    name = "sm80"
    directions: tuple[Direction, ...] = ("forward", "backward")

    def __init__(self, kernels: Kernels, below: Generation) -> None:
        self.kernels, self.below = kernels, below

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability < (8, 0):
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, older than sm_80")
        if not (able := on_tensor_cores(spec)):
            return able
        if not self.candidates(problem, device, direction):
            return Verdict(False, f"no tile fits in {device.shared_per_block} bytes of shared memory")
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        if direction == "backward":
            return backward_tiles(problem.spec, device)
        return forward_tiles(problem.spec, device)

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Forward | Backward:
        spec = problem.spec

        def fits(tile: Any, spec: AttentionSpec) -> bool:
            return bool(tile.fits(spec, device))

        if direction == "backward":
            profiled, why = tile_of(BackwardTile, row, spec, fits, _WHY_BACKWARD)
            return Backward(self, problem, device, profiled or backward_tiles(spec, device)[0], why)
        tile, why = tile_of(Tile, row, spec, fits, _WHY)
        return Forward(self, problem, device, tile or forward_tiles(spec, device)[0], why)

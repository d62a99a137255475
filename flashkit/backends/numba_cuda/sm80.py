"""The generation for tensor cores by mma.sync in Python, from Ampere on: kernels/sm80_forward.py, sm80_backward.py."""

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
    rows_are_vector_aligned,
    strides_are_vector_multiples,
)
from ..cuda_common.device import Device
from ..cuda_common.fallback import Fallback
from ..cuda_common.generation import Generation, Kernels, supports_16bit, tile_of
from ..cuda_common.l2_swizzle import bytes_of_keys, heads_per_l2_group
from ..cuda_common.launch import check_grid
from ..cuda_common.params import AT
from ..cuda_common.sm80_bwd_launch import OrderedBackward
from .sm80_decode import OWN_DECODE, Decode, DecodeTile, decode_tiles

THREADS = 128
_ADDRESSES, _HEADS_PER_L2_GROUP = addresses(ROW_TENSORS), AT["heads_per_l2_group"]
MAX_DIM = 256
FEW_ROWS = 64
MANY_KEYS = 1024
LEAST_SPLIT = 16  # products of a sum, for what splitting float32 leaves out to average out
_CACHED = 24_000_000  # bytes of keys and values that blocks work at together, within the L2 cache
_OWN = "the largest that fits"
_OWN_BACKWARD = "as in CUDA C++"


@dataclass(frozen=True)
class Tile:
    """A tile of the forward pass: rows, 16 or 32 for each of four warps, keys, and how many tiles of keys are in shared
    memory at once.
    """

    block_q: int
    block_k: int
    stages: int = 2

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128) or self.block_k % 16 or not 16 <= self.block_k <= 128:
            raise ValueError(f"{self=}: block_q is 64 or 128, block_k a multiple of 16 up to 128")
        if self.stages not in (1, 2):
            raise ValueError(f"{self=}: stages are one or two")

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block."""
        q, v = (-(-dim * ITEMSIZE[spec.dtype] // 128) for dim in (spec.head_dim, spec.head_dim_v))
        return 128 * (self.block_q * max(q, v) + self.stages * self.block_k * (q + v))

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether there is the memory, and registers for a lane's part of the output."""
        roomy = self.block_q == 64 or (spec.head_dim_v <= 128 and spec.dtype != "float32")
        return roomy and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        resident = device.shared_per_sm // (self.shared_memory(spec) + 1024)
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "STAGES": self.stages,
            "BLOCKS_PER_SM": min(resident, 2), "HAS_LENGTHS": spec.kv_lengths, "FAST_MATH": True,
        }  # fmt: skip


def forward_tiles(spec: AttentionSpec, device: Device) -> list[Tile]:
    """Those that fit, the likely fastest first."""
    most = max(spec.head_dim, spec.head_dim_v)
    if spec.dtype == "float32":
        tiles = [Tile(64, 32)] * (most <= 64) + [Tile(64, 16), Tile(64, 32, 1)]
        return [tile for tile in dict.fromkeys(tiles) if tile.fits(spec, device)]
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
        older = partial(generation.below.plan, problem, None, device, "forward")
        self._spare = Fallback(older, spec, device, "forward")  # for arrays whose rows do not begin on 16 bytes

    def shaped(self, arguments: Arguments) -> tuple[int, int] | None:
        """Blocks, and how many heads are worked at together, of shapes and strides; None: another pass is needed."""
        usual = arguments.n_k and arguments.positive_scale
        if not (usual and strides_are_vector_multiples(arguments, ROW_TENSORS)):
            return None
        heads = arguments.batch * arguments.heads
        blocks = -(-arguments.n_q // self.tile.block_q) * heads
        check_grid(blocks)
        # Heads at a time, of even numbers, whose keys and values stay in the L2 cache.
        return blocks, heads_per_l2_group(heads, _CACHED // bytes_of_keys(arguments))

    def run(self, arguments: Arguments, stream: int) -> None:
        shaped = arguments.known(self, self.shaped)
        if shaped is None or not aligned(arguments, _ADDRESSES):
            return self._spare.run(arguments, stream)
        blocks, arguments.words[_HEADS_PER_L2_GROUP] = shaped
        if blocks:
            self._kernel.launch(blocks, THREADS, arguments, stream)
        return None


@dataclass(frozen=True)
class BackwardTile:
    """A tile of the backward pass and its warps, each of which has 32 rows of every product:
    kernels/sm80_tile_backward.py.
    """

    block_q: int
    block_k: int
    warps: int = 8

    def __post_init__(self) -> None:
        across_s, across_kv = (self.warps * 32 / rows for rows in (self.block_q, self.block_k))
        if self.block_q % 32 or self.block_k % 64 or across_s % 1 or across_kv % 1:
            raise ValueError(f"{self=}: warps share the tile in groups of 32 rows, block_k is a multiple of 64")
        if self.block_k / across_s % 16 or 64 / across_kv % 16:
            raise ValueError(f"{self=}: a warp has less than 16 keys or columns")

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block: kernels/sm80_tile_backward.py."""
        chunks = -(-spec.head_dim // 64) + -(-spec.head_dim_v // 64)
        pairs = 2 * self.block_q * (2 * self.block_k + 16)
        return 128 * chunks * self.block_k + 2 * (128 * chunks * self.block_q + 1024) + pairs + 16

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        columns = 64 * -(-spec.head_dim // 64) * self.block_q / (32 * self.warps)  # of dQ for a warp
        return columns % 16 == 0 and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.warps, "HAS_LENGTHS": spec.kv_lengths,
            "VECTOR_ADDS": device.capability >= (9, 0), "FAST_MATH": True,
        }  # fmt: skip


def backward_tiles(spec: AttentionSpec, device: Device) -> list[BackwardTile]:
    """Those that fit, the likely fastest first: what modifications and dropout need takes registers."""
    more = spec.dropout or spec.score is not None or max(spec.head_dim, spec.head_dim_v) > 64
    pairs = [(64, 128), (128, 128)] if more else [(128, 128), (64, 128)]
    if max(spec.head_dim, spec.head_dim_v) > 128:  # registers for the sums
        pairs = [(64, 64)]
    tiles = [*(BackwardTile(*pair) for pair in pairs), BackwardTile(64, 64, 4), BackwardTile(32, 64, 4)]
    return [tile for tile in tiles if tile.fits(spec, device)]


class Backward(OrderedBackward):
    """The backward pass."""

    def __init__(self, generation: Sm80, problem: Problem, device: Device, tile: BackwardTile, why: str) -> None:
        spec = problem.spec
        columns = 64 * -(-spec.head_dim // 64)
        super().__init__(generation.kernels, spec, device, tile, why, tile.constants(spec, device), columns)
        older = partial(generation.below.plan, problem, None, device, "backward")
        self._spare = Fallback(older, spec, device, "backward")  # for arrays whose rows do not begin on 16 bytes

    def run(self, arguments: Arguments, stream: int) -> None:
        usual = arguments.n_k and rows_are_vector_aligned(arguments, ("q", "k", "v", "dout", "dq", "dk", "dv"))
        return super().run(arguments, stream) if usual else self._spare.run(arguments, stream)


def splits(problem: Problem, device: Device) -> bool:
    """Whether keys are split: queries would leave most of a tile empty, or most of the device idle."""
    if problem.n_q <= FEW_ROWS:
        return problem.n_q > 0
    blocks = -(-problem.n_q // 128) * problem.heads * problem.batch
    return 3 * blocks <= device.sms and problem.n_k >= MANY_KEYS


def of_float32(problem: Problem, device: Device) -> Verdict:
    """Whether float32 is split here: many queries, rows of whole 16 bytes, sums that average out what is left out."""
    spec = problem.spec
    if max(spec.head_dim, spec.head_dim_v) > MAX_DIM or spec.head_dim % 4 or spec.head_dim_v % 4:
        dims = f"{spec.head_dim} and {spec.head_dim_v}"
        return Verdict(False, f"float32 of head dims {dims}, over {MAX_DIM} or not by fours")
    if spec.head_dim < LEAST_SPLIT:
        return Verdict(False, f"float32 of head dim {spec.head_dim}, under {LEAST_SPLIT}, is exacter without TF32")
    if splits(problem, device):
        return Verdict(False, "float32 of few queries, whose keys should be split")
    return Verdict(True)


class Sm80(Generation):
    """Kernels for tensor cores with float16 and bfloat16, the forward pass with float32 too. `below`: the generation
    that takes what is left.
    """

    name = "sm80"
    directions: tuple[Direction, ...] = ("forward", "backward")

    def __init__(self, kernels: Kernels, below: Generation) -> None:
        self.kernels, self.below = kernels, below

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability < (8, 0):
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, older than sm_80")
        if spec.dtype == "float32" and direction == "forward":
            if not (able := of_float32(problem, device)):
                return able
        elif not (able := supports_16bit(spec, MAX_DIM)):
            return able
        if not self.candidates(problem, device, direction):
            return Verdict(False, f"no tile fits in {device.shared_per_block} bytes of shared memory")
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        if direction == "backward":
            return backward_tiles(problem.spec, device)
        if splits(problem, device):
            return decode_tiles(problem.spec, device)
        return forward_tiles(problem.spec, device)

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Forward | Backward | Decode:
        if direction == "backward":
            followed, why = tile_of(BackwardTile, row, lambda x: x.fits(problem.spec, device), _OWN_BACKWARD)
            return Backward(self, problem, device, followed or backward_tiles(problem.spec, device)[0], why)
        if splits(problem, device):
            narrow, why = tile_of(DecodeTile, row, lambda x: x.fits(problem.spec, device), OWN_DECODE)
            return Decode(self.kernels, self.below, problem, device, narrow, why)
        tile, why = tile_of(Tile, row, lambda x: x.fits(problem.spec, device), _OWN)
        return Forward(self, problem, device, tile or forward_tiles(problem.spec, device)[0], why)

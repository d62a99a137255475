"""The generation for tensor cores by mma.sync in Python, from Ampere on: kernels/sm80_forward.py, sm80_backward.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Generation, Kernels, Spare, sixteen_bits, tile_of
from ..cuda_common.hopper import heads_together
from ..cuda_common.launch import MAX_GRID
from ..cuda_common.rows import RowKernels
from ..cuda_common.sm90_maps import addressable

BLOCK_Q, THREADS = 128, 128
MAX_DIM = 128
FEW_ROWS = 64
MANY_KEYS = 1024
_CACHED = 24_000_000  # bytes of keys and values that blocks work at together, within the L2 cache
_OWN = "the largest that fits"
_OWN_BACKWARD = "spills little, by the compiler's report"


@dataclass(frozen=True)
class Tile:
    """Keys of a tile of the forward pass, whose rows are 128: 32 for each of four warps."""

    block_k: int

    def __post_init__(self) -> None:
        if self.block_k % 16 or not 16 <= self.block_k <= 128:
            raise ValueError(f"{self=}: block_k is a multiple of 16 up to 128")

    @property
    def block_q(self) -> int:
        return BLOCK_Q

    @property
    def stages(self) -> int:
        return 2

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block."""
        q, v = -(-spec.head_dim // 64), -(-spec.head_dim_v // 64)
        return 128 * (BLOCK_Q * max(q, v) + 2 * self.block_k * (q + v))

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        return self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        resident = device.shared_per_sm // (self.shared_memory(spec) + 1024)
        return {
            "BLOCK_K": self.block_k, "BLOCKS_PER_SM": min(resident, 2), "HAS_LENGTHS": spec.kv_lengths, "BRIEF": True,
        }  # fmt: skip


def forward_tile(spec: AttentionSpec, device: Device) -> Tile | None:
    """The largest that fits, of those that do well."""
    return next((tile for tile in map(Tile, (64, 32, 16)) if tile.fits(spec, device)), None)


class Forward:
    """The forward pass."""

    def __init__(self, generation: Sm80, problem: Problem, device: Device, tile: Tile | None, why: str = _OWN) -> None:
        spec = problem.spec
        self.generation, self.problem, self.device = generation, problem, device
        tile = tile or forward_tile(spec, device)
        assert tile is not None  # supports() has asked
        self.tile, self.why = tile, why
        constants = tuple(tile.constants(spec, device).items())
        library = generation.kernels("sm80_forward", spec, constants, compiler.target(device.capability))
        self.libraries = [library]
        self._kernel = library.kernel("sm80_forward", device, tile.shared_memory(spec))
        older = partial(generation.below.plan, problem, None, device, "forward")
        self._spare = Spare(older, spec, device, "forward")  # for arrays whose rows do not begin on 16 bytes

    def run(self, arguments: Arguments, stream: int) -> None:
        spec = arguments.spec
        # With a scale that is not positive a hidden pair's -inf would change its sign.
        usual = arguments.n_k and arguments.scale > 1e-30
        if not (usual and addressable(arguments, ("q", "k", "v", "out"))):
            return self._spare.run(arguments, stream)
        heads = arguments.batch * arguments.heads
        blocks = -(-arguments.n_q // BLOCK_Q) * heads
        if not blocks:
            return None
        if blocks > MAX_GRID:
            raise ValueError(f"{blocks} tiles are more than a launch takes, {MAX_GRID}; fewer batch entries fit")
        # Heads at a time, of even numbers, whose keys and values stay in the L2 cache.
        bytes_of_head = arguments.n_k * (spec.head_dim + spec.head_dim_v) * ITEMSIZE[spec.dtype]
        arguments.set(splits=heads_together(heads, _CACHED // bytes_of_head))
        self._kernel.launch(blocks, THREADS, arguments, stream)
        return None


@dataclass(frozen=True)
class BackwardTile:
    """A tile of the backward pass: for dK and dV a block takes block_k keys, 16 for each warp, and goes over tiles of
    block_q queries; for dQ the other way round.
    """

    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        if self.block_q not in (16, 32, 64) or self.block_k not in (64, 128):
            raise ValueError(f"{self=}: block_q is 16, 32 or 64, block_k 64 or 128")

    @property
    def threads(self) -> int:
        return 2 * self.block_k

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block: kernels/sm80_tile_backward.py."""
        chunks = -(-spec.head_dim // 64) + -(-spec.head_dim_v // 64)
        return 128 * chunks * self.block_k + 2 * (128 * chunks * self.block_q + 1024)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        return self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device, keys: bool) -> dict[str, int]:
        resident = device.shared_per_sm // (self.shared_memory(spec) + 1024)
        block_q, block_k = (self.block_q, self.block_k) if keys else (self.block_k, self.block_q)
        return {
            "BLOCK_Q": block_q, "BLOCK_K": block_k, "BACKWARD_KEYS": keys, "HAS_LENGTHS": spec.kv_lengths,
            "BLOCKS_PER_SM": max(1, min(resident, 256 // self.threads)), "BRIEF": True,
        }  # fmt: skip


def backward_tiles(spec: AttentionSpec, device: Device) -> list[BackwardTile]:
    """Those that fit, the likely fastest first: what masks, modifications and dropout need takes registers."""
    wide = max(spec.head_dim, spec.head_dim_v) > 64
    more = spec.dropout or spec.score is not None or (wide and spec.mask is not None)
    pairs = [(32, 64), (64, 64), (32, 128), (16, 64)] if more else [(64, 64), (64, 128), (32, 64), (16, 64)]
    return [tile for tile in (BackwardTile(*each) for each in pairs) if tile.fits(spec, device)]


class Backward:
    """The backward pass: rows prepared, then dK and dV, then dQ, then the sinks."""

    def __init__(self, generation: Sm80, problem: Problem, device: Device, tile: BackwardTile, why: str) -> None:
        spec, self.tile, self.why = problem.spec, tile, why
        self.rows, self.libraries = RowKernels(generation.kernels, spec, device), []
        self._kernels = []
        for keys in (True, False):
            constants = tuple(tile.constants(spec, device, keys).items())
            library = generation.kernels("sm80_backward", spec, constants, compiler.target(device.capability))
            self.libraries.append(library)
            self._kernels.append(library.kernel("sm80_backward", device, tile.shared_memory(spec)))
        self.libraries.append(self.rows.library)
        older = partial(generation.below.plan, problem, None, device, "backward")
        self._spare = Spare(older, spec, device, "backward")  # for arrays whose rows do not begin on 16 bytes

    def run(self, arguments: Arguments, stream: int) -> None:
        spec = arguments.spec
        if not (arguments.n_k and addressable(arguments, ("q", "k", "v", "dout", "dq", "dk", "dv"))):
            return self._spare.run(arguments, stream)
        self.rows.prepare(arguments, stream, self.tile.block_k)
        row = (spec.head_dim + spec.head_dim_v) * ITEMSIZE[spec.dtype]
        sides = (
            (arguments.n_k, arguments.heads_kv, arguments.n_q * spec.group),
            (arguments.n_q, arguments.heads, arguments.n_k),
        )  # tokens that blocks share, heads, and the tokens of a head that each goes over
        for kernel, (tokens, heads, others) in zip(self._kernels, sides):
            every = heads * arguments.batch
            blocks = -(-tokens // self.tile.block_k) * every
            if blocks > MAX_GRID:
                raise ValueError(f"{blocks} tiles are more than a launch takes, {MAX_GRID}; fewer batch entries fit")
            if blocks:
                arguments.set(splits=heads_together(every, _CACHED // max(1, others * row)))
                kernel.launch(blocks, self.tile.threads, arguments, stream)
        self.rows.finish(arguments, stream)
        return None


class Sm80:
    """Kernels for tensor cores with float16 and bfloat16. `below`: the generation that takes what is left."""

    name = "sm80"
    directions: tuple[Direction, ...] = ("forward", "backward")

    def __init__(self, kernels: Kernels, below: Generation) -> None:
        self.kernels, self.below = kernels, below

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability < (8, 0):
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, older than sm_80")
        if not (able := sixteen_bits(spec, MAX_DIM)):
            return able
        if not (backward_tiles(spec, device) if direction == "backward" else forward_tile(spec, device)):
            return Verdict(False, f"no tile fits in {device.shared_per_block} bytes of shared memory")
        if problem.n_q <= FEW_ROWS:
            return Verdict(False, f"{problem.n_q} queries would leave most of a tile empty")
        blocks = -(-problem.n_q // BLOCK_Q) * problem.heads * problem.batch
        if direction == "forward" and 2 * blocks <= device.sms and problem.n_k >= MANY_KEYS:
            return Verdict(False, f"{blocks} tiles of rows on {device.sms} multiprocessors, the keys should be split")
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        if direction == "backward":
            return backward_tiles(problem.spec, device)
        return [tile for tile in map(Tile, (64, 32, 96, 48, 128)) if tile.fits(problem.spec, device)]

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Forward | Backward:
        if direction == "backward":
            followed, why = tile_of(BackwardTile, row, lambda x: x.fits(problem.spec, device))
            own = backward_tiles(problem.spec, device)[0]
            why = why if followed else "; ".join(filter(None, (_OWN_BACKWARD, why)))
            return Backward(self, problem, device, followed or own, why)
        tile, why = tile_of(Tile, row, lambda x: x.fits(problem.spec, device))
        return Forward(self, problem, device, tile, why if tile else "; ".join(filter(None, (_OWN, why))))

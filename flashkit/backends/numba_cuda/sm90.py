"""The generation for Hopper in Python: wgmma, the copy engine, warp groups with roles: kernels/sm90_*.py,
docs/numba_hopper.md.

Tiles come by the copy engine, which wants addresses and strides of whole 16 bytes. Calls whose arrays are not so go to
the kernels of the generation below.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler, verify
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Generation, Kernels, Pass, tile_of
from ..cuda_common.launch import MAX_GRID
from ..cuda_common.sm90_maps import Launch, Tickets, addressable, tensor_map

MAX_DIM = 256
FEW_ROWS = 64
MANY_KEYS = 1024
_CACHED = 34_000_000  # bytes of keys and values that blocks work at together, well within the L2 cache
_LIST = 4 * 224  # bytes of the list of tiles
_OWN = "chosen for an H200"
WATCHDOG = bool(int(os.environ.get("FLASHKIT_CUDA_WATCHDOG") or 0))
"""Whether a barrier that is waited for too long stops the kernel, to find mistakes in protocols."""


def padded(dim: int) -> int:
    """Columns that are multiplied."""
    return -(-dim // 16) * 16


def chunks(dim: int) -> int:
    """Chunks of 64 columns that a row takes in shared memory."""
    return -(-dim // 64)


@dataclass(frozen=True)
class Tile:
    """A tile of the forward pass: rows, 64 for each warp group, and keys; how many tiles of keys and of rows are in
    shared memory at once; whether warp groups take turns at beginning products. kernels/sm90_forward.py.
    """

    block_q: int
    block_k: int
    stages: int = 2
    q_buffers: int = 2
    turns: int = 1

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128, 192) or self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"{self=}: block_q is 64, 128 or 192, block_k a multiple of 16 up to 256")
        if self.stages < 2 or self.q_buffers not in (1, 2):
            raise ValueError(f"{self=}: stages are two or more, q_buffers one or two")

    @property
    def groups(self) -> int:
        return self.block_q // 64

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block."""
        q, v = chunks(spec.head_dim), chunks(spec.head_dim_v)
        rows = self.q_buffers * self.block_q * max(q, v) + self.stages * self.block_k * (q + v)
        barriers = (16 + 8 * self.groups + 12) * self.q_buffers + (32 + 4) * self.stages
        return 128 * rows + barriers + _LIST

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """In shared memory and, as far as sums and weights tell, in registers."""
        numbers = padded(spec.head_dim_v) // 2 + self.block_k // 2 + self.block_k // 4
        return self.shared_memory(spec) <= device.shared_per_block and numbers + 24 <= self.registers(spec)[0]

    def registers(self, spec: AttentionSpec) -> tuple[int, int]:
        """Of a thread that multiplies and of one that loads; together they are what a multiprocessor has."""
        plain = spec.mask is None and spec.score is None and not spec.kv_lengths
        if self.groups == 3:
            return (160, 32)
        return (240, 24) if plain else (232, 40) if self.groups == 2 else (240, 40)

    def constants(self, spec: AttentionSpec, pack: int) -> dict[str, int]:
        multiplying, loading = self.registers(spec)
        return {
            "BLOCK_K": self.block_k, "GROUPS": self.groups, "STAGES": self.stages, "Q_BUFFERS": self.q_buffers,
            "TURNS": bool(self.turns) and self.groups > 1, "PACK": pack, "REGISTERS": multiplying,
            "REGISTERS_LOADING": loading, "WATCHDOG": WATCHDOG, "HAS_LENGTHS": spec.kv_lengths, "BRIEF": True,
        }  # fmt: skip


def forward_tile(spec: AttentionSpec) -> Tile:
    """What does well on an H200."""
    dim, dim_v = spec.head_dim, spec.head_dim_v
    if max(dim, dim_v) <= 64:  # a modification takes registers
        return Tile(192, 128) if spec.score is None and not spec.dropout else Tile(128, 128)
    if max(dim, dim_v) <= 128:
        return Tile(128, 128)
    if dim <= 192 and dim_v <= 128:
        return Tile(128, 96)
    return Tile(128, 96 if max(dim, dim_v) <= 192 else 80, q_buffers=1)


def forward_candidates(spec: AttentionSpec, device: Device) -> list[Tile]:
    """Tiles worth trying, the one of `forward_tile` first."""
    tiles = [forward_tile(spec)]
    for rows, keys, buffers, turns in itertools.product((192, 128), (128, 144, 112, 96, 160, 80, 64), (2, 1), (1, 0)):
        tiles.append(Tile(rows, keys, 2, buffers, turns))
    return list(dict.fromkeys(tile for tile in tiles if tile.fits(spec, device)))


def packed(problem: Problem) -> int:
    """Query heads whose rows share a tile: all of a group where there are few queries."""
    group = problem.spec.group
    return group if problem.n_q <= 256 and 64 % group == 0 else 1


class Forward:
    """The forward pass."""

    def __init__(self, generation: Sm90, problem: Problem, device: Device, tile: Tile | None, why: str = _OWN) -> None:
        spec = problem.spec
        self.generation, self.problem, self.device = generation, problem, device
        self.tile, self.why, self.pack = tile or forward_tile(spec), why, packed(problem)
        constants = tuple(self.tile.constants(spec, self.pack).items())
        library = generation.kernels("sm90_forward", spec, constants, compiler.target(device.capability))
        self.libraries = [library]
        self._kernel = library.kernel("sm90_forward", device, self.tile.shared_memory(spec))
        self._tickets = Tickets.of(device)
        self._other: Pass | None = None

    def run(self, arguments: Arguments, stream: int) -> None:
        spec, tile, pack = arguments.spec, self.tile, self.pack
        # With a scale that is not positive a hidden pair's -inf would change its sign.
        usual = arguments.n_k and arguments.scale > 1e-30
        if not (usual and addressable(arguments, ("q", "k", "v", "out"))):
            return self.other().run(arguments, stream)
        heads, rows = arguments.batch * arguments.heads // pack, arguments.n_q * pack
        items = -(-rows // tile.block_q) * heads
        if not items:
            return None
        if items > MAX_GRID:
            raise ValueError(f"{items} tiles are more than a launch takes, {MAX_GRID}; fewer batch entries fit")
        # Heads at a time, of even numbers, whose keys and values stay in the L2 cache.
        bytes_of_head = arguments.n_k * (spec.head_dim + spec.head_dim_v) * ITEMSIZE[spec.dtype]
        most = max(1, min(heads, _CACHED // bytes_of_head))
        arguments.set(splits=-(-heads // -(-heads // most)), ticket=self._tickets.next())
        dim, dim_v, keys = spec.head_dim, spec.head_dim_v, tile.block_k
        boxes = ("q", dim, pack, 64), ("k", dim, 1, keys), ("v", dim_v, 1, keys), ("out", dim_v, pack, 64)
        maps = [tensor_map(arguments, *box) for box in boxes]
        self._kernel.launch(min(items, self.device.sms), tile.threads, Launch(arguments, maps), stream)  # type: ignore[arg-type]
        return None

    def other(self) -> Pass:
        """For arrays that the copy engine cannot address."""
        if self._other is None:
            able = (g for g in self.generation.below if g.supports(self.problem, self.device, "forward"))
            other = next(able).plan(self.problem, None, self.device, "forward")
            verify.trusted(other, self.problem.spec, self.device, "forward")
            self._other = other
        return self._other


class Sm90:
    """Kernels for Hopper with float16 and bfloat16. `below`: of these the first that can takes what is left."""

    name = "sm90"
    directions: tuple[Direction, ...] = ("forward",)

    def __init__(self, kernels: Kernels, *below: Generation) -> None:
        self.kernels, self.below = kernels, below

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability[0] != 9:
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, not sm_90")
        if direction == "backward":
            return Verdict(False, "it has no backward pass")
        if spec.dtype not in ("float16", "bfloat16"):
            return Verdict(False, f"{spec.dtype} is not for these tensor cores")
        if max(spec.head_dim, spec.head_dim_v) > MAX_DIM:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {MAX_DIM}")
        if spec.head_dim % 8 or spec.head_dim_v % 8:
            return Verdict(False, f"rows of head dims {spec.head_dim} and {spec.head_dim_v} are not whole 16 bytes")
        rows = problem.n_q * spec.group
        if rows <= FEW_ROWS:
            return Verdict(False, f"{rows} rows share keys, most of a tile would be empty")
        items = -(-rows // forward_tile(spec).block_q) * problem.heads_kv * problem.batch
        if 2 * items <= device.sms and problem.n_k >= MANY_KEYS:
            return Verdict(False, f"{items} tiles of rows on {device.sms} multiprocessors, the keys should be split")
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        return list(forward_candidates(problem.spec, device))

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Forward:
        tile, why = tile_of(Tile, row, lambda x: x.fits(problem.spec, device))
        return Forward(self, problem, device, tile, why if tile else "; ".join(filter(None, (_OWN, why))))

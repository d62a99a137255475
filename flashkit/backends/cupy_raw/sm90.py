"""The generation for Hopper: wgmma, the copy engine, warp groups with roles: kernels/sm90_*.cu, docs/hopper.md.

Tiles come by the copy engine, which wants addresses and strides of whole 16 bytes. Calls whose arrays are not so go to
the kernels of `sm80`, as do those with too few rows to fill the device.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from typing import Any

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler, modification, verify
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Pass, tile_of
from ..cuda_common.launch import MAX_GRID
from ..cuda_common.sm90_maps import Launch, Tickets, addressable, tensor_map
from . import sm90_float32, specialise
from .sm80 import LEAST_SPLIT, Sm80Forward
from .sm90_backward import Sm90Backward, Sm90BackwardTile, backward_candidates
from .sm90_float32 import Split, parts
from .sm90_products import text as products

MAX_DIM = 256
FEW_ROWS = 64
MANY_KEYS = 1024
SHORT = 2048
_CACHED = 34_000_000  # bytes of keys and values that blocks work at together, well within the L2 cache
_CHUNK = 24 + 4 * 224  # bytes of kernels/sm90_items.cuh: Chunk
_OWN = "chosen for an H200"
WATCHDOG = bool(int(os.environ.get("FLASHKIT_CUDA_WATCHDOG") or 0))
"""Whether a barrier that is waited for too long stops the kernel, to find mistakes in protocols."""


def padded(dim: int) -> int:
    """Columns that are multiplied."""
    return -(-dim // 16) * 16


def chunks(spec: AttentionSpec) -> tuple[int, int, int]:
    """Chunks of 128 bytes that a row takes in shared memory: of q and k, of v, of the output."""
    q, v = (parts(spec) * -(-dim // 64) for dim in (spec.head_dim, spec.head_dim_v))
    return q, v, -(-spec.head_dim_v * ITEMSIZE[spec.dtype] // 128)


@dataclass(frozen=True)
class Sm90Tile:
    """A tile of the forward pass: rows, 64 for each warp group, and keys; how many tiles of keys and of rows are in
    shared memory at once; whether warp groups take turns at beginning products. kernels/sm90_forward.cu.
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
        q, v, out = chunks(spec)
        rows = self.q_buffers * self.block_q * max(q, out) + self.stages * self.block_k * (q + v)
        barriers = (16 + 8 * self.groups + 12) * self.q_buffers + (32 + 4) * self.stages + 32
        return 128 * rows + barriers + 2 * _CHUNK

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """In shared memory and, as far as sums and weights tell, in registers."""
        sums, scores = padded(spec.head_dim_v) // 2, self.block_k // 2
        # float32 has sums of a tile beside those of all, which take the place of its scores.
        numbers = scores + (2 * sums if spec.dtype == "float32" else sums + scores // 2)
        return self.shared_memory(spec) <= device.shared_per_block and numbers + 24 <= self.registers(spec)[0]

    def registers(self, spec: AttentionSpec) -> tuple[int, int]:
        """Of a thread that multiplies and of one that loads; together they are what a multiprocessor has."""
        plain = spec.mask is None and not spec.kv_lengths  # or tiles are looked for
        if self.groups == 3:
            return (160, 32)
        return (240, 24) if plain else (232, 40) if self.groups == 2 else (240, 40)

    def constants(self, spec: AttentionSpec, pack: int) -> dict[str, int]:
        multiplying, loading = self.registers(spec)
        return {
            "BLOCK_K": self.block_k, "GROUPS": self.groups, "STAGES": self.stages, "Q_BUFFERS": self.q_buffers,
            "TURNS": bool(self.turns) and self.groups > 1, "PACK": pack, "REGISTERS": multiplying,
            "REGISTERS_LOADING": loading, "WATCHDOG": WATCHDOG, "HAS_LENGTHS": spec.kv_lengths,
            "CHUNK_BYTES": _CHUNK, "BRIEF": spec.dtype != "float32", "PARTS": parts(spec),
            "FAR": modification.NEAR if spec.score is not None else 2**30,
            "POSITIONS": ("any", "integers", "floats").index(modification.positions(spec)),
        }  # fmt: skip


def forward_tile(problem: Problem) -> Sm90Tile:
    """What does well on an H200."""
    spec = problem.spec
    dim, dim_v, modified = spec.head_dim, spec.head_dim_v, spec.score is not None or spec.dropout
    if spec.dtype == "float32":
        if max(dim, dim_v) <= 64:
            return Sm90Tile(128, 128)
        return Sm90Tile(128, 64 if parts(spec) == 2 else 128, q_buffers=1)
    if max(dim, dim_v) <= 64:  # a modification takes registers; of short sequences, masked, larger tiles waste more
        return Sm90Tile(128 if modified or (spec.mask is not None and problem.n_q <= SHORT) else 192, 128)
    if max(dim, dim_v) <= 128:
        return Sm90Tile(128, 128)
    if dim <= 192 and dim_v <= 128:
        return Sm90Tile(128, 96)
    keys = 96 if max(dim, dim_v) <= 192 else 80 if spec.mask is None else 64
    return Sm90Tile(128, keys, q_buffers=1)


def forward_candidates(problem: Problem, device: Device) -> list[Sm90Tile]:
    """Tiles worth trying, the one of `forward_tile` first."""
    first = forward_tile(problem)
    tiles = [first, replace(first, turns=0)]
    for rows, keys in itertools.product((192, 128), (128, 112, 96, 160, 80, 64)):
        pair = Sm90Tile(rows, keys), Sm90Tile(rows, keys, q_buffers=1)
        tiles += [tile for tile in pair if tile.fits(problem.spec, device)][:1]
    return list(dict.fromkeys(tiles))


def forward_source(spec: AttentionSpec, tile: Sm90Tile, pack: int) -> tuple[dict[str, int], str]:
    """Constants and generated functions of kernels/sm90_forward.cu."""
    dtype = "float16" if spec.dtype == "float32" else spec.dtype
    return tile.constants(spec, pack), products(dtype, [tile.block_k], [padded(spec.head_dim_v)])


class Sm90Forward:
    """The forward pass."""

    def __init__(self, problem: Problem, device: Device, tile: Sm90Tile | None = None, why: str = _OWN) -> None:
        spec = problem.spec
        self.problem, self.device, self.tile, self.why = problem, device, tile or forward_tile(problem), why
        self.pack = packed(problem)
        constants, functions = forward_source(spec, self.tile, self.pack)
        arch = compiler.target(device.capability)
        library = specialise.library("sm90_forward", spec, tuple(constants.items()), arch, functions)
        self.split = Split(spec, self.tile.block_k, device) if spec.dtype == "float32" else None
        self.libraries = [library, self.split.library] if self.split else [library]
        self._kernel = library.kernel("sm90_forward", device, self.tile.shared_memory(spec))
        self._tickets = Tickets.of(device)
        self._other: Sm80Forward | None = None

    def run(self, arguments: Arguments, stream: int) -> None:
        spec, tile, pack = arguments.spec, self.tile, self.pack
        # With a scale that is not positive a hidden pair's -inf would change its sign.
        usual = arguments.n_k and arguments.scale > 1e-30
        # A score modification of more would count in 64 bits, one pair at a time.
        most = max(arguments.n_q, arguments.n_k, arguments.batch, arguments.heads)
        usual = usual and (spec.score is None or most < modification.NEAR)
        if not (usual and addressable(arguments, ("out",) if self.split else ("q", "k", "v", "out"))):
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
        boxes = ("q", dim, pack, 64), ("k", dim, 1, keys), ("v", dim_v, 1, keys)
        if self.split:
            (q, k, v), held = self.split.terms(arguments, stream, ("q", "k", "v"), True)
            maps = [q.map(64, pack), k.map(keys), v.map(keys)]
        else:
            maps, held = [tensor_map(arguments, *box) for box in boxes], None
        maps.append(tensor_map(arguments, "out", dim_v, pack, 64))
        self._kernel.launch(min(items, self.device.sms), tile.threads, Launch(arguments, maps), stream)  # type: ignore[arg-type]
        del held  # what the kernel reads, until it is enqueued
        return None

    def other(self) -> Sm80Forward:
        """For arrays that the copy engine cannot address."""
        if self._other is None:
            other = Sm80Forward(self.problem, self.device)
            verify.trusted(other, self.problem.spec, self.device, "forward")
            self._other = other
        return self._other


def packed(problem: Problem) -> int:
    """Query heads whose rows share a tile: all of a group where there are few queries."""
    group = problem.spec.group
    return group if problem.n_q <= 256 and 64 % group == 0 else 1


class Sm90:
    """Kernels for Hopper with float16, bfloat16 and, as terms of float16, float32."""

    name = "sm90"
    directions: tuple[Direction, ...] = ("forward", "backward")

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability[0] != 9:
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, not sm_90")
        if spec.dtype == "float64":
            return Verdict(False, "float64 is not for these tensor cores")
        wide = spec.dtype == "float32"
        most = sm90_float32.MAX_DIM if wide else MAX_DIM
        if max(spec.head_dim, spec.head_dim_v) > most:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {most}")
        if parts(spec) > 1 and spec.head_dim < LEAST_SPLIT:
            return Verdict(False, f"float32 of head dim {spec.head_dim}, under {LEAST_SPLIT}, is exacter without terms")
        if wide and spec.head_dim_v % 4:
            return Verdict(False, f"rows of head dim {spec.head_dim_v} are not whole 16 bytes")
        if not wide and (spec.head_dim % 8 or spec.head_dim_v % 8):
            return Verdict(False, f"rows of head dims {spec.head_dim} and {spec.head_dim_v} are not whole 16 bytes")
        if direction == "backward":
            return Verdict(True)
        rows = problem.n_q * spec.group
        if rows <= FEW_ROWS:
            return Verdict(False, f"{rows} rows share keys, most of a tile would be empty")
        items = -(-rows // forward_tile(problem).block_q) * problem.heads_kv * problem.batch
        if 2 * items <= device.sms and problem.n_k >= MANY_KEYS:
            return Verdict(False, f"{items} tiles of rows on {device.sms} multiprocessors, the keys should be split")
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        if direction == "backward" and problem.spec.dtype == "float32":
            return [sm90_float32.backward_tile(problem.spec)]
        if direction == "backward":
            return list(backward_candidates(problem.spec, device))
        return list(forward_candidates(problem, device))

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Pass:
        if direction == "backward" and problem.spec.dtype == "float32":
            return sm90_float32.Sm90Float32Backward(problem, device)
        if direction == "backward":
            found, why = tile_of(Sm90BackwardTile, row, lambda x: x.fits(problem.spec, device))
            return Sm90Backward(problem, device, found, why if found else "; ".join(filter(None, (_OWN, why))))
        tile, why = tile_of(Sm90Tile, row, lambda x: x.fits(problem.spec, device))
        return Sm90Forward(problem, device, tile, why if tile else "; ".join(filter(None, (_OWN, why))))

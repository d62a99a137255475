"""The generation for tensor cores by mma.sync, from Ampere on: kernels/sm80_*.cu."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler, modification
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Generation, tile_of
from ..cuda_common.l2_swizzle import bytes_of_keys, heads_per_l2_group
from ..cuda_common.launch import check_grid
from ..cuda_common.params import AT
from ..cuda_common.sm80_bwd_launch import OrderedBackward
from . import specialise

MAX_DIM = 256
LEAST_SPLIT = 16  # products of a sum, for what splitting float32 leaves out to average out
_LIST = 4 * 512  # bytes of kernels/sm80_work.cuh: TileList
_CACHED = 24_000_000  # bytes of keys and values that blocks work at together
_NUM_SPLITS, _HEADS_PER_L2_GROUP = AT["num_splits"], AT["heads_per_l2_group"]
_OWN = "measured on an H200"


def padded(dim: int, granule: int = 16) -> int:
    """Columns of a row in shared memory that hold numbers."""
    return -(-dim // granule) * granule


def pitch(dim: int, itemsize: int, granule: int = 16, apart: bool = False) -> int:
    """Bytes from a row in shared memory to the next; apart: PADDED of kernels/sm80.cuh."""
    return padded(dim, granule) * itemsize + 16 * apart


def terms(spec: AttentionSpec) -> int:
    """Products of TF32 numbers that make one of float32: kernels/sm80.cuh."""
    return 1 if spec.precision == "tf32" else 3


def _of_scores(spec: AttentionSpec) -> dict[str, int]:
    """What kernels/sm80_form.cuh asks for, and how exact functions in a score modification are."""
    positions = modification.positions(spec)
    near = spec.score is not None and positions != "any"
    return {
        "FAST_MATH": ITEMSIZE[spec.dtype] == 2, "POSITIONS": modification.POSITIONS.index(positions),
        "FAR": modification.NEAR if near else 2**31 - 1,
    }  # fmt: skip


@dataclass(frozen=True)
class Sm80Tile:
    """A tile of the forward pass, the warps that share it, how many tiles of keys are in shared memory at once, and
    how many blocks there are for each place on the device where keys are split.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int = 2
    warps_k: int = 1  # warps that share rows
    waves: int = 1

    def __post_init__(self) -> None:
        rows, keys = 16 * self.warps // self.warps_k, 16 * self.warps_k
        if self.block_q % rows or self.block_k % keys or self.stages < 1:
            raise ValueError(f"{self=}: block_q is a multiple of {rows}, block_k of {keys}, stages are one or more")

    @property
    def granule(self) -> int:
        """What head dims are padded to, so that warps share them evenly."""
        return 16 * self.warps_k

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block: kernels/sm80_forward.cu."""
        size = ITEMSIZE[spec.dtype]
        q, v = (pitch(dim, size, self.granule, size == 4) for dim in (spec.head_dim, spec.head_dim_v))
        told = self.block_q * (self.block_k * size + 16 + 4 * self.warps_k) if self.warps_k > 1 else 0
        return self.block_q * (q + 32 * self.warps_k) + self.stages * self.block_k * (q + v) + _LIST + told

    def resident(self, spec: AttentionSpec, device: Device) -> int:
        """Blocks that a multiprocessor holds at once, if each may have 255 registers a thread."""
        shared = (device.shared_per_sm + 1024) // (self.shared_memory(spec) + 1024)
        return min(shared, device.registers_per_sm // (256 * 32 * self.warps))

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether there is the memory, and registers for what a modification needs beside a lane's scores."""
        scores = self.block_q * self.block_k // (32 * self.warps)
        return self.resident(spec, device) > 0 and (scores <= 64 or spec.score is None)

    def constants(self, spec: AttentionSpec, device: Device, pack: int = 1, split: bool = False) -> dict[str, int]:
        """What kernels/sm80_forward.cu asks for."""
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.warps, "WARPS_K": self.warps_k,
            "STAGES": self.stages, "GRANULE": self.granule, "PACK_GQA": pack, "SPLIT": split, "TERMS": terms(spec),
            "PADDED": ITEMSIZE[spec.dtype] == 4, **_of_scores(spec),
            "BLOCKS_PER_SM": max(1, min(self.resident(spec, device), 8 // self.warps)),
        }  # fmt: skip


def forward_tile(spec: AttentionSpec, rows: int, device: Device) -> Sm80Tile:
    """The largest that does well on an H200, or fits where there is less shared memory."""
    dim = max(padded(spec.head_dim), padded(spec.head_dim_v))
    if ITEMSIZE[spec.dtype] == 4:
        large = [Sm80Tile(64, 32, 4)] * (dim <= 64) + [Sm80Tile(64, 16, 4)]
        small = [Sm80Tile(16, 32, 1), Sm80Tile(16, 16, 1)]
    else:
        wide = [Sm80Tile(64, 64, 4, 1)] * (dim > 192) + [Sm80Tile(128, 64, 8, warps_k=2)]
        usual = [tile for tile in (Sm80Tile(128, 128, 4),) if dim <= 64 and tile.resident(spec, device) > 1]
        large = wide if dim > 128 else [*usual, Sm80Tile(128, 64, 4)]
        large += [Sm80Tile(64, keys, 4) for keys in (64, 32, 16)]
        small = [Sm80Tile(16, 128, 4, 3, 4), Sm80Tile(16, 64, 2, 3, 2)]
        small += [Sm80Tile(16, keys, 1) for keys in (64, 32, 16)]
    fitting = [tile for tile in (small if rows <= 16 else large) if tile.fits(spec, device)]
    if rows <= 64:
        fitting = [tile for tile in fitting if tile.block_q <= 64] or fitting
    return fitting[0]


class Sm80Forward:
    """The forward pass; where there are few rows, split along the keys and joined again."""

    def __init__(self, problem: Problem, device: Device, tile: Sm80Tile | None = None, why: str = _OWN) -> None:
        spec = problem.spec
        self.pack = spec.group if problem.n_q < 128 else 1
        self.tile = tile or forward_tile(spec, problem.n_q * self.pack, device)
        self.slots = device.sms * self.tile.resident(spec, device)
        self.split = 2 * self._blocks(problem.batch, problem.heads, problem.n_q) <= self.slots and (
            problem.n_k >= 8 * self.tile.block_k
        )
        self.why = why + ("; split along the keys" if self.split else "")
        constants = self.tile.constants(spec, device, self.pack, self.split)
        library = specialise.library("sm80/forward", spec, tuple(constants.items()), compiler.target(device.capability))
        self.libraries = [library]
        self._kernel = library.kernel("sm80_forward", device, self.tile.shared_memory(spec))
        self._combine = library.kernel("combine", device)
        self._early, self._threads = device.supports_pdl, 32 * self.tile.warps

    def _blocks(self, batch: int, heads: int, n_q: int) -> int:
        return -(-n_q * self.pack // self.tile.block_q) * (heads // self.pack) * batch

    def shaped(self, arguments: Arguments) -> tuple[int, int]:
        """Blocks, and in how many parts keys are taken or how many heads are worked at together."""
        blocks = self._blocks(arguments.batch, arguments.heads, arguments.n_q)
        rows = arguments.batch * arguments.heads * arguments.n_q
        check_grid(blocks, rows if self.split else 0)
        if self.split and blocks:
            most = max(1, -(-arguments.n_k // self.tile.block_k) // 2)
            parts = max(1, min(self.tile.waves * self.slots // blocks, most))
            return blocks * parts, parts
        heads = arguments.batch * (arguments.heads // self.pack)
        return blocks, heads_per_l2_group(heads, _CACHED // bytes_of_keys(arguments))

    def run(self, arguments: Arguments, stream: int) -> None:
        blocks, splits = arguments.known(self, self.shaped)
        if not blocks:
            return
        arguments.words[_NUM_SPLITS if self.split else _HEADS_PER_L2_GROUP] = splits
        if not self.split:
            self._kernel.launch(blocks, self._threads, arguments, stream)
            return
        held = arguments.allocate_partials(splits)
        self._kernel.launch(blocks, self._threads, arguments, stream, self._early)
        rows, columns = arguments.batch * arguments.heads * arguments.n_q, padded(arguments.spec.head_dim_v, 32)
        groups = 8 if columns <= 64 else 512 // columns
        self._combine.launch(rows, columns * groups, arguments, stream, self._early)
        del held


@dataclass(frozen=True)
class Sm80BackwardTile:
    """A tile of the backward pass, and how its warps share each product: kernels/sm80_backward.cu."""

    block_q: int
    block_k: int
    warps: int
    warps_s: int
    warps_kv: int
    warps_q: int
    blocks: int = 1

    def __post_init__(self) -> None:
        across, rest = self.block_k * self.warps_s, 16 * self.warps
        rows = self.block_q % (16 * self.warps_s) or self.block_q % (16 * self.warps_q)
        if rows or self.block_k % (16 * self.warps_kv) or across % rest or self.warps % self.warps_s:
            raise ValueError(f"{self=}: warps share rows and keys in groups of 16")

    @property
    def granule(self) -> int:
        """What head dims are padded to, so that warps share them evenly."""
        return 16 * max(self.warps // self.warps_kv, self.warps // self.warps_q)

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block."""
        size = ITEMSIZE[spec.dtype]
        rows = sum(pitch(dim, size, self.granule, _apart(spec)) for dim in (spec.head_dim, spec.head_dim_v))
        pairs = 2 * self.block_q * (self.block_k * size + 16)
        return self.block_k * rows + 2 * self.block_q * (rows + 8) + pairs + _LIST

    def constants(self, spec: AttentionSpec, ordered: bool = True) -> dict[str, int]:
        """What kernels/sm80_backward.cu asks for."""
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.warps, "WARPS_S": self.warps_s,
            "WARPS_KV": self.warps_kv, "WARPS_Q": self.warps_q, "GRANULE": self.granule, "ORDERED": ordered,
            "TERMS": terms(spec), "PADDED": _apart(spec), "BLOCKS_PER_SM": self.blocks, **_of_scores(spec),
        }  # fmt: skip


def _apart(spec: AttentionSpec) -> bool:
    """Whether rows of the backward pass are padded: 1 % faster on an H200 with 256 columns, slower with fewer."""
    return ITEMSIZE[spec.dtype] == 4 or max(spec.head_dim, spec.head_dim_v) > 128


def backward_tile(spec: AttentionSpec, device: Device) -> Sm80BackwardTile | None:
    """The largest that does well on an H200, or fits where there is less shared memory; None: none fits."""
    dim = max(spec.head_dim, spec.head_dim_v)
    across = 2 if spec.head_dim % 64 == 0 else 4  # warps along the queries of dQ
    if ITEMSIZE[spec.dtype] == 4:
        tiles = [Sm80BackwardTile(64, 64, 8, 4, 4, 4)] * (dim <= 64) + [Sm80BackwardTile(32, 64, 8, 2, 4, 2)]
    elif dim <= 64:
        tiles = [Sm80BackwardTile(128, 128, 8, 4, 4, 4)]
    elif dim <= 128:
        tiles = [Sm80BackwardTile(64, 128, 8, 2, 4, across)]
    else:
        tiles = [Sm80BackwardTile(64, 64, 8, 4, across, across)]
    for small in ((32, 64, 8, 2, 4, 2), (32, 64, 4, 2, 2, 2), (32, 32, 4, 2, 2, 2), (16, 32, 2, 1, 1, 1)):
        tiles.append(Sm80BackwardTile(*small))
    return next((tile for tile in tiles if tile.shared_memory(spec) <= device.shared_per_block), None)


class Sm80Backward(OrderedBackward):
    """The backward pass."""

    def __init__(
        self, problem: Problem, device: Device, tile: Sm80BackwardTile | None = None, ordered: bool = True,
        why: str = _OWN,
    ) -> None:  # fmt: skip
        spec = problem.spec
        chosen = tile or backward_tile(spec, device)
        assert chosen is not None, "supports() was not asked"
        columns = padded(spec.head_dim, chosen.granule)
        super().__init__(specialise.library, spec, device, chosen, why, chosen.constants(spec, ordered), columns)


def forward_candidates(spec: AttentionSpec, rows: int, device: Device) -> list[Sm80Tile]:
    """Tiles worth trying for so many rows that share keys, the one of `forward_tile` first."""
    first = forward_tile(spec, rows, device)
    numbers: list[tuple[int, ...]]
    if rows <= 16:
        numbers = [(16, keys, *rest) for keys in (32, 64, 128) for rest in ((1,), (2, 3, 2), (4, 2, 4), (4, 3, 4))]
        numbers += [(*vars(first).values(),)[:5] + (waves,) for waves in (2, 3)]
    elif ITEMSIZE[spec.dtype] == 4:
        numbers = [(64, 32, 4), (64, 16, 4), (64, 64, 4), (128, 32, 8), (128, 16, 8), (128, 32, 8, 2, 2), (32, 32, 2)]
    else:
        numbers = [
            (128, 64, 4), (128, 64, 8), (128, 32, 4), (128, 128, 8), (128, 64, 8, 2, 2), (128, 64, 4, 3), (64, 64, 4),
            (64, 128, 4), (64, 32, 4), (64, 64, 4, 3),
        ]  # fmt: skip
        wide = max(spec.head_dim, spec.head_dim_v) > 128
        numbers += [(64, 64, 4, 1), (64, 64, 4, 1, 2)] if wide else [(128, 128, 4)]
    tiles = []
    for each in numbers:
        with contextlib.suppress(ValueError):
            tiles.append(Sm80Tile(*each))
    return list(dict.fromkeys([first, *(tile for tile in tiles if tile.fits(spec, device))]))


def backward_candidates(spec: AttentionSpec, device: Device) -> list[Sm80BackwardTile]:
    """Tiles worth trying, the one of `backward_tile` first."""
    first = backward_tile(spec, device)
    across = 2 if spec.head_dim % 64 == 0 else 4
    numbers = [
        (128, 128, 8, 4, 4, 4), (64, 128, 8, 2, 4, across), (64, 128, 8, 4, 4, 4), (64, 64, 8, 4, across, across),
        (32, 128, 8, 2, 4, 2), (64, 64, 4, 2, 2, 2), (32, 64, 8, 2, 4, 2), (32, 64, 4, 2, 2, 2),
    ]  # fmt: skip
    tiles = [first, *(Sm80BackwardTile(*each) for each in numbers)] if first else []
    return list(dict.fromkeys(tile for tile in tiles if tile.shared_memory(spec) <= device.shared_per_block))


class Sm80(Generation):
    """Kernels for tensor cores with float16, bfloat16 and TF32."""

    name = "sm80"
    directions: tuple[Direction, ...] = ("forward", "backward")

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability < (8, 0):
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, before sm_80")
        if spec.dtype == "float64":
            return Verdict(False, "float64 is not for these tensor cores")
        if max(spec.head_dim, spec.head_dim_v) > MAX_DIM:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {MAX_DIM}")
        if terms(spec) > 1 and spec.dtype == "float32" and spec.head_dim < LEAST_SPLIT:
            return Verdict(False, f"float32 of head dim {spec.head_dim}, under {LEAST_SPLIT}, is exacter without TF32")
        if direction == "backward" and backward_tile(spec, device) is None:
            return Verdict(False, f"no tile of head dims {spec.head_dim} and {spec.head_dim_v} fits in shared memory")
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        rows = problem.n_q * problem.spec.group if problem.n_q < 128 else problem.n_q
        found: list[Any]
        if direction == "forward":
            found = forward_candidates(problem.spec, rows, device)
        else:
            found = backward_candidates(problem.spec, device)
        return found

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Sm80Forward | Sm80Backward:
        spec = problem.spec
        if direction == "forward":
            tile, why = tile_of(Sm80Tile, row, lambda x: x.fits(spec, device), _OWN)
            return Sm80Forward(problem, device, tile, why=why)
        found, why = tile_of(Sm80BackwardTile, row, lambda x: x.shared_memory(spec) <= device.shared_per_block, _OWN)
        return Sm80Backward(problem, device, found, why=why)

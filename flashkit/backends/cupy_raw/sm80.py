"""The generation for tensor cores by mma.sync, from Ampere on: kernels/sm80/."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Self

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..base import EXTRAS
from ..cuda_common import modification
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Generation, Kind, Pass, TileTables
from ..cuda_common.launch import Kernel, check_grid
from ..cuda_common.memory import SmemLayout, SmemTile, bytes_of_keys, heads_per_l2_group, stage_constants
from ..cuda_common.params import AT
from ..cuda_common.sm80_bwd_launch import MmaBackward
from ..cuda_common.sm90_launch import FEW_ROWS
from . import sm80_jvp

MAX_DIM = 256
MIN_TF32X3_DIM = 16  # terms of a sum that average out what TF32x3 leaves out
_TILE_LIST = 4 * 512  # bytes of TileList: kernels/sm80/tile_scheduler.cuh
_L2_BYTES = 24_000_000  # of K and V of the heads that CTAs work on at the same time
_NUM_SPLITS, _HEADS_PER_L2_GROUP = AT["num_splits"], AT["heads_per_l2_group"]
_COMBINE_PREFETCH, _COMBINE_THREADS = 8, 1024  # kernels/sm80/combine.cuh
_COMBINE_MAX_CTAS = 1024  # of rows that several CTAs share: with more there are enough CTAs anyway


def padded(dim: int, granule: int = 16) -> int:
    """Columns of a row in shared memory, without padding between rows."""
    return -(-dim // granule) * granule


def pitch(dim: int, itemsize: int, granule: int = 16, pad: bool = False) -> int:
    """Bytes from a row in shared memory to the next. pad: PADDED of kernels/sm80/layout.cuh."""
    return padded(dim, granule) * itemsize + 16 * pad


def tf32_terms(spec: AttentionSpec) -> int:
    """Products of TF32 per product of float32: kernels/sm80/mma.cuh."""
    return 1 if spec.precision == "tf32" else 3


def _score_constants(spec: AttentionSpec) -> dict[str, int]:
    """Constants of kernels/sm80/affine_score.cuh, and the accuracy of functions in a score modification."""
    positions = modification.positions(spec)
    near = spec.score is not None and positions != "any"
    return {
        "FAST_MATH": ITEMSIZE[spec.dtype] == 2, "POSITIONS": modification.POSITIONS.index(positions),
        "FAR": modification.NEAR if near else 2**31 - 1,
    }  # fmt: skip


@dataclass(frozen=True)
class Sm80Tile(SmemTile):
    """A tile of the forward pass: its warps, stages of K and V, and waves of CTAs that split-KV makes."""

    block_q: int
    block_k: int
    warps: int
    stages: int = 2
    warps_k: int = 1  # warps that share rows
    waves: int = 1

    def __post_init__(self) -> None:
        if self.warps not in (1, 2, 4, 8) or self.warps % self.warps_k:
            raise ValueError(f"{self=}: expected 1, 2, 4 or 8 warps, and warps_k a divisor of them")
        rows, keys = 16 * self.warps // self.warps_k, 16 * self.warps_k
        if self.block_q % rows or self.block_k % keys or self.stages < 1 or self.waves < 1:
            raise ValueError(
                f"{self=}: expected block_q a multiple of {rows}, block_k of {keys}, one stage and wave or more"
            )

    @property
    def granule(self) -> int:
        """The multiple that head dims are padded to, so that warps share them evenly."""
        return 16 * self.warps_k

    def stage(self, spec: AttentionSpec) -> SmemLayout:
        """A stage of K and V."""
        size = ITEMSIZE[spec.dtype]
        k, v = (pitch(dim, size, self.granule, size == 4) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(STAGE_K=self.block_k * k, STAGE_V=self.block_k * v)

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA. Warps that share rows exchange P, row maxima and row sums."""
        size, shared_rows = ITEMSIZE[spec.dtype], self.warps_k > 1
        return SmemLayout(
            Q=self.block_q * pitch(spec.head_dim, size, self.granule, size == 4),
            KV=self.stages * self.stage(spec).bytes,
            TILE_LIST=_TILE_LIST,
            TILE_ROWS=self.looked_up(spec) * self.block_k // self.page_run(spec) * 16,
            P=self.block_q * (self.block_k * size + 16) * shared_rows,
            ROW_REDUCE=self.block_q * self.warps_k * 4 * shared_rows,
            ROW_STATE=self.block_q * self.warps_k * (48 if spec.stats else 32),
        )

    def looked_up(self, spec: AttentionSpec) -> int:
        """Key tiles whose rows are looked up at a time: two that are copied and the next, or as many as stages."""
        return max(3, self.stages) if spec.paged else 0

    def page_run(self, spec: AttentionSpec) -> int:
        """Keys of a page that are looked up at once: a CTA's copies at a time are of one run, or each is looked up."""
        run, threads = math.gcd(spec.page_run, self.block_k), 32 * self.warps
        for dim in (spec.head_dim, spec.head_dim_v):
            across = min(padded(dim, self.granule) * ITEMSIZE[spec.dtype] // 16, threads)
            if threads % across or run % (threads // across):
                return 1
        return run

    def resident(self, spec: AttentionSpec, device: Device) -> int:
        """Resident CTAs per SM with 255 registers a thread."""
        shared = (device.shared_per_sm + 1024) // (self.shared_memory(spec) + 1024)
        return min(shared, device.registers_per_sm // (256 * 32 * self.warps))

    def fitted(self, spec: AttentionSpec, device: Device, direction: Direction, ctas_per_sm: int = 0) -> Self | None:
        return self if self.resident(spec, device) >= ctas_per_sm and self.fits(spec, device) else None

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether shared memory suffices, and registers for the scores of a lane and a modification."""
        scores = self.block_q * self.block_k // (32 * self.warps)
        return self.resident(spec, device) > 0 and scores <= (128 if spec.score is None else 64)

    def constants(
        self, spec: AttentionSpec, device: Device, pack: int = 1, split: bool = False, split_tiles: int = 0
    ) -> dict[str, int]:
        """Constants of the head of kernels/sm80/forward.cu."""
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.warps, "WARPS_K": self.warps_k,
            "STAGES": self.stages, "LOOKED_UP": self.looked_up(spec), "GRANULE": self.granule, "PACK_GQA": pack,
            "SPLIT_KV": split, "SPLIT_TILES": split_tiles, "PAGE_RUN": self.page_run(spec),
            "TF32_TERMS": tf32_terms(spec), "PADDED": ITEMSIZE[spec.dtype] == 4, **_score_constants(spec),
            **self.smem(spec).constants(), **stage_constants(self.stage(spec)),
            "BLOCKS_PER_SM": max(1, min(self.resident(spec, device), 8 // self.warps)),
        }  # fmt: skip


def launch_combine(kernel: Kernel, arguments: Arguments, stream: int, early: bool) -> None:
    """Enqueue kernels/sm80/combine.cuh, with as many groups of threads for each row as make few rounds."""
    rows, dim_v = arguments.batch * arguments.heads * arguments.n_q, arguments.spec.head_dim_v
    columns = 4 if dim_v % 4 == 0 and dim_v > 64 else 2 if dim_v % 2 == 0 else 1  # COMBINE_VEC
    lanes = padded(-(-dim_v // columns), 32)
    splits, ctas = arguments.words[_NUM_SPLITS], rows
    if splits > _COMBINE_PREFETCH and rows * lanes // 32 <= _COMBINE_MAX_CTAS:
        ctas, lanes = rows * lanes // 32, 32
    groups = min(-(-splits // _COMBINE_PREFETCH), _COMBINE_THREADS // lanes)
    if arguments.spec.deterministic:  # the order of additions depends on the number of groups
        groups = min(_COMBINE_PREFETCH, _COMBINE_THREADS // padded(-(-dim_v // columns), 32))
    kernel.launch(ctas, lanes * groups, arguments, stream, early)


DETERMINISTIC_SPLIT = 512
"""Keys of a split where few rows share keys and the result is to be deterministic. A result then depends on its own
sequence alone: neither the number of splits of others nor its own tile.
"""


LONG_KEYS = 8192
"""Keys in pages beyond which sequences are halved where CTAs share an SM: they may differ in length, and a long one,
alone at the end, has less in flight than the SM can take.
"""


class Sm80Forward(Pass):
    """The forward pass; with few query rows by split-KV and a combine kernel."""

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        spec, device, tile = self.spec, self.device, self.tile
        self.pack = spec.group if problem.n_q < 128 and not spec.packed else 1
        self.slots = device.sms * tile.resident(spec, device)
        blocks = -(-problem.n_q * self.pack // tile.block_q) * (problem.heads // self.pack) * problem.batch
        # Statistics are of whole rows.
        few = problem.n_q * spec.group <= FEW_ROWS and not (spec.stats or spec.packed)
        self.split_tiles = max(1, DETERMINISTIC_SPLIT // tile.block_k) if few and spec.deterministic else 0
        self._halves = few and spec.paged and self.slots > device.sms
        self.split = 2 * blocks <= self.slots and problem.n_k >= 8 * tile.block_k
        self.split &= not (spec.packed or spec.stats)
        self.split |= self.split_tiles > 0 or (self._halves and problem.n_k > LONG_KEYS)
        self.why += "; split along the keys" if self.split else ""
        library = self.compiled("sm80/forward", tile.constants(spec, device, self.pack, self.split, self.split_tiles))
        self._kernel = library.kernel("sm80_forward", device, tile.shared_memory(spec))
        self._combine = library.kernel("combine", device)
        self._early_launch, self._threads = device.supports_pdl, 32 * tile.warps

    def geometry(self, arguments: Arguments) -> tuple[int, int]:
        """CTAs, and the number of splits or, without split-KV, of heads per L2 group."""
        tiles = arguments.q_tiles(self.tile.block_q, self.pack)
        blocks = tiles * (arguments.heads // self.pack) * arguments.entries
        rows = arguments.batch * arguments.heads * arguments.n_q
        check_grid(blocks, rows if self.split else 0)
        if self.split and blocks:
            key_tiles = -(-arguments.n_k // self.tile.block_k)
            splits = max(1, min(self.tile.waves * self.slots // blocks, key_tiles // 2))
            if self._halves and arguments.n_k > LONG_KEYS:
                splits = max(splits, 2)
            if self.split_tiles:
                splits = max(1, -(-key_tiles // self.split_tiles))
                check_grid(blocks * splits)
            return blocks * splits, splits
        heads = arguments.entries * (arguments.heads // self.pack)
        return blocks, heads_per_l2_group(heads, _L2_BYTES // bytes_of_keys(arguments))

    def launch(self, arguments: Arguments, geometry: tuple[int, int], stream: int) -> None:
        blocks, count = geometry
        arguments.words[_NUM_SPLITS if self.split else _HEADS_PER_L2_GROUP] = count
        if not self.split:
            self._kernel.launch(blocks, self._threads, arguments, stream)
            return
        held = arguments.allocate_partials(count)
        self._kernel.launch(blocks, self._threads, arguments, stream, self._early_launch)
        launch_combine(self._combine, arguments, stream, self._early_launch)
        del held


@dataclass(frozen=True)
class Sm80BackwardTile(SmemTile):
    """A tile of the backward pass, and how its warps share each product: kernels/sm80/backward.cu."""

    block_q: int
    block_k: int
    warps: int
    warps_s: int
    warps_kv: int
    warps_q: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.warps not in (1, 2, 4, 8) or not 1 <= self.blocks <= 8:
            raise ValueError(f"{self=}: expected 1, 2, 4 or 8 warps and one to eight blocks")
        across, rest = self.block_k * self.warps_s, 16 * self.warps
        rows = self.block_q % (16 * self.warps_s) or self.block_q % (16 * self.warps_q)
        if rows or self.block_k % (16 * self.warps_kv) or across % rest or self.warps % self.warps_s:
            raise ValueError(f"{self=}: expected warps that share rows and keys in groups of 16")

    @property
    def granule(self) -> int:
        """The multiple that head dims are padded to, so that warps share them evenly."""
        return 16 * max(self.warps // self.warps_kv, self.warps // self.warps_q)

    def stage(self, spec: AttentionSpec) -> SmemLayout:
        """A stage of Q and dO, with bwd_lse and delta of their rows."""
        q, dout = (self.block_q * self._pitch(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(STAGE_Q=q, STAGE_DOUT=dout, STAGE_ROWS=self.block_q * 8)

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA."""
        fragments = self.block_q * (self.block_k * ITEMSIZE[spec.dtype] + 16)
        k, v = (self.block_k * self._pitch(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(K=k, V=v, QDO=2 * self.stage(spec).bytes, P=fragments, DS=fragments, TILE_LIST=_TILE_LIST)

    def _pitch(self, dim: int, spec: AttentionSpec) -> int:
        return pitch(dim, ITEMSIZE[spec.dtype], self.granule, _pad_rows(spec))

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether shared memory suffices, and registers for the scores of a lane."""
        scores = self.block_q * self.block_k // (32 * self.warps)
        return self.shared_memory(spec) <= device.shared_per_block and scores <= 64

    def constants(self, spec: AttentionSpec) -> dict[str, int]:
        """Constants of the head of kernels/sm80/backward.cu."""
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.warps, "WARPS_S": self.warps_s,
            "WARPS_KV": self.warps_kv, "WARPS_Q": self.warps_q, "GRANULE": self.granule,
            "PAGE_RUN": 1, "TF32_TERMS": tf32_terms(spec), "PADDED": _pad_rows(spec), "BLOCKS_PER_SM": self.blocks,
            **_score_constants(spec), **self.smem(spec).constants(), **stage_constants(self.stage(spec)),
        }  # fmt: skip


def _pad_rows(spec: AttentionSpec) -> bool:
    """Whether rows in shared memory are padded instead of swizzled: where registers for addresses are short."""
    return ITEMSIZE[spec.dtype] == 4 or max(spec.head_dim, spec.head_dim_v) > 128


class Sm80Backward(MmaBackward):
    """The backward pass."""

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        columns = padded(problem.spec.head_dim, choice.tile.granule)
        super().__init__(generation, problem, choice, tables, choice.tile.constants(problem.spec), columns)


def forward_tiles(problem: Problem, device: Device) -> list[Sm80Tile]:
    """Tiles worth trying for this number of rows that share keys, of which some may not fit."""
    spec, shapes = problem.spec, list[tuple[int, ...]]()
    if problem.n_q * (spec.group if problem.n_q < 128 else 1) <= 16:
        shapes = [(16, keys, *rest) for keys in (32, 64, 128) for rest in ((1,), (2, 3, 2), (4, 2, 4), (4, 3, 4))]
        shapes += [(16, *rest, waves) for rest in ((128, 4, 3, 4), (64, 2, 3, 2)) for waves in (1, 2, 3)]
    elif ITEMSIZE[spec.dtype] == 4:
        shapes = [(64, 32, 4), (64, 16, 4), (64, 64, 4), (128, 32, 8), (128, 16, 8), (128, 32, 8, 2, 2), (32, 32, 2)]
    else:
        shapes = [
            (128, 64, 4), (128, 64, 8), (128, 32, 4), (128, 128, 8), (128, 64, 8, 2, 2), (128, 64, 4, 3), (64, 64, 4),
            (64, 128, 4), (64, 32, 4), (64, 64, 4, 3),
        ]  # fmt: skip
        wide = max(spec.head_dim, spec.head_dim_v) > 128
        shapes += [(64, 64, 4, 1), (64, 64, 4, 1, 2)] if wide else [(128, 128, 4)]
    tiles = []
    for each in shapes:
        with contextlib.suppress(ValueError):
            tiles.append(Sm80Tile(*each))
    return tiles


def backward_tiles(problem: Problem, device: Device) -> list[Sm80BackwardTile]:
    """Tiles worth trying, of which some may not fit."""
    across = 2 if problem.spec.head_dim % 64 == 0 else 4
    shapes = [
        (128, 128, 8, 4, 4, 4), (64, 128, 8, 2, 4, across), (64, 128, 8, 4, 4, 4), (64, 64, 8, 4, across, across),
        (32, 128, 8, 2, 4, 2), (64, 64, 4, 2, 2, 2), (32, 64, 8, 2, 4, 2), (32, 64, 4, 2, 2, 2), (32, 32, 4, 2, 2, 2),
        (16, 32, 2, 1, 1, 1),
    ]  # fmt: skip
    return [Sm80BackwardTile(*each) for each in shapes]


class Sm80(Generation):
    """Kernels for tensor cores: float16, bfloat16, and float32 by TF32 or TF32x3."""

    name = "sm80"
    takes = EXTRAS.keys() - {"fp8", "orders_sums"}

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability < (8, 0):
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, before sm_80")
        if spec.dtype == "float64":
            return Verdict(False, "mma.sync kernels take no float64")
        if spec.jvp and direction == "forward":
            return sm80_jvp.supports(spec)
        if max(spec.head_dim, spec.head_dim_v) > MAX_DIM:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {MAX_DIM}")
        if tf32_terms(spec) > 1 and spec.dtype == "float32" and spec.head_dim < MIN_TF32X3_DIM:
            under = f"{spec.head_dim}, under {MIN_TF32X3_DIM},"
            return Verdict(False, f"float32 of head dim {under} is more accurate without TF32")
        return Verdict(True)

    def kind(self, problem: Problem, direction: Direction) -> Kind:
        if direction == "backward":
            return Kind(Sm80BackwardTile, Sm80Backward, backward_tiles)
        return sm80_jvp.KIND if problem.spec.jvp else Kind(Sm80Tile, Sm80Forward, forward_tiles)

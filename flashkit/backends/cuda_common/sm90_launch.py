"""Hopper's forward pass on the host, for both languages: its tiles and their shared memory, its launch, and the
problems that have too little work for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from ... import settings
from ...spec import AttentionSpec, Direction, Problem, Verdict
from . import modification
from .arguments import ROW_TENSORS, Arguments
from .device import Device
from .generation import Choice, Generation, Pass, TileTables, row_tiles
from .launch import TensorMap, check_grid
from .memory import SmemLayout, SmemTile, bytes_of_keys, heads_per_l2_group
from .modification import NOT_DENSE, Dense
from .params import AT
from .tensor_maps import Maps, TileCounters, maps_of, strides_fit

NUM_LISTS, LIST_CAPACITY, LIST_HEADER = 2, 224, 28
"""Lists of K/V tiles in shared memory, their entries, and the bytes before these: WorkTileList of
kernels/sm90/producer.cuh, kernels/sm90/pipeline.py.
"""

PARTS = (
    "Q", "K", "V", "BIAS", "MASK", "ONES", "Q_PIPE", "K_PIPE", "V_PIPE", "LIST_PIPE", "CLAIM", "OUT_READY",
    "TILE_DESCS", "WORK_TILES", "LISTS", "LIST_SEQS", "V_TILES", "SCALES", "AFFINE",
)  # fmt: skip
"""Of shared memory that the headers of the forward kernels name: kernels/sm90/layout.cuh. A kernel has some of them."""

SEQ_SLOT = 24
"""Bytes in shared memory that say where a packed sequence lies: kernels/sm90/pipeline.cuh."""
SWIZZLE_ROWS = 8
"""Rows after which the 128-byte swizzle repeats: a box of a multiple of them is swizzled as its tile is."""
FEW_ROWS = 64
MANY_KEYS = 4096
_L2_BYTES = 12_000_000  # of K and V that CTAs read at the same time, well within half of the L2 cache
_L2_BYTES_ARRAY_MASK = 9_000_000  # the same where the mask is read from arrays, so that CTAs read different tiles
_L2_GROUP, _TILE_COUNTER = AT["heads_per_l2_group"], AT["tile_counter"]
WATCHDOG = bool(settings.CUDA_WATCHDOG.read())
"""Whether a wait that takes too long stops the kernel: an aid to find deadlocks."""


def padded(dim: int) -> int:
    """Columns of a product: a multiple of 16."""
    return -(-dim // 16) * 16


def chunks(dim: int) -> int:
    """Chunks of 64 columns of a row in shared memory."""
    return -(-dim // 64)


@dataclass(frozen=True)
class ForwardTile(SmemTile):
    """A tile of the forward pass: `block_q` rows, 64 for each consumer warp group, and `block_k` keys.

    `stages` K/V tiles and `q_buffers` tiles of Q are in shared memory at the same time. `turns`: whether consumer warp
    groups ping-pong, that is issue their products in turn. `bias_bytes`, `mask_bytes`: of an element of a bias and of a
    mask whose tiles come with K, or 0.
    """

    block_q: int
    block_k: int
    stages: int = 2
    q_buffers: int = 2
    turns: int = 1
    bias_bytes: int = 0
    mask_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128, 192) or self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"{self=}: expected block_q 64, 128 or 192 and block_k a multiple of 16 up to 256")
        if self.stages < 2 or not 1 <= self.q_buffers <= 6:
            raise ValueError(f"{self=}: expected stages >= 2 and q_buffers 1 to 6")

    @property
    def warpgroups(self) -> int:
        return self.block_q // 64

    def fitted(self, spec: AttentionSpec, device: Device, direction: Direction, ctas_per_sm: int = 0) -> Self | None:
        """With as many of its buffers of Q as there is room for. With two the next Q waits for the O of the work tile
        before the last one, which is late for work tiles of one or two K/V tiles.
        """
        fewer = (replace(self, q_buffers=n) for n in range(self.q_buffers, 0, -1))
        return next((each for each in fewer if each.fits(spec, device)), None)

    def threads(self, spec: AttentionSpec) -> int:
        """Of a CTA."""
        return 128 * (self.warpgroups + 1)

    def lay_out(
        self, q: int, v: int, out: int, ones: int = 0, packed: bool = False, tangents: str = ""
    ) -> SmemLayout:  # fmt: skip
        """Tiles, barriers and lists. q, v, out: 128-byte chunks of a row; ones: chunks of ones behind V; tangents: of
        which of q, k and v there are.
        """
        smem, barriers = SmemLayout(), 16  # a full and an empty one
        seq = SEQ_SLOT if packed else 0
        smem.add("Q", 128 * self.q_buffers * self.block_q * max(q, out) * (1 + bool(tangents)))
        smem.add("K", 128 * self.stages * self.block_k * q * (1 + ("k" in tangents)))
        smem.add("V", 128 * self.stages * self.block_k * v * (1 + ("v" in tangents)))
        smem.add("ONES", 128 * self.block_k * ones)
        add_dense_tiles(smem, self, self.stages, self.block_q, self.block_k)
        smem.add("Q_PIPE", barriers * self.q_buffers)
        smem.add("K_PIPE", barriers * self.stages)
        smem.add("V_PIPE", barriers * self.stages)
        smem.add("LIST_PIPE", barriers * NUM_LISTS)
        smem.add("CLAIM", 8)
        smem.add("OUT_READY", 8 * self.warpgroups * self.q_buffers)
        smem.add("TILE_DESCS", 4 * self.stages)
        smem.add("WORK_TILES", (12 + seq) * self.q_buffers)
        smem.add("LISTS", NUM_LISTS * (LIST_HEADER + 4 * LIST_CAPACITY))
        smem.add("LIST_SEQS", NUM_LISTS * seq)
        return smem

    def source(self, spec: AttentionSpec, pack: int) -> tuple[Any, ...]:
        """Constants of the kernel, and generated functions if its language has them. pack: PACK_GQA."""
        raise NotImplementedError

    def registers(self, classifies: bool) -> tuple[int, int]:
        """Registers of a consumer thread and of a thread of warp group 0; together they fill the SM. `classifies`:
        whether the scheduler warp has a mask to classify tiles by.
        """
        if self.warpgroups == 3:
            return (160, 32)
        return (240, 24) if not classifies else (232, 40) if self.warpgroups == 2 else (240, 40)

    def common(self, spec: AttentionSpec, pack: int, classifies: bool) -> dict[str, int]:
        """Constants of the kernel's head in both languages."""
        consumer, producer = self.registers(classifies)
        return {
            "BLOCK_K": self.block_k, "MMA_WARPGROUPS": self.warpgroups, "STAGES": self.stages,
            "Q_BUFFERS": self.q_buffers, "BOX_ROWS": keys_of_a_box(spec, self.block_k),
            "PING_PONG": bool(self.turns) and self.warpgroups > 1, "PACK_GQA": pack, "CONSUMER_REGISTERS": consumer,
            "PRODUCER_REGISTERS": producer, "WATCHDOG": WATCHDOG,
            "NUM_LISTS": NUM_LISTS, "LIST_HEADER": LIST_HEADER, "LIST_CAPACITY": LIST_CAPACITY,
            **{f"AT_{name}": 0 for name in PARTS}, **self.smem(spec).constants(),
        }  # fmt: skip


def add_dense_tiles(smem: SmemLayout, tile: Any, stages: int, rows: int, keys: int) -> None:
    """Stages of tiles of the arrays that the tile has room for: kernels/sm90/dense_tiles.cuh."""
    for name, itemsize in ("BIAS", tile.bias_bytes), ("MASK", tile.mask_bytes):
        smem.add(name, stages * rows * 128 * -(-keys * itemsize // 128))


def staged(spec: AttentionSpec, dense: Dense, tiles: Sequence[Any], device: Device) -> tuple[Dense, Any]:
    """Those of the arrays whose tiles fit shared memory, and a tile with room for them: of as many arrays as possible,
    the first of `tiles` that fits; or no arrays and the first tile.
    """
    both, alone = [dense], [dense._replace(mask=None), dense._replace(bias=None)]
    for arrays in both + (alone if dense.bias and dense.mask else []):
        sizes = {"bias_bytes": arrays.bias.itemsize if arrays.bias else 0, "mask_bytes": int(arrays.mask is not None)}
        for tile in tiles if any(arrays) else ():
            larger = replace(tile, **sizes)
            if larger.fits(spec, device):
                return arrays, larger
    return NOT_DENSE, tiles[0]


def keys_of_a_box(spec: AttentionSpec, block_k: int) -> int:
    """Keys of a TMA box: of pages those that are known to lie together. A tile has a box at most for each lane of a
    warp.
    """
    return max(SWIZZLE_ROWS, math.gcd(spec.page_run, block_k)) if spec.paged else block_k


def work_enough(problem: Problem, device: Device) -> Verdict:
    """Whether there are enough rows to fill tiles, and enough tiles to be faster than older kernels that split keys."""
    rows, tiles = problem.n_q * problem.spec.group, row_tiles(problem)
    if rows <= FEW_ROWS:
        return Verdict(False, f"{rows} rows share keys, most of a tile would be empty")
    if 4 * tiles <= device.sms and problem.n_k >= MANY_KEYS:
        return Verdict(False, f"{tiles} tiles of 64 rows on {device.sms} multiprocessors, the keys should be split")
    return Verdict(True)


class LaunchGeometry(NamedTuple):
    """What a launch derives from the shapes and strides of its arrays."""

    ctas: int
    heads_per_l2_group: int
    maps: tuple[tuple[int, Maps], ...]
    """For each tensor that TMA moves as it lies: the index of its address in the arguments, and its maps."""


class Forward(Pass):
    """The forward pass. TMA moves the tensors `addressed` as they lie."""

    name = "sm90/forward"
    """Of the file of the kernel."""

    addressed: tuple[str, ...] = ROW_TENSORS

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        self.pack = self.packed(problem)
        library = self.compiled(self.name, *self.source())
        self._kernel = library.kernel(self.name.replace("/", "_"), self.device, self.tile.shared_memory(self.spec))
        self._counters, self._threads = TileCounters.of(self.device), self.tile.threads(self.spec)

    @staticmethod
    def packed(problem: Problem) -> int:
        """Query heads whose rows share a tile (PACK_GQA): all of a group where there are few queries."""
        group = problem.spec.group
        return group if problem.n_q <= 256 and 64 % group == 0 and not problem.spec.packed else 1

    def source(self) -> tuple[Any, ...]:
        """Constants of the kernel, and generated functions if its language has them."""
        return self.tile.source(self.spec, self.pack)

    def supports(self, arguments: Arguments) -> bool:
        """Whether the kernel supports arrays of these shapes and strides."""
        # A scale that is not positive would change the sign of a masked pair's -inf.
        rows = not arguments.spec.paged or arguments.words[AT["page"]] % SWIZZLE_ROWS == 0
        return bool(arguments.n_k) and arguments.positive_scale and rows and strides_fit(arguments, self.addressed)

    def boxes(self, arguments: Arguments) -> list[tuple[str, int, int, int]]:
        """For each tensor: its name, its columns, and the heads and rows of a TMA box."""
        spec, dim, dim_v = arguments.spec, arguments.spec.head_dim, arguments.spec.head_dim_v
        keys = keys_of_a_box(spec, self.tile.block_k)
        return [("q", dim, self.pack, 64), ("k", dim, 1, keys), ("v", dim_v, 1, keys), ("out", dim_v, self.pack, 64)]

    def maps(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> tuple[list[TensorMap], Any]:
        """Tensor maps of q, k, v and the output, and an object to be kept until the kernel is enqueued."""
        return [maps[arguments.words[at]] for at, maps in geometry.maps], None

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        """What the launch derives from shapes and strides, or None where the fallback is needed."""
        if not self.supports(arguments):
            return None
        spec = arguments.spec
        heads = arguments.entries * arguments.heads // self.pack
        work_tiles = arguments.q_tiles(self.tile.block_q, self.pack) * heads
        check_grid(work_tiles)
        maps = [(AT[box[0]], maps_of(arguments, *box)) for box in self.boxes(arguments) if box[0] in self.addressed]
        l2_bytes = _L2_BYTES_ARRAY_MASK if modification.looks_at_ranges(spec) else _L2_BYTES
        of_keys = spec.group if spec.packed else 1  # query heads that share them; batches were timed without
        group = heads_per_l2_group(heads, l2_bytes // bytes_of_keys(arguments) * of_keys)
        return LaunchGeometry(min(work_tiles, self.device.sms), group, tuple(maps))

    def launch(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> None:
        arguments.words[_L2_GROUP] = geometry.heads_per_l2_group
        arguments.words[_TILE_COUNTER] = self._counters.next(stream)
        maps, held = self.maps(arguments, geometry, stream)
        self._kernel.launch(geometry.ctas, self._threads, arguments.with_maps(maps), stream, pdl=True)
        del held

"""What kernels for Hopper are alike in, in whichever language: the forward pass's tiles, how it is launched, and which
problems have too little work for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from ...spec import AttentionSpec, Problem, Verdict
from . import modification
from .arguments import ROW_TENSORS, Arguments, addresses, aligned
from .device import MODELS, Device
from .fallback import Fallback
from .l2_swizzle import bytes_of_keys, heads_per_l2_group
from .launch import Library, TensorMap, check_grid
from .params import AT
from .tensor_maps import Maps, TileCounters, maps_of, strides_fit

FEW_ROWS = 64
MANY_KEYS = 1024
LIST = 28 + 4 * 224
"""Bytes of a list of tiles: Chunk of kernels/sm90_items.cuh, kernels/sm90_tile.py."""
_CACHED = 34_000_000  # bytes of keys and values that blocks work at together, well within the L2 cache
_CACHED_LOOKED_UP = 9_000_000  # where each block has tiles of its own: 2 % faster with a tenth of blocks at random
_SHARED = MODELS["sm_90a"].shared_per_block
SHORT = 1536  # queries: of fewer under a mask, tiles of 192 rows would mostly be empty
_TOGETHER, _TICKET = AT["heads_per_l2_group"], AT["tile_counter"]
CHOSEN = "chosen for an H200"
WATCHDOG = bool(int(os.environ.get("FLASHKIT_CUDA_WATCHDOG") or 0))
"""Whether a barrier that is waited for too long stops the kernel, to find mistakes in protocols."""


def padded(dim: int) -> int:
    """Columns that are multiplied."""
    return -(-dim // 16) * 16


def chunks(dim: int) -> int:
    """Chunks of 64 columns that a row takes in shared memory."""
    return -(-dim // 64)


@dataclass(frozen=True)
class ForwardTile:
    """A tile of the forward pass: rows, 64 for each warp group, and keys; how many tiles of keys and of rows are in
    shared memory at once; whether warp groups take turns at beginning products.
    """

    block_q: int
    block_k: int
    stages: int = 2
    q_buffers: int = 2
    turns: int = 1

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128, 192) or self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"{self=}: block_q is 64, 128 or 192, block_k a multiple of 16 up to 256")
        if self.stages < 2 or self.q_buffers not in (1, 2, 3):
            raise ValueError(f"{self=}: stages are two or more, q_buffers one to three")

    @property
    def groups(self) -> int:
        return self.block_q // 64

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def buffers(self, q: int, v: int, out: int) -> int:
        """Bytes of the tiles in shared memory, their barriers and lists; q, v, out: chunks of 128 bytes of a row."""
        rows = self.q_buffers * self.block_q * max(q, out) + self.stages * self.block_k * (q + v)
        return 128 * rows + (16 + 8 * self.groups + 12) * self.q_buffers + (32 + 4) * self.stages + 40 + 2 * LIST

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block."""
        raise NotImplementedError

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """In shared memory and, as far as sums and weights tell, in registers."""
        raise NotImplementedError

    def registers(self, finding: bool) -> tuple[int, int]:
        """Of a thread that multiplies and of one that loads; together they are what a multiprocessor has. finding:
        whether the latter have to find the tiles.
        """
        if self.groups == 3:
            return (160, 32)
        return (240, 24) if not finding else (232, 40) if self.groups == 2 else (240, 40)

    def common(self, spec: AttentionSpec, pack: int, finding: bool) -> dict[str, int]:
        """Constants of the kernel."""
        multiplying, loading = self.registers(finding)
        return {
            "BLOCK_K": self.block_k, "MMA_WARPGROUPS": self.groups, "STAGES": self.stages, "Q_BUFFERS": self.q_buffers,
            "PING_PONG": bool(self.turns) and self.groups > 1, "PACK_GQA": pack, "CONSUMER_REGISTERS": multiplying,
            "PRODUCER_REGISTERS": loading, "WATCHDOG": WATCHDOG, "HAS_LENGTHS": spec.kv_lengths,
            "SHARED_BYTES": self.shared_memory(spec),
        }  # fmt: skip


Tile = TypeVar("Tile", bound=ForwardTile)


def usual_tile(kind: type[Tile], problem: Problem, modified: bool) -> Tile:
    """What does well on an H200 with 16 bits. modified: whether what happens to scores takes many registers."""
    spec = problem.spec
    dim, dim_v = spec.head_dim, spec.head_dim_v
    if max(dim, dim_v) <= 64:  # of short sequences, masked, larger tiles waste more
        rows = 128 if modified or (spec.mask is not None and problem.n_q <= SHORT) else 192
        # Products are short here, and with two stages loads are late. Terms of float32 leave no room for three.
        return _buffered(kind(rows, 128, 2 if spec.dtype == "float32" else 3), spec)
    if max(dim, dim_v) <= 128:
        return _buffered(kind(128, 128), spec)
    if dim <= 192 and dim_v <= 128:
        return kind(128, 96)
    keys = 96 if max(dim, dim_v) <= 192 else 80 if spec.mask is None else 64
    return kind(128, keys, q_buffers=1)


def _buffered(tile: Tile, spec: AttentionSpec) -> Tile:
    """Three buffers of rows where there is room: of items with one or two tiles of keys the next rows come late with
    two, as the output before the last one has to leave first. 1.10 times as fast, causal with 256 tokens, 1.04 to 1.07
    with 512, 1.01 to 1.02 with 1024; with longer sequences, or 192 rows, as fast.
    """
    more = replace(tile, q_buffers=3)
    return more if tile.block_q <= 128 and more.shared_memory(spec) <= _SHARED else tile


def with_most_buffers(tile: Tile, spec: AttentionSpec, device: Device) -> list[Tile]:
    """The tile with as many buffers of rows as fit; nothing where none do."""
    some = (replace(tile, q_buffers=buffers) for buffers in (3, 2, 1))
    return [each for each in some if each.fits(spec, device)][:1]


def packed(problem: Problem) -> int:
    """Query heads whose rows share a tile: all of a group where there are few queries."""
    group = problem.spec.group
    return group if problem.n_q <= 256 and 64 % group == 0 else 1


def work_enough(problem: Problem, device: Device, block_q: int) -> Verdict:
    """Whether there are rows to fill tiles, and tiles to fill the device."""
    rows = problem.n_q * problem.spec.group
    if rows <= FEW_ROWS:
        return Verdict(False, f"{rows} rows share keys, most of a tile would be empty")
    items = -(-rows // block_q) * problem.heads_kv * problem.batch
    if 2 * items <= device.sms and problem.n_k >= MANY_KEYS:
        return Verdict(False, f"{items} tiles of rows on {device.sms} multiprocessors, the keys should be split")
    return Verdict(True)


class Shaped(NamedTuple):
    """What a launch takes from the shapes and strides of its arrays."""

    blocks: int
    together: int
    """Heads that blocks work at together."""

    maps: tuple[tuple[int, Maps], ...]
    """For each tensor that the copy engine moves where its address stands, and its maps."""


class Forward:
    """The forward pass; `spare` takes the calls that its kernel cannot; the copy engine moves what is `addressed` as it
    lies.
    """

    def __init__(
        self, problem: Problem, device: Device, tile: ForwardTile, why: str, library: Library, spare: Fallback,
        addressed: tuple[str, ...] = ROW_TENSORS,
    ) -> None:  # fmt: skip
        self.device, self.tile, self.why, self.spare = device, tile, why, spare
        self.pack, self.libraries = packed(problem), [library]
        self._kernel = library.kernel("sm90_forward", device, tile.shared_memory(problem.spec))
        self._tickets, self._threads = TileCounters.of(device), tile.threads
        self._addressed, self._addresses = addressed, addresses(addressed)

    def takes(self, arguments: Arguments) -> bool:
        """Whether the kernel can do with arrays of these shapes and strides."""
        return bool(arguments.n_k) and arguments.positive_scale and strides_fit(arguments, self._addressed)

    def boxes(self, spec: AttentionSpec) -> list[tuple[str, int, int, int]]:
        """Of each tensor that the copy engine moves as it lies the name, the columns, and heads and rows of a box."""
        keys, dim, dim_v = self.tile.block_k, spec.head_dim, spec.head_dim_v
        return [("q", dim, self.pack, 64), ("k", dim, 1, keys), ("v", dim_v, 1, keys), ("out", dim_v, self.pack, 64)]

    def maps(self, arguments: Arguments, shaped: Shaped, stream: int) -> tuple[list[TensorMap], Any]:
        """Tensor maps of q, k, v and the output, and what has to live until the kernel is enqueued."""
        return [maps[arguments.words[at]] for at, maps in shaped.maps], None

    def shaped(self, arguments: Arguments) -> Shaped | None:
        """What shapes and strides say; None: another pass is needed."""
        if not self.takes(arguments):
            return None
        spec = arguments.spec
        heads, rows = arguments.batch * arguments.heads // self.pack, arguments.n_q * self.pack
        items = -(-rows // self.tile.block_q) * heads
        check_grid(items)
        maps = [(AT[box[0]], maps_of(arguments, *box)) for box in self.boxes(spec) if box[0] in self._addressed]
        cached = _CACHED_LOOKED_UP if modification.looks_at_ranges(spec) else _CACHED
        together = heads_per_l2_group(heads, cached // bytes_of_keys(arguments))
        return Shaped(min(items, self.device.sms), together, tuple(maps))

    def run(self, arguments: Arguments, stream: int) -> None:
        shaped = arguments.known(self, self.shaped)
        if shaped is None or not aligned(arguments, self._addresses):
            return self.spare.run(arguments, stream)
        if not shaped.blocks:
            return None
        arguments.words[_TOGETHER], arguments.words[_TICKET] = shaped.together, self._tickets.next(stream)
        maps, held = self.maps(arguments, shaped, stream)
        self._kernel.launch(shaped.blocks, self._threads, arguments.with_maps(maps), stream, pdl=True)
        del held
        return None

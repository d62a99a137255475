"""The backward pass for Hopper, in whichever language: its tiles, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ... import mods
from ...mods import expr
from ...spec import AttentionSpec
from .arguments import Arguments
from .bwd_preprocess import BwdPreprocess
from .device import Device
from .fallback import Fallback
from .generation import Kernels
from .l2_swizzle import bytes_of_queries, heads_per_l2_group
from .launch import Library, check_grid, scratch
from .modification import is_of_blocks, is_small
from .params import AT
from .sm90_launch import WATCHDOG, chunks, padded
from .tensor_maps import TileCounters, addressable, tensor_map

_CACHED = 12_000_000  # bytes of the heads that blocks work at together, well within half of the L2 cache
_CACHED_IN_ORDER = 34_000_000
_MOST_HEADS = 8
_LEAD = 220  # items of which queries are prepared before the kernel
_CAUSAL = mods.causal().key
_THREADS = 384
_LONG = 4096  # tokens; in an order kernels are launched early up to these: 16,384 were slower, once (docs/hopper.md)
_ROUNDING = 0.2  # the time to round sums of a tile, over that of a step, one of each on a multiprocessor


def keys_shared(spec: AttentionSpec) -> bool:
    """Whether both warp groups work at the same keys: where dK and dV of 64 keys do not fit the registers of one. Two
    blocks share an item then.
    """
    return max(spec.head_dim, spec.head_dim_v) > 128


def blocks_together(spec: AttentionSpec) -> int:
    """Blocks of a cluster, which shares an item."""
    return 2 if keys_shared(spec) else 1


@dataclass(frozen=True)
class BackwardTile:
    """A tile of the backward pass: rows, and keys, 64 for each of two warp groups or, where these share them, of two
    blocks; how many tiles of Q, dO and K are in shared memory at once. kernels/sm90_backward.
    """

    block_q: int
    block_k: int = 128
    stages: int = 2
    dout_stages: int = 2
    key_buffers: int = 2

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128) or self.block_k != 128:
            raise ValueError(f"{self=}: block_q is 64 or 128, block_k 128")
        if self.stages < 2 or self.dout_stages < 1 or self.key_buffers not in (1, 2):
            raise ValueError(f"{self=}: stages are two or more, dout_stages one or more, key_buffers one or two")

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block."""
        q, v, held = chunks(spec.head_dim), chunks(spec.head_dim_v), self.held(spec)
        rows = held * (self.key_buffers * q + v) + self.block_q * (self.stages * q + self.dout_stages * v)
        rows += held * -(-q // 2) if keys_shared(spec) else 0
        pairs, numbers = 2 * self.block_q * held * 2, (self.stages + self.dout_stages) * self.block_q * 4
        words = (16 + 8 + 12 + held // 8) * self.key_buffers + (16 + 12) * self.stages + 16 * self.dout_stages
        barriers = words + 16 + 32 + 16 + 16 + 32 + 8 + 24 + 16 + 24 + 32 + 8 + 4 * (38 * 4 + 16) + 32 + 16 + 24 + 512
        return 128 * rows + pairs + numbers + barriers + (0 if keys_shared(spec) else self.sums(spec))

    def held(self, spec: AttentionSpec) -> int:
        """Keys of a block."""
        return self.block_k // blocks_together(spec)

    def sums(self, spec: AttentionSpec) -> int:
        """Bytes of the sums of dQ of a tile."""
        return self.block_q * chunks(spec.head_dim) * 64 * 4

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """In shared memory and, as far as sums and pairs tell, in registers."""
        dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        if keys_shared(spec):
            numbers = max(dim, dim_v) // 2 + self.block_q + self.block_q // 4
            right = self.block_q == 64
        else:
            numbers = (dim + dim_v) // 2 + self.block_q + self.block_q // 4
            right = self.block_q == 64 or not spec.dropout
        return right and numbers <= 224 and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec) -> dict[str, int]:
        """What kernels/sm90_backward asks for."""
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "STAGES": self.stages, "DOUT_STAGES": self.dout_stages,
            "KEY_BUFFERS": self.key_buffers, "KEYS_SHARED": keys_shared(spec), "ORDERED": spec.deterministic,
            "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "WATCHDOG": WATCHDOG, "HAS_LENGTHS": spec.kv_lengths,
            "SMALL_SCORE": is_small(spec), "FAST_MATH": True, "SHARED_BYTES": self.shared_memory(spec),
        }  # fmt: skip


def backward_tile(spec: AttentionSpec, simple: bool | None = None) -> BackwardTile:
    """What does well on an H200. simple: whether scores take few registers; unless said, if nothing modifies them."""
    if keys_shared(spec):
        return BackwardTile(64, key_buffers=1)
    dim = max(spec.head_dim, spec.head_dim_v)
    simple = spec.score is None if simple is None else simple
    return BackwardTile(128 if dim <= 64 and simple and not spec.dropout else 64)


def backward_candidates(spec: AttentionSpec, device: Device, first: BackwardTile | None = None) -> list[BackwardTile]:
    """Tiles worth trying, first the one that is taken otherwise: unless given, that of `backward_tile`."""
    tiles = [first or backward_tile(spec)]
    if keys_shared(spec):
        tiles += [BackwardTile(64, dout_stages=douts, key_buffers=1) for douts in (2, 1)]
    else:
        tiles += [BackwardTile(rows, key_buffers=buffers) for rows in (128, 64) for buffers in (2, 1)]
    return list(dict.fromkeys(tile for tile in tiles if tile.fits(spec, device)))


Seen = Literal["by all", "causally", "in blocks", "somehow"]


def seen(spec: AttentionSpec) -> Seen:
    """What is known of which queries see a key."""
    if spec.kv_lengths:
        return "somehow"
    if spec.mask is None:
        return "by all"
    if expr.key(spec.mask) == _CAUSAL:
        return "causally"
    return "in blocks" if is_of_blocks(spec) else "somehow"


def many_steps(seen: Seen, n_q: int, n_k: int, density: float = 0) -> bool:
    """Whether items are known to have steps enough for rows to be prepared beside their products. On an H200 that is
    1.01 to 1.07 times as fast then; with 512 tokens, or 1,024 under a causal mask, 0.92 to 0.95. density: the share of
    all tiles that a mask of blocks is known to have.
    """
    # Under a causal mask with more keys than queries it depends on where these are.
    rows = {"by all": n_q, "causally": n_k / 2 if n_q >= n_k else 0, "in blocks": n_q * density, "somehow": 0}
    return n_k >= 1024 and rows[seen] >= 1024


def reserved_sms(seen: Seen, n_k: int, items: int, most: int) -> int:
    """Of `most` multiprocessors, or pairs that share an item, those left to who rounds sums of dQ while the others
    multiply. Without a mask as many as nobody misses, as half of all would have nothing to do in the last round; under
    a causal mask as many as keep up, but few.
    """
    if items <= most:
        return 0
    if seen == "by all":
        rounds = int(items / most + 0.5)  # if it is one more than that, the last has few items, and many have time then
        return max(0, most - -(-items // rounds))
    return min(most // 16, round(_ROUNDING * most / (n_k / 2 / 128))) if seen == "causally" else 0


class Backward:
    """The backward pass: rows prepared, then all gradients by tiles of keys, then the sums of dQ rounded. `spare` takes
    the calls that its kernels cannot; `kernels`: of the backend. `spec` may be deterministic where calls need not be.
    beside: whether the kernel prepares rows itself, but the first. early: whether kernels begin while the one before
    runs; the second says which sums are complete, and the third rounds these.
    """

    def __init__(
        self, spec: AttentionSpec, device: Device, tile: BackwardTile, why: str, library: Library, kernels: Kernels,
        spare: Fallback, beside: bool = False, early: bool = False,
    ) -> None:  # fmt: skip
        self._beside, self._early, self._seen = beside, early, seen(spec)
        self.spec, self.device, self.tile, self.why, self.libraries = spec, device, tile, why, [library]
        self._rows: BwdPreprocess | None = None
        if spec.sinks:
            self._rows = BwdPreprocess(kernels, spec, device)
            self.libraries.append(self._rows.library)
        self._prepare = library.kernel("bwd_preprocess", device)
        self._kernel = library.kernel("sm90_backward", device, tile.shared_memory(spec))
        self._store = library.kernel("bwd_postprocess", device)
        self._tickets, self._spare = TileCounters.of(device), spare

    def run(self, arguments: Arguments, stream: int) -> None:
        spec, tile = self.spec, self.tile
        names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        if not (arguments.n_k and arguments.positive_scale and addressable(arguments, names)):
            return self._spare.run(arguments, stream)
        heads, every = arguments.batch * arguments.heads, arguments.batch * arguments.heads_kv
        queries, keys = -(-arguments.n_q // tile.block_q), -(-arguments.n_k // tile.block_k)
        if not heads:
            return None
        check_grid(queries * heads, keys * every)
        of_heads = arguments.batch, arguments.heads
        numbers = scratch((2, *of_heads, queries * tile.block_q), "float32")
        sums = scratch((*of_heads, queries, tile.sums(spec) // 4), "float32")
        together = blocks_together(spec)
        words = 1 + together * -(-keys // 31)
        at_a_time, of_head, tiles = self.heads_at_a_time(arguments), queries * spec.group, queries * heads
        n_counters = 1 + 2 * every  # kernels/sm90/bwd_preprocess.cuh
        semaphore = scratch((n_counters + tiles * words,), "int32")
        arguments.tensors(bwd_lse=numbers[0], delta=numbers[1], dq_accum=sums)
        arguments.words[AT["dq_semaphore"] : AT["dq_semaphore"] + 4] = [
            semaphore.data.ptr + 4 * n_counters, arguments.heads * queries * words, queries * words, words
        ]  # fmt: skip
        before = min(tiles, at_a_time * of_head + _LEAD // together * -(-of_head // keys))
        if self._beside and not many_steps(self._seen, arguments.n_q, arguments.n_k, arguments.density):
            before = tiles
        arguments.set(
            heads_per_l2_group=at_a_time, preprocessed_tiles=before, preprocess_counters=semaphore.data.ptr,
            tile_counter=self._tickets.next(stream),
        )  # fmt: skip
        self._prepare.launch(before if self._beside else tiles, 256, arguments, stream)
        maps = [tensor_map(arguments, name, columns, 1, count) for name, columns, count in self.boxes()]
        items, most = keys * every, max(1, self.device.sms // together)
        early = self._early and not (spec.deterministic and max(arguments.n_q, arguments.n_k) > _LONG)
        left = reserved_sms(self._seen, arguments.n_k, items, most) if early else 0
        blocks = together * min(items, most - left)
        self._kernel.launch(blocks, _THREADS, arguments.with_maps(maps), stream, early)
        self._store.launch(tiles, 256, arguments, stream, early)
        if self._rows is not None:
            self._rows.prepare(arguments, stream)
            self._rows.finish(arguments, stream)
        return None

    def boxes(self) -> list[tuple[str, int, int]]:
        """Of tensors, in the kernel's order: columns, and rows that are moved at once."""
        dim, dim_v, rows, held = self.spec.head_dim, self.spec.head_dim_v, self.tile.block_q, self.tile.held(self.spec)
        moved = [("q", dim, rows), ("k", dim, held), ("v", dim_v, held), ("dout", dim_v, rows)]
        return [*moved, ("dk", dim, 16), ("dv", dim_v, 16)]

    def heads_at_a_time(self, arguments: Arguments) -> int:
        """Key/value heads that blocks work at together. What they read and add to should stay in the L2 cache. Where
        they add in an order, and with a mask each begins at its diagonal: as many heads as are one item for each block,
        or three where items have fewer steps.
        """
        spec, tile, every = self.spec, self.tile, arguments.batch * arguments.heads_kv
        if spec.deterministic:
            queries, keys = -(-arguments.n_q // tile.block_q), -(-arguments.n_k // tile.block_k)
            items = (1 if queries > keys else 3) * self.device.sms // blocks_together(spec)
            return heads_per_l2_group(every, min(items // keys, _CACHED_IN_ORDER // bytes_of_queries(arguments)))
        if spec.mask is None:
            return 1
        return min(every, heads_per_l2_group(every, _CACHED // bytes_of_queries(arguments)), _MOST_HEADS)

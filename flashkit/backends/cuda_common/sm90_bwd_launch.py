"""Hopper's backward pass in both languages: its tile, its shared memory, and how its three kernels are launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ... import mods
from ...mods import expr
from ...spec import AttentionSpec, Problem
from .arguments import Arguments
from .bwd_preprocess import BwdPreprocess
from .device import Device
from .generation import Choice, Generation, Pass, TileTables
from .launch import TensorMap, check_grid
from .memory import SmemLayout, SmemTile, Workspace, bytes_of_queries, heads_per_l2_group
from .modification import is_of_blocks, looks_at_ranges, positions, sums_by_distance
from .params import AT
from .sm90_launch import SEQ_SLOT, WATCHDOG, add_dense_tiles, chunks, padded
from .tensor_maps import Maps, TileCounters, maps_of, strides_fit

_L2_BYTES = 12_000_000  # of the heads in flight: well within half of the L2 cache, which also holds dq_accum
_L2_BYTES_DETERMINISTIC = 34_000_000
_MAX_HEADS_IN_FLIGHT = 8
_ITEMSIZE = 2  # of what the kernels multiply
_LEAD = 220  # work tiles whose heads bwd_preprocess completes before the backward kernel starts
_CAUSAL = mods.causal().key
_TILE_COUNTER = AT["tile_counter"]
_THREADS = 384
_EARLY_LAUNCH_MAX_TOKENS = 4096  # of deterministic kernels
_POSTPROCESS_COST = 0.2  # time to convert a query tile of dQ on one SM, over that of a step of the backward kernel
_POSTPROCESS_CTAS = 16  # on an SM, that two rounds of them take
_KEY_TILES_PER_WORD = 31  # of dq_semaphore: kernels/sm90/dq_accum


def cluster_size(spec: AttentionSpec) -> int:
    """CTAs that share a work tile: two where dK and dV of 64 keys do not fit the registers of one warp group."""
    return 2 if max(spec.head_dim, spec.head_dim_v) > 128 else 1


@dataclass(frozen=True)
class BackwardTile(SmemTile):
    """A tile of the backward pass: query tiles of `block_q` rows, 64 or 128; work tiles of `block_k` keys, 128: 64 for
    each of two consumer warp groups or, in a cluster, for each of two CTAs. `stages`, `dout_stages` and `key_buffers`:
    how many tiles of Q, dO and K are in shared memory at once. `bias_bytes`, `mask_bytes`: of an element of a bias and
    of a mask of which `dense_stages` tiles are there too, or 0.
    """

    block_q: int
    block_k: int = 128
    stages: int = 2
    dout_stages: int = 2
    key_buffers: int = 2
    bias_bytes: int = 0
    mask_bytes: int = 0
    dense_stages: int = 2

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128) or self.block_k != 128:
            raise ValueError(f"{self=}: expected block_q 64 or 128 and block_k 128")
        if self.stages < 2 or self.dout_stages < 1 or self.key_buffers not in (1, 2):
            raise ValueError(f"{self=}: expected stages >= 2, dout_stages >= 1 and key_buffers 1 or 2")

    def cta_keys(self, spec: AttentionSpec) -> int:
        """Keys of a CTA."""
        return self.block_k // cluster_size(spec)

    def dq_accum_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of a query tile in dq_accum."""
        return self.block_q * chunks(spec.head_dim) * 64 * 4

    @staticmethod
    def query_tile_lists(spec: AttentionSpec) -> tuple[int, int]:
        """How many lists of query tiles the scheduler warp fills ahead, and how many tiles each takes. Masks that are
        read from arrays take longer to classify, so their lists are longer.
        """
        return (2, 72) if looks_at_ranges(spec) else (4, 32)

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The map of shared memory, the same in both languages. kernels/sm90/bwd_layout says what each part is."""
        row, keys, cluster, barrier = 128, self.cta_keys(spec), cluster_size(spec), 8
        chunks_q, chunks_v = chunks(spec.head_dim), chunks(spec.head_dim_v)
        lists, capacity = self.query_tile_lists(spec)
        smem = SmemLayout()
        smem.add("K", self.key_buffers * keys * row * chunks_q)
        smem.add("PEER_K", keys * row * -(-chunks_q // 2) if cluster > 1 else 0)
        smem.add("V", keys * row * chunks_v)
        smem.add("Q", self.stages * self.block_q * row * chunks_q)
        smem.add("DOUT", self.dout_stages * self.block_q * row * chunks_v)
        smem.add("DS", 2 * self.block_q * keys * 2)
        smem.add("DQ", 0 if cluster > 1 else self.dq_accum_bytes(spec))
        add_dense_tiles(smem, self, self.dense_stages, self.block_q, keys)
        smem.add("LSE", self.stages * self.block_q * 4)
        smem.add("DELTA", self.dout_stages * self.block_q * 4)
        pair_sums = self.block_q * (16 if chunks_q + chunks_v == 2 else 2)  # PairSums
        smem.add("PAIR_SUMS", pair_sums if sums_by_distance(spec) and cluster == 1 else 0, align=8)
        smem.add("Q_PIPE", 2 * barrier * self.stages)
        smem.add("DOUT_PIPE", 2 * barrier * self.dout_stages)
        smem.add("DENSE_PIPE", 2 * barrier * self.dense_stages if self.bias_bytes + self.mask_bytes else 0)
        smem.add("K_PIPE", 2 * barrier * self.key_buffers)
        smem.add("V_PIPE", 2 * barrier)
        smem.add("DS_PIPE", 2 * barrier * 2)
        smem.add("DQ_WRITTEN", barrier * 2)
        smem.add("DQ_GRANTED", barrier * 2)
        smem.add("DQ_REQUESTED", barrier * 4)
        smem.add("K_LOADED", barrier * self.key_buffers)
        smem.add("ROWS_LOADED", barrier)
        smem.add("PEER_K_PIPE", 2 * barrier)
        smem.add("PEER_K_LOADED", barrier)
        smem.add("DSMEM_PIPE", 2 * barrier)
        smem.add("CLAIMED", barrier * 2)
        smem.add("CLAIMED_INDEX", 4 * 2)
        smem.add("TILE_DESCS", 12 * self.stages)
        smem.add("WORK_TILES", (12 + (SEQ_SLOT + 4 if spec.packed else 0)) * self.key_buffers)
        smem.add("NONFINITE_KEYS", keys // 8 * self.key_buffers)
        smem.add("DQ_SLOTS", (12 if spec.packed else 8) * 4)
        smem.add("LISTS", _list_bytes(capacity) * lists)
        smem.add("LIST_PIPE", 2 * barrier * lists, align=8)
        smem.add("CLAIM", barrier)
        smem.add("O_LOADED", barrier)
        smem.add("HEAD_READY", barrier)
        smem.add("DQ_COMPLETE", barrier)
        smem.add("FINISHED_HEADS", 4 * 4)
        smem.add("BROADCAST", 4 * 2)
        smem.add("ZEROS", 512, align=16)
        return smem

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether it fits shared memory and, as far as accumulators and fragments tell, registers."""
        dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        fragments = self.block_q + self.block_q // 4
        lane_sums = spec.sums and not sums_by_distance(spec)
        if cluster_size(spec) > 1:
            registers, possible = max(dim, dim_v) // 2 + fragments, self.block_q == 64
        else:
            registers, possible = (dim + dim_v) // 2 + fragments, self.block_q == 64 or not (spec.dropout or lane_sums)
        return possible and registers <= 224 and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec) -> dict[str, int]:
        """Constants of the kernels' head."""
        lists, capacity = self.query_tile_lists(spec)
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "STAGES": self.stages, "DOUT_STAGES": self.dout_stages,
            "DENSE_STAGES": self.dense_stages, "KEY_BUFFERS": self.key_buffers, "CLUSTER_SIZE": cluster_size(spec),
            "DETERMINISTIC": spec.deterministic,
            "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "WATCHDOG": WATCHDOG,
            "SMALL_SCORE": positions(spec) != "any", "FAST_MATH": True, "NUM_LISTS": lists, "LIST_CAPACITY": capacity,
            "LIST_BYTES": _list_bytes(capacity), **self.smem(spec).constants(),
        }  # fmt: skip


def _list_bytes(capacity: int) -> int:
    return 24 + 4 * capacity


def backward_tiles(problem: Problem, device: Device) -> list[BackwardTile]:
    """Tiles worth trying, of which some may not fit."""
    if cluster_size(problem.spec) > 1:
        return [BackwardTile(64, dout_stages=douts, key_buffers=1) for douts in (2, 1)]
    return [BackwardTile(rows, key_buffers=buffers) for rows in (128, 64) for buffers in (2, 1)]


# --- what is known of a mask ------------------------------------------------------------------------------------------

MaskKind = Literal["full", "causal", "blocks", "other"]


def mask_kind(spec: AttentionSpec) -> MaskKind:
    """What is known of the query tiles that see a key tile."""
    if spec.kv_lengths:
        return "other"
    if spec.mask is None:
        return "full"
    if expr.key(spec.mask) == _CAUSAL:
        return "causal"
    return "blocks" if is_of_blocks(spec) else "other"


def has_long_work_tiles(kind: MaskKind, n_q: int, n_k: int, density: float = 0) -> bool:
    """Whether work tiles are known to have steps enough to hide the fused preprocess. density: the share of all blocks
    that a block mask keeps.
    """
    # Under a causal mask with more keys than queries it depends on where these are.
    rows = {"full": n_q, "causal": n_k / 2 if n_q >= n_k else 0, "blocks": n_q * density, "other": 0}
    return n_k >= 1024 and rows[kind] >= 1024


def reserved_sms(kind: MaskKind, n_k: int, work_tiles: int, sms: int) -> int:
    """Of `sms` SMs, or clusters, those reserved for bwd_postprocess while the backward kernel runs.

    Without a mask as many as cost nothing: those that the last wave of work tiles would leave idle. Under a causal mask
    as many as keep up with the backward kernel, up to a sixteenth.
    """
    if work_tiles <= sms:
        return 0
    if kind == "full":
        waves = int(work_tiles / sms + 0.5)  # a last wave of few work tiles leaves most SMs idle regardless
        return max(0, sms - -(-work_tiles // waves))
    return min(sms // 16, round(_POSTPROCESS_COST * sms / (n_k / 2 / 128))) if kind == "causal" else 0


# --- the launch -------------------------------------------------------------------------------------------------------


class LaunchGeometry(NamedTuple):
    """What the launches derive from the shapes and strides of their arrays."""

    preprocess_ctas: int  # 0: there is nothing to compute
    ctas: int
    postprocess_ctas: int
    early: bool
    workspace: Workspace
    maps: list[tuple[int, Maps]]
    """For each TMA box the index of its tensor's address in the arguments, and the maps."""


class Backward(Pass):
    """The three kernels of the backward pass: bwd_preprocess, sm90_backward, bwd_postprocess. The spec may be
    deterministic where the call need not be.
    """

    addressed: tuple[str, ...] = "q", "k", "v", "out", "dout", "dq", "dk", "dv"
    """By TMA."""

    fused_preprocess = False
    """Whether the backward kernel does most of bwd_preprocess."""

    early = False
    """Whether kernels are launched while the one before runs (programmatic dependent launch): bwd_postprocess then
    converts each query tile as soon as its dQ is complete.
    """

    entries_first = False
    """Whether batch entries of a head follow one another."""

    postprocess_tiles = 1
    """Query tiles of packed sequences that a CTA of bwd_postprocess may take."""

    def __init__(
        self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables,
        spec: AttentionSpec | None = None,
    ) -> None:  # fmt: skip
        super().__init__(generation, problem, choice, tables, spec)
        self._mask_kind, device = mask_kind(self.spec), self.device
        self._sinks = BwdPreprocess(self) if self.spec.sinks else None
        library = self.compiled("sm90/backward", *self.source())
        self._preprocess = library.kernel("bwd_preprocess", device)
        self._kernel = library.kernel("sm90_backward", device, self.tile.shared_memory(self.spec))
        self._postprocess = library.kernel("bwd_postprocess", device)
        self._tickets = TileCounters.of(device)

    def source(self) -> tuple[Any, ...]:
        """Constants of the kernels, and generated functions if their language has them."""
        return (self.tile.constants(self.spec),)

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        """What the launches derive from shapes and strides, or None where the fallback is needed."""
        spec, tile, cluster = self.spec, self.tile, cluster_size(self.spec)
        if not (arguments.n_k and arguments.positive_scale and strides_fit(arguments, self.addressed)):
            return None
        heads, kv_heads = arguments.entries * arguments.heads, arguments.entries * arguments.heads_kv
        tiles_q, tiles_k = arguments.q_tiles(tile.block_q), arguments.k_tiles(tile.block_k)
        query_tiles, work_tiles = tiles_q * heads, tiles_k * kv_heads
        workspace = Workspace(arguments)
        if not heads:
            return LaunchGeometry(0, 0, 0, False, workspace, [])
        check_grid(query_tiles, work_tiles)
        for name in ("bwd_lse", "delta"):
            workspace.tensor(name, 4, tiles_q * tile.block_q, entries_first=self.entries_first)
        semaphore = 1 + cluster * -(-tiles_k // _KEY_TILES_PER_WORD)
        for name, elements in ("dq_accum", tile.dq_accum_bytes(spec) // 4), ("dq_semaphore", semaphore):
            workspace.tensor(name, 4, tiles_q, elements, entries_first=self.entries_first)
        # PreprocessCounters of kernels/sm90/dq_accum.cuh
        workspace.memory("preprocess_counters", 4 * (1 + 2 * kv_heads))

        in_flight, per_kv_head = self.kv_heads_in_flight(arguments), tiles_q * spec.group
        preprocessed = min(query_tiles, in_flight * per_kv_head + _LEAD // cluster * -(-per_kv_head // tiles_k))
        if self.fused_preprocess and not has_long_work_tiles(
            self._mask_kind, arguments.n_q, arguments.n_k, arguments.density
        ):
            preprocessed = query_tiles
        workspace.words(row_block=tile.block_q, heads_per_l2_group=in_flight, preprocessed_tiles=preprocessed)
        early = self.early and not (
            spec.deterministic and max(arguments.n_q, arguments.n_k) > _EARLY_LAUNCH_MAX_TOKENS
        )
        clusters = max(1, self.device.sms // cluster)
        reserved = reserved_sms(self._mask_kind, arguments.n_k, work_tiles, clusters) if early else 0
        ctas = cluster * min(work_tiles, clusters - reserved)
        maps = [(AT[name], maps_of(arguments, name, columns, 1, rows)) for name, columns, rows in self.boxes()]
        preprocess_ctas = preprocessed if self.fused_preprocess else query_tiles
        postprocess_ctas = query_tiles
        if spec.packed:  # several tiles for each of more CTAs than run at a time
            fewest = -(-query_tiles // self.postprocess_tiles)
            postprocess_ctas = max(fewest, min(query_tiles, _POSTPROCESS_CTAS * self.device.sms))
        return LaunchGeometry(preprocess_ctas, ctas, postprocess_ctas, early, workspace, maps)

    def launch(
        self, arguments: Arguments, geometry: LaunchGeometry, stream: int, maps: Sequence[TensorMap] | None = None
    ) -> None:  # fmt: skip
        """maps: of each of the boxes, where they are not of the arrays of the call."""
        words = arguments.words
        held = geometry.workspace.allocate(arguments, stream)
        words[_TILE_COUNTER] = self._tickets.next(stream)
        self._preprocess.launch(geometry.preprocess_ctas, 256, arguments, stream)
        arguments.with_maps(maps or [of[words[at]] for at, of in geometry.maps])
        self._kernel.launch(geometry.ctas, _THREADS, arguments, stream, geometry.early)
        self._postprocess.launch(geometry.postprocess_ctas, 256, arguments, stream, geometry.early)
        if self._sinks is not None:
            workspace, ctas = arguments.known(self._sinks, self._sinks.geometry)
            held = held, workspace.allocate(arguments, stream)
            self._sinks.run(arguments, stream, ctas)
            self._sinks.sink_gradients(arguments, stream)
        del held

    def boxes(self) -> list[tuple[str, int, int]]:
        """Of each TMA box, in the order of the kernel's parameters: the tensor, its columns, the rows of a box."""
        dim, dim_v = self.spec.head_dim, self.spec.head_dim_v
        rows, keys = self.tile.block_q, self.tile.cta_keys(self.spec)
        loaded = [("q", dim, rows), ("k", dim, keys), ("v", dim_v, keys), ("dout", dim_v, rows)]
        return [*loaded, ("dk", dim, 16), ("dv", dim_v, 16)]

    def kv_heads_in_flight(self, arguments: Arguments) -> int:
        """Key/value heads whose work tiles run at the same time, so that what they read and add to stays in the L2
        cache. Where additions are in order and a mask makes each CTA begin at its diagonal: as many heads as give each
        CTA one work tile, or three where these have fewer steps.
        """
        spec, tile, kv_heads = self.spec, self.tile, arguments.entries * arguments.heads_kv
        if spec.deterministic:
            tiles_q, tiles_k = arguments.q_tiles(tile.block_q), arguments.k_tiles(tile.block_k)
            work_tiles = (1 if tiles_q > tiles_k else 3) * self.device.sms // cluster_size(spec)
            most = min(work_tiles // tiles_k, _L2_BYTES_DETERMINISTIC // bytes_of_queries(arguments, _ITEMSIZE))
            return heads_per_l2_group(kv_heads, most)
        if spec.mask is None:
            return 1
        in_l2 = heads_per_l2_group(kv_heads, _L2_BYTES // bytes_of_queries(arguments, _ITEMSIZE))
        return min(kv_heads, in_l2, _MAX_HEADS_IN_FLIGHT)

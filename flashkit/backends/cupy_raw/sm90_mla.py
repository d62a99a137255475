"""Multi-head latent attention on Hopper: keys of up to 576 columns, the first of which are the values, by
kernels/sm90/mla_forward.cu.

Whether v is a view of k is known for each call by its arrays. Calls with other values go to the kernels of `simt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...mods import expr
from ...spec import AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import modification
from ..cuda_common.arguments import Arguments
from ..cuda_common.generation import Choice, Generation, Kind, Pass, TileTables
from ..cuda_common.launch import check_grid
from ..cuda_common.memory import SmemLayout
from ..cuda_common.params import AT
from ..cuda_common.sm90_launch import NUM_LISTS, SWIZZLE_ROWS, ForwardTile, chunks, keys_of_a_box
from ..cuda_common.tensor_maps import Maps, TileCounters, maps_of, strides_fit
from .sm80 import launch_combine
from .sm90_wgmma import text as wgmma_functions

MAX_DIM, MAX_DIM_V = 576, 512
ROWS, KEYS = 64, 64
"""Rows of Q and keys of a tile. A tile of P is a chunk, and half of O fits the registers of a warp group."""

_LIST_BYTES = 4 * (96 + 9)  # UnitList of kernels/sm90/mla_scheduler.cuh
_UNIT_COST, _SPLIT_COST, _COMBINE_COST = 3, 1, 4
"""In the time of a K tile: what a unit takes besides its tiles, what it takes more where it is one of several splits,
and the launch that combines them."""

_MAX_WAVES = 2  # of units; more only write more partial results
_MAX_RAGGED_TILES, _MAX_RAGGED_WAVES = 64, 8
"""Of a unit, where sequences differ in length; and waves up to which units are made that small, for their memory."""

_DETERMINISTIC_TILES = 16  # of a split where a result is to depend on its own sequence alone

_TILE_COUNTER, _NUM_SPLITS = AT["tile_counter"], AT["num_splits"]


@dataclass(frozen=True)
class Sm90MlaTile(ForwardTile):
    """The tile of kernels/sm90/mla_forward.cu."""

    block_q: int = ROWS
    block_k: int = KEYS
    q_buffers: int = 1
    turns: int = 0

    def __post_init__(self) -> None:
        if (self.block_q, self.block_k, self.stages, self.q_buffers, self.turns) != (ROWS, KEYS, 2, 1, 0):
            raise ValueError(f"{self=}: expected {ROWS} x {KEYS} with two stages, the only tile of the kernel")

    def threads(self, spec: AttentionSpec) -> int:
        return 3 * 128

    def registers(self, classifies: bool) -> tuple[int, int]:
        return 232, 40

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        barriers, columns = 16, chunks(spec.head_dim)
        return SmemLayout(
            K=self.stages * KEYS * 128 * columns, Q=ROWS * 128 * columns, P=ROWS * 128,
            K_PIPE=3 * barriers * self.stages, LIST_PIPE=barriers * NUM_LISTS, UNIT_PIPE=barriers * 2, CLAIM=8,
            CLAIMED=barriers + 8, TILE_DESCS=4 * 4, UNITS=16 * 2, ROW_REF=4 * ROWS, RESCALE=4 * ROWS,
            ROW_SUMS=2 * 4 * ROWS, LISTS=NUM_LISTS * _LIST_BYTES,
        )  # fmt: skip

    def source(self, spec: AttentionSpec, cluster: int = 1) -> tuple[dict[str, int], str]:
        """Constants and generated functions of the kernel."""
        classifies = spec.mask is not None
        constants = {
            **self.common(spec, spec.group, classifies), **modification.forward_constants(spec),
            "CLUSTER_SIZE": cluster, "LIST_BYTES": NUM_LISTS * _LIST_BYTES,
            "SPLIT_TILES": _DETERMINISTIC_TILES if spec.deterministic else 0,
            "MASK_OF_HEADS": spec.mask is not None and expr.uses(spec.mask, expr.H),
        }  # fmt: skip
        half = 64 * (-(-chunks(spec.head_dim_v) // 2))
        return constants, wgmma_functions(spec.dtype, [KEYS, half], [half])


def is_latent(spec: AttentionSpec) -> bool:
    """Whether head dims and dtype are those of the kernel: too large for the others, with v no wider than k."""
    return spec.fp8 is None and spec.dtype in ("float16", "bfloat16") and 256 < spec.head_dim > spec.head_dim_v


def supports(problem: Problem, direction: Direction) -> Verdict:
    """Whether the kernel can take them, of specs that are latent."""
    spec = problem.spec
    if direction == "backward":
        return Verdict(False, f"head dim {spec.head_dim} has no backward kernels here")
    if spec.head_dim > MAX_DIM or spec.head_dim_v > MAX_DIM_V:
        dims = f"{spec.head_dim}/{spec.head_dim_v}"
        return Verdict(False, f"head dims {dims} are over {MAX_DIM}/{MAX_DIM_V}")
    if spec.head_dim % 8 or spec.head_dim_v % 8:
        dims = f"head dims {spec.head_dim} and {spec.head_dim_v}"
        return Verdict(False, f"rows of {dims} are not a multiple of 16 bytes")
    if spec.dropout:
        return Verdict(False, "the kernel of latent attention has no dropout")
    return Verdict(not spec.packed, "packed sequences have no latent kernels here" if spec.packed else "")


def number_of_splits(work_tiles: int, key_tiles: int, sms: int, ragged: bool = False) -> int:
    """Parts that the keys are split into, so that units fill the device's SMs, or clusters: the fewest of least time in
    the model. ragged: sequences may be shorter, so that units of whole sequences would be of very different sizes.
    """

    def cost(splits: int) -> int:
        waves, apart = -(-work_tiles * splits // sms), splits > 1
        return waves * (-(-key_tiles // splits) + _UNIT_COST + _SPLIT_COST * apart) + _COMBINE_COST * apart

    least, most = 1, max(1, _MAX_WAVES * sms // max(work_tiles, 1))
    if ragged and work_tiles > 1:
        least = max(1, min(-(-key_tiles // _MAX_RAGGED_TILES), _MAX_RAGGED_WAVES * sms // work_tiles))
    return min(range(least, min(key_tiles, max(least, most)) + 1), key=cost, default=1)


def row_tiles(group: int, n_q: int) -> int:
    """Of the rows that share a key."""
    return -(-n_q * group // ROWS)


def cluster_size(group: int, n_q: int) -> int:
    """CTAs that load a key once for neighbouring rows: 1, or 2 where hardly any of them has no rows."""
    tiles = row_tiles(group, n_q)
    return 2 if tiles % 2 == 0 or tiles > 4 else 1


class LaunchGeometry(NamedTuple):
    """What a launch derives from the shapes and strides of its arrays."""

    units: int  # of clusters
    splits: int
    maps: Maps


class Sm90MlaForward(Pass):
    """The forward pass."""

    addressed = "q", "k", "out"
    values_in_keys = True

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        spec, device = self.spec, self.device
        self._cluster = cluster_size(spec.group, problem.n_q)
        self._clusters = max(1, device.sms // self._cluster)  # at a time
        library = self.compiled("sm90/mla_forward", *self.tile.source(spec, self._cluster))
        self._kernel = library.kernel("sm90_mla_forward", device, self.tile.shared_memory(spec))
        self._combine = library.kernel("combine", device)
        self._counters = TileCounters.of(device)

    def takes(self, arguments: Arguments) -> bool:
        return super().takes(arguments) and arguments.words[AT["k"]] == arguments.words[AT["v"]]

    def supports(self, arguments: Arguments) -> bool:
        """Whether the kernel supports arrays of these shapes and strides."""
        spec, words = arguments.spec, arguments.words
        # A scale that is not positive would change the sign of a masked pair's -inf.
        rows = not spec.paged or words[AT["page"]] % SWIZZLE_ROWS == 0
        most = max(arguments.n_q, arguments.n_k, arguments.batch, arguments.heads)
        extents = (words[AT["pages"]] if spec.paged else arguments.entries), arguments.heads_kv, arguments.n_k
        strides = (words[AT[name] + 1 : AT[name] + 4] for name in ("k", "v"))
        one_array = all(of_k == of_v or n == 1 for n, of_k, of_v in zip(extents, *strides, strict=True))
        return (
            bool(arguments.n_k) and arguments.positive_scale and rows and one_array
            and (spec.score is None or most < modification.NEAR) and strides_fit(arguments, self.addressed)
        )  # fmt: skip

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        if not self.supports(arguments):
            return None
        spec, rows = arguments.spec, arguments.batch * arguments.heads * arguments.n_q
        groups = -(-row_tiles(spec.group, arguments.n_q) // self._cluster)
        work_tiles = groups * arguments.heads_kv * arguments.batch
        key_tiles = -(-arguments.n_k // KEYS)
        if spec.deterministic:  # two at least: the kernel that combines them rounds once more
            splits = max(2, -(-key_tiles // _DETERMINISTIC_TILES))
        else:
            splits = number_of_splits(work_tiles, key_tiles, self._clusters, spec.kv_lengths)
        check_grid(work_tiles * splits * self._cluster, rows)
        maps = maps_of(arguments, "k", spec.head_dim, 1, keys_of_a_box(spec, KEYS))
        return LaunchGeometry(work_tiles * splits, splits, maps)

    def launch(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> None:
        (units, splits, maps), words = geometry, arguments.words
        held = arguments.allocate_partials(splits) if splits > 1 else None
        words[_NUM_SPLITS], words[_TILE_COUNTER] = splits, self._counters.next(stream)
        ctas, block = self._cluster * min(units, self._clusters), arguments.with_maps([maps[words[AT["k"]]]])
        self._kernel.launch(ctas, self.tile.threads(self.spec), block, stream, pdl=True)
        if splits > 1:
            launch_combine(self._combine, arguments, stream, early=True)
        del held


KIND = Kind(Sm90MlaTile, Sm90MlaForward, lambda *_: [Sm90MlaTile()])

"""Hopper's backward pass in CUDA C++: kernels/sm90/backward.cu."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...mods import expr
from ...spec import AttentionSpec, Problem, Verdict
from ..cuda_common import arguments, sm90_bwd_launch
from ..cuda_common.affine_score import affine_score
from ..cuda_common.arguments import Arguments, aligned
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Fallback, Generation, Kind, TileTables
from ..cuda_common.launch import TensorMap
from ..cuda_common.modification import (
    NOT_DENSE,
    Dense,
    DenseArray,
    adds_rows,
    dense_bias,
    dense_mask,
    looks_at_ranges,
    positions,
    slope_is_one,
    sums_by_distance,
    sums_of,
    values_of,
)
from ..cuda_common.params import VALUES
from ..cuda_common.sm90_bwd_launch import BackwardTile, LaunchGeometry, cluster_size
from ..cuda_common.sm90_launch import chunks, padded, staged
from ..cuda_common.tensor_maps import Maps, dense_maps, maps_of_pairs
from . import distances
from .sm90_wgmma import text as wgmma_functions


def functions(spec: AttentionSpec, tile: BackwardTile) -> str:
    """Text that goes before the kernel: its wgmma shapes, and which main loop."""
    dim, dim_v, rows = padded(spec.head_dim), padded(spec.head_dim_v), tile.block_q
    dtype = "float16" if spec.dtype == "float32" else spec.dtype
    if cluster_size(spec) > 1:
        return "#define CLUSTER_MAINLOOP\n" + wgmma_functions(dtype, [rows // 2, rows, dim], [dim_v])
    return wgmma_functions(dtype, [rows, rows if chunks(dim) == 2 else rows // 2], [dim, dim_v])


def gives_registers(spec: AttentionSpec) -> bool:
    """Whether consumers have registers to spare for the scheduler warp, which spills where it classifies tiles."""
    plain = spec.mask is not None and spec.score is None and not spec.dropout
    return plain and cluster_size(spec) > 1 and chunks(max(spec.head_dim, spec.head_dim_v)) < 4


def takes_affine_path(spec: AttentionSpec) -> bool:
    """Whether the kernel has a path for the score modification (kernels/sm90/bwd_softmax.cuh, AFFINE_PATH)."""
    if spec.score is None or spec.dropout or positions(spec) == "any":
        return False
    known = affine_score(spec.score)
    return known is not None and known.even and known.diagonal


def supports_sums(spec: AttentionSpec) -> Verdict:
    """Whether the kernel sums gradients by values of a score modification: registers do not hold scores until dS is
    there, nor P apart from the slope.
    """
    if not spec.sums:
        return Verdict(True)
    if spec.dtype == "float32":
        return Verdict(False, "float32 has no gradients by values of score modifications here")
    simple = slope_is_one(spec) and not any(expr.uses(read.slope, expr.S) for read in spec.reads)
    return Verdict(simple, "gradients by values need a modification that only adds to scores")


# Masked dQ is accumulated in order up to this many tokens even if determinism is not requested, with more than 64
# columns and with up to 64; and any dQ up to this many keys, two tiles. Powers of two, as one plan serves all lengths
# up to the next.
ORDERED_MAX_TOKENS, ORDERED_MAX_TOKENS_NARROW, ORDERED_MAX_KEYS = 2048, 512, 256


def sums_by_warps(spec: AttentionSpec) -> bool:
    """Whether warps that multiply nothing add a bias gradient (kernels/sm90/bwd_values.cuh): consumers would wait.
    A deterministic pass needs these warps for dQ.
    """
    return (adds_rows(spec) or sums_by_distance(spec)) and cluster_size(spec) == 1 and not spec.deterministic


def in_order(problem: Problem) -> bool:
    """Whether dQ is accumulated in order: where deterministic results are asked for, or where that is faster, as
    dq_accum need not be cleared then. The lengths of packed sequences may lie on the device: their mean decides.
    """
    spec, n_q, n_k = problem.spec, problem.n_q, problem.n_k
    if spec.packed:
        sequences = max(1, problem.batch - 1)
        n_q, n_k = problem.all_tokens.q // sequences, problem.all_tokens.k // sequences
    wide = max(spec.head_dim, spec.head_dim_v) > 64
    short = max(n_q, n_k) <= (ORDERED_MAX_TOKENS if wide else ORDERED_MAX_TOKENS_NARROW)
    faster = n_k <= ORDERED_MAX_KEYS or (short and spec.mask is not None)
    return spec.deterministic or (faster and not looks_at_ranges(spec) and not sums_by_warps(spec))


def can_fuse_preprocess(spec: AttentionSpec, tile: BackwardTile) -> bool:
    """Whether the kernel can preprocess rows (kernels/sm90/bwd_preprocess.cuh): O and dO fit the place of the
    next work tile's K, and the warps have no semaphore to serve. A score modification of up to 64 columns leaves too
    few registers.
    """
    room = tile.key_buffers > 1 and cluster_size(spec) == 1 and chunks(spec.head_dim_v) <= chunks(spec.head_dim)
    room &= spec.dtype != "float32" and not sums_by_warps(spec)
    return room and not spec.deterministic and (spec.score is None or chunks(spec.head_dim) > 1)


def staged_arrays(spec: AttentionSpec, tile: BackwardTile, device: Device) -> tuple[Dense, BackwardTile]:
    """The arrays whose tiles pass through shared memory, and a tile with room for them."""
    bias, mask = dense_bias(spec), dense_mask(spec)
    if spec.packed or spec.dropout or spec.dtype == "float32" or cluster_size(spec) > 1:
        return NOT_DENSE, tile
    names = "dout_stages", "block_q", "key_buffers", "dense_stages"
    kinds = itertools.product((tile.dout_stages, 1), (tile.block_q, 64), (tile.key_buffers, 1), (2, 1))
    tiles = [replace(tile, **dict(zip(names, kind, strict=True))) for kind in kinds]
    dense, larger = staged(spec, Dense(bias if bias and bias.itemsize else None, mask), tiles, device)
    # Beside another score modification pairs read what masks them.
    return (dense, larger) if dense.bias or spec.score is None or reads_distances(spec) else (NOT_DENSE, tile)


def reads_distances(spec: AttentionSpec) -> bool:
    """Whether the kernel reads what a score modification adds by distance."""
    plain = not (spec.dropout or spec.dtype == "float32" or cluster_size(spec) > 1 or takes_affine_path(spec))
    return plain and distances.reads(spec)


def stores_ds(problem: Problem, bias: DenseArray | None) -> bool:
    """Whether dS is the gradient by the bias: each pair has an element of its own."""
    if bias is None or not sums_by_warps(problem.spec):
        return False
    return (bias.entry is not None or problem.batch == 1) and (bias.head is not None or problem.heads == 1)


SMALL_BIAS = 16_000_000  # bytes that stay in L2 whatever the order of heads


def puts_entries_first(problem: Problem, bias: DenseArray | None) -> bool:
    """Whether batch entries of a head follow one another, as they share a bias that is not small."""
    if bias is None or bias.entry is not None or problem.spec.group > 1:
        return False
    elements = (problem.heads if bias.head is not None else 1) * problem.n_q * problem.n_k
    return problem.batch > 1 and elements * (8 if problem.spec.sums else 4) > SMALL_BIAS


def source(
    spec: AttentionSpec, tile: BackwardTile, fused_preprocess: bool, dense: Dense = NOT_DENSE, stores: bool = False,
    entries_first: bool = False,
) -> tuple[dict[str, int], str]:  # fmt: skip
    """Constants and generated functions of kernels/sm90/backward.cu. dense: of staged_arrays(). The others are
    attributes of the pass.
    """
    constants = {
        **tile.constants(spec), "FUSED_PREPROCESS": fused_preprocess, "NUM_TERMS": 1, "VALUE_WARPS": 0,
        **dense.constants(), "STORES_DS": stores, "ENTRIES_FIRST": entries_first,
        "HAS_DISTANCE_BIAS": reads_distances(spec), "SUMS_BY_DISTANCE": sums_by_warps(spec) and sums_by_distance(spec),
    }  # fmt: skip
    if gives_registers(spec):
        constants |= {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40}
    if sums_by_warps(spec):
        constants |= {"VALUE_WARPS": 2}
        if max(spec.head_dim, spec.head_dim_v) <= 64 and tile.block_q == 64 and not stores:
            constants |= {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40}
    return constants, ("#define DENSE_MAPS\n" if any(dense) else "") + functions(spec, tile)


class Sm90Backward(sm90_bwd_launch.Backward):
    """The backward pass.

    Parameters
    ----------
    stages
        Whether tiles of a dense bias and of a mask may pass through shared memory.
    """

    postprocess_tiles = 8  # convert_some() of kernels/sm90/bwd_preprocess.cuh

    def __init__(
        self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables, stages: bool = True
    ) -> None:  # fmt: skip
        spec, tile = replace(problem.spec, deterministic=in_order(problem)), choice.tile
        self.dense, tile = staged_arrays(spec, tile, tables.device) if stages else (NOT_DENSE, tile)
        self.stores = stores_ds(problem, self.dense.bias)
        self.entries_first = puts_entries_first(problem, self.dense.bias)
        # The density of a block mask is known only when the kernels are launched.
        kind = sm90_bwd_launch.mask_kind(spec)
        long = sm90_bwd_launch.has_long_work_tiles(kind, problem.n_q, problem.n_k, density=1)
        self.fused_preprocess, self.early = long and can_fuse_preprocess(spec, tile), not spec.packed
        super().__init__(generation, problem, choice._replace(tile=tile), tables, spec)
        if any(self.dense):
            plain = partial(Sm90Backward, generation, problem, choice, tables, stages=False)
            self.fallback = Fallback(plain, problem.spec, tables)
        is_read, has_sums = reads_distances(spec), sums_by_warps(spec) and sums_by_distance(spec)
        self._distances = distances.Distances(self, is_read, has_sums) if is_read or has_sums else None

    def source(self) -> tuple[dict[str, int], str]:
        constants, functions = source(
            self.spec, self.tile, self.fused_preprocess, self.dense, self.stores, self.entries_first
        )
        if self.spec.sums:  # of the call: that dQ is accumulated in order does not order these sums
            asked = self.problem.spec
            constants |= {
                "ORDERED_SUMS": False, "VALUES": values_of(asked), "PARAMS_WORDS": arguments.size(asked),
            }  # fmt: skip
        return constants, functions

    def launch(
        self, arguments: Arguments, geometry: LaunchGeometry, stream: int, maps: Sequence[TensorMap] | None = None
    ) -> None:  # fmt: skip
        held = self._distances and self._distances.fill(arguments, stream)
        super().launch(arguments, geometry, stream, maps)
        if self._distances and self._distances.has_sums:
            self._distances.add(arguments, stream)
        del held

    def boxes(self) -> list[tuple[str, int, int]]:
        dim_v = self.spec.head_dim_v
        return [*super().boxes(), ("out", dim_v, 64), ("dout", dim_v, 64)]  # ROWS_PER_LOAD of bwd_preprocess.cuh

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        found = super().geometry(arguments)
        maps, gradient = dense_maps(arguments, self.dense, self.tile.block_q), self._gradient_maps(arguments)
        if found is None or maps is None or gradient is None:
            return None
        return found._replace(maps=[*found.maps, *maps, *(gradient or maps[:1])])  # one that is not used

    def _gradient_maps(self, arguments: Arguments) -> list[tuple[int, Maps]] | None:
        """That of the gradient by the bias, where the kernel stores it; None where TMA cannot address it."""
        bias = self.dense.bias
        if bias is None or not self.stores:
            return []
        shape = arguments.shapes[bias.slot.name]
        of_pairs = [axis if axis is None else shape[axis] for axis in (bias.entry, bias.head)]
        contiguous = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        maps = maps_of_pairs(arguments, bias, self.tile.block_q, self.spec.dtype, contiguous)
        if maps is None or of_pairs != [arguments.entries, arguments.heads]:
            return None
        return [(VALUES + sums_of(self.spec)[bias.slot.name][0], maps)]

    def takes(self, arguments: Arguments) -> bool:
        return self._addresses_fit(arguments) and arguments.stores_values == self.stores

    def _addresses_fit(self, arguments: Arguments) -> bool:
        return super().takes(arguments) and aligned(arguments, [VALUES + array.at for array in self.dense if array])

    def writes_values(self, arguments: Arguments) -> tuple[bool, bool]:
        """Whether the kernels store gradients by values, in the operands' dtype; and whether they write all elements,
        which so need not be 0 before.
        """
        bias = self.dense.bias
        if bias is None or not (arguments.known(self, self.geometry) and self._addresses_fit(arguments)):
            return False, False
        whole = arguments.shapes[bias.slot.name][-2:] == (arguments.n_q, arguments.n_k)
        skips = self.spec.mask is not None or self.spec.kv_lengths  # tiles without a visible pair
        return self.stores, whole and self.stores and not skips


KIND = Kind(BackwardTile, Sm90Backward, sm90_bwd_launch.backward_tiles)

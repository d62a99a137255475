"""The generation for Hopper, with wgmma, TMA and warp specialization: kernels/sm90, docs/hopper.md.

TMA needs addresses and strides that are multiples of 16 bytes. Calls with other arrays go to the kernels of `sm80`, as
do those with too few rows to fill the device.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from ...devices.schema import TileRow
from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..base import EXTRAS
from ..cuda_common import compiler, modification, sm90_launch
from ..cuda_common.affine_score import affine_score
from ..cuda_common.arguments import ROW_TENSORS, Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import (
    Choice,
    Generation,
    Pass,
    TileTables,
    supports_packed,
    supports_paged,
    tile_of,
)
from ..cuda_common.launch import TensorMap
from ..cuda_common.memory import SmemLayout
from ..cuda_common.modification import NOT_DENSE, Dense
from ..cuda_common.params import VALUES
from ..cuda_common.sm90_bwd_launch import BackwardTile, backward_candidates
from ..cuda_common.sm90_launch import (
    ForwardTile,
    LaunchGeometry,
    chunks,
    fitted,
    forward_candidates,
    packed,
    padded,
    staged,
    work_enough,
)
from ..cuda_common.tensor_maps import dense_maps
from ..cuda_common.verify import Fallback
from . import by_distance, sm90_backward, sm90_fp8, sm90_fp16x2, sm90_jvp, sm90_mla, sm90_tf32, specialise
from .sm80 import MIN_TF32X3_DIM, OLDER
from .sm90_fp16x2 import Fp16x2Conversion, num_terms
from .sm90_wgmma import text as wgmma_functions

MAX_DIM = 256
_AFFINE_BYTES = 24  # of a warp: kernels/sm90/layout.cuh


@dataclass(frozen=True)
class Sm90Tile(ForwardTile):
    """A tile of kernels/sm90/forward.cu."""

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        q, v = (num_terms(spec) * chunks(dim) for dim in (spec.head_dim, spec.head_dim_v))
        out = -(-spec.head_dim_v * ITEMSIZE[spec.dtype] // 128)
        smem = self.lay_out(q, v, out, ones=int(sums_rows_by_mma(spec, self)), packed=spec.packed)
        smem.add("V_TILES", 0)
        smem.add("SCALES", 8)
        smem.add("AFFINE", _AFFINE_BYTES * 4 * self.warpgroups)
        return smem

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether it fits shared memory and, as far as O, S and P tell, registers."""
        o, s = padded(spec.head_dim_v) // 2, self.block_k // 2
        # FP16x2 has two accumulators, O and the PV of a tile, which takes the place of P.
        needed = s + (2 * o if num_terms(spec) > 1 else o + s // 2)
        available = self.registers(_classifies(spec))[0] - 24
        return self.shared_memory(spec) <= device.shared_per_block and needed <= available

    def constants(self, spec: AttentionSpec, pack: int, dense: Dense = NOT_DENSE) -> dict[str, int]:
        return {
            **self.common(spec, pack, _classifies(spec)),
            "ROW_SUM_BY_MMA": sums_rows_by_mma(spec, self),
            "FAST_MATH": num_terms(spec) == 1, "NUM_TERMS": num_terms(spec),
            "FP8": False, "GETS_VT": False,
            **modification.forward_constants(spec, reads_distances(spec), dense),
        }  # fmt: skip


def reads_distances(spec: AttentionSpec) -> bool:
    """Whether the kernel reads what a score modification adds by distance. Affine ones need no memory."""
    return spec.score is not None and affine_score(spec.score) is None and by_distance.reads(spec)


def sums_rows_by_mma(spec: AttentionSpec, tile: ForwardTile) -> bool:
    """Whether P V computes the row sums of P, too, with columns of ones behind V. Soft-capping bounds scores, so that
    the speculative softmax does not need the sums at once.
    """
    known = affine_score(spec.score) if spec.score is not None else None
    if known is None or not known.capped or known.sloped or spec.dtype != "bfloat16" or spec.dropout or spec.stats:
        return False
    q, v = chunks(spec.head_dim), chunks(spec.head_dim_v)
    return spec.head_dim_v % 64 == 0 and (v == 1 or (q == v == 2 and tile.stages == 2))


def _classifies(spec: AttentionSpec) -> bool:
    """Whether the scheduler warp classifies K/V tiles."""
    return spec.mask is not None or spec.kv_lengths


def staged_arrays(problem: Problem, tile: Sm90Tile, device: Device) -> tuple[Dense, Sm90Tile]:
    """The arrays whose tiles pass through shared memory, and a tile with room for them."""
    spec = problem.spec
    if spec.packed or spec.paged or spec.dtype == "float32" or packed(problem) > 1:
        return NOT_DENSE, tile
    bias, mask = modification.dense_bias(spec), modification.dense_mask(spec)
    few_first = mask is not None and spec.score is None and chunks(max(spec.head_dim, spec.head_dim_v)) == 1  # faster
    keys_of_tile = sorted({tile.block_k, min(tile.block_k, 64)}, reverse=not few_first)
    kinds = itertools.product(keys_of_tile, range(tile.q_buffers, 0, -1))
    tiles = [replace(tile, block_k=keys, q_buffers=buffers) for keys, buffers in kinds]
    return staged(spec, Dense(bias if bias and bias.itemsize else None, mask), tiles, device)


def forward_source(
    spec: AttentionSpec, tile: Sm90Tile, pack: int, dense: Dense = NOT_DENSE
) -> tuple[dict[str, int], str]:  # fmt: skip
    """Constants and generated functions of kernels/sm90/forward.cu."""
    dtype = "float16" if spec.dtype == "float32" else spec.dtype
    columns = padded(spec.head_dim_v) + 8 * sums_rows_by_mma(spec, tile)
    functions = wgmma_functions(dtype, [tile.block_k], [columns])
    return tile.constants(spec, pack, dense), ("#define DENSE_MAPS\n" if any(dense) else "") + functions


class Sm90Forward(sm90_launch.Forward):
    """The forward pass. stages: whether tiles of a dense bias and of a mask may pass through shared memory."""

    def __init__(self, problem: Problem, choice: Choice, tables: TileTables, stages: bool = True) -> None:
        spec, device, tile, is_float32 = problem.spec, tables.device, choice.tile, problem.spec.dtype == "float32"
        self.dense, tile = staged_arrays(problem, tile, device) if stages else (NOT_DENSE, tile)
        constants, functions = forward_source(spec, tile, packed(problem), self.dense)
        arch = compiler.target(device.capability)
        library = specialise.library("sm90/forward", spec, tuple(constants.items()), arch, functions)
        other: partial[Pass] = partial(tables.plan, OLDER, problem)
        if any(self.dense):
            other = cast("partial[Pass]", partial(Sm90Forward, problem, choice, tables, stages=False))
        fallback = Fallback(other, spec, device, "forward")
        addressed = ("out",) if is_float32 else ROW_TENSORS
        super().__init__(problem, device, tile, choice.why, library, fallback, addressed)
        self._addresses += [VALUES + array.at for array in self.dense if array]
        self.conversion = Fp16x2Conversion(spec, tile.block_k, device) if is_float32 else None
        self.distances = by_distance.Distances(spec, device) if reads_distances(spec) else None
        self.libraries += [each.library for each in (self.conversion, self.distances) if each]

    def takes(self, arguments: Arguments) -> bool:
        # A score modification of longer sequences would compute positions in 64 bits, one pair at a time.
        most = max(arguments.n_q, arguments.n_k, arguments.batch, arguments.heads)
        return super().takes(arguments) and (arguments.spec.score is None or most < modification.NEAR)

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        found = super().geometry(arguments)
        maps = dense_maps(arguments, self.dense, self.tile.block_q)
        return None if found is None or maps is None else found._replace(maps=(*found.maps, *maps))

    def maps(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> tuple[list[TensorMap], Any]:
        (*maps, out), held = super().maps(arguments, geometry, stream)
        if self.conversion is not None:
            (q, k, v), held = self.conversion.terms(arguments, stream, ("q", "k", "v"), "q")
            maps = [q.map(64, self.pack), k.map(self.tile.block_k), v.map(self.tile.block_k)]
        return [*maps, out], held

    def launch(self, geometry: LaunchGeometry, arguments: Arguments, stream: int) -> None:
        held = self.distances and self.distances.fill(arguments, stream)
        super().launch(geometry, arguments, stream)
        del held


class Sm90(Generation):
    """Kernels for Hopper with float16, bfloat16 and, as FP16x2 or TF32, float32."""

    name = "sm90"
    directions: tuple[Direction, ...] = ("forward", "backward")
    takes = EXTRAS.keys() - {"orders_sums"}

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if spec.fp8 and not (verdict := sm90_fp8.supports(problem, direction)):
            return verdict
        if spec.dtype == "float32":
            for supports in (supports_packed, supports_paged):
                if not (verdict := supports(spec, "float32")):
                    return verdict
        if device.capability[0] != 9:
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, not sm_90")
        if spec.dtype == "float64":
            return Verdict(False, "these tensor cores do not support float64")
        if spec.stats and sm90_mla.is_latent(spec):
            return Verdict(False, "its kernels for latent attention compute no statistics")
        if sm90_mla.is_latent(spec):
            return sm90_mla.supports(problem, direction)
        is_float32 = spec.dtype == "float32"
        if spec.stats and (is_float32 or spec.fp8):
            return Verdict(False, "its kernels for float32 and codes of e4m3 compute no statistics")
        most = sm90_fp16x2.MAX_DIM if is_float32 else MAX_DIM
        if max(spec.head_dim, spec.head_dim_v) > most:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {most}")
        if num_terms(spec) > 1 and spec.head_dim < MIN_TF32X3_DIM:
            why = f"float32 of head dim {spec.head_dim}, under {MIN_TF32X3_DIM}, is more accurate without FP16x2"
            return Verdict(False, why)
        if is_float32 and spec.head_dim_v % 4:
            return Verdict(False, f"rows of head dim {spec.head_dim_v} are not a multiple of 16 bytes")
        if not is_float32 and (spec.head_dim % 8 or spec.head_dim_v % 8):
            dims = f"head dims {spec.head_dim} and {spec.head_dim_v}"
            return Verdict(False, f"rows of {dims} are not a multiple of 16 bytes")
        if direction == "backward":
            return sm90_backward.supports_sums(spec)
        return sm90_jvp.supports(spec) if spec.jvp else work_enough(problem, device)

    def profitable(self, problem: Problem, direction: Direction) -> Verdict:
        """Whether FP16x2 saves more time than the conversion takes."""
        spec, scores = problem.spec, problem.pairs
        if spec.dtype != "float32":
            return Verdict(True)
        if scores < sm90_fp16x2.MIN_SCORES:
            return Verdict(False, f"{scores} scores are too few to convert float32 into FP16x2 terms")
        if direction == "forward" and spec.head_dim < sm90_fp16x2.MIN_DIM:
            return Verdict(False, f"head dim {spec.head_dim} is too small to convert float32 into FP16x2 terms")
        return Verdict(True)

    def modified(self, spec: AttentionSpec, direction: Direction) -> bool:
        if spec.dtype == "float32" and direction == "backward":
            return not sm90_tf32.takes(spec)
        if spec.score is None or spec.dropout:
            return spec.dropout
        return num_terms(spec) > 1 or not (
            affine_score(spec.score) if direction == "forward" else sm90_backward.takes_affine_path(spec)
        )

    def kinds(self, problem: Problem, direction: Direction) -> tuple[Any, Callable[..., Pass]]:
        """The kernels for a problem: the class of their tile, and that of the pass."""
        spec = problem.spec
        if direction == "backward":
            if sm90_tf32.takes(spec):
                return BackwardTile, self._tf32_backward
            if spec.dtype == "float32":
                return sm90_fp16x2.Sm90Float32BackwardTile, sm90_fp16x2.Sm90Float32Backward
            return BackwardTile, sm90_backward.Sm90Backward
        if spec.fp8:
            return sm90_fp8.Sm90Fp8Tile, sm90_fp8.Sm90Fp8Forward
        if spec.jvp:
            return sm90_jvp.Sm90JvpTile, sm90_jvp.Sm90Jvp
        return (sm90_mla.Sm90MlaTile, sm90_mla.Sm90MlaForward) if sm90_mla.is_latent(spec) else (Sm90Tile, Sm90Forward)

    def _tf32_backward(self, problem: Problem, choice: Choice, tables: TileTables) -> Pass:
        """Both kernels; the second with the tile that it has where it is the only one, as with sinks."""
        alone = next(tables.choices(self, replace(problem, spec=replace(problem.spec, sinks=True))))
        then = sm90_fp16x2.Sm90Float32Backward(problem, alone, tables)
        return sm90_tf32.Sm90Tf32Backward(problem, choice, tables, then)

    def tile(self, problem: Problem, row: TileRow, device: Device, direction: Direction) -> Any:
        kind, _ = self.kinds(problem, direction)
        if kind is sm90_jvp.Sm90JvpTile:  # rows are of kernels with one softmax
            return None
        return tile_of(kind, row, problem.spec, partial(fitted, device=device))

    def model(self, problem: Problem, device: Device, direction: Direction) -> Choice | None:
        kind, _ = self.kinds(problem, direction)
        if kind is not sm90_jvp.Sm90JvpTile:
            return None
        return Choice(fitted(sm90_jvp.Sm90JvpTile.of(problem.spec), problem.spec, device), None, "the only tile")

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        kind, _ = self.kinds(problem, direction)
        if kind is BackwardTile:
            return list(backward_candidates(problem.spec, device))
        if kind is sm90_fp16x2.Sm90Float32BackwardTile:
            return list(sm90_fp16x2.backward_candidates(problem.spec, device))
        if kind is sm90_fp8.Sm90Fp8Tile:
            return list(sm90_fp8.forward_candidates(problem, device))
        if kind is sm90_jvp.Sm90JvpTile:
            return [fitted(sm90_jvp.Sm90JvpTile.of(problem.spec), problem.spec, device)]
        if kind is sm90_mla.Sm90MlaTile:
            return [sm90_mla.Sm90MlaTile()]
        shapes = itertools.product((192, 128), (128, 112, 96, 160, 80, 64), (1,))
        return forward_candidates(Sm90Tile, problem, device, (*shapes, (192, 128, 0), (128, 128, 0)))

    def plan(self, problem: Problem, choice: Choice, tables: TileTables) -> Pass:
        kind = self.kinds(problem, tables.direction)[1]
        if kind is not sm90_jvp.Sm90Jvp:
            return kind(problem, choice, tables)
        try:
            return sm90_jvp.Sm90Jvp(problem, choice, tables)
        except compiler.SerialisedError as error:  # a modification whose slope takes all registers
            logging.getLogger("flashkit").info("Tangents run on kernels of Ampere: %s", error)
            return tables.plan(OLDER, problem)

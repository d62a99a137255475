"""The generation for Hopper, with wgmma, TMA and warp specialization: kernels/sm90, docs/hopper.md.

TMA needs addresses and strides that are multiples of 16 bytes. Calls with other arrays go to the kernels of `sm80`, as
do those with too few rows to fill the device.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..base import EXTRAS
from ..cuda_common import compiler, modification, sm90_launch
from ..cuda_common.affine_score import affine_score
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Fallback, Generation, Kind, Pass, TileTables
from ..cuda_common.launch import TensorMap
from ..cuda_common.memory import SmemLayout
from ..cuda_common.modification import NOT_DENSE, Dense
from ..cuda_common.params import VALUES
from ..cuda_common.sm90_bwd_launch import BackwardTile, backward_tiles
from ..cuda_common.sm90_launch import ForwardTile, LaunchGeometry, chunks, padded, staged, work_enough
from ..cuda_common.tensor_maps import dense_maps
from . import distances, sm90_backward, sm90_fp8, sm90_fp16x2, sm90_jvp, sm90_mla, sm90_tf32
from .sm80 import MIN_TF32X3_DIM
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

    def source(self, spec: AttentionSpec, pack: int, dense: Dense = NOT_DENSE) -> tuple[dict[str, int], str]:
        constants = {
            **self.common(spec, pack, _classifies(spec)),
            **modification.forward_constants(spec, reads_distances(spec), dense),
            "ROW_SUM_BY_MMA": sums_rows_by_mma(spec, self), "NUM_TERMS": num_terms(spec),
            "FAST_MATH": num_terms(spec) == 1,
        }  # fmt: skip
        dtype = "float16" if spec.dtype == "float32" else spec.dtype
        columns = padded(spec.head_dim_v) + 8 * sums_rows_by_mma(spec, self)
        functions = wgmma_functions(dtype, [self.block_k], [columns])
        return constants, ("#define DENSE_MAPS\n" if any(dense) else "") + functions


def reads_distances(spec: AttentionSpec) -> bool:
    """Whether the kernel reads what a score modification adds by distance. Affine ones need no memory."""
    return spec.score is not None and affine_score(spec.score) is None and distances.reads(spec)


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
    if spec.packed or spec.paged or spec.dtype == "float32" or Sm90Forward.packed(problem) > 1:
        return NOT_DENSE, tile
    bias, mask = modification.dense_bias(spec), modification.dense_mask(spec)
    keys, stages = tile.block_k, tile.stages
    if mask is not None and tile.block_q == 192:
        keys, stages = 96, 2  # bits of more keys would spill
    kinds = (keys, stages), (keys, 2 if mask is not None else stages), (min(keys, 64), stages)
    of_keys = [replace(tile, block_k=keys, stages=stages) for keys, stages in kinds]
    tiles = [replace(each, q_buffers=n) for each in of_keys for n in range(tile.q_buffers, 0, -1)]
    return staged(spec, Dense(bias if bias and bias.itemsize else None, mask), tiles, device)


class Sm90Forward(sm90_launch.Forward):
    """The forward pass. stages: whether tiles of a dense bias and of a mask may pass through shared memory."""

    def __init__(
        self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables, stages: bool = True
    ) -> None:  # fmt: skip
        if is_float32 := problem.spec.dtype == "float32":
            self.addressed = ("out",)
        self.dense, tile = staged_arrays(problem, choice.tile, tables.device) if stages else (NOT_DENSE, choice.tile)
        super().__init__(generation, problem, choice._replace(tile=tile), tables)
        self._addresses += [VALUES + array.at for array in self.dense if array]
        if any(self.dense):
            plain = partial(Sm90Forward, generation, problem, choice, tables, stages=False)
            self.fallback = Fallback(plain, problem.spec, tables)
        self.conversion = Fp16x2Conversion(self, self.tile.block_k) if is_float32 else None
        self.distances = distances.Distances(self) if reads_distances(self.spec) else None

    def source(self) -> tuple[Any, ...]:
        return self.tile.source(self.spec, self.pack, self.dense)

    def supports(self, arguments: Arguments) -> bool:
        # A score modification of longer sequences would compute positions in 64 bits, one pair at a time.
        most = max(arguments.n_q, arguments.n_k, arguments.batch, arguments.heads)
        return super().supports(arguments) and (arguments.spec.score is None or most < modification.NEAR)

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

    def launch(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> None:
        held = self.distances and self.distances.fill(arguments, stream)
        super().launch(arguments, geometry, stream)
        del held


class Sm90(Generation):
    """Kernels for Hopper with float16, bfloat16 and, as FP16x2 or TF32, float32."""

    name = "sm90"
    takes = EXTRAS.keys() - {"orders_sums"}

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec, is_float32 = problem.spec, problem.spec.dtype == "float32"
        if spec.fp8 and not (verdict := sm90_fp8.supports(problem, direction)):
            return verdict
        if is_float32 and (spec.packed or spec.paged):
            what = "packed sequences" if spec.packed else "keys in pages"
            return Verdict(False, f"{what} have no float32 kernels here")
        if device.capability[0] != 9:
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, not sm_90")
        if spec.dtype == "float64":
            return Verdict(False, "these tensor cores do not support float64")
        if sm90_mla.is_latent(spec):
            if spec.stats:
                return Verdict(False, "its kernels for latent attention compute no statistics")
            return sm90_mla.supports(problem, direction)
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

    def kind(self, problem: Problem, direction: Direction) -> Kind:
        spec = problem.spec
        if direction == "backward":
            if sm90_tf32.takes(spec):
                return Kind(BackwardTile, sm90_tf32.Sm90Tf32Backward, backward_tiles)
            return sm90_fp16x2.BACKWARD if spec.dtype == "float32" else sm90_backward.KIND
        if spec.fp8:
            return sm90_fp8.KIND
        if spec.jvp:
            return sm90_jvp.KIND
        return sm90_mla.KIND if sm90_mla.is_latent(spec) else _FORWARD

    def plan(self, problem: Problem, choice: Choice, tables: TileTables) -> Pass:
        try:
            return super().plan(problem, choice, tables)
        except compiler.SerialisedError as error:
            if not problem.spec.jvp:
                raise
            # The slope of a modification takes all registers.
            logging.getLogger("flashkit").info("Tangents run on kernels of Ampere: %s", error)
            return self.older(problem, tables)


def _forward_tiles(problem: Problem, device: Device) -> list[Sm90Tile]:
    shapes = itertools.product((192, 128), (128, 112, 96, 160, 80, 64), (1,))
    every = (*shapes, (192, 128, 0), (128, 128, 0))
    return [Sm90Tile(rows, keys, q_buffers=3, turns=turns) for rows, keys, turns in every]


_FORWARD = Kind(Sm90Tile, Sm90Forward, _forward_tiles)

"""The generation for Hopper: wgmma, the copy engine, warp groups with roles: kernels/sm90_*.cu, docs/hopper.md.

Tiles come by the copy engine, which wants addresses and strides of whole 16 bytes. Calls whose arrays are not so go to
the kernels of `sm80`, as do those with too few rows to fill the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler, modification, sm90_launch
from ..cuda_common.affine_score import form
from ..cuda_common.arguments import ROW_TENSORS, Arguments
from ..cuda_common.device import Device
from ..cuda_common.fallback import Fallback
from ..cuda_common.generation import Generation, Pass, tile_of
from ..cuda_common.launch import TensorMap
from ..cuda_common.sm90_bwd_launch import BackwardTile, backward_candidates
from ..cuda_common.sm90_launch import (
    CHOSEN,
    LIST,
    ForwardTile,
    Shaped,
    chunks,
    packed,
    padded,
    usual_tile,
    with_most_buffers,
    work_enough,
)
from . import sm90_backward, sm90_fp16x2, specialise
from .sm80 import LEAST_SPLIT, Sm80Forward
from .sm90_fp16x2 import Split, parts
from .sm90_wgmma import text as products

MAX_DIM = 256


@dataclass(frozen=True)
class Sm90Tile(ForwardTile):
    """A tile of kernels/sm90_forward.cu."""

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of a block."""
        q, v = (parts(spec) * chunks(dim) for dim in (spec.head_dim, spec.head_dim_v))
        out = -(-spec.head_dim_v * ITEMSIZE[spec.dtype] // 128)
        scales, gains = 8, 24 * 4 * self.groups
        return self.buffers(q, v, out) + scales + gains + (self.block_k * 128 if sums_with_values(spec, self) else 0)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """In shared memory and, as far as sums and weights tell, in registers."""
        sums, scores = padded(spec.head_dim_v) // 2, self.block_k // 2
        # Two terms have sums of a tile beside those of all, which take the place of its scores.
        numbers = scores + (2 * sums if parts(spec) > 1 else sums + scores // 2)
        room = self.registers(_finding(spec))[0] - 24
        return self.shared_memory(spec) <= device.shared_per_block and numbers <= room

    def constants(self, spec: AttentionSpec, pack: int) -> dict[str, int]:
        return {
            **self.common(spec, pack, _finding(spec)),
            "ROW_SUM_BY_MMA": sums_with_values(spec, self),
            "CHUNK_BYTES": LIST, "FAST_MATH": parts(spec) == 1, "PARTS": parts(spec),
            "READS_ARRAYS": any(slot.ndim is not None for slot in spec.slots),
            "FAR": modification.NEAR if spec.score is not None else 2**30,
            "POSITIONS": modification.POSITIONS.index(modification.positions(spec)),
        }  # fmt: skip


def sums_with_values(spec: AttentionSpec, tile: ForwardTile) -> bool:
    """Whether the product with the values sums the weights, too, by columns of ones: where soft-capping bounds weights,
    nothing has to be known of their sum before.
    """
    known = form(spec.score) if spec.score is not None else None
    if known is None or not known.capped or known.sloped or spec.dtype != "bfloat16" or spec.dropout:
        return False
    q, v = chunks(spec.head_dim), chunks(spec.head_dim_v)
    return spec.head_dim_v % 64 == 0 and (v == 1 or (q == v == 2 and tile.stages == 2))


def _finding(spec: AttentionSpec) -> bool:
    """Whether tiles are looked for."""
    return spec.mask is not None or spec.kv_lengths


def forward_tile(problem: Problem) -> Sm90Tile:
    """What does well on an H200."""
    spec = problem.spec
    modified = spec.dropout or (spec.score is not None and (parts(spec) > 1 or form(spec.score) is None))
    if spec.dtype == "float32" and max(spec.head_dim, spec.head_dim_v) > 64:
        return Sm90Tile(128, 128 if parts(spec) == 1 else 64, q_buffers=1)
    return usual_tile(Sm90Tile, problem, modified)


def forward_candidates(problem: Problem, device: Device) -> list[Sm90Tile]:
    """Tiles worth trying, the one of `forward_tile` first."""
    first = forward_tile(problem)
    tiles = [first, replace(first, turns=0)]
    for rows, keys in itertools.product((192, 128), (128, 112, 96, 160, 80, 64)):
        tiles += with_most_buffers(Sm90Tile(rows, keys), problem.spec, device)
    return list(dict.fromkeys(tiles))


def forward_source(spec: AttentionSpec, tile: Sm90Tile, pack: int) -> tuple[dict[str, int], str]:
    """Constants and generated functions of kernels/sm90_forward.cu."""
    dtype = "float16" if spec.dtype == "float32" else spec.dtype
    columns = padded(spec.head_dim_v) + 8 * sums_with_values(spec, tile)
    return tile.constants(spec, pack), products(dtype, [tile.block_k], [columns])


class Sm90Forward(sm90_launch.Forward):
    """The forward pass."""

    def __init__(self, problem: Problem, device: Device, tile: Sm90Tile | None = None, why: str = CHOSEN) -> None:
        spec, tile = problem.spec, tile or forward_tile(problem)
        constants, functions = forward_source(spec, tile, packed(problem))
        arch = compiler.target(device.capability)
        library = specialise.library("sm90/forward", spec, tuple(constants.items()), arch, functions)
        spare = Fallback(partial(Sm80Forward, problem, device), spec, device, "forward")
        wide = spec.dtype == "float32"
        super().__init__(problem, device, tile, why, library, spare, ("out",) if wide else ROW_TENSORS)
        self.split = Split(spec, tile.block_k, device) if wide else None
        if self.split:
            self.libraries.append(self.split.library)

    def takes(self, arguments: Arguments) -> bool:
        # A score modification of more would count in 64 bits, one pair at a time.
        most = max(arguments.n_q, arguments.n_k, arguments.batch, arguments.heads)
        return super().takes(arguments) and (arguments.spec.score is None or most < modification.NEAR)

    def maps(self, arguments: Arguments, shaped: Shaped, stream: int) -> tuple[list[TensorMap], Any]:
        (*maps, out), held = super().maps(arguments, shaped, stream)
        if self.split is not None:
            (q, k, v), held = self.split.terms(arguments, stream, ("q", "k", "v"), "q")
            maps = [q.map(64, self.pack), k.map(self.tile.block_k), v.map(self.tile.block_k)]
        return [*maps, out], held


class Sm90(Generation):
    """Kernels for Hopper with float16, bfloat16 and, as terms of float16, float32."""

    name = "sm90"
    has_heuristic = True
    directions: tuple[Direction, ...] = ("forward", "backward")

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        spec = problem.spec
        if device.capability[0] != 9:
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, not sm_90")
        if spec.dtype == "float64":
            return Verdict(False, "float64 is not for these tensor cores")
        wide = spec.dtype == "float32"
        most = sm90_fp16x2.MAX_DIM if wide else MAX_DIM
        if max(spec.head_dim, spec.head_dim_v) > most:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {most}")
        if parts(spec) > 1 and spec.head_dim < LEAST_SPLIT:
            return Verdict(False, f"float32 of head dim {spec.head_dim}, under {LEAST_SPLIT}, is exacter without terms")
        if wide and spec.head_dim_v % 4:
            return Verdict(False, f"rows of head dim {spec.head_dim_v} are not whole 16 bytes")
        if not wide and (spec.head_dim % 8 or spec.head_dim_v % 8):
            return Verdict(False, f"rows of head dims {spec.head_dim} and {spec.head_dim_v} are not whole 16 bytes")
        if direction == "backward":
            return Verdict(True)
        return work_enough(problem, device, forward_tile(problem).block_q)

    def profitable(self, problem: Problem, direction: Direction) -> Verdict:
        """Whether splitting float32 into terms beforehand is made up for; measured on an H200."""
        spec, scores = problem.spec, problem.pairs
        if spec.dtype != "float32":
            return Verdict(True)
        if scores < sm90_fp16x2.LEAST_SCORES:
            return Verdict(False, f"{scores} scores do not repay splitting float32 into terms")
        if direction == "forward" and spec.head_dim < sm90_fp16x2.LEAST_DIM:
            return Verdict(False, f"products of head dim {spec.head_dim} do not repay splitting float32 into terms")
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        if direction == "backward" and problem.spec.dtype == "float32":
            return list(sm90_fp16x2.backward_candidates(problem.spec, device))
        if direction == "backward":
            return list(backward_candidates(problem.spec, device, sm90_backward.tile_of(problem.spec)))
        return list(forward_candidates(problem, device))

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Pass:
        kind: Any
        made: Callable[..., Pass]
        if direction == "forward":
            kind, made = Sm90Tile, Sm90Forward
        elif problem.spec.dtype == "float32":
            kind, made = sm90_fp16x2.Sm90Float32BackwardTile, sm90_fp16x2.Sm90Float32Backward
        else:
            kind, made = BackwardTile, sm90_backward.Sm90Backward
        return made(problem, device, *tile_of(kind, row, lambda x: x.fits(problem.spec, device), CHOSEN))

"""The backward pass for Hopper: kernels/sm90_backward.cu."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import partial

from ...spec import AttentionSpec, Problem
from ..cuda_common import compiler, hopper_backward
from ..cuda_common.device import Device
from ..cuda_common.form import form
from ..cuda_common.generation import Spare
from ..cuda_common.hopper import CHOSEN, chunks, padded
from ..cuda_common.hopper_backward import BackwardTile, backward_candidates, backward_tile, keys_shared
from ..cuda_common.modification import is_small
from . import specialise
from .sm80 import Sm80Backward
from .sm90_products import text as products


@dataclass(frozen=True)
class Sm90BackwardTile(BackwardTile):
    """Where warp groups share keys, these are the 64 rows of their products."""

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        return super().fits(spec, device) and (self.block_k == 64 or not keys_shared(spec))


def functions(spec: AttentionSpec, tile: BackwardTile) -> str:
    """Text that goes before the kernel: its products."""
    dq_rows = tile.block_q if keys_shared(spec) or chunks(spec.head_dim) == 2 else tile.block_q // 2
    text = products(spec.dtype, [tile.block_q, dq_rows], [padded(spec.head_dim), padded(spec.head_dim_v)])
    return "#define KEYS_ARE_SHARED\n" + text if keys_shared(spec) else text


def by_form(spec: AttentionSpec) -> bool:
    """Whether the kernel takes the score modification by its form (sm90_backward_pairs.cuh, BY_FORM)."""
    known = form(spec.score) if spec.score is not None and not spec.dropout and is_small(spec) else None
    return known is not None and known.even and known.diagonal


def tile_of(spec: AttentionSpec) -> Sm90BackwardTile:
    """What does well on an H200."""
    if keys_shared(spec):
        return Sm90BackwardTile(64, 64, key_buffers=1)
    return Sm90BackwardTile(*astuple(backward_tile(spec, spec.score is None or by_form(spec))))


def candidates(spec: AttentionSpec, device: Device) -> list[Sm90BackwardTile]:
    """Tiles worth trying, the one of `tile_of` first."""
    tiles = (Sm90BackwardTile(*astuple(tile)) for tile in [tile_of(spec), *backward_candidates(spec, device)])
    return list(dict.fromkeys(tile for tile in tiles if tile.fits(spec, device)))


class Sm90Backward(hopper_backward.Backward):
    """The backward pass."""

    def __init__(self, problem: Problem, device: Device, tile: BackwardTile | None = None, why: str = CHOSEN) -> None:
        spec, tile = problem.spec, tile or tile_of(problem.spec)
        constants, arch = tuple(tile.constants(spec).items()), compiler.target(device.capability)
        library = specialise.library("sm90_backward", spec, constants, arch, functions(spec, tile))
        spare = Spare(partial(Sm80Backward, problem, device), spec, device, "backward")
        super().__init__(spec, device, tile, why, library, specialise.library, spare)

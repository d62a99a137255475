"""The backward pass for Hopper: kernels/sm90_backward.cu."""

from __future__ import annotations

from functools import partial

from ...spec import AttentionSpec, Problem
from ..cuda_common import compiler, hopper_backward
from ..cuda_common.device import Device
from ..cuda_common.form import form
from ..cuda_common.generation import Spare
from ..cuda_common.hopper import CHOSEN, chunks, padded
from ..cuda_common.hopper_backward import BackwardTile, backward_tile, keys_shared
from ..cuda_common.modification import is_small
from . import specialise
from .sm80 import Sm80Backward
from .sm90_products import text as products


def functions(spec: AttentionSpec, tile: BackwardTile) -> str:
    """Text that goes before the kernel: its products."""
    dim, dim_v, rows = padded(spec.head_dim), padded(spec.head_dim_v), tile.block_q
    if keys_shared(spec):
        return "#define KEYS_ARE_SHARED\n" + products(spec.dtype, [rows, dim], [dim_v])
    return products(spec.dtype, [rows, rows if chunks(dim) == 2 else rows // 2], [dim, dim_v])


def by_form(spec: AttentionSpec) -> bool:
    """Whether the kernel takes the score modification by its form (sm90_backward_pairs.cuh, BY_FORM)."""
    known = form(spec.score) if spec.score is not None and not spec.dropout and is_small(spec) else None
    return known is not None and known.even and known.diagonal


def tile_of(spec: AttentionSpec) -> BackwardTile:
    """What does well on an H200."""
    return backward_tile(spec, spec.score is None or by_form(spec))


class Sm90Backward(hopper_backward.Backward):
    """The backward pass."""

    def __init__(self, problem: Problem, device: Device, tile: BackwardTile | None = None, why: str = CHOSEN) -> None:
        spec, tile = problem.spec, tile or tile_of(problem.spec)
        constants, arch = tuple(tile.constants(spec).items()), compiler.target(device.capability)
        library = specialise.library("sm90_backward", spec, constants, arch, functions(spec, tile))
        spare = Spare(partial(Sm80Backward, problem, device), spec, device, "backward")
        super().__init__(spec, device, tile, why, library, specialise.library, spare)

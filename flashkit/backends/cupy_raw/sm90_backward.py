"""The backward pass for Hopper: kernels/sm90_backward.cu."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...spec import AttentionSpec, Problem
from ..cuda_common import compiler, sm90_bwd_launch
from ..cuda_common.affine_score import form
from ..cuda_common.device import Device
from ..cuda_common.fallback import Fallback
from ..cuda_common.modification import is_small, looks_at_ranges
from ..cuda_common.sm90_bwd_launch import BackwardTile, backward_tile, keys_shared
from ..cuda_common.sm90_launch import CHOSEN, chunks, padded
from . import specialise
from .sm80 import Sm80Backward
from .sm90_wgmma import text as products_of


def functions(spec: AttentionSpec, tile: BackwardTile) -> str:
    """Text that goes before the kernel: its products."""
    dim, dim_v, rows = padded(spec.head_dim), padded(spec.head_dim_v), tile.block_q
    if keys_shared(spec):
        return "#define KEYS_ARE_SHARED\n" + products_of(spec.dtype, [rows, dim], [dim_v])
    return products_of(spec.dtype, [rows, rows if chunks(dim) == 2 else rows // 2], [dim, dim_v])


def by_form(spec: AttentionSpec) -> bool:
    """Whether the kernel takes the score modification by its form (sm90_backward_pairs.cuh, BY_FORM)."""
    known = form(spec.score) if spec.score is not None and not spec.dropout and is_small(spec) else None
    return known is not None and known.even and known.diagonal


def tile_of(spec: AttentionSpec) -> BackwardTile:
    """What does well on an H200."""
    return backward_tile(spec, spec.score is None or by_form(spec))


# Tokens, with more than 64 columns and with up to 64. Powers of two, for a plan is for all lengths up to the next one.
SHORT, SHORT_NARROW = 2048, 512


def in_order(problem: Problem) -> bool:
    """Whether dQ is added in an order: where that is asked for, or faster, as its sums need not be cleared then. On an
    H200, causal, within these lengths it is 1.01 to 1.17 times as fast (0.98 with little work for each block),
    beyond them 0.93 to 1.01, but with 96 or 192 columns 1.01 to 1.07; where tiles are looked up in arrays it is slower.
    """
    spec, longest = problem.spec, max(problem.n_q, problem.n_k)
    short = longest <= (SHORT if max(spec.head_dim, spec.head_dim_v) > 64 else SHORT_NARROW)
    return spec.deterministic or (short and spec.mask is not None and not looks_at_ranges(spec))


def room_beside(spec: AttentionSpec, tile: BackwardTile) -> bool:
    """Whether the kernel could prepare rows itself (kernels/sm90_backward_rows.cuh): O and dO have the place of the
    next item's keys, and its warps keep no order. With up to 64 columns and a modification of scores registers get
    short: 0.98 times as fast.
    """
    room = tile.key_buffers > 1 and not keys_shared(spec) and chunks(spec.head_dim_v) <= chunks(spec.head_dim)
    return room and not spec.deterministic and (spec.score is None or chunks(spec.head_dim) > 1)


def source(spec: AttentionSpec, tile: BackwardTile, beside: bool) -> tuple[dict[str, int], str]:
    """Constants and generated functions of kernels/sm90_backward.cu."""
    return {**tile.constants(spec), "BESIDE": beside}, functions(spec, tile)


class Sm90Backward(sm90_bwd_launch.Backward):
    """The backward pass."""

    def __init__(self, problem: Problem, device: Device, tile: BackwardTile | None = None, why: str = CHOSEN) -> None:
        spec, tile = replace(problem.spec, deterministic=in_order(problem)), tile or tile_of(problem.spec)
        seen = sm90_bwd_launch.seen(spec)
        long = sm90_bwd_launch.many_steps(seen, problem.n_q, problem.n_k, density=1)  # of blocks each call has its own
        beside, arch = long and room_beside(spec, tile), compiler.target(device.capability)
        constants, products = source(spec, tile, beside)
        library = specialise.library("sm90/backward", spec, tuple(constants.items()), arch, products)
        spare = Fallback(partial(Sm80Backward, problem, device), spec, device, "backward")
        super().__init__(spec, device, tile, why, library, specialise.library, spare, beside, early=True)

    def boxes(self) -> list[tuple[str, int, int]]:
        dim_v = self.spec.head_dim_v
        return [*super().boxes(), ("out", dim_v, 64), ("dout", dim_v, 64)]  # AT_A_TIME of sm90_backward_rows.cuh

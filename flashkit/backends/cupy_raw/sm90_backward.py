"""Hopper's backward pass in CUDA C++: kernels/sm90/backward.cu."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...mods import expr
from ...spec import AttentionSpec, Problem, Verdict
from ..cuda_common import arguments, compiler, sm90_bwd_launch
from ..cuda_common.affine_score import affine_score
from ..cuda_common.generation import Choice, TileTables
from ..cuda_common.modification import adds_rows, looks_at_ranges, positions, slope_is_one, values_of
from ..cuda_common.sm90_bwd_launch import BackwardTile, cluster_size
from ..cuda_common.sm90_launch import chunks, padded
from ..cuda_common.verify import Fallback
from . import specialise
from .sm80 import OLDER
from .sm90_wgmma import text as wgmma_functions


def functions(spec: AttentionSpec, tile: BackwardTile) -> str:
    """Text that goes before the kernel: its wgmma shapes, and which main loop."""
    dim, dim_v, rows = padded(spec.head_dim), padded(spec.head_dim_v), tile.block_q
    dtype = "float16" if spec.dtype == "float32" else spec.dtype
    if cluster_size(spec) > 1:
        return "#define CLUSTER_MAINLOOP\n" + wgmma_functions(dtype, [rows, dim], [dim_v])
    return wgmma_functions(dtype, [rows, rows if chunks(dim) == 2 else rows // 2], [dim, dim_v])


def takes_affine_path(spec: AttentionSpec) -> bool:
    """Whether the kernel has a path for the score modification (kernels/sm90/bwd_softmax.cuh, AFFINE_PATH)."""
    if spec.score is None or spec.dropout or positions(spec) == "any":
        return False
    known = affine_score(spec.score)
    return known is not None and known.even and known.diagonal


def supports_wrt(spec: AttentionSpec) -> Verdict:
    """Whether the kernel sums gradients by values of a score modification: registers do not hold scores until dS is
    there, nor P apart from the slope.
    """
    if not spec.wrt:
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
    return adds_rows(spec) and cluster_size(spec) == 1 and not spec.deterministic


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


def source(spec: AttentionSpec, tile: BackwardTile, fused_preprocess: bool) -> tuple[dict[str, int], str]:
    """Constants and generated functions of kernels/sm90/backward.cu."""
    constants = {**tile.constants(spec), "FUSED_PREPROCESS": fused_preprocess, "NUM_TERMS": 1, "VALUE_WARPS": 0}
    if sums_by_warps(spec):
        constants |= {"VALUE_WARPS": 2}
        if max(spec.head_dim, spec.head_dim_v) <= 64:
            constants |= {"CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40}
    return constants, functions(spec, tile)


class Sm90Backward(sm90_bwd_launch.Backward):
    """The backward pass."""

    postprocess_tiles = 8  # convert_some() of kernels/sm90/bwd_preprocess.cuh

    def __init__(self, problem: Problem, choice: Choice, tables: TileTables) -> None:
        spec, tile, device = replace(problem.spec, deterministic=in_order(problem)), choice.tile, tables.device
        kind = sm90_bwd_launch.mask_kind(spec)
        # The density of a block mask is known only when the kernels are launched.
        long = sm90_bwd_launch.has_long_work_tiles(kind, problem.n_q, problem.n_k, density=1)
        fused, arch = long and can_fuse_preprocess(spec, tile), compiler.target(device.capability)
        constants, wgmma = source(spec, tile, fused)
        if spec.wrt:  # of the call: that dQ is accumulated in order does not order these sums
            asked = problem.spec
            constants |= {
                "ORDERED_SUMS": False, "VALUES": values_of(asked), "PARAMS_WORDS": arguments.size(asked),
            }  # fmt: skip
        library = specialise.library("sm90/backward", spec, tuple(constants.items()), arch, wgmma)
        fallback, early = Fallback(partial(tables.plan, OLDER, problem), spec, device, "backward"), not spec.packed
        super().__init__(spec, device, tile, choice.why, library, specialise.library, fallback, fused, early)

    def boxes(self) -> list[tuple[str, int, int]]:
        dim_v = self.spec.head_dim_v
        return [*super().boxes(), ("out", dim_v, 64), ("dout", dim_v, 64)]  # ROWS_PER_LOAD of bwd_preprocess.cuh

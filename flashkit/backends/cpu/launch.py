"""Launches: tile sizes, work tiles and scratch memory of a kernel for a number of threads."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...spec import DTYPES, ITEMSIZE
from . import arguments as at
from . import scratch, threads
from .argument_block import ArgumentBlock
from .micro.compile import addresses
from .plan import CpuPlan

MIN_SPLIT_KEYS = 512
"""The fewest keys of a split in decoding on several threads."""

DETERMINISTIC_SPLIT_KEYS = 1024
"""Those of each split where results must not depend on the threads, nor on the other sequences of a batch."""

SPLITS_PER_THREAD = 8
"""Work tiles per thread in decoding, about: enough for threads of unequal speed to share."""

BYTES_IN_CACHE = 1 << 19
"""Bytes of keys that decoding reads at once where values are views of them: with the queries and O they fit any L2."""

DECODE_FLOP_COST = 4
"""Time of a FLOP in decoding, which waits for memory, over that of one whose operands are in cache."""


class Launch(NamedTuple):
    """A complete argument block but for the addresses of the call's arrays and of its scratch memory."""

    args: np.ndarray
    address: int
    memory: int  # bytes that a call needs: a copy of the block, and scratch memory


def rounded(n: int, step: int) -> int:
    """The least multiple of step, at least one of it, that n fits in."""
    return max(-(-n // step), 1) * step


def per_thread(size: int) -> int:
    """Bytes from one thread's scratch memory to the next: no shared cache line, and different cache sets."""
    return rounded(size, 64) + 64


def padded_dims(plan: CpuPlan) -> tuple[int, int]:
    """Head dims as scratch memory has room for: `padded` of kernels/operands.py and operands_bf16_pairs.py."""
    spec = plan.problem.spec
    d, dv = spec.head_dim, spec.head_dim_v
    return (rounded(d, 16), rounded(dv, 16)) if plan.bf16_pairs else (d, dv)


def flops_per_pair(plan: CpuPlan) -> int:
    """FLOPs of the forward pass."""
    spec = plan.problem.spec
    return 2 * (spec.head_dim + spec.head_dim_v) * (DECODE_FLOP_COST if plan.decodes else 1)


def forward_launch(plan: CpuPlan, block: ArgumentBlock, thread_count: int) -> Launch:
    """kernels/forward.py. Blocks of queries shrink until each thread has a few."""
    tile, args = plan.tile, block.args.copy()
    panel, sizes = int(args[at.PANEL]), block.sizes
    block_q, block_k = rounded(min(tile.block_q, sizes.n_q), panel), rounded(tile.block_k, int(at.STRIP))
    block_k = min(block_k, rounded(sizes.n_k, int(at.STRIP)))
    while block_q > panel and sizes.q_tiles(block_q)[1] < 4 * thread_count:
        block_q -= panel
    d, dv = padded_dims(plan)
    size = DTYPES[plan.problem.spec.lse_dtype].size
    spec = plan.problem.spec
    gathered = ITEMSIZE[spec.dtype] if spec.paged or spec.pe_dim else 0
    more = 2 * block_q * spec.stats
    if spec.jvp:  # two of all, and a row more of O
        d, dv, more = 2 * d, 2 * dv + 1, block_k * panel
    layout = scratch.forward_layout(
        block_q // panel, panel, block_k, d, dv, size, int(args[at.TRANSPOSED_TILES]), gathered, more
    )
    args[at.BLOCK_Q], args[at.BLOCK_K] = block_q, block_k
    args[at.Q_TILES], args[at.WORK_TILES] = sizes.q_tiles(block_q)
    args[at.KERNEL] = plan.forward["forward"]
    args[at.SCRATCH_BYTES] = per_thread(layout.total)
    return complete(args, int(args[at.SCRATCH_BYTES]) * thread_count, thread_count)


def decode_launch(plan: CpuPlan, block: ArgumentBlock, thread_count: int) -> Launch:
    """kernels/decode.py. How the keys are split follows from the lengths of each call (kernels/launch.py)."""
    spec, args = plan.problem.spec, block.args.copy()
    size = DTYPES[spec.lse_dtype].size
    lanes, n_k, heads = int(args[at.LANES]), int(args[at.N_K]), int(args[at.BATCH] * args[at.HEADS]) // spec.group
    rows, block_k = spec.group * int(args[at.N_Q]), rounded(plan.tile.block_k, int(at.STRIP))
    max_splits = 1
    if spec.deterministic:
        args[at.SPLIT_KEYS] = rounded(DETERMINISTIC_SPLIT_KEYS, block_k)
        max_splits = -(-n_k // int(args[at.SPLIT_KEYS]))
    elif thread_count > 1:
        max_splits = max(1, min(-(-SPLITS_PER_THREAD * thread_count // heads), n_k // MIN_SPLIT_KEYS))
    parts = [spec.head_dim - spec.pe_dim, spec.pe_dim][: 1 + (spec.pe_dim > 0)]
    k_pack = 2 if plan.decode_bf16_pairs else 1
    words = sum(rounded(width, k_pack * lanes) // k_pack for width in parts)
    keys = int(at.TILES_PER_STRETCH) * block_k
    layout = scratch.decode_layout(rows, spec.group, keys, words, size, len(parts), spec.stats)
    args[at.BLOCK_K], args[at.MAX_SPLITS], args[at.KERNEL] = block_k, max_splits, plan.forward["decode"]
    args[at.MIN_SPLIT_KEYS] = MIN_SPLIT_KEYS
    args[at.SERIAL_KEYS] = -(-threads.SERIAL_FLOPS // (flops_per_pair(plan) * block.sizes.heads * block.sizes.n_q))
    tile_bytes = block_k * max(int(args[at.K + 3]), 1)
    args[at.TILES_IN_CACHE] = min(max(BYTES_IN_CACHE // tile_bytes, 1), int(at.TILES_PER_STRETCH))
    args[at.SCRATCH_BYTES] = per_thread(layout.total)
    args[at.PARTIALS] = args[at.SCRATCH_BYTES] * thread_count
    args[at.PARTIAL_BYTES] = per_thread(scratch.partial_layout(rows, spec.head_dim_v, size).total)
    # The gemv micro-kernels choose their own register blocks.
    registers = replace(plan.register_block(plan.tile, plan.decode_bf16_pairs), rows=1, vectors=1)
    if spec.kv_format:
        registers = replace(registers, storage=spec.kv_format)
    micro = addresses(registers, gemv_kernels=True)
    args[at.GEMV_QK], args[at.GEMV_SOFTMAX], args[at.GEMV_PV] = (
        micro["gemv_qk"], micro["gemv_softmax"], micro["gemv_pv"],
    )  # fmt: skip
    slots = max(thread_count, heads * max_splits if max_splits > 1 else 1)
    return complete(args, int(args[at.PARTIALS] + args[at.PARTIAL_BYTES] * slots), thread_count)


def complete(args: np.ndarray, scratch_bytes: int, thread_count: int) -> Launch:
    """The launch of an argument block that is complete but for the threads' pool."""
    if thread_count > 1:
        threads.set_pool(args)
    return Launch(args, args.ctypes.data, at.HEADER + scratch_bytes)

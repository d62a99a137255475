"""The forward and the backward pass of a call: argument block, scratch memory, kernels in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...mods import expr
from ...spec import Gradients, Operands
from ..base import Bound, BoundBackward
from . import arguments as at
from . import modify, scratch, scratch_pool, threads
from .argument_block import ArgumentBlock, address_of, strides_of
from .launch import Launch, complete, decode_launch, flops_per_pair, forward_launch, padded_dims, per_thread, rounded
from .plan import CpuPlan

WORK_TILES_A_THREAD = 3
"""The fewest of the backward pass on several threads, so that a busy core can take fewer."""

DETERMINISTIC_THREADS = 8
"""For how many threads keys are split where gradients must not depend on their number."""

DQ_BYTES_A_THREAD = 2**23
"""Bytes of dq_accum that these may take. Beyond, there are as many work tiles as threads."""

PARTS_BYTES = 2**24
"""Bytes of gradients by a value, for each key/value head, or of dq_accum, up to which work tiles have their own."""

LENGTHS = "kv_lengths", "q_offset", "page_table"
"""What a bound call may get with each call, in this order: none, the first two, or all; and scales of k and v."""


def bind_forward(plan: CpuPlan, operands: Operands, per_call: Sequence[str] = ()) -> Bound:
    """The forward pass with all that does not depend on contents done: f(q, k, v, out, lse, *lengths, *scales)."""
    names = [name for name in per_call if name in operands.arrays]  # the first ones
    block = ArgumentBlock(plan, operands, plan.tile, plan.modify_forward, scores_whole=False, per_call=names)
    count_lengths = sum(name in LENGTHS for name in per_call)
    block.args[at.PER_CALL] |= (0, 0, 1, 3)[count_lengths] | 4 * ("k_scale" in per_call)
    end = 5 + len(names)
    flops_of_pairs = flops_per_pair(plan) * block.sizes.heads
    most_flops = flops_of_pairs * block.sizes.pairs
    parallel = most_flops >= threads.SERIAL_FLOPS
    make_launch = decode_launch if plan.decodes else forward_launch
    launches: dict[int, Launch] = {}  # by number of threads
    call = threads.entry("call")

    def bound(*tensors: Any, count: int = 0, stop: int = 0) -> None:
        if names:
            tensors = *tensors[:5], *tensors[end:], *block.values_of(dict(zip(names, tensors[5:end], strict=True)))
        count = count or (threads.count() if parallel else 1)
        if (launch := launches.get(count)) is None:
            launch = launches[count] = make_launch(plan, block, count)
        memory = scratch_pool.acquire(launch.memory)
        try:
            call(launch.address, memory.address, count, stop, id(tensors) + threads.ITEMS)
        finally:
            scratch_pool.release(memory)

    def long(*tensors: Any) -> None:
        count, flops = threads.count(), most_flops
        if count_lengths:
            flops = flops_of_pairs * block.sizes.n_q * int(tensors[5].sum())
        if threads.is_long(flops, count):
            threads.interruptible(lambda stop: bound(*tensors, count=count, stop=stop))
        else:
            bound(*tensors)

    return long if threads.is_long(most_flops, 1) else bound


class ValueSums:
    """Where the backward pass sums gradients by values of a modification: in the gradients themselves, if work tiles
    add to different elements; else each work tile has sums of its own, if they are small; else a work tile takes all
    that add to the same elements in turn. So the order of each sum is fixed.

    serial: batch entries and key/value heads of a work tile. splits_share: whether the keys of a head cannot be split.
    """

    def __init__(self, plan: CpuPlan, operands: Operands, batch: int, heads_kv: int, most_bytes: int) -> None:
        self._spec, self._heads, given = plan.problem.spec, (batch, heads_kv), operands.arrays
        self._dtype = np.dtype(self._spec.lse_dtype)
        self._shapes = {slot.name: given[slot.name].shape if slot.name in given else () for slot in self._spec.sums}
        shared = set[expr.Expr]()
        axes = {expr.B, expr.H, expr.K}
        self._small = []
        for name, shape in self._shapes.items():
            own, size = modify.separating_axes(self._spec, name), math.prod(shape) * self._dtype.itemsize
            if own != axes and size * batch * heads_kv <= max(most_bytes, PARTS_BYTES):
                self._small.append(name)
            else:
                shared |= axes - own
        self.serial = batch if expr.B in shared else 1, heads_kv if expr.H in shared else 1
        self.splits_share = expr.K in shared

    def place(
        self, words: np.ndarray, to: dict[str, Any], scale: float, block_k: int, splits: int
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Make the sums of a call, and say in these words where they are. Returns the work tiles' own sums."""
        (batch, heads_kv), parts = self._heads, {}
        places = [int(np.float64(scale).view(np.int64)), block_k, splits, self._spec.group, heads_kv]
        for name, shape in self._shapes.items():
            to[name] = sums = np.zeros(shape, self._dtype)
            part = 0
            if name in self._small:
                parts[name] = sums = np.zeros((batch * heads_kv * splits, *shape), self._dtype)
                part = sums.strides[0]
            places += [address_of(sums), part, *sums.strides[sums.ndim - len(shape) :]]
        words[...] = places
        return parts


def bind_backward(
    plan: CpuPlan, operands: Operands, gradients: Gradients, per_call: Sequence[str] = ()
) -> BoundBackward:  # fmt: skip
    """All passes of backward with what follows from these layouts done."""
    block = ArgumentBlock(
        plan, operands, plan.backward_tile, plan.modify_backward, scores_whole=True, per_call=per_call
    )  # fmt: skip
    args, tile, spec, sizes = block.args, plan.backward_tile, plan.problem.spec, block.sizes
    batch, n_q, n_k, heads_kv = sizes.batch, sizes.n_q, sizes.n_k, operands.k.shape[1]
    flops = 5 * (spec.head_dim + spec.head_dim_v) * sizes.heads * sizes.pairs
    parallel = flops >= threads.SERIAL_FLOPS
    block_k = rounded(min(tile.block_k, n_k), int(at.STRIP))
    block_q = min(rounded(tile.block_q, int(at.STRIP)), n_q)
    kernels = plan.backward
    args[at.BWD_PREPROCESS], args[at.KERNEL] = kernels["bwd_preprocess"], kernels["backward"]
    args[at.BWD_POSTPROCESS] = kernels["bwd_postprocess"]
    args[at.BLOCK_Q], args[at.BLOCK_K], args[at.Q_TILES] = block_q, block_k, sizes.q_tiles(max(block_q, 1))[0]
    args[at.ROW_TILES], args[at.ROW_WORK_TILES] = sizes.q_tiles(int(at.ROW_BLOCK))
    accumulator, (d, dv) = np.dtype(spec.lse_dtype), padded_dims(plan)
    layout = scratch.backward_layout(block_q, block_k, d, dv, accumulator.itemsize, 2 if plan.bf16_pairs else 1)
    args[at.SCRATCH_BYTES] = per_thread(layout.total)
    row_stats = np.empty(operands.lse.shape, accumulator)
    for index, tensor in (
        (at.OUT, operands.out), (at.DOUT, gradients.dout), (at.DLSE, gradients.dlse), (at.DQ, gradients.dq),
        (at.DK, gradients.dk), (at.DV, gradients.dv), (at.BWD_LSE, row_stats), (at.DELTA, row_stats),
    ):  # fmt: skip
        if tensor is not None:
            args[index : index + 4] = (1, *strides_of(tensor))  # not 0, which is no tensor
    stats_bytes = rounded(row_stats.nbytes, 64)
    args[at.BWD_LSE], args[at.DELTA], args[at.SCRATCH] = at.HEADER + stats_bytes * np.arange(3)
    dq_bytes = math.prod(operands.q.shape) * accumulator.itemsize
    sums = ValueSums(plan, operands, batch, heads_kv, dq_bytes)
    if spec.sums:  # dS is not scaled until these have been summed
        args[at.SCALE] = np.float64(1).view(np.int64)
        args[at.PER_CALL] |= 8
    call = threads.entry("pull_back")
    launches: dict[int, tuple[Launch, int]] = {}  # with the bytes of dq_accum, by number of threads

    def splits(count: int) -> int:
        """Splits of the keys of a head, each of which has its own dq_accum. Without keys one split clears it."""
        if sums.splits_share:
            return 1
        heads = batch * heads_kv // math.prod(sums.serial)
        most, needed = -(-n_k // block_k), -(-count // heads)
        if count > 1:
            balanced = -(-WORK_TILES_A_THREAD * count // heads)
            needed = max(needed, min(balanced, DQ_BYTES_A_THREAD * count // max(dq_bytes, 1)))
        return max(1, min(most, needed))

    dq_strides = strides_of(np.empty(operands.q.shape, accumulator))  # dq is C-contiguous, too
    in_accumulator = gradients.dq.dtype == accumulator

    def make_launch(count: int) -> tuple[Launch, int]:
        args = block.args.copy()
        num_splits = splits(DETERMINISTIC_THREADS if spec.deterministic and parallel else count)
        in_place = num_splits == 1 and in_accumulator
        args[at.DQ_ACCUM + 1 : at.DQ_ACCUM + 4], args[at.DQ_SPLIT_STRIDE] = dq_strides, dq_bytes
        args[at.NUM_SPLITS], args[at.WORK_TILES] = num_splits, batch * heads_kv // math.prod(sums.serial) * num_splits
        args[at.SERIAL_ENTRIES : at.SERIAL_HEADS + 1] = sums.serial
        scratch_bytes = 2 * stats_bytes + int(args[at.SCRATCH_BYTES]) * count
        return complete(args, scratch_bytes, count), 0 if in_place else num_splits * dq_bytes

    def bound(operands: Operands, gradients: Gradients) -> None:
        count = threads.count() if parallel else 1
        if threads.is_long(flops, count):  # all of the pass: what the kernels use stays until they have ended
            threads.interruptible(partial(run, operands, gradients, count))
        else:
            run(operands, gradients, count)

    def run(op: Operands, to: Gradients, count: int, stop: int = 0) -> None:
        if (known := launches.get(count)) is None:
            known = launches[count] = make_launch(count)
        launch, accum_bytes = known
        if spec.kv_lengths:  # keys past a sequence's length, or past the last packed sequence, are in no tile
            ends = op.kv_lengths if op.cu_seqlens is None else op.cu_seqlens[1][-1:]
            for entry, end in enumerate(ends.tolist()):
                to.dk[entry, :, end:], to.dv[entry, :, end:] = 0, 0
        values, parts = block.values_of(op.arrays), {}
        if spec.sums:
            num_splits = int(launch.args[at.NUM_SPLITS])
            parts = sums.place(values[0][block.first_sum :], to.values, op.scale, block_k, num_splits)
        dlse = args if to.dlse is None else to.dlse
        arrays = op.q, op.k, op.v, op.out, op.lse, to.dout, dlse, to.dq, to.dk, to.dv, *values
        memory, items = scratch_pool.acquire(launch.memory), id(arrays) + threads.ITEMS
        try:
            if accum_bytes:
                with scratch_pool.borrowed(accum_bytes) as dq_accum:
                    call(launch.address, memory.address, count, stop, address_of(dq_accum), items)
            else:
                call(launch.address, memory.address, count, stop, 0, items)
            for name, part in parts.items():
                to.values[name][...] = part.sum(0, np.float64)
            if to.dsinks is not None:
                first = memory.address - address_of(memory.array)
                bwd_lse, delta = (
                    np.ndarray(op.lse.shape, accumulator, memory.array, first + int(args[index]))
                    for index in (at.BWD_LSE, at.DELTA)
                )
                # d lse / d sink is the sink's weight, 0 in a row that sees nothing at all.
                with np.errstate(all="ignore"):  # NaN has results, and so have kernels that were stopped
                    weight = np.exp(op.sinks[None, :, None] - bwd_lse)
                    to.dsinks[...] = -np.where(weight == 0, 0, weight * delta).sum((0, 2), np.float64)
        finally:
            scratch_pool.release(memory)

    return bound

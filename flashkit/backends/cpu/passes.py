"""The forward and the backward pass of a call: argument block, scratch memory, kernels in their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...spec import Gradients, Operands
from ..base import Bound, BoundBackward
from . import arguments as at
from . import scratch, scratch_pool, threads
from .argument_block import ArgumentBlock, address_of, forward_tensors, strides_of
from .launch import (
    Launch,
    decode_launch,
    flops_per_pair,
    forward_launch,
    padded_dims,
    per_thread,
    rounded,
)
from .plan import CpuPlan

ROW_BLOCK = 256
"""Rows of a work tile of bwd_preprocess and bwd_postprocess."""


WORK_TILES_A_THREAD = 3
"""The fewest of the backward pass on several threads, so that a busy core can take fewer."""

DETERMINISTIC_THREADS = 8
"""For how many threads keys are split where gradients must not depend on their number."""

DQ_BYTES_A_THREAD = 2**23
"""Bytes of dq_accum that these may take. Beyond, there are as many work tiles as threads."""

_MAX_FORMS = 16  # of out, dout and dlse, that a bound backward pass keeps

LENGTHS = "kv_lengths", "q_offset", "page_table"
"""What a bound call may get with each call, in this order: none, the first two, or all."""


def bind_forward(plan: CpuPlan, operands: Operands, per_call: Sequence[str] = ()) -> Bound:
    """The forward pass with all that does not depend on contents done: f(q, k, v, out, lse, *lengths)."""
    block = ArgumentBlock(plan, operands, plan.tile, plan.modify_forward, scores_whole=False)
    block.args[at.PER_CALL] = (0, 0, 1, 2)[len(per_call)]
    absent = (block.args,) * (len(LENGTHS) - len(per_call))  # an array, which the kernel does not read
    flops_of_pairs = flops_per_pair(plan) * block.sizes.heads
    most_flops = flops_of_pairs * block.sizes.pairs
    parallel = most_flops >= threads.SERIAL_FLOPS
    make_launch = decode_launch if plan.decodes else forward_launch
    launches: dict[int, Launch] = {}  # by number of threads
    call = threads.entry("call")

    def bound(q: Any, k: Any, v: Any, out: Any, lse: Any, *lengths: Any, count: int = 0, stop: int = 0) -> None:
        count = count or (threads.count() if parallel else 1)
        if (launch := launches.get(count)) is None:
            launch = launches[count] = make_launch(plan, block, count)
        _, template, size = launch
        memory = scratch_pool.acquire(size)
        try:
            call(template, memory.address, count, stop, q, k, v, out, lse, *lengths, *absent)
        finally:
            scratch_pool.release(memory)

    def long(*tensors: Any) -> None:
        count, flops = threads.count(), most_flops
        if per_call:
            flops = flops_of_pairs * block.sizes.n_q * int(tensors[5].sum())
        if threads.is_long(flops, count):
            threads.interruptible(lambda stop: bound(*tensors, count=count, stop=stop))
        else:
            bound(*tensors)

    return long if threads.is_long(most_flops, 1) else bound


def bind_backward(plan: CpuPlan, operands: Operands, gradients: Gradients) -> BoundBackward:
    """bwd_preprocess (delta), backward (dK, dV, dq_accum), bwd_postprocess (dQ), and the gradient of the sinks, with
    all done that follows from the layouts of these tensors; out, dout and dlse may have others.
    """
    block = ArgumentBlock(plan, operands, plan.backward_tile, plan.modify_backward, scores_whole=True)
    tile, spec, sizes = plan.backward_tile, plan.problem.spec, block.sizes
    accumulator = np.dtype(spec.lse_dtype)
    batch, n_q, n_k, heads_kv = sizes.batch, sizes.n_q, sizes.n_k, operands.k.shape[1]
    flops = 5 * (spec.head_dim + spec.head_dim_v) * sizes.heads * sizes.pairs
    block_k = rounded(min(tile.block_k, n_k), int(at.STRIP))
    block_q = min(rounded(tile.block_q, int(at.STRIP)), n_q)
    row_tiles, (q_tiles, _) = (ROW_BLOCK, *sizes.q_tiles(ROW_BLOCK)), sizes.q_tiles(max(block_q, 1))
    d, dv = padded_dims(plan)
    layout = scratch.backward_layout(block_q, block_k, d, dv, accumulator.itemsize, 2 if plan.bf16_pairs else 1)
    block.args[at.SCRATCH_BYTES], block.args[at.BLOCK_K] = per_thread(layout.total), block_k
    for index, tensor in ((at.DQ, gradients.dq), (at.DK, gradients.dk), (at.DV, gradients.dv)):
        block.args[index + 1 : index + 4] = strides_of(tensor)
    rows, shape = operands.lse.shape, operands.q.shape
    small = None
    if flops < threads.SERIAL_FLOPS and gradients.dq.dtype == accumulator and 0 not in (*shape, n_k):
        launches = plan.backward["bwd_preprocess"], *row_tiles, plan.backward["backward"], block_q, q_tiles
        small = _bind_small(block.args, (*launches, batch * heads_kv), np.empty(rows, accumulator), gradients.dq)

    def splits(count: int) -> int:
        """Splits of the keys of a head, each of which has its own dq_accum. Without keys one split clears it."""
        heads, split_bytes = batch * heads_kv, max(math.prod(shape) * accumulator.itemsize, 1)
        most, needed = -(-n_k // block_k), -(-count // heads)
        if count > 1:
            balanced = -(-WORK_TILES_A_THREAD * count // heads)
            needed = max(needed, min(balanced, DQ_BYTES_A_THREAD * count // split_bytes))
        return max(1, min(most, needed))

    def bound(operands: Operands, gradients: Gradients) -> None:
        if small is not None and not spec.kv_lengths and gradients.dsinks is None and small(operands, gradients):
            return
        count = threads.count() if flops >= threads.SERIAL_FLOPS else 1
        if threads.is_long(flops, count):  # all of the pass: what the kernels use stays until they have ended
            threads.interruptible(partial(run_all, operands, gradients, count))
        else:
            run_all(operands, gradients, count)

    def run_all(operands: Operands, gradients: Gradients, count: int, stop: int = 0) -> None:
        num_splits = splits(DETERMINISTIC_THREADS if spec.deterministic and flops >= threads.SERIAL_FLOPS else count)
        if num_splits == 1 and gradients.dq.dtype == accumulator:
            run_with(gradients.dq[None], operands, gradients, count, stop, in_place=True)
            return
        every = num_splits, *shape
        with scratch_pool.borrowed(math.prod(every) * accumulator.itemsize) as memory:
            dq_accum = memory.view(accumulator).reshape(every)
            run_with(dq_accum, operands, gradients, count, stop, in_place=False)

    def run_with(
        dq_accum: np.ndarray, operands: Operands, gradients: Gradients, count: int, stop: int, *, in_place: bool
    ) -> None:
        args, num_splits = block.args.copy(), len(dq_accum)
        bwd_lse, delta = np.empty((2, *rows), accumulator)
        of_gradients = (at.DQ, gradients.dq), (at.DK, gradients.dk), (at.DV, gradients.dv)
        for index, tensor in (*forward_tensors(operands), *of_gradients):
            args[index] = address_of(tensor)
        scratch_tensors = (at.DQ_ACCUM, dq_accum), (at.BWD_LSE, bwd_lse), (at.DELTA, delta)
        tensors = (at.OUT, operands.out), (at.DOUT, gradients.dout), *scratch_tensors
        for index, tensor in (*tensors, *(((at.DLSE, gradients.dlse),) if gradients.dlse is not None else ())):
            args[index : index + 4] = (address_of(tensor), *strides_of(tensor))
        args[at.NUM_SPLITS], args[at.DQ_SPLIT_STRIDE] = num_splits, dq_accum.strides[0]
        if spec.kv_lengths:  # keys past a sequence's length, or past the last packed sequence, are in no tile
            ends = operands.kv_lengths if operands.cu_seqlens is None else operands.cu_seqlens[1][-1:]
            for entry, end in enumerate(ends.tolist()):
                gradients.dk[entry, :, end:], gradients.dv[entry, :, end:] = 0, 0

        def run(name: str, block_q: int, q_tiles: int, work_tiles: int) -> None:
            args[at.BLOCK_Q], args[at.Q_TILES] = block_q, q_tiles
            memory = scratch_pool.acquire(int(args[at.SCRATCH_BYTES]) * count)
            args[at.SCRATCH], args[at.STOP] = memory.address, stop
            try:
                threads.run(plan.backward[name], args, work_tiles, count)
            finally:
                scratch_pool.release(memory)

        run("bwd_preprocess", *row_tiles)
        for nonfinite in (0, 1):
            # P = 0 times an infinity that the mask hides is NaN. Then, rarely, all is computed again by the non-finite
            # fallback, which skips such terms.
            args[at.NONFINITE], args[at.IS_NONFINITE] = nonfinite, 0
            run("backward", block_q, q_tiles, batch * heads_kv * num_splits)
            if in_place:
                if args[at.IS_NONFINITE] == 0 and not np.isfinite(gradients.dq).all():
                    args[at.IS_NONFINITE] = 1
            else:
                run("bwd_postprocess", *row_tiles)
            if args[at.IS_NONFINITE] == 0:
                break
        if gradients.dsinks is not None:
            # d lse / d sink is the sink's weight, 0 in a row that sees nothing at all.
            with np.errstate(all="ignore"):  # NaN has results, and so have kernels that were stopped
                weight = np.exp(operands.sinks[None, :, None] - bwd_lse)
                gradients.dsinks[...] = -np.where(weight == 0, 0, weight * delta).sum((0, 2), np.float64)

    return bound


def _bind_small(
    args: np.ndarray, launches: tuple[int, ...], lse: np.ndarray, dq: np.ndarray
) -> Callable[[Operands, Gradients], bool]:
    """The backward pass of a problem for one thread, with dQ summed in place: one call of a compiled function instead
    of many of NumPy's. It returns False where a gradient is not finite: then the pass has to be run the other way.

    launches: kernel, rows of a work tile, query tiles and work tiles of bwd_preprocess and of backward.
    """
    args = args.copy()
    args[at.NUM_SPLITS] = 1
    for index, tensor in (at.DQ_ACCUM, dq), (at.BWD_LSE, lse), (at.DELTA, lse):
        args[index + 1 : index + 4] = strides_of(tensor)
    args[at.BWD_LSE], args[at.DELTA], args[at.SCRATCH] = at.HEADER + rounded(lse.nbytes, 64) * np.arange(3)
    size = int(args[at.SCRATCH] + args[at.SCRATCH_BYTES])
    call, constant = threads.entry("pull_back"), (*launches, dq.size, dq.itemsize)
    templates: dict[Any, tuple[int, np.ndarray]] = {}  # by the strides of out, dout and dlse

    def run(op: Operands, to: Gradients) -> bool:
        dlse = to.dlse
        form = op.out.strides, to.dout.strides, None if dlse is None else dlse.strides
        if (known := templates.get(form)) is None:
            template = args.copy()
            for index, tensor in (at.OUT, op.out), (at.DOUT, to.dout), (at.DLSE, dlse):
                if tensor is not None:
                    template[index : index + 4] = (1, *strides_of(tensor))  # not 0, which is no tensor
            if len(templates) >= _MAX_FORMS:
                templates.clear()
            known = templates[form] = address_of(template), template
        address, template = known
        absent = template if dlse is None else dlse
        memory = scratch_pool.acquire(size)
        try:
            nonfinite = call(
                address, memory.address, *constant,
                op.q, op.k, op.v, op.out, op.lse, to.dout, absent, to.dq, to.dk, to.dv,
            )  # fmt: skip
        finally:
            scratch_pool.release(memory)
        return not nonfinite

    return run

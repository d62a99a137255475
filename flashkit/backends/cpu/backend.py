"""The CPU backend: plans (tile, compiled functions) for NumPy arrays, and the order of a call's passes (call.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...devices.io_model import CpuTile
from ...spec import ITEMSIZE, MAX_HEAD_DIM, Direction, Gradients, Operands, Problem, Verdict
from ..base import Bound
from . import arguments as at
from . import bf16
from .call import Block, give_back, register_block, rounded, take, tensors

ROW_BLOCK = 256
"""Rows of a task in the passes over rows alone (delta, reduction of dQ)."""

DECODE_QUERIES = 8
"""A power of two: with fewer queries a head, decoding's kernel computes the forward pass."""

DECODE_FROM = 16
"""A power of two: the fewest keys for that. Below, scores that both passes sum in one order are worth more: a weight of
nearly 1 is then e^0 to the last bit.
"""

DECODE_KEYS = 64
"""Keys of a tile in decoding."""

PART_KEYS = 512
"""The fewest keys of a part in decoding, where one thread is not all there is."""

PARTS_A_THREAD = 8
"""Tasks a thread in decoding, about."""


@dataclass(frozen=True)
class CpuPlan:
    """The tiles and compiled functions for one spec; functions compile when first used."""

    problem: Problem
    tile: CpuTile
    backward_tile: CpuTile
    why: str
    pairs: str = ""
    """How pairs of bfloat16 are multiplied; "" where operands are widened, or of another dtype (bf16.py)."""

    @cached_property
    def forward(self) -> dict[str, int]:
        from . import specialise

        if self.decodes:
            return specialise.kernel("decode", self.problem.spec.dtype, pairs=self.decodes_pairs)
        return specialise.kernel("forward", self.problem.spec.dtype, pairs=bool(self.pairs))

    @cached_property
    def backward(self) -> dict[str, int]:
        from . import specialise

        return specialise.kernel("backward", self.problem.spec.dtype, pairs=bool(self.pairs))

    @cached_property
    def classify(self) -> int:
        """Address of the function that tells a tile's state; 0 without a mask."""
        from . import modify

        return 0 if self.problem.spec.mask is None else modify.classify_function(self.problem.spec)

    @cached_property
    def modify(self) -> int:
        """Address of the function that modifies a tile of scores, 0 where there is nothing to modify."""
        from . import modify

        function = modify.decode_function if self.decodes else modify.forward_function
        return function(self.problem.spec) if self.modifies else 0

    @cached_property
    def modify_backward(self) -> int:
        from . import modify

        return modify.backward_function(self.problem.spec) if self.modifies else 0

    @cached_property
    def max_group(self) -> int:
        from . import modify

        return modify.max_group(self.problem.spec)

    @cached_property
    def turned(self) -> int:
        """Tiles of arrays that `modify` reads transposed."""
        from . import modify

        return len(modify.turned(self.problem.spec))

    @property
    def decodes(self) -> bool:
        """Whether kernels/decode.py computes the forward pass."""
        return decodes(self.problem)

    @property
    def decodes_pairs(self) -> bool:
        """Tiles of AMX would be nearly empty."""
        return self.pairs == "avx512bf16"

    @property
    def modifies(self) -> bool:
        return self.problem.spec.mask is not None or self.problem.spec.score is not None


class CpuBackend:
    """Attention on NumPy arrays by Numba; see kernels/forward.py and kernels/backward.py."""

    name = "cpu"
    array_kinds = ("numpy",)
    device_kind = "cpu"
    efficiency = 0.7

    def available(self) -> Verdict:
        missing = [name for name in ("numba", "llvmlite") if find_spec(name) is None]
        return Verdict(not missing, f"{' and '.join(missing)} cannot be imported: pip install numba" if missing else "")

    def supports(self, problem: Problem) -> Verdict:
        spec = problem.spec
        if spec.dtype not in ITEMSIZE:
            return Verdict(False, f"dtype {spec.dtype} is none of {', '.join(ITEMSIZE)}")
        if max(spec.head_dim, spec.head_dim_v) > MAX_HEAD_DIM:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {MAX_HEAD_DIM}")
        too_deep = [slot.name for slot in spec.slots if (slot.ndim or 0) > 4]
        if too_deep:
            return Verdict(False, f"arrays of a modification have at most 4 axes here; {', '.join(too_deep)} has more")
        return Verdict(True)

    def plan(self, problem: Problem, profile: Any) -> CpuPlan:
        name, reason = bf16.way() if problem.spec.dtype == "bfloat16" else ("", "")
        tile, why = choose_tile(problem, profile, "forward", amx=name == "amx")
        backward_tile = choose_tile(problem, profile, "backward", amx=name == "amx")[0]
        if decodes(problem):
            tile = replace(tile, block_k=DECODE_KEYS)
            why = f"fewer than {DECODE_QUERIES} queries: split over the keys, which are read once (kernels/decode.py)"
        if not name:
            return CpuPlan(problem, tile, backward_tile, why)
        if name == "avx512bf16" and not tile.lanes == backward_tile.lanes == 16:
            name, reason = "widen", "the tile has shorter vectors"
        pairs = "" if name == "widen" else name
        return CpuPlan(problem, tile, backward_tile, f"{why}; bfloat16 by {name}: {reason}", pairs)

    def forward(self, plan: CpuPlan, operands: Operands) -> None:
        self.bind(plan, operands)(operands.q, operands.k, operands.v, operands.out, operands.lse)

    def bind(self, plan: CpuPlan, operands: Operands) -> Bound:
        from . import threads

        block = Block(plan, operands, plan.tile, plan.modify, scores_whole=False)
        spec = plan.problem.spec
        # Decoding waits for memory, four times as long as products in cache take.
        flops = 2 * (spec.head_dim + spec.head_dim_v) * (4 if plan.decodes else 1)
        parallel = _worth_threads(operands, flops)
        form_of = _decode_form if plan.decodes else _forward_form
        forms: dict[int, tuple[np.ndarray, int, int]] = {}  # by number of threads
        call = threads.entry("call")

        def bound(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
            workers = threads.count() if parallel else 1
            if (form := forms.get(workers)) is None:
                form = forms[workers] = form_of(plan, block, workers)
            _, template, size = form
            memory = take(size)
            try:
                if threads.concurrent(workers):
                    call(template, memory.address, workers, q, k, v, out, lse)
                else:
                    with threads.alone(workers) as allowed:
                        call(template, memory.address, allowed, q, k, v, out, lse)
            finally:
                give_back(memory)

        return bound

    def backward(self, plan: CpuPlan, operands: Operands, gradients: Gradients) -> None:
        from . import scratch, threads

        call = Block(plan, operands, plan.backward_tile, plan.modify_backward, scores_whole=True)
        args, tile, spec = call.args, plan.backward_tile, plan.problem.spec
        compute = np.dtype(spec.lse_dtype)
        batch, heads, n_q, _ = operands.q.shape
        heads_kv, n_k = operands.k.shape[1:3]
        workers = threads.count() if _worth_threads(operands, 5 * (spec.head_dim + spec.head_dim_v)) else 1
        block_k = rounded(min(tile.block_k, n_k), int(at.STRIP))
        block_q = min(rounded(tile.block_q, int(at.STRIP)), n_q)

        # Few heads for the threads: the keys of one are split, each part with its own sums of dQ.
        parts = min(-(-n_k // block_k), -(-workers // (batch * heads_kv)))
        shift, delta = np.empty((2, batch, heads, n_q), compute)
        in_place = parts == 1 and gradients.dq.dtype == compute
        dq_partial = gradients.dq if in_place else np.empty((parts, *operands.q.shape), compute)
        more = {
            at.DOUT: gradients.dout, at.DQ: gradients.dq, at.DK: gradients.dk, at.DV: gradients.dv,
            at.DQ_PARTIAL: dq_partial, at.SHIFT: shift, at.DELTA: delta, at.DLSE: gradients.dlse,
        }  # fmt: skip
        for index, tensor in (*tensors(operands), *more.items()):
            if tensor is not None:
                call.tensor(index, tensor)
        args[at.SPLITS] = parts
        if spec.kv_lengths:  # keys past a sequence's length are in no tile
            gradients.dk[...], gradients.dv[...] = 0, 0
        row_tasks = batch * heads * -(-n_q // ROW_BLOCK)

        call.tiles(ROW_BLOCK, block_k)
        threads.run(plan.backward["prepare"], args, row_tasks, workers)
        d, dv = _head_dims(plan)
        layout = scratch.backward_layout(block_q, block_k, d, dv, compute.itemsize, 2 if plan.pairs else 1)
        args[at.SCRATCH_BYTES] = _apart(layout[-1])
        memory = take(int(args[at.SCRATCH_BYTES]) * workers)
        args[at.SCRATCH] = memory.address
        try:
            for careful in (0, 1):
                # A zero weight times an infinity hidden by the mask would be NaN: done again, rarely, with such
                # terms left out.
                args[at.CAREFUL], args[at.NON_FINITE] = careful, 0
                call.tiles(block_q, block_k)
                threads.run(plan.backward["worker"], args, batch * heads_kv * parts, workers)
                if in_place:
                    if args[at.NON_FINITE] == 0 and not np.isfinite(gradients.dq).all():
                        args[at.NON_FINITE] = 1
                else:
                    call.tiles(ROW_BLOCK, block_k)
                    threads.run(plan.backward["reduce"], args, row_tasks, workers)
                if args[at.NON_FINITE] == 0:
                    break
        finally:
            give_back(memory)
        if gradients.dsinks is not None:
            # d lse / d sink is the sink's weight, 0 in a row that sees nothing at all.
            weight = np.exp(operands.sinks[None, :, None] - shift)
            gradients.dsinks[...] = -np.where(weight == 0, 0, weight * delta).sum((0, 2), np.float64)


def _forward_form(plan: CpuPlan, block: Block, workers: int) -> tuple[np.ndarray, int, int]:
    """The block for so many threads, its address, and the memory that a call needs: room for a copy, and scratch."""
    from . import scratch, threads

    tile, spec, args = plan.tile, plan.problem.spec, block.args.copy()
    panel, n_q, heads = int(args[at.PANEL]), int(args[at.N_Q]), int(args[at.BATCH] * args[at.HEADS])
    block_q, block_k = rounded(min(tile.block_q, n_q), panel), rounded(tile.block_k, int(at.STRIP))
    block_k = min(block_k, rounded(int(args[at.N_K]), int(at.STRIP)))
    while block_q > panel and heads * -(-n_q // block_q) < 4 * workers:
        block_q -= panel
    d, dv = _head_dims(plan)
    layout = scratch.forward_layout(
        block_q // panel, panel, block_k, d, dv, ITEMSIZE[spec.lse_dtype], int(args[at.TURNED])
    )
    tasks = heads * -(-n_q // block_q)
    args[at.BLOCK_Q], args[at.BLOCK_K], args[at.TASKS] = block_q, block_k, tasks
    args[at.WORKER], args[at.SCRATCH_BYTES] = plan.forward["worker"], _apart(layout[-1])
    if workers > 1:
        args[at.PARALLEL_FOR], args[at.SHARE] = threads.parallel_for()
    return args, args.ctypes.data, at.HEADER + int(args[at.SCRATCH_BYTES]) * workers


def _head_dims(plan: CpuPlan) -> tuple[int, int]:
    """As scratch memory has room for (kernels/load.py's and load_pairs.py's `padded`)."""
    spec = plan.problem.spec
    d, dv = spec.head_dim, spec.head_dim_v
    return (rounded(d, 16), rounded(dv, 16)) if plan.pairs else (d, dv)


def decodes(problem: Problem) -> bool:
    """Whether there are so few queries that reading keys and values is what takes time. Problems that share a plan,
    those of one power of two, get one answer.
    """
    return problem.n_q < DECODE_QUERIES and problem.n_k >= DECODE_FROM


def _decode_form(plan: CpuPlan, block: Block, workers: int) -> tuple[np.ndarray, int, int]:
    """As _forward_form."""
    from . import scratch, threads
    from .micro.compile import addresses

    spec, args = plan.problem.spec, block.args.copy()
    size = ITEMSIZE[spec.lse_dtype]
    lanes, n_k, heads = int(args[at.LANES]), int(args[at.N_K]), int(args[at.BATCH] * args[at.HEADS]) // spec.group
    rows, block_k = spec.group * int(args[at.N_Q]), rounded(plan.tile.block_k, int(at.STRIP))
    # Enough parts for threads of unequal speed to share, none so small that starting it shows.
    parts = max(1, min(-(-PARTS_A_THREAD * workers // heads), n_k // PART_KEYS)) if workers > 1 else 1
    part_keys = rounded(-(-n_k // parts), block_k)
    parts = max(1, -(-n_k // part_keys))
    unit = 2 if plan.decodes_pairs else 1
    words = rounded(spec.head_dim, unit * lanes) // unit
    layout = scratch.decode_layout(rows, spec.group, int(at.STRETCH) * block_k, words, size)
    args[at.BLOCK_K], args[at.SPLITS], args[at.PART_KEYS], args[at.TASKS] = block_k, parts, part_keys, heads * parts
    args[at.WORKER], args[at.SCRATCH_BYTES] = plan.forward["worker"], _apart(layout[-1])
    args[at.PARTS] = args[at.SCRATCH_BYTES] * workers
    args[at.PART_BYTES] = _apart(scratch.part_layout(rows, spec.head_dim_v, size)[-1])
    registers = register_block(spec, plan.tile, plan.pairs if plan.decodes_pairs else "")
    micro = addresses(replace(registers, rows=1, vectors=1), few=True)  # chooses its own
    for index, name in ((at.ROW_SCORES, "row_scores"), (at.ROW_WEIGHTS, "row_weights"), (at.ROW_VALUES, "row_values")):
        args[index] = micro[name]
    if workers > 1:
        args[at.PARALLEL_FOR], args[at.SHARE] = threads.parallel_for()
    places = workers if parts == 1 else heads * parts
    return args, args.ctypes.data, at.HEADER + int(args[at.PARTS] + args[at.PART_BYTES] * places)


def _apart(size: int) -> int:
    """Bytes from one thread's scratch memory to the next one's: no cache line of both, and not the same sets."""
    return rounded(size, 64) + 64


def _worth_threads(operands: Operands, flops_a_pair: int) -> bool:
    from . import threads

    pairs = operands.q.shape[0] * operands.q.shape[1] * operands.q.shape[2] * operands.k.shape[2]
    return pairs * flops_a_pair >= threads.SERIAL_FLOPS


def choose_tile(problem: Problem, profile: Any, direction: Direction, *, amx: bool = False) -> tuple[CpuTile, str]:
    """The tile of the profile's row for the spec, or the model's choice, and the reason. amx: rows for AMX go first."""
    from ...devices import io_model

    spec = problem.spec
    tables = [f"cpu_amx.{direction}"] * amx + [f"cpu.{direction}"]
    found = (profile.tile(table, spec.dtype, spec.head_dim, spec.masked) for table in tables)
    row = next(filter(None, found), None)
    if row is not None:
        shape = io_model.default_cpu(profile, spec.dtype, spec.head_dim, spec.head_dim_v, direction)
        lanes, rows, vectors = row.lanes or shape.lanes, row.rows or shape.rows, row.vectors or shape.vectors
        return CpuTile(row.block_q, row.block_k, lanes, rows, vectors), row.why or "the profile's row"
    return io_model.default_cpu(
        profile, spec.dtype, spec.head_dim, spec.head_dim_v, direction
    ), "no row of the profile applies; the model's choice"

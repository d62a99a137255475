"""The CPU backend: plans (tile, compiled functions) and calls (argument blocks) for NumPy arrays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import dropout
from ...spec import ITEMSIZE, MAX_HEAD_DIM, Direction, Gradients, Operands, Problem, Verdict
from ...tiles import CpuTile
from . import arguments as at

_MICRO_KERNELS = {
    at.PRODUCT: "product", at.PRODUCT_ADD: "product_add", at.COLUMN_MAX: "column_max",
    at.EXPONENTIALS: "exponentials", at.WEIGHTS: "weights",
}  # fmt: skip

ROW_BLOCK = 256
"""Rows of a task in the passes over rows alone (delta, reduction of dQ)."""


@dataclass(frozen=True)
class CpuPlan:
    """The tiles and compiled functions for one spec; functions compile when first used."""

    problem: Problem
    tile: CpuTile
    backward_tile: CpuTile
    why: str
    scratch: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=8))

    @cached_property
    def forward(self) -> Any:
        from . import specialise

        return specialise.kernel("forward", self.problem.spec.dtype)

    @cached_property
    def backward(self) -> Any:
        from . import specialise

        return specialise.kernel("backward", self.problem.spec.dtype)

    @cached_property
    def classify(self) -> Any:
        from . import modify

        return None if self.problem.spec.mask is None else modify.classify_function(self.problem.spec)

    @cached_property
    def modify(self) -> Any:
        from . import modify

        return modify.forward_function(self.problem.spec) if self.modifies else None

    @cached_property
    def modify_backward(self) -> Any:
        from . import modify

        return modify.backward_function(self.problem.spec) if self.modifies else None

    @cached_property
    def max_group(self) -> int:
        from . import modify

        return modify.max_group(self.problem.spec)

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
        tile, why = choose_tile(problem, profile, "forward")
        return CpuPlan(problem, tile, choose_tile(problem, profile, "backward")[0], why)

    def forward(self, plan: CpuPlan, operands: Operands) -> None:
        from . import scratch, threads

        call = _Call(plan, operands, plan.tile, plan.modify)
        tile, spec = plan.tile, plan.problem.spec
        compute = ITEMSIZE[spec.lse_dtype]
        panel = int(call.args[at.PANEL])
        workers = _workers(operands, 2 * (spec.head_dim + spec.head_dim_v))
        heads = operands.q.shape[0] * operands.q.shape[1]
        n_q = operands.q.shape[2]
        block_q = _rounded(min(tile.block_q, n_q), panel)
        while block_q > panel and heads * -(-n_q // block_q) < 4 * workers:
            block_q -= panel
        call.block(block_q, min(tile.block_k, _rounded(operands.k.shape[2], 4)))
        layout = scratch.forward_layout(
            block_q // panel, panel, int(call.args[at.BLOCK_K]), spec.head_dim, spec.head_dim_v, compute
        )
        with _Scratch(plan, call, layout[-1], workers):
            threads.run(plan.forward.worker, call.args, heads * -(-n_q // block_q), workers)

    def backward(self, plan: CpuPlan, operands: Operands, gradients: Gradients) -> None:
        from . import scratch, threads

        call = _Call(plan, operands, plan.backward_tile, plan.modify_backward)
        args, tile, spec = call.args, plan.backward_tile, plan.problem.spec
        compute = np.dtype(spec.lse_dtype)
        batch, heads, n_q, _ = operands.q.shape
        heads_kv, n_k = operands.k.shape[1:3]
        workers = _workers(operands, 5 * (spec.head_dim + spec.head_dim_v))
        block_k = _rounded(min(tile.block_k, n_k), int(args[at.LANES]))
        block_q = min(tile.block_q, n_q)

        # Few heads for the threads: the keys of one are split, each part with its own sums of dQ.
        parts = min(-(-n_k // block_k), -(-workers // (batch * heads_kv)))
        shift, delta = np.empty((2, batch, heads, n_q), compute)
        in_place = parts == 1 and gradients.dq.dtype == compute
        dq_partial = gradients.dq if in_place else np.empty((parts, *operands.q.shape), compute)
        tensors = {
            at.DOUT: gradients.dout, at.DQ: gradients.dq, at.DK: gradients.dk, at.DV: gradients.dv,
            at.DQ_PARTIAL: dq_partial, at.SHIFT: shift, at.DELTA: delta, at.DLSE: gradients.dlse,
        }  # fmt: skip
        for index, tensor in tensors.items():
            if tensor is not None:
                call.tensor(index, tensor)
        args[at.SPLITS] = parts
        # Keys past a sequence's length are in no tile.
        gradients.dk[...], gradients.dv[...] = 0, 0
        row_tasks = batch * heads * -(-n_q // ROW_BLOCK)

        call.block(ROW_BLOCK, block_k)
        threads.run(plan.backward.prepare, args, row_tasks, workers)
        with _Scratch(
            plan,
            call,
            scratch.backward_layout(block_q, block_k, spec.head_dim, spec.head_dim_v, compute.itemsize)[-1],
            workers,
        ):
            for careful in (0, 1):
                # A zero weight times an infinity hidden by the mask would be NaN: done again, rarely, with such
                # terms left out.
                args[at.CAREFUL], args[at.NON_FINITE] = careful, 0
                call.block(block_q, block_k)
                threads.run(plan.backward.worker, args, batch * heads_kv * parts, workers)
                if in_place:
                    if args[at.NON_FINITE] == 0 and not np.isfinite(gradients.dq).all():
                        args[at.NON_FINITE] = 1
                else:
                    call.block(ROW_BLOCK, block_k)
                    threads.run(plan.backward.reduce, args, row_tasks, workers)
                if args[at.NON_FINITE] == 0:
                    break
        if gradients.dsinks is not None:
            # d lse / d sink is the sink's weight, 0 in a row that sees nothing at all.
            weight = np.exp(operands.sinks[None, :, None] - shift)
            gradients.dsinks[...] = -np.where(weight == 0, 0, weight * delta).sum((0, 2), np.float64)


def _rounded(n: int, step: int) -> int:
    return max(-(-n // step), 1) * step


def _workers(operands: Operands, flops_a_pair: int) -> int:
    from . import threads

    pairs = operands.q.shape[0] * operands.q.shape[1] * operands.q.shape[2] * operands.k.shape[2]
    return 1 if pairs * flops_a_pair < threads.SERIAL_FLOPS else threads.count()


def choose_tile(problem: Problem, profile: Any, direction: Direction) -> tuple[CpuTile, str]:
    """The tile of the profile's row for the spec, or the model's choice, and the reason."""
    from ... import tiles

    spec = problem.spec
    row = profile.tile(f"cpu.{direction}", spec.dtype, spec.head_dim, spec.causal)
    if row is not None:
        shape = tiles.default_cpu(profile, spec.dtype, spec.head_dim, spec.head_dim_v, direction)
        lanes, rows, vectors = row.lanes or shape.lanes, row.rows or shape.rows, row.vectors or shape.vectors
        return CpuTile(row.block_q, row.block_k, lanes, rows, vectors), row.why or "the profile's row"
    return tiles.default_cpu(
        profile, spec.dtype, spec.head_dim, spec.head_dim_v, direction
    ), "no row of the profile applies; the model's choice"


class _Call:
    """The argument block of one call. Keeps what its addresses point to alive."""

    def __init__(self, plan: CpuPlan, operands: Operands, tile: CpuTile, modify: Any) -> None:
        from .micro import addresses
        from .vector import Block

        self.args = args = np.zeros(at.SIZE, np.int64)
        self.alive: list[Any] = [operands]
        spec = plan.problem.spec
        element, lanes = ("double", tile.lanes // 2) if spec.lse_dtype == "float64" else ("float", tile.lanes)
        args[at.LANES], args[at.PANEL] = lanes, tile.vectors * lanes
        micro = addresses(Block(element, tile.rows, tile.vectors, lanes))
        for index, name in _MICRO_KERNELS.items():
            args[index] = micro[name]
        for index, tensor in (
            (at.Q, operands.q),
            (at.K, operands.k),
            (at.V, operands.v),
            (at.OUT, operands.out),
            (at.LSE, operands.lse),
        ):
            self.tensor(index, tensor)
        batch, heads, n_q, d = operands.q.shape
        args[at.BATCH], args[at.HEADS], args[at.GROUP] = batch, heads, spec.group
        args[at.N_Q], args[at.N_K], args[at.DIM], args[at.DIM_V] = n_q, operands.k.shape[2], d, operands.v.shape[3]
        args[at.LENGTHS], args[at.OFFSETS] = self.address(operands.kv_lengths), self.address(operands.q_offset)
        self.double(at.SCALE, operands.scale)
        if operands.sinks is not None:
            args[at.SINKS] = self.address(np.ascontiguousarray(operands.sinks, spec.lse_dtype))
        if plan.classify is not None:
            args[at.CLASSIFY] = plan.classify.address
        # Groups larger than all tiles would only be halved again.
        args[at.MAX_GROUP] = min(plan.max_group, 1 << max(n_q, operands.k.shape[2]).bit_length())
        if modify is not None:
            args[at.MODIFY], args[at.HAS_SCORE] = modify.address, spec.score is not None
            args[at.VALUES] = self.address(self.values(plan, operands))
        if operands.dropout_p:
            args[at.DROPOUT], args[at.THRESHOLD] = 1, dropout.threshold(operands.dropout_p)
            self.double(at.KEPT_SCALE, 1 / (1 - operands.dropout_p))
            args[at.SEED] = np.uint64(operands.seed & (2**64 - 1)).astype(np.int64)

    def address(self, array: np.ndarray) -> int:
        self.alive.append(array)
        return int(array.__array_interface__["data"][0])

    def tensor(self, index: Any, array: np.ndarray) -> None:
        """Address and strides of the batch, head and token axes: the first three, or after a leading axis of parts
        the next.
        """
        strides = array.strides[-4:-1] if array.ndim >= 4 else array.strides
        self.args[index : index + 4] = (self.address(array), *strides)

    def double(self, index: Any, value: float) -> None:
        self.args[index] = np.float64(value).view(np.int64)

    def block(self, block_q: int, block_k: int) -> None:
        self.args[at.BLOCK_Q], self.args[at.BLOCK_K] = block_q, block_k

    def values(self, plan: CpuPlan, operands: Operands) -> np.ndarray:
        """The modification's scalars and arrays in the order of the spec's slots (modify._prelude reads them)."""
        from . import modify

        entries: list[int] = []
        for slot in plan.problem.spec.slots:
            if slot.ndim is None:
                value = operands.params[slot.name]
                entries.append(int(value) if slot.kind == "int" else int(np.float64(value).view(np.int64)))
            else:
                array = operands.arrays[slot.name]
                stored = modify.stored_dtype(str(slot.dtype))
                array = array.view(np.uint8) if slot.kind == "bool" else array.astype(stored, copy=False)
                entries += [self.address(array), *array.shape, *array.strides]
        return np.array(entries, np.int64)


class _Scratch:
    """Scratch memory for all threads of a call, taken from the plan's few spare ones: fresh pages cost more than a
    small call.
    """

    def __init__(self, plan: CpuPlan, call: _Call, size: int, workers: int) -> None:
        self.plan, self.call, self.size, self.workers = plan, call, _rounded(size, 64) + 64, workers

    def __enter__(self) -> None:
        needed = self.size * self.workers + 64
        try:
            self.memory = self.plan.scratch.pop()
        except IndexError:
            self.memory = np.empty(needed, np.uint8)
        if self.memory.size < needed:
            self.memory = np.empty(needed, np.uint8)
        start = self.call.address(self.memory)
        self.call.args[at.SCRATCH], self.call.args[at.SCRATCH_BYTES] = start + -start % 64, self.size

    def __exit__(self, *error: Any) -> None:
        self.plan.scratch.append(self.memory)

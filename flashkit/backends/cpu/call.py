"""One call as a kernel gets it: its argument block and its scratch memory.

`template` holds what follows from the plan and from the sizes and strides of the operands, so it serves every call on
arrays of the same form; `Call` adds to a copy what each call brings: addresses and numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ... import dropout
from ...spec import Operands
from ...tiles import CpuTile
from . import arguments as at

if TYPE_CHECKING:
    from .backend import CpuPlan

MICRO_KERNELS = {
    at.PRODUCT: "product", at.PRODUCT_ADD: "product_add", at.COLUMN_MAX: "column_max",
    at.EXPONENTIALS: "exponentials", at.PACK: "pack", at.UNPACK: "unpack", at.WEIGHTS: "weights",
}  # fmt: skip


def rounded(n: int, step: int) -> int:
    """The least multiple of step, at least one of it, that n fits in."""
    return max(-(-n // step), 1) * step


def template(plan: CpuPlan, operands: Operands, tile: CpuTile, modify: Any) -> np.ndarray:
    """A block without addresses of arrays: strides, sizes, functions. `modify`: the pass's, or None."""
    from .micro import addresses
    from .vector import Block

    args = np.zeros(at.SIZE, np.int64)
    spec = plan.problem.spec
    element, lanes = ("double", tile.lanes // 2) if spec.lse_dtype == "float64" else ("float", tile.lanes)
    args[at.LANES], args[at.PANEL] = lanes, tile.vectors * lanes
    storage = spec.dtype if spec.dtype in ("float16", "bfloat16") else ""
    micro = addresses(Block(element, tile.rows, tile.vectors, lanes, storage))
    for index, name in MICRO_KERNELS.items():
        args[index] = micro[name]
    for index, tensor in _tensors(operands):
        args[index + 1 : index + 4] = _strides(tensor)
    batch, heads, n_q, d = operands.q.shape
    n_k = operands.k.shape[2]
    args[at.BATCH], args[at.HEADS], args[at.GROUP] = batch, heads, spec.group
    args[at.N_Q], args[at.N_K], args[at.DIM], args[at.DIM_V] = n_q, n_k, d, operands.v.shape[3]
    if plan.classify is not None:
        args[at.CLASSIFY] = plan.classify.address
    # Groups larger than all tiles would only be halved again.
    args[at.MAX_GROUP] = min(plan.max_group, 1 << max(n_q, n_k).bit_length())
    if modify is not None:
        args[at.MODIFY], args[at.HAS_SCORE] = modify.address, spec.score is not None
    return args


class Call:
    """The argument block of one call. Keeps what its addresses point to alive."""

    def __init__(self, plan: CpuPlan, operands: Operands, tile: CpuTile, modify: Any) -> None:
        self.args = args = template(plan, operands, tile, modify)
        self.alive: list[Any] = [operands]
        spec = plan.problem.spec
        for index, tensor in _tensors(operands):
            args[index] = self.address(tensor)
        args[at.LENGTHS], args[at.OFFSETS] = self.address(operands.kv_lengths), self.address(operands.q_offset)
        self.double(at.SCALE, operands.scale)
        if operands.sinks is not None:
            args[at.SINKS] = self.address(np.ascontiguousarray(operands.sinks, spec.lse_dtype))
        if modify is not None:
            args[at.VALUES] = self.address(self.values(plan, operands))
        if operands.dropout_p:
            args[at.DROPOUT], args[at.THRESHOLD] = 1, dropout.threshold(operands.dropout_p)
            self.double(at.KEPT_SCALE, 1 / (1 - operands.dropout_p))
            args[at.SEED] = np.uint64(operands.seed & (2**64 - 1)).astype(np.int64)

    def address(self, array: np.ndarray) -> int:
        self.alive.append(array)
        return int(array.__array_interface__["data"][0])

    def tensor(self, index: Any, array: np.ndarray) -> None:
        """Address and strides of one more tensor."""
        self.args[index : index + 4] = (self.address(array), *_strides(array))

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


def _tensors(operands: Operands) -> tuple[tuple[Any, np.ndarray], ...]:
    return (
        (at.Q, operands.q), (at.K, operands.k), (at.V, operands.v), (at.OUT, operands.out), (at.LSE, operands.lse),
    )  # fmt: skip


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides of the batch, head and token axes: the first three, or after a leading axis of parts the next."""
    return array.strides[-4:-1] if array.ndim >= 4 else array.strides


class Scratch:
    """Scratch memory for all threads of a call, taken from the plan's few spare ones: fresh pages cost more than a
    small call.
    """

    def __init__(self, plan: CpuPlan, call: Call, size: int, workers: int) -> None:
        self.plan, self.call, self.size, self.workers = plan, call, rounded(size, 64) + 64, workers

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

"""One call as a kernel gets it: its argument block and its scratch memory."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ...devices.io_model import CpuTile
from ...mods import dropout
from ...spec import AttentionSpec, Operands
from . import arguments as at

if TYPE_CHECKING:
    from .backend import CpuPlan
    from .micro.vector import Block as RegisterBlock

MICRO_KERNELS = {
    at.PRODUCT: "product", at.PRODUCT_ADD: "product_add", at.COLUMN_MAX: "column_max",
    at.EXPONENTIALS: "exponentials", at.PACK: "pack", at.UNPACK: "unpack", at.WEIGHTS: "weights",
}  # fmt: skip
PAIR_KERNELS = {
    at.PRODUCT: "pair_product", at.PRODUCT_ADD: "pair_product_add", at.TILE_EXPONENTIALS: "weights_in_pairs",
    at.PACK: "pack_columns", at.PACK_ROWS: "pack_rows", at.PACK_ROWS_T: "pack_rows_t", at.ROUND_PAIRS: "round_pairs",
}  # fmt: skip
"""What takes the place of the others where bfloat16 is multiplied in pairs."""


def rounded(n: int, step: int) -> int:
    """The least multiple of step, at least one of it, that n fits in."""
    return max(-(-n // step), 1) * step


def register_block(spec: AttentionSpec, tile: CpuTile, pairs: str = "") -> RegisterBlock:
    """What micro-kernels are compiled for."""
    from .micro.vector import Block

    storage = spec.dtype if spec.dtype in ("float16", "bfloat16") else ""
    if spec.lse_dtype == "float64":
        return Block("double", tile.rows, tile.vectors, tile.lanes // 2, storage, pairs)
    return Block("float", tile.rows, tile.vectors, tile.lanes, storage, pairs)


class Block:
    """An argument block (arguments.py), complete but for the addresses of q, k, v, out and lse, the tiles' sizes and
    the scratch memory: what follows from the plan and from sizes, strides and all other values of the operands.

    `modify`: address of the pass's function, or 0. `scores_whole`: tiles of scores get all of the scale. Keeps what its
    addresses point to alive, and no more.
    """

    def __init__(self, plan: CpuPlan, operands: Operands, tile: CpuTile, modify: int, *, scores_whole: bool) -> None:
        from .micro.compile import addresses

        self.args = args = np.zeros(at.SIZE, np.int64)
        self.alive: list[np.ndarray] = []
        spec = plan.problem.spec
        registers = register_block(spec, tile, plan.pairs)
        args[at.LANES], args[at.PANEL] = registers.lanes, registers.vectors * registers.lanes
        micro = addresses(registers)
        for index, name in (MICRO_KERNELS | (PAIR_KERNELS if plan.pairs else {})).items():
            args[index] = micro[name]
        for index, tensor in tensors(operands):
            args[index + 1 : index + 4] = _strides(tensor)
        batch, heads, n_q, d = operands.q.shape
        n_k = operands.k.shape[2]
        args[at.BATCH], args[at.HEADS], args[at.GROUP] = batch, heads, spec.group
        args[at.N_Q], args[at.N_K], args[at.DIM], args[at.DIM_V] = n_q, n_k, d, operands.v.shape[3]
        args[at.LENGTHS], args[at.OFFSETS] = self.address(operands.kv_lengths), self.address(operands.q_offset)
        # Weights to be dropped are not yet rounded to pairs, and their exponentials know no scale.
        whole = scores_whole or spec.score is not None or bool(operands.dropout_p)
        self.scales(operands.scale, bool(plan.pairs), whole)
        if operands.sinks is not None:
            args[at.SINKS] = self.address(np.ascontiguousarray(operands.sinks, spec.lse_dtype))
        args[at.CLASSIFY] = plan.classify
        # Groups larger than all tiles would only be halved again.
        args[at.MAX_GROUP] = min(plan.max_group, 1 << max(n_q, n_k).bit_length())
        if modify:
            args[at.MODIFY], args[at.HAS_SCORE], args[at.TURNED] = modify, spec.score is not None, plan.turned
            args[at.VALUES] = self.address(self.values(plan, operands, micro))
        if operands.dropout_p:
            args[at.DROPOUT], args[at.THRESHOLD] = 1, dropout.threshold(operands.dropout_p)
            self.double(at.KEPT_SCALE, 1 / (1 - operands.dropout_p))
            args[at.SEED] = np.uint64(operands.seed & (2**64 - 1)).astype(np.int64)

    def address(self, array: np.ndarray) -> int:
        self.alive.append(array)
        return int(array.__array_interface__["data"][0])

    def tensor(self, index: Any, array: np.ndarray) -> None:
        """Address and strides of a tensor."""
        self.args[index : index + 4] = (self.address(array), *_strides(array))

    def double(self, index: Any, value: float) -> None:
        self.args[index] = np.float64(value).view(np.int64)

    def scales(self, scale: float, pairs: bool, scores_whole: bool) -> None:
        """Where the scale is multiplied in. q * scale rounded to bfloat16 would be less exact than q: pairs are packed
        with the scale's power of two and sign alone, and float32 scores get the rest, 1 to 2: in the softmax, or by a
        pass over the tile before what has to see the scores themselves.
        """
        rest = 1.0
        if pairs and scale != 0 and math.isfinite(scale):
            rest = 2 * math.frexp(abs(scale))[0]
        in_tile, in_softmax = (rest, 1.0) if scores_whole else (1.0, rest)
        for index, value in (
            (at.SCALE, scale), (at.PACK_SCALE, scale / rest), (at.TILE_SCALE, in_tile), (at.REST_SCALE, in_softmax),
            (at.RATE, in_softmax * math.log2(math.e)),
        ):  # fmt: skip
            self.double(index, value)

    def tiles(self, block_q: int, block_k: int) -> None:
        self.args[at.BLOCK_Q], self.args[at.BLOCK_K] = block_q, block_k

    def values(self, plan: CpuPlan, operands: Operands, micro: dict[str, int]) -> np.ndarray:
        """The modification's scalars and arrays in the order of the spec's slots (modify._prelude reads them), then the
        addresses of what transposes them.
        """
        from . import modify

        entries: list[int] = []
        for slot in plan.problem.spec.slots:
            if slot.ndim is None:
                value = operands.params[slot.name]
                entries.append(int(value) if slot.kind == "int" else int(np.float64(value).view(np.int64)))
            else:
                array = operands.array(slot)
                stored = modify.stored_dtype(str(slot.dtype))
                same_size = np.dtype(stored).itemsize == array.itemsize
                array = array.view(stored) if same_size else array.astype(stored)
                entries += [self.address(array), *array.shape, *array.strides]
        entries += [micro[f"transpose{size}"] for size in modify.TRANSPOSED_SIZES]
        return np.array(entries, np.int64)


def tensors(operands: Operands) -> tuple[tuple[Any, np.ndarray], ...]:
    """What the forward pass reads and writes, by the place in the block."""
    return (
        (at.Q, operands.q), (at.K, operands.k), (at.V, operands.v), (at.OUT, operands.out), (at.LSE, operands.lse),
    )  # fmt: skip


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """Strides of the batch, head and token axes: the first three, or after a leading axis of parts the next."""
    return array.strides[-4:-1] if array.ndim >= 4 else array.strides


class Memory:
    """Scratch memory for all threads of a call, from an address that is a multiple of 64 on."""

    __slots__ = ("address", "array", "size")

    def __init__(self, size: int) -> None:
        self.array, self.size = np.empty(size + 64, np.uint8), size
        start = int(self.array.__array_interface__["data"][0])
        self.address = start + -start % 64


_spare: deque[Memory] = deque(maxlen=16)
"""Scratch memory that no call uses now, for any call: fresh pages cost more than a small one. What has become too
small for the calls that come is let go."""


def take(size: int) -> Memory:
    """Memory of at least this size, the caller's own until it is given back."""
    try:
        memory = _spare.pop()
    except IndexError:
        return Memory(size)
    return memory if memory.size >= size else Memory(size)


give_back = _spare.append

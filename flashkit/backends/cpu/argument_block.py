"""The argument block (arguments.py) as the host fills it: what follows from the plan and the operands of one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...devices.io_model import CpuTile
from ...mods import dropout
from ...spec import Operands
from . import arguments as at
from . import modify
from .micro.compile import addresses
from .objects import Functions
from .plan import CpuPlan


class Sizes(NamedTuple):
    """Sizes of a call; n_q and n_k of its longest sequence, or the most that it may have."""

    batch: int
    heads: int
    n_q: int
    n_k: int
    tokens_q: int  # of all packed sequences, or 0 for a batch of rectangles
    pairs: int  # of a head, without any mask

    @classmethod
    def of(cls, operands: Operands) -> Sizes:
        _, heads, n_q, _ = operands.q.shape
        n_k, batch = operands.k.shape[2], len(operands.q_offset)
        if operands.page_table is not None:
            n_k *= operands.page_table.shape[1]  # so that tiles, and bits, do not depend on the lengths
        if operands.cu_seqlens is None:
            return cls(batch, heads, n_q, n_k, 0, n_q * int(operands.kv_lengths.sum()))
        rows, keys = np.diff(operands.cu_seqlens[0]), operands.kv_lengths
        return cls(batch, heads, int(rows.max()), int(keys.max(initial=0)), n_q, int(rows @ keys))

    def q_tiles(self, block_q: int) -> tuple[int, int]:
        """Query tiles per head (see tile_scheduler.py), and of all heads."""
        if self.tokens_q:
            tiles = self.tokens_q // block_q + self.batch
            return tiles, tiles * self.heads
        tiles = -(-self.n_q // block_q)
        return tiles, tiles * self.heads * self.batch


class ArgumentBlock:
    """An argument block without the addresses of q, k, v, out and lse, the tiles' sizes and the scratch memory.

    functions: the pass's generated functions. scores_whole: score tiles carry all of the scale. per_call: names of
    arrays that calls bring. The object keeps alive what its addresses point to but for these, and no more.
    """

    def __init__(
        self, plan: CpuPlan, operands: Operands, tile: CpuTile, functions: Functions, *, scores_whole: bool,
        per_call: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.args = args = np.zeros(at.SIZE, np.int64)
        self.alive: list[Any] = [plan.classify, functions]
        self._brought: dict[str, tuple[int, str]] = {}  # the place of an array's address in `values`, and its dtype
        spec = plan.problem.spec
        registers = plan.register_block(tile, plan.bf16_pairs)
        args[at.LANES], args[at.PANEL] = registers.lanes, registers.vectors * registers.lanes
        args[at.LEFT_WORDS] = 1 if plan.bf16_pairs in ("", "avx512bf16") else registers.lanes  # as packing pads
        micro = addresses(registers)
        for name in micro.keys() - modify.TRANSPOSERS:
            args[getattr(at, name.upper())] = micro[name]
        for index, tensor in (
            (at.Q, operands.q), (at.K, operands.k), (at.V, operands.v), (at.OUT, operands.out), (at.LSE, operands.lse),
        ):  # fmt: skip
            args[index + 1 : index + 4] = strides_of(tensor)
        self.sizes = sizes = Sizes.of(operands)
        args[at.BATCH], args[at.HEADS], args[at.GROUP] = sizes.batch, operands.q.shape[1], spec.group
        args[at.N_Q], args[at.N_K] = n_q, n_k = sizes.n_q, sizes.n_k
        args[at.DIM], args[at.DIM_V] = spec.head_dim, spec.head_dim_v
        _, *scales = operands.scales or (None,)
        if scales:
            for index, scale, scaled in zip((at.K_SCALE, at.V_SCALE), scales, (operands.k, operands.v)):
                self.set_tensor(index, scale)
                args[index] -= scaled.__array_interface__["data"][0]
        if operands.k_pe is not None:
            self.set_tensor(at.K_PE, operands.k_pe)
            args[at.DIM_PE] = spec.pe_dim
        args[at.KV_LENGTHS], args[at.Q_OFFSETS] = self.address(operands.kv_lengths), self.address(operands.q_offset)
        if operands.cu_seqlens is not None:
            for index, offsets in zip((at.CU_SEQLENS_Q, at.CU_SEQLENS_K), operands.cu_seqlens):
                args[index] = 0 if offsets is None else self.address(offsets)
        if operands.page_table is not None:
            args[at.PAGE_TABLE], args[at.TABLE_WIDTH] = self.address(operands.page_table), operands.page_table.shape[1]
            args[at.PAGES], args[at.PAGE] = operands.k.shape[0], operands.k.shape[2]
            pools = operands.k, operands.v, operands.k_pe, *scales
            args[at.PAGES_FOLLOW] = all(x.strides[0] == x.shape[2] * x.strides[2] for x in pools if x is not None)
        # P before dropout is not yet rounded to bf16 pairs, and its exponentials take no scale.
        whole = scores_whole or spec.score is not None or bool(operands.dropout_p) or spec.stats
        self._set_scales(operands.scale, bool(plan.bf16_pairs), whole)
        if operands.sinks is not None:
            args[at.SINKS] = self.address(np.ascontiguousarray(operands.sinks, spec.lse_dtype))
        if operands.stats is not None:
            self.set_tensor(at.ENTROPY, operands.stats.entropy)
            self.set_tensor(at.MAX_LOGIT, operands.stats.max_logit)
        if operands.tangents is not None:
            named = zip((at.DQ, at.DK, at.DV, at.DOUT, at.DLSE), operands.tangents, strict=True)
            for index, tensor in named:
                if tensor is not None:
                    self.set_tensor(index, tensor)
        args[at.CLASSIFY] = plan.classify.get("classify", 0)
        # A group larger than all tiles would only be halved again.
        args[at.MAX_GROUP] = min(plan.max_group, 1 << max(n_q, n_k).bit_length())
        if functions:
            args[at.MODIFY], args[at.VISIT_DS] = functions["modify"], functions.get("visit_ds", 0)
            slopes = spec.jvp != "" and spec.score is not None  # which take the room of a tile
            args[at.HAS_SCORE], args[at.TRANSPOSED_TILES] = spec.score is not None, plan.transposed_tiles + slopes
            self.values = self._values(plan, operands, micro, per_call)
            args[at.VALUES] = self.address(self.values)
        args[at.PER_CALL] = 8 * bool(self._brought)
        if operands.dropout_p:
            args[at.DROPOUT], args[at.DROPOUT_THRESHOLD] = 1, dropout.threshold(operands.dropout_p)
            self._set_double(at.DROPOUT_SCALE, 1 / (1 - operands.dropout_p))
            args[at.SEED] = np.uint64(operands.seed & (2**64 - 1)).astype(np.int64)
            args[at.DROPOUT_ROW], args[at.DROPOUT_KEY], args[at.DROPOUT_HEAD] = dropout.first_of(operands.seed)

    def address(self, array: np.ndarray) -> int:
        self.alive.append(array)
        return address_of(array)

    def set_tensor(self, index: Any, array: np.ndarray) -> None:
        """Address and strides of a tensor."""
        self.args[index : index + 4] = (self.address(array), *strides_of(array))

    def _set_double(self, index: Any, value: float) -> None:
        self.args[index] = np.float64(value).view(np.int64)

    def _set_scales(self, scale: float, bf16_pairs: bool, scores_whole: bool) -> None:
        """Distribute the scale. q * scale rounded to bfloat16 would be less exact than q, so bf16 pairs are packed with
        only the scale's sign and power of two. Its mantissa, 1 to 2, goes to the float32 scores: inside the softmax,
        or, where a modification has to see true scores, by a pass over the tile before it.
        """
        rest = 1.0
        if bf16_pairs and scale != 0 and math.isfinite(scale):
            rest = 2 * math.frexp(abs(scale))[0]
        in_tile, in_softmax = (rest, 1.0) if scores_whole else (1.0, rest)
        for index, value in (
            (at.SCALE, scale), (at.PACK_SCALE, scale / rest), (at.TILE_SCALE, in_tile),
            (at.SOFTMAX_SCALE, in_softmax), (at.SOFTMAX_SCALE_LOG2, in_softmax * math.log2(math.e)),
        ):  # fmt: skip
            self._set_double(index, value)

    def values_of(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """VALUES of a call with these arrays, and arrays to keep until it ends; nothing where all calls have one."""
        if not self.args[at.PER_CALL] & 8:
            return ()
        values, kept = self.values.copy(), []
        for name, (place, stored) in self._brought.items():
            kept.append(_stored(arrays[name], stored))
            values[place] = address_of(kept[-1])
        return values, *kept

    def _values(self, plan: CpuPlan, operands: Operands, micro: dict[str, int], per_call: Sequence[str]) -> np.ndarray:
        """Scalars and arrays of the modification, as modify._prelude reads them, then the transposing micro-kernels."""
        entries: list[int] = []
        for slot in plan.problem.spec.slots:
            if slot.ndim is None:
                value = operands.params[slot.name]
                entries.append(int(value) if slot.kind == "int" else int(np.float64(value).view(np.int64)))
            else:
                stored = modify.stored_dtype(str(slot.dtype))
                array = _stored(operands.array(slot), stored)
                if slot.name in per_call:
                    self._brought[slot.name] = len(entries), stored
                address = 0 if slot.name in per_call else self.address(array)
                entries += [address, *array.shape, *array.strides]
        entries += [micro[name] for name in modify.TRANSPOSERS]
        sums = plan.problem.spec.sums
        room = modify.VALUE_WORDS + sum(map(modify.value_entries, sums)) if sums else 0  # filled for each launch
        self.first_sum = len(entries)
        return np.array(entries + room * [0], np.int64)


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array in the dtype that kernels read: a view, or a wider copy with one element along axes of stride 0."""
    if np.dtype(dtype).itemsize == array.itemsize:
        return array.view(dtype)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in array.strides)
    return np.broadcast_to(array[once].astype(dtype), array.shape)


def address_of(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def strides_of(array: np.ndarray) -> tuple[int, ...]:
    """Strides of the batch, head and token axes; an axis of splits may precede. A single batch entry has 0."""
    axes = slice(-4, -1) if array.ndim >= 4 else slice(None)
    batch, head, token = array.strides[axes]
    return 0 if array.shape[axes][0] == 1 else batch, head, token

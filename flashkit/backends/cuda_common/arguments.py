"""The argument block of one call: `Params` (params.py) as 64-bit words, and the arrays that its addresses point to."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ...mods import dropout
from ...spec import SCALES, AttentionSpec, Gradients, Operands, Stats, Tangents
from . import modification, ordered_sums
from .launch import KernelArguments, dummy_slot, scratch
from .params import AT, VALUES, WORDS_OF_TENSOR, integers_address

ROW_TENSORS = "q", "k", "v", "out"
"""Tensors that the forward pass reads or writes in whole rows."""

MORE = *Stats._fields, *(f"d{name}" for name in Tangents._fields)
"""Of a forward pass with statistics, or with tangents."""

_MAX_COUNTED_TILES = 1 << 18  # of a block mask; bounds the time to count them
_DUMMY_SLOTS, _DUMMY_STRIDE = 4096, 8  # slots for the LSE, and elements between two of them


def size(spec: AttentionSpec) -> int:
    """Words of the argument block."""
    return VALUES + max(1, modification.values_of(spec))


def bits(value: float) -> int:
    """A float64 as the integer with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


class Arguments(KernelArguments):
    """The argument block of one call and what it points to. Arrays of the host are replaced by copies in `operands`."""

    def __init__(self, spec: AttentionSpec, operands: Operands) -> None:
        self.spec, self.alive, self.scale, self._blocks = spec, list[Any](), operands.scale, operands.blocks
        self.ordered: dict[str, Any] = {}  # memory of sums by value
        self.shapes: dict[str, tuple[int, ...]] = {}  # of arrays of the modification
        self.stores_values = False  # kernels store gradients by values, in the dtype of the operands
        self.uploaded = False  # whether something was copied to the device
        self.empty: Any = None  # f(shape, dtype) makes memory, where the call's arrays are not of CuPy's pool
        self.entries, self.heads, self.n_q, _ = operands.q.shape
        self.heads_kv, self.n_k = operands.k.shape[1:3]
        if spec.paged:
            self.n_k *= operands.page_table.shape[1]
        self.batch = len(operands.q_offset) if spec.packed else self.entries
        words = [0] * size(spec)
        five = (operands.q, operands.k, operands.v, operands.out, operands.lse)
        words[: WORDS_OF_TENSOR * len(five)] = chain.from_iterable(map(self._tensor, five))
        if spec.paged:
            self._set_pages(words, operands)
        words[AT["batch"] : AT["num_splits"] + 1] = self.batch, self.heads, self.n_q, self.n_k, 1, 1
        words[AT["softmax_scale"]] = bits(operands.scale)
        offset = operands.q_offset
        # Equal offsets are one number, which needs no transfer; others are an array on the device.
        if isinstance(offset, np.ndarray) and (len(offset) == 1 or (offset == offset[0]).all()):
            words[AT["q_offset"]] = int(offset[0])
        else:
            operands.q_offset = self._on_device(offset, np.int64)
            words[AT["q_offsets"]] = self.address(operands.q_offset)
        if spec.kv_lengths:
            operands.kv_lengths = self._on_device(operands.kv_lengths, np.int64)
            words[AT["kv_lengths"]] = self._integers(operands.kv_lengths)
        if spec.packed:
            of_q, of_k = operands.cu_seqlens or (None, None)  # pages have no offsets of keys
            of_q, of_k = (each if each is None else self._on_device(each, np.int64) for each in (of_q, of_k))
            operands.cu_seqlens = of_q, of_k
            for name, offsets in (("cu_seqlens_q", of_q), ("cu_seqlens_k", of_k)):
                if offsets is not None:
                    words[AT[name]] = self.address(offsets)
        if spec.sinks:
            words[AT["sinks"]] = self.address(operands.sinks)
        if spec.dropout:
            row, key, head = dropout.first_of(operands.seed)
            words[AT["seed"] : AT["dropout_scale"] + 1] = (
                operands.seed, row | key // 4 << 32, head, dropout.threshold(operands.dropout_p),
                bits(1 / (1 - operands.dropout_p)),
            )  # fmt: skip
        if spec.slots:
            operands.arrays = {name: self._on_device(array) for name, array in operands.arrays.items()}
            values = self._values(operands)
            words[VALUES : VALUES + len(values)] = values
        self._known: dict[Any, Any] = {}
        super().__init__(words)
        if operands.stats is not None:
            self.tensors(**operands.stats._asdict())
        if operands.tangents is not None:
            self.tensors(**{f"d{name}": x for name, x in operands.tangents._asdict().items()})
        if operands.scales is not None:
            self.tensors(**dict(zip(SCALES, operands.scales, strict=True)))

    def known(self, key: Any, find: Callable[[Arguments], Any]) -> Any:
        """The result of `find`, which depends on shapes and strides alone: kept by the key, for copies too."""
        if key not in self._known:
            self._known[key] = find(self)
        return self._known[key]

    def q_tiles(self, block: int, pack: int = 1) -> int:
        """Query tiles of a head, or of `pack` heads together: of a batch entry, or of all packed sequences."""
        return self.n_q // block + self.batch if self.spec.packed else -(-self.n_q * pack // block)

    def k_tiles(self, block: int) -> int:
        """Key tiles of a head, likewise."""
        return self.n_k // block + self.batch if self.spec.packed else -(-self.n_k // block)

    @property
    def mean_n_k(self) -> int:
        """Keys of a batch entry or a sequence, on average. Packed ones are followed by one more."""
        return self.n_k // max(self.batch - 1, 1) if self.spec.packed and not self.spec.paged else self.n_k

    @property
    def density(self) -> float:
        """The density of the block mask; 0 without one, or if it has too many tiles to count."""
        small = self._blocks is not None and self._blocks.tile_count <= _MAX_COUNTED_TILES
        return self._blocks.density if small else 0.0

    @property
    def positive_scale(self) -> bool:
        """Whether -inf stays -inf when it is multiplied by the scale, as fast kernels do after they mask."""
        return self.scale > 1e-30

    def discard_lse(self, ordinal: int) -> None:
        """The LSE was not requested: each head writes it to one dummy slot."""
        head_stride = _DUMMY_STRIDE if self.heads <= _DUMMY_SLOTS else 0
        memory = dummy_slot(ordinal, 8 * _DUMMY_STRIDE * _DUMMY_SLOTS)
        self.words[AT["lse"] : AT["lse"] + 4] = [memory.data.ptr, 0, head_stride, 0]

    def gradients(self, gradients: Gradients) -> None:
        """Set the tensors that only the backward pass reads and writes. They are not kept alive."""
        self.tensors(dout=gradients.dout, dlse=gradients.dlse, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv)
        if gradients.dsinks is not None:
            self.set(dsinks=gradients.dsinks.data.ptr)

    def sums(self, values: Mapping[str, Any]) -> None:
        """Set the arrays of gradients by values of the modification."""
        self.ordered = {}
        for name, (at, slot) in modification.sums_of(self.spec).items():
            sums = values[name]
            if self.spec.orders_sums:
                self.ordered[name] = ordered_sums.memory(sums)
            address = self.ordered.get(name, sums).data.ptr
            strides = [stride // sums.dtype.itemsize for stride in sums.strides]
            self.words[VALUES + at : VALUES + at + modification.entries(slot)] = [address, *strides]

    @property
    def log2_terms(self) -> int:
        """log2 of the most terms of a sum over pairs."""
        return int(self.batch * self.heads * self.n_q * self.n_k).bit_length()

    def finish_sums(self, gradients: Gradients) -> None:
        """Write ordered sums, after the kernels."""
        for name, words in self.ordered.items():
            ordered_sums.total(words, gradients.values[name], self.log2_terms)

    def copy(self) -> Arguments:
        """A copy of the words, in which addresses may be changed."""
        new = object.__new__(Arguments)
        new.__dict__.update(self.__dict__)
        KernelArguments.__init__(new, list(self.words))
        return new

    def set(self, **words: int) -> None:
        """Set single words by name."""
        for name, value in words.items():
            self.words[AT[name]] = value

    def tensors(self, **arrays: Any) -> None:
        """Set tensors by name: (batch, head, token, element), or (batch, head, token). None: absent."""
        for name, array in arrays.items():
            if array is not None:
                self.words[AT[name] : AT[name] + 4] = list(self._tensor(array))

    def allocate_partials(self, splits: int) -> Any:
        """Set o_partial and lse_partial of split-KV. Returns their memory, to be kept until kernels are enqueued."""
        columns, rows = self.spec.head_dim_v, self.heads * self.n_q
        numbers = splits * self.batch * rows
        o_size = -(-numbers * columns // 2) * 2  # pairs follow, the elements of lse_partial
        memory = scratch((o_size + 2 * numbers,), "float32", empty=self.empty)
        o_at, lse_at, address = AT["o_partial"], AT["lse_partial"], memory.data.ptr
        self.words[o_at : o_at + 4] = [address, rows * columns, self.n_q * columns, columns]
        self.words[lse_at : lse_at + 4] = [address + 4 * o_size, rows, self.n_q, 1]
        return memory

    def _tensor(self, array: Any) -> tuple[int, int, int, int]:
        """Address and strides; the one batch entry of packed sequences is that of each of them."""
        address, batch, head, token = _tensor(array)
        return address, 0 if self.spec.packed else batch, head, token

    def _on_device(self, array: Any, dtype: Any = None) -> Any:
        self.uploaded |= isinstance(array, np.ndarray)
        return on_device(array, dtype)

    def _set_pages(self, words: list[int], operands: Operands) -> None:
        """The table of pages, and where they lie."""
        if self.n_k >= 1 << 31:
            raise ValueError(f"page_table: expected room for less than 2^31 keys a sequence on a GPU, got {self.n_k}")
        if operands.k.shape[2] % self.spec.page_run:
            run, page = self.spec.page_run, operands.k.shape[2]
            raise ValueError(f"k: expected pages of a multiple of {run} tokens, as planned, got {page}")
        operands.page_table = table = self._on_device(operands.page_table, np.int64)
        at = self._integers(table), table.shape[1], operands.k.shape[0], operands.k.shape[2]
        words[AT["page_table"] : AT["page"] + 1] = at
        for name, array in ("k", operands.k), ("v", operands.v):
            words[AT[name] : AT[name] + WORDS_OF_TENSOR] = _tensor(array)

    def address(self, array: Any) -> int:
        """The address of an array, which is kept alive."""
        self.alive.append(array)
        return int(array.data.ptr)

    def _integers(self, array: Any) -> int:
        return integers_address(self.address(array), array.dtype.itemsize)

    def release(self, name: str, operands: Operands) -> int:
        """The index of this array's address, to be replaced; an array of a modification is kept alive no longer."""
        if name in operands.sequences() or name in SCALES + MORE:
            return AT["q_offsets" if name == "q_offset" else name]
        self.alive = [each for each in self.alive if each is not operands.arrays[name]]
        return self._address_words[name]

    def _values(self, operands: Operands) -> list[int]:
        """Scalars and arrays of the modification, in the order of the spec's slots, as code of modify.py reads them."""
        words: list[int] = []
        self._address_words: dict[str, int] = {}
        for slot in self.spec.slots:
            if slot.ndim is None:
                value = operands.params[slot.name]
                words.append(int(value) if slot.kind == "int" else bits(value))
            else:
                array = operands.array(slot)
                self._address_words[slot.name] = VALUES + len(words)
                itemsize = array.dtype.itemsize
                self.shapes[slot.name] = array.shape
                words += [self.address(array), *(stride // itemsize for stride in array.strides)]
        return words


def addresses(names: Sequence[str]) -> list[int]:
    """Indices of the words that hold the addresses of these tensors."""
    return [AT[name] for name in names]


def aligned(arguments: Arguments, at: Sequence[int]) -> bool:
    """Whether the addresses in these words are multiples of 16 bytes."""
    joined, words = 0, arguments.words
    for each in at:
        joined |= words[each]
    return joined % 16 == 0


def strides_are_vector_multiples(arguments: Arguments, names: Sequence[str]) -> bool:
    """Whether the strides of these tensors, of 2-byte elements, are multiples of 16-byte vectors."""
    return not any(stride % 8 for at in addresses(names) for stride in arguments.words[at + 1 : at + 4])


def _tensor(array: Any) -> tuple[int, int, int, int]:
    batch, head, token = array.strides[:3]
    itemsize = array.dtype.itemsize
    return array.data.ptr, batch // itemsize, head // itemsize, token // itemsize


def on_device(array: Any, dtype: Any = None) -> Any:
    """The array itself if it is on the device, else a copy there."""
    if not isinstance(array, np.ndarray):
        return array
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        # The graph would copy from host memory that may be freed before the graph runs.
        raise ValueError(
            "expected a CuPy array of lengths, positions or a modification in a CUDA graph, got a NumPy array"
        )
    return cupy.asarray(array, dtype)

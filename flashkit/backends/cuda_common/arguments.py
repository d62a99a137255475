"""The block of arguments of one call: `Params` (params.py) as 64-bit words, and what keeps its addresses alive."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ...mods import dropout
from ...spec import AttentionSpec, Gradients, Operands
from . import modification
from .launch import Block, nowhere, scratch
from .params import AT, VALUES, WORDS_OF_TENSOR

MOVED = "q", "k", "v", "out"
"""Tensors of which the forward pass moves whole rows."""

_MOST_COUNTED = 1 << 18  # tiles of a mask of blocks: 50 ms, once for the mask
_PLACES = 4096  # of 8 numbers each, that a log-sum-exp may go to if nobody wants it


def size(spec: AttentionSpec) -> int:
    """Words of the block."""
    return VALUES + max(1, modification.values_of(spec))


def bits(value: float) -> int:
    """A float64 as the integer with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


class Arguments(Block):
    """The block of one call. Keeps alive what its addresses point to.

    What of the operands lies in the host's memory is copied to the device, and the copy put in its place: the backward
    pass of the same call, made as often as anybody likes, sends nothing.
    """

    def __init__(self, spec: AttentionSpec, operands: Operands) -> None:
        self.spec, self.alive, self.scale, self._blocks = spec, list[Any](), operands.scale, operands.blocks
        self.batch, self.heads, self.n_q, _ = operands.q.shape
        self.heads_kv, self.n_k = operands.k.shape[1:3]
        words = [0] * size(spec)
        five = (operands.q, operands.k, operands.v, operands.out, operands.lse)
        words[: WORDS_OF_TENSOR * len(five)] = chain.from_iterable(map(_tensor, five))
        words[AT["batch"] : AT["num_splits"] + 1] = self.batch, self.heads, self.n_q, self.n_k, 1
        words[AT["softmax_scale"]] = bits(operands.scale)
        offset = operands.q_offset
        # One number where all entries agree, which costs no transfer; else an array on the device.
        if isinstance(offset, np.ndarray) and (len(offset) == 1 or (offset == offset[0]).all()):
            words[AT["q_offset"]] = int(offset[0])
        else:
            operands.q_offset = _on_device(offset, np.int64)
            words[AT["q_offsets"]] = self.address(operands.q_offset)
        if spec.kv_lengths:
            operands.kv_lengths = _on_device(operands.kv_lengths, np.int64)
            words[AT["kv_lengths"]] = self.address(operands.kv_lengths)
        if spec.sinks:
            words[AT["sinks"]] = self.address(operands.sinks)
        if spec.dropout:
            words[AT["seed"] : AT["dropout_scale"] + 1] = (
                operands.seed, dropout.threshold(operands.dropout_p), bits(1 / (1 - operands.dropout_p))
            )  # fmt: skip
        if spec.slots:
            operands.arrays = {name: _on_device(array) for name, array in operands.arrays.items()}
            words[VALUES:] = self._values(operands)
        self._known: dict[Any, Any] = {}
        super().__init__(words)

    def known(self, key: Any, find: Callable[[Arguments], Any]) -> Any:
        """What `find` says of shapes and strides; asked once under this key, also for copies, which differ in addresses
        alone.
        """
        if key not in self._known:
            self._known[key] = find(self)
        return self._known[key]

    @property
    def density(self) -> float:
        """The share of all tiles that a mask of blocks has; 0 without one, or where counting takes long."""
        small = self._blocks is not None and self._blocks.tile_count <= _MOST_COUNTED
        return self._blocks.density if small else 0.0

    def unread_lse(self, ordinal: int) -> None:
        """Let rows' log-sum-exp, which nobody wants, go to memory that no one reads: one place for each head."""
        apart = 8 if self.heads <= _PLACES else 0
        self.words[AT["lse"] : AT["lse"] + 4] = [nowhere(ordinal, 64 * _PLACES).data.ptr, 0, apart, 0]

    def gradients(self, gradients: Gradients) -> None:
        """What the backward pass reads and writes beyond the operands."""
        self.tensors(dout=gradients.dout, dlse=gradients.dlse, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv)
        if gradients.dsinks is not None:
            self.set(dsinks=self.address(gradients.dsinks))

    def copy(self) -> Arguments:
        """The same words in memory of their own, of which addresses may be changed."""
        new = object.__new__(Arguments)
        new.__dict__.update(self.__dict__)
        Block.__init__(new, list(self.words))
        return new

    def set(self, **words: int) -> None:
        """Single words by name."""
        for name, value in words.items():
            self.words[AT[name]] = value

    def tensors(self, **arrays: Any) -> None:
        """Tensors by name, with a batch, a head and a token axis and, except for numbers of a row, elements after
        these; None: absent.
        """
        for name, array in arrays.items():
            if array is not None:
                self.words[AT[name] : AT[name] + 4] = list(_tensor(array))

    def partial_results(self, parts: int) -> Any:
        """Memory, which has to live until kernels are enqueued, for what each of so many parts of the keys gives."""
        columns, rows = self.spec.head_dim_v, self.heads * self.n_q
        numbers = parts * self.batch * rows
        memory = scratch(numbers * (columns + 1), "float32")
        o_at, lse_at, address = AT["o_partial"], AT["lse_partial"], memory.data.ptr
        self.words[o_at : o_at + 4] = [address, rows * columns, self.n_q * columns, columns]
        self.words[lse_at : lse_at + 4] = [address + 4 * numbers * columns, rows, self.n_q, 1]
        return memory

    def address(self, array: Any) -> int:
        self.alive.append(array)
        return int(array.data.ptr)

    def release(self, name: str, operands: Operands) -> int:
        """Keep this array of a modification alive no longer; the word where the address of another may be put."""
        self.alive = [each for each in self.alive if each is not operands.arrays[name]]
        return self._places[name]

    def _values(self, operands: Operands) -> list[int]:
        """The modification's scalars and arrays in the order of the spec's slots; modify.py reads them."""
        words: list[int] = []
        self._places: dict[str, int] = {}
        for slot in self.spec.slots:
            if slot.ndim is None:
                value = operands.params[slot.name]
                words.append(int(value) if slot.kind == "int" else bits(value))
            else:
                array = operands.array(slot)
                self._places[slot.name] = VALUES + len(words)
                itemsize = array.dtype.itemsize
                words += [self.address(array), *(stride // itemsize for stride in array.strides)]
        return words


def addresses(names: Sequence[str]) -> list[int]:
    """The words where the addresses of these tensors stand."""
    return [AT[name] for name in names]


def aligned(arguments: Arguments, at: Sequence[int]) -> bool:
    """Whether the addresses in these words are of whole 16 bytes."""
    bits, words = 0, arguments.words
    for each in at:
        bits |= words[each]
    return bits % 16 == 0


def strides_in_units(arguments: Arguments, names: Sequence[str]) -> bool:
    """Whether every row of these tensors, of two bytes an element, begins whole 16 bytes after the first."""
    return not any(stride % 8 for at in addresses(names) for stride in arguments.words[at + 1 : at + 4])


def in_units(arguments: Arguments, names: Sequence[str]) -> bool:
    """Whether every row of these tensors, of two bytes an element, begins on 16 bytes."""
    return aligned(arguments, addresses(names)) and strides_in_units(arguments, names)


def _tensor(array: Any) -> tuple[int, int, int, int]:
    batch, head, token = array.strides[:3]
    itemsize = array.dtype.itemsize
    return array.data.ptr, batch // itemsize, head // itemsize, token // itemsize


def _on_device(array: Any, dtype: Any = None) -> Any:
    """The array itself where it lies on the device already, else a copy there."""
    if not isinstance(array, np.ndarray):
        return array
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        # The graph would copy from memory that is gone when it runs.
        raise ValueError(
            "a NumPy array (of lengths, positions or a modification) cannot be part of a CUDA graph; a CuPy array fits"
        )
    return cupy.asarray(array, dtype)

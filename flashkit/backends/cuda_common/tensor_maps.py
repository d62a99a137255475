"""What Hopper's kernels get besides the argument block: tensor maps for TMA, by value, and tile counters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from ...devices.lazy import cached_property
from ...spec import ITEMSIZE
from .arguments import Arguments
from .device import Device
from .launch import TensorMap, call, capturing, scratch
from .modification import Dense, DenseArray
from .params import AT, VALUES

_ALIGNMENT = 16  # bytes, of addresses and strides
_BOX_BYTES = 128  # of a box along the columns: the width of the 128-byte swizzle


def _extents(arguments: Arguments, name: str) -> tuple[int, int, int]:
    """Batch entries, heads and tokens of a tensor; of keys in pages, the pages and the keys of one."""
    if name not in ("k", "v", "dk", "dv"):
        return arguments.entries, arguments.heads, arguments.n_q
    if arguments.spec.paged:
        return arguments.words[AT["pages"]], arguments.heads_kv, arguments.words[AT["page"]]
    return arguments.entries, arguments.heads_kv, arguments.n_k


def strides_fit(arguments: Arguments, names: Sequence[str]) -> bool:
    """Whether TMA takes these strides: positive multiples of 16 bytes. Addresses are not checked."""
    words = arguments.words
    for name in names:
        at = AT[name]
        if not layout_fits(dtype_of(arguments, name), _extents(arguments, name), words[at + 1 : at + 4]):
            return False
    return True


def layout_fits(dtype: str, sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """The same of axes of one array."""
    itemsize = _itemsize(dtype)
    return not any(
        size > 1 and (stride <= 0 or stride * itemsize % _ALIGNMENT or stride * itemsize >= 2**40)
        for size, stride in zip(sizes, strides)
    )


def dtype_of(arguments: Arguments, name: str) -> str:
    """The dtype of a tensor's elements."""
    return arguments.spec.operand_dtype if name in ("q", "k", "v") else arguments.spec.dtype


def _itemsize(dtype: str) -> int:
    return ITEMSIZE.get(dtype, 1)  # codes are uint8


class Maps(dict[int, TensorMap]):
    """Tensor maps of tensors of one layout, by address."""

    MAX = 256

    def __init__(self, *layout: Any) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, address: int) -> TensorMap:
        if len(self) >= self.MAX:
            self.clear()
        made = self[address] = encode(*self._layout, address)
        return made


def maps_of(arguments: Arguments, name: str, dim: int, pack: int, rows: int) -> Maps:
    """Maps (batch, head / pack, token, head % pack, dim) of tensors of this layout, in boxes of `rows` rows."""
    at, dtype = AT[name], dtype_of(arguments, name)
    entries, heads, tokens = _extents(arguments, name)
    return Maps(dtype, *arguments.words[at + 1 : at + 4], dim, pack, heads, tokens, entries, rows)


def maps_of_pairs(
    arguments: Arguments, array: DenseArray, rows: int, dtype: str, strides: Sequence[int]
) -> Maps | None:  # fmt: skip
    """The tensor maps of arrays of this shape, for boxes of `rows` rows; None where TMA cannot address them."""
    shape = arguments.shapes[array.slot.name]
    entries, heads = (1 if axis is None else shape[axis] for axis in (array.entry, array.head))
    entry, head = (0 if axis is None else strides[axis] for axis in (array.entry, array.head))
    n_q, n_k = arguments.n_q, arguments.n_k
    fit = shape[-2] >= n_q and shape[-1] >= n_k and strides[-1] == 1
    if not (fit and layout_fits(dtype, (entries, heads, shape[-2]), (entry, head, strides[-2]))):
        return None
    return Maps(dtype, entry, head, strides[-2], n_k, 1, heads, n_q, entries, rows)


def dense_maps(arguments: Arguments, dense: Dense, rows: int) -> list[tuple[int, Maps]] | None:
    """Those of the bias and of the mask, each with the index of its address; of one twice where it is alone."""
    found = []
    for array in filter(None, dense):
        at, dtype = VALUES + array.at, str(array.slot.dtype)
        strides = arguments.words[at + 1 : at + 1 + len(arguments.shapes[array.slot.name])]
        maps = maps_of_pairs(arguments, array, rows, "uint8" if dtype == "bool" else dtype, strides)
        if maps is None:
            return None
        found.append((at, maps))
    return [found[0], found[-1]] if found else []


@lru_cache(maxsize=4096)
def encode(
    dtype: str, batch: int, head: int, token: int, dim: int, pack: int, heads: int, tokens: int, batches: int,
    rows: int, address: int,
) -> TensorMap:  # fmt: skip
    """The tensor map of an array; batch, head, token: its strides in elements."""
    from cuda.bindings import driver

    itemsize = _itemsize(dtype)
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    types = driver.CUtensorMapDataType
    inner = [(pack, head, pack), (tokens, token, rows // pack)]
    inner = inner[::-1] if pack == 1 else inner
    axes = (*inner, (heads // pack, pack * head, 1), (batches, batch, 1))
    handle = call(
        "cuTensorMapEncodeTiled",
        getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"),
        5, address,
        [u64(dim), *(u64(size) for size, _, _ in axes)],
        # The stride of an axis of length 1 has no meaning, but cuTensorMapEncodeTiled checks it.
        [u64(stride * itemsize if size > 1 else _ALIGNMENT) for size, stride, _ in axes],
        [u32(_BOX_BYTES // itemsize), *(u32(box) for _, _, box in axes)],
        [u32(1)] * 5,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    return TensorMap(handle)


class TileCounters:
    """Pairs of counters on a device, zero. A kernel claims work tiles by a pair, and its last CTA resets the pair."""

    COUNT = 65536  # more than the number of kernels in flight

    def __init__(self) -> None:
        self._next = itertools.count()

    @cached_property
    def _memory(self) -> Any:
        """Allocated by the first launch, on its device: a plan that is only listed has none."""
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            memory = cupy.zeros((self.COUNT, 2), "int32")
            stream.synchronize()
        return memory

    def next(self, stream: int) -> int:
        """The address of a pair that no kernel in flight uses; a captured launch, which may run later, has its own."""
        if capturing(stream):
            return int(scratch((2,), "int32", zeros=True).data.ptr)
        return int(self._memory.data.ptr) + next(self._next) % self.COUNT * 8

    @staticmethod
    def of(device: Device) -> TileCounters:
        """The counters of a device."""
        return _tile_counters(device.ordinal)


@cache
def _tile_counters(ordinal: int) -> TileCounters:
    return TileCounters()

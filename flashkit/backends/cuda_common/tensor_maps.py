"""What Hopper's kernels are given beyond the block of arguments: tensor maps, by value, and counters of work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from ...spec import ITEMSIZE
from .arguments import Arguments, addresses, aligned
from .device import Device
from .launch import TensorMap, call, capturing, scratch
from .params import AT

_ALIGNED = 16  # bytes, of addresses and strides
_CHUNK = 128  # bytes of a box along the columns


def addressable(arguments: Arguments, names: Sequence[str]) -> bool:
    """Whether the copy engine can address these tensors: whole 16 bytes, no stride of 0 or below."""
    return aligned(arguments, addresses(names)) and strides_fit(arguments, names)


def strides_fit(arguments: Arguments, names: Sequence[str]) -> bool:
    """Whether strides are such; addresses are not looked at."""
    words, itemsize = arguments.words, ITEMSIZE[arguments.spec.dtype]
    for name in names:
        at = AT[name]
        heads = arguments.heads_kv if name in ("k", "v", "dk", "dv") else arguments.heads
        tokens = arguments.n_k if name in ("k", "v", "dk", "dv") else arguments.n_q
        for stride, size in zip(words[at + 1 : at + 4], (arguments.batch, heads, tokens)):
            if size > 1 and (stride <= 0 or stride * itemsize % _ALIGNED or stride * itemsize >= 2**40):
                return False
    return True


def tensor_map(arguments: Arguments, name: str, dim: int, pack: int, rows: int) -> TensorMap:
    """The map of a tensor for boxes of `rows` rows of 128 bytes: (batch, head / pack, token, member of a pack, dim);
    without packs (batch, head, 1, token, dim).
    """
    return maps_of(arguments, name, dim, pack, rows)[arguments.words[AT[name]]]


class Maps(dict[int, TensorMap]):
    """Maps of tensors of one form, by their addresses."""

    MOST = 256

    def __init__(self, *form: Any) -> None:
        super().__init__()
        self._form = form

    def __missing__(self, address: int) -> TensorMap:
        if len(self) >= self.MOST:
            self.clear()
        made = self[address] = encode(*self._form, address)
        return made


def maps_of(arguments: Arguments, name: str, dim: int, pack: int, rows: int) -> Maps:
    """Those of all tensors of the form of this one."""
    of_keys = name in ("k", "v", "dk", "dv")
    at, words = AT[name], arguments.words
    heads, tokens = (arguments.heads_kv, arguments.n_k) if of_keys else (arguments.heads, arguments.n_q)
    strides = words[at + 1 : at + 4]
    return Maps(arguments.spec.dtype, *strides, dim, pack, heads, tokens, arguments.batch, rows)


@lru_cache(maxsize=4096)
def encode(
    dtype: str, batch: int, head: int, token: int, dim: int, pack: int, heads: int, tokens: int, batches: int,
    rows: int, address: int,
) -> TensorMap:  # fmt: skip
    """The map of an array; batch, head, token: its strides in elements."""
    from cuda.bindings import driver

    itemsize = ITEMSIZE[dtype]
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
        # Of an axis of one element the stride means nothing, but it has to look like one.
        [u64(stride * itemsize if size > 1 else _ALIGNED) for size, stride, _ in axes],
        [u32(_CHUNK // itemsize), *(u32(box) for _, _, box in axes)],
        [u32(1)] * 5,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    return TensorMap(handle)


class Tickets:
    """Pairs of counters on a device, zero. A kernel hands out work by its pair and leaves it as it found it."""

    COUNT = 65536  # far more than kernels can be in flight

    def __init__(self) -> None:
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            self._memory = cupy.zeros((self.COUNT, 2), "int32")
            stream.synchronize()
        self._first, self._next = int(self._memory.data.ptr), itertools.count()

    def next(self, stream: int) -> int:
        """The address of a pair that no kernel in flight uses; a graph, which may run at any time, has its own."""
        if capturing(stream):
            return int(scratch((2,), "int32", zeros=True).data.ptr)
        return self._first + next(self._next) % self.COUNT * 8

    @staticmethod
    def of(device: Device) -> Tickets:
        return _tickets(device.ordinal)


@cache
def _tickets(ordinal: int) -> Tickets:
    return Tickets()

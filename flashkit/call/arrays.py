"""Facts of arrays that the public functions need: kind, dtype, memory layout.

An array of a library exists only if the library is imported, so nothing is imported here to recognise one.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from ..spec import ITEMSIZE, Operands, name_of
from . import interop
from .views import View


def kind_of(array: Any) -> str | None:
    """The library of an array: "numpy", "cupy", or None for anything else."""
    if isinstance(array, np.ndarray):
        return "numpy"
    cupy = sys.modules.get("cupy")
    return "cupy" if cupy is not None and isinstance(array, (cupy.ndarray, View)) else None


def namespace(kind: str) -> Any:
    """The module of the library."""
    return np if kind == "numpy" else sys.modules["cupy"]


def scope(array: Any) -> AbstractContextManager[Any]:
    """Where to compute new arrays: on the device of this one."""
    return nullcontext() if is_here(array) else array.device


def is_here(array: Any) -> bool:
    """Whether an array lies on the current device, or on none. To ask takes less than to enter the device."""
    if kind_of(array) != "cupy":
        return True
    return bool(array.data.device_id == sys.modules["cupy"].cuda.runtime.getDevice())


def require(name: str, array: Any, kind: str | None = None) -> str:
    """The kind of an argument; TypeError if it is no array, or not of the given kind."""
    own_kind = kind_of(array)
    if isinstance(array, np.ma.MaskedArray | np.matrix):
        # These classes have their own arithmetic, which attention would silently ignore.
        remedy = "x.filled(...) and mask=" if isinstance(array, np.ma.MaskedArray) else "numpy.asarray(x)"
        raise TypeError(f"{name}: expected a plain numpy.ndarray, got a {type(array).__name__}; pass {remedy}")
    if own_kind is None:
        if kind is not None and (library := interop.library_of(array)) is not None:
            raise TypeError(f"{name}: expected a {kind} array, as q is, got a {library.describe(array)}")
        hint = (
            "; pass numpy.asarray(x) or numpy.from_dlpack(x)"
            if hasattr(array, "__dlpack__") or isinstance(array, (list, tuple))
            else "; pass x.dequantize()"
            if hasattr(array, "dequantize")
            else ""
        )
        raise TypeError(
            f"{name}: expected an array of NumPy, CuPy, PyTorch or JAX, got a {type(array).__module__}."
            f"{type(array).__qualname__}{hint}"
        )
    if kind is not None and own_kind != kind:
        raise TypeError(f"{name}: expected a {kind} array, as q is, got a {own_kind} array")
    return own_kind


def dtype_name(name: str, array: Any) -> str:
    """The name of an array's dtype; TypeError if attention does not take it."""
    dtype = array.dtype
    known = name_of(dtype)
    if known not in ITEMSIZE:
        raise TypeError(f"{name}: expected dtype {', '.join(ITEMSIZE)} (ml_dtypes.bfloat16), got {dtype}")
    if not dtype.isnative:
        raise TypeError(
            f"{name}: expected this machine's byte order, got dtype {dtype.str}; pass "
            f"{name}.astype({name}.dtype.newbyteorder('='))"
        )
    return known


def own_form(name: str, array: Any, kind: str | None = None) -> Any:
    """A view of an argument, of the given kind; see `own_forms`."""
    require(name, array, kind)
    return array.view()


def own_form_like(name: str, array: Any, kind: str, shape: tuple[int, ...], dtype: Any, whose: str = "") -> Any:
    """A view of an argument, of this kind, shape and dtype. whose: behind these in messages."""
    array = own_form(name, array, kind)
    if array.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}{whose}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}{whose}, got {array.shape}")
    return array


def own_forms(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Views of NumPy arrays, others as they are: another thread may set the shape of an array, not of a view."""
    if type(q) is type(k) is type(v) is np.ndarray:
        return q.view(), k.view(), v.view()
    return tuple([x.view() if isinstance(x, np.ndarray) else x for x in (q, k, v)])  # type: ignore[return-value]


def addressable(array: Any) -> Any:
    """The array itself if its last axis is contiguous and its elements are aligned, else a copy."""
    itemsize = array.dtype.itemsize
    contiguous = array.shape[-1] <= 1 or array.strides[-1] == itemsize
    aligned = not isinstance(array, np.ndarray) or array.flags.aligned
    if contiguous and aligned:
        return array
    return np.array(array, order="C", copy=True) if isinstance(array, np.ndarray) else array.copy()


def as_batch(array: Any) -> Any:
    """(..., a, b, c) as (B, a, b, c), of any size."""
    return array.reshape((math.prod(array.shape[:-3]), *array.shape[-3:]))


def stand_in(kind: str, shape: Any, dtype: Any, value: int = 0) -> Any:
    """An array of this library, shape and dtype, all of whose elements are one number. It takes no memory."""
    xp = namespace(kind)
    return xp.broadcast_to(xp.full((), value, dtype), tuple(shape))


def without_repeats(array: Any) -> Any:
    """A view with one entry along each axis whose entries are all the same, of stride 0."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


_cupy_types = set[type]()  # types known to be arrays of CuPy


def layout(array: Any) -> tuple[Any, ...]:
    """Type, shape, strides, dtype, and alignment (NumPy) or device (CuPy): what a planned call depends on."""
    kind = type(array)
    if kind is View:
        return array.layout
    if kind not in _cupy_types:
        own_kind = "numpy" if kind is np.ndarray else kind_of(array)  # the fastest test first
        if own_kind == "numpy":
            return kind, array.shape, array.strides, array.dtype, array.flags.aligned
        if own_kind is None:
            return (kind,)
        _cupy_types.add(kind)
    return kind, array.shape, array.strides, array.dtype, array.data.device_id


def layouts(q: Any, k: Any, v: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The layouts of three arrays."""
    if type(q) is type(k) is type(v) is np.ndarray:  # without calls
        return (
            (np.ndarray, q.shape, q.strides, q.dtype, q.flags.aligned),
            (np.ndarray, k.shape, k.strides, k.dtype, k.flags.aligned),
            (np.ndarray, v.shape, v.strides, v.dtype, v.flags.aligned),
        )
    return layout(q), layout(k), layout(v)


def describe_place(array: Any) -> str:
    """The last part of an array's layout in words."""
    if isinstance(array, np.ndarray):
        return "aligned" if array.flags.aligned else "not aligned"
    return f"on device {array.data.device_id}"


def on_host(array: Any) -> Any:
    """An array of CuPy copied to the host; all else as it is."""
    return array.get() if hasattr(array, "__cuda_array_interface__") else array


def operands_on_host(operands: Operands) -> Operands:
    """The operands with everything but q, k, v and results copied to the host."""
    cu_seqlens = operands.cu_seqlens
    named = {name: on_host(getattr(operands, name)) for name in ("q_offset", "kv_lengths", "sinks", "page_table")}
    return replace(
        operands, arrays={name: on_host(x) for name, x in operands.arrays.items()},
        cu_seqlens=None if cu_seqlens is None else (on_host(cu_seqlens[0]), on_host(cu_seqlens[1])), **named,
    )  # fmt: skip


def contiguous(array: Any) -> bool:
    """Whether it is an array with the memory layout of a new one, which a kernel may write."""
    if isinstance(array, np.ndarray):
        return array.flags.carray
    if type(array) is View:
        return bool(array.tensor.is_contiguous())
    return kind_of(array) is not None and bool(array.flags.c_contiguous)


def address(array: Any) -> int:
    """Of the first element."""
    return int(array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr)


def same_address(a: Any, b: Any) -> bool:
    """Whether two arrays of one library begin at the same address."""
    return address(a) == address(b)


def may_share(a: Any, b: Any) -> bool:
    """Whether two arrays may have an element in common; False is certain."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.may_share_memory(a, b)
    if isinstance(b, np.ndarray):
        return False
    x, y = a.data.mem, b.data.mem
    # Memory of another library has a new object for each array made of it.
    return x is y or (x.ptr < y.ptr + y.size and y.ptr < x.ptr + x.size)


def share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays of one library have an element in common; False if that takes too long to decide."""
    try:
        of_a, of_b = _addresses(a), _addresses(b)
        return np.shares_memory(of_a, of_b, max_work=10_000)  # type: ignore[arg-type]  # NumPy's stubs know -1 and 0
    except np.exceptions.TooHardError:
        return False


def _addresses(array: Any) -> np.ndarray:
    """An array of NumPy, never read, with the array's addresses: CuPy would wait for the device to compare."""
    return array if isinstance(array, np.ndarray) else np.asarray(_Addresses(array))


class _Addresses:
    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (array.data.ptr, True), "shape": array.shape, "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }  # fmt: skip


def laid_out(kind: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, place: Any) -> Any:
    """An array of this `layout` with arbitrary contents; its memory is not touched here."""
    shape, strides, dtype = tuple(map(int, shape)), tuple(map(int, strides)), np.dtype(dtype)
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)] if 0 not in shape else []
    first, last = sum(x for x in reach if x < 0), sum(x for x in reach if x > 0)
    size = last - first + dtype.itemsize
    if kind != "cupy":
        memory = np.empty(size + 2 * dtype.itemsize, np.uint8)
        start = -first + (-memory.ctypes.data + first) % dtype.itemsize + (0 if place else 1)
        return np.ndarray(shape, dtype, memory, start, strides)
    import cupy

    with cupy.cuda.Device(int(place)) if place is not None else nullcontext():
        held = cupy.empty(size, np.uint8)
        return cupy.ndarray(shape, dtype, held.data + -first, strides)

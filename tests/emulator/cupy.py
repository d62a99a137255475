"""The part of CuPy that flashkit and its tests use, for arrays on the emulated device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from .device import BASE, Device, Launch

DEVICE = Device()
FACTS = {"name": b"emulated", "major": 9, "minor": 0}


class _MemoryPool:
    """Its memory is freed with it."""

    def __init__(self) -> None:
        self.kept: list[_Memory] = []

    def malloc(self, size: int) -> None:
        raise AssertionError("`using_allocator` alone takes it")


_pools: list[_MemoryPool] = []


@contextlib.contextmanager
def _using_allocator(malloc: Any) -> Iterator[None]:
    is_pool = isinstance(malloc.__self__, _MemoryPool)  # not an allocator of a test's own, which it does not call
    _pools.extend([malloc.__self__] * is_pool)
    yield
    del _pools[len(_pools) - is_pool :]


class _Memory:
    """An allocation, freed with its last array, and with the pool that it is of."""

    def __init__(self, size: int) -> None:
        self.size, self.start = size, DEVICE.memory.take(size)
        self.ptr = BASE + self.start
        if _pools:
            _pools[-1].kept.append(self)
        weakref.finalize(self, DEVICE.memory.give, self.start, size)


class _UnownedMemory:
    """Memory of the device that another library has allocated."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self.owner, self.start = ptr, size, owner, ptr - BASE


class _Pointer:
    device_id = 0

    def __init__(self, memory: Any, address: int) -> None:
        self.mem, self.ptr = memory, address


def _unwrapped(x: Any) -> Any:
    if isinstance(x, ndarray):
        return x._host()
    if isinstance(x, (list, tuple)):
        return type(x)(_unwrapped(each) for each in x)
    if isinstance(x, dict):
        return {name: _unwrapped(each) for name, each in x.items()}
    return x


def _wrapped(x: Any, near: tuple[Any, ...] = ()) -> Any:
    """A result as an array on the device: a view where it shares memory with one of `near`, else a copy."""
    if isinstance(x, tuple):
        return tuple(_wrapped(each, near) for each in x)
    if not isinstance(x, np.ndarray | np.generic):
        return x
    for each in near:
        if isinstance(each, ndarray) and isinstance(x, np.ndarray) and x.size and np.may_share_memory(x, each._view):
            return ndarray._of(x, each._memory)
    return _copied(np.asarray(x))


def _copied(x: np.ndarray) -> ndarray:
    made = ndarray(x.shape, x.dtype)
    DEVICE.copied(made._view, x)
    return made


def _read(x: ndarray) -> np.ndarray:
    """The contents on the host: a copy from the device, which a stream that captures does not allow."""
    if DEVICE.recorded is not None:
        raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed")
    return x._host()


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    _memory: Any
    _view: np.ndarray

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: _Pointer | None = None, strides: Any = None, **_: Any
    ) -> None:
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        dtype = np.dtype(dtype)
        if memptr is not None:
            self._memory, offset = memptr.mem, memptr.ptr - BASE
            self._view = np.ndarray(shape, dtype, DEVICE.memory.bytes, offset, strides)
            return
        size = int(np.prod(shape)) * dtype.itemsize
        self._memory = _Memory(size)
        start = self._memory.start
        self._view = DEVICE.memory.bytes[start : start + size].view(dtype).reshape(shape)

    @classmethod
    def _of(cls, view: np.ndarray, memory: _Memory) -> ndarray:
        made = cls.__new__(cls)
        made._view, made._memory = view, memory
        return made

    def _host(self) -> np.ndarray:
        DEVICE.flush()
        return self._view

    shape = property(lambda self: self._view.shape)
    strides = property(lambda self: self._view.strides)
    dtype = property(lambda self: self._view.dtype)
    ndim = property(lambda self: self._view.ndim)
    size = property(lambda self: self._view.size)
    nbytes = property(lambda self: self._view.nbytes)
    flags = property(lambda self: self._view.flags)
    itemsize = property(lambda self: self._view.itemsize)
    T = property(lambda self: ndarray._of(self._view.T, self._memory))
    device = property(lambda self: cuda.Device(0))

    @property
    def data(self) -> _Pointer:
        start = (
            self._view.__array_interface__["data"][0] - DEVICE.memory.bytes.ctypes.data
            if self._view.size
            else self._memory.start
        )
        return _Pointer(self._memory, start + BASE)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._view.__array_interface__, "data": (self.data.ptr, False)}

    @property
    def base(self) -> Any:
        """All of the memory that this is a part of, None where it is all of it."""
        start, size = self._memory.start, self._memory.size
        if self._view.nbytes == size:
            return None
        return ndarray._of(DEVICE.memory.bytes[start : start + size].view(self.dtype), self._memory)

    def set(self, x: np.ndarray) -> None:
        self._host()[...] = x

    def get(self, *_: Any, **__: Any) -> np.ndarray:
        return _read(self).copy()

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed; x.get() fits")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
        inner = _unwrapped(inputs)
        if out is not None:
            getattr(ufunc, method)(*inner, out=_unwrapped(out), **_unwrapped(more))
            return out[0]
        with np.errstate(all="ignore"):
            return _wrapped(getattr(ufunc, method)(*inner, **_unwrapped(more)))

    def __array_function__(self, function: Any, _: Any, args: Any, more: Any) -> Any:
        return _call(function, args, more)

    def __getitem__(self, index: Any) -> Any:
        DEVICE.flush()
        return _wrapped(self._view[_unwrapped(index)], (self,))

    def __setitem__(self, index: Any, x: Any) -> None:
        if isinstance(x, np.ndarray | list | tuple) and np.ndim(x):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")  # as CuPy does
        self._host()[_unwrapped(index)] = _unwrapped(x)

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __float__(self) -> float:
        return float(_read(self))

    def __int__(self) -> int:
        return int(_read(self))

    def __bool__(self) -> bool:
        return bool(_read(self))

    def __repr__(self) -> str:
        return f"emulated {self._host()!r}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(name)

        def method(*args: Any, **more: Any) -> Any:
            with np.errstate(all="ignore"):
                here = _read(self) if name in ("item", "tolist") else self._host()
                return _wrapped(getattr(here, name)(*_unwrapped(args), **_unwrapped(more)), (self,))

        return method


def _call(function: Any, args: Any, more: Any) -> Any:
    """What a function of NumPy gives on the device, now and whenever a graph that captures this runs."""

    def compute() -> Any:
        with np.errstate(all="ignore"):
            return function(*_unwrapped(args), **_unwrapped(more))

    found = _wrapped(compute(), args)
    if DEVICE.recorded is not None and isinstance(found, ndarray):
        target = found._view
        DEVICE.recorded.append(lambda: target.__setitem__(..., compute()))
    return found


def asarray(x: Any, dtype: Any = None, order: Any = None) -> ndarray:
    if isinstance(x, ndarray) and (dtype is None or x.dtype == dtype):
        return x
    return _copied(np.asarray(_unwrapped(x), dtype))


def array(x: Any, dtype: Any = None, copy: bool = True, order: Any = None, **_: Any) -> ndarray:
    return _copied(np.array(_unwrapped(x), dtype))


def empty(shape: Any, dtype: Any = float, **_: Any) -> ndarray:
    return ndarray(shape, dtype)


def empty_like(x: Any, dtype: Any = None, **_: Any) -> ndarray:
    return ndarray(x.shape, dtype or x.dtype)


def asnumpy(x: Any) -> np.ndarray:
    return _read(x).copy()


def shares_memory(a: Any, b: Any) -> bool:
    return bool(np.shares_memory(*map(_read, (a, b))))  # by a kernel, whose result it reads


def _as_strided(x: ndarray, shape: Any, strides: Any) -> ndarray:
    return ndarray._of(np.lib.stride_tricks.as_strided(x._view, shape, strides), x._memory)


lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=_as_strided))


class ElementwiseKernel:
    """One statement of assignment, evaluated by Python."""

    def __init__(self, inputs: str, output: str, operation: str, name: str) -> None:
        self._names = [each.split() for each in inputs.split(", ")]
        self._operation = re.sub(r"\((float|double)\)", "", operation.partition("=")[2].strip())

    def __call__(self, *arguments: Any) -> None:
        *inputs, output = map(_unwrapped, arguments)
        values: dict[str, Any] = {"__uint_as_float": lambda x: x.view(np.float32), "unsigned": np.uint32}
        for (kind, name), x in zip(self._names, inputs, strict=True):
            values[name] = np.asarray(x).astype(kind)
        operation = self._operation.replace("(unsigned)part", "part.astype(unsigned)")
        output[...] = eval(operation, values)


def __getattr__(name: str) -> Any:
    found = getattr(np, name)
    if not callable(found) or isinstance(found, type):
        return found
    return lambda *args, **more: _call(found, args, more)


# --- kernels and products of the caller's own -------------------------------------------------------------------------


class RawModule:
    """CUDA C++ that a caller compiles."""

    def __init__(self, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._code, self._options = code, options

    def get_function(self, name: str) -> Any:
        from .driver import DRIVER

        if not hasattr(self, "_entries"):
            self._entries = DRIVER.entries(_compiled(self._code, self._options))

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            entry = self._entries[name]
            words = bytearray(sum(entry.parameters[-1]))
            for (start, size), x in zip(entry.parameters, arguments, strict=True):
                value = np.uint64(x.data.ptr) if isinstance(x, ndarray) else x
                assert value.nbytes == size, f"{name}: an argument of {value.nbytes} bytes for {size}"
                words[start : start + size] = value.tobytes()
            DEVICE.enqueue(Launch(entry, *grid, *block, 0, bytes(words), False))

        return launch


@functools.cache
def _compiled(code: str, options: tuple[str, ...]) -> str:
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(code.encode(), b"module.cu", 0, [], [])
    given = [b"--gpu-architecture=compute_90", *(option.encode() for option in options)]
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(given), given)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not int(status), log.decode()
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    return text.rstrip(b"\0").decode()


_CUDA_TYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float64), 14: np.dtype(ml_dtypes.bfloat16)}


def _gemm_ex(
    handle: Any, ta: int, tb: int, m: int, n: int, k: int, alpha: Any, a: Any, type_a: int, lda: int, b: Any,
    type_b: int, ldb: int, beta: Any, c: Any, type_c: int, ldc: int, compute: int, algorithm: int,
) -> int:  # fmt: skip
    """cuBLAS's product of matrices by columns: c = alpha a b + beta c."""
    factor, kept = alpha._obj.value, beta._obj.value

    def matrix(address: Any, kind: int, columns: int, step: int, rows: int) -> np.ndarray:
        start, dtype = address.value - BASE, _CUDA_TYPES[kind]
        size = ((columns - 1) * step + rows) * dtype.itemsize
        assert DEVICE.memory.allowed[start : start + size].all()
        return np.ndarray((columns, rows), dtype, DEVICE.memory.bytes, start, (step * dtype.itemsize, dtype.itemsize))

    def compute_it() -> None:
        wide = np.float64 if compute == 70 else np.float32
        left = matrix(a, type_a, m, lda, k).T if ta else matrix(a, type_a, k, lda, m)  # (k, m): its transpose
        right = matrix(b, type_b, k, ldb, n).T if tb else matrix(b, type_b, n, ldb, k)
        out = matrix(c, type_c, n, ldc, m)
        found = factor * (right.astype(wide) @ left.astype(wide))
        out[...] = found + kept * out.astype(wide) if kept else found

    if DEVICE.recorded is not None:
        DEVICE.recorded.append(compute_it)
    else:
        DEVICE.flush()
        compute_it()
    return 0


# --- cupy.cuda --------------------------------------------------------------------------------------------------------


class _Device:
    def __init__(self, number: int = 0) -> None:
        self.id = number

    @property
    def attributes(self) -> dict[str, int]:
        return {
            "MultiProcessorCount": DEVICE.sms, "MaxSharedMemoryPerBlockOptin": 232448, "MaxSharedMemoryPerBlock": 49152,
            "MaxSharedMemoryPerMultiprocessor": 233472, "MaxRegistersPerMultiprocessor": 65536,
        }  # fmt: skip

    mem_info = property(lambda self: (len(DEVICE.memory.bytes), len(DEVICE.memory.bytes)))
    compute_capability = "90"

    def use(self) -> None: ...

    def synchronize(self) -> None:
        DEVICE.flush()

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Device) and other.id == self.id

    __hash__ = object.__hash__


class _Graph:
    def __init__(self, recorded: list[Any]) -> None:
        self._recorded = recorded

    def launch(self, stream: Any = None) -> None:
        DEVICE.replay(self._recorded)


class _Stream:
    """Work runs in the order in which it is enqueued, on whatever stream; all of it is captured while one captures."""

    _numbers, _entered, _capturing = itertools.count(1), threading.local(), 0

    def __init__(self, null: bool = False, **_: Any) -> None:
        self.ptr = 0 if null else next(self._numbers)

    @classmethod
    def from_external(cls, stream: Any) -> _Stream:
        made = cls.__new__(cls)
        _, made.ptr = stream.__cuda_stream__()
        return made

    @classmethod
    def current(cls) -> _Stream:
        return (getattr(cls._entered, "streams", None) or [cls.null])[-1]  # type: ignore[attr-defined]

    def begin_capture(self, *_: Any) -> None:
        DEVICE.flush()
        DEVICE.recorded, _Stream._capturing = [], self.ptr

    def end_capture(self) -> _Graph:
        recorded, DEVICE.recorded, _Stream._capturing = DEVICE.recorded, None, 0
        assert recorded is not None
        return _Graph(recorded)

    def is_capturing(self) -> bool:
        return self.ptr != 0 and self.ptr == self._capturing

    def synchronize(self) -> None:
        DEVICE.flush()

    def wait_event(self, event: _Event) -> None:
        event.waited.append(self.ptr)

    def __enter__(self) -> _Stream:
        vars(self._entered).setdefault("streams", []).append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._entered.streams.pop()


class _Event:
    """It is done once somebody has waited for it."""

    def __init__(self, **_: Any) -> None:
        self.done = False
        self.waited: list[int] = []  # streams, 0 for the host

    def record(self, stream: Any = None) -> None:
        assert not _Stream.current().is_capturing()

    def synchronize(self) -> None:
        self.waited.append(0)
        DEVICE.flush()


def _memset(address: int, value: int, size: int, stream: int) -> None:
    if DEVICE.recorded is None:
        DEVICE.flush()
    DEVICE.copied(DEVICE.memory.bytes[address - BASE :][:size], np.full(size, value, np.uint8))


_Stream.null = _Stream(null=True)  # type: ignore[attr-defined]
_runtime = types.SimpleNamespace(
    getDevice=lambda: 0, getDeviceCount=lambda: 1, getDeviceProperties=lambda number: FACTS,
    streamIsCapturing=lambda stream: stream == _Stream._capturing != 0, deviceSynchronize=DEVICE.flush,
    memsetAsync=_memset, deviceGetPCIBusId=lambda number: "0000:00:00.0",
    CUDARuntimeError=RuntimeError, runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13000,
)  # fmt: skip
cuda = types.SimpleNamespace(
    Device=_Device, Stream=_Stream, Event=_Event, get_current_stream=_Stream.current, runtime=_runtime,
    emulated_cublas=types.SimpleNamespace(
        cublasGemmEx=_gemm_ex, cublasSetStream_v2=lambda *_: 0, cublasSetWorkspace_v2=lambda *_: 0
    ),
    device=types.SimpleNamespace(get_cublas_handle=lambda: 0), MemoryPool=_MemoryPool,
    using_allocator=_using_allocator,
    UnownedMemory=_UnownedMemory, MemoryPointer=lambda memory, offset: _Pointer(memory, memory.ptr + offset),
)  # fmt: skip

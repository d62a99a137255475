"""Loading compiled kernels and launching them on the caller's device and stream.

A launch takes one argument block that is already packed, and goes through cuda.bindings, which has the least host time
(docs/notes/cuda-host.md). Libraries (cuLibraryLoadData, CUDA 12) are loaded once for all devices; the driver loads them
into each context on the first launch there. A library is unloaded after the last plan that uses it is dropped, unless a
CUDA graph has captured a launch of the plan.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, cast
from weakref import WeakValueDictionary, finalize

from ...devices.forking import inner_lock
from . import compiler
from .compiler import Binary
from .device import Device

_DEFAULT_SHARED_MEMORY = 48 * 1024  # bytes that a CTA may use without cuKernelSetAttribute

MAX_TENSOR_MAPS = 11
"""Tensor maps that a kernel takes."""

MAX_GRID = 2**31 - 1
"""CTAs of a one-dimensional grid."""

_thread = threading.local()
_captured: list[Any] = []  # memory and plans that CUDA graphs refer to
_unused: list[tuple[Callable[[Any], Any], Any, set[int]]] = []  # libraries to unload


def check_grid(*tiles: int) -> None:
    """ValueError if there are more tiles than a grid has CTAs."""
    if max(tiles) > MAX_GRID:
        raise ValueError(f"expected at most {MAX_GRID} tiles in a launch, got {max(tiles)}; pass fewer batch entries")


class CudaError(RuntimeError):
    """A function of the CUDA driver failed. The message names it and the error."""


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the CUDA driver; CudaError if it fails."""
    from cuda.bindings import driver

    status, *results = getattr(driver, function)(*arguments)
    if status:
        raise CudaError(f"{function}: {status.name}")
    return results[0] if results else None


class Library:
    """The kernels of one binary, loaded. Its kernels keep it alive."""

    def __init__(self, binary: Binary) -> None:
        from cuda.bindings import driver

        _unload()
        self.binary = binary
        self.handle = call("cuLibraryLoadData", binary.code, [], [], 0, [], [], 0)
        self._ordinals: set[int] = set()  # of the devices that its kernels may run on
        # The finalizer only takes a note: garbage is collected at any time, also during a capture, where unloading is
        # an error.
        finalize(self, _unused.append, (driver.cuLibraryUnload, self.handle, self._ordinals)).atexit = False

    def kernel(self, name: str, device: Device, shared: int = 0) -> Kernel:
        """The kernel of this name, with `shared` bytes of dynamic shared memory a CTA."""
        from cuda.bindings.driver import CUfunction_attribute

        self._ordinals.add(device.ordinal)
        handle = call("cuLibraryGetKernel", self.handle, name.encode())
        if shared > _DEFAULT_SHARED_MEMORY:
            most = CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuKernelSetAttribute", most, shared, handle, device.ordinal)
        return Kernel(handle, name, shared, self)


_shared: WeakValueDictionary[Hashable, Library] = WeakValueDictionary()
_shared_lock = inner_lock()


def shared_library(key: Hashable, source: Callable[[], compiler.Compilable], arch: str) -> Library:
    """The library of this key, made and loaded unless a plan uses it."""
    if (listed := _listed.get()) is not None:
        listed.append((source(), arch))
        return cast(Library, _Unloaded())
    library = _shared.get(key)
    if library is None:
        loaded = Library(compiler.binary(source(), arch))
        with _shared_lock:
            library = _shared.setdefault(key, loaded)  # another thread may have loaded it meanwhile
    return library


_listed: ContextVar[list[tuple[compiler.Compilable, str]] | None] = ContextVar("listed", default=None)


class _Unloaded:
    """What `listing` gives plans in place of a library."""

    def kernel(self, name: str, device: Device, shared: int = 0) -> None:
        pass


@contextmanager
def listing() -> Iterator[list[tuple[compiler.Compilable, str]]]:
    """Sources and architectures of what this thread plans in the block, which is neither compiled nor loaded."""
    found: list[tuple[compiler.Compilable, str]] = []
    before = _listed.set(found)
    try:
        yield found
    finally:
        _listed.reset(before)


def _unload() -> None:
    """Unload the libraries that are no longer used, after their last kernels have run."""
    if not _unused or capturing(stream()):
        return
    unused = [_unused.pop() for _ in range(len(_unused))]
    cupy = _cupy()
    for ordinal in set[int]().union(*(ordinals for _, _, ordinals in unused)):
        with cupy.cuda.Device(ordinal):
            cupy.cuda.runtime.deviceSynchronize()
    for unload, handle, _ in unused:
        unload(handle)


class Kernel:
    """A kernel that takes one argument block by value."""

    def __init__(self, handle: Any, name: str, shared: int, library: Library) -> None:
        from cuda.bindings.driver import CUfunction, cuLaunchKernel, cuLaunchKernelEx

        self.name, self.shared, self.library = name, shared, library
        self._function, self._launch, self._launch_ex = CUfunction(int(handle)), cuLaunchKernel, cuLaunchKernelEx

    def launch(self, ctas: int, threads: int, arguments: KernelArguments, stream: int, pdl: bool = False) -> None:
        """Enqueue the kernel; CudaError if that fails. `arguments` may be changed as soon as this returns.

        pdl: programmatic dependent launch (Hopper). CTAs may start when every CTA of the kernel before has started and
        executed griddepcontrol.launch_dependents. The kernel itself waits for the results that it reads
        (griddepcontrol.wait), and does not end before the kernel before it.
        """
        if pdl:
            config = _pdl_config(ctas, threads, self.shared, stream)
            (status,) = self._launch_ex(config, self._function, arguments.pointers, 0)
        else:
            (status,) = self._launch(
                self._function, ctas, 1, 1, threads, 1, 1, self.shared, stream, arguments.pointers, 0
            )
        if status:
            raise CudaError(f"launching {self.name}, {ctas} CTAs of {threads} threads: {status.name}")


@lru_cache(maxsize=256)
def _pdl_config(ctas: int, threads: int, shared: int, stream: int) -> Any:
    """The configuration of a programmatic dependent launch."""
    from cuda.bindings.driver import CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig

    attribute, config = CUlaunchAttribute(), CUlaunchConfig()
    attribute.id = CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.blockDimX, config.sharedMemBytes, config.hStream = ctas, threads, shared, stream
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


class TensorMap:
    """A CUtensorMap: layout and address of a tensor for TMA."""

    def __init__(self, handle: Any) -> None:
        self._handle, self.pointer = handle, int(handle.getPtr())


class KernelArguments:
    """The argument block of a kernel: 64-bit words, one structure in C++, and the tensor maps that follow it."""

    def __init__(self, words: Sequence[int]) -> None:
        self.words = (ctypes.c_longlong * len(words))(*words)
        self._pointers = (ctypes.c_void_p * (1 + MAX_TENSOR_MAPS))(ctypes.addressof(self.words))
        self.pointers = ctypes.addressof(self._pointers)
        self._maps: Sequence[TensorMap] = ()

    def with_maps(self, maps: Sequence[TensorMap]) -> KernelArguments:
        """The same block with these tensor maps."""
        for i, each in enumerate(maps, 1):
            self._pointers[i] = each.pointer
        self._maps = maps  # keeps them alive
        return self


@cache
def _cupy() -> Any:
    import cupy

    return cupy


def stream() -> int:
    """The handle of the current CuPy stream; makes sure that this thread has a context."""
    cupy = _cupy()
    if not getattr(_thread, "ready", False):
        cupy.cuda.Device().use()  # a new thread has no context before its first call of the runtime
        _thread.ready = True
    return int(cupy.cuda.get_current_stream().ptr)


def capturing(stream: int) -> bool:
    """Whether a CUDA graph captures the stream."""
    return bool(stream and _cupy().cuda.runtime.streamIsCapturing(stream))  # the default stream, 0, cannot be captured


class Uploads:
    """What was copied to the device so far, on one stream: calls on other streams wait for it. any: if anything was."""

    def __init__(self, stream: int, any: bool) -> None:
        self._stream, self._event = stream, None
        if any:
            self._event = _cupy().cuda.Event(disable_timing=True)
            self._event.record()

    def wait(self, stream: int) -> None:
        """Before kernels on this stream, the current one. A graph cannot wait for this: then the host does."""
        event = self._event
        if event is None or stream == self._stream:
            return
        if event.done:
            self._event = None
        elif capturing(stream):
            event.synchronize()
        else:
            _cupy().cuda.get_current_stream().wait_event(event)


def scratch(shape: Any, dtype: Any, zeros: bool = False, empty: Any = None) -> Any:
    """Memory for intermediate results of kernels, uninitialised or zero. See `keep`. empty: f(shape, dtype) makes it;
    by default it is from CuPy's pool.
    """
    memory = _cupy().zeros(shape, dtype) if zeros else (empty or _cupy().ndarray)(shape, dtype)
    keep(stream(), memory)
    return memory


def clear(address: int, size: int, stream: int) -> None:
    """Enqueue zeros."""
    _cupy().cuda.runtime.memsetAsync(address, 0, size, stream)


@cache
def dummy_slot(ordinal: int, size: int) -> Any:
    """Memory of `size` bytes for results that are never read. It is not freed, because CUDA graphs may refer to it."""
    cupy = _cupy()
    with cupy.cuda.Device(ordinal):
        return cupy.ndarray(size, "int8")


def keep(stream: int, *memory: Any) -> None:
    """Keep memory, and the plan of a launch, alive for the life of the process if a CUDA graph captures the stream.

    Without capture, memory may return to the pool as soon as the kernels are enqueued: allocations are ordered by the
    stream. A graph uses the memory at every launch, and its end of life is not known here.
    """
    if capturing(stream):
        _captured.append(memory)

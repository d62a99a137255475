"""Loading compiled kernels and launching them on the caller's device and stream.

A launch takes one block of arguments that was packed before: 3.2 us of host time by cuda.bindings beside an H200, where
CuPy's RawKernel, which looks at its arguments, took 3.5 and ctypes 4.2. Libraries (cuLibraryLoadData, CUDA 12) are
loaded once for all devices and load themselves into each context where a kernel of theirs is launched.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from .compiler import Binary
from .device import Device

_STATIC_SHARED_ALWAYS = 48 * 1024  # what a block may use without asking

MOST_MAPS = 8  # that a kernel takes

MAX_GRID = 2**31 - 1
"""Blocks of a grid of one axis."""

_thread = threading.local()
_recorded: list[Any] = []


def check_grid(*tiles: int) -> None:
    """Raise where there are more tiles than a launch takes blocks, or than kernels count."""
    if max(tiles) > MAX_GRID:
        raise ValueError(f"{max(tiles)} tiles are more than a launch takes, {MAX_GRID}; fewer batch entries fit")


class CudaError(RuntimeError):
    """A call of the driver failed; the message names both."""


def call(function: str, *arguments: Any) -> Any:
    """A function of the driver: its result, or its error as an exception."""
    from cuda.bindings import driver

    status, *results = getattr(driver, function)(*arguments)
    if status:
        raise CudaError(f"{function}: {status.name}")
    return results[0] if results else None


class Library:
    """The kernels of one binary, loaded."""

    def __init__(self, binary: Binary) -> None:
        self.binary = binary
        self.handle = call("cuLibraryLoadData", binary.code, [], [], 0, [], [], 0)

    def kernel(self, name: str, device: Device, shared: int = 0) -> Kernel:
        """The kernel of this name, allowed `shared` dynamic bytes a block on the device."""
        from cuda.bindings.driver import CUfunction_attribute

        handle = call("cuLibraryGetKernel", self.handle, name.encode())
        if shared > _STATIC_SHARED_ALWAYS:
            most = CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuKernelSetAttribute", most, shared, handle, device.ordinal)
        return Kernel(handle, name, shared)


class Kernel:
    """A kernel that takes one block of arguments by value."""

    def __init__(self, handle: Any, name: str, shared: int) -> None:
        from cuda.bindings.driver import CUfunction, cuLaunchKernel

        self.name, self.shared = name, shared
        self._function, self._launch = CUfunction(int(handle)), cuLaunchKernel

    def launch(self, blocks: int, threads: int, arguments: Block, stream: int, early: bool = False) -> None:
        """Enqueue `blocks` blocks of `threads` threads; `arguments` may be changed as soon as this returns. early: the
        blocks may begin when all of the kernel before have begun and allow it; this kernel then waits by itself for
        what it needs, and does not end before that one (griddepcontrol, from Hopper on).
        """
        if early:
            status = self._launch_early(blocks, threads, arguments, stream)
        else:
            (status,) = self._launch(
                self._function, blocks, 1, 1, threads, 1, 1, self.shared, stream, arguments.pointers, 0
            )
        if status:
            raise CudaError(f"launching {self.name}, {blocks} blocks of {threads} threads: {status.name}")

    def _launch_early(self, blocks: int, threads: int, arguments: Block, stream: int) -> Any:
        from cuda.bindings.driver import cuLaunchKernelEx

        config = _early(blocks, threads, self.shared, stream)
        return cuLaunchKernelEx(config, self._function, arguments.pointers, 0)[0]


@lru_cache(maxsize=256)
def _early(blocks: int, threads: int, shared: int, stream: int) -> Any:
    """The configuration of a launch that may begin early."""
    from cuda.bindings.driver import CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig

    attribute, config = CUlaunchAttribute(), CUlaunchConfig()
    attribute.id = CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.blockDimX, config.sharedMemBytes, config.hStream = blocks, threads, shared, stream
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


class TensorMap:
    """What the copy engine is told of a tensor."""

    def __init__(self, handle: Any) -> None:
        self._handle, self.pointer = handle, int(handle.getPtr())


class Block:
    """Arguments of a kernel: 64-bit words, one structure in C++, then tensor maps where it takes any."""

    def __init__(self, words: Sequence[int]) -> None:
        self.words = (ctypes.c_longlong * len(words))(*words)
        self._pointers = (ctypes.c_void_p * (1 + MOST_MAPS))(ctypes.addressof(self.words))
        self.pointers = ctypes.addressof(self._pointers)
        self._maps: Sequence[TensorMap] = ()

    def with_maps(self, maps: Sequence[TensorMap]) -> Block:
        """The same block, for a kernel that takes these beside the words."""
        for i, each in enumerate(maps, 1):
            self._pointers[i] = each.pointer
        self._maps = maps  # alive as long as they may be launched with
        return self


@cache
def _cupy() -> Any:
    import cupy

    return cupy


def stream() -> int:
    """The handle of the caller's current CuPy stream; makes sure that this thread has a context."""
    cupy = _cupy()
    if not getattr(_thread, "ready", False):
        cupy.cuda.Device().use()  # a new thread has no context until a call of the runtime makes one current
        _thread.ready = True
    return int(cupy.cuda.get_current_stream().ptr)


def capturing(stream: int) -> bool:
    """Whether a graph records what is enqueued on the stream."""
    return bool(stream and _cupy().cuda.runtime.streamIsCapturing(stream))  # 0, the default one, cannot be captured


def scratch(shape: Any, dtype: Any, zeros: bool = False) -> Any:
    """Memory for a kernel's intermediate results, from CuPy's pool; as it is, or filled with zeros. See `keep`."""
    cupy = _cupy()
    memory = cupy.zeros(shape, dtype) if zeros else cupy.ndarray(shape, dtype)
    keep(stream(), memory)
    return memory


@cache
def nowhere(ordinal: int, size: int) -> Any:
    """As many bytes on a device, that kernels write and nobody reads; never given back, as graphs may have recorded it.
    """
    cupy = _cupy()
    with cupy.cuda.Device(ordinal):
        return cupy.ndarray(size, "int8")


def keep(stream: int, *memory: Any) -> None:
    """Keep memory alive for good if the stream is being captured.

    Otherwise it may be given back to the pool once all is enqueued, and serves others when what was enqueued is done. A
    graph that recorded a call uses the memory again whenever it is launched, and nobody can tell when that ends.
    """
    if capturing(stream):
        _recorded.append(memory)

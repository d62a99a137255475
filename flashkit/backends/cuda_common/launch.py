"""Loading compiled kernels and launching them on the caller's device and stream.

The driver is called through ctypes: a launch is one C call with arguments that were packed before, which costs less
host time than any wrapper that looks at its arguments (figures: docs/backends.md). Libraries (cuLibraryLoadData, CUDA
12) are loaded once for all devices and load themselves into each context where a kernel of theirs is launched.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from .compiler import Binary
from .device import Device

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_ALWAYS = 48 * 1024  # what a block may use without asking

MAX_GRID = 2**31 - 1
"""Blocks of a grid of one axis."""

_thread = threading.local()


class CudaError(RuntimeError):
    """A call of the driver failed; the message names both."""


@cache
def driver() -> ctypes.PyDLL:
    """The driver's library. Calls keep the interpreter lock: they only enqueue, and taking it again costs more.

    Raises OSError where there is none.
    """
    library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return library


def call(function: str, *arguments: Any) -> None:
    """A function of the driver, its error an exception."""
    status = getattr(driver(), function)(*arguments)
    if status:
        raise CudaError(f"{function}: {_words(status)}")


def _words(status: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    return f"error {status}, {(text.value or b'unknown').decode()}"


class Library:
    """The kernels of one binary, loaded."""

    def __init__(self, binary: Binary) -> None:
        self.binary = binary
        handle = ctypes.c_void_p()
        none = (None, None, 0)
        call("cuLibraryLoadData", ctypes.byref(handle), binary.code, *none, *none)
        self.handle = handle

    def kernel(self, name: str, device: Device, shared: int = 0) -> Kernel:
        """The kernel of this name, allowed `shared` dynamic bytes a block on the device."""
        handle = ctypes.c_void_p()
        call("cuLibraryGetKernel", ctypes.byref(handle), self.handle, name.encode())
        if shared > _STATIC_SHARED_ALWAYS:
            call("cuKernelSetAttribute", _MAX_DYNAMIC_SHARED, shared, handle, device.ordinal)
        return Kernel(handle, name, shared)


class Kernel:
    """A kernel that takes one block of arguments by value."""

    def __init__(self, handle: ctypes.c_void_p, name: str, shared: int) -> None:
        self.name, self.shared = name, shared
        self._handle = handle.value
        self._launch = driver().cuLaunchKernel

    def launch(self, blocks: int, threads: int, arguments: Block, stream: int) -> None:
        """Enqueue `blocks` blocks of `threads` threads; `arguments` may be changed as soon as this returns."""
        status = self._launch(self._handle, blocks, 1, 1, threads, 1, 1, self.shared, stream, arguments.pointers, None)
        if status:
            raise CudaError(f"launching {self.name}, {blocks} blocks of {threads} threads: {_words(status)}")


class Block:
    """Arguments of a kernel: 64-bit words, one structure in C++."""

    def __init__(self, words: Sequence[int]) -> None:
        self.words = (ctypes.c_longlong * len(words))(*words)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.words))


def stream() -> int:
    """The handle of the caller's current CuPy stream; makes sure that this thread has a context."""
    import cupy

    if not getattr(_thread, "ready", False):
        cupy.cuda.Device().use()  # a new thread has no context until a call of the runtime makes one current
        _thread.ready = True
    return int(cupy.cuda.get_current_stream().ptr)

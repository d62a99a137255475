"""The functions of the CUDA driver that flashkit calls. Each returns a status first; 0 is success."""

import ctypes
from collections.abc import Callable
from typing import Any

from cuda.bindings.driver import CUresult

from . import ptx
from .cupy import DEVICE
from .device import BASE, MACHINE, Device, Launch

WIDTHS = {"UINT8": 1, "FLOAT16": 2, "BFLOAT16": 2, "FLOAT32": 4}


class TensorMap:
    """128 bytes: the address, five sizes and four strides of the tensor, five sizes of the box, bytes of an element."""

    def __init__(self, address: int, sizes: list[int], strides: list[int], box: list[int], width: int) -> None:
        def pairs(n: list[int]) -> list[int]:
            return [n[0] | n[1] << 32, n[2] | n[3] << 32, n[4]]

        self._words = (ctypes.c_longlong * 16)(address, *pairs(sizes), *strides, *pairs(box), width)

    def getPtr(self) -> int:
        return ctypes.addressof(self._words)


class Driver:
    def __init__(self, device: Device) -> None:
        self._device, self._handles = device, list[Any]()
        self._shared: dict[int, int] = {}  # bytes of dynamic shared memory that kernels may ask for beyond 48 KiB

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By their names in cuda.bindings.driver."""
        return {
            "cuInit": lambda _: (0,), "cuLibraryLoadData": self._load, "cuLibraryGetKernel": self._kernel,
            "cuLibraryUnload": self._unload,
            "cuKernelSetAttribute": self._allow, "cuLaunchKernel": self._launch,
            "cuLaunchKernelEx": self._launch_early, "cuTensorMapEncodeTiled": self._encode, "CUfunction": int,
        }  # fmt: skip

    def _handle(self, x: Any) -> tuple[int, int]:
        self._handles.append(x)
        return 0, len(self._handles) - 1

    def entries(self, text: str) -> dict[str, ptx.Entry]:
        """The kernels of a module, whose constants are in memory now."""
        module = ptx.module(text, MACHINE.number, self._device.allocate)
        start = module.place - BASE
        self._device.memory.bytes[start : start + len(module.image)] = list(module.image)
        return module.entries

    def _load(self, code: bytes, *_: Any) -> tuple[int, int]:
        entries: dict[str, ptx.Entry] = {}
        for text in code.decode().split("\f"):
            entries |= self.entries(text)
        return self._handle(entries)

    def _kernel(self, library: int, name: bytes) -> tuple[int, int]:
        return self._handle((library, self._handles[library][name.decode()]))

    def _unload(self, library: int) -> tuple[int]:
        assert self._handles[library] is not None, "unloaded twice"
        self._handles[library] = None
        return (0,)

    def _allow(self, _: Any, shared: int, function: int, device: int) -> tuple[int]:
        self._shared[function] = shared
        return (0,)

    def _launch(
        self, function: int, x: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int, stream: int,
        pointers: int, extra: int, early: bool = False,
    ) -> tuple[Any]:  # fmt: skip
        assert y == z == ty == tz == 1
        library, entry = self._handles[function]
        assert self._handles[library] is not None, "a kernel of a library that was unloaded"
        if shared > max(49152 - entry.shared, self._shared.get(function, 0)):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        addresses = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        words = bytearray(sum(entry.parameters[-1]) if entry.parameters else 0)
        for i, (start, size) in enumerate(entry.parameters):
            words[start : start + size] = ctypes.string_at(addresses[i], size)
        self._device.enqueue(Launch(entry, x, threads, shared, bytes(words), early))
        return (0,)

    def _launch_early(self, config: Any, function: int, pointers: int, extra: int) -> tuple[int]:
        sizes = config.gridDimX, 1, 1, config.blockDimX, 1, 1, config.sharedMemBytes
        return self._launch(function, *sizes, 0, pointers, extra, early=True)

    def _encode(
        self, kind: Any, rank: int, address: int, sizes: Any, strides: Any, box: Any, *_: Any
    ) -> tuple[int, TensorMap]:
        n, apart, moved = ([int(x) for x in each] for each in (sizes, strides, box))
        width = WIDTHS[kind.name.rpartition("_")[2]]
        assert rank == 5 and address % 16 == 0 and all(x % 16 == 0 and x > 0 for x in apart) and moved[0] * width <= 128
        return 0, TensorMap(address, n, apart, moved, width)


DRIVER = Driver(DEVICE)

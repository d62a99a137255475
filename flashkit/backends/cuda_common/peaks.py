"""Measured peaks of a CUDA device: bandwidth of its memories, by peaks.cu, and FLOP/s, by cuBLAS.

Each function returns a call to be timed and the bytes or FLOPs of that call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import compiler, launch
from .device import Device

_VECTOR_BYTES = 16
_UNROLL = 8  # as in peaks.cu
PRODUCT = 8192
"""Rows, columns and depth of the matrix product whose rate counts as the peak FLOP/s."""


class Readers:
    """The kernels of peaks.cu on a device, as calls to be timed."""

    def __init__(self, device: Device) -> None:
        source = compiler.Source("peaks", Path(__file__).with_name("peaks.cu").read_text())
        library = launch.Library(compiler.binary(source, compiler.target(device.capability)))
        self.device = device
        self._global, self._shared = (library.kernel(name, device) for name in ("read_global", "read_shared"))

    def memory(self, size: int, repeats: int = 1) -> tuple[Callable[[], None], float]:
        """A call that reads `size` bytes of device memory `repeats` times, from L2 if they fit there, and its bytes."""
        import cupy

        array, checksum = cupy.zeros(size // 4, cupy.uint32), cupy.zeros(1, cupy.uint32)
        vectors, blocks = size // _VECTOR_BYTES, 4 * self.device.sms
        arguments = launch.KernelArguments([array.data.ptr, vectors, repeats, checksum.data.ptr])

        def read() -> None:
            self._global.launch(blocks, 512, arguments, launch.stream())
            assert array is not None and checksum is not None  # the closure keeps them alive

        return read, float(vectors * _VECTOR_BYTES * repeats)

    def shared(self, repeats: int = 20_000) -> tuple[Callable[[], None], float]:
        """A call in which every SM reads its shared memory, and its bytes."""
        import cupy

        checksum, threads, blocks = cupy.zeros(1, cupy.uint32), 1024, 2 * self.device.sms
        arguments = launch.KernelArguments([0, 0, repeats, checksum.data.ptr])

        def read() -> None:
            self._shared.launch(blocks, threads, arguments, launch.stream())
            assert checksum is not None  # the closure keeps it alive

        return read, float(blocks * threads * repeats * _UNROLL * _VECTOR_BYTES)


def product(dtype: Any, size: int = PRODUCT) -> tuple[Callable[[], None], float]:
    """A matrix product by cuBLAS, and its FLOPs: of random numbers, as constant ones draw less power."""
    import cupy

    rng = cupy.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=cupy.float32).astype(dtype) for _ in range(2))
    out = cupy.empty((size, size), dtype)
    return (lambda: cupy.matmul(a, b, out=out)), 2.0 * size**3

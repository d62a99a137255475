"""How fast a CUDA device reads its memories, and multiplies: what a roofline is drawn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import compiler, launch
from .device import Device

_WORD = 16
_UNROLL = 8  # rates.cu
PRODUCT = 8192
"""Rows, columns and depth of the matrix product that gives a peak rate."""


class Readers:
    """The loops of rates.cu on a device, as calls that are timed."""

    def __init__(self, device: Device) -> None:
        source = compiler.Source("rates", Path(__file__).with_name("rates.cu").read_text())
        library = launch.Library(compiler.binary(source, compiler.target(device.capability)))
        self.device = device
        self._global, self._shared = (library.kernel(name, device) for name in ("read_global", "read_shared"))

    def memory(self, size: int, repeats: int = 1) -> tuple[Callable[[], None], float]:
        """Reads `size` bytes of device memory, or of L2 where they fit there, `repeats` times; and how many in all."""
        import cupy

        array, found = cupy.zeros(size // 4, cupy.uint32), cupy.zeros(1, cupy.uint32)
        words, blocks = size // _WORD, 4 * self.device.sms
        block = launch.KernelArguments([array.data.ptr, words, repeats, found.data.ptr])

        def read() -> None:
            self._global.launch(blocks, 512, block, launch.stream())
            assert array is not None and found is not None  # alive as long as this

        return read, float(words * _WORD * repeats)

    def shared(self, repeats: int = 20_000) -> tuple[Callable[[], None], float]:
        """Every multiprocessor reads its shared memory; and how many bytes."""
        import cupy

        found, threads, blocks = cupy.zeros(1, cupy.uint32), 1024, 2 * self.device.sms
        block = launch.KernelArguments([0, 0, repeats, found.data.ptr])

        def read() -> None:
            self._shared.launch(blocks, threads, block, launch.stream())
            assert found is not None

        return read, float(blocks * threads * repeats * _UNROLL * _WORD)


def product(dtype: Any, size: int = PRODUCT) -> tuple[Callable[[], None], float]:
    """A matrix product by cuBLAS of random numbers (constant ones draw less power and are faster); and its FLOPs."""
    import cupy

    rng = cupy.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=cupy.float32).astype(dtype) for _ in range(2))
    out = cupy.empty((size, size), dtype)
    return (lambda: cupy.matmul(a, b, out=out)), 2.0 * size**3

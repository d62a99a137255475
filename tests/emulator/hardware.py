"""A real device in the place of the emulated one, for tests that both can run."""

import dataclasses
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from flashkit import dispatch
from flashkit.backends.cuda_common import device as devices
from flashkit.backends.cuda_common import launch


@cache
def exists() -> bool:
    """Whether CuPy finds a device."""
    if not find_spec("cupy"):
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def fresh_memory_is_nan() -> AbstractContextManager[Any]:
    """Within the block, memory that is allocated holds NaN, as on the emulated device. All its bits are set."""
    import cupy

    def allocate(size: int) -> Any:
        memory = cupy.get_default_memory_pool().malloc(size)
        if size and not launch.capturing(launch.stream()):
            memory.memset_async(0xFF, size)  # on the current stream
        return memory

    return cupy.cuda.using_allocator(allocate)


def at_the_end_of_memory(x: Any) -> Any:
    """A copy of an array on the device, behind whose last byte is none that a kernel may read."""
    import cupy
    from cuda.bindings import driver

    where, how = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    where.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    where.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    where.location.id = x.data.device_id
    how.location, how.flags = where.location, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    page = launch.call("cuMemGetAllocationGranularity", where, least)
    size = -(-x.nbytes // page) * page
    reserved = launch.call("cuMemAddressReserve", size + page, 0, 0, 0)  # the last page stays without memory
    launch.call("cuMemMap", reserved, size, 0, launch.call("cuMemCreate", size, where, 0), 0)
    launch.call("cuMemSetAccess", reserved, size, [how], 1)
    memory = cupy.cuda.UnownedMemory(int(reserved) + size - x.nbytes, x.nbytes, None, x.data.device_id)
    copy = cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0))
    copy[...] = x
    return copy


class Hardware:
    """The current device, as far as tests use the emulated one: host code counts `sms` multiprocessors.

    The order of events is the hardware's own, so seeds change nothing. A test that asks for more is skipped.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sms, self.launched, self.missed = 3, list[str](), ""
        facts, enqueue = devices.of, launch.Kernel.launch

        def of(ordinal: int) -> devices.Device:
            return dataclasses.replace(facts(ordinal), sms=self.sms)

        def recorded(kernel: launch.Kernel, *arguments: Any, **options: Any) -> None:
            self.launched.append(kernel.name)
            enqueue(kernel, *arguments, **options)

        monkeypatch.setattr(devices, "of", of)
        monkeypatch.setattr(launch.Kernel, "launch", recorded)
        dispatch.forget()

    def seed(self, seed: int) -> None:
        """Nothing."""

    def flush(self) -> None:
        import cupy

        cupy.cuda.runtime.deviceSynchronize()

    def __getattr__(self, name: str) -> Any:
        self.missed = name
        pytest.skip(f"a device has no {name}: the emulated one has")

"""Facts of a CUDA device that the choice and compilation of kernels depend on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Device:
    """A CUDA device; sizes in bytes. `ordinal` is its CUDA device number."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared_per_block: int  # the most that a CTA may use
    shared_per_sm: int
    registers_per_sm: int = 65536
    ordinal: int = 0

    @property
    def supports_pdl(self) -> bool:
        """Whether it has programmatic dependent launch, see launch.Kernel."""
        return self.capability >= (9, 0)


def current() -> Device:
    """The current device of this thread. Raises what CuPy raises without a device."""
    import cupy

    return of(cupy.cuda.runtime.getDevice())


@cache
def of(ordinal: int) -> Device:
    """The device with this number."""
    import cupy

    device = cupy.cuda.Device(ordinal)
    facts: Any = device.attributes
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    return Device(
        properties["name"].decode(),
        (properties["major"], properties["minor"]),
        facts["MultiProcessorCount"],
        max(facts.get("MaxSharedMemoryPerBlockOptin", 0), facts["MaxSharedMemoryPerBlock"]),
        facts["MaxSharedMemoryPerMultiprocessor"],
        facts["MaxRegistersPerMultiprocessor"],
        ordinal,
    )

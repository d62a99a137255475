"""Facts of a CUDA device, as far as kernels are chosen and compiled by them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Device:
    """What a kernel is compiled for and sized by; sizes in bytes. `ordinal` is CUDA's number of it."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared_per_block: int  # the most that a block may ask for
    shared_per_sm: int
    registers_per_sm: int = 65536
    ordinal: int = 0

    @property
    def launches_early(self) -> bool:
        """Whether a kernel may be launched while the one before still runs, see launch.Kernel."""
        return self.capability >= (9, 0)


MODELS = {
    "sm_80": Device("Ampere (A100)", (8, 0), 108, 166912, 167936),
    "sm_90a": Device("Hopper (H100, H200)", (9, 0), 132, 232448, 233472),
}
"""Devices to compile for where there is none, by the architecture's name."""


def current() -> Device:
    """The device that is current in this thread. Raises what CuPy raises where there is none."""
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

"""A real device in the place of the emulated one, for tests that both can run."""

from __future__ import annotations

import dataclasses
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


class Hardware:
    """The current device, as far as tests use the emulated one: host code counts `sms` multiprocessors.

    The order of events is the hardware's own, so seeds change nothing. A test that asks for more is skipped.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sms, self.launched = 3, list[str]()
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
        pytest.skip(f"a device has no {name}: the emulated one has")

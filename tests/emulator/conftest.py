"""The emulated device as a fixture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .device import Device

WHOLE_PROCESS = "FLASHKIT_TEST_EMULATED"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The emulated device, which is the process's CUDA device during the test."""
    if not find_spec("cuda"):
        pytest.skip("cuda-bindings is not installed")
    if WHOLE_PROCESS not in os.environ and find_spec("cupy"):
        pytest.skip(f"CuPy is installed: {WHOLE_PROCESS}=3 replaces it in the whole process")
    from flashkit.backends.cuda_common import verify

    from . import cupy, emulated

    # The tests compare with the definition themselves; the check of fresh binaries would be launches of its own.
    monkeypatch.setattr(verify, "check", lambda *_: None)
    if WHOLE_PROCESS in os.environ:
        yield cupy.DEVICE
        return
    with emulated(sms=3) as made:
        yield made


@pytest.fixture
def launched(device: Device) -> list[str]:
    """Names of the kernels that the test has launched so far, in order."""
    device.launched.clear()
    return device.launched

"""The emulated device as a fixture; on a machine with a real one that, for the tests of some files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flashkit import dispatch

from . import hardware

if TYPE_CHECKING:
    from .device import Device

WHOLE_PROCESS = "FLASHKIT_TEST_EMULATED"
ON_HARDWARE = (
    "test_kernels.py", "test_fp8.py", "test_mla.py", "test_tf32.py", "test_host.py", "test_kv_cache.py", "test_gpt.py",
    "test_ladder.py", "test_forward_mode.py",
)  # fmt: skip


def on_hardware(item: pytest.Item) -> bool:
    """Whether the test runs on a real device here."""
    here = item.path.parent == Path(__file__).parent and item.path.name in ON_HARDWARE
    return here and "device" in getattr(item, "fixturenames", ()) and WHOLE_PROCESS not in os.environ


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One test on the emulated device comes before all others, so that no worker waits for the interpreter that another
    compiles. Of the slow cases of a test, which mostly compile kernels, a twelfth runs here, and all on a real device.
    """
    for item in items:
        if on_hardware(item) and hardware.exists():
            item.add_marker(pytest.mark.gpu)
        elif item.path.parent == Path(__file__).parent and not item.get_closest_marker("one_in"):
            item.add_marker(pytest.mark.one_in(1, slow=12))
    if "PYTEST_XDIST_WORKER" in os.environ:
        fast = (i for i, item in enumerate(items) if on_hardware(item) and not item.get_closest_marker("slow"))
        if (first := next(fast, None)) is not None:
            items.insert(0, items.pop(first))


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device | hardware.Hardware]:
    """The emulated device, which is the process's CUDA device during the test."""
    if not find_spec("cuda"):
        pytest.skip("cuda-bindings is not installed")
    from flashkit.backends.cuda_common import verify
    from flashkit.backends.cupy_raw import sm90_backward

    # The tests have few keys, and say themselves where dQ is to be added in order.
    monkeypatch.setattr(sm90_backward, "ORDERED_MAX_KEYS", 0)
    if on_hardware(request.node) and hardware.exists():
        monkeypatch.setattr(verify, "check", lambda *_: None)
        with hardware.fresh_memory_is_nan():
            yield hardware.Hardware(monkeypatch)
        dispatch.forget()
        return
    if WHOLE_PROCESS not in os.environ and find_spec("cupy"):
        pytest.skip(f"CuPy is installed: {WHOLE_PROCESS}=3 replaces it in the whole process")

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

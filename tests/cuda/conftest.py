"""Where there is a device, -m gpu runs the tests of host code, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from emulator import hardware

WHOLE_PROCESS = "FLASHKIT_TEST_EMULATED"
HOST = "test_cuda_bound.py", "test_cuda_kernels.py", "test_generations.py"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if WHOLE_PROCESS in os.environ or not hardware.exists():
        return
    for item in items:
        own = item.path.parent == Path(__file__).parent and item.path.name in HOST
        if own and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.gpu)

"""Ranks on CUDA devices: NCCL where each rank has a device of its own, else MPI through host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_ranks import MPIEXEC, ranks

pytest.importorskip("mpi4py")
cupy = pytest.importorskip("cupy")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_that_share_devices(n: int) -> None:
    status, lines, err = ranks(n, "devices", timeout=500)
    assert status == 0, err[-4000:]
    assert lines[-1]["calls"] > 20


def test_a_process_group_on_devices(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    n = min(cupy.cuda.runtime.getDeviceCount(), 2)
    status, lines, err = ranks(n, "process_group", str(tmp_path / "store"), "nccl", timeout=500)
    assert status == 0, err[-4000:]
    assert lines == [{"methods": 3}]

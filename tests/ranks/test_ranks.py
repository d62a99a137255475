"""Ranks on the CPU, as processes of mpiexec."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mpi4py", reason="needs mpi4py and an MPI: pip install '.[distributed]'")

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")


def ranks(n: int, *arguments: str, timeout: float = 240, **more: str) -> tuple[int, list[Any], str]:
    """Status, JSON lines of rank 0 and errors of so many ranks of the worker. Each has one thread."""
    command = [str(MPIEXEC), "-n", str(n), sys.executable, "-m", "tests.ranks.worker", *arguments]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "FLASHKIT_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


@pytest.mark.slow
@pytest.mark.parametrize(("n", "first", "step"), [(2, 0, 2), (3, 1, 4), (4, 3, 4)])
def test_ranks_give_the_results_of_one_process(n: int, first: int, step: int) -> None:
    """Each case on two, three or four ranks, some on all."""
    status, lines, err = ranks(n, "conformance", str(first), str(step))
    assert status == 0, err[-4000:]
    assert lines[-1]["cases"] > 20


@pytest.mark.slow
def test_errors_do_not_grow_with_the_ranks() -> None:
    status, lines, err = ranks(4, "precision")
    assert status == 0, err[-4000:]
    assert lines == [{"dtypes": 3}]


@pytest.mark.slow
def test_the_same_bits_again() -> None:
    status, lines, err = ranks(3, "again")
    assert status == 0, err[-4000:]
    assert lines == [{"again": True}]


@pytest.mark.slow
def test_a_fault_of_one_rank_is_an_error_on_all() -> None:
    status, lines, err = ranks(3, "faults", timeout=90)
    assert status == 0, err[-4000:]
    assert lines == [{"faults": "told"}]


@pytest.mark.slow
def test_no_rank_waits_for_one_that_ended() -> None:
    started = time.monotonic()
    status, _, _ = ranks(2, "death", timeout=60)
    assert status != 0
    assert time.monotonic() - started < 50


@pytest.mark.slow
def test_tensors_of_a_process_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    status, lines, err = ranks(2, "process_group", str(tmp_path / "store"))
    assert status == 0, err[-4000:]
    assert lines == [{"methods": 3}]


@pytest.mark.slow
def test_arrays_of_a_device_through_the_host() -> None:
    pytest.importorskip("cuda.bindings")
    status, lines, err = ranks(2, "emulated")
    assert status == 0, err[-4000:]
    assert lines == [{"transport": "Staged"}]


@pytest.mark.slow
def test_autotune_measures_what_predictions_read(tmp_path: Path) -> None:
    status, lines, err = ranks(2, "interconnect", XDG_DATA_HOME=str(tmp_path))
    assert status == 0, err[-4000:]
    assert lines == [{"measured": True}]
    assert list(tmp_path.rglob("*.yaml"))

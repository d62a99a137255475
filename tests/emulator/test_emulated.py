"""CUDA kernels on an emulated device (emulator/), which needs none: tests of test_cuda_devices.py and random calls, and
that what a kernel does wrong is found.

An emulated device takes a process: the first test starts one, in which the others run. To run any test so:
FLASHKIT_TEST_EMULATED=3 pytest -m gpu ..., with as many multiprocessors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import cases
import numpy as np
import pytest

import flashkit
from flashkit import dispatch
from flashkit.backends.cuda_common import backend, compiler, verify
from flashkit.backends.cupy_raw import specialise

TESTS = Path(__file__).parents[1]
WITHIN = "FLASHKIT_TEST_EMULATED" in os.environ
ROWS = "sm90-5", "sm90-31"
BOUNDS = (
    *(f"test_lengths_on_the_device_are_bounded[cupy_raw-{each}]" for each in ("sm90-70-float32", "sm80-1-float16")),
    "test_positions_on_the_device_stay_within_tables[cupy_raw]",
)

within = pytest.mark.skipif(not WITHIN, reason="runs where the device is emulated")
pytestmark = pytest.mark.skipif(not find_spec("cuda"), reason="cuda-bindings is not installed")


@pytest.mark.skipif(WITHIN, reason="starts the others")
@pytest.mark.slow
def test_kernels_on_an_emulated_device() -> None:
    nodes = [f"{TESTS}/cuda/test_cuda_devices.py::test_pairs_of_features[cupy_raw-{row}]" for row in ROWS]
    nodes += [f"{TESTS}/cuda/test_cuda_devices.py::{name}" for name in BOUNDS]
    nodes += [f"{TESTS}/conformance/test_soak.py", __file__]
    options = ["-q", "-m", "gpu or not gpu", "-n", "0", "-p", "no:cacheprovider"]
    settings = {"FLASHKIT_TEST_EMULATED": "3", "FLASHKIT_SOAK": "2", "FLASHKIT_SOAK_SEED": "1"}
    settings |= {"NUMBA_OPT": "1", "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_SLP_VECTORIZE": "0"}  # compiled sooner
    command = [sys.executable, "-m", "pytest", *options, *nodes]
    done = subprocess.run(command, env={**os.environ, **settings}, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    assert f"{len(ROWS) + len(BOUNDS) + 1 + len(FAULTS) + 1} passed" in done.stdout, done.stdout[-2000:]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hopper's kernels, whatever is kept of plans."""
    monkeypatch.setenv(backend.VARIABLE, "sm90")
    monkeypatch.setattr(verify, "check", lambda *_: None)
    dispatch.forget()
    yield
    dispatch.forget()


FAULTS = {
    "values are not awaited": ("sm90/forward.cu", "values.consumer_wait(n);"),
    "values are not released": ("sm90/forward.cu", "values.consumer_release(n);"),
    "dO is not awaited": ("sm90/bwd_mainloop.cuh", "douts.consumer_wait(n);"),
    "dP is not awaited": ("sm90/bwd_mainloop.cuh", "wgmma_wait<1>();  // dP"),
    "queries are not released": ("sm90/bwd_mainloop.cuh", "queries.consumer_release(n, lane), "),
    "sums are rounded before they are complete": ("sm90/backward.cu", "else await_sums(p, b, h, tile);"),
}


def differs() -> bool:
    """Whether results of some orders of events are wrong, or nothing comes of them."""
    import cupy

    from emulator import device

    rng = np.random.default_rng(0)
    dtype = cases.numpy_dtype("bfloat16")
    q, k, v, dout = (rng.standard_normal((1, 2, 600, 64)).astype(dtype) for _ in range(4))
    right = flashkit.attention_vjp(*(x.astype(float) for x in (q, k, v)), backend="reference")[1](dout.astype(float))
    given = [cupy.asarray(x) for x in (q, k, v, dout)]
    for seed in range(4):
        cupy.DEVICE.seed(seed)
        try:
            _, vjp = flashkit.attention_vjp(*given[:3], backend="cupy_raw")
            found = [x.get().astype(float) for x in vjp(given[3])]
        except device.EmulationError:
            return True
        if not all(np.abs(x - y).max() < 0.02 for x, y in zip(found, right)):
            return True
    return False


@within
def test_hoppers_kernels_are_right_in_any_order_of_events(hopper: None) -> None:
    assert not differs()


@within
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from emulator import device

    monkeypatch.setattr(device, "PATIENCE", 3)
    file, missing = FAULTS[fault]
    texts = dict(compiler.headers(specialise.FOLDER))
    assert missing in texts[file]
    texts[file] = texts[file].replace(missing, ";" if missing.endswith(";") else "", 1)
    monkeypatch.setattr(specialise.compiler, "headers", lambda folder: tuple(texts.items()))
    specialise.library.cache_clear()
    try:
        assert differs()
    finally:
        specialise.library.cache_clear()

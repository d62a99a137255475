"""What flashkit's threads do to the rest of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit.backends.cpu import passes, scratch_pool, threads

NESTED = """
import ctypes, numpy as np, flashkit
q = np.ones((1, 8, 512, 64), np.float32)
flashkit.attention(q, q, q)
from flashkit.backends.cpu import threads
if threads.layer() != "omp":
    raise SystemExit("skip: the threading layer is " + str(threads.layer()))
from numba.np.ufunc import omppool
print(ctypes.CDLL(omppool.__file__).omp_get_max_active_levels())
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two threads")
@pytest.mark.parametrize(("environment", "more"), [({}, False), ({"OMP_MAX_ACTIVE_LEVELS": "3"}, True)])
def test_nested_parallel_regions_stay_as_the_user_has_them(environment: dict[str, str], more: bool) -> None:
    """Numba allows them for the whole process, which makes PyTorch beside it many times slower."""
    variables = {name: x for name, x in os.environ.items() if not name.startswith("OMP_")} | environment
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, env=variables)
    if "skip:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 1) is more


def test_small_calls_wake_no_thread(program: Callable[..., str]) -> None:
    """Threads would save 0.03 ms of 8 heads of 64 x 64, and on a busy machine the call waits longer for them."""
    text = """
        import numpy as np, flashkit
        from flashkit.backends.cpu import threads
        asked, count = [], threads.count
        threads.count = lambda: asked.append(1) or count()
        for n in (64, 512):
            q = np.zeros((1, 8, n, 64), np.float32)
            planned = flashkit.plan(q, q, q, backend="cpu")
            planned(q, q, q)
            print(n, bool(asked))
    """
    assert program(text, FLASHKIT_NUM_THREADS=2) == "64 False\n512 True\n"


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_calls_on_few_threads_leave_the_others_to_later_calls(layer: str, program: Callable[..., str]) -> None:
    """Numba's loop leaves its number of threads to the calling thread: it must not be that of the last small call."""
    text = """
        import os
        import numpy as np, flashkit
        q = np.ones((1, 2, 300, 64), np.float32)
        out, vjp = flashkit.attention_vjp(q, q, q, backend="cpu")
        vjp(out)  # six work tiles
        os.environ["FLASHKIT_NUM_THREADS"] = "3"
        flashkit.attention(q, q, q, backend="cpu")
        del os.environ["FLASHKIT_NUM_THREADS"]
        from flashkit.backends.cpu import threads
        import numba
        print(threads.layer(), threads.count(), numba.get_num_threads())
    """
    found = program(text, NUMBA_NUM_THREADS=16, NUMBA_THREADING_LAYER=layer)
    assert found == f"{layer} 16 16\n"


def test_a_setting_allows_no_more_threads_than_numba_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a child of a fork has one: the pool's threads are the parent's."""
    monkeypatch.setattr(threads, "pool", lambda: SimpleNamespace(limit=lambda: 2))
    for setting, count in (("1", 1), ("5", 2)):
        monkeypatch.setenv("FLASHKIT_NUM_THREADS", setting)
        assert threads.count() == count
    monkeypatch.setattr(threads, "_forked", True)
    assert threads.count() == 1


@pytest.mark.parametrize(
    ("heads", "dtype", "most", "splits"),
    [(2, "float32", None, 3), (4, "float32", None, 2), (8, "float32", None, 0), (8, "bfloat16", None, 1),
     (2, "float32", 1, 0), (1, "float32", 1, 2)],
)  # fmt: skip
def test_backward_passes_have_work_tiles_to_balance_threads_by(
    heads: int, dtype: str, most: int | None, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three for each of two threads, in dq_accum of so many splits (0: dQ is summed in place), which may take `most`
    bytes beyond what the threads need.
    """
    monkeypatch.setattr(threads, "count", lambda: 2)
    if most is not None:
        monkeypatch.setattr(passes, "DQ_BYTES_A_THREAD", most)
    borrowed, taken = scratch_pool.borrowed, []

    def recorded(size: int) -> Any:
        taken.append(size)
        return borrowed(size)

    monkeypatch.setattr(scratch_pool, "borrowed", recorded)
    rng, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v, dout = (rng.standard_normal((1, heads, 900, 16), np.float32).astype(kind) for _ in range(4))
    found = flashkit.attention_vjp(q, k, v, backend="cpu", causal=True)[1](dout)
    exact = flashkit.attention_vjp(q, k, v, backend="reference", causal=True)[1](dout)
    assert taken == [splits * heads * 900 * 16 * 4] * (splits > 0)
    for x, y in zip(found, exact):
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), **close)


def test_large_scratch_memory_is_not_kept() -> None:
    scratch_pool._free.clear()
    for size, kept in ((scratch_pool.MAX_BYTES, 1), (scratch_pool.MAX_BYTES + 1, 0)):
        with scratch_pool.borrowed(size) as memory:
            assert memory.nbytes == size and memory.ctypes.data % 64 == 0
        assert len(scratch_pool._free) == kept
        scratch_pool._free.clear()

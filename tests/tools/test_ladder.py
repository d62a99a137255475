"""examples/ladder: each step is attention, and moves what the text says."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.ladder import memory

STEPS = [f"step{i}" for i in ("1_standard", "2_one_pass", "3_tiles", "4_flash1", "5_flash2", "8_numba")]


def step(name: str):
    return importlib.import_module(f"examples.ladder.{name}")


def problem(n: int = 300) -> list[np.ndarray]:
    return list(np.random.default_rng(3).standard_normal((3, n, memory.D)).astype(np.float32))


def exact(q, k, v, causal=False):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ k.T / q.shape[1] ** 0.5
    if causal:
        s[np.triu_indices(len(q), 1)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_attention(name):
    arrays = problem()
    np.testing.assert_allclose(step(name).attention(*arrays, memory.SlowMemory()), exact(*arrays), atol=2e-6)


def test_block_sparse_is_causal_attention():
    arrays = problem()
    found = step("step7_block_sparse").attention(*arrays, memory.SlowMemory())
    np.testing.assert_allclose(found, exact(*arrays, causal=True), atol=2e-6)


def test_the_backward_pass_is_the_derivative():
    q, k, v, dout = [x.astype(np.float64) for x in (*problem(140), problem(140)[0])]
    found = step("step6_backward").backward(q, k, v, dout, memory.SlowMemory())
    rng, size = np.random.default_rng(0), 1e-6
    for i, gradient in enumerate(found):
        direction = rng.standard_normal(q.shape)
        moved = [[x + sign * size * direction * (i == at) for at, x in enumerate((q, k, v))] for sign in (1, -1)]
        slope = ((exact(*moved[0]) - exact(*moved[1])) * dout).sum() / (2 * size)
        assert abs(slope - (gradient * direction).sum()) < 1e-6 * max(1, abs(slope))


def moved(name: str, *more) -> int:
    counted = memory.SlowMemory()
    step(name).attention(*memory.problem(), counted, *more)
    return counted.moved


def test_bytes_fall_step_by_step_and_with_fast_memory():
    one_pass, tiles, first, second, sparse = (
        moved(name) for name in ("step2_one_pass", "step3_tiles", "step4_flash1", "step5_flash2", "step7_block_sparse")
    )
    assert one_pass > 30 * tiles > 60 * first and first > 1.5 * second > 2.4 * sparse
    assert 1.7 < moved("step4_flash1", memory.FAST // 2) / first < 2  # half the memory, twice the traffic


def test_one_query_a_thread_is_attention(tmp_path):
    """In Numba's simulator of a GPU, which a process uses from its beginning."""
    arrays = problem(70)
    np.save(tmp_path / "arrays.npy", arrays)
    code = """
import sys, numpy as np
from examples.ladder import memory, step9_simt
np.save(sys.argv[2], step9_simt.attention(*np.load(sys.argv[1]), memory.SlowMemory()))
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(root)}
    files = [str(tmp_path / name) for name in ("arrays.npy", "out.npy")]
    subprocess.run([sys.executable, "-c", code, *files], env=environment, check=True, timeout=300)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), exact(*arrays), atol=2e-6)


def test_all_steps_print_a_line(capsys, monkeypatch):
    monkeypatch.setattr(memory, "N", 128)
    step("__main__").main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert [line.split()[0] for line in lines] == [str(i) for i in range(1, 11)]
    assert all(float(line.split("by ")[1]) < 1e-5 for line in lines if "differs" in line)

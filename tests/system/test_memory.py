"""Memory linear in the number of tokens: how much a long sequence takes at its peak, results included."""

import json
from collections.abc import Callable

import pytest

MEASURE = """
    import json, os, sys, threading, time
    import numpy as np, psutil
    import flashkit

    N, D, options, backward = {n}, 64, {options}, {backward}
    process = psutil.Process()

    def call(n):
        out, vjp = flashkit.attention_vjp(*(x[:, :, :n] for x in (q, k, v)), backend="cpu", **options)
        return (out, *vjp(dout[:, :, :n])) if backward else out

    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 1, N, D), np.float32) for _ in range(4))
    call(256)  # compiled and loaded before anything is measured
    base = peak = process.memory_info().rss
    done = threading.Event()

    def watch():
        global peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    results = call(N)
    seconds = time.perf_counter() - start
    peak = max(peak, process.memory_info().rss)
    done.set()
    watcher.join()
    print(json.dumps({{"mib": (peak - base) / 2**20, "seconds": seconds}}))
"""

pytestmark = pytest.mark.slow


def grown(program: Callable[..., str], n: int, options: str, backward: bool, **settings: object) -> float:
    """MiB that resident memory grows by at the peak of a call."""
    return float(json.loads(program(MEASURE.format(n=n, options=options, backward=backward), **settings))["mib"])


@pytest.mark.parametrize(
    "options", ['{"causal": True, "window": (512, 0)}', '{"causal": True, "kv_lengths": [200], "q_offset": 0}']
)
def test_forward_of_65536_tokens(program: Callable[..., str], options: str) -> None:
    assert grown(program, 65_536, options, backward=False) < 64


def test_forward_of_all_pairs_of_32768_tokens(program: Callable[..., str]) -> None:
    """Whose scores would take 4 GiB. On one thread, for it takes its time, and others are at work."""
    assert grown(program, 32_768, "{}", backward=False, FLASHKIT_NUM_THREADS=1) < 64


@pytest.mark.parametrize(
    "options", ['{"causal": True, "window": (512, 0)}', '{"causal": True, "window": (512, 0), "dropout_p": 0.1}']
)
@pytest.mark.one_in(2)
def test_backward_of_65536_tokens(program: Callable[..., str], options: str) -> None:
    """dQ, dK and dV are 48 MiB of it, and each thread that works on the head has sums of dQ of its own."""
    assert grown(program, 65_536, options, backward=True, FLASHKIT_NUM_THREADS=2) < 128

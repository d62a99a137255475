"""Calls from several Python threads at once, after a fork, and on a chosen number of threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from flashkit import attention_vjp, mods

THREADS = 6

VARIANTS: list[tuple[tuple[int, int], str, dict[str, Any]]] = [
    ((40, 40), "float32", {}),
    ((300, 300), "float32", {"causal": True}),
    ((257, 700), "float64", {"window": (90, 3)}),
    ((64, 500), "float32", {"softcap": 3.0, "dropout_p": 0.2, "seed": 5}),
    ((500, 64), "float32", {"score_mod": lambda s, b, h, q, k: s - 0.01 * abs(q - k)}),
    ((200, 333), "float64", {"mask_mod": mods.prefix_lm(40)}),
    ((1, 900), "float32", {"sinks": np.zeros(4, np.float32)}),
    ((128, 128), "float64", {"kv_lengths": [50, 128]}),
]


def everything(variant: int) -> list[np.ndarray]:
    (n_q, n_k), dtype, options = VARIANTS[variant]
    rng = np.random.default_rng(variant)
    q, k, v = (rng.standard_normal((2, h, n, 32)).astype(dtype) for h, n in ((4, n_q), (2, n_k), (2, n_k)))
    (out, lse), vjp = attention_vjp(q, k, v, return_lse=True, backend="cpu", **options)
    return [out, lse, *vjp(out)]


def in_threads(rounds: int) -> None:
    """Every thread runs every variant, in an order of its own; all get what one thread alone got."""
    expected = [everything(variant) for variant in range(len(VARIANTS))]

    def work(thread: int) -> None:
        for variant in np.random.default_rng(thread).permutation(np.repeat(np.arange(len(VARIANTS)), rounds)):
            for name, got, x in zip(("out", "lse", "dq", "dk", "dv"), everything(variant), expected[variant]):
                np.testing.assert_array_equal(got, x, err_msg=f"{name} of variant {variant}")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


@pytest.mark.slow
def test_threads_with_different_calls() -> None:
    in_threads(rounds=3)


PROGRAM = """
    import sys
    sys.path[:0] = [{tests!r}, {tests!r} + "/system"]
    import test_concurrency
    test_concurrency.in_threads({rounds})
    print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 16])
def test_calls_share_the_workers(program: Callable[..., str], threads: int) -> None:
    """More of them than cores, or fewer than callers."""
    text = PROGRAM.format(tests=os.path.dirname(os.path.dirname(__file__)), rounds=2)
    assert program(text, NUMBA_NUM_THREADS=threads).split()[-1] == "right"


@pytest.mark.slow
def test_the_first_calls_of_all_threads_at_once(program: Callable[..., str], tmp_path: Any) -> None:
    """Nothing compiled, nothing loaded: all threads compile and start at the same time."""
    text = """
        import threading
        import numpy as np, flashkit
        q = np.random.default_rng(0).standard_normal((2, 2, 200, 16)).astype(np.float32)
        results, start = [None] * 5, threading.Barrier(5)

        def work(i):
            start.wait()
            results[i] = flashkit.attention(q, q, q, causal=True, return_lse=True)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
        for t in threads: t.start()
        for t in threads: t.join()
        for other in results[1:]:
            for a, b in zip(results[0], other):
                np.testing.assert_array_equal(a, b)
        print("right")
    """
    assert program(text, FLASHKIT_CACHE_DIR=tmp_path).split() == ["right"]


# --- fork -------------------------------------------------------------------------------------------------------------

FORK = """
    import os, sys
    import numpy as np, flashkit
    q = np.random.default_rng(0).standard_normal((2, 4, 300, 32)).astype(np.float32)

    def everything():
        out, vjp = flashkit.attention_vjp(q, q, q, causal=True)
        return (out, *vjp(out))

    expected = everything()  # the parent's threads are running now
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            for a, b in zip(everything(), expected):
                np.testing.assert_array_equal(a, b)
            grandchild = os.fork()
            if grandchild == 0:
                everything()
                os._exit(17)
            assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 17
            os._exit(23)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 23
    for a, b in zip(everything(), expected):  # the parent goes on as before
        np.testing.assert_array_equal(a, b)
    print("right")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes(program: Callable[..., str]) -> None:
    """It has no workers."""
    assert program(FORK, timeout=120, NUMBA_NUM_THREADS=2).split() == ["right"]


# --- how many threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["numba", "flashkit"])
def test_numbas_number_of_threads_counts(program: Callable[..., str], first: str) -> None:
    """numba.set_num_threads counts on the thread that called it, and flashkit leaves it alone."""
    text = f"""
        import threading
        import numpy as np, flashkit
        from flashkit.backends.cpu import threads
        q = np.random.default_rng(0).standard_normal((1, 8, 400, 64)).astype(np.float32)
        if {first == "flashkit"}:
            expected = flashkit.attention(q, q, q)
        import numba

        @numba.njit(parallel=True)
        def total(x):
            sum = 0.0
            for i in numba.prange(len(x)):
                sum += x[i]
            return sum

        assert total(np.ones(1000)) == 1000
        numba.set_num_threads(2)
        expected = flashkit.attention(q, q, q)
        counts, others = [threads.count()], []
        other = threading.Thread(target=lambda: others.append(threads.count()))
        numba.set_num_threads(1)
        other.start()
        other.join()
        np.testing.assert_array_equal(flashkit.attention(q, q, q), expected)
        print(*counts, threads.count(), *others, numba.get_num_threads())
    """
    assert program(text, NUMBA_NUM_THREADS=3).split() == ["2", "1", "3", "1"]

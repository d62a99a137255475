"""What flashkit's threads do to the rest of the process."""

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import within_a_unit

import flashkit
from flashkit.backends.cpu import passes, scratch_pool, threads


def test_no_other_library_is_started_or_set(program: Callable[..., str]) -> None:
    """OpenMP's wait policy and its nested regions are settings of the whole process, and so is Numba's pool."""
    text = """
        import os, sys
        import numpy as np, flashkit
        q, variables = np.ones((1, 8, 512, 64), np.float32), dict(os.environ)
        flashkit.attention(q, q, q)
        from pathlib import Path
        loaded = Path("/proc/self/maps").read_text()
        print("libgomp" in loaded, "tbb" in loaded, "numba.np.ufunc" in sys.modules, os.environ == variables)
    """
    program(text, FLASHKIT_NUM_THREADS=2)  # compiles
    if sys.platform == "linux":
        assert program(text, FLASHKIT_NUM_THREADS=2) == "False False False True\n"


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


def test_a_setting_allows_no_more_threads_than_numba_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a child of a fork has one: the pool's threads are the parent's."""
    monkeypatch.setattr(threads, "most", lambda: 2)
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
    heads: int, dtype: str, most: int | None, splits: int, calls_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three for each of two threads, by splits (0: dQ is summed in place) that may take `most` bytes."""
    monkeypatch.setattr(threads, "count", lambda: 2)
    if most is not None:
        monkeypatch.setattr(passes, "DQ_BYTES_A_THREAD", most)
    taken = calls_of(scratch_pool, "borrowed")
    rng, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype))
    n = 900 if most is None else 901  # a pass that is bound keeps its splits
    q, k, v, dout = (rng.standard_normal((1, heads, n, 16), np.float32).astype(kind) for _ in range(4))
    found = flashkit.attention_vjp(q, k, v, backend="cpu", causal=True)[1](dout)
    exact = flashkit.attention_vjp(q, k, v, backend="reference", causal=True)[1](dout)
    assert taken == [(splits * heads * n * 16 * 4,)] * (splits > 0)
    within_a_unit(found, exact)


def test_large_scratch_memory_is_not_kept() -> None:
    scratch_pool._free.clear()
    for size, kept in ((scratch_pool.MAX_BYTES, 1), (scratch_pool.MAX_BYTES + 1, 0)):
        with scratch_pool.borrowed(size) as memory:
            assert memory.nbytes == size and memory.ctypes.data % 64 == 0
        assert len(scratch_pool._free) == kept
        scratch_pool._free.clear()


def test_a_worker_is_taken_back_awaited_and_woken(program: Callable[..., str]) -> None:
    """All ways through the states of a worker, from several threads, with pauses in which workers fall asleep."""
    text = """
        import threading, time
        import numpy as np, flashkit
        from flashkit.backends.cpu import arguments, threads
        q = np.random.default_rng(0).standard_normal((1, 2, 300, 64)).astype(np.float32)
        expected = flashkit.attention(q, q, q, backend="cpu")

        def work(pause):
            for i in range(150):
                np.testing.assert_array_equal(flashkit.attention(q, q, q, backend="cpu"), expected)
                if i % 3 == 0:
                    time.sleep(pause)

        callers = [threading.Thread(target=work, args=(pause,)) for pause in (0, 1e-4, 1e-3, 5e-3)]
        for caller in callers: caller.start()
        for caller in callers: caller.join()
        deadline = time.monotonic() + 60
        while set(threads._pool.workers[:, arguments.STATE]) != {arguments.ASLEEP} and time.monotonic() < deadline:
            time.sleep(0.01)
        print(set(threads._pool.workers[:, arguments.STATE].tolist()) == {int(arguments.ASLEEP)})
    """
    assert program(text, NUMBA_NUM_THREADS=4) == "True\n"


def test_a_worker_without_work_yields_its_core_and_sleeps_when_it_is_taken(program: Callable[..., str]) -> None:
    """A worker of its own, in a process where a clock of the test's tells the time: 1 microsecond for each look."""
    text = """
        import ctypes, threading
        import numpy as np
        from flashkit.backends.cpu import arguments as at, objects, specialise

        def looks(jump):
            memory, times, yields = np.zeros(int(at.WORKER_WORDS), np.int64), [0], []
            asleep = threading.Event()
            kinds = [ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * n) for n in (0, 2, 2)]

            def clock(which, address):
                times.append(times[-1] + (10**6 if len(times) == jump else 1000))
                ctypes.c_int64.from_address(address).value, nanoseconds = divmod(times[-1], 10**9)
                ctypes.c_int64.from_address(address + 8).value = nanoseconds
                return 0

            def sleep(*_):
                asleep.set()
                threading.Event().wait()

            functions = kinds[0](lambda: yields.append(0) or 0), kinds[1](clock), kinds[2](sleep)
            for word, function in zip((at.YIELD, at.CLOCK, at.ACQUIRE), functions):
                memory[word] = ctypes.cast(function, ctypes.c_void_p).value
            memory[at.STATE] = at.FREE
            work = ctypes.CFUNCTYPE(None, ctypes.c_int64)(objects.kept(specialise.launcher_source)["work"])
            threading.Thread(target=work, args=(memory.ctypes.data,), daemon=True).start()
            assert asleep.wait(60) and memory[at.STATE] == at.ASLEEP
            assert len(times) - 3 <= len(yields) <= len(times)
            kept.append((memory, functions))
            return len(times)

        kept = []
        print(2900 < looks(None) < 3100, looks(20), flush=True)
        import os
        os._exit(0)
    """
    assert program(text) == "True 21\n"


def test_a_call_wakes_the_workers_that_sleep(program: Callable[..., str]) -> None:
    """Workers that no thread runs: the call does all work itself, and leaves each asleep or free, to be found again."""
    text = """
        import ctypes
        import numpy as np, flashkit
        from flashkit.backends.cpu import arguments as at, threads
        workers, woken = np.zeros((5, int(at.WORKER_WORDS)), np.int64), []
        release = ctypes.CFUNCTYPE(None, ctypes.c_int64)(woken.append)
        workers[:, at.STATE] = at.ASLEEP, at.FREE, at.ASLEEP, at.RUNNING, at.ASLEEP
        workers[:, at.WAKE], workers[:, at.RELEASE] = range(5), ctypes.cast(release, ctypes.c_void_p).value
        threads._pool = threads.Pool(workers, {})
        q = np.random.default_rng(0).standard_normal((1, 8, 512, 64)).astype(np.float32)
        expected = flashkit.attention(q, q, q, backend="reference")
        for count in (4, 6):
            threads.count = lambda: count
            np.testing.assert_allclose(flashkit.attention(q, q, q, backend="cpu"), expected, atol=1e-5)
            print(woken, workers[:, at.STATE].tolist())
            workers[:, at.STATE] = at.ASLEEP, at.FREE, at.ASLEEP, at.RUNNING, at.ASLEEP
            woken.clear()
    """
    free, asleep, running = range(3)
    assert program(text) == (
        f"[0, 2] {[free, free, free, running, asleep]}\n[0, 2, 4] {[free, free, free, running, free]}\n"
    )

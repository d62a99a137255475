"""Signals during long calls and compilations: handlers run at once, and what they break off leaves nothing broken."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashkit.devices import interrupt
from flashkit.devices.interrupt import run_off_main_thread

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows sends no signals from os.kill")

CALL = """
    import os, signal, sys, threading, time
    import numpy as np, flashkit
    from flashkit.backends.cpu import scratch_pool
    from flashkit.backends.cpu import threads
    from flashkit.devices.interrupt import _running
    threads.LONG_FLOPS = 0  # on a slow machine a call of a second is short otherwise

    rng = np.random.default_rng(0)

    def tensors(heads, n_q, n_k):
        q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float32) for n in (n_q, n_k, n_k))
        return [np.broadcast_to(x, (1, heads, *x.shape[2:])) for x in (q, k, v)]

    def call_of(heads, n):
        q, k, v = tensors(heads, 1 if {kind!r} == "decode" else n, n)
        if {kind!r} != "backward":
            return lambda: flashkit.attention(q, k, v, backend="cpu")
        out, vjp = flashkit.attention_vjp(q, k, v, backend="cpu")
        return lambda: vjp(out)[0]

    def timed(call):
        start = time.monotonic()
        result = call()
        return time.monotonic() - start, result

    small = call_of(2, 300)
    expected = small()
    n, heads = {size}
    call = call_of(heads, n)
    seconds, whole = timed(call)
    while seconds < {least}:  # however fast the machine is
        heads *= 2
        call = call_of(heads, n)
        seconds, whole = timed(call)

    def after_a_while(act):
        thread = threading.Thread(target=lambda: (time.sleep(seconds / 10), act()))
        thread.start()
        return thread
"""
SIZES = {"forward": (4096, 4), "backward": (4096, 2), "decode": (20000, 512)}


def text_of(kind: str, least: float, more: str) -> str:
    return CALL.format(kind=kind, size=SIZES[kind], least=least) + more


INTERRUPTED = """
    free, threads = len(scratch_pool._free), threading.active_count()  # a thread that compiled may count for ever
    def interrupt():
        global sent
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
    least = float("inf")
    for _ in range(3):  # others may be at work
        thread = after_a_while(interrupt)
        try:
            call()
        except KeyboardInterrupt:
            least = min(least, (time.monotonic() - sent) / seconds)
        thread.join()
        assert not _running and threading.active_count() <= threads, threading.enumerate()
        assert len(scratch_pool._free) >= free
        np.testing.assert_array_equal(small(), expected)
        if least < 0.4:
            break
    np.testing.assert_array_equal(call(), whole)
    print(least)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "decode" else pytest.mark.exhaustive) for kind in SIZES]
)
def test_ctrl_c_ends_a_long_call(program: Callable[..., str], kind: str) -> None:
    """Without looking for signals, what is left of the call, nine tenths, would go by first."""
    assert float(program(text_of(kind, 1, INTERRUPTED))) < 0.4


@pytest.mark.slow
def test_ctrl_c_ends_a_long_work_tile(program: Callable[..., str]) -> None:
    """One thread's work tile in the backward pass is all of a head."""
    text = text_of("backward", 1, INTERRUPTED).replace("heads *= 2", "n *= 2")
    assert float(program(text, NUMBA_NUM_THREADS=1)) < 0.4


HANDLER = """
    handled = []
    def handler(*_):
        handled.append(time.monotonic() - start)
        np.testing.assert_array_equal(small(), expected)  # a call within a call
    signal.signal(signal.SIGUSR1, handler)
    start = time.monotonic()
    thread = after_a_while(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    np.testing.assert_array_equal(call(), whole)
    seconds = time.monotonic() - start
    thread.join()
    print(handled[0] / seconds)
"""


@pytest.mark.slow
def test_a_handler_runs_during_a_long_call(program: Callable[..., str]) -> None:
    assert float(program(text_of("forward", 1, HANDLER), NUMBA_NUM_THREADS=2)) < 0.6


TWICE = """
    class First(Exception): pass
    class Second(Exception): pass
    inside = False
    def handler(number, frame):
        if inside:
            raise First if number == signal.SIGUSR1 else Second
    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR2, handler)
    seen = 0
    for gap in (0, 0, 0.001, 0.003, 0.01):
        def interrupt():
            os.kill(os.getpid(), signal.SIGUSR1)
            if gap:
                time.sleep(gap)
            os.kill(os.getpid(), signal.SIGUSR2)
        thread = after_a_while(interrupt)
        inside = True
        try:
            call()
        except (First, Second) as error:
            inside = False
            seen += isinstance(error, Second)
        inside = False
        left = [*_running]
        fresh = [np.full(whole.shape, 7, whole.dtype) for _ in range(4)]  # where gradients were
        assert not left
        thread.join()
        assert all((x == 7).all() for x in fresh)
        np.testing.assert_array_equal(small(), expected)
    np.testing.assert_array_equal(call(), whole)
    print(seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_two_handlers_that_raise_in_a_row(program: Callable[..., str], kind: str) -> None:
    """The second one may come while the kernels that the first one stops still write; nothing is left running."""
    assert int(program(text_of(kind, 1, TWICE))) >= 2  # both at once


FORKS = """
    children = []
    signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))
    thread = after_a_while(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    result = call()
    if children == [0]:
        os._exit(7 if np.array_equal(result, whole) else 8)
    np.testing.assert_array_equal(result, whole)
    print(os.waitstatus_to_exitcode(os.waitpid(*children, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.one_in(2)
def test_a_handler_that_forks(program: Callable[..., str], kind: str) -> None:
    """The call goes on in both processes. The child has only one of the threads that were computing."""
    assert program(text_of(kind, 1, FORKS), FLASHKIT_NUM_THREADS=1).split() == ["7"]


COMPILING = """
    import os, signal, sys, threading
    import numpy as np, flashkit
    q = np.random.default_rng(0).standard_normal((1, 2, 40, 16)).astype(np.float32)

    def right(c):
        mask = lambda b, h, q, k: (q * 5 + c) % 7 != k % 3
        got, wanted = (flashkit.attention(q, q, q, mask_mod=mask, backend=name) for name in ("cpu", "reference"))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

    flashkit.attention(q, q, q, backend="cpu")
    import numba.core.registry  # noqa
    from llvmlite.binding import ffi
    from flashkit.backends.cpu import specialise
    armed = False

    def enter(lock):
        global armed
        lock._lock.acquire()
        if armed:
            armed = False
            os.kill(os.getpid(), signal.SIGINT)  # the worst moment, in the middle of a compilation
        for acquired, _ in lock._cblist:
            acquired()

    ffi._LLVMLock.__enter__ = enter
    compiled = specialise.compiled

    def slowly(kind, text, wanted):
        global armed
        armed = True
        return compiled(kind, text, wanted)

    specialise.compiled = slowly
    try:
        right({constant})
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        pass
    specialise.compiled = compiled
    thread = threading.Thread(target=right, args=({constant} + 1,), daemon=True)  # with a kernel of its own to compile
    thread.start()
    thread.join(200)
    if thread.is_alive():
        os._exit(3)  # a lock is still held
    right({constant})
    print("right")
"""


def test_ctrl_c_during_a_compilation(program: Callable[..., str], tmp_path: Path) -> None:
    """It leaves no lock held and no broken file, and what was being compiled is there for the next process."""
    constant = int.from_bytes(os.urandom(5), "big")  # a kernel that no cache has
    assert program(COMPILING.format(constant=constant)).split() == ["right"]
    again = (
        COMPILING.partition("    import numba.core")[0]
        + """
    from flashkit.devices import kernel_cache
    assert not list(kernel_cache.path().rglob("*.tmp"))
    right({constant})
    print("numba" in sys.modules)
    """
    )
    assert program(again.format(constant=constant)).split() == ["False"]


# --- interrupt.run_off_main_thread ------------------------------------------------------------------------------------


def test_work_apart_gives_its_result_and_its_error() -> None:
    main = threading.get_ident()
    assert run_off_main_thread(threading.get_ident) != main
    with pytest.raises(ZeroDivisionError):
        run_off_main_thread(lambda: 1 // 0)


def test_work_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of C. That of a handler, which comes after the thread has been started, is not taken for it."""
    changed = {1: 1}
    keys = iter(changed)
    changed[2] = 2
    refuse = partial(set().union, keys)  # RuntimeError
    monkeypatch.setattr(interrupt, "_thread", SimpleNamespace(start_new_thread=refuse))
    assert run_off_main_thread(threading.get_ident) == threading.get_ident()

    def handler(*_: Any) -> None:
        raise RuntimeError("of a handler")

    monkeypatch.setattr(interrupt, "_thread", SimpleNamespace(start_new_thread=handler))
    with pytest.raises(RuntimeError, match="of a handler"):
        run_off_main_thread(threading.get_ident)


def interrupt_until(event: threading.Event) -> None:
    """Again where Python drops the exception: the handler may run in a weak reference's callback."""
    os.kill(os.getpid(), signal.SIGINT)
    while not event.wait(5):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("can_be_stopped", [True, False])
def test_a_handler_that_raises_waits_for_work_that_can_be_stopped(can_be_stopped: bool) -> None:
    """And leaves other work alone."""
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        interrupt_until(go_on)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_off_main_thread(work, *([go_on.set] if can_be_stopped else []))
    assert ended.is_set() == can_be_stopped
    go_on.set()
    assert ended.wait(60)


def test_work_that_has_not_begun_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler raises before the thread comes to its work."""
    begun: list[int] = []
    late: list[Any] = []

    def start(*thread: Any) -> None:
        late.append(thread)
        raise KeyError

    monkeypatch.setattr(interrupt, "_thread", SimpleNamespace(start_new_thread=start))
    with pytest.raises(KeyError):
        run_off_main_thread(lambda: begun.append(1), lambda: None)
    ((run, arguments),) = late
    run(*arguments)
    assert not begun and not interrupt._running


def test_work_has_the_callers_context() -> None:
    """NumPy's handling of errors is a part of it."""
    import numpy as np

    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        run_off_main_thread(lambda: np.float64(1) / np.float64(0))

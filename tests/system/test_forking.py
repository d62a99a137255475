"""Locks across forks: a child finds them free, a fork does not wait long, and nothing waits for itself."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flashkit.devices import forking
from flashkit.devices.lazy import cached_property

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PRELUDE = """
    import os, signal, sys, threading, time
    from flashkit.devices import forking

    def child_of(work, seconds=60):
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        for _ in range(20 * seconds):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hang"
"""

EVERY_LOCK = """
    import numpy, flashkit
    from flashkit.backends.cpu import objects, threads
    from flashkit.call import plans
    from flashkit.devices import profiles
    from flashkit.mods.expr import graph
    from flashkit import dispatch
    from llvmlite.binding import ffi
    from numba.core.compiler_lock import global_compiler_lock

    locks = {
        "pool": threads._lock, "profiles": profiles._lock, "imports": forking.imports, "compiler": forking._compiler,
        "numba": global_compiler_lock, "llvm": ffi.lib._lock, "graph": graph._intern_lock,
        "plans": dispatch._plans_lock, "cache": plans._lock,
    }
    for name, lock in locks.items():
        held, release = threading.Event(), threading.Event()

        def hold():
            with lock:
                held.set()
                release.wait(0.3)  # the fork has to wait for it: nobody else sets it

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()

        def take():
            with lock:
                pass

        print(name, child_of(take, 10))
        thread.join()
        with lock:  # reentrant, and this thread's own
            print(name, child_of(take, 10))
        take()
        thread = threading.Thread(target=take)  # the parent has released it
        thread.start()
        thread.join(60)
        print(name, int(thread.is_alive()))
    """


@needs_fork
def test_a_child_finds_every_lock_free(program: Callable[..., str]) -> None:
    lines = program(PRELUDE + EVERY_LOCK).splitlines()
    assert len(lines) == 27
    assert {line.split()[1] for line in lines} == {"0"}, lines


@needs_fork
def test_the_compiler_goes_before_the_hooks_of_what_it_uses(program: Callable[..., str]) -> None:
    """In whichever order they were imported."""
    text = """
        import os
        registered = []
        register = os.register_at_fork
        os.register_at_fork = lambda **hooks: (registered.append(hooks.get("before")), register(**hooks))[1]
        import numpy as np, flashkit
        x = np.ones((1, 1, 30, 16), np.float32)
        flashkit.attention(x, x, x, mask_mod=lambda b, h, q, k: (q + {constant}) % 3 != k % 2, backend="cpu")
        import logging, filelock
        print(*(hook.__module__ for hook in registered if getattr(hook, "__module__", None)))  # a lock has none
    """.format(constant=int.from_bytes(os.urandom(5), "big"))
    assert program(text).split()[-1] == "flashkit.devices.forking"


@needs_fork
def test_a_fork_waits_for_one_compilation() -> None:
    """And goes before threads that wait for their turn."""
    stop, turns = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            with forking.compiling():
                turns.append(1)
                stop.wait(0.02)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(6):
            pool.submit(work)
        waited = []
        for _ in range(10):
            before = len(turns)
            forking._before()
            waited.append(len(turns) - before)
            forking._after_in_parent()
        stop.set()
    assert max(waited) <= 2, waited


@needs_fork
def test_an_interrupt_while_a_fork_waits(program: Callable[..., str]) -> None:
    """It comes after the fork, which has all the locks that it needs."""
    text = (
        PRELUDE
        + """
    held = threading.Event()

    def hold():
        with forking.compiling():
            held.set()
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    def take():
        with forking.compiling():
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        child = os.fork()
        if child == 0:
            take()
            os._exit(0)
        for _ in range(100):
            time.sleep(0.01)
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted", os.waitpid(child, 0)[1])
    """
    )
    assert program(text, timeout=60).split() == ["interrupted", "0"]


# --- lazy.cached_property ---------------------------------------------------------------------------------------------


class Slow:
    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait, self.computed = wait, 0

    @cached_property
    def value(self) -> object:
        """What it is."""
        self.computed += 1
        self.wait()
        return object()


def test_a_cached_property_does_not_block_other_instances() -> None:
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: Slow(lambda: (begun.set(), go_on.wait())).value, daemon=True)
    other = threading.Thread(target=lambda: Slow(lambda: None).value, daemon=True)
    thread.start()
    begun.wait()
    other.start()
    other.join(30)
    blocked = other.is_alive()
    go_on.set()
    assert not blocked


def test_threads_agree_on_a_cached_property() -> None:
    slow = Slow(threading.Barrier(4, timeout=60).wait)
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda _: slow.value, range(4)))
    assert slow.computed == 4
    assert len(set(map(id, values))) == 1

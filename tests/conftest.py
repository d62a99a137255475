"""Fixtures for more than one test file."""

import atexit
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import flashkit

if "FLASHKIT_TEST_EMULATED" in os.environ:
    import emulator

    _whole_process = ExitStack()
    _whole_process.enter_context(emulator.emulated(sms=int(os.environ["FLASHKIT_TEST_EMULATED"])))
    atexit.register(_whole_process.close)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. OpenMP's idle threads would spin on those that another worker needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# JAX would take three quarters of a GPU's memory, which other workers need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

os.environ.setdefault("FLASHKIT_PREBUILT", "0")  # what a checkout has compiled once is not what is tested


NUMBA_ONE_IN = 5
"""Numba takes ten seconds for kernels that NVRTC compiles in one. So of the cases that a test has for its backend on a
device, where they are more than a few, one in so many runs.
"""
SLOW_ONE_IN = 8
"""The same for slow cases on a CPU: `make test` is to end within twelve minutes on two cores."""
FEW = 4
"""So many cases all run, whatever they take."""

_GOLDEN = 0.6180339887


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only FLASHKIT_TEST_ALL=1 asks for."""
    if os.environ.get("FLASHKIT_TEST_ALL"):
        return
    groups: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.skip(reason="runs with FLASHKIT_TEST_ALL=1"))
            continue
        given = getattr(item, "callspec", None)
        kernels = given and (given.params.get("kernels") or (given.params.get("backend"),))  # a pair, or a name alone
        test = item.path, item.name.partition("[")[0]
        if marker := item.get_closest_marker("one_in"):
            groups.setdefault((*marker.args, *test), []).append(item)
        elif kernels and kernels[0] == "numba_cuda":
            groups.setdefault((NUMBA_ONE_IN, *test, kernels), []).append(item)
        elif given and item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
            groups.setdefault((SLOW_ONE_IN, *test, kernels), []).append(item)
    for (often, *_), group in groups.items():
        assert isinstance(often, int)
        marker = group[0].get_closest_marker("one_in")
        rarely = marker.kwargs.get("slow", often) if marker else often
        if len(group) > FEW or marker:
            for i, item in enumerate(group):
                n = rarely if item.get_closest_marker("slow") else often
                if i * _GOLDEN % 1 >= 1 / n:  # spread over every period that the parameters have
                    item.add_marker(pytest.mark.skip(reason=f"one in {n} runs, all with FLASHKIT_TEST_ALL=1"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that forces a generation of CUDA kernels is skipped where that refuses the problem, or its gradients."""
    try:
        return (yield)
    except flashkit.UnsupportedError as error:
        if item.get_closest_marker("gpu") and getattr(item, "funcargs", {}).get("generation"):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True, scope="module")
def long_lived_objects_are_not_visited() -> None:
    """Compilers and other libraries leave millions of objects, and each full collection would visit all of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def small_calls_run_on_threads() -> None:
    """The problems of tests are small, and would run on one thread."""
    from flashkit.backends.cpu import threads

    threads.SERIAL_FLOPS = 2e6


@pytest.fixture
def program() -> Callable[..., str]:
    """Run Python text in a process of its own and return what it prints; its errors fail the test.

    Settings of flashkit and Numba in the environment do not reach it; keyword arguments are its own settings.
    """

    def run(text: str, timeout: float = 300, **settings: object) -> str:
        kept = {n: x for n, x in os.environ.items() if not n.startswith(("FLASHKIT_", "NUMBA_", "PYTHONDONTWRITE"))}
        if "FLASHKIT_CACHE_DIR" in os.environ:  # what is compiled already need not be again
            kept["FLASHKIT_CACHE_DIR"] = os.environ["FLASHKIT_CACHE_DIR"]
        kept["FLASHKIT_PREBUILT"] = os.environ["FLASHKIT_PREBUILT"]
        environment = kept | {n: str(x) for n, x in settings.items()}
        # The package under test, installed or not.
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", textwrap.dedent(text)]
        done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], list[tuple[Any, ...]]]:
    """Call it with an owner and a name: the positional arguments of that function's calls from now on."""

    def watch(owner: object, name: str) -> list[tuple[Any, ...]]:
        calls, function = list[tuple[Any, ...]](), getattr(owner, name)

        def watched(*given: Any, **options: Any) -> Any:
            calls.append(given)
            return function(*given, **options)

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


@pytest.fixture
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither reads nor writes the user's own profiles."""
    from flashkit import dispatch
    from flashkit.devices import profiles

    monkeypatch.setattr(profiles, "user_dir", lambda: tmp_path / "user")
    monkeypatch.delenv("FLASHKIT_PROFILE_DIR", raising=False)
    profiles.forget()
    dispatch.forget()
    yield
    monkeypatch.undo()
    profiles.forget()
    dispatch.forget()


@pytest.fixture
def own_folders(own_profiles: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither reads nor writes the user's own profiles and cache; returns the folder that holds both."""
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def plans_on_codes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """As many objects as plans are made that take scales with each call; a yardstick in float makes none."""
    from flashkit.call import plans
    from flashkit.call.planned import Planned

    made: list[object] = []
    make = Planned.__init__

    def counted(*given: object, **named: object) -> None:
        if named.get("scales"):
            made.append(0)
        make(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Planned, "__init__", counted)
    plans.clear()
    return made

"""Timing in turns, which a noisy machine cannot turn into a preference, and the machine's description for a figure.

Programs timed one after the other meet different neighbours and different clocks; timed in turns, round by round, they
meet the same ones. So what is compared is timed by `interleaved`, and the ratio of two is the median of the rounds'.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .garbage import no_collection

Key = TypeVar("Key", bound=Hashable)

LEAST_SAMPLE = 1e-2
"""Seconds of one sample; a shorter call is repeated within it. In 2 ms the system may not yet have moved two threads
apart that it woke on one core."""

LEAD_IN = 0.1
"""Seconds; after a pause, in which threads fall asleep, a call shorter than this is preceded by an untimed sample."""

BUSY = 0.05
"""Share of the cores' time taken by other processes above which figures come with a warning."""

DECIDING_ROUNDS = 2
"""Rounds after which a call that is far behind may be dropped."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call in each round, in order; `dropped`: it was far behind and timed no further."""

    rounds: tuple[float, ...]
    repeats: int = 1
    dropped: bool = False

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 20 % and 80 % quantiles."""
        low, high = np.quantile(self.rounds, (0.2, 0.8))
        return float(low), float(high)

    def over(self, other: Timing) -> tuple[float, float, float]:
        """How many times as long as `other` it takes: median, 20 % and 80 % quantile over the rounds that both have."""
        n = min(len(self.rounds), len(other.rounds))
        ratios = np.divide(self.rounds[:n], other.rounds[:n])
        return float(np.median(ratios)), float(np.quantile(ratios, 0.2)), float(np.quantile(ratios, 0.8))

    def as_dict(self) -> dict[str, Any]:
        """For a result line; seconds."""
        low, high = self.spread
        counts = {"rounds": len(self.rounds), "repeats": self.repeats}
        return {"median": self.median, "low": low, "high": high, "best": self.best, **counts}


def interleaved(
    calls: Mapping[Key, Callable[[], object]], *, rounds: int = 10, budget: float = math.inf, least: int = 1,
    drop: float = math.inf,
    settle: Callable[[], object] | None = None, finish: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Timing]:  # fmt: skip
    """Time every call in each of up to `rounds` rounds, in an order that changes from round to round.

    budget: seconds after which no further round starts once there are `least`. drop: after DECIDING_ROUNDS, or `least`
    if those are more, a call whose best round is more than `drop` times the best of all is timed no more. settle:
    called before each sample, to wait until the last call's threads sleep (`until_idle`); of a short call a sample is
    then taken once before it is timed. finish: called at the end of each sample and timed with it, to wait for a device
    that calls are only handed to. clock: for tests. Two calls of each come first of all: the first may compile,
    the second tells how often a sample repeats it.
    """
    start = clock()
    repeats, lead_in = {}, {}
    for key, call in calls.items():
        call()
        finish()
        before = clock()
        call()
        finish()
        seconds = clock() - before
        repeats[key] = max(1, math.ceil(LEAST_SAMPLE / max(seconds, 1e-9)))
        lead_in[key] = settle is not None and seconds < LEAD_IN
    taken: dict[Key, list[float]] = {key: [] for key in calls}
    running, order = list(calls), random.Random(0)
    with no_collection():  # one would fall into whichever call happens to run
        for done in range(rounds):
            if done >= least and clock() - start > budget:
                break
            order.shuffle(running)
            for key in running:
                if settle is not None:
                    settle()
                for _ in range(repeats[key] if lead_in[key] else 0):
                    calls[key]()
                before = clock()
                for _ in range(repeats[key]):
                    calls[key]()
                finish()
                taken[key].append((clock() - before) / repeats[key])
            if done + 1 >= max(DECIDING_ROUNDS, least):
                best = min(min(seconds) for seconds in taken.values())
                running = [key for key in running if min(taken[key]) <= drop * best]
    return {key: Timing(tuple(taken[key]), repeats[key], key not in running) for key in calls}


def until_idle(most: float = 0.5) -> None:
    """Wait until no thread of this process runs, `most` seconds at most.

    The threads of OpenBLAS and OpenMP spin for a while when they have nothing more to do, OpenBLAS's for a tenth of a
    second, and take a core from whatever runs next.
    """
    end = time.perf_counter() + most
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(0.005)
        if time.process_time() - used < 0.001:
            return


# --- the machine ------------------------------------------------------------------------------------------------------


def versions(*peers: str) -> dict[str, str]:
    """Versions of what a CPU result depends on, and of those of these other distributions that are installed."""
    from .. import __version__

    found = {"python": platform.python_version(), "flashkit": __version__}
    for name in ("numpy", "numba", "llvmlite", *peers):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if blas := numpy_blas():
        found["blas"] = blas
    return found


def cuda_versions() -> dict[str, str]:
    """Of what a result on a GPU depends on, as far as it is there: driver, CUDA, compiler, CuPy."""
    found = {}
    with contextlib.suppress(Exception):  # no CuPy, no driver, no NVRTC: each says so in its own way
        import cupy

        from ..backends.cuda_common import compiler

        found["cupy"] = cupy.__version__
        found["nvrtc"] = ".".join(map(str, compiler.version()))
        number = cupy.cuda.runtime.driverGetVersion()
        found["cuda driver"] = f"{number // 1000}.{number % 1000 // 10}"
    return found


def numpy_blas() -> str | None:
    """The library behind NumPy's matrix product, with its version."""
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    except (KeyError, TypeError):
        return None


def machine(*peers: str) -> dict[str, Any]:
    """What a figure of this CPU means little without; peers: distributions whose versions belong to it too."""
    from ..backends.cpu import threads
    from . import host, profiles

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "device": host.cpu_name(),
        "kind": "cpu",
        "features": profiles.criteria("cpu")["features"],
        "caches": host.cpu_caches(),
        "cores": host.cpu_count(),
        "threads": threads.count(),
        "threading_layer": threads.layer(),
        "clock_mhz": clock_mhz(),
        "load": load,
        "date": now(),
        "versions": versions(*peers),
    }


def cuda_machine(*peers: str) -> dict[str, Any]:
    """What a figure of the current CUDA device means little without; peers: see peers_cuda.py."""
    from .. import __version__
    from . import host

    facts = host.cuda_device() or {}
    found = {"python": platform.python_version(), "flashkit": __version__, **cuda_versions()}
    with contextlib.suppress(ImportError):
        import torch

        if peers:
            found |= {"torch": str(torch.__version__), "cudnn": str(torch.backends.cudnn.version())}
    if "pallas" in peers:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["jax"] = importlib.metadata.version("jax")
    return {
        "device": facts.get("name", "?"), "kind": "cuda", "capability": facts.get("compute_capability"),
        "sms": facts.get("sms"), "clocks": cuda_clocks(), "date": now(), "versions": found,
        "forced": {name: value for name, value in os.environ.items() if name.endswith("_GENERATION")},
    }  # fmt: skip


def cuda_clocks() -> dict[str, str]:
    """Clocks, power and temperature just now, by nvidia-smi's names; empty where there is no such program."""
    names = "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version"
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, (word.strip() for word in line.split(","))))


class Neighbours:
    """What share of the time of all cores other processes take while the `with` block runs: `share`, 0 to 1.

    None where the system does not tell (elsewhere than on Linux). Idle threads of this process that spin are its own.
    """

    share: float | None = None

    def __enter__(self) -> Neighbours:
        self._before = _busy_elsewhere(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        before, start = self._before
        after, seconds = _busy_elsewhere(), time.perf_counter() - start
        if before is not None and after is not None and seconds > 0:
            self.share = round(min(max((after - before) / (seconds * (os.cpu_count() or 1)), 0.0), 1.0), 3)


def warning(share: float | None) -> str:
    """A sentence where other processes took too much of the cores' time for figures to be trusted, else nothing."""
    if share is None or share < BUSY:
        return ""
    return f"other processes took {100 * share:.0f} % of the cores' time: do not trust these figures"


def _busy_elsewhere() -> float | None:
    """CPU seconds that all but this process (and its children that have ended) have used since the system started."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = ticks
    except (OSError, ValueError):
        return None
    everyone = (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
    return everyone - sum(os.times()[:4])


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock_mhz() -> float | None:
    """The highest clock that a core runs at just now; None where the system does not tell."""
    found = []
    for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text()) / 1000)
    if not found:
        with contextlib.suppress(OSError, ValueError):
            lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
            found = [float(line.partition(":")[2]) for line in lines if line.lower().startswith("cpu mhz")]
    return round(max(found), 1) if found else None

"""What a figure is stored with: device, versions, clocks, and the load of other processes."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from ...devices import host, profiles

MAX_BACKGROUND = 0.05
"""Share of the cores' time taken by other processes above which figures come with a warning."""


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- versions ---------------------------------------------------------------------------------------------------------


def versions(*distributions: str) -> dict[str, str]:
    """Versions of what a CPU result depends on, and of these other distributions that are installed."""
    from ... import __version__

    by_package = {"python": platform.python_version(), "flashkit": __version__}
    for name in ("numpy", "numba", "llvmlite", *distributions):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_package[name] = importlib.metadata.version(name)
    if blas := _numpy_blas():
        by_package["blas"] = blas
    return by_package


def cuda_versions() -> dict[str, str]:
    """Versions that a GPU result depends on, as far as they are known: CuPy, NVRTC and the driver's CUDA."""
    by_package = {}
    with contextlib.suppress(Exception):  # CuPy, NVRTC and the driver raise errors of their own where one is absent
        import cupy

        from ...backends.cuda_common import compiler

        by_package["cupy"] = cupy.__version__
        by_package["nvrtc"] = ".".join(map(str, compiler.version()))
        number = cupy.cuda.runtime.driverGetVersion()
        by_package["cuda driver"] = f"{number // 1000}.{number % 1000 // 10}"
    return by_package


def _numpy_blas() -> str | None:
    """The library of NumPy's matrix product, with its version."""
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    except (KeyError, TypeError):
        return None


# --- the machine ------------------------------------------------------------------------------------------------------


def machine(*distributions: str) -> dict[str, Any]:
    """This CPU, its threads and clock, the load, and versions, also of these other distributions."""
    from ...backends.cpu import threads

    return {
        "device": host.cpu_name(),
        "kind": "cpu",
        "features": profiles.criteria("cpu")["features"],
        "caches": host.cpu_caches(),
        "cores": host.cpu_count(),
        "threads": threads.count(),
        "clock_mhz": _clock_mhz(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "date": now(),
        "versions": versions(*distributions),
    }


def cuda_machine(*baselines: str) -> dict[str, Any]:
    """The current CUDA device, its clocks, and versions, also of what these baselines of baselines_cuda.py use."""
    from ... import __version__

    facts = host.cuda_device() or {}
    by_package = {"python": platform.python_version(), "flashkit": __version__, **cuda_versions()}
    with contextlib.suppress(ImportError):
        import torch

        if baselines:
            by_package |= {"torch": str(torch.__version__), "cudnn": str(torch.backends.cudnn.version())}
    for baseline, package in ("pallas", "jax"), ("fa3", "flash_attn_3"):
        if baseline in baselines:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                by_package[package] = importlib.metadata.version(package)
    return {
        "device": facts.get("name", "?"), "kind": "cuda", "capability": facts.get("compute_capability"),
        "sms": facts.get("sms"), "clocks": cuda_clocks(), "date": now(), "versions": by_package,
        "forced": {name: value for name, value in os.environ.items() if name.endswith("_GENERATION")},
    }  # fmt: skip


def cuda_clocks() -> dict[str, str]:
    """Current clocks, power and temperature, by nvidia-smi's names; empty without nvidia-smi."""
    names = "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version"
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, (word.strip() for word in line.split(","))))


def describe(machine: dict[str, Any]) -> str:
    """A machine in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    return f"{machine['device']}{threads}; {versions}; {machine['date'][:10]}"


def _clock_mhz() -> float | None:
    """The highest current clock of all cores; None if the system does not report it."""
    clocks = []
    for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        with contextlib.suppress(OSError, ValueError):
            clocks.append(int(file.read_text()) / 1000)
    if not clocks:
        with contextlib.suppress(OSError, ValueError):
            lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
            clocks = [float(line.partition(":")[2]) for line in lines if line.lower().startswith("cpu mhz")]
    return round(max(clocks), 1) if clocks else None


# --- the load of other processes --------------------------------------------------------------------------------------


class BackgroundLoad:
    """The share of all cores' time, 0 to 1, that others take in the block, as `share`; None but on Linux."""

    share: float | None = None

    def __enter__(self) -> BackgroundLoad:
        self._before = _seconds_of_others(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        before, start = self._before
        after, seconds = _seconds_of_others(), time.perf_counter() - start
        if before is not None and after is not None and seconds > 0:
            self.share = round(min(max((after - before) / (seconds * (os.cpu_count() or 1)), 0.0), 1.0), 3)


def background_warning(share: float | None) -> str:
    """A sentence if other processes took more than MAX_BACKGROUND of the cores' time, otherwise empty."""
    if share is None or share < MAX_BACKGROUND:
        return ""
    return f"other processes took {100 * share:.0f} % of the cores' time: do not trust these figures"


def _seconds_of_others() -> float | None:
    """CPU seconds since boot of all processes but this one and its finished children."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = ticks
    except (OSError, ValueError):
        return None
    total = (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
    return total - sum(os.times()[:4])

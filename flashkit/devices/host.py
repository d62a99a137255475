"""Facts of this machine: CPU features, cache sizes, the CUDA device. Imports only the standard library.

On an unknown platform the functions return empty results, and the generic device profile applies. The only error is
that of an invalid environment variable.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import settings

CPUINFO = Path("/proc/cpuinfo")
CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")

# macOS reports features one by one; profiles use the names of Linux, on the right.
_SYSCTL_FEATURES = {
    "hw.optional.arm64": "asimd",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.avx512bw": "avx512bw",
    "hw.optional.avx512dq": "avx512dq",
    "hw.optional.avx512vl": "avx512vl",
}


def _sysctl(name: str) -> str | None:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo as key -> value, keys in lower case; empty where there is none."""
    try:
        first = CPUINFO.read_text(errors="replace").strip().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


LANES = settings.CPU_LANES.name


def cpu_features() -> frozenset[str]:
    """Instruction set extensions by Linux's names: "avx2", "fma", "avx512f", "amx_bf16", "asimd", ...

    FLASHKIT_CPU_LANES = 4, 8 or 16 hides vectors of more float32 lanes: profile, tiles and kernels are then
    those of such a CPU. ValueError for a width that this CPU does not have.
    """
    features, wanted = _all_features(), settings.CPU_LANES.read()
    if wanted is None:
        return features
    possible = [str(lanes) for lanes in (4, 8, 16) if lanes <= lanes_of(features)]
    if wanted not in possible:
        raise ValueError(f"{LANES}: expected {' or '.join(possible)}, the lanes of this CPU's vectors, got {wanted!r}")
    wider = {"4": ("avx2", "fma", "avx512", "amx"), "8": ("avx512", "amx"), "16": ()}[wanted]
    return frozenset(name for name in features if not name.startswith(wider))


def lanes_of(features: Iterable[str] | None) -> int:
    """float32 lanes of the widest vectors among CPU features by Linux's names."""
    known = set(features or ())
    return 16 if {"avx512f", "avx512vl"} <= known else 8 if {"avx2", "fma"} <= known else 4


@functools.cache
def _all_features() -> frozenset[str]:
    features: set[str] = set()
    info = _cpuinfo()
    features.update(info.get("flags", "").split(), info.get("features", "").split())
    if sys.platform == "darwin":
        features.update(ours for name, ours in _SYSCTL_FEATURES.items() if _sysctl(name) == "1")
    if not info:
        features |= _llvm_features()
    if platform.machine().lower() in {"aarch64", "arm64"}:
        features.add("asimd")  # NEON is part of the 64-bit ARM architecture itself
    return frozenset(features)


def _llvm_features() -> set[str]:
    """The features that LLVM finds, on any system, by Linux's names; empty if llvmlite is missing or finds none."""
    try:
        from llvmlite import binding

        found = [name for name, on in binding.get_host_cpu_features().items() if on]
    except Exception:  # llvmlite raises RuntimeError where LLVM does not know the CPU
        return set()
    names = (re.sub(r"^(avx512)(bf16|fp16|vnni|vbmi2|bitalg|vpopcntdq)$", r"\1_\2", name) for name in found)
    return {{"neon": "asimd"}.get(name, re.sub(r"[-.]", "_", name)) for name in names}


@functools.cache
def cpu_name() -> str:
    """The model name of the processor, or the name of the architecture if the system does not report it."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo().get("model name") or platform.processor() or platform.machine() or "unknown"


def cpu_is_intel() -> bool:
    """Whether Intel made the processor; Linux and Windows tell."""
    return "GenuineIntel" in (_cpuinfo().get("vendor_id") or platform.processor())


def cpu_count() -> int:
    """Processors that this process may use, by affinity and by a quota of time, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, math.ceil(cpu_quota() or count))


@functools.cache
def cpu_quota() -> float | None:
    """The least quota of processor time of this process's control groups, in processors; None without one.

    cgroup v2 has it in cpu.max of the group and of those above it, v1 in two files of the cpu controller
    (Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst of Linux). In a container the group's own path
    may not exist, and the root of the file system is the container's group.
    """
    try:
        lines = CGROUP.read_text(errors="replace").splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = [CGROUPS / name for name in (controllers, "cpu")] if controllers else [CGROUPS, CGROUPS / "unified"]
        for root in roots:
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    v1 = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                    quotas.append(_quota(folder, *(v1 if controllers else ("cpu.max",))))
    return min((quota for quota in quotas if quota), default=None)


def _quota(folder: Path, *names: str) -> float | None:
    """The quota of a group, in processors: two numbers in these files, of microseconds and of a period."""
    try:
        quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no limit
        return None


@functools.cache
def cpu_caches() -> dict[str, int]:
    """Data cache sizes in bytes, those known of {"l1d", "l2", "l3"}, as the first processor sees them."""
    sizes: dict[str, int] = {}
    for index in sorted(CPU_CACHE.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        amount = re.fullmatch(r"(\d+)([KMG]?)", size)
        if amount and kind in {"Data", "Unified"}:
            name = "l1d" if level == "1" else f"l{level}"
            sizes[name] = int(amount[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[amount[2]]
    if not sizes and sys.platform == "darwin":
        for name in ("l1d", "l2", "l3"):
            # perflevel0 are the performance cores of an Apple chip; the plain name is of the efficiency cores.
            reported = _sysctl(f"hw.perflevel0.{name}cachesize") or _sysctl(f"hw.{name}cachesize")
            if reported and reported.isdigit() and int(reported) > 0:
                sizes[name] = int(reported)
    return {name: size for name, size in sizes.items() if name in {"l1d", "l2", "l3"} and size > 0}


def cuda_device() -> dict[str, Any] | None:
    """Facts of the current CUDA device, or None without CuPy, without a driver or without a device.

    Keys: name, compute_capability [major, minor], sms, sram_per_block, sram_per_sm, registers_per_sm, l2 (bytes);
    those that the driver does not report are left out.
    """
    try:
        import cupy

        device = cupy.cuda.Device()
        facts = device.attributes
        properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    except Exception:  # CuPy missing or broken, no driver, no device
        return None
    capability = [properties["major"], properties["minor"]]
    known: dict[str, Any] = {"name": properties["name"].decode(), "compute_capability": capability}
    for ours, theirs in {
        "sms": "MultiProcessorCount",
        "sram_per_block": "MaxSharedMemoryPerBlockOptin",
        "sram_per_sm": "MaxSharedMemoryPerMultiprocessor",
        "registers_per_sm": "MaxRegistersPerMultiprocessor",
        "l2": "L2CacheSize",
    }.items():
        if facts.get(theirs, 0) > 0:
            known[ours] = int(facts[theirs])
    return known


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector is disabled inside the `with` block and restored after it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

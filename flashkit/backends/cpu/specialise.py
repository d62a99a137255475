"""Kernels made at run time: a kernel's text behind a head of constants, written to the cache directory and imported
from there.

Numba's disk cache works for module-level functions of a file that stays where it is. So a specialised kernel is
such a file, named by the hash of its text and of every source that is compiled into it: a changed source is a new
file, and never a stale kernel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np

from ... import cachedir

_HERE = Path(__file__).parent
_lock = threading.RLock()

_CONVERSIONS = {
    "float64": ("float64", "float64_to_float64", "float64_to_float64"),
    "float32": ("float32", "float32_to_float32", "float32_to_float32"),
    "float16": ("uint16", "float16_to_float32", "float32_to_float16"),
    "bfloat16": ("uint16", "bfloat16_to_float32", "float32_to_bfloat16"),
}


@cache
def fingerprint() -> str:
    """Of all sources that end up in a kernel, and of the compiler."""
    import llvmlite
    import numba

    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {np.__version__}".encode())
    for path in sorted(_HERE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def folder() -> Path:
    """Where this backend keeps what it compiles."""
    return cachedir.folder("cpu")


write = cachedir.write


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While one process compiles this module the others wait, and then read what it wrote."""
    if any((path.parent / "__pycache__").glob(f"{path.stem}.*.nbi")):  # compiled before: nothing to wait for
        yield
        return
    with cachedir.alone(path):
        yield


@cache
def load(kind: str, text: str) -> ModuleType:
    """The module with this text, compiled now or before."""
    name = f"{kind}_{hashlib.sha256((fingerprint() + text).encode()).hexdigest()[:20]}"
    path = folder() / f"{name}.py"
    with _lock, _alone(path):
        if not path.exists():
            write(path, text.encode())
        found = importlib.util.spec_from_file_location(f"flashkit_kernels.{name}", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module  # where Numba looks when it reads its cache
        try:
            found.loader.exec_module(module)
        except (EOFError, pickle.UnpicklingError):
            # What a full disk or a killed process left: compiled again.
            for damaged in path.parent.rglob(f"{name}.*.nbi"):
                damaged.unlink(missing_ok=True)
            found.loader.exec_module(module)
        return module


@cache
def kernel(name: str, dtype: str) -> ModuleType:
    """kernels/<name>.py for a storage dtype."""
    storage, widen, narrow = _CONVERSIONS[dtype]
    compute = "float64" if dtype == "float64" else "float32"
    head = f"""
import numpy as np
from flashkit.backends.cpu.memory import {widen} as widen, {narrow} as narrow
STORAGE, STORAGE_SIZE = np.{storage}, {np.dtype(storage).itemsize}
COMPUTE, COMPUTE_SIZE = np.{compute}, {np.dtype(compute).itemsize}
IN_PLACE = {storage == compute}
"""
    texts = [(_HERE / "kernels" / f"{part}.py").read_text() for part in ("load", name)]
    return load(f"{name}_{dtype}", "\n\n".join([head.lstrip(), *texts]))


@cache
def launcher() -> ModuleType:
    return load("launch", (_HERE / "kernels" / "launch.py").read_text())

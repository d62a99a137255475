"""Machine code kept between processes: object files in the cache directory, loaded by LLVM.

What makes an object (micro.py, specialise.py) may take seconds and need Numba; loading one takes a millisecond and
needs llvmlite alone. A file is a line that describes the object (its functions, its hash, whether Numba has to be
imported for what it refers to) and the object as LLVM emitted it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numpy as np
from llvmlite import binding

from ...devices import kernel_cache

_HERE = Path(__file__).parent
_lock = threading.RLock()
_loaded: dict[str, dict[str, int]] = {}
_engines: list[Any] = []  # own the machine code


class Object(NamedTuple):
    """Machine code, and the names of the functions in it that are called from outside."""

    code: bytes
    functions: tuple[str, ...]
    needs_numba: bool = False  # it refers to functions that are there once Numba is imported


@cache
def machine() -> tuple[str, str, str]:
    """Triple, name and features of this CPU by LLVM's names; LLVM is ready for it afterwards."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


@cache
def fingerprint() -> str:
    """Of all sources that end up in machine code, and of the compilers."""
    digest = hashlib.sha256(f"{llvmlite.__version__} {np.__version__} {_numba_version()}".encode())
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _numba_version() -> str:
    """What says which Numba is installed, without importing it."""
    found = importlib.util.find_spec("numba")
    places = list(found.submodule_search_locations or ()) if found else []
    with suppress(OSError, IndexError):
        return (Path(places[0]) / "_version.py").read_text()
    import numba

    return str(numba.__version__)


def folder() -> Path:
    """Where this backend keeps what it compiles."""
    return kernel_cache.folder("cpu")


def functions(kind: str, text: str, make: Callable[[], Object]) -> dict[str, int]:
    """Addresses of the functions of an object that `text` and the sources of this package determine.

    It is loaded once in a process, read from the cache directory where it is there and sound, and made by `make`
    otherwise, by one process while others wait.
    """
    key = hashlib.sha256(f"{fingerprint()} {machine()} {text}".encode()).hexdigest()[:20]
    name = f"{kind}_{key}"
    known = _loaded.get(name)
    if known is None:
        with _lock:
            known = _loaded.get(name)
            if known is None:
                known = _loaded[name] = _load(_read_or_make(folder() / f"{name}.o", make))
    return known


def _read_or_make(path: Path, make: Callable[[], Object]) -> Object:
    if (kept := _read(path)) is not None:
        return kept
    with kernel_cache.alone(path):
        if (kept := _read(path)) is not None:
            return kept
        made = make()
        about = {"functions": made.functions, "needs_numba": made.needs_numba, "sha256": _hash(made.code)}
        with suppress(OSError):  # a full disk: this process has it all the same
            kernel_cache.write(path, json.dumps(about).encode() + b"\n" + made.code)
        return made


def _read(path: Path) -> Object | None:
    """None where there is no such file, or what a full disk or a killed process left of it."""
    try:
        line, code = path.read_bytes().split(b"\n", 1)
        about = json.loads(line)
        return Object(code, tuple(about["functions"]), about["needs_numba"]) if about["sha256"] == _hash(code) else None
    except (OSError, ValueError, KeyError):
        return None


def _hash(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def _load(kept: Object) -> dict[str, int]:
    if kept.needs_numba:
        import numba.core.registry

        numba.core.registry.cpu_target.target_context.refresh()  # tells LLVM where Numba's own functions are
    triple, cpu, features = machine()
    target = binding.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, codemodel="jitdefault"
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(kept.code))
    engine.finalize_object()
    _engines.append(engine)
    return {name: engine.get_function_address(name) for name in kept.functions}

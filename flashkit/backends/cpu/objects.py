"""Machine code kept between processes: object files in the cache directory, loaded by LLVM.

What makes an object (micro.py, specialise.py) may take seconds and need Numba; loading one takes a millisecond and
needs llvmlite alone. A file is a line that describes the object (its functions, its hash, whether Numba has to be
imported for what it refers to) and the object as LLVM emitted it. LLVM trusts what it is given and crashes on anything
else, so all of that is checked first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import msgspec
import numpy as np
from llvmlite import binding

from ...devices import kernel_cache
from .. import headers

FOLDER = "cpu"
"""Of the cache directory."""

_HERE = Path(__file__).parent
_lock = threading.RLock()
_loaded: dict[str, dict[str, int]] = {}
_engines: list[Any] = []  # own the machine code


class Object(NamedTuple):
    """Machine code, and the names of the functions in it that are called from outside."""

    code: bytes
    functions: tuple[str, ...]
    needs_numba: bool = False  # it refers to functions that are there once Numba is imported


class _Header(msgspec.Struct, frozen=True):
    """The first line of a file, as JSON."""

    functions: tuple[str, ...]
    needs_numba: bool
    sha256: str


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
                known = _loaded[name] = _read_or_make(f"{name}.o", make)
    return known


def _read_or_make(name: str, make: Callable[[], Object]) -> dict[str, int]:
    if (kept := _read(name)) is not None:
        return kept
    with kernel_cache.alone(FOLDER, name):
        if (kept := _read(name)) is not None:
            return kept
        made = make()
        header = _Header(made.functions, made.needs_numba, _hash(made.code))
        kernel_cache.write(FOLDER, name, msgspec.json.encode(header) + b"\n" + made.code)
        return _load(made)


def _read(name: str) -> dict[str, int] | None:
    """None where there is no such file, or what a full disk or a killed process left of it, or anything else."""
    line, _, code = (kernel_cache.read(FOLDER, name) or b"").partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if header.sha256 != _hash(code) or not headers.alike(code, _model()):
        return None
    if not header.functions or not all(map(str.isidentifier, header.functions)):
        return None
    found = _load(Object(code, header.functions, header.needs_numba))
    return found if all(found.values()) else None  # 0: the object has no such function


def _hash(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def _load(kept: Object) -> dict[str, int]:
    if kept.needs_numba:
        import numba.core.registry

        numba.core.registry.cpu_target.target_context.refresh()  # tells LLVM where Numba's own functions are
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target())
    engine.add_object_file(binding.ObjectFileRef.from_data(kept.code))
    engine.finalize_object()
    _engines.append(engine)
    return {name: engine.get_function_address(name) for name in kept.functions}


def _target() -> Any:
    """LLVM's, for objects that are loaded here. An engine takes it over, so each has its own."""
    triple, cpu, features = machine()
    return binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, codemodel="jitdefault")


@cache
def _model() -> bytes:
    """An object with nothing in it, whose header all objects of this machine share."""
    return bytes(_target().emit_object(binding.parse_assembly("")))

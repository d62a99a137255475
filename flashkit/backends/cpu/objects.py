"""Machine code on disk: object files in the cache directory, loaded by LLVM.

Compiling an object (micro/compile.py, specialise.py) takes up to seconds and may need Numba; loading one needs llvmlite
alone. A file is a line of JSON (the object's functions, its hash, whether it refers to functions of Numba) and the
object as LLVM emitted it. LLVM crashes on a malformed object, so a file is checked before LLVM gets it: it has to be
the one that was written under this name, and an object for this machine whose tables are consistent.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import llvmlite
import msgspec
import numpy as np
from llvmlite import binding

from ...devices import forking, interrupt, kernel_cache, progress
from .. import elf, headers
from . import pass_managers

FOLDER = "cpu"
"""Of the cache directory."""

forking.go_before("logging")  # which Numba uses

_HERE = Path(__file__).parent


class Object(NamedTuple):
    """Machine code, and the names of the functions that it exports."""

    code: bytes
    functions: tuple[str, ...]
    needs_numba: bool = False  # it refers to functions that exist once Numba is imported


class Functions(dict[str, int]):
    """Addresses of the functions of a loaded object, by name. It owns the machine code, so whatever holds an address
    holds this as well.
    """

    engine: Any


_loaded: WeakValueDictionary[str, Functions] = WeakValueDictionary()
"""By the name of the file. A modification is unloaded with the last plan that uses it."""


class _Header(msgspec.Struct, frozen=True):
    """The first line of a file, as JSON."""

    functions: tuple[str, ...]
    needs_numba: bool
    sha256: str  # of the name of the file, the functions and the code


@cache
def machine() -> tuple[str, str, str]:
    """Triple, name and features of this CPU in LLVM's terms. Initialises LLVM for it."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


@cache
def fingerprint() -> str:
    """Hash of all sources that are compiled to machine code, and of the compilers' versions."""
    digest = hashlib.sha256(f"{llvmlite.__version__} {np.__version__} {_numba_version()}".encode())
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _numba_version() -> str:
    """Identifies the installed Numba without importing it."""
    found = importlib.util.find_spec("numba")
    places = list(found.submodule_search_locations or ()) if found else []
    with suppress(OSError, IndexError):
        return (Path(places[0]) / "_version.py").read_text()
    import numba

    return str(numba.__version__)


def functions(kind: str, text: str, make: Callable[[], Object]) -> Functions:
    """The functions of an object that `text` and the sources of this package determine.

    A process loads it once, as long as the result is in use: from the cache directory, or, where the file is missing or
    damaged, from `make`, which one process runs while others wait. No signal handler breaks that off: Numba would not
    recover. Where one raises, the thread that compiles goes on to the end.
    """
    key = hashlib.sha256(f"{fingerprint()} {machine()} {text}".encode()).hexdigest()[:20]
    name = f"{kind}_{key}"
    loaded = _loaded.get(name)
    if loaded is None:
        loaded = interrupt.apart(lambda: _read_or_make(name, make))
    return loaded


def _read_or_make(name: str, make: Callable[[], Object]) -> Functions:
    with forking.compiling():
        found = _loaded.get(name)
        if found is None and (found := _read(f"{name}.o")) is not None:
            _loaded[name] = found
    if found is None:
        forking.go_before("filelock")  # before `compiling`, and not in a process that finds all its kernels
        with forking.compiling():
            found = _loaded.get(name)
            if found is None:
                found = _loaded[name] = _made(f"{name}.o", make)
    return found


def _made(name: str, make: Callable[[], Object]) -> Functions:
    with kernel_cache.alone(FOLDER, name):
        if (cached := _read(name)) is not None:
            return cached
        with progress.compiling(name.rpartition("_")[0]), pass_managers.freed():
            made = make()
        header = _Header(made.functions, made.needs_numba, _hash(name, made))
        kernel_cache.write(FOLDER, name, msgspec.json.encode(header) + b"\n" + made.code)
        return _load(made)


def _read(name: str) -> Functions | None:
    """None where the file is missing, or is damaged, or is not the object file that was written under this name."""
    line, _, code = (kernel_cache.read(FOLDER, name) or b"").partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    made = Object(code, header.functions, header.needs_numba)
    if header.sha256 != _hash(name, made) or not headers.alike(code, _model()):
        return None
    if not made.functions or not all(map(str.isidentifier, made.functions)):
        return None
    if not elf.is_consistent(code, made.functions):
        return None
    found = _load(made)
    return found if all(found.values()) else None  # 0: the object has no such function


def _hash(name: str, made: Object) -> str:
    whole = hashlib.sha256(repr((name, made.functions, made.needs_numba)).encode())
    whole.update(made.code)
    return whole.hexdigest()


def _load(made: Object) -> Functions:
    if made.needs_numba:
        import numba.core.registry

        numba.core.registry.cpu_target.target_context.refresh()  # registers Numba's own functions with LLVM
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target())
    engine.add_object_file(binding.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    found = Functions({name: engine.get_function_address(name) for name in made.functions})
    found.engine = engine
    return found


def _target() -> Any:
    """A target machine for objects that this process loads. An engine takes ownership, so each has its own."""
    triple, cpu, features = machine()
    return binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, codemodel="jitdefault")


@cache
def _model() -> bytes:
    """An empty object, whose ELF header all objects for this machine share."""
    return bytes(_target().emit_object(binding.parse_assembly("")))

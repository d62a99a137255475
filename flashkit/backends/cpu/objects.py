"""Machine code on disk: object files in the package and in the cache directory, loaded by LLVM.

Compiling an object (micro/compile.py, specialise.py) takes up to seconds and may need Numba; loading one needs llvmlite
alone. A file is a line of JSON (the object's functions, those that it calls, its hash) and the object as LLVM emitted
it. LLVM crashes on a malformed object, so a file is checked before LLVM gets it: it has to be the one that was written
under this name, and an object for this machine whose tables are consistent.

A wheel carries the objects of usual calls (tools/prebuild.py). One rule says which object runs: the prebuilt one, if
the package has it for the process's target (target.py), else the one in the cache, else one compiled now. So the same
code runs in every process of an installation, whatever its cache holds.
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

from ...devices import forking, interrupt, kernel_cache, prebuilt, progress
from .. import elf
from . import pass_managers, target
from .target import Target

FOLDER = "cpu"
"""Of the cache directory, and of the prebuilt kernels."""

forking.go_before("logging")  # which Numba uses

_HERE = Path(__file__).parent


class Object(NamedTuple):
    """Machine code, the names of the functions that it exports, and of those that it calls: of C, Python or Numba."""

    code: bytes
    functions: tuple[str, ...]
    calls: tuple[str, ...] = ()


class Source(NamedTuple):
    """What an object is made from."""

    kind: str  # the first word of its file's name
    text: str  # which determines it, together with the sources of this package and the target
    make: Callable[[Target], Object]
    instructions: str = ""  # how bfloat16 is multiplied (target.py)


class Functions(dict[str, int]):
    """Addresses of the functions of a loaded object, by name. It owns the machine code."""

    engine: Any


_loaded: WeakValueDictionary[str, Functions] = WeakValueDictionary()
"""By the name of the file. A modification is unloaded with the last plan that uses it."""


class _Header(msgspec.Struct, frozen=True):
    """The first line of a file, as JSON."""

    functions: tuple[str, ...]
    calls: tuple[str, ...]
    sha256: str  # of the name of the file, the functions and the code


@cache
def fingerprint() -> str:
    """Hash of all sources that are compiled to machine code."""
    digest = hashlib.sha256()
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def compilers() -> str:
    """Hash of the versions of all that compiles."""
    return hashlib.sha256(f"{llvmlite.__version__} {np.__version__} {_numba_version()}".encode()).hexdigest()


def _numba_version() -> str:
    """Identifies the installed Numba without importing it."""
    module_spec = importlib.util.find_spec("numba")
    places = list(module_spec.submodule_search_locations or ()) if module_spec else []
    with suppress(OSError, IndexError):
        return (Path(places[0]) / "_version.py").read_text()
    import numba

    return str(numba.__version__)


class _Names(NamedTuple):
    """Where an object is looked for: the name of a kernel, and of what these compilers make of it."""

    prebuilt: str
    cached: str


def functions(source: Source) -> Functions:
    """The functions of an object for this process's target.

    A process loads it once, as long as the result is in use: from the package or the cache directory, or, where the
    file is missing or damaged, from `make`, which one process runs while others wait. No signal handler breaks that
    off: Numba would not recover. Where one raises, the thread that compiles goes on to the end.
    """
    wanted = target.target(source.instructions)
    names = _names(source, wanted)
    loaded = _loaded.get(names.cached)
    if loaded is None:
        loaded = interrupt.run_off_main_thread(lambda: _read_or_make(names, lambda: source.make(wanted)))
    return loaded


def kept(make: Callable[..., Source], *arguments: Any) -> Functions:
    """Functions of this package's own: those of make(*arguments), which stay loaded."""
    return _kept(make, arguments, target.target())


@cache
def _kept(make: Callable[..., Source], arguments: tuple[Any, ...], _: Target) -> Functions:
    return functions(make(*arguments))


def _names(source: Source, wanted: Target) -> _Names:
    key = hashlib.sha256(f"{fingerprint()} {tuple(wanted)} {source.text}".encode()).hexdigest()[:20]
    compiled = hashlib.sha256(f"{compilers()} {key}".encode()).hexdigest()[:20]
    return _Names(f"{wanted.name}/{source.kind}_{key}.o", f"{source.kind}_{compiled}.o")


def build(source: Source, wanted: Target) -> tuple[str, bytes]:
    """Name and content of the file of a prebuilt object."""
    name = _names(source, wanted).prebuilt
    with pass_managers.freed():
        return name, _file(name, source.make(wanted))


def is_prebuilt(source: Source) -> bool:
    """Whether the package has a file of this object for this process's target."""
    return prebuilt.read(FOLDER, _names(source, target.target(source.instructions)).prebuilt) is not None


def _read_or_make(names: _Names, make: Callable[[], Object]) -> Functions:
    with forking.compiling():
        loaded = _loaded.get(names.cached)
        if loaded is None and (loaded := _found(names)) is not None:
            _loaded[names.cached] = loaded
    if loaded is None:
        forking.go_before("filelock")  # before `compiling`, and not in a process that finds all its kernels
        with forking.compiling():
            loaded = _loaded.get(names.cached)
            if loaded is None:
                loaded = _loaded[names.cached] = _compile(names.cached, make)
    return loaded


def _found(names: _Names) -> Functions | None:
    carried = _checked(names.prebuilt, prebuilt.read(FOLDER, names.prebuilt))
    return carried or _checked(names.cached, kernel_cache.read(FOLDER, names.cached))


def _compile(name: str, make: Callable[[], Object]) -> Functions:
    with kernel_cache.compile_lock(FOLDER, name):
        if (cached := _checked(name, kernel_cache.read(FOLDER, name))) is not None:
            return cached
        with progress.compiling(name.rpartition("_")[0]), pass_managers.freed():
            compiled = make()
        kernel_cache.write(FOLDER, name, _file(name, compiled))
        loaded = _load(compiled)
    if loaded is None:
        missing = ", ".join(name for name in compiled.calls if not _address(name))
        raise RuntimeError(f"compiled kernels call {missing}, which this process does not have")
    return loaded


def _file(name: str, compiled: Object) -> bytes:
    header = _Header(compiled.functions, compiled.calls, _hash(name, compiled))
    return msgspec.json.encode(header) + b"\n" + compiled.code


def _checked(name: str, content: bytes | None) -> Functions | None:
    """None where the file is missing, or is damaged, or is not the object file that was written under this name."""
    line, _, code = (content or b"").partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    stored = Object(code, header.functions, header.calls)
    if header.sha256 != _hash(name, stored) or not elf.alike(code, _model()):
        return None
    if not stored.functions or not all(map(str.isidentifier, stored.functions)):
        return None
    loaded = _load(stored)
    return loaded if loaded and all(loaded.values()) else None  # 0: the object has no such function


def _hash(name: str, compiled: Object) -> str:
    whole = hashlib.sha256(repr((name, compiled.functions, compiled.calls)).encode())
    whole.update(compiled.code)
    return whole.hexdigest()


def _load(compiled: Object) -> Functions | None:
    """None if it calls a function that this process does not have (known of ELF only): LLVM would end the process."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target.machine(target.target()))
    if not all(map(_address, compiled.calls)):
        import numba.core.registry

        numba.core.registry.cpu_target.target_context.refresh()  # registers Numba's own functions with LLVM
        if compiled.code.startswith(b"\x7fELF") and not all(map(_address, compiled.calls)):
            return None
    engine.add_object_file(binding.ObjectFileRef.from_data(compiled.code))
    engine.finalize_object()
    loaded = Functions({name: engine.get_function_address(name) for name in compiled.functions})
    loaded.engine = engine
    return loaded


def _address(name: str) -> int:
    """The address of a function of this process, as LLVM finds it once it has made an engine; 0 if there is none."""
    return binding.address_of_symbol(name) or 0


@cache
def _model() -> bytes:
    """An empty object, whose ELF header all objects for this machine share."""
    return bytes(target.machine(target.target()).emit_object(binding.parse_assembly("")))

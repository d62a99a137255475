"""Kernels in Python to machine code: Numba compiles them to PTX, ptxas to machine code.

Neither needs a device or a driver. Numba passes each word of Params as one parameter. The PTX is rewritten to take one
structure by value, as kernels in CUDA C++ do, so that both are launched in the same way. The decorator `@kernel` has
launch bounds and tensor maps.
"""

from __future__ import annotations

import linecache
import os
import re
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...devices import forking
from ...devices.host import no_collection
from ..cuda_common.compiler import CompileError
from ..cuda_common.params import FIELDS, SCALARS, TENSORS
from . import assemble

_MAP_BYTES = 128  # of a tensor map
_PACKAGES = "numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12"
_HELPERS = ("memory.py", "compile.py", "assemble.py", "ptx/*.py")

_compiling = threading.local()


def kernel(threads: int, blocks: int = 1, maps: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Mark a kernel of Params: threads of a CTA, CTAs for an SM's registers, and names of tensor maps, by value."""

    def mark(function: Any) -> Any:
        function.kernel = (threads, blocks), tuple(maps)
        return function

    return mark


@dataclass(frozen=True)
class PythonSource:
    """The text of a module whose kernels take Params with `values` values of a modification."""

    name: str
    text: str
    values: int

    def made_from(self) -> object:
        return self.text, self.values, [(field.name, field.kind) for field in FIELDS], _helpers(), _versions()

    def compile(self, arch: str) -> tuple[bytes, str]:
        module = module_of(self.name, self.text)
        try:
            with no_collection():
                texts = [_ptx(function, self.values, arch) for function in kernels_of(module).values()]
                return assemble.machine_code(self.name, texts, arch)
        finally:
            linecache.cache.pop(_file(self.name, self.text), None)


def module_of(name: str, text: str) -> dict[str, Any]:
    """The names of a module with this text."""
    file = _file(name, text)
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # for tracebacks
    module: dict[str, Any] = {"__name__": f"flashkit_kernels.{name}"}
    exec(compile(text, file, "exec"), module)
    return module


def _file(name: str, text: str) -> str:
    """The file name of a module with this text."""
    return f"<flashkit {name} {abs(hash(text)):x}>"


def kernels_of(module: dict[str, Any]) -> dict[str, Any]:
    """The functions marked as kernels, by name."""
    return {name: value for name, value in module.items() if hasattr(value, "kernel")}


# --- parameters -------------------------------------------------------------------------------------------------------

Tensor = namedtuple("Tensor", "data batch head token")
"""The address, and strides in elements."""

Params = namedtuple("Params", (*(field.name for field in FIELDS), "values"))  # type: ignore[misc]
"""`Params` (cuda_common/params.py) as a kernel's argument p: the words of `Arguments` in the same order. The host
writes 64-bit integers; some fields are read as float64 or uint64.
"""


def params_type(n_values: int) -> Any:
    """Numba's type of Params with `n_values` values of a modification."""
    from numba.cuda import types

    tensor = types.NamedUniTuple(types.int64, 4, Tensor)
    words = [getattr(types, _kind(field.kind)) for field in SCALARS]
    return types.NamedTuple([*[tensor] * len(TENSORS), *words, types.UniTuple(types.int64, n_values)], Params)


def _kind(kind: str) -> str:
    """Addresses are integers."""
    return kind if kind in ("float64", "uint64") else "int64"


# --- Numba ------------------------------------------------------------------------------------------------------------


def _ptx(function: Any, values: int, arch: str) -> str:
    with forking.imports:
        from numba import cuda
    bounds, maps = function.kernel
    number, specific = re.fullmatch(r"sm_(\d+)(a?)", arch).groups()  # type: ignore[union-attr]
    capability = int(number) // 10, int(number) % 10
    kind = params_type(values)
    with _for_capability(capability):
        try:
            target = (*capability, specific) if specific else capability
            text, _ = cuda.compile_ptx(function, (kind,), cc=target, launch_bounds=bounds)
        except Exception as error:  # Numba has many kinds
            raise CompileError(f"{function.__name__} does not compile for {arch}: {error}") from error
    return one_structure(text, function.__name__, maps)


def one_structure(text: str, name: str, maps: Sequence[str]) -> str:
    """PTX of a kernel called `name` that takes one structure of 64-bit words instead of one parameter for each word."""
    entry = re.search(r"\.visible \.entry (\S+)\(([^)]*)\)", text)
    if entry is None:
        raise CompileError(f"{name}: the PTX has no kernel")
    numbas, words = entry[1], entry[2].count(".param")
    declared = [f".param .align 64 .b8 {name}_params[{8 * words}]"]
    declared += [f".param .align 64 .b8 {each}[{_MAP_BYTES}]" for each in maps]
    text = text.replace(entry[0], f".visible .entry {numbas}({', '.join(declared)})")
    text = re.sub(rf"\[{re.escape(numbas)}_param_(\d+)\]", lambda m: f"[{name}_params+{8 * int(m[1])}]", text)
    # Symbols of Numba's runtime, which would clash between kernels.
    text = re.sub(r"^\.common \.global .*NumbaEnv.*;$", "", text, flags=re.MULTILINE)
    return text.replace(numbas, name)


@contextmanager
def _for_capability(capability: tuple[int, ...]) -> Iterator[None]:
    """Compile device functions for this compute capability instead of that of the current device."""
    _override_current_device()
    _compiling.capability = capability
    try:
        yield
    finally:
        del _compiling.capability


@cache
def _override_current_device() -> None:
    from numba.cuda import dispatcher

    get_current_device = dispatcher.get_current_device

    def override() -> Any:
        capability = getattr(_compiling, "capability", None)
        return SimpleNamespace(compute_capability=capability) if capability else get_current_device()

    dispatcher.get_current_device = override


# --- what machine code depends on -------------------------------------------------------------------------------------


@cache
def check() -> None:
    """CompileError if Numba or ptxas cannot be used. Does not import Numba, which is slow."""
    assemble.program()
    if not hasattr(np, "row_stack") and _release("numba-cuda") <= (0, 30, 4):
        installed = f"numba-cuda {version('numba-cuda')} does not work with NumPy {np.__version__}"
        raise CompileError(f"{installed}: pip install 'numpy<2.5'")


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version(package))[:3])


@cache
def _helpers() -> tuple[tuple[str, str], ...]:
    """Name and text of the modules whose functions kernels call."""
    folder = Path(__file__).parent
    paths = (path for pattern in _HELPERS for path in sorted(folder.glob(pattern)))
    return tuple((path.name, path.read_text()) for path in paths)


@cache
def _versions() -> tuple[object, ...]:
    """Versions of Numba and its dependencies, of NVVM, and of ptxas."""
    return (*((name, _version(name)) for name in _PACKAGES), os.environ.get("CUDA_HOME"), assemble.identity())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

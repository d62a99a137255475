"""Kernels in Python to machine code: Numba makes PTX of them, ptxas machine code of that.

Neither needs a device or a driver. Numba passes each word of Params by itself; the PTX is rewritten to take them as one
structure by value, as kernels in CUDA C++ do, so that both are launched alike. What a kernel wants of its launch and
by-value parameters beside Params stand in its mark, `@kernel`.
"""

from __future__ import annotations

import linecache
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...devices.host import no_collection
from ..cuda_common.compiler import CompileError
from . import assemble, params

_MAP_BYTES = 128  # of a tensor map
_PACKAGES = "numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12"
_HELPERS = ("memory.py", "params.py", "compile.py", "assemble.py", "fragments.py", "ptx/*.py")

_compiling = threading.local()


def kernel(threads: int, blocks: int = 1, maps: Sequence[str] = (), cluster: int = 1) -> Callable[[Any], Any]:
    """Mark a function of Params as a kernel: for blocks of so many threads, of which so many are to fit on a
    multiprocessor by their registers; `maps`: names of tensor maps, which are further parameters of 128 bytes by value;
    `cluster`: how many blocks make a cluster.
    """

    def mark(function: Any) -> Any:
        function.kernel = (threads, blocks), tuple(maps), cluster
        return function

    return mark


@dataclass(frozen=True)
class PythonSource:
    """A module's text, whose kernels take Params with so many values of a modification."""

    name: str
    text: str
    values: int

    def made_from(self) -> object:
        return self.text, self.values, _helpers(), _versions()

    def compile(self, arch: str) -> tuple[bytes, str]:
        module = module_of(self.name, self.text)
        with no_collection():
            texts = [_ptx(function, self.values, arch) for function in kernels_of(module).values()]
            return assemble.machine_code(self.name, texts, arch)


def module_of(name: str, text: str) -> dict[str, Any]:
    """Names of the module that the text is."""
    file = f"<flashkit {name} {abs(hash(text)):x}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # for messages
    module: dict[str, Any] = {"__name__": f"flashkit_kernels.{name}"}
    exec(compile(text, file, "exec"), module)
    return module


def kernels_of(module: dict[str, Any]) -> dict[str, Any]:
    """The functions marked as kernels, by name."""
    return {name: value for name, value in module.items() if hasattr(value, "kernel")}


# --- Numba ------------------------------------------------------------------------------------------------------------


def _ptx(function: Any, values: int, arch: str) -> str:
    from numba import cuda

    bounds, maps, cluster = function.kernel
    number, specific = re.fullmatch(r"sm_(\d+)(a?)", arch).groups()  # type: ignore[union-attr]
    capability = int(number) // 10, int(number) % 10
    kind = params.numba_type(values)
    with _for_capability(capability):
        try:
            target = (*capability, specific) if specific else capability
            text, _ = cuda.compile_ptx(function, (kind,), cc=target, launch_bounds=bounds)
        except Exception as error:  # Numba has many kinds
            raise CompileError(f"{function.__name__} does not compile for {arch}: {error}") from error
    return one_structure(text, function.__name__, maps, cluster)


def one_structure(text: str, name: str, maps: Sequence[str], cluster: int = 1) -> str:
    """PTX of a kernel called `name` that takes what Numba's takes word by word as one structure of 64-bit words."""
    entry = re.search(r"\.visible \.entry (\S+)\(([^)]*)\)", text)
    if entry is None:
        raise CompileError(f"{name}: the PTX has no kernel")
    numbas, words = entry[1], entry[2].count(".param")
    declared = [f".param .align 64 .b8 {name}_params[{8 * words}]"]
    declared += [f".param .align 64 .b8 {each}[{_MAP_BYTES}]" for each in maps]
    together = f"\n.explicitcluster\n.reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
    text = text.replace(entry[0], f".visible .entry {numbas}({', '.join(declared)}){together}")
    text = re.sub(rf"\[{re.escape(numbas)}_param_(\d+)\]", lambda m: f"[{name}_params+{8 * int(m[1])}]", text)
    # What Numba's own runtime would look for; several kernels have the same ones.
    text = re.sub(r"^\.common \.global .*NumbaEnv.*;$", "", text, flags=re.MULTILINE)
    # Numba aligns a block's dynamic memory to its elements; kernels read four at once.
    text = re.sub(r"^\.extern \.shared \.align [248] ", ".extern .shared .align 16 ", text, flags=re.MULTILINE)
    return text.replace(numbas, name)


@contextmanager
def _for_capability(capability: tuple[int, ...]) -> Iterator[None]:
    """Numba asks the current device what to compile a device function for; here it is told."""
    _tell()
    _compiling.capability = capability
    try:
        yield
    finally:
        del _compiling.capability


@cache
def _tell() -> None:
    from numba.cuda import dispatcher

    ask = dispatcher.get_current_device

    def told() -> Any:
        capability = getattr(_compiling, "capability", None)
        return SimpleNamespace(compute_capability=capability) if capability else ask()

    dispatcher.get_current_device = told


# --- what machine code depends on -------------------------------------------------------------------------------------


@cache
def check() -> None:
    """Raise, with a sentence, where Numba or ptxas cannot be used. Does not import Numba, which takes a while."""
    assemble.program()
    if not hasattr(np, "row_stack") and _release("numba-cuda") <= (0, 30, 4):
        raise CompileError(f"numba-cuda {version('numba-cuda')} does not work with NumPy {np.__version__}: 2.4 fits")


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version(package))[:3])


@cache
def _helpers() -> tuple[tuple[str, str], ...]:
    """The modules whose functions kernels call."""
    folder = Path(__file__).parent
    paths = (path for pattern in _HELPERS for path in sorted(folder.glob(pattern)))
    return tuple((path.name, path.read_text()) for path in paths)


@cache
def _versions() -> tuple[object, ...]:
    """Of Numba and what it stands on, of NVVM, which makes the PTX, and of the assembler."""
    return (*((name, _version(name)) for name in _PACKAGES), os.environ.get("CUDA_HOME"), assemble.identity())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

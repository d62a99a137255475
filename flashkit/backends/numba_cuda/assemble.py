"""PTX to machine code, by the program ptxas.

nvJitLink does not serve: it assembles relocatable code, for which ptxas ignores setmaxnreg and serialises wgmma.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from ..cuda_common.compiler import CompileError

_PTX = 8, 6
"""The PTX version up to sm_100. NVVM writes its newest version, which an older ptxas does not accept."""


@cache
def program() -> Path:
    """The ptxas of a Python package, else of the CUDA toolkit. CompileError if there is none."""
    for path in _places():
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise CompileError("ptxas is missing: pip install nvidia-cuda-nvcc, or nvidia-cuda-nvcc-cu12")


def _places() -> Iterator[Path]:
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    yield from (packages / folder / "bin" / "ptxas" for folder in ("cu13", "cuda_nvcc"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            yield Path(home) / "bin" / "ptxas"
    if path := shutil.which("ptxas"):
        yield Path(path)
    yield Path("/usr/local/cuda/bin/ptxas")


def identity() -> tuple[object, ...]:
    """Identifies this ptxas without running it."""
    stat = program().stat()
    return str(program()), stat.st_size, stat.st_mtime_ns


@cache
def version() -> str:
    """The version of ptxas, such as 13.0."""
    output = subprocess.run([program(), "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", output)
    return release[1] if release else "of unknown version"


def machine_code(name: str, texts: Sequence[str], arch: str) -> tuple[bytes, str]:
    """Machine code of several PTX texts, and the report of ptxas. CompileError with the output of ptxas."""
    with _files() as (source, target, descriptors):
        source.write_text(_joined(texts, arch))
        command = [str(x) for x in (program(), "-v", f"-arch={arch}", source, "-o", target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=descriptors)
        report = (done.stdout + done.stderr).strip()
        if done.returncode:
            raise CompileError(f"{name} does not assemble for {arch}:\n{report[:8000]}")
        return target.read_bytes(), report


@contextmanager
def _files() -> Iterator[tuple[Path, Path, tuple[int, ...]]]:
    """Two files and their descriptors, in memory where possible: a full disk or a killed process does not matter."""
    with ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            descriptors = tuple(os.memfd_create(name) for name in ("flashkit-ptx", "flashkit-cubin"))
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            source, target = (Path(f"/proc/self/fd/{descriptor}") for descriptor in descriptors)
            yield source, target, descriptors
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flashkit-"))
            yield Path(folder, "kernels.ptx"), Path(folder, "kernels.cubin"), ()


def _joined(texts: Sequence[str], arch: str) -> str:
    """One PTX text, with the header of the first and the PTX version of the kernels."""
    first, *rest = texts
    number = re.search(r"\d+", arch)
    if number and int(number[0]) <= 100:
        first = re.sub(r"^\.version .*$", ".version {}.{}".format(*_PTX), first, count=1, flags=re.MULTILINE)
    return "\n".join(
        [first, *(re.sub(r"^\.(version|target|address_size) .*$", "", x, flags=re.MULTILINE) for x in rest)]
    )

"""The probe of CUDA: driver, devices, CuPy, and the compilers of the kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from typing import Any


def cuda() -> dict[str, Any]:
    """The driver, the devices that nvidia-smi lists, whether CuPy can use one, and the compilers."""
    found: dict[str, Any] = {
        "driver": _driver(), "devices": _devices(), "cupy": _cupy(), "compiler": _nvrtc(), "numba": _numba_cuda(),
    }  # fmt: skip
    return found


def _driver() -> str | None:
    import ctypes

    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    return None


def _devices() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _cupy() -> str:
    if importlib.util.find_spec("cupy") is None:
        return "not installed"
    from ...devices import host

    if device := host.cuda_device():
        return f"uses {device['name']}"
    try:
        import cupy

        return f"installed, finds {cupy.cuda.runtime.getDeviceCount()} devices"
    except Exception as error:
        return f"installed, cannot use a device: {type(error).__name__}: {error}"


def _nvrtc() -> str:
    """NVRTC, which compiles CUDA C++: its version and its architectures, or what is missing."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "none: cuda-bindings is not installed"
    try:
        from ...backends.cuda_common import compiler

        known = compiler.architectures()
        version = ".".join(map(str, compiler.version()))
        return f"NVRTC {version}, for sm_{known[0]} to sm_{known[-1]}"
    except Exception as error:
        return f"cannot be used: {type(error).__name__}: {error}"


def _numba_cuda() -> str:
    """numba-cuda and ptxas, which compile the kernels in Python: their versions, or what is missing."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "none: numba-cuda is not installed"
    try:
        from ...backends.numba_cuda import assemble, compile

        compile.check()
        return f"numba-cuda {importlib.metadata.version('numba-cuda')}, ptxas {assemble.version()}"
    except Exception as error:
        return f"cannot be used: {type(error).__name__}: {error}"

"""The CUDA text of expressions as C++ for this machine: behind kernels/common/scalar.cuh as it is, in float64."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

import flashkit

_SHIM = """
#include <math.h>
#define DEVICE static inline
#define __device__
#define __forceinline__
enum { FLOAT64, FLOAT16, BFLOAT16, STORAGE = FLOAT64, FAST_MATH = 0, MAX_BOX = 1024 };
template <typename To, typename T> To bits_of(T x) { To y; __builtin_memcpy(&y, &x, sizeof y); return y; }
#define __int_as_float bits_of<float>
#define __float_as_uint bits_of<unsigned>
"""
_SCALARS = Path(flashkit.__file__).parent / "backends/cupy_raw/kernels/common/scalar.cuh"


def compiled(text: str, folder: Path, *flags: str) -> ctypes.CDLL:
    """Functions with PTX are in it as long as nothing calls them."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    source, library = folder / "text.cpp", folder / "text.so"
    source.write_text("\n".join([_SHIM, _SCALARS.read_text(), text]))
    command = [compiler, "-std=c++17", "-O1", *flags, "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:3000]
    return ctypes.CDLL(str(library))

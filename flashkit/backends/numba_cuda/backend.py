"""The Numba CUDA backend: generations of kernels written in Python."""

from __future__ import annotations

from pathlib import Path

from ..cuda_common.backend import CudaBackend
from ..cuda_common.simt import Simt
from . import compile, specialise
from .sm80 import Sm80
from .sm90 import Sm90

_HINT = 'pip install "numba-cuda[cu13]" "cupy-cuda13x[ctk]" "cuda-bindings==13.*", or all for CUDA 12'

_SIMT = Simt(specialise.library, left_out=("fp8", "jvp", "orders_sums"))
_SM80 = Sm80(specialise.library, _SIMT)


class NumbaCudaBackend(CudaBackend):
    """Attention on CuPy arrays by kernels in Python that Numba compiles. They are launched like those of cupy_raw."""

    name = "numba_cuda"
    generations = (Sm90(specialise.library, _SM80, _SIMT), _SM80, _SIMT)
    needs = dict.fromkeys(("cupy", "cuda.bindings", "numba_cuda"), _HINT)
    last_resort = True

    def check(self) -> None:
        compile.check()

    def sources(self) -> list[tuple[str, str]]:
        folder = Path(__file__).parent
        return [(str(path.relative_to(folder)), path.read_text()) for path in sorted(folder.rglob("*.py"))]

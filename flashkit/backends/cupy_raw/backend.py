"""The CuPy backend: generations of kernels written in CUDA C++."""

from __future__ import annotations

from ..cuda_common import compiler
from ..cuda_common.backend import CudaBackend
from ..cuda_common.simt import Simt
from . import sm90_mla, specialise
from .sm80 import Sm80
from .sm90 import Sm90

_HINT = 'pip install "cupy-cuda13x[ctk]" "cuda-bindings==13.*", or both for CUDA 12'


_SIMT = Simt(specialise.library)
_SM80 = Sm80(specialise.library, _SIMT)


class CupyRawBackend(CudaBackend):
    """Attention on CuPy arrays by kernels in CUDA C++ that NVRTC compiles."""

    name = "cupy_raw"
    max_head_dim = sm90_mla.MAX_DIM  # simt has any
    generations = (Sm90(specialise.library, _SM80, _SIMT), _SM80, _SIMT)
    needs = dict.fromkeys(("cupy", "cuda.bindings"), _HINT)

    def sources(self) -> list[tuple[str, str]]:
        return list(compiler.headers(specialise.FOLDER))

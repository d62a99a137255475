"""A CUDA device in Python: the kernels that the compilers made, as PTX, run warp by warp on this machine's processor.

`install` puts it where CuPy and the driver would be, so that host code is what users run. What it is for: that kernels
are right, wait for what they need and end, whatever order things happen in. It says nothing of speed.

ptx reads, machine and interpreter run warps, device gives blocks room and turns; cupy and driver are what host code
calls. operations.txt: those that kernels have used so far, compiled together; others make that happen again.
"""

from __future__ import annotations

import sys
from typing import Any


def install(sms: int = 3, seed: int = 1) -> Any:
    """The emulated device, of so many multiprocessors, in this process; `seed`: of what chance decides."""
    from cuda.bindings import driver

    from flashkit.backends.cuda_common import compiler
    from flashkit.backends.numba_cuda import assemble

    from . import cupy
    from .driver import Driver

    cupy.DEVICE.sms = sms
    cupy.DEVICE.seed(seed)
    sys.modules["cupy"] = cupy
    for name, function in Driver(cupy.DEVICE).functions().items():
        setattr(driver, name, function)
    compile_, mark = compiler._compile, "--define-macro=EMULATED"  # tells what is kept on disk apart
    compiler._compile = lambda source, arch: (
        compile_(source, arch.replace("sm", "compute"), "PTX")[0].rstrip(b"\0"),
        "",
    )
    compiler.OPTIONS = (*(option for option in compiler.OPTIONS if "ptxas" not in option), mark)
    compiler._is_machine_code = lambda code: True  # PTX
    assemble.machine_code = lambda name, texts, arch: ("\f".join(texts).encode(), "")
    assemble.identity = lambda: ("emulated",)
    return cupy.DEVICE

"""An emulated CUDA device: the PTX of both CUDA backends, interpreted warp by warp on this machine's processor.

`emulated` puts it in place of CuPy and the driver, so the host code is the one that users run. It tests that kernels
are correct and end, in whatever order their asynchronous operations complete. It says nothing of speed, and nothing of
what hardware alone does, such as the effect of fences.

How a launch runs:

- NVRTC and Numba compile a kernel to PTX instead of machine code. `ptx` parses it into tables: operations, operands and
  constants, all by number.
- `driver` implements the functions of the CUDA driver that flashkit calls, and records the names of launched kernels;
  `cupy` implements what flashkit and its tests use of CuPy. Both enqueue work on the `device`, which runs it when a
  result is read. CTAs (and clusters) become resident on SMs as shared memory, threads and registers permit. While a
  stream captures, launches and copies go to its graph; memory that is freed meanwhile is gone when the graph runs.
- `machine` generates the interpreter: the files of `interpreter/`, and a branch for each arithmetic operation that
  kernels use. Numba compiles it once per machine. `operations.txt` lists the arithmetic operations that kernels have
  used so far; an operation beyond these is added, and the interpreter compiled again.
- A random generator picks the CTA, the warp and the number of instructions that run next. Each lane of a warp has a
  program counter; the lanes with the lowest one run together until they diverge or converge.
- Asynchronous work is late on purpose. Copies and stores of TMA complete at a random moment, or when they are waited
  for; wgmma computes when its group is waited for. Memory and registers start as NaN. So a missing wait makes a result
  wrong. (cp.async and st.async complete at once: a missing wait for these is not found.)
- What hardware leaves undefined is an `EmulationError`: an address outside of any allocation, a misaligned access, a
  barrier with too many arrivals, lanes that never converge, CTAs that wait for each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from flashkit.backends.cuda_common.memory import Workspace

    from .device import Device


@contextmanager
def emulated(sms: int = 3) -> Iterator[Device]:
    """Within the block, the process's CUDA device is the emulated one, with this many SMs."""
    from cuda.bindings import driver

    from flashkit.backends import elf
    from flashkit.backends.cuda_common import compiler, memory, tensor_maps
    from flashkit.backends.numba_cuda import assemble

    from . import cupy
    from .driver import DRIVER

    compile_ = compiler._compile
    options = (*(option for option in compiler.OPTIONS if "ptxas" not in option), "--define-macro=EMULATED")
    with ExitStack() as stack:
        stack.callback(_forget)

        def replace(owner: object, **names: object) -> None:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value))

        stack.callback(_set_cupy, sys.modules.get("cupy"))
        _set_cupy(cupy)
        replace(driver, **DRIVER.functions())
        # The options and the identity are part of a binary's name on disk: PTX and machine code never mix.
        replace(compiler, OPTIONS=options, _compile=lambda source, arch: _ptx(compile_, source, arch))
        replace(elf, alike=lambda code, model: True)  # PTX
        replace(assemble, machine_code=lambda name, texts, arch: ("\f".join(texts).encode(), ""))
        replace(assemble, identity=lambda: ("emulated",))
        replace(memory, _GAP=256)
        replace(memory.Workspace, allocate=_apart(memory.Workspace.allocate))
        replace(tensor_maps.TileCounters, COUNT=2)  # each is used again at once, so it must have been reset
        _forget()
        cupy.DEVICE.sms = sms
        cupy.DEVICE.seed(1)
        yield cupy.DEVICE


def _apart(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Scratch memory in which an access between two parts is an error."""

    from .cupy import DEVICE
    from .device import BASE

    def allocated(parts: Workspace, *arguments: Any) -> Any:
        held, end = allocate(parts, *arguments), 0
        allowed = DEVICE.memory.allowed[held.data.ptr - BASE :]
        for offset, size in parts.parts.values():
            allowed[end:offset] = False
            end = offset + size
        return held

    return allocated


def _set_cupy(module: object) -> None:
    sys.modules.pop("cupy", None)
    if module is not None:
        sys.modules["cupy"] = module  # type: ignore[assignment]


def _ptx(compile_: Callable[..., tuple[bytes, str]], source: Any, arch: str) -> tuple[bytes, str]:
    """Tensor-core kernels for sm80 and those of rows are compiled in a third of the time: loops stay loops, over arrays
    in local memory. Not with wgmma, whose registers would be copied to such arrays before their group is waited for;
    nor simt, whose products would take several times as many steps.
    """
    from flashkit.backends.cuda_common import compiler

    has_wgmma = any("wgmma.mma_async" in text for text in (source.text, *dict(compiler._included(source)).values()))
    more = () if has_wgmma or source.name.startswith("simt") else ("--Ofast-compile=mid",)
    text, _ = compile_(source, arch.replace("sm", "compute"), "PTX", more)
    return text.rstrip(b"\0"), ""


def _forget() -> None:
    """Clear what the process has cached of its device."""
    from flashkit import dispatch
    from flashkit.backends.numba_cuda import compile as numbas
    from flashkit.devices import profiles

    for name, module in list(sys.modules.items()):
        if name.startswith("flashkit.backends.cuda_common."):
            for cached in list(vars(module).values()):
                if hasattr(cached, "cache_clear"):
                    cached.cache_clear()
    numbas._versions.cache_clear()
    profiles.forget()
    dispatch.forget()

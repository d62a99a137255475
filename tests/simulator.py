"""Numba's CUDA kernels run as Python by Numba's simulator, behind the same host code as on a device: choices of
cases.py on standard input, a line each, and for each a line that says what is wrong, or nothing.

Started by test_numba_cuda.py with NUMBA_ENABLE_CUDASIM=1, for a process has either the simulator or the real thing.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import cases
import numpy as np
from operands import OnDevice

from flashkit import dispatch
from flashkit.backends.cuda_common import bwd_preprocess, simt
from flashkit.backends.cuda_common.arguments import Arguments
from flashkit.backends.cuda_common.device import MODELS
from flashkit.backends.numba_cuda import params, specialise
from flashkit.spec import AttentionSpec, Gradients, Operands, Problem, Verdict

TILE = simt.SimtTile(8, 16, 8, 4, 8, 8)


class Simulated:
    """The kernels of one text: what cuda_common.launch.Library is, and Kernel."""

    def __init__(self, module: dict[str, Any], function: Any = None, shared: int = 0) -> None:
        self.module, self.function, self.shared = module, function, shared

    def kernel(self, name: str, device: Any, shared: int = 0) -> Simulated:
        return Simulated(self.module, self.module[name], shared)

    def launch(self, blocks: int, threads: int, arguments: Arguments, stream: int) -> None:
        from numba import cuda

        assert self.function.kernel[0][0] == threads
        with np.errstate(all="ignore"):
            cuda.jit(self.function)[blocks, threads, 0, self.shared](params.of(list(arguments.words)))


def kernels(name: str, spec: AttentionSpec, constants: tuple[tuple[str, int], ...], arch: str) -> Any:
    return Simulated(specialise.simulated(name, spec, dict(constants)))


class SimulatorBackend:
    """flashkit.backends.numba_cuda's simt on NumPy arrays, in tiles of a few rows and keys."""

    name, array_kinds, device_kind, efficiency = "simulator", ("numpy",), "cuda", 1e-9

    def available(self) -> Verdict:
        return Verdict(True)

    def supports(self, problem: Problem) -> Verdict:
        return Verdict(True)

    def plan(self, problem: Problem, profile: Any) -> AttentionSpec:
        return problem.spec

    def forward(self, spec: AttentionSpec, operands: Operands) -> None:
        simt.SimtForward(kernels, spec, MODELS["sm_90a"]).run(Arguments(spec, on_device(operands)), 0)

    def backward(self, spec: AttentionSpec, operands: Operands, gradients: Gradients) -> None:
        arguments = Arguments(spec, on_device(operands))
        arguments.gradients(Gradients(**{n: x if x is None else OnDevice(x) for n, x in vars(gradients).items()}))
        simt.SimtBackward(kernels, spec, MODELS["sm_90a"]).run(arguments, 0)


def on_device(operands: Operands) -> Operands:
    def moved(x: Any) -> Any:
        return OnDevice(x) if isinstance(x, np.ndarray) else x

    lengths, offset = (moved(np.asarray(x, np.int64)) for x in (operands.kv_lengths, operands.q_offset))
    arrays = {name: moved(x) for name, x in operands.arrays.items()}
    given = {name: moved(x) for name, x in vars(operands).items()}
    return Operands(**{**given, "kv_lengths": lengths, "q_offset": offset, "arrays": arrays})


def complaint(choice: cases.Choice) -> str:
    call = cases.build(choice)
    try:
        cases.assert_conforms(cases.run(call, "simulator"), *cases.expected(call))
    except Exception as error:
        return f"{error}\n{traceback.format_exc()}"
    return ""


def main() -> None:
    dispatch.registry()["simulator"] = SimulatorBackend()
    simt.choose = lambda part, spec, device: TILE  # type: ignore[assignment]
    bwd_preprocess.scratch = lambda shape, dtype: OnDevice(np.full(shape, np.nan, dtype))  # type: ignore[assignment]
    for line in sys.stdin:
        print(json.dumps(complaint(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

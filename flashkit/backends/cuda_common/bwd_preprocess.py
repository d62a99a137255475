"""What the backward pass of every generation begins and ends with: numbers of each row, and gradients of the sinks."""

from __future__ import annotations

import math

from ...spec import ITEMSIZE, AttentionSpec
from . import compiler
from .arguments import Arguments
from .device import Device
from .generation import Kernels
from .launch import scratch
from .params import AT

_THREADS = 128  # of a block: kernels/common/bwd_preprocess


class BwdPreprocess:
    """kernels/common/bwd_preprocess for a spec."""

    def __init__(self, kernels: Kernels, spec: AttentionSpec, device: Device) -> None:
        self.library = kernels("common/bwd_preprocess", spec, (), compiler.target(device.capability))
        self._prepare = self.library.kernel("bwd_preprocess", device)
        self._sinks = self.library.kernel("bwd_sinks", device)
        units = -(-spec.head_dim_v * ITEMSIZE[spec.dtype] // 16)
        self._rows = _THREADS // (32 if units > 16 else 16 if units > 8 else 8)

    def prepare(self, arguments: Arguments, stream: int, multiple: int = 1) -> None:
        """Compute `bwd_lse` and `delta` (of Params), with room for a multiple of so many rows in each head, in
        memory that lives as long as the arguments.
        """
        rows = arguments.batch, arguments.heads, -(-arguments.n_q // multiple) * multiple
        memory = scratch((2, *rows), arguments.spec.lse_dtype)
        arguments.alive.append(memory)
        arguments.tensors(bwd_lse=memory[0], delta=memory[1])
        if blocks := -(-math.prod(rows) // self._rows):
            self._prepare.launch(blocks, _THREADS, arguments, stream)

    def finish(self, arguments: Arguments, stream: int) -> None:
        """Gradients of the sinks, where they are asked for."""
        if arguments.words[AT["dsinks"]]:
            self._sinks.launch(arguments.heads, 256, arguments, stream)

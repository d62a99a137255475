"""What the backward pass of every generation begins and ends with: row statistics, and gradients of the sinks."""

from __future__ import annotations

import math

from ...spec import ITEMSIZE, AttentionSpec
from . import compiler
from .arguments import Arguments
from .device import Device
from .generation import Kernels
from .launch import scratch
from .params import AT

_THREADS = 128  # of a CTA: kernels/common/bwd_preprocess


class BwdPreprocess:
    """kernels/common/bwd_preprocess for a spec."""

    def __init__(self, kernels: Kernels, spec: AttentionSpec, device: Device) -> None:
        self.library = kernels("common/bwd_preprocess", spec, (), compiler.target(device.capability))
        self._row_stats = self.library.kernel("bwd_preprocess", device)
        self._sinks = self.library.kernel("bwd_sinks", device)
        row_vecs = -(-spec.head_dim_v * ITEMSIZE[spec.dtype] // 16)
        self._rows_per_cta = _THREADS // (32 if row_vecs > 16 else 16 if row_vecs > 8 else 8)

    def run(self, arguments: Arguments, stream: int, multiple: int = 1) -> None:
        """Compute `bwd_lse` and `delta` (of Params). Each head gets room for a multiple of so many rows, in memory that
        lives as long as the arguments.
        """
        rows = arguments.entries, arguments.heads, arguments.q_tiles(multiple) * multiple
        arguments.set(row_block=multiple)
        row_stats = scratch((2, *rows), arguments.spec.lse_dtype)
        arguments.alive.append(row_stats)
        arguments.tensors(bwd_lse=row_stats[0], delta=row_stats[1])
        if ctas := -(-math.prod(rows) // self._rows_per_cta):
            self._row_stats.launch(ctas, _THREADS, arguments, stream)

    def sink_gradients(self, arguments: Arguments, stream: int) -> None:
        """Gradients of the sinks, if they are asked for."""
        if arguments.words[AT["dsinks"]]:
            self._sinks.launch(arguments.heads, 256, arguments, stream)

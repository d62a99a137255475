"""What the backward pass of every generation begins and ends with: row statistics, and gradients of the sinks."""

from __future__ import annotations

from ...spec import ITEMSIZE
from .arguments import Arguments
from .generation import Pass
from .memory import Workspace
from .params import AT

_THREADS = 128  # of a CTA: kernels/common/bwd_preprocess


class BwdPreprocess:
    """kernels/common/bwd_preprocess for a pass. base_2: kernels fold log2 e into the log-sum-exp that they get."""

    def __init__(self, of: Pass, base_2: bool = True) -> None:
        library, spec = of.compiled("common/bwd_preprocess", {"BASE_2": base_2}), of.spec
        self._row_stats, self._sinks = (library.kernel(name, of.device) for name in ("bwd_preprocess", "bwd_sinks"))
        row_vecs = -(-spec.head_dim_v * ITEMSIZE[spec.dtype] // 16)
        self._rows_per_cta = _THREADS // (32 if row_vecs > 16 else 16 if row_vecs > 8 else 8)

    def place(self, arguments: Arguments, workspace: Workspace, multiple: int = 1) -> int:
        """Room for `bwd_lse` and `delta`, in each head for a multiple of so many rows. Returns the CTAs to run with."""
        rows = arguments.q_tiles(multiple) * multiple
        workspace.words(row_block=multiple)
        for name in ("bwd_lse", "delta"):
            workspace.tensor(name, ITEMSIZE[arguments.spec.lse_dtype], rows)
        return -(-arguments.entries * arguments.heads * rows // self._rows_per_cta)

    def geometry(self, arguments: Arguments) -> tuple[Workspace, int]:
        """Memory for these alone, and the CTAs to run with."""
        workspace = Workspace(arguments)
        return workspace, self.place(arguments, workspace)

    def run(self, arguments: Arguments, stream: int, ctas: int) -> None:
        """Compute `bwd_lse` and `delta`."""
        if ctas:
            self._row_stats.launch(ctas, _THREADS, arguments, stream)

    def sink_gradients(self, arguments: Arguments, stream: int) -> None:
        """Gradients of the sinks, if they are asked for."""
        if arguments.words[AT["dsinks"]]:
            self._sinks.launch(arguments.heads, 256, arguments, stream)

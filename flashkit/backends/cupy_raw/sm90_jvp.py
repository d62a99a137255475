"""The forward pass with tangents on Hopper: kernels/sm90/jvp.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...spec import AttentionSpec, Problem, Verdict
from ..cuda_common import modification, sm90_launch
from ..cuda_common.arguments import ROW_TENSORS, Arguments
from ..cuda_common.generation import Choice, Generation, Kind, TileTables
from ..cuda_common.memory import SmemLayout
from ..cuda_common.sm90_launch import ForwardTile, LaunchGeometry, chunks, padded
from . import distances, sm80_jvp
from .sm90_wgmma import text as wgmma_functions


@dataclass(frozen=True)
class Sm90JvpTile(ForwardTile):
    """A tile of kernels/sm90/jvp.cu."""

    @classmethod
    def of(cls, spec: AttentionSpec) -> Sm90JvpTile:
        """Wide heads leave registers and shared memory for fewer keys, and modified scores take registers."""
        is_wide = max(spec.head_dim, spec.head_dim_v) > 64
        keys = 64 if is_wide else 128
        return cls(128, keys if spec.score is None and not spec.dropout else keys * 3 // 4, turns=int(is_wide))

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        q, v = chunks(spec.head_dim), chunks(spec.head_dim_v)
        return self.lay_out(q, v, v, packed=spec.packed, tangents=spec.jvp)

    def source(self, spec: AttentionSpec, pack: int) -> tuple[dict[str, int], str]:
        """Constants and generated functions of the kernel."""
        constants = {
            **self.common(spec, pack, spec.mask is not None or spec.kv_lengths),
            **modification.forward_constants(spec, distances.reads(spec)),
        }  # fmt: skip
        return constants, wgmma_functions(spec.dtype, [self.block_k], [padded(spec.head_dim_v)])


def supports(spec: AttentionSpec) -> Verdict:
    """What `Sm90.supports` leaves to be asked."""
    return sm80_jvp.supports(spec)


class Sm90Jvp(sm90_launch.Forward):
    """The pass. TMA takes the tensor itself for the tangent that it has not."""

    name = "sm90/jvp"

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        self._tangents = [f"d{name}" if name in problem.spec.jvp else name for name in "qkv"]
        self.addressed = (*dict.fromkeys((*ROW_TENSORS, *self._tangents, "dout")),)
        super().__init__(generation, problem, choice, tables)
        self._nonfinite = sm80_jvp.NonfiniteFallback(self, tables)
        self._distances = distances.Distances(self) if distances.reads(self.spec) else None

    def boxes(self, arguments: Arguments) -> list[tuple[str, int, int, int]]:
        boxes = super().boxes(arguments)
        named = zip((*self._tangents, "dout"), boxes, strict=True)
        return boxes + [(name, dim, heads, rows) for name, (_, dim, heads, rows) in named]

    def launch(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> None:
        held = self._distances and self._distances.fill(arguments, stream)
        self._nonfinite.follow(partial(super().launch, arguments, geometry, stream), arguments, stream)
        del held


KIND = Kind(Sm90JvpTile, Sm90Jvp, lambda problem, _: [Sm90JvpTile.of(problem.spec)], "the only tile", has_rows=False)

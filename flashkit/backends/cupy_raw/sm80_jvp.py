"""The forward pass with tangents on tensor cores by mma.sync: kernels/sm80/jvp.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...spec import AttentionSpec, Problem, Verdict
from ..cuda_common.arguments import Arguments
from ..cuda_common.generation import Choice, Fallback, Generation, Kind, Pass, TileTables
from ..cuda_common.launch import check_grid, scratch
from ..cuda_common.memory import SmemLayout, SmemTile

MAX_DIM = 128
_GRANULE = 16


@dataclass(frozen=True)
class Sm80JvpTile(SmemTile):
    """A tile; a warp has 16 rows."""

    block_q: int = 64
    block_k: int = 64

    @classmethod
    def of(cls, spec: AttentionSpec) -> Sm80JvpTile:
        """Wide heads leave registers for fewer keys."""
        return cls(block_k=64 if max(spec.head_dim, spec.head_dim_v) <= 64 else 32)

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA; tangents that are 0 have none."""
        smem = SmemLayout()
        for name, rows, dim in (("Q", self.block_q, spec.head_dim), ("K", self.block_k, spec.head_dim),
                                ("V", self.block_k, spec.head_dim_v)):  # fmt: skip
            row_bytes = -(-dim // _GRANULE) * _GRANULE * 2
            smem.add(name, rows * row_bytes)
            smem.add(f"D{name}", rows * row_bytes * (name.lower() in spec.jvp))
        return smem

    def constants(self, spec: AttentionSpec) -> dict[str, int]:
        """Constants of the head of kernels/sm80/jvp.cu."""
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.block_q // 16, "GRANULE": _GRANULE,
            "PAGE_RUN": 1, "TF32_TERMS": 1, "PADDED": False, "FAST_MATH": True, "BLOCKS_PER_SM": 2,
            **self.smem(spec).constants(),
        }  # fmt: skip


def supports(spec: AttentionSpec) -> Verdict:
    if spec.dtype not in ("float16", "bfloat16"):
        return Verdict(False, f"tangents of {spec.dtype} are not for these tensor cores")
    if max(spec.head_dim, spec.head_dim_v) > MAX_DIM:
        return Verdict(False, f"tangents of head dims over {MAX_DIM} are not for these tensor cores")
    return Verdict(True)


class NonfiniteFallback:
    """Kernels on CUDA cores after those on tensor cores, which end at once unless these met what is not finite."""

    def __init__(self, of: Pass, tables: TileTables) -> None:
        spec, simt = of.spec, of.generation.below[-1]
        hides = spec.mask is not None or spec.score is not None or spec.dropout
        self._fallback = Fallback(lambda: tables.plan(simt, of.problem), spec, tables) if hides else None

    def follow(self, launch: Callable[[], None], arguments: Arguments, stream: int) -> None:
        """Launch the kernel, and what follows it."""
        if self._fallback is None:
            return launch()
        flag = scratch(1, "int32", zeros=True)
        arguments.set(fallback=flag.data.ptr)
        launch()
        self._fallback.run(arguments, stream)
        arguments.set(fallback=0)
        return None


class Sm80Jvp(Pass):
    """The pass."""

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        library = self.compiled("sm80/jvp", self.tile.constants(self.spec))
        self._kernel = library.kernel("sm80_jvp", self.device, self.tile.shared_memory(self.spec))
        self._nonfinite = NonfiniteFallback(self, tables)

    def geometry(self, arguments: Arguments) -> tuple[int]:
        blocks = arguments.q_tiles(self.tile.block_q) * arguments.heads * arguments.entries
        check_grid(blocks)
        return (blocks,)

    def launch(self, arguments: Arguments, geometry: tuple[int], stream: int) -> None:
        launch = partial(self._kernel.launch, geometry[0], 2 * self.tile.block_q, arguments, stream)
        self._nonfinite.follow(launch, arguments, stream)


KIND = Kind(Sm80JvpTile, Sm80Jvp, lambda problem, _: [Sm80JvpTile.of(problem.spec)], "the only tile", has_rows=False)

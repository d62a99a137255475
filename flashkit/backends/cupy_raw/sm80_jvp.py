"""The forward pass with tangents on tensor cores by mma.sync: kernels/sm80/jvp.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...spec import AttentionSpec, Problem, Verdict
from ..cuda_common import compiler
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, TileTables
from ..cuda_common.launch import check_grid, scratch
from ..cuda_common.memory import SmemLayout
from ..cuda_common.simt import Simt
from ..cuda_common.verify import Fallback
from . import specialise

MAX_DIM = 128
_GRANULE = 16


@dataclass(frozen=True)
class Sm80JvpTile:
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
    """Where a mask may hide what is not finite, kernels on CUDA cores follow those on tensor cores. They end at once
    unless these have met it.
    """

    def __init__(self, problem: Problem, tables: TileTables) -> None:
        spec, simt = problem.spec, Simt(specialise.library)
        hides = spec.mask is not None or spec.score is not None or spec.dropout
        self._fallback = Fallback(lambda: tables.plan(simt, problem), spec, tables.device, "forward") if hides else None

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


class Sm80Jvp:
    """The pass."""

    def __init__(self, problem: Problem, choice: Choice, tables: TileTables) -> None:
        spec, device = problem.spec, tables.device
        self.tile, self.why = choice.tile, choice.why
        constants = tuple(self.tile.constants(spec).items())
        library = specialise.library("sm80/jvp", spec, constants, compiler.target(device.capability))
        self.libraries, self._threads = [library], 2 * self.tile.block_q
        self._kernel = library.kernel("sm80_jvp", device, self.tile.smem(spec).bytes)
        self._nonfinite = NonfiniteFallback(problem, tables)

    def run(self, arguments: Arguments, stream: int) -> None:
        blocks = arguments.q_tiles(self.tile.block_q) * arguments.heads * arguments.entries
        check_grid(blocks)
        if blocks:
            launch = partial(self._kernel.launch, blocks, self._threads, arguments, stream)
            self._nonfinite.follow(launch, arguments, stream)


def choice(spec: AttentionSpec, device: Device) -> Choice | None:
    """The only tile; None where it does not fit."""
    tile = Sm80JvpTile.of(spec)
    fits = tile.smem(spec).bytes <= device.shared_per_block
    return Choice(tile, None, "the only tile") if fits else None

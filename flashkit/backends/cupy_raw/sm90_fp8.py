"""FP8: attention of codes of e4m3 on Hopper's tensor cores, by kernels/sm90/fp8_forward.cu.

Codes have float32 scales: for each row of q, and for each head or each token of k and v. Results are 16-bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedError
from ...spec import AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler, modification, sm90_launch
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, TileTables
from ..cuda_common.memory import SmemLayout
from ..cuda_common.sm90_launch import ForwardTile, fitted, packed, padded
from ..cuda_common.verify import Fallback
from . import specialise
from .sm90_wgmma import E4M3
from .sm90_wgmma import text as wgmma_functions

MAX_DIM = 256
COLUMNS, DEPTH = 16, 32
"""Of a block that is transposed, columns; of a product, the length of the contracted axis."""

_CHUNK = 128  # bytes and columns


@dataclass(frozen=True)
class Sm90Fp8Tile(ForwardTile):
    """A tile of kernels/sm90/fp8_forward.cu."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_k % DEPTH or self.block_k > _CHUNK:
            raise ValueError(f"{self=}: expected block_k a multiple of {DEPTH} up to {_CHUNK}")

    @property
    def threads(self) -> int:
        """V is transposed by a warp group of its own, or by a warp of warp group 0 (fp8_mainloop.cuh)."""
        return 128 * (self.warpgroups + (2 if self.warpgroups < 3 else 1))

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        q, v = (-(-dim // _CHUNK) for dim in (spec.head_dim, spec.head_dim_v))
        smem = self.lay_out(q, v, -(-2 * spec.head_dim_v // _CHUNK), packed=spec.packed)
        smem.add("VT_PIPE", 16 * self.stages, 8)
        smem.add("SCALES", 8)
        smem.add("V_TILES", 8 * self.stages)
        smem.add("KEY_SCALES", 2 * self.warpgroups * 3 * 4 * _CHUNK if spec.fp8 == "token" else 0, 8)
        smem.add("VT", _CHUNK * self.stages * padded(spec.head_dim_v), 1024)
        return smem

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether it fits shared memory and, as far as O, S and PV tell, registers."""
        columns, s = padded(spec.head_dim_v), self.block_k // 2
        # S of a tile is computed beside PV of the one before (OVERLAPS), or takes the registers of PV.
        needed = columns + s + s // 4 if columns <= 128 else columns // 2 + max(s, columns // 4 + s // 4)
        return self.shared_memory(spec) <= device.shared_per_block and needed <= self.registers_of(spec)[0] - 16

    def registers_of(self, spec: AttentionSpec) -> tuple[int, int]:
        """Of a consumer thread, and of a thread of the other warp groups, which classify tiles and transpose V."""
        return (160, 32) if self.warpgroups == 3 else (224, 32)

    def source(self, spec: AttentionSpec, pack: int) -> tuple[dict[str, int], str]:
        """Constants and generated functions of the kernel."""
        columns, (consumer, producer) = padded(spec.head_dim_v), self.registers_of(spec)
        constants = {
            **self.common(spec, pack, True), "FAST_MATH": True, "NUM_TERMS": 1, "FP8": True,
            "SCALES_PER_TOKEN": spec.fp8 == "token", "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
            **modification.forward_constants(spec),
        }  # fmt: skip
        return constants, wgmma_functions(E4M3, [self.block_k], [columns if columns <= 128 else columns // 2])


def forward_candidates(problem: Problem, device: Device) -> list[Sm90Fp8Tile]:
    """Tiles worth measuring."""
    shapes = ((192, 128), (192, 96), (128, 128), (128, 96), (128, 64))
    tiles = [Sm90Fp8Tile(*shape, stages, turns=turns) for shape in shapes for stages in (3, 2) for turns in (1, 0)]
    return [tile for each in tiles if (tile := fitted(each, problem.spec, device))]


def supports(problem: Problem, direction: Direction) -> Verdict:
    """What the kernel refuses beyond the refusals of 16-bit kernels."""
    spec = problem.spec
    if direction == "backward":
        return Verdict(False, "codes of e4m3 have no backward kernels")
    if spec.dtype not in ("float16", "bfloat16"):
        return Verdict(False, f"the kernel for e4m3 gives float16 or bfloat16, and {spec.dtype} is asked for")
    if spec.head_dim % COLUMNS or spec.head_dim_v % COLUMNS:
        return Verdict(False, f"head dims {spec.head_dim} and {spec.head_dim_v} are not multiples of {COLUMNS}")
    if spec.head_dim_v > 128 and spec.head_dim_v % 32:
        return Verdict(False, f"head dim {spec.head_dim_v} of v is over 128 and no multiple of 32")
    if spec.packed or spec.paged or spec.dropout:
        what = "packed sequences" if spec.packed else "keys in pages" if spec.paged else "dropout"
        return Verdict(False, f"{what} have no e4m3 kernel" if not spec.dropout else "the e4m3 kernel has no dropout")
    most = max(problem.n_q, problem.n_k, problem.batch, problem.heads)
    if spec.score is not None and most >= modification.NEAR:
        return Verdict(False, f"a score modification of {most} positions needs 64 bits for each pair")
    return Verdict(True)


class Sm90Fp8Forward(sm90_launch.Forward):
    """The forward pass. Calls whose arrays TMA cannot address come as copies (call/fp8.py), so none is handed on."""

    def __init__(self, problem: Problem, choice: Choice, tables: TileTables) -> None:
        spec, tile, device = problem.spec, choice.tile, tables.device
        constants, functions = tile.source(spec, packed(problem))
        arch = compiler.target(device.capability)
        library = specialise.library("sm90/fp8_forward", spec, tuple(constants.items()), arch, functions)
        fallback = Fallback(_refuse, spec, device, "forward")
        super().__init__(problem, device, tile, choice.why, library, fallback, kernel="sm90_fp8_forward")


def _refuse() -> Any:
    raise UnsupportedError(
        "codes of e4m3 on the GPU need keys, a positive scale, and addresses and strides that are multiples of 16 bytes"
    )

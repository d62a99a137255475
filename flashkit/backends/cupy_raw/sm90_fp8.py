"""FP8: attention of codes of e4m3 on Hopper's tensor cores, by kernels/sm90/fp8_forward.cu.

Codes have float32 scales: for each head, block of tokens or token. Results are 16-bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...spec import AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import modification, sm90_launch
from ..cuda_common.arguments import Arguments
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Generation, Kind, TileTables
from ..cuda_common.launch import TensorMap, scratch
from ..cuda_common.memory import SmemLayout
from ..cuda_common.params import AT
from ..cuda_common.sm90_launch import (
    LIST_CAPACITY,
    LIST_HEADER,
    NUM_LISTS,
    SEQ_SLOT,
    ForwardTile,
    LaunchGeometry,
    padded,
)
from ..cuda_common.tensor_maps import Maps
from .sm90_wgmma import E4M3
from .sm90_wgmma import text as wgmma_functions

MAX_DIM = 256
COLUMNS = 16
"""Of a block that is transposed."""

PROMOTED_KEYS = 2048
"""Keys after which a promoted part is written: PROMOTE_TILES of fp8_softmax.cuh."""

_CHUNK = 128  # bytes and columns


SCALES = "head", "block", "token"
"""The kernel's names for what shares a scale are 1, 2, 3."""


@dataclass(frozen=True)
class Sm90Fp8Tile(ForwardTile):
    """A tile of kernels/sm90/fp8_forward.cu. Its warp groups do not ping-pong."""

    turns: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_k != _CHUNK or self.turns:
            raise ValueError(f"{self=}: expected block_k {_CHUNK} and turns 0")

    def threads(self, spec: AttentionSpec) -> int:
        return 128 * (self.warpgroups + (2 if self._has_transpose_warps(spec) else 1))

    def _has_transpose_warps(self, spec: AttentionSpec) -> bool:
        """Whether a warp group of its own transposes V (TRANSPOSE_WARPS in fp8_softmax.cuh)."""
        return not _gets_vt(spec) and self.warpgroups < 3 and is_narrow(spec)

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        keys, columns, narrow = -(-spec.head_dim // _CHUNK), padded(spec.head_dim_v), is_narrow(spec)
        vt = _CHUNK * (columns + 8 * narrow)  # bytes of a stage of V^T
        gets_vt, barriers, seq = _gets_vt(spec), 16, SEQ_SLOT if spec.packed else 0
        v_stages = self.stages if gets_vt else 2 if narrow else 1
        smem = SmemLayout()
        smem.add("Q", _CHUNK * self.block_q * self.q_buffers * keys)
        smem.add("K", _CHUNK * self.block_k * self.stages * keys)
        smem.add("V", v_stages * (vt if gets_vt else _CHUNK * self.block_k * -(-columns // _CHUNK)))
        smem.add("VT", 0 if gets_vt else self.stages * vt)
        smem.add("PROMOTED", self.warpgroups * _promoted(spec) if self.promotes_in_shared(spec) else 0)
        smem.add("REFERENCES", 0 if narrow else self.warpgroups * 64 * 4)
        smem.add("Q_PIPE", barriers * self.q_buffers)
        smem.add("K_PIPE", barriers * self.stages)
        smem.add("V_PIPE", barriers * v_stages)
        smem.add("VT_PIPE", 0 if gets_vt else barriers * self.stages)
        smem.add("LIST_PIPE", barriers * NUM_LISTS)
        smem.add("CLAIM", 8)
        smem.add("TILE_DESCS", 16 * self.stages, 16)
        smem.add("KEY_SCALES", 2 * self.warpgroups * 3 * 4 * _CHUNK if per(spec) == "token" else 0, 8)
        smem.add("V_TILES", 8 * v_stages)
        smem.add("WORK_TILES", (12 + seq) * (self.q_buffers + 2))
        smem.add("LISTS", NUM_LISTS * (LIST_HEADER + 4 * LIST_CAPACITY))
        smem.add("LIST_SEQS", NUM_LISTS * seq)
        return smem

    def promotes_in_shared(self, spec: AttentionSpec) -> bool:
        """Whether the promoted part of O is in shared memory: of wide heads only where there is one buffer of Q."""
        return is_narrow(spec) or (self.q_buffers == 1 and _gets_vt(spec) and per(spec) != "token")

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether it fits shared memory and, as far as O, S and P tell, registers."""
        narrow = is_narrow(spec)
        needed = padded(spec.head_dim_v) // 2 + self.block_k // 2 + self.block_k // 8 * (1 + narrow)
        if self.shared_memory(spec) > device.shared_per_block or needed > self.registers_of(spec)[0] - 16:
            return False
        gains = self.q_buffers > 1 or self.promotes_in_shared(spec)
        return gains or not replace(self, q_buffers=2).fits(spec, device)

    def registers_of(self, spec: AttentionSpec) -> tuple[int, int]:
        """Of a consumer thread, and of a thread of the other warp groups, which classify tiles and transpose V."""
        if self.warpgroups == 3:
            return 160, 32
        if self._has_transpose_warps(spec):
            return 224, 32
        return self.registers(classifies=is_narrow(spec))  # O, S and P of wide heads leave others the fewest

    def source(self, spec: AttentionSpec, pack: int) -> tuple[dict[str, int], str]:
        """Constants and generated functions of the kernel."""
        columns, (consumer, producer) = padded(spec.head_dim_v), self.registers_of(spec)
        constants = {
            **self.common(spec, pack, True), **modification.forward_constants(spec),
            "FP8": 1 + SCALES.index(per(spec)), "GETS_VT": _gets_vt(spec),
            "PROMOTED_IN_SHARED": self.promotes_in_shared(spec),
            "EXACT_LSE": spec.fp8 is not None and spec.fp8.exact_lse,
            "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
        }  # fmt: skip
        lines = columns + 8 * (is_narrow(spec) and per(spec) != "token")  # of V^T, with those of ones
        return constants, wgmma_functions(E4M3, [self.block_k], [self.block_k, lines])


def per(spec: AttentionSpec) -> str:
    """What shares a scale."""
    assert spec.fp8 is not None
    return spec.fp8.per


def is_narrow(spec: AttentionSpec) -> bool:
    """Whether O leaves registers for two P (IS_NARROW in fp8_softmax.cuh)."""
    return spec.head_dim_v <= 128


def _gets_vt(spec: AttentionSpec) -> bool:
    return spec.fp8 is not None and spec.fp8.transposed


def _promoted(spec: AttentionSpec) -> int:
    """Bytes of the promoted part of O of a warp group: PROMOTED_BYTES."""
    if not is_narrow(spec):  # in float16
        return 64 * 2 * padded(spec.head_dim_v)
    registers = padded(spec.head_dim_v) // 2 + 4 * (per(spec) != "token")
    return (registers // 4 + 1) * 16 * 128


def supports(problem: Problem, direction: Direction) -> Verdict:
    """What the kernel refuses beyond the refusals of 16-bit kernels."""
    spec = problem.spec
    if direction == "backward":
        return Verdict(False, "codes of e4m3 have no backward kernels")
    if spec.dtype not in ("float16", "bfloat16"):
        return Verdict(False, f"the kernel for e4m3 gives float16 or bfloat16, and {spec.dtype} is asked for")
    if spec.head_dim % COLUMNS or spec.head_dim_v % COLUMNS:
        return Verdict(False, f"head dims {spec.head_dim} and {spec.head_dim_v} are not multiples of {COLUMNS}")
    if spec.dropout:
        return Verdict(False, "the e4m3 kernel has no dropout")
    most = max(problem.n_q, problem.n_k, problem.batch, problem.heads)
    if spec.score is not None and most >= modification.NEAR:
        return Verdict(False, f"a score modification of {most} positions needs 64 bits for each pair")
    return Verdict(True)


class Sm90Fp8Forward(sm90_launch.Forward):
    """The forward pass. Calls whose arrays TMA cannot address come as copies (call/codes.py), so none is handed on."""

    name = "sm90/fp8_forward"

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        in_shared = self.tile.promotes_in_shared(self.spec)
        self._promoted = 0 if in_shared else self.tile.warpgroups * _promoted(self.spec)

    def boxes(self, arguments: Arguments) -> list[tuple[str, int, int, int]]:
        q, k, v, _ = super().boxes(arguments)  # consumers store O themselves
        return [q, k] if _gets_vt(arguments.spec) else [q, k, v]

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        found = super().geometry(arguments)
        if found is None or not _gets_vt(arguments.spec):
            return found
        dim, words = arguments.spec.head_dim_v, arguments.words[AT["v"] : AT["v"] + 4]  # (B, H, columns, keys)
        layout = "uint8", *words[1:], words[3], 1, arguments.heads_kv, dim, arguments.entries, dim
        return found._replace(maps=(*found.maps, (AT["v"], Maps(*layout))))

    def maps(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> tuple[list[TensorMap], Any]:
        maps, held = super().maps(arguments, geometry, stream)
        if self._promoted and arguments.n_k > PROMOTED_KEYS:  # a promoted part of O for each CTA, in L2
            held = scratch(geometry.ctas * self._promoted, "int8")
            arguments.words[AT["o_partial"]] = held.data.ptr
        return maps, held


def forward_tiles(problem: Problem, device: Device) -> list[Sm90Fp8Tile]:
    """Tiles worth measuring, of which some may not fit."""
    return [Sm90Fp8Tile(rows, 128, stages) for rows in (192, 128) for stages in (3, 2)]


KIND = Kind(Sm90Fp8Tile, Sm90Fp8Forward, forward_tiles)

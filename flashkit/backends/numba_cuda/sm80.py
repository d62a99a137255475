"""The generation for tensor cores by mma.sync in Python, from Ampere on: kernels/sm80/."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import ITEMSIZE, AttentionSpec, Direction, Problem, Verdict
from ..cuda_common.arguments import ROW_TENSORS, Arguments, strides_are_vector_multiples
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Generation, Kind, Pass, TileTables, supports_16bit
from ..cuda_common.launch import check_grid
from ..cuda_common.memory import SmemLayout, SmemTile, bytes_of_keys, heads_per_l2_group, stage_constants
from ..cuda_common.params import AT
from ..cuda_common.sm80_bwd_launch import LaunchGeometry, MmaBackward

THREADS = 128
_HEADS_PER_L2_GROUP = AT["heads_per_l2_group"]
MAX_DIM = 256
_L2_BYTES = 24_000_000  # of K and V of the heads that CTAs work on at the same time


def row_bytes(dim: int, spec: AttentionSpec) -> int:
    """Bytes of a row in shared memory: whole chunks of 128 bytes."""
    return -(-dim * ITEMSIZE[spec.dtype] // 128) * 128


@dataclass(frozen=True)
class Tile(SmemTile):
    """A tile of the forward pass: 16 or 32 query rows for each of four warps, keys, and stages of K and V."""

    block_q: int
    block_k: int
    stages: int = 2

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128) or self.block_k % 16 or not 16 <= self.block_k <= 128:
            raise ValueError(f"{self=}: expected block_q 64 or 128, block_k a multiple of 16 up to 128")
        if self.stages not in (1, 2):
            raise ValueError(f"{self=}: expected one or two stages")

    def stage(self, spec: AttentionSpec) -> SmemLayout:
        """A stage of K and V."""
        k, v = (self.block_k * row_bytes(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(STAGE_K=k, STAGE_V=v)

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA. O reuses the memory of Q."""
        row = max(row_bytes(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(Q=self.block_q * row, KV=self.stages * self.stage(spec).bytes)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether shared memory suffices, and registers for a lane's part of O."""
        registers = self.block_q == 64 or (spec.head_dim_v <= 128)
        return registers and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        resident = device.shared_per_sm // (self.shared_memory(spec) + 1024)
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "STAGES": self.stages,
            "BLOCKS_PER_SM": min(resident, 2),
            **self.smem(spec).constants(), **stage_constants(self.stage(spec)),
        }  # fmt: skip


class Forward(Pass):
    """The forward pass."""

    addressed = ROW_TENSORS

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        library = self.compiled("sm80/forward", self.tile.constants(self.spec, self.device))
        self._kernel = library.kernel("sm80_forward", self.device, self.tile.shared_memory(self.spec))

    def geometry(self, arguments: Arguments) -> tuple[int, int] | None:
        """CTAs and heads per L2 group; None: shapes or strides need the fallback."""
        supported = arguments.n_k and arguments.positive_scale
        if not (supported and strides_are_vector_multiples(arguments, ROW_TENSORS)):
            return None
        heads = arguments.entries * arguments.heads
        blocks = arguments.q_tiles(self.tile.block_q) * heads
        check_grid(blocks)
        return blocks, heads_per_l2_group(heads, _L2_BYTES // bytes_of_keys(arguments))

    def launch(self, arguments: Arguments, geometry: tuple[int, int], stream: int) -> None:
        blocks, arguments.words[_HEADS_PER_L2_GROUP] = geometry
        self._kernel.launch(blocks, THREADS, arguments, stream)


@dataclass(frozen=True)
class BackwardTile(SmemTile):
    """A tile of the backward pass and its warps, each with 32 rows of every product: kernels/sm80/bwd_layout.py."""

    block_q: int
    block_k: int
    warps: int = 8

    def __post_init__(self) -> None:
        across_s, across_kv = (self.warps * 32 / rows for rows in (self.block_q, self.block_k))
        if self.block_q % 32 or self.block_k % 64 or across_s % 1 or across_kv % 1:
            raise ValueError(
                f"{self=}: expected warps that share the tile in groups of 32 rows, block_k a multiple of 64"
            )
        if self.block_k / across_s % 16 or 64 / across_kv % 16:
            raise ValueError(f"{self=}: expected at least 16 keys and columns for a warp")

    def stage(self, spec: AttentionSpec) -> SmemLayout:
        """A stage of Q and dO, with bwd_lse and delta of their rows; swizzled tiles begin on 1024 bytes."""
        q, dout = (self.block_q * row_bytes(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(STAGE_Q=q, STAGE_DOUT=dout, STAGE_ROWS=1024 * -(-self.block_q // 128))

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA; SCALE holds the softmax scale."""
        fragments = self.block_q * (2 * self.block_k + 16)
        k, v = (self.block_k * row_bytes(dim, spec) for dim in (spec.head_dim, spec.head_dim_v))
        return SmemLayout(K=k, V=v, QDO=2 * self.stage(spec).bytes, P=fragments, DS=fragments, SCALE=4, END=8)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        columns = 64 * -(-spec.head_dim // 64) * self.block_q / (32 * self.warps)  # of dQ for a warp
        return columns % 16 == 0 and self.shared_memory(spec) <= device.shared_per_block

    def constants(self, spec: AttentionSpec, device: Device) -> dict[str, int]:
        return {
            "BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, "WARPS": self.warps,
            "VECTOR_ADDS": device.capability >= (9, 0),
            **self.smem(spec).constants(), **stage_constants(self.stage(spec)),
        }  # fmt: skip


class Backward(MmaBackward):
    """The backward pass. CTAs add to dQ in any order."""

    addressed = "q", "k", "v", "dout", "dq", "dk", "dv"
    ordered = False

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        columns, constants = 64 * -(-problem.spec.head_dim // 64), choice.tile.constants(problem.spec, tables.device)
        super().__init__(generation, problem, choice, tables, constants, columns)

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        supported = arguments.n_k and strides_are_vector_multiples(arguments, self.addressed)
        return super().geometry(arguments) if supported else None


def on_tensor_cores(spec: AttentionSpec, direction: Direction) -> Verdict:
    """Whether the kernels for tensor cores, of Ampere and of Hopper, support q, k and v of this kind."""
    if direction == "backward" and spec.deterministic:
        return Verdict(False, "deterministic gradients run on the simt kernels, which add in one order")
    if spec.packed:
        return Verdict(False, "packed sequences run on the simt kernels")
    if spec.paged:
        return Verdict(False, "paged keys run on the simt kernels")
    return supports_16bit(spec, MAX_DIM)


class Sm80(Generation):
    """Kernels for tensor cores: float16 and bfloat16."""

    name = "sm80"

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        if device.capability < (8, 0):
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, older than sm_80")
        return on_tensor_cores(problem.spec, direction)

    def kind(self, problem: Problem, direction: Direction) -> Kind:
        shapes: list[tuple[int, ...]] = [(128, keys) for keys in (64, 32, 96, 48, 128, 16)]
        shapes += [(64, keys, 1) for keys in (64, 32, 16)]
        if direction == "forward":
            return Kind(Tile, Forward, lambda *_: [Tile(*each) for each in shapes])
        shapes = [(128, 128), (64, 128), (64, 64), (64, 64, 4), (32, 64, 4)]
        return Kind(BackwardTile, Backward, lambda *_: [BackwardTile(*each) for each in shapes])

"""The generation for Hopper in Python, with wgmma, TMA and warp specialization: kernels/sm90, docs/numba_hopper.md.

TMA needs addresses and strides that are multiples of 16 bytes. Calls with other arrays go to the kernels of an older
generation.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...spec import AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import sm90_bwd_launch, sm90_launch
from ..cuda_common.device import Device
from ..cuda_common.generation import Generation, Kind
from ..cuda_common.memory import SmemLayout
from ..cuda_common.sm90_bwd_launch import BackwardTile, cluster_size
from ..cuda_common.sm90_launch import ForwardTile, chunks, padded, work_enough
from .sm80 import on_tensor_cores


@dataclass(frozen=True)
class Tile(ForwardTile):
    """A tile of kernels/sm90/forward.py."""

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        q, v = chunks(spec.head_dim), chunks(spec.head_dim_v)
        return self.lay_out(q, v, v)

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether it fits shared memory and, as far as O, S and P tell, registers."""
        needed = padded(spec.head_dim_v) // 2 + self.block_k // 2 + self.block_k // 4
        available = self.registers(_classifies(spec))[0] - 24
        return self.shared_memory(spec) <= device.shared_per_block and needed <= available

    def source(self, spec: AttentionSpec, pack: int) -> tuple[dict[str, int]]:
        return (self.common(spec, pack, _classifies(spec)),)


def _classifies(spec: AttentionSpec) -> bool:
    """Whether warp group 0 gets more registers: it classifies K/V tiles, or scores are modified."""
    return spec.mask is not None or spec.score is not None or spec.kv_lengths


class Forward(sm90_launch.Forward):
    """The forward pass."""

    @staticmethod
    def packed(problem: Problem) -> int:
        return 1


class Sm90(Generation):
    """Kernels for Hopper with float16 and bfloat16."""

    name = "sm90"

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        if device.capability[0] != 9:
            return Verdict(False, f"the device is sm_{device.capability[0]}{device.capability[1]}, not sm_90")
        if not (able := on_tensor_cores(problem.spec, direction)):
            return able
        if direction == "forward":
            return work_enough(problem, device)
        if cluster_size(problem.spec) > 1:
            return Verdict(False, "gradients of more than 128 columns run on the sm80 kernels")
        return Verdict(True)

    def kind(self, problem: Problem, direction: Direction) -> Kind:
        if direction == "backward":
            return Kind(BackwardTile, sm90_bwd_launch.Backward, sm90_bwd_launch.backward_tiles)
        return Kind(Tile, Forward, _forward_tiles)


def _forward_tiles(problem: Problem, device: Device) -> list[Tile]:
    shapes = itertools.product((192, 128), (128, 144, 112, 96, 160, 80, 64), (1, 0))
    return [Tile(rows, keys, q_buffers=3, turns=turns) for rows, keys, turns in shapes]

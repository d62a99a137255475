"""The generation for Hopper in Python, with wgmma, TMA and warp specialization: kernels/sm90, docs/numba_hopper.md.

TMA needs addresses and strides that are multiples of 16 bytes. Calls with other arrays go to the kernels of an older
generation.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...devices.schema import TileRow
from ...spec import AttentionSpec, Direction, Problem, Verdict
from ..cuda_common import compiler, sm90_bwd_launch, sm90_launch
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Generation, Kernels, Pass, TileTables, tile_of
from ..cuda_common.memory import SmemLayout
from ..cuda_common.sm90_bwd_launch import BackwardTile, backward_candidates, cluster_size
from ..cuda_common.sm90_launch import ForwardTile, chunks, fitted, forward_candidates, padded, work_enough
from ..cuda_common.verify import Fallback
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

    def constants(self, spec: AttentionSpec) -> dict[str, int]:
        return self.common(spec, 1, _classifies(spec))


def _classifies(spec: AttentionSpec) -> bool:
    """Whether warp group 0 gets more registers: it classifies K/V tiles, or scores are modified."""
    return spec.mask is not None or spec.score is not None or spec.kv_lengths


class Forward(sm90_launch.Forward):
    """The forward pass."""

    def __init__(self, generation: Sm90, problem: Problem, choice: Choice, tables: TileTables) -> None:
        spec, device, (tile, _, why) = problem.spec, tables.device, choice
        constants = tuple(tile.constants(spec).items())
        library = generation.kernels("sm90/forward", spec, constants, compiler.target(device.capability))
        fallback = Fallback(partial(generation.older, problem, tables), spec, device, "forward")
        super().__init__(problem, device, tile, why, library, fallback)
        self.pack = 1  # a tile has rows of one head


class Backward(sm90_bwd_launch.Backward):
    """The backward pass."""

    def __init__(self, generation: Sm90, problem: Problem, choice: Choice, tables: TileTables) -> None:
        spec, device, (tile, _, why) = problem.spec, tables.device, choice
        constants, arch = tuple(tile.constants(spec).items()), compiler.target(device.capability)
        library = generation.kernels("sm90/backward", spec, constants, arch)
        fallback = Fallback(partial(generation.older, problem, tables), spec, device, "backward")
        super().__init__(spec, device, tile, why, library, generation.kernels, fallback)


class Sm90(Generation):
    """Kernels for Hopper with float16 and bfloat16. `below`: of these the first that can takes what is left."""

    name = "sm90"
    directions: tuple[Direction, ...] = ("forward", "backward")

    def __init__(self, kernels: Kernels, *below: Generation) -> None:
        self.kernels, self.below = kernels, below

    def older(self, problem: Problem, tables: TileTables) -> Pass:
        """Of the generations below."""
        able = (each for each in self.below if each.supports(problem, tables.device, tables.direction))
        return tables.plan(next(able), problem)

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

    def tile(self, problem: Problem, row: TileRow, device: Device, direction: Direction) -> Any:
        kind = Tile if direction == "forward" else BackwardTile
        return tile_of(kind, row, problem.spec, partial(fitted, device=device))

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        if direction == "backward":
            return list(backward_candidates(problem.spec, device))
        shapes = itertools.product((192, 128), (128, 144, 112, 96, 160, 80, 64), (1, 0))
        return list(forward_candidates(Tile, problem, device, shapes))

    def plan(self, problem: Problem, choice: Choice, tables: TileTables) -> Pass:
        return (Forward if tables.direction == "forward" else Backward)(self, problem, choice, tables)

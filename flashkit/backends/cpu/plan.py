"""Plans of the CPU backend: tiles, how bfloat16 is multiplied, compiled kernels and generated functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...devices.io_model import CpuTile
from ...devices.lazy import cached_property
from ...devices.schema import TileRow
from ...spec import AttentionSpec, Direction, Problem
from . import bf16, modify, objects, specialise
from .micro.register_block import RegisterBlock
from .objects import Functions, Source

DECODE_QUERIES = 8
"""A power of two: with fewer queries per head, kernels/decode.py computes the forward pass."""

DECODE_MIN_KEYS = 16
"""A power of two: the fewest keys for decoding. Below, the forward kernel sums scores in the order of the backward
pass, so that P of a row that sees one key is 1 in both, but for the rounding of the scale.
"""

DECODE_BLOCK_K = 64


@dataclass(frozen=True)
class CpuPlan:
    """Tiles and compiled functions for one spec; functions compile on first use and are unloaded with the plan."""

    problem: Problem
    tile: CpuTile
    backward_tile: CpuTile
    why: str
    row: TileRow | None = None
    """The row of the profile that decided about the tile of the forward pass."""
    bf16_pairs: str = ""
    """The instructions that multiply bf16 pairs (bf16.py); "" where operands are widened, and for other dtypes."""

    @cached_property
    def forward(self) -> Functions:
        """Entries of the kernel of the forward pass: "forward" or "decode"; with tangents, too, "forward"."""
        spec, of = self.problem.spec, specialise.kernel_source
        if self.decodes:
            return objects.kept(of, "decode", spec.dtype, bool(self.decode_bf16_pairs), spec.kv_format)
        return objects.kept(of, "jvp" if spec.jvp else "forward", spec.dtype, bool(self.bf16_pairs))

    @cached_property
    def backward(self) -> Functions:
        """Entries "bwd_preprocess", "backward" and "bwd_postprocess"."""
        return objects.kept(specialise.kernel_source, "backward", self.problem.spec.dtype, bool(self.bf16_pairs))

    @cached_property
    def classify(self) -> Functions:
        """The function that classifies a tile, "classify"; empty without a mask."""
        return self._generated(modify.classify_source) if self.problem.spec.mask is not None else Functions()

    @cached_property
    def modify_forward(self) -> Functions:
        """Functions that the forward pass calls on a tile: "modify"; empty where nothing is modified."""
        if self.problem.spec.jvp:
            return self._generated(modify.jvp_source)
        return self._generated(modify.decode_source if self.decodes else modify.forward_source)

    @cached_property
    def modify_backward(self) -> Functions:
        """The same for the backward pass: "modify" and, with a score modification, "visit_ds"."""
        return self._generated(modify.backward_source)

    def _generated(self, source: Callable[[AttentionSpec], Source]) -> Functions:
        return objects.functions(source(self.problem.spec)) if self.modifies else Functions()

    @cached_property
    def max_group(self) -> int:
        """Tiles that are classified at once."""
        return modify.max_group(self.problem.spec)

    @cached_property
    def transposed_tiles(self) -> int:
        """Tiles of arrays that `modify` reads transposed."""
        return len(modify.transposed_loads(self.problem.spec))

    @property
    def decodes(self) -> bool:
        """Whether kernels/decode.py computes the forward pass."""
        return decodes(self.problem)

    @property
    def decode_bf16_pairs(self) -> str:
        """As bf16_pairs, in decoding: with few queries, AMX tiles would be nearly empty; keys of 8 bits are widened."""
        return self.bf16_pairs if self.bf16_pairs == "avx512bf16" and not self.problem.spec.kv_format else ""

    @property
    def modifies(self) -> bool:
        return self.problem.spec.mask is not None or self.problem.spec.score is not None

    def register_block(self, tile: CpuTile, bf16_pairs: str) -> RegisterBlock:
        """What micro-kernels are compiled for."""
        return RegisterBlock.of(self.problem.spec.dtype, tile, bf16_pairs)


def make_plan(problem: Problem, profile: Any) -> CpuPlan:
    name, reason = bf16.select() if problem.spec.dtype == "bfloat16" else ("", "")
    if problem.spec.stats or problem.spec.jvp:
        name = ""  # P is read in float32
    tile, row, why = choose_tile(problem, profile, "forward", amx=name == "amx")
    backward_tile, *_ = choose_tile(problem, profile, "backward", amx=name == "amx")
    if decodes(problem):
        tile = replace(tile, block_k=DECODE_BLOCK_K)
        why = f"fewer than {DECODE_QUERIES} queries: split over the keys, which are read once (kernels/decode.py)"
    if not name:
        return CpuPlan(problem, tile, backward_tile, why, row)
    if name == "avx512bf16" and not tile.lanes == backward_tile.lanes == 16:
        name, reason = "widen", "the tile has shorter vectors"
    pairs = "" if name == "widen" else name
    return CpuPlan(problem, tile, backward_tile, f"{why}; bfloat16 by {name}: {reason}", row, pairs)


def decodes(problem: Problem) -> bool:
    """Whether reading keys and values takes the time. Problems of one power of two, which share a plan, agree."""
    enough = problem.n_k >= DECODE_MIN_KEYS or problem.spec.paged  # pages have no backward pass
    return problem.n_q < DECODE_QUERIES and enough and not (problem.spec.packed or problem.spec.jvp)


def choose_tile(
    problem: Problem, profile: Any, direction: Direction, *, amx: bool = False
) -> tuple[CpuTile, TileRow | None, str]:
    """The tile of the profile's row, or the model's; the row; and the reason. amx: rows for AMX go first."""
    from ...devices import io_model

    spec, facts = problem.spec, problem.facts
    tables = [f"cpu_amx.{direction}"] * amx + [f"cpu.{direction}"]
    row = next(filter(None, (profile.tile(table, **facts) for table in tables)), None)
    model = io_model.default_cpu(profile, spec.dtype, spec.head_dim, spec.head_dim_v, direction)
    tile, why = io_model.cpu_tile(row, model)
    return tile, row, why

"""The tiled reference as a backend: every feature, nothing to compile, slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...reference import flash_attention_2, flash_attention_backward, standard_jvp, statistics
from ...spec import AttentionSpec, Gradients, Operands, Problem, Verdict
from ..base import EXTRAS


class Tile(NamedTuple):
    block_q: int = 128
    block_k: int = 128


@dataclass(frozen=True)
class Plan:
    """A spec and the tile that computes it; why: for explain()."""

    spec: AttentionSpec
    tile: Tile
    why: str


class ReferenceBackend:
    """FlashAttention-2 of flashkit/reference on NumPy arrays, in the accumulators' dtype."""

    name = "reference"
    array_kinds = ("numpy",)
    device_kind = "cpu"
    efficiency = 0.02
    takes = EXTRAS.keys() - {"fp8"}

    def available(self) -> Verdict:
        return Verdict(True)

    def supports(self, problem: Problem) -> Verdict:
        if problem.array_kind != "numpy":
            return Verdict(False, f"computes on numpy arrays, not on {problem.array_kind} arrays")
        if problem.spec.kv_format:
            return Verdict(False, f"computes on dequantised keys and values, not on {problem.spec.kv_format}")
        return Verdict(True)

    def plan(self, problem: Problem, profile: Any) -> Plan:
        why = "always 128 x 128: products of this size hide most of the interpreter's overhead"
        return Plan(problem.spec, Tile(), why)

    def forward(self, plan: Plan, operands: Operands) -> None:
        spec, dtype = plan.spec, plan.spec.lse_dtype
        if operands.tangents is not None:
            results = operands.out, operands.lse, operands.tangents.out, operands.tangents.lse
            for result, values in zip(results, standard_jvp(spec, operands, dtype, plan.tile.block_q), strict=True):
                result[...] = values
            return
        operands.out[...], operands.lse[...] = flash_attention_2(spec, operands, *plan.tile)
        if operands.stats is not None:
            found = statistics(spec, operands, dtype, plan.tile.block_q)
            operands.stats.entropy[...], operands.stats.max_logit[...] = found["entropy"], found["max_logit"]

    def backward(self, plan: Plan, operands: Operands, gradients: Gradients) -> None:
        for slot in plan.spec.sums:
            shape = np.shape(operands.arrays.get(slot.name, 0.0))
            gradients.values[slot.name] = np.zeros(shape, plan.spec.lse_dtype)
        result = flash_attention_backward(
            plan.spec, operands, gradients.dout, gradients.dlse, *plan.tile, values=gradients.values
        )
        for name, values in result._asdict().items():
            if values is not None and getattr(gradients, name) is not None:  # dsinks is optional
                getattr(gradients, name)[...] = values

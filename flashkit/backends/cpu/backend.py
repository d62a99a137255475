"""The CPU backend: attention on NumPy arrays by kernels that Numba and LLVM compile."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...devices import forking
from ...spec import DTYPES, MAX_HEAD_DIM, Gradients, Operands, Problem, Verdict
from ..base import EXTRAS, Bound, BoundBackward

if TYPE_CHECKING:
    from .plan import CpuPlan


class CpuBackend:
    """Attention on NumPy arrays. Its methods import llvmlite: `available` runs where that is not installed."""

    name = "cpu"
    array_kinds = ("numpy",)
    device_kind = "cpu"
    efficiency = 0.7
    takes_lengths = True
    takes = EXTRAS.keys() - {"fp8"}

    def available(self) -> Verdict:
        missing = [name for name in ("numba", "llvmlite") if find_spec(name) is None]
        return Verdict(not missing, f"{' and '.join(missing)} cannot be imported: pip install numba" if missing else "")

    def supports(self, problem: Problem) -> Verdict:
        spec = problem.spec
        if spec.dtype not in DTYPES:
            return Verdict(False, f"dtype {spec.dtype} is none of {', '.join(DTYPES)}")
        if max(spec.head_dim, spec.head_dim_v) > MAX_HEAD_DIM:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {MAX_HEAD_DIM}")
        if spec.kv_format:
            from .plan import decodes

            if not decodes(problem):
                return Verdict(False, f"only decoding, with few queries, reads keys and values of {spec.kv_format}")
        if spec.jvp and (spec.paged or spec.pe_dim):
            return Verdict(False, "keys in pages or in two arrays have no tangents")
        too_deep = [slot.name for slot in spec.slots if (slot.ndim or 0) > 4]
        if too_deep:
            return Verdict(False, f"modifications: expected arrays of at most 4 axes, not as {', '.join(too_deep)}")
        return Verdict(True)

    def plan(self, problem: Problem, profile: Any) -> CpuPlan:
        with forking.imports:
            from . import passes  # noqa: F401  # so that the methods below import nothing
            from .plan import make_plan
        return make_plan(problem, profile)

    def forward(self, plan: CpuPlan, operands: Operands) -> None:
        self.bind(plan, operands)(operands.q, operands.k, operands.v, operands.out, operands.lse)

    def bind(self, plan: CpuPlan, operands: Operands, per_call: Sequence[str] = ()) -> Bound:
        from .passes import bind_forward

        return bind_forward(plan, operands, per_call)

    def backward(self, plan: CpuPlan, operands: Operands, gradients: Gradients) -> None:
        self.bind_backward(plan, operands, gradients)(operands, gradients)

    def bind_backward(
        self, plan: CpuPlan, operands: Operands, gradients: Gradients, per_call: Sequence[str] = ()
    ) -> BoundBackward:
        from .passes import bind_backward

        return bind_backward(plan, operands, gradients, per_call)

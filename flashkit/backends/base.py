"""What a backend is: five methods. Another package adds one by an entry point of the group `flashkit.backends`."""

from __future__ import annotations

from typing import Any, Protocol

from ..spec import Gradients, Operands, Problem, Verdict


class Backend(Protocol):
    """Realises attention for some kinds of arrays.

    `forward` and `backward` get the plan that `plan` made for the problem; plans are cached and shared by threads,
    so they are not changed afterwards. Both write their results in place.
    """

    name: str
    array_kinds: tuple[str, ...]  # "numpy", "cupy"
    device_kind: str  # whose profile it reads: "cpu" or "cuda"
    efficiency: float  # of the peak rate that it usually reaches; ranks backends that nobody has measured

    def available(self) -> Verdict:
        """Whether it can run on this machine at all, or the sentence that says what is missing."""

    def supports(self, problem: Problem) -> Verdict:
        """Whether it can compute the problem, or the sentence that says why not."""

    def plan(self, problem: Problem, profile: Any) -> Any:
        """Choose the tile by the profile and compile. Has attributes `tile` and `why` for explain()."""

    def forward(self, plan: Any, operands: Operands) -> None:
        """Fill operands.out and operands.lse."""

    def backward(self, plan: Any, operands: Operands, gradients: Gradients) -> None:
        """Fill gradients.dq, dk, dv and dsinks, given operands.out and operands.lse of the forward pass."""

"""What a backend is: five methods, and others that it may have. Another package adds one by an entry point of the group
`flashkit.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..spec import Direction, Gradients, Operands, Problem, Verdict


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


class Waits(Protocol):
    """What a backend may say beyond `Backend`."""

    last_resort: bool  # whether it is chosen only where a profile has measured it, or where no other backend can


class Chooses(Protocol):
    """What a backend may offer beyond `Backend`, where the first row of its tables that matches need not be the one."""

    def row(self, problem: Problem, profile: Any, direction: Direction) -> Any:
        """The profile's row that plan() follows, or None. The problem is one that `supports` said yes to."""


Bound = Callable[..., None]
"""f(q, k, v, out, lse, *arrays): see Binds."""


class Binds(Protocol):
    """What a backend may offer beyond `Backend`, for calls that are repeated on arrays of one form."""

    spares_lse: bool  # whether f takes None for an lse that nobody wants
    takes_arrays: bool  # whether `anew` may name any

    def bind(self, plan: Any, operands: Operands, anew: Sequence[str] = ()) -> Bound:
        """All that `forward(plan, operands)` does before it starts a kernel, done once: f(q, k, v, out, lse).

        f computes what `forward` would with these five arrays in place of the operands' own. They have the
        operands' dtypes, and lie in memory as those do: same extents and strides from the first element on. Their
        axes may be the caller's and not (B, H, N, D), so f reads their addresses and nothing else; extents and
        strides it knows from `operands`. It checks nothing. It keeps no reference to operands.q, k, v, out and lse.

        All else in `operands` (scale, lengths, offsets, sinks, arrays, seed) is bound by reference: it stays alive
        with f, and what is in those arrays when f is called counts. f may be called from several threads at once and
        again while it runs, so what a call writes (argument block, scratch memory) is its own. On a GPU it launches
        on the stream that is current when it is called.

        anew: names of operands.arrays that f gets with each call, f(q, k, v, out, lse, *arrays), and keeps no reference
        to either; they have the form of the operands' own.
        """

"""The protocol of a backend: five methods, and optional members. Another package adds a backend by an entry point of
the group `flashkit.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from ..spec import AttentionSpec, Direction, Gradients, Operands, Problem, Verdict


class Backend(Protocol):
    """Computes attention on some kinds of arrays. Threads share plans, so that neither pass changes one."""

    name: str
    array_kinds: tuple[str, ...]  # "numpy", "cupy"
    device_kind: str  # selects the device profile: "cpu" or "cuda"
    efficiency: float  # typical fraction of the peak FLOP/s; ranks the backend where its profile has no measurement

    def available(self) -> Verdict:
        """Whether the backend runs on this machine, or the sentence that says what is missing."""

    def supports(self, problem: Problem) -> Verdict:
        """Whether the backend computes the problem, or the sentence that says why not."""

    def plan(self, problem: Problem, profile: Any) -> Any:
        """Choose a tile by the profile and compile.

        Returns
        -------
        object
            Passed to `forward` and `backward`. Its attributes `tile`, `why` and `row`, the profile's row that decided
            or None, are for `flashkit.explain`.
        """

    def forward(self, plan: Any, operands: Operands) -> None:
        """Fill operands.out and operands.lse."""

    def backward(self, plan: Any, operands: Operands, gradients: Gradients) -> None:
        """Fill dq, dk, dv and dsinks of the gradients, and make their values, given out and lse of the forward pass."""


EXTRAS = {
    "fp8": "it has no kernels for codes of e4m3",
    "stats": "it has no kernels for statistics",  # `Operands.stats`
    "jvp": "it has no kernels for tangents",  # `Operands.tangents`
    "wrt": "it has no gradients by values of score modifications",  # `Gradients.values`
    "orders_sums": "it sums gradients by values of score modifications in any order",
}
"""Features of a spec that a backend or generation of kernels has to name in its `takes`, and the refusal by others."""

OF_BACKWARD = frozenset(("wrt", "orders_sums"))
"""Of these, what forward passes do without."""


def refused(taker: object, spec: AttentionSpec, direction: Direction = "backward") -> str:
    """Why a backend, or a generation of kernels, is not asked about a spec; "" if it is."""
    asked = EXTRAS if direction == "backward" else EXTRAS.keys() - OF_BACKWARD
    taken: Collection[str] = getattr(taker, "takes", ())
    return next((EXTRAS[name] for name in EXTRAS if name in asked and getattr(spec, name) and name not in taken), "")


Bound = Callable[..., None]
"""f(q, k, v, out, lse, *arrays): see `Optional.bind`."""


BoundBackward = Callable[[Operands, Gradients], None]
"""See `Optional.bind_backward`."""


class Optional(Backend, Protocol):
    """What a backend may have besides. `bind` and `bind_backward` make repeated calls on arrays of one layout cheap."""

    takes: Collection[str]  # names of EXTRAS that it is asked about
    last_resort: bool  # whether it ranks behind the others unless a profile has measured it
    spares_lse: bool  # whether a bound call takes None for an lse that the caller did not request
    takes_lengths: bool  # whether `per_call` may be ("kv_lengths", "q_offset"), and with pages "page_table" behind them

    def rate(self, problem: Problem, profile: Any, direction: Direction) -> float | None:
        """The measured FLOP/s or None, where that is not the rate of the first matching row of its table."""

    def bind(self, plan: Any, operands: Operands, per_call: Sequence[str] = ()) -> Bound:
        """Do once what `forward(plan, operands)` does before it launches a kernel.

        Parameters
        ----------
        plan
            From `plan`.
        operands
            The operands of a first call. Their q, k, v, out and lse give dtypes, extents and strides, and no reference
            to them is kept. All else (scale, lengths, offsets, sinks, arrays, seed) is bound by reference: it stays
            alive with f, and f reads its contents at the time of the call.
        per_call
            Names of operands.arrays, of operands.sequences() or of operands themselves that f gets with each call, in
            the layout of the operands' own, and behind all else of scales: "q_scale", "k_scale", "v_scale". No
            reference to them is kept either. kv_lengths of the operands are then the most that a call may have.

        Returns
        -------
        Bound
            f(q, k, v, out, lse, *arrays) computes what `forward` would with these arrays. They have the operands'
            dtypes and strides, but their axes may be the caller's instead of (B, H, N, D), so f reads their addresses
            and nothing else. f checks nothing. Threads may call it at the same time, so each call has its own argument
            block and scratch memory. On a GPU it launches on the current stream.
        """

    def bind_backward(
        self, plan: Any, operands: Operands, gradients: Gradients, per_call: Sequence[str] = ()
    ) -> BoundBackward:
        """Do once what `backward(plan, operands, gradients)` does before it launches a kernel.

        Parameters
        ----------
        plan, operands, gradients
            Of a first call.
        per_call
            Names of operands.arrays that differ from call to call, in one layout.

        Returns
        -------
        BoundBackward
            f(operands, gradients) computes what `backward` would. Their arrays have the dtypes and strides of those
            here, but their axes may be the caller's, as of `bind`; all else in operands is the same. Of the first ones
            f keeps what `bind` keeps. Threads may call it at the same time.
        """

"""The backward pass of a call, or of all calls of a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from .. import dispatch
from ..backends.base import Backend, BoundBackward
from ..spec import Gradients, Operands, Problem
from . import arrays
from .shape import Shape


class Recorded(NamedTuple):
    """What a backward pass needs of its call."""

    problem: Problem
    operands: Operands
    shape: Shape
    run: BoundBackward


class Backward:
    """Fills gradients, given operands: a function for each choice of `Gradients.values`, made on first use.

    chosen: the backend of the forward pass and its plan. per_call: names of arrays that differ from call to call.
    binds: whether the pass runs for many calls.
    """

    def __init__(
        self, chosen: tuple[Backend, Any], problem: Problem, forced: str | None, per_call: tuple[str, ...] = (),
        binds: bool = False,
    ) -> None:  # fmt: skip
        self._chosen, self._problem, self._forced = chosen, problem, forced
        self._per_call, self._binds = per_call, binds
        self._runs: dict[tuple[str, ...], BoundBackward] = {}

    def __call__(self, operands: Operands, gradients: Gradients) -> None:
        wrt = tuple(gradients.values)
        if (run := self._runs.get(wrt)) is None:
            run = self._runs[wrt] = self._made(wrt, operands, gradients)
        run(operands, gradients)

    def _made(self, wrt: tuple[str, ...], operands: Operands, gradients: Gradients) -> BoundBackward:
        problem, names = self._problem, self._per_call
        if 0 in operands.q.shape[:3]:
            return partial(_zero, problem)
        backend, plan = self._chosen
        if wrt:
            backend, plan = dispatch.plan(replace(problem, spec=replace(problem.spec, wrt=wrt)), self._forced)
        makes_values = getattr(backend, "makes_values", False)
        binds = self._binds and hasattr(backend, "bind_backward") and (makes_values or not wrt)
        if binds and (not names or getattr(backend, "takes_arrays", False)):
            bind: Any = backend.bind_backward  # type: ignore[attr-defined]
            bound: BoundBackward = bind(plan, operands, gradients, *((names,) if names else ()))
            return bound

        def run(operands: Operands, gradients: Gradients) -> None:
            if not makes_values:
                clear_values(problem, operands, gradients)
            backend.backward(plan, operands, gradients)

        return run


def _zero(problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """The gradients of a call without queries."""
    clear_values(problem, operands, gradients)
    for tensor in (gradients.dq, gradients.dk, gradients.dv, gradients.dsinks):
        if tensor is not None:
            tensor[...] = 0


def clear_values(problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """Make the arrays of gradients by values, zero."""
    zeros: Any = arrays.namespace(problem.array_kind).zeros
    for name in gradients.values:
        shape = operands.arrays[name].shape if name in operands.arrays else ()
        gradients.values[name] = zeros(shape, operands.lse.dtype)

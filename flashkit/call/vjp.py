"""The backward pass: `Backward` fills the gradients of a plan's calls, `Vjp` is that of one call for its caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from .. import dispatch
from ..backends.base import Backend, BoundBackward
from ..errors import shown
from ..mods.tracing import graph_name
from ..options import OPTIONS, Role
from ..spec import Gradients, Operands, Problem, reads_of
from . import arrays
from .call import Adapter
from .shape import Shape
from .views import View

TENSORS = "q", "k", "v"
WRT = *TENSORS, "sinks"
"""Names in `wrt` beside those of values of score modifications."""

DIFFERENTIABLE = *WRT, *(name for name, option in OPTIONS.items() if option.role is Role.PAIRS)
"""Arguments with a gradient, where they are floating arrays."""


_MAX_FORMS = 16
"""Choices of gradients and layouts of out, dout and dlse that a plan's backward pass is bound for."""


class Recorded(NamedTuple):
    """What a backward pass needs of its call."""

    problem: Problem
    operands: Operands
    shape: Shape
    backward: Backward


class Backward:
    """Fills gradients by a function for each choice and layout of them, made on first use; binds: for many calls."""

    def __init__(
        self, chosen: tuple[Backend, Any], problem: Problem, forced: str | None, per_call: tuple[str, ...] = (),
        binds: bool = False,
    ) -> None:  # fmt: skip
        self._chosen, self._problem, self._forced = chosen, problem, forced
        self._per_call, self._binds = per_call, binds
        self._runs: dict[Any, tuple[BoundBackward, bool]] = {}

    def __call__(self, operands: Operands, gradients: Gradients) -> None:
        self.bound(operands, gradients)[0](operands, gradients)

    def bound(self, operands: Operands, gradients: Gradients) -> tuple[BoundBackward, bool]:
        """The pass of all calls whose arrays have the layouts of these, and whether it reads no more than addresses."""
        dout, dlse = gradients.dout, gradients.dlse
        form = (
            operands.out.strides, dout.strides, None if dlse is None else dlse.strides, gradients.dsinks is None,
            *gradients.values,
        )  # fmt: skip
        if (known := self._runs.get(form)) is None:
            if len(self._runs) >= _MAX_FORMS:
                self._runs.clear()
            known = self._runs[form] = self._made(tuple(gradients.values), operands, gradients)
        return known

    def _made(
        self, wrt: tuple[str, ...], operands: Operands, gradients: Gradients
    ) -> tuple[BoundBackward, bool]:  # fmt: skip
        problem, names = self._problem, self._per_call
        if 0 in operands.q.shape[:3]:
            return partial(_zero, problem), False
        backend, plan = self._chosen
        if wrt:
            backend, plan = dispatch.plan(replace(problem, spec=replace(problem.spec, wrt=wrt)), self._forced)
        if self._binds and hasattr(backend, "bind_backward"):
            bind: Any = backend.bind_backward
            return bind(plan, operands, gradients, *((names,) if names else ())), True
        return partial(backend.backward, plan), False


def _zero(problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """The gradients of a call without queries."""
    zeros: Any = arrays.namespace(problem.array_kind).zeros
    for name in gradients.values:
        shape = operands.arrays[name].shape if name in operands.arrays else ()
        gradients.values[name] = zeros(shape, operands.lse.dtype)
    for tensor in (gradients.dq, gradients.dk, gradients.dv, gradients.dsinks):
        if tensor is not None:
            tensor[...] = 0


A = TypeVar("A")
"""The array type of the call."""


class Vjp(Generic[A]):
    """The vector-Jacobian product of one call of attention; see `flashkit.attention_vjp`."""

    def __init__(
        self, recorded: Recorded, options: Mapping[str, Any] | None = None, adapters: Sequence[Adapter] = ()
    ) -> None:
        """options: the caller's. adapters: of the call, the outermost first."""
        self.problem, self.operands, self.shape, self.backward = recorded
        self._forms = {
            name: (x.shape, x.dtype) for name, x in (options or {}).items() if hasattr(x, "shape") and x is not None
        }  # of the caller's arrays, in which gradients are returned
        self._adapters = adapters

    def __repr__(self) -> str:
        problem = self.problem
        q, k = self.operands.q.shape, self.operands.k.shape
        return f"<Vjp of attention: q {tuple(q)}, k {tuple(k)} (batch, heads, tokens, dim), {problem.spec.dtype}>"

    def __call__(self, dout: Any, dlse: Any = None, *, wrt: tuple[str, ...] = ("q", "k", "v")) -> tuple[A, ...]:
        """Gradients of sum(out * dout) + sum(lse * dlse).

        Parameters
        ----------
        dout
            Array of out's shape and dtype.
        dlse
            Array of lse's shape and dtype; None is 0.
        wrt
            Inputs to differentiate by: any of "q", "k", "v", "sinks", "bias", "alibi_slopes", "softcap", "mask" where
            it is floating, and "score.NAME" for an array or number NAME of the score modification, floating as well.

        Returns
        -------
        tuple of array
            One gradient for each name in `wrt`, in this order, of the shape and dtype of the input; that of a number
            has no axes, and is float32, or float64 for float64 inputs. Sums over pairs are in these precisions.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 16, 8), dtype=np.float32)
        >>> sinks = np.zeros(2, np.float32)
        >>> (out, lse), vjp = flashkit.attention_vjp(q, k, v, sinks=sinks, return_lse=True)
        >>> dv, dsinks = vjp(np.ones_like(out), np.ones_like(lse), wrt=("v", "sinks"))
        >>> dv.shape, dsinks.shape
        ((1, 2, 16, 8), (2,))

        A bias that all batch entries share, and a table of a modification:

        >>> bias, table = np.zeros((2, 16, 16), np.float32), np.zeros(16, np.float32)
        >>> near = flashkit.mods.score(lambda s, b, h, q, k, *, table: s + table[abs(q - k)], table=table)
        >>> out, vjp = flashkit.attention_vjp(q, k, v, bias=bias, score_mod=near)
        >>> [x.shape for x in vjp(np.ones_like(out), wrt=("bias", "score.table"))]
        [(2, 16, 16), (16,)]
        """
        if type(wrt) is not tuple or wrt != TENSORS:
            self.check_names(wrt)
        with ExitStack() as scopes:
            for adapter in self._adapters:
                scopes.enter_context(adapter.scope())
                native = adapter.to_native(dout=dout, dlse=dlse)
                dout, dlse = native["dout"], native["dlse"]
            gradients = self.gradients(dout, dlse, tuple(wrt))
            for adapter in reversed(self._adapters):
                gradients = tuple(adapter.from_native(f"d{name}", x) for name, x in zip(wrt, gradients, strict=True))
            return gradients

    def check_names(self, wrt: Any) -> None:
        """Refuse names that this call has no gradients by."""
        spec, names = self.problem.spec, self.operands.names
        kinds = {slot.name: slot.kind for slot in spec.slots}
        known = [*WRT[: 3 if self.operands.sinks is None else 4]]
        known += [name for name, slot in names.items() if kinds[slot] == "float"]
        expected = ", ".join(map(repr, known))
        if not isinstance(wrt, tuple | list):
            raise TypeError(f"wrt: expected a tuple of {expected}, got {shown(wrt)}")
        for name in wrt:
            slot = self._slot(name) if isinstance(name, str) and name not in WRT else None
            if slot is not None and kinds[slot] != "float":
                raise TypeError(f"wrt: expected {expected}, got {name!r}, which is {kinds[slot]} and has no derivative")
            if name == "mask" and "mask" in self._forms and slot is None:
                raise TypeError("wrt: expected a floating mask for 'mask', got one of bools, which has no derivative")
            if slot is None and (not isinstance(name, str) or name not in known):
                raise ValueError(f"wrt: expected {expected}, got {shown(name)}")
            if slot is not None and not reads_of(spec.score, slot):
                raise ValueError(
                    f"wrt: the scores have no derivative by {name!r}, which a modification only compares or rounds"
                )

    def slots(self, wrt: tuple[str, ...]) -> dict[str, str]:
        """The slots of those of these names that are values of a score modification."""
        return {name: slot for name in wrt if name not in WRT and (slot := self._slot(name)) is not None}

    def _slot(self, name: str) -> str | None:
        """The slot of a value of a score modification."""
        prefix, _, rest = name.partition(".")
        names = self.operands.names
        return names.get(name) or names.get(f"{prefix}.{graph_name(rest)}")

    def gradients(self, dout: Any, dlse: Any, wrt: tuple[str, ...]) -> tuple[Any, ...]:
        """The gradients of arrays as backends read them."""
        to = self.to_fill(dout, dlse, wrt)
        self.backward(self.operands, to)
        return self.returned(to, wrt)

    def to_fill(self, dout: Any, dlse: Any, wrt: tuple[str, ...]) -> Gradients:
        """Memory for the gradients by these names, and what the pass reads beside the operands."""
        op, shape = self.operands, self.shape
        dtype = op.q.dtype
        kind = self.problem.array_kind
        dout = arrays.own_form_like("dout", dout, kind, shape.sizes(op.out.shape), dtype)
        xp: Any = arrays.namespace(kind)
        if dlse is not None:
            dlse = arrays.own_form_like("dlse", dlse, kind, shape.sizes_of_rows(op.lse.shape), op.lse.dtype)
            dlse = (dlse if arrays.contiguous(dlse) else dlse.copy()).reshape(op.lse.shape)
        empty: Any = dout.empty if type(dout) is View else xp.ndarray  # faster than the library's `empty`
        dq, dk, dv = empty(op.q.shape, dtype), empty(op.k.shape, dtype), empty(op.v.shape, dtype)
        dsinks = xp.empty_like(op.sinks) if "sinks" in wrt else None
        return Gradients(shape.to_four(dout), dlse, dq, dk, dv, dsinks, dict.fromkeys(sorted(self.slots(wrt).values())))

    def returned(self, to: Gradients, wrt: tuple[str, ...]) -> tuple[Any, ...]:
        """The gradients by these names as the caller gets them."""
        shape, dsinks = self.shape, to.dsinks
        if dsinks is not None and "sinks" in self._forms:
            dsinks = dsinks.astype(self._forms["sinks"][1], copy=False)
        found = {"q": shape.like(to.dq), "k": shape.like(to.dk), "v": shape.like(to.dv), "sinks": dsinks}
        found |= {name: self._as_given(name, slot, to.values[slot]) for name, slot in self.slots(wrt).items()}
        return tuple([found[name] for name in wrt])

    def _as_given(self, name: str, slot: str, gradient: Any) -> Any:
        """The gradient by a slot in the shape and dtype of the caller's array."""
        own = self.operands.arrays.get(slot, gradient)
        shape, dtype = self._forms.get(name, (own.shape, own.dtype))
        return self.shape.value_like(gradient, shape).astype(dtype, copy=False)

"""`Planned`: a call of attention with everything done that does not depend on the contents of q, k and v."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import dispatch
from ..backends.base import Backend, Bound
from ..spec import Operands, Problem
from . import arrays, foreign
from .checks import check_out
from .loans import loan_of
from .shape import Shape


class Planned:
    """Attention on arrays of one layout, ready to run. Made by flashkit.plan.

    Threads may call it at the same time.

    Attributes
    ----------
    problem : Problem
        What is computed.
    backend : str
        Name of the backend.
    tile : object
        The tile that the backend chose.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 32), dtype=np.float32)
    >>> planned = flashkit.plan(q, k, v, backend="cpu")
    >>> planned.backend, planned(q, k, v).shape
    ('cpu', (1, 2, 64, 32))
    >>> print(repr(planned)[:72])
    <Planned: float32, batch 1, heads 2, queries 64, keys 64, head dim 32 on
    """

    def __init__(
        self, problem: Problem, operands: Operands, shape: Shape, given: tuple[Any, Any, Any], backend: str | None,
        return_lse: bool, anew: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """anew: names of the operands' arrays that each call of `run` passes."""
        chosen, plan = dispatch.plan(problem, backend)
        self.problem, self.backend, self.tile = problem, chosen.name, plan.tile
        self._return_lse, self._shape = return_lse, shape
        self._asked = backend
        fixed = {name: array for name, array in operands.arrays.items() if name not in anew}
        self._values = tuple(fixed.values())
        self._operands = replace(operands, q=None, k=None, v=None, out=None, lse=None, arrays=fixed)  # for pickles
        self._layouts = tuple(map(arrays.layout, given))
        fours = operands.q, operands.k, operands.v
        binds = hasattr(chosen, "bind") and (not anew or getattr(chosen, "takes_arrays", False))
        # A bound call reads addresses, so each call copies arrays that are not addressable, as attention() does.
        self._copies = binds and not all(map(arrays.same_address, given, fours))
        out, lse = shape.like(operands.out), shape.rows(operands.lse)
        self._out, self._lse, self._dtype = out.shape, (lse.shape, lse.dtype), out.dtype
        self._empty: Any = arrays.namespace(problem.array_kind).ndarray  # faster than its `empty`
        self._spares_lse = binds and not return_lse and getattr(chosen, "spares_lse", False)
        self._run: Bound
        if 0 in operands.q.shape[:3]:
            self._run = _nothing
        elif binds:
            bind: Any = chosen.bind  # type: ignore[attr-defined]
            self._run = bind(plan, operands, anew) if anew else bind(plan, operands)
        else:
            self._run = _forward(chosen, plan, operands, shape, anew)

    def __repr__(self) -> str:
        returned = "(out, lse)" if self._return_lse else "out"
        return f"<Planned: {self.problem.describe()}; {self.backend}, {self.tile}; returns {returned}>"

    def __call__(self, q: Any, k: Any, v: Any, *, out: Any = None) -> Any:
        """Attention of these arrays with the options given to `plan`.

        Parameters
        ----------
        q, k, v
            Arrays of the shapes, strides, dtypes, kind, alignment and device planned for. Strides of axes of length 1
            do not matter.
        out
            Array for the result, of its shape and dtype.

        Returns
        -------
        array or (array, array)
            out, or (out, lse) if the plan was made with return_lse=True.

        Raises
        ------
        TypeError, ValueError
            An array does not fit. The message names it, what came and what would fit.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 32), dtype=np.float32)
        >>> out = np.empty_like(q)
        >>> flashkit.plan(q, k, v)(q, k, v, out=out) is out
        True
        """
        if (arrays.layout(q), arrays.layout(k), arrays.layout(v)) != self._layouts:
            if (loan := loan_of(q, k, v)) is not None:
                with loan.scope():
                    return loan.give_back(self(**loan.borrow(q=q, k=k, v=v, out=out)), out)
            self._check(q, k, v)
        return self.run(q, k, v, out)

    def run(self, q: Any, k: Any, v: Any, out: Any, *anew: Any) -> Any:
        """The call, for arrays that are known to fit."""
        target = out if out is not None and self._fits(out, q, k, v, *anew) else self._empty(self._out, self._dtype)
        lse = None if self._spares_lse else self._empty(*self._lse)
        if self._copies:
            q, k, v = self._shape.to_four(q), self._shape.keys_to_four(k), self._shape.keys_to_four(v)
        self._run(q, k, v, target, lse, *anew)
        if out is None:
            out = target
        elif out is not target:
            out[...] = target
        return (out, lse) if self._return_lse else out

    def _fits(self, out: Any, *read: Any) -> bool:
        """Whether a kernel may write into `out`; an error if it cannot hold the result at all."""
        if type(out) is not np.ndarray or out.shape != self._out or out.dtype != self._dtype or not out.flags.carray:
            check_out(out, self.problem.array_kind, self.problem.spec.dtype, self._out)
        return arrays.contiguous(out) and not any(arrays.may_share(out, x) for x in (*read, *self._values))

    def _check(self, q: Any, k: Any, v: Any) -> None:
        for name, array, planned in zip(("q", "k", "v"), (q, k, v), self._layouts, strict=True):
            arrays.require(name, array, self.problem.array_kind)
            _, shape, strides, dtype, place = planned
            if array.dtype != dtype:
                raise TypeError(f"{name} has dtype {array.dtype}; {dtype}, which the call was planned for, fits")
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}; {shape}, which the call was planned for, fits")
            if any(n > 1 and a != b for n, a, b in zip(shape, array.strides, strides, strict=True)):
                raise ValueError(
                    f"{name} has strides {array.strides}; {strides}, which the call was planned for, fit: copy it, or "
                    "plan a call for such arrays"
                )
            if arrays.layout(array)[-1] != place:
                raise ValueError(
                    f"{name} is {arrays.describe_place(array)}, unlike the array that the call was planned for; copy "
                    "it, or plan a call for such arrays"
                )


def _nothing(*tensors: Any) -> None:
    """The call without queries."""


def _forward(backend: Backend, plan: Any, operands: Operands, shape: Shape, anew: tuple[str, ...]) -> Bound:
    """The forward pass of a backend that cannot bind, or not with arrays that each call passes."""
    rows = operands.lse.shape
    fixed = {name: array for name, array in operands.arrays.items() if name not in anew}
    rest = replace(operands, q=None, k=None, v=None, out=None, lse=None, arrays=fixed)

    def forward(q: Any, k: Any, v: Any, out: Any, lse: Any, *arrays: Any) -> None:
        q, out = map(shape.to_four, (q, out))
        k, v = map(shape.keys_to_four, (k, v))
        named = fixed | dict(zip(anew, arrays, strict=True))
        backend.forward(plan, replace(rest, q=q, k=k, v=v, out=out, lse=lse.reshape(rows), arrays=named))

    return forward


class QuantisingPlan(Planned):
    """A planned call with precision="fp8": each call quantises its arrays first."""

    def __init__(self, planned: Planned) -> None:
        vars(self).update(vars(planned))
        self._planned = planned

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; precision 'fp8'>"

    def __call__(self, q: Any, k: Any, v: Any, *, out: Any = None) -> Any:
        loan: Any = loan_of(q, k, v, "fp8")
        planned = self if isinstance(loan, foreign.Loan) else self._planned
        with loan.scope():
            return loan.give_back(planned(**loan.borrow(q=q, k=k, v=v, out=out)), out)

    def __reduce__(self) -> Any:
        return QuantisingPlan, (self._planned,)

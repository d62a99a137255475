"""Calls that are repeated: everything that depends on the form of arrays and on options, done once.

`Planned` is such a call, and flashkit.plan() makes one. attention() keeps those of its calls (`kept`), by the form of
the arrays, the options and the block mask, so that a repeated call costs a look-up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from .. import dispatch
from ..backends.base import Backend, Bound
from ..mods.block_mask import BlockMask
from ..spec import Operands, Problem
from . import arrays
from .arguments import Shape, check_out

_MOST_KEPT = 256
_MOST_OF_MASK = 1 << 20  # bytes of a block mask that a kept call keeps alive
_kept: OrderedDict[Any, Planned] = OrderedDict()
_kept_lock = threading.Lock()


class Planned:
    """Attention on arrays of one form, ready to run; see flashkit.plan.

    Attributes: problem, what is computed; backend, the name of the one that does; tile, what it chose.
    """

    def __init__(
        self, problem: Problem, operands: Operands, shape: Shape, given: tuple[Any, Any, Any], backend: str | None,
        return_lse: bool, anew: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """anew: names of the operands' arrays that `run` gets with each call."""
        chosen, plan = dispatch.plan(problem, backend)
        self.problem, self.backend, self.tile = problem, chosen.name, plan.tile
        self._return_lse, self._shape = return_lse, shape
        self._values = tuple(array for name, array in operands.arrays.items() if name not in anew)
        self._forms = tuple(map(arrays.form, given))
        fours = operands.q, operands.k, operands.v
        binds = hasattr(chosen, "bind") and (not anew or getattr(chosen, "takes_arrays", False))
        # A bound call reads addresses. What is not addressable is copied in each call, as attention() does.
        self._copies = binds and not all(map(arrays.same_address, given, fours))
        out, lse = shape.like(operands.out), shape.rows(operands.lse)
        self._out, self._lse, self._dtype = out.shape, (lse.shape, lse.dtype), out.dtype
        self._empty: Any = arrays.namespace(problem.array_kind).ndarray  # quicker than its `empty`
        self._spares_lse = binds and not return_lse and getattr(chosen, "spares_lse", False)
        self._run: Bound
        if 0 in operands.q.shape[:3]:
            self._run = _nothing
        elif binds:
            bind: Any = chosen.bind  # type: ignore[attr-defined]
            self._run = bind(plan, operands, anew) if anew else bind(plan, operands)
        else:
            self._run = _forward(chosen, plan, operands, shape, anew)

    def __call__(self, q: Any, k: Any, v: Any, *, out: Any = None) -> Any:
        """out, or (out, lse) with return_lse=True: attention of these arrays with the options given to plan().

        q, k, v: shapes, strides, dtypes and kind of array as planned for (strides of axes of length 1 do not matter).
        out: where to put the result, of its shape and dtype.

        Raises TypeError or ValueError, with the argument's name, what came and what fits.
        """
        if (arrays.form(q), arrays.form(k), arrays.form(v)) != self._forms:
            self._check(q, k, v)
        return self.run(q, k, v, out)

    def run(self, q: Any, k: Any, v: Any, out: Any, *anew: Any) -> Any:
        """The call for arrays that are known to fit."""
        target = out if out is not None and self._fits(out, q, k, v, *anew) else self._empty(self._out, self._dtype)
        lse = None if self._spares_lse else self._empty(*self._lse)
        if self._copies:
            q, k, v = map(self._shape.to_four, (q, k, v))
        self._run(q, k, v, target, lse, *anew)
        if out is None:
            out = target
        elif out is not target:
            out[...] = target
        return (out, lse) if self._return_lse else out

    def _fits(self, out: Any, *read: Any) -> bool:
        """Whether a kernel may write into `out`; raises where it cannot hold the result at all."""
        if type(out) is not np.ndarray or out.shape != self._out or out.dtype != self._dtype or not out.flags.carray:
            check_out(out, self.problem.array_kind, self.problem.spec.dtype, self._out)
        return arrays.contiguous(out) and not any(arrays.may_share(out, x) for x in (*read, *self._values))

    def _check(self, q: Any, k: Any, v: Any) -> None:
        for name, array, planned in zip(("q", "k", "v"), (q, k, v), self._forms, strict=True):
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
            if arrays.form(array)[-1] != place:
                raise ValueError(
                    f"{name} is {arrays.describe_place(array)}, unlike the array that the call was planned for; copy "
                    "it, or plan a call for such arrays"
                )


def _nothing(*tensors: Any) -> None:
    """The call without a query."""


def _forward(backend: Backend, plan: Any, operands: Operands, shape: Shape, anew: tuple[str, ...]) -> Bound:
    """The forward pass of a backend that does not bind, or not while these arrays are open."""
    rows = operands.lse.shape
    fixed = {name: array for name, array in operands.arrays.items() if name not in anew}
    rest = replace(operands, q=None, k=None, v=None, out=None, lse=None, arrays=fixed)

    def forward(q: Any, k: Any, v: Any, out: Any, lse: Any, *arrays: Any) -> None:
        q, k, v, out = map(shape.to_four, (q, k, v, out))
        named = fixed | dict(zip(anew, arrays, strict=True))
        backend.forward(plan, replace(rest, q=q, k=k, v=v, out=out, lse=lse.reshape(rows), arrays=named))

    return forward


# --- the calls of attention() -----------------------------------------------------------------------------------------


def may_keep(block_mask: Any) -> bool:
    """Whether a call with this block mask, or with None, may be kept by it: its arrays, which do not change, live as
    long as the call does, so they have to be small.
    """
    if block_mask is None:
        return True
    if not isinstance(block_mask, BlockMask):
        return False
    return sum(array.nbytes for array in block_mask.mod.arrays.values()) <= _MOST_OF_MASK


def key(tensors: tuple[Any, Any, Any], others: Sequence[Any], options: tuple[Any, ...]) -> Any:
    """A name for a call of attention() that determines all of it but the contents of the arrays; None if there is
    none.

    tensors: q, k, v. others: arrays of modifications or None. options: numbers, flags, strings and None, tuples of
    them, and block masks, of which each equals itself alone. Types belong to the key since True == 1. So does all that
    chooses the backend.
    """
    q, k, v = tensors
    kind = type(q)
    if not kind is type(k) is type(v) or (kind is not np.ndarray and arrays.kind_of(q) != "cupy"):
        return None
    if others and not {kind, type(None)}.issuperset(map(type, others)):
        return None
    of_others = tuple([None if array is None else arrays.form(array) for array in others]) if others else ()
    forms = arrays.form(q), arrays.form(k), arrays.form(v), of_others
    made = forms, options, tuple(map(type, options)), dispatch.state()
    try:
        hash(made)
    except TypeError:
        return None
    return made


def names_of(given: Sequence[Any], operands: Operands) -> tuple[str, ...] | None:
    """What the operands call each of these arrays; None where one of them was copied or reshaped, or may be either of
    two: a kernel reads what it is given by the form of the operands' own.
    """
    found = [
        [
            name
            for name, own in operands.arrays.items()
            if arrays.form(own) == arrays.form(array) and arrays.same_address(array, own)
        ]
        for array in given
    ]
    names = tuple(chain.from_iterable(found))
    return names if all(len(each) == 1 for each in found) and len(set(names)) == len(names) else None


def kept(name: Any) -> Planned | None:
    """The call of this key."""
    with _kept_lock:
        found = _kept.get(name)
        if found is not None:
            _kept.move_to_end(name)
        return found


def keep(name: Any, planned: Planned) -> None:
    with _kept_lock:
        _kept[name] = planned
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)

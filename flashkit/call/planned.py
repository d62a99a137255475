"""`Planned`: a call of attention with everything done that does not depend on the contents of q, k and v, and `Once`: a
prepared call whose plan no other call can use.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import dispatch, mods
from ..backends.base import Bound, BoundBackward
from ..errors import shown
from ..mods import Mod
from ..mods.tracing import values_of
from ..options import OPTIONS
from ..spec import Gradients, Operands
from . import arrays
from .arguments import Prepared, per_token, prepare
from .call import Call
from .checks import check_out
from .compose import check_indices
from .sequences import (
    are_read,
    check_default_offset,
    check_pages,
    kv_lengths_of,
    q_offset_range,
    q_offsets_of,
    table_of,
)
from .views import View
from .vjp import Backward, Recorded

LENGTHS = "kv_lengths", "q_offset", "page_table"
"""What calls of a plan that was made with kv_lengths may pass, in the order of a bound call's arguments."""


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
        self, prepared: Prepared, given: tuple[Any, Any, Any], backend: str | None, return_lse: bool,
        per_call: tuple[str, ...] = (), varies: bool = False, room: int | None = None, fp8: bool = False,
        scales: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """given: q, k and v of a first call. per_call: names of the operands' arrays that each call passes. varies:
        whether calls may pass lengths; see `with_lengths`. room: the most keys of such calls; by default those of k or
        of its pages. fp8: whether calls quantise their arrays first. scales: names of the operands' scales, which each
        call passes behind all else.
        """
        problem, operands, shape = prepared
        self._fp8 = fp8
        chosen, plan = dispatch.plan(problem, backend)
        self.problem, self.backend, self.tile = problem, chosen.name, plan.tile
        self._return_lse, self._shape, self._chosen, self._per_call = return_lse, shape, (chosen, plan), per_call
        self.scales = scales
        self.quantisers: dict[str, Any] = {}  # launches that quantise q, k and v of a call on codes, by name
        self._backward = Backward(self._chosen, problem, dispatch.forced(backend), per_call, binds=True)
        self._asked, self.last_use = backend, 0
        self.request: dict[str, Any] = {}
        fixed = {name: array for name, array in operands.arrays.items() if name not in per_call}
        self._values = tuple(fixed.values())
        self._operands = replace(
            operands, q=None, k=None, v=None, out=None, lse=None, arrays=fixed, stats=None, tangents=None
        )
        if scales:
            self._operands.scales = None
        self._layouts = arrays.layouts(*given)
        fours = operands.q, operands.k, operands.v
        binds = hasattr(chosen, "bind")
        # A bound call reads addresses, so each call copies arrays that are not addressable, as attention() does.
        self._copied = not all(map(arrays.same_address, given, fours))
        self._sizes = tuple([x.shape for x in fours])
        self._copies = binds and self._copied
        self.reads_addresses = binds and not self._copied  # and nothing else: it runs on views of tensors, too
        out, lse = shape.like(operands.out), shape.rows(operands.lse)
        self._out, self._lse, self._dtype = out.shape, (lse.shape, lse.dtype), out.dtype
        self._rows = operands.lse.shape
        self._empty: Any = arrays.namespace(problem.array_kind).ndarray  # faster than its `empty`
        self._spares_lse = binds and not return_lse and getattr(chosen, "spares_lse", False)
        self._run = self._bound(operands, per_call, (), binds)
        self._varies = varies
        self._follows = operands.follows if varies and are_read(problem.spec.score, problem.spec.mask) else None
        self.takes_lengths = binds and getattr(chosen, "takes_lengths", False) and not self._copies
        if varies:
            paged, k = problem.spec.paged, operands.k
            self._room = (k.shape[2] * (operands.page_table.shape[1] if paged else 1)) if room is None else room
            if self.takes_lengths:
                if not paged:  # only its strides count
                    k = np.lib.stride_tricks.as_strided(k, (*k.shape[:2], self._room, k.shape[3]), k.strides)
                operands = replace(operands, k=k, kv_lengths=np.full(problem.batch, self._room, np.int64))
            self._run_at = self._bound(operands, (), LENGTHS if paged else LENGTHS[:2], self.takes_lengths)

    def mods(self) -> tuple[Mod | None, Mod | None]:
        """The joined score modification and mask."""
        spec, own = self.problem.spec, self._operands

        def mod(kind: Any, graph: Any) -> Mod | None:
            if graph is None:
                return None
            names = {name for name, _, _ in values_of(graph)[0]}
            params, values = (
                {name: x for name, x in given.items() if name in names} for given in (own.params, own.arrays)
            )
            return Mod(kind, graph, params, values)

        return mod("score", spec.score), mod("mask", spec.mask)

    def _bound(self, operands: Operands, arrays: tuple[str, ...], lengths: tuple[str, ...], binds: bool) -> Bound:
        """The call of q, k, v, out, lse, arrays and lengths of these names, and scales."""
        (backend, plan), names = self._chosen, (*arrays, *lengths, *self.scales)
        if 0 in operands.q.shape[:3]:
            return _nothing
        if binds:
            bind: Any = backend.bind  # type: ignore[attr-defined]
            bound: Bound = bind(plan, operands, names) if names else bind(plan, operands)
            return bound
        rows, shape, scales = operands.lse.shape, self._shape, self.scales
        fixed = {name: array for name, array in operands.arrays.items() if name not in arrays}
        rest = replace(operands, q=None, k=None, v=None, out=None, lse=None, arrays=fixed)

        def forward(q: Any, k: Any, v: Any, out: Any, lse: Any, *given: Any) -> None:
            named = dict(zip(names, given, strict=True))
            of_keys = [shape.keys_to_four(per_token(named.pop(name), x)) for name, x in zip(scales, (k, v))]
            q, out = map(shape.to_four, (q, out))
            k, v = map(shape.keys_to_four, (k, v))
            own = fixed | {name: named.pop(name) for name in arrays}
            named["scales"] = (None, *of_keys) if scales else rest.scales
            backend.forward(plan, replace(rest, q=q, k=k, v=v, out=out, lse=lse.reshape(rows), arrays=own, **named))

        return forward

    def __repr__(self) -> str:
        returned = "(out, lse)" if self._return_lse else "out"
        fp8 = "; precision 'fp8'" if self._fp8 else ""
        return f"<Planned: {self.problem.describe()}; {self.backend}, {self.tile}; returns {returned}{fp8}>"

    def __reduce__(self) -> Any:
        """What was asked for, not compiled code: loading plans and checks it again, on the machine that loads it."""
        tensors = [(self.problem.array_kind, *rest) for _, *rest in self._layouts]
        return _unpickled, (tensors, self.request, self._asked, self._return_lse, self._fp8)

    def __call__(
        self, q: Any, k: Any, v: Any, *, out: Any = None, kv_lengths: Any = None, q_offset: Any = None,
        page_table: Any = None,
    ) -> Any:  # fmt: skip
        """Attention of these arrays with the options given to `plan`.

        Parameters
        ----------
        q, k, v
            Arrays of the shapes, strides, dtypes, kind, alignment and device planned for. Strides of axes of length 1
            do not matter.
        out
            Array for the result, of its shape and dtype.
        kv_lengths, q_offset, page_table
            As for `attention`, in place of those planned for. A call may pass them if the plan was made with
            kv_lengths, for batches without cu_seqlens; page_table has the shape of the plan's. Without q_offset,
            offsets follow kv_lengths unless `plan` got some. They are checked and copied at each call.

        Returns
        -------
        array or (array, array)
            out, or (out, lse) if the plan was made with return_lse=True.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 32), dtype=np.float32)
        >>> out = np.empty_like(q)
        >>> flashkit.plan(q, k, v)(q, k, v, out=out) is out
        True

        A cache of 64 keys that fills:

        >>> step = flashkit.plan(q[:, :, :1], k, v, kv_lengths=[64])
        >>> for n in (10, 11):
        ...     out = step(q[:, :, :1], k, v, kv_lengths=[n])
        >>> bool((out == flashkit.attention(q[:, :, :1], k, v, kv_lengths=[11])).all())
        True
        """
        q, k, v = arrays.own_forms(q, k, v)
        as_planned = arrays.layouts(q, k, v) == self._layouts and not self._fp8
        if as_planned and kv_lengths is q_offset is page_table is None:
            return self.run_on(q, k, v, out)
        lengths_of_call: Any = {"kv_lengths": kv_lengths, "q_offset": q_offset, "page_table": page_table}
        if self._fp8:
            lengths_of_call["precision"] = "fp8"
        with Call("a planned call", q, k, v, lengths_of_call, out) as call:
            if self._fp8 and call.quantised is not None:
                call.quantised.share_scales(self.request)
            call.dequantise()
            lengths = [call.options[name] for name in LENGTHS]
            planned = all(x is None for x in lengths)
            fits = self.reads_addresses and arrays.layouts(call.q, call.k, call.v) == self._layouts
            if not (fits and planned and call.out is None):  # else the call may be of Views
                call.require_arrays()
                self._check(call.q, call.k, call.v)
            q, k, v, out = call.q, call.k, call.v, call.out
            return call.to_caller(self.run_on(q, k, v, out) if planned else self.with_lengths(q, k, v, out, *lengths))

    def run(self, call: Call) -> Any:
        """The call by this plan, whose key it has."""
        q, k, v, out = call.q, call.k, call.v, call.out
        pairs, axis, lengths, offsets, tokens, follows = call.per_call
        scales = call.scales
        if lengths is not None:
            return self.with_lengths(q, k, v, out, lengths, scales=scales)
        if axis < 0:
            return self.with_keys(q, k, v, out, axis, scales)
        if offsets:
            from ..backends.cuda_common.cu_seqlens import derive

            derived = derive(offsets[0], tokens[0], offsets[1], tokens[1])
            pairs += derived if follows else derived[:-1]
        return self.run_on(q, k, v, out, *pairs, *scales)

    def with_keys(self, q: Any, k: Any, v: Any, out: Any, axis: int, scales: tuple[Any, ...]) -> Any:
        """The call for as many keys as k has along this axis; for arrays that are otherwise as planned."""
        n, batch = k.shape[axis], self.problem.batch
        lengths = np.array([n] * batch, np.int64)  # faster than `full`
        offsets = self._operands.q_offset
        if self._follows is not None:
            offsets = np.array([n - self._follows] * batch, np.int64)
        return self._run_on(self._run_at, q, k, v, out, lengths, offsets, *scales)

    def with_lengths(
        self, q: Any, k: Any, v: Any, out: Any, lengths: Any, offset: Any = None, table: Any = None,
        scales: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        """The call of valid arrays with other lengths, offsets and pages, or with the plan's where they are None."""
        if not self._varies:
            raise TypeError(
                "kv_lengths, q_offset, page_table: expected None for a plan without kv_lengths or with cu_seqlens"
            )
        kind, shape, own = self.problem.array_kind, self._shape, self._operands
        batch, n_q = self.problem.batch, self.problem.n_q
        given, lengths = lengths, own.kv_lengths
        if given is not None:
            lengths = kv_lengths_of(given, kind, shape, batch, self._room)
        if offset is not None:
            offsets = q_offsets_of(offset, kind, shape, batch, lengths, n_q, self._room)
        elif self._follows is None or given is None:
            offsets = own.q_offset
        else:
            offsets = q_offsets_of(None, kind, shape, batch, lengths, self._follows, self._room)
        self._check_positions(lengths, offsets, offset is not None)
        if not self.problem.spec.paged:
            if table is not None:
                raise TypeError("page_table: expected None, since the plan was made without one")
            return self._run_on(self._run_at, q, k, v, out, lengths, offsets, *scales)
        if table is None:
            table = own.page_table
        else:
            table = table_of(table, kind, batch)
            if table.shape != own.page_table.shape:
                raise ValueError(f"page_table: expected shape {own.page_table.shape}, as planned, got {table.shape}")
        check_pages(table, lengths, *k.shape[:2])
        return self._run_on(self._run_at, q, k, v, out, lengths, offsets, table)

    def _check_positions(self, lengths: Any, offsets: Any, has_offsets: bool) -> None:
        """Check what depends on positions; given: whether the caller gave the offsets."""
        problem, n_q = self.problem, self.problem.n_q
        if n_q > 1 and isinstance(self._follows, int) and not has_offsets and not problem.spec.paged:
            check_default_offset(lengths, n_q, (problem.spec.score, problem.spec.mask))
        if self._values:
            reach = q_offset_range(offsets, has_offsets, problem.batch, n_q, self._room)
            for mod in self.mods():
                if mod is not None:
                    check_indices(mod, problem.batch, problem.heads, n_q, self._room, *reach)

    def like_out(self) -> Any:
        """Memory for another result of out's shape and dtype."""
        return self._empty(self._out, self._dtype)

    def like_lse(self) -> Any:
        """The same for lse."""
        return self._empty(*self._lse)

    def run_on(self, q: Any, k: Any, v: Any, out: Any, *per_call: Any) -> Any:
        """The call, for arrays that are known to be valid."""
        return self._run_on(self._run, q, k, v, out, *per_call)

    def recorded(self, call: Call, out: Any, lse: Any, kept: bool = False) -> Recorded:
        """What the backward pass of a call of `run` needs. kept: as of `Once.recorded`."""
        q, k, v, shape = call.q, call.k, call.v, self._shape
        if out.shape != self._out or out.dtype != self._dtype or lse.dtype != self._lse[1]:
            raise ValueError(
                f"stored out and lse: expected shape {self._out} and dtypes {self._dtype} and {self._lse[1]}, as the "
                f"call returned them, got {out.shape}, {out.dtype} and {lse.dtype}"
            )
        four = shape.to_four if self._copied else shape.four_axes
        # Views: the caller may set the shape of an array object.
        q, k, v, out = (x.view() for x in (four(q), four(k), four(v), shape.to_four(out)))
        own = [x.view() for x in call.per_call.arrays]
        return Recorded(self.problem, self._with(q, k, v, out, lse.reshape(self._rows), own), shape, self._backward)

    def _with(self, q: Any, k: Any, v: Any, out: Any, lse: Any, per_call: Sequence[Any]) -> Operands:
        """The operands of a call."""
        made = object.__new__(Operands)
        made.__dict__ = given = vars(self._operands).copy()  # faster than `replace`
        given["q"], given["k"], given["v"], given["out"], given["lse"] = q, k, v, out, lse
        if per_call:
            given["arrays"] = given["arrays"] | dict(zip(self._per_call, per_call, strict=True))
        return made

    def pull_back(
        self, run: BoundBackward, slots: Sequence[str], dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any,
        lse: Any, *per_call: Any,
    ) -> list[Any]:  # fmt: skip
        """The gradients of a call of `run_on` by q, k, v and values in these slots. run: a pass that reads addresses,
        of `Backward.bound` for arrays that are laid out like these.
        """
        empty = q.empty if type(q) is View else self._empty
        dq, dk, dv = [empty(sizes, self._dtype) for sizes in self._sizes]
        to = Gradients(dout, dlse, dq, dk, dv, None, dict.fromkeys(slots))
        operands, shape = self._with(q, k, v, out, lse, per_call), self._shape
        run(operands, to)
        values = [shape.value_like(to.values[slot], operands.arrays[slot].shape) for slot in slots]
        return [shape.like(dq), shape.like(dk), shape.like(dv), *values]

    def _run_on(self, bound: Bound, q: Any, k: Any, v: Any, out: Any, *rest: Any) -> Any:
        lent = type(q) is View  # with memory for the result
        if not self.reads_addresses and type(q) is not np.ndarray:
            q, k, v = (x.view() for x in (q, k, v))  # forms are read again: those of CuPy's arrays may have changed
            self._check(q, k, v)
        empty = q.empty if lent else self._empty
        own = out if out is None or lent else self._writable(out, q, k, v, *rest)
        target = empty(self._out, self._dtype) if own is None else own
        lse = None if self._spares_lse and bound is self._run else empty(*self._lse)
        if self._copies and bound is self._run:
            q, k, v = self._shape.to_four(q), self._shape.keys_to_four(k), self._shape.keys_to_four(v)
        bound(q, k, v, target, lse, *rest)
        if out is None:
            out = target
        elif own is None:
            out[...] = target
        return (out, lse) if self._return_lse else out

    def _writable(self, out: Any, *read: Any) -> Any:
        """A view of `out` that a kernel may write, or None; an error if it cannot hold the result at all."""
        on_host = type(out) is np.ndarray
        if not on_host:
            arrays.require("out", out, self.problem.array_kind)
        out = out.view()
        contiguous = arrays.contiguous(out)
        if out.shape != self._out or out.dtype != self._dtype or not (out.flags.carray if on_host else contiguous):
            check_out(out, self.problem.array_kind, self.problem.spec.dtype, self._out)
        writable = contiguous and not any(arrays.may_share(out, x) for x in (*read, *self._values))
        return out if writable else None

    def _check(self, q: Any, k: Any, v: Any) -> None:
        for name, array, planned in zip(("q", "k", "v"), (q, k, v), self._layouts, strict=True):
            arrays.require(name, array, self.problem.array_kind)
            _, shape, strides, dtype, place = planned
            if array.dtype != dtype:
                raise TypeError(f"{name}: expected dtype {dtype}, as planned, got {array.dtype}")
            if array.shape != shape:
                raise ValueError(f"{name}: expected shape {shape}, as planned, got {array.shape}")
            if any(n > 1 and a != b for n, a, b in zip(shape, array.strides, strides, strict=True)):
                raise ValueError(
                    f"{name}: expected strides {strides}, as planned, got {array.strides}: copy it, or plan a call for "
                    "such arrays"
                )
            if arrays.layout(array)[-1] != place:
                raise ValueError(
                    f"{name}: expected an array like the planned one, got one that is {arrays.describe_place(array)}: "
                    "copy it, or plan a call for such arrays"
                )


def _nothing(*tensors: Any) -> None:
    """The call without queries."""


class Once:
    """A prepared call whose plan no other call can use, because it depends on more than layouts."""

    def __init__(self, prepared: Prepared, backend: str | None, return_lse: bool) -> None:
        self.problem, self.operands, self.shape = prepared
        self._return_lse, self._chosen = return_lse, dispatch.plan(self.problem, backend)
        self._backward = Backward(self._chosen, self.problem, dispatch.forced(backend))

    def run(self, call: Call) -> Any:
        """The result, in `call.out` if that is given."""
        operands, shape, out = self.operands, self.shape, call.out
        if 0 not in operands.q.shape[:3]:
            backend, plan = self._chosen
            backend.forward(plan, operands)
        result = shape.like(operands.out)
        if out is None:
            out = result
        elif not arrays.same_address(out, result):
            out[...] = result
        return (out, shape.rows(operands.lse)) if self._return_lse else out

    def recorded(self, call: Call, out: Any, lse: Any, kept: bool = False) -> Recorded:
        """What the backward pass needs. kept: its results were kept by the caller, and `run` was not called."""
        operands, shape = self.operands, self.shape
        if kept:
            operands.out, operands.lse = shape.to_four(out), lse.reshape(operands.lse.shape)
        elif not self.problem.spec.packed:  # whose lengths are new
            operands.kv_lengths = operands.kv_lengths.copy()  # the caller may change its array between the two passes
        return Recorded(self.problem, operands, shape, self._backward)


def plan_for(
    given: tuple[Any, Any, Any], options: dict[str, Any], backend: str | None, return_lse: bool, fp8: bool
) -> Planned:
    """The plan of `flashkit.plan` for native arrays, with what was asked for, traced and copied, for its pickle."""
    request = {name: _kept(name, value) for name, value in options.items()}
    prepared = prepare(*given, **request)
    spec = prepared.problem.spec
    varies = spec.kv_lengths and not spec.packed
    planned = Planned(prepared, given, backend, return_lse, varies=varies, fp8=fp8)
    planned.request = request | {"deterministic": spec.deterministic}
    return planned


def _kept(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("score_mod", "mask_mod"):
        return mods.trace(value, "score" if name == "score_mod" else "mask")
    return copy.deepcopy(value) if OPTIONS[name].is_integers or name == "sinks" else value


def _unpickled(tensors: Any, options: Any, backend: Any, return_lse: Any, fp8: Any) -> Planned:
    """The plan whose pickled form this is."""
    if not isinstance(tensors, list) or len(tensors) != 3 or not isinstance(options, dict):
        raise ValueError(f"no pickled plan: {shown(tensors)}")
    if not OPTIONS.keys() >= options.keys():
        raise ValueError(f"no options of a plan: {shown(options)}")
    q, k, v = (arrays.laid_out(*each) for each in tensors)
    return plan_for((q, k, v), options, backend, return_lse is True, fp8 is True)

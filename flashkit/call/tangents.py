"""`attention_jvp`: a call with the tangents of q, k and v, and the tangents of its results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..spec import Tangents
from . import arrays
from .arguments import Prepared, prepare
from .call import Call
from .planned import Planned
from .plans import plan_with


def with_tangents(call: Call, backend: str | None, given: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """out, lse and their tangents, native ones. given: "dq", "dk", "dv" and "dsinks", in the library of the call."""
    if call.foreign is not None:
        given = call.foreign.to_native(**given)
    own = own_tangents(call, given)
    read = {f"d{name}": x for name, x in own.items() if x is not None}
    planned = plan_with(call, backend, read | {"dout": None, "dlse": None}, partial(prepared_with, call, own))
    if isinstance(planned, Planned):
        dout, dlse = planned.like_out(), planned.like_lse()
        out, lse = planned.run_on(call.q, call.k, call.v, None, *call.per_call.arrays, *read.values(), dout, dlse)
        return out, lse, dout, dlse
    out, lse = planned.run(call)
    op, tangents, dsinks = planned.operands, planned.operands.tangents, given.get("dsinks")
    assert tangents is not None
    if dsinks is not None:  # P of a sink is exp(sink - lse), and it has no value
        xp: Any = arrays.namespace(planned.problem.array_kind)
        moved = xp.exp(op.sinks[:, None] - op.lse) * dsinks.astype(op.lse.dtype)[:, None]
        tangents.lse[...] += moved
        tangents.out[...] -= (moved[..., None] * op.out).astype(op.out.dtype)
    return out, lse, planned.shape.like(tangents.out), planned.shape.rows(tangents.lse)


def own_tangents(call: Call, given: dict[str, Any]) -> dict[str, Any]:
    """The tangents of q, k and v by these names, checked, as arrays like these. One of them is not None."""
    call.dequantise()
    call.require_arrays()
    primals, kind = {"q": call.q, "k": call.k, "v": call.v}, arrays.require("q", call.q)
    own = {name: _checked(f"d{name}", given[f"d{name}"], name, x, kind) for name, x in primals.items()}
    if all(x is None for x in own.values()):
        xp: Any = arrays.namespace(kind)
        own["v"] = xp.zeros(call.v.shape, call.v.dtype)
    return own


def prepared_with(call: Call, own: dict[str, Any]) -> Prepared:
    """The call, prepared, with these tangents and arrays for those of its results."""
    prepared = prepare(call.q, call.k, call.v, out=call.out, **call.options)
    problem, operands, shape = prepared
    xp: Any = arrays.namespace(problem.array_kind)
    jvp = "".join(name for name, x in own.items() if x is not None)
    batch, heads, n_q, dim = operands.out.shape
    of_out = shape.empty(xp.empty, batch, heads, n_q, dim, operands.out.dtype)
    of_lse = xp.empty(operands.lse.shape, operands.lse.dtype)
    given_four = [None if x is None else shape.to_four(x) for x in own.values()]
    operands.tangents = Tangents._make([*given_four, of_out, of_lse])
    return prepared._replace(problem=replace(problem, spec=replace(problem.spec, jvp=jvp)))


def _checked(name: str, array: Any, of: str, primal: Any, kind: str) -> Any:
    """A tangent, of the shape and dtype of its primal; None for 0, also JAX's zeros without elements, float0."""
    if array is None or getattr(getattr(array, "dtype", None), "names", None) == ("float0",):
        return None
    return arrays.own_form_like(name, array, kind, primal.shape, primal.dtype, f" ({of}'s)")

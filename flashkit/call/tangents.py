"""`attention_jvp`: a call with the tangents of q, k and v, and the tangents of its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..spec import Tangents
from . import arrays
from .arguments import Prepared, prepare
from .call import Call
from .planned import Once


def with_tangents(call: Call, backend: str | None, given: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """out, lse and their tangents, native ones. given: "dq", "dk", "dv" and "dsinks", in the library of the call."""
    if call.foreign is not None:
        given = call.foreign.to_native(**given)
    prepared = prepared_with(call, given)
    out, lse = Once(prepared, backend, True).run(call)
    op, tangents, dsinks = prepared.operands, prepared.operands.tangents, given.get("dsinks")
    assert tangents is not None
    if dsinks is not None:  # P of a sink is exp(sink - lse), and it has no value
        xp: Any = arrays.namespace(prepared.problem.array_kind)
        moved = xp.exp(op.sinks[:, None] - op.lse) * dsinks.astype(op.lse.dtype)[:, None]
        tangents.lse[...] += moved
        tangents.out[...] -= (moved[..., None] * op.out).astype(op.out.dtype)
    return out, lse, prepared.shape.like(tangents.out), prepared.shape.rows(tangents.lse)


def prepared_with(call: Call, given: dict[str, Any]) -> Prepared:
    """The call, prepared, with these tangents, checked, and arrays for those of its results."""
    call.dequantise()
    call.require_arrays()
    primals = {"q": call.q, "k": call.k, "v": call.v}
    prepared = prepare(call.q, call.k, call.v, out=call.out, **call.options)
    problem, operands, shape = prepared
    xp: Any = arrays.namespace(problem.array_kind)
    own = {name: _checked(f"d{name}", given[f"d{name}"], name, x, problem.array_kind) for name, x in primals.items()}
    if all(x is None for x in own.values()):
        own["v"] = xp.zeros(primals["v"].shape, primals["v"].dtype)
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
    array = arrays.own_form(name, array, kind)
    if array.dtype != primal.dtype:
        raise TypeError(f"{name}: expected dtype {primal.dtype} ({of}'s), got {array.dtype}")
    if array.shape != primal.shape:
        raise ValueError(f"{name}: expected shape {primal.shape} ({of}'s), got {array.shape}")
    return array

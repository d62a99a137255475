"""Derivatives of attention in JAX, of every mode up to the second order: one primitive that is linear in some of its
arguments, of four kinds.

    tangent      tangents of q, k, v and sinks to those of out and lse           transposed: pull_back
    pull_back    cotangents of out and lse to those of these, and of arrays      transposed: tangent
    second       the derivative of either along a direction u of q, k and v, pulled back to these; symmetric
    curvature    the derivative of `tangent` along u: it is only transposed, to `second`, as no kernel computes it

`tangent` and `pull_back` also get the results that the primal call has had, out and lse, as what they are: functions of
q, k and v, which are differentiated by these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..errors import UnsupportedError
from .vjp import DIFFERENTIABLE, TENSORS

Arrays = dict[str, Any]
_LIKE = {"dout": "out", "dlse": "lse"} | {f"d{name}": name for name in DIFFERENTIABLE}
"""The argument whose shape and dtype a result has."""

_LINEAR = {
    "tangent": tuple(f"d{name}" for name in DIFFERENTIABLE),
    "pull_back": ("dout", "dlse"), "second": ("uq", "uk", "uv"),
    "curvature": ("uq", "uk", "uv"),
}  # fmt: skip

derivative_p = Primitive("flashkit_derivative")
derivative_p.multiple_results = True
_evaluate: list[Callable[..., Any]] = []


def evaluated_by(evaluate: Callable[..., Any]) -> None:
    """Set evaluate(kind, static, arrays, results, extra), which computes results of these shapes in a program."""
    _evaluate[:] = [evaluate]


def bind(kind: str, static: Any, arrays: Arrays, results: tuple[str, ...], extra: int = 0) -> Arrays:
    """The results of these names. extra: axes that vmap has put before those of each array."""
    names = tuple(arrays)
    found = derivative_p.bind(*arrays.values(), kind=kind, static=static, names=names, results=results, extra=extra)
    return dict(zip(results, found, strict=True))


def _shapes(arrays: Arrays, results: tuple[str, ...], extra: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    lead = np.broadcast_shapes(*(x.shape[:extra] for x in arrays.values()))
    return {name: ((*lead, *(like := arrays[_LIKE[name]]).shape[extra:]), like.dtype) for name in results}


@derivative_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract(*avals: Any, kind: str, static: Any, names: Any, results: Any, extra: int) -> Any:
    shapes = _shapes(dict(zip(names, avals, strict=True)), results, extra)
    return [avals[0].update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in shapes.values()]


def _compute(*values: Any, kind: str, static: Any, names: Any, results: Any, extra: int) -> Any:
    if kind == "curvature":
        raise UnsupportedError(
            "flashkit has no forward-mode derivative of a forward-mode derivative: use jax.grad in one"
        )
    arrays = dict(zip(names, values, strict=True))
    if kind == "tangent" and (by := [name for name in DIFFERENTIABLE[4:] if f"d{name}" in arrays]):
        raise UnsupportedError(
            f"flashkit has no forward-mode derivative by {by[0]}: pass jax.lax.stop_gradient({by[0]}), or use jax.grad"
        )
    shapes = {name: jax.ShapeDtypeStruct(*x) for name, x in _shapes(arrays, results, extra).items()}
    found = _evaluate[0](kind, static, arrays, shapes, extra)
    return [found[name] for name in results]


@derivative_p.def_impl  # type: ignore[untyped-decorator]
def _impl(*values: Any, **params: Any) -> Any:
    return jax.jit(lambda *values: derivative_p.bind(*values, **params))(*values)


mlir.register_lowering(derivative_p, mlir.lower_fun(_compute, multiple_results=True))


def _jvp(primals: Any, tangents: Any, *, kind: str, static: Any, names: Any, results: Any, extra: int) -> Any:
    arrays = dict(zip(names, primals, strict=True))
    moved = {n: t for n, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero and n not in ("out", "lse")}
    found = bind(kind, static, arrays, results, extra)
    linear = {*_LINEAR[kind], *(("dout", "dlse") if kind == "second" else ())}
    parts: list[Arrays] = []
    own = {name: t for name, t in moved.items() if name in linear}
    fixed = {name: x for name, x in arrays.items() if name not in linear}
    if kind == "second":  # linear in two groups of arguments
        for group in (_LINEAR["second"], ("dout", "dlse")):
            if inside := {name: t for name, t in own.items() if name in group}:
                rest = {name: x for name, x in arrays.items() if name in linear and name not in group}
                parts.append(bind(kind, static, {**fixed, **rest, **inside}, results, extra))
    elif own:
        parts.append(bind(kind, static, {**fixed, **own}, results, extra))
    if direction := {f"u{name}": moved[name] for name in TENSORS if name in moved}:
        if kind not in ("tangent", "pull_back"):
            raise UnsupportedError("flashkit has no third derivatives of attention")
        _refuse_sinks("dsinks" in (*results, *arrays))
        then = "curvature" if kind == "tangent" else "second"
        parts.append(bind(then, static, {**arrays, **direction}, results, extra))
    if others := [n for n in moved if n not in linear and n not in TENSORS]:
        _refuse_sinks("sinks" in others)
        raise UnsupportedError(f"flashkit has no second derivative by {others[0]}: pass jax.lax.stop_gradient of it")
    if not parts:
        return list(found.values()), [ad.Zero.from_primal_value(x) for x in found.values()]
    return list(found.values()), [sum(part[name] for part in parts[1:]) + parts[0][name] for name in results]


def _refuse_sinks(has_sinks: bool) -> None:
    if has_sinks:
        raise UnsupportedError("flashkit has no second derivative by sinks: pass jax.lax.stop_gradient(sinks)")


ad.primitive_jvps[derivative_p] = _jvp


def _transpose(cts: Any, *values: Any, kind: str, static: Any, names: Any, results: Any, extra: int) -> Any:
    given = {name: ct for name, ct in zip(results, cts, strict=True) if type(ct) is not ad.Zero}
    wanted = {name: x.aval for name, x in zip(names, values, strict=True) if ad.is_undefined_primal(x)}
    if not given:
        return [None] * len(values)
    fixed = {name: x for name, x in zip(names, values, strict=True) if not ad.is_undefined_primal(x)}
    if kind in ("tangent", "pull_back"):
        found = bind("pull_back" if kind == "tangent" else "tangent", static, {**fixed, **given}, tuple(wanted), extra)
    elif wanted.keys() <= {"dout", "dlse"}:
        raise UnsupportedError("flashkit has no third derivatives of attention")
    else:
        # Of `curvature` cotangents of dout and dlse come, of `second` those of dq, dk and dv, along which it is taken.
        named = given if kind == "curvature" else {name.replace("d", "u", 1): ct for name, ct in given.items()}
        if kind == "curvature":
            fixed |= {f"u{name}": fixed.pop(f"d{name}") for name in TENSORS if f"d{name}" in fixed}
        own = bind("second", static, {**fixed, **named}, tuple(f"d{name[1:]}" for name in wanted), extra)
        found = {f"u{name[1:]}": x for name, x in own.items()}
    return [_summed(found[name], wanted[name]) if name in wanted else None for name in names]


def _summed(x: Any, aval: Any) -> Any:
    """Over the axes along which vmap has given all entries one array."""
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, aval.shape, strict=True)) if n != m)
    return jnp.sum(x, axes, keepdims=True) if axes else x


ad.primitive_transposes[derivative_p] = _transpose


def _batch(values: Any, dims: Any, *, extra: int, **params: Any) -> Any:
    moved = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(values, dims, strict=True)]
    found = derivative_p.bind(*moved, extra=extra + 1, **params)
    return found, [0] * len(found)


batching.primitive_batchers[derivative_p] = _batch

"""Calls on e4m3 arrays whose kernels multiply the codes themselves, and why others are dequantised."""

from __future__ import annotations

from typing import Any

from .. import dispatch, settings
from ..spec import Operands, Problem
from . import arrays
from .arguments import Fp8Arrays, prepare
from .loans import Dequantised
from .quantized import Quantized, token_scales
from .shape import Shape

ALIGNMENT = 16
"""Bytes, of addresses and strides: what Hopper's copy engine (TMA) needs."""


def prepared(
    loan: Dequantised, q: Any, k: Any, v: Any, backend: str | None = None, described: bool = False, **options: Any
) -> tuple[Problem, Operands, Shape] | str:  # fmt: skip
    """A call on the codes of q, k and v, or a sentence that says why they are dequantised.

    Parameters
    ----------
    loan
        How the arrays would be dequantised.
    q, k, v
        The caller's arrays.
    backend, described, **options
        As for `prepare` and `dispatch.plan`.

    Returns
    -------
    (Problem, Operands, Shape) or str
        As `prepare` returns them: `dispatch.plan` has a backend for the problem.
    """
    if options.get("precision") == "highest":
        return "precision='highest' is float32"
    if loan.kind != "cupy":
        return "kernels for e4m3 take CuPy arrays"
    if not settings.FP8_KERNELS.read():
        return "kernels for e4m3 are for those who ask for them with FLASHKIT_FP8_KERNELS=1"
    if options.get("cu_seqlens") is not None or options.get("page_table") is not None:
        return "packed sequences and keys in pages have no kernels for e4m3"
    given = [loan.quantised(name, x, described) for name, x in (("q", q), ("k", k), ("v", v))]
    if refused := _refused(given):
        return refused
    layout = options.get("layout", "bhnd")
    per_head = all(x.per == "tensor" or (x.per == "head" and x.layout == layout) for x in given[1:])
    codes = Fp8Arrays(given[0].dtype, "head" if per_head else "token", tuple(map(token_scales, given)))
    options = {**options, "precision": None if loan.fp8 else options.get("precision")}
    problem, operands, shape = prepare(*(x.data for x in given), described=described, fp8=codes, **options)
    if not operands.k.shape[2]:
        return "there are no keys"
    if not operands.scale > 1e-30:
        return f"scale is {operands.scale:g}, and kernels for e4m3 mask scores before they multiply by it"
    ranked = dispatch.candidates(problem, only=dispatch.forced(backend))
    if not any(candidate.verdict for candidate in ranked):
        known = [c for c in ranked if getattr(dispatch.registry()[c.name], "takes_fp8", False)]
        return "; ".join(f"{c.name}: {c.verdict.reason}" for c in known) or "this backend has no kernels for e4m3"
    if not described:
        operands.q, operands.k, operands.v = map(_addressable, (operands.q, operands.k, operands.v))
    return problem, operands, shape


def _refused(given: list[Any]) -> str:
    """Why codes and scales of these arrays do not give the scores, or nothing."""
    for name, x in zip("qkv", given, strict=True):
        if not isinstance(x, Quantized):
            return f"{name} is {x.dtype.name}"
        if x.format != "e4m3":
            return f"{name} is {x.format}"
        if x.mean is not None:
            return f"{name} is smoothed: its mean is no part of the codes"
    q, k, v = given
    if q.seed != k.seed:
        return "q and k are rotated differently"
    return "v is rotated" if v.seed is not None else ""


def _addressable(x: Any) -> Any:
    """The array itself, or a copy, whose rows the copy engine reaches."""
    strides = [stride for stride, n in zip(x.strides, x.shape) if n > 1]
    if not (x.data.ptr | sum({s % ALIGNMENT for s in strides[:-1]})) % ALIGNMENT and min(strides[:-1], default=1) > 0:
        return x
    return arrays.namespace("cupy").array(x, order="C", copy=True)

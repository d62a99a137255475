"""Tangents and second derivatives of flashkit.torch: two functions that autograd records."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .. import api
from .second_order import second_order
from .torch_mods import Mods
from .torch_passes import Scalars, Tensors, keywords_of

Call = tuple[Tensors, Scalars, Mods | None]
"""The arguments of a call beside q, k and v: tensors by name, options, modifications."""

_THIRD = "flashkit has no third derivatives of attention, and no forward-mode derivative of a forward-mode derivative"


def tangents(call: Call, q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, dsinks: Any = None) -> tuple[Any, Any]:
    """The tangents of out and lse."""
    moved = dict(zip(("dq", "dk", "dv", "dsinks"), _contiguous(dq, dk, dv, dsinks)))
    q, k, v = _contiguous(q, k, v)
    tensors, options, mods = call
    _, found = api.jvp_of(q, k, v, moved, **keywords_of(tensors, options, mods and mods.detached()))
    return found[0], found[1]


def _contiguous(*tensors: Any) -> list[Any]:
    """Without the stride of 0 of expanded gradients and without marks of transforms."""
    return [None if x is None else x.detach().contiguous() for x in tensors]


def _second(call: Call, q: Any, k: Any, v: Any, along: tuple[Any, Any, Any], dout: Any, dlse: Any) -> tuple[Any, ...]:
    named = dict(zip(("dq", "dk", "dv"), _contiguous(*along), strict=True))
    q, k, v, dout, dlse = _contiguous(q, k, v, dout, dlse)
    return second_order(q, k, v, named, dout, dlse, **keywords_of(*call))


class Tangent(torch.autograd.Function):
    """(dout, dlse) of a call, q, k, v, and their tangents, and that of sinks, which may be None."""

    @staticmethod
    def forward(call: Call, q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, dsinks: Any) -> Any:
        return tangents(call, q, k, v, dq, dk, dv, dsinks)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        q, k, v, *along, dsinks = ctx.saved_tensors
        if dsinks is not None:
            raise NotImplementedError("flashkit has no second derivatives of attention by sinks")
        if dout is None and dlse is None:
            return (None,) * 8
        dout = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device) if dout is None else dout
        q, k, v, dout, dlse = _contiguous(q, k, v, dout, dlse)
        by_tensors = by_tangents = (None,) * 3
        if any(ctx.needs_input_grad[1:4]):
            by_tensors = _second(ctx.call, q, k, v, tuple(along), dout, dlse)
        if any(ctx.needs_input_grad[4:7]):
            _, vjp = api.attention_vjp(q, k, v, return_lse=True, **keywords_of(*ctx.call))
            by_tangents = vjp(dout, dlse)
        return None, *by_tensors, *by_tangents, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_THIRD)


class SecondDerivative(torch.autograd.Function):
    """The gradients dq, dk, dv and others, which are computed already, as they are: a function of q, k, v, dout and
    dlse. Inputs: the call, the names of the gradients, these, dout, dlse, q, k, v, and what else the call depends on.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, names: tuple[str, ...], *inputs: Any) -> tuple[Any, ...]:
        return tuple(gradient.view_as(gradient) for gradient in inputs[: len(names)])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.names, *rest = inputs
        tensors = rest[len(ctx.names) : len(ctx.names) + 5]
        ctx.others = len(rest) - len(ctx.names) - 5
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dout, dlse, q, k, v = ctx.saved_tensors
        first = 2 + len(ctx.names)
        along = {name: x for name, x in zip(ctx.names, cotangents, strict=True) if x is not None}
        if along.keys() - {"q", "k", "v"} or any(ctx.needs_input_grad[first + 5 :]):
            raise NotImplementedError("flashkit has second derivatives of attention by q, k and v alone")
        by_out = by_lse = None
        by_tensors: tuple[Any, ...] = (None,) * 3
        direction = along.get("q"), along.get("k"), along.get("v")
        if along and any(ctx.needs_input_grad[first : first + 2]):
            by_out, by_lse = tangents(ctx.call, q, k, v, *direction)
        if along and any(ctx.needs_input_grad[first + 2 :]):
            by_tensors = _second(ctx.call, q, k, v, direction, dout, dlse)
        return (
            None, None, *[None] * len(ctx.names), by_out, by_lse if dlse is not None else None, *by_tensors,
            *[None] * ctx.others,
        )  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> Any:
        dout, dlse, q, k, v = ctx.saved_tensors
        of_out, of_lse, *along = moved[2 + len(ctx.names) : 7 + len(ctx.names)]
        if {*ctx.names} - {"q", "k", "v"} or any(x is not None for x in moved[7 + len(ctx.names) :]):
            raise NotImplementedError("flashkit has second derivatives of attention by q, k and v alone")
        total: dict[str, Any] = dict.fromkeys(ctx.names, 0)
        parts = []
        if any(x is not None for x in along):
            parts.append(_second(ctx.call, q, k, v, tuple(along), dout, dlse))
        if of_out is not None or of_lse is not None:
            plain = _contiguous(q, k, v, torch.zeros_like(dout) if of_out is None else of_out, of_lse)
            _, vjp = api.attention_vjp(*plain[:3], return_lse=True, **keywords_of(*ctx.call))
            parts.append(vjp(*plain[3:]))
        for part in parts:
            for name, x in zip("qkv", part, strict=True):
                if name in total:
                    total[name] = total[name] + x
        return tuple(None if isinstance(x, int) else x for x in total.values())

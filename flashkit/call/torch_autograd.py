"""flashkit.torch's calls: by the operators where something looks at them, directly otherwise, and the derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import interop
from .torch_derivatives import SecondDerivative, Tangent
from .torch_mods import NO_GRADIENT, Content, Mods, value_names
from .torch_operators import backward_op, flat, forward_op, unpacked
from .torch_passes import PLAIN, Known, Scalars, Tensors, backward, forward, known_plan, read_by, results_of


def is_watched() -> bool:
    """Whether a compiler, transform, mode or profiler looks at the calls of this thread."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
    )


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether the operators would do nothing but compute, in a thread that is not watched: no subclass, no tracer, no
    batched gradients; no nested tensor; and the first three tensors are memory. Guards find the same (`torch_plans`).
    """
    return (
        not torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS)
        and not torch.jit.is_tracing()
        and PLAIN.issuperset(map(type, tensors))
        and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))  # kept beyond their transform
        and tensors[0].layout is tensors[1].layout is tensors[2].layout is torch.strided
        and not any(tensor.is_nested for tensor in tensors)
    )


_BATCHED_GRADIENTS = torch._C._parse_dispatch_key("VmapMode")  # torch.autograd.grad(..., is_grads_batched=True)


def _refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """NotImplementedError where forward mode differentiates: operators without a rule for it would drop tangents."""
    if not torch.compiler.is_compiling() and any(map(interop.is_dual, tensors)):
        raise NotImplementedError("attention has no forward mode AD: use torch.autograd or torch.func.vjp")


# --- calls ------------------------------------------------------------------------------------------------------------


def call(
    with_lse: bool, q: Any, k: Any, v: Any, tensors: Tensors, options: Scalars, mods: Mods | Content | None
) -> tuple[Any, Any]:
    """out and lse without a gradient; lse is of no use without `with_lse`."""
    watched = is_watched()
    known = None if watched else known_plan(with_lse, q, k, v, tensors, options, mods)
    if known is not None or (not watched and _is_plain((q, k, v, *tensors.values()))):
        return forward(known, with_lse, q, k, v, tensors, options, _resolved(mods))
    if watched:
        _refuse_tangents((q, k, v, *tensors.values()))
    found: tuple[Any, Any] = forward_op(with_lse, q, k, v, *flat(tensors, options, *_content(mods)))
    return found


def recorded_call(q: Any, k: Any, v: Any, tensors: Tensors, options: Scalars, mods: Mods | None) -> tuple[Any, Any]:
    """out and lse with a gradient."""
    result: tuple[Any, Any]
    if not is_watched():
        known = known_plan(True, q, k, v, tensors, options, mods)
        # With captured tensors autograd notices when they change before backward.
        result = _record((known, tuple(tensors), options, mods), q, k, v, *read_by(tensors, mods))
        return result
    text, values = _content(mods)
    inputs = [q, k, v, *tensors.values(), *values]
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():  # where Dynamo takes no autograd.Function
            return call(True, q, k, v, tensors, options, mods)
        # Dynamo refuses a tensor that is passed twice.
        inputs = [x.view_as(x) if any(x is y for y in inputs[:i]) else x for i, x in enumerate(inputs)]
    function = Attention if torch.compiler.is_compiling() else AttentionWithTangents
    result = function.apply((None, tuple(tensors), options, text), *inputs)
    return result


_Form = tuple[Known | None, tuple[str, ...], Scalars, Mods | str | None]
"""A recorded call beside its tensors, as one input: its plan if known, names of tensors, options, modifications."""


class Attention(torch.autograd.Function):
    """Inputs: a `_Form`, q, k, v, the tensors of these names, and those of the modifications."""

    generate_vmap_rule = True

    @staticmethod
    def forward(form: _Form, q: Any, k: Any, v: Any, *given: Any) -> Any:
        known, names, options, mods = form
        if forward_ad._current_level >= 0:  # tangents are for `jvp`
            q, k, v, *given = (x.detach() for x in (q, k, v, *given))  # type: ignore[assignment]
        tensors, own = _unpacked(names, mods, given)
        if known is not None:
            return forward(known, True, q, k, v, tensors, options, _resolved(own))
        return call(True, q, k, v, tensors, options, own)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        ctx.form = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * (len(ctx.saved_tensors) - 1)
        if not torch.is_grad_enabled():
            return _gradients(ctx, dout, dlse)
        with torch.no_grad():
            gradients = _gradients(ctx, dout, dlse)
        if torch.compiler.is_compiling():
            return gradients
        # create_graph=True
        known = [n for n, gradient in enumerate(gradients) if gradient is not None]
        q, k, v, *given, out, _ = ctx.saved_tensors
        own = ("", "q", "k", "v", *ctx.form[1], *[""] * len(gradients))
        dout = torch.zeros_like(out) if dout is None else dout
        marked = SecondDerivative.apply(
            _call_of(ctx, given), tuple(own[n] for n in known), *(gradients[n] for n in known), dout, dlse, q, k, v,
            *given,
        )  # fmt: skip
        return tuple(marked[known.index(n)] if n in known else None for n in range(len(gradients)))


class AttentionWithTangents(Attention):
    """The same with a forward-mode derivative, which functions that Dynamo traces must not have."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        Attention.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:], *output)

    @staticmethod
    def jvp(ctx: Any, _: Any, dq: Any, dk: Any, dv: Any, *rest: Any) -> tuple[Any, Any]:
        q, k, v, *given, _, _ = ctx.saved_tensors
        names = ctx.form[1]
        of_tensors = dict(zip(names, rest))
        dsinks = of_tensors.pop("sinks", None)
        if any(x is not None for x in (*of_tensors.values(), *rest[len(names) :])):
            raise NotImplementedError("attention has forward mode AD by q, k, v and sinks alone")
        result: tuple[Any, Any] = Tangent.apply(_call_of(ctx, given), q, k, v, dq, dk, dv, dsinks)
        return result


def _record(*inputs: Any) -> Any:
    """Attention.apply where no transform is active, without what that looks up for transforms in each call."""
    return super(torch.autograd.Function, Attention).apply(*inputs)  # not at import: for the site torch is a mock


def _call_of(ctx: Any, given: list[Any]) -> tuple[Tensors, Scalars, Mods | None]:
    """The arguments of a call beside q, k and v."""
    _, names, options, mods = ctx.form
    tensors, own = _unpacked(names, mods, tuple(given))
    return tensors, options, _resolved(own)


def _content(mods: Mods | Content | None) -> tuple[str | None, tuple[Any, ...]]:
    return (None, ()) if mods is None else mods if isinstance(mods, tuple) else mods.content


def _resolved(mods: Mods | Content | None) -> Mods | None:
    return Mods.of_content(*mods) if isinstance(mods, tuple) else mods


def _unpacked(
    names: tuple[str, ...], mods: Mods | str | None, given: tuple[Any, ...]
) -> tuple[Tensors, Mods | Content | None]:
    """Tensors by name, and the modifications."""
    if isinstance(mods, str):
        return dict(zip(names, given)), (mods, given[len(names) :])
    return dict(zip(names, given)), mods


def _gradients(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, *rest, out, lse = ctx.saved_tensors
    if forward_ad._current_level >= 0:  # tangents are for `SecondDerivative.jvp`
        q, k, v, out, lse, *rest = (x.detach() for x in (q, k, v, out, lse, *rest))
        dout, dlse = (None if x is None else x.detach() for x in (dout, dlse))
    content, (known, names, options, own) = tuple(rest), ctx.form
    tensors, mods = _unpacked(names, own, content)
    of_mods = value_names(mods[0]) if isinstance(mods, tuple) else () if mods is None else mods.captured
    given = dict(zip((*tensors, *of_mods), content, strict=True))
    more = [name for name, needed in zip(given, ctx.needs_input_grad[4:], strict=True) if needed]
    if masked := [name.partition(".")[2] for name in more if name.startswith("mask.")]:
        raise NotImplementedError(NO_GRADIENT.format(masked[0]))  # now wrappers know
    dout = torch.zeros_like(out) if dout is None else dout
    all_tensors, found = (q, k, v, *results_of(dout, dlse, out, lse)), None
    if watched := is_watched():
        _refuse_tangents(all_tensors)
    else:
        known = known or known_plan(True, q, k, v, tensors, options, mods)
        found = known and known.pull_back(more, (*all_tensors, *read_by(tensors, mods)))
    arguments = dout, dlse, out, lse, more, q, k, v
    if found or (not watched and _is_plain((*all_tensors, *content))):
        dq, dk, dv, *gradients = backward(known, found, *arguments, tensors, options, _resolved(mods))
    else:
        dq, dk, dv, numbers = backward_op(*arguments, *flat(tensors, options, *_content(mods)))
        gradients = unpacked(numbers, [given[name] for name in more])
    by_name = dict(zip(more, gradients, strict=True))
    others = (by_name[n].to(x.dtype) if n in by_name else None for n, x in given.items())
    return None, dq, dk, dv, *others


class OfRanks(torch.autograd.Function):
    """Attention of all ranks. Every rank runs both passes."""

    @staticmethod
    def forward(ctx: Any, attention_vjp: Any, options: dict[str, Any], q: Any, k: Any, v: Any, sinks: Any) -> Any:
        given = {**options, "sinks": None if sinks is None else sinks.detach()}
        with torch.enable_grad():  # so that options that require grad are refused, as they have none here
            (out, lse), ctx.vjp = attention_vjp(q.detach(), k.detach(), v.detach(), return_lse=True, **given)
        ctx.names = ("q", "k", "v", "sinks")[: 3 if sinks is None else 4]
        ctx.like, ctx.shape = out.new_empty(0), out.shape
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        dout = ctx.like.new_zeros(ctx.shape) if dout is None else dout.contiguous()
        gradients = ctx.vjp(dout, None if dlse is None else dlse.contiguous(), wrt=ctx.names)
        return None, None, *gradients, *[None] * (4 - len(gradients))

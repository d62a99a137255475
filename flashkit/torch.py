"""flashkit in PyTorch: differentiable attention that `torch.compile` takes whole.

    from flashkit.torch import attention, flex_attention, scaled_dot_product_attention

Two functions compute the forward and the backward pass on tensors of CPUs and CUDA devices, without a copy; an
autograd.Function around them records the derivative. They are called directly on plain tensors. Whatever looks at
operators (`torch.compile`, transforms, modes, profilers) sees them as two operators of torch.library. Operators cannot
take functions, so modifications are passed by number (`Mods`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from .api import attention as _attention
from .api import entry_of, vjp_of
from .call import torch_plans
from .call.planned import Planned
from .call.quantized import Quantized
from .call.torch_bias import bias_gradient
from .call.torch_tracing import from_block_mask, trace
from .call.views import View
from .call.vjp import WRT, Vjp
from .mods import Mod
from .mods.block_mask import BlockMask

__all__ = ["Mods", "attention", "flex_attention", "scaled_dot_product_attention"]

TENSORS = (
    "bias", "mask", "alibi_slopes", "sinks", "kv_lengths", "q_offsets", "seed", "q_lengths", "cu_seqlens_q",
    "cu_seqlens_k", "page_table",
)  # fmt: skip
OPTIONS = (
    "scale", "causal", "q_offset", "window_left", "window_right", "softcap", "dropout_p", "layout", "deterministic",
    "precision", "backend",
)  # fmt: skip
LAYOUT = OPTIONS.index("layout")
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor? {name}=None" for name in TENSORS)
    + ", float? scale=None, bool causal=False, SymInt? q_offset=None, SymInt? window_left=None, "
    'SymInt? window_right=None, float? softcap=None, float dropout_p=0.0, str layout="bhnd", '
    "bool deterministic=False, str? precision=None, str? backend=None, int mods=0"
)

_library = torch.library.Library("flashkit", "DEF")  # operators exist as long as it does
_library.define(f"attention(bool with_lse, {_SCHEMA}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool of_bias, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


# --- modifications ----------------------------------------------------------------------------------------------------

_mods: dict[int, dict[str, Any]] = {}
_numbers = itertools.count(1)


class Mods:
    """Modifications and a block mask of calls, for functions that `torch.compile` compiles.

    Operators cannot take functions, and tracing a function is nothing that a compiler can record. So make this object
    once, outside of what is compiled, and pass it as `mods`.

    Parameters
    ----------
    score_mod, mask_mod
        As for `flashkit.attention`. The functions of `flex_attention` fit as well, with PyTorch's operations and
        indexed tensors.
    block_mask
        A flashkit.BlockMask, or one of torch.nn.attention.flex_attention, whose mask_mod is traced.

    Raises
    ------
    TypeError
        A function cannot be traced.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import Mods, attention
    >>> near = Mods(mask_mod=lambda b, h, q, k: abs(q - k) <= 8)
    >>> q = torch.ones(1, 2, 32, 16)
    >>> attention(q, q, q, mods=near).shape
    torch.Size([1, 2, 32, 16])
    """

    def __init__(
        self, *, score_mod: Mod | Callable[..., Any] | None = None, mask_mod: Mod | Callable[..., Any] | None = None,
        block_mask: Any = None,
    ) -> None:  # fmt: skip
        made: dict[str, Any] = {}
        if score_mod is not None:
            made["score_mod"] = trace(score_mod, "score")
        if mask_mod is not None:
            made["mask_mod"] = trace(mask_mod, "mask")
        if isinstance(block_mask, BlockMask):
            made["block_mask"] = block_mask
        elif block_mask is not None:
            inner = from_block_mask(block_mask)
            made["mask_mod"] = made["mask_mod"] & inner if "mask_mod" in made else inner
        self.number = next(_numbers)
        _mods[self.number] = made
        weakref.finalize(self, _mods.pop, self.number, None)


# --- the two passes ---------------------------------------------------------------------------------------------------

Tensors = dict[str, Any]
"""The tensors among the arguments of a call beside q, k and v, by the names of TENSORS."""


def _keywords(tensors: Tensors, options: tuple[Any, ...], mods: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as those of flashkit.attention, without those at their defaults. options: see OPTIONS."""
    scale, causal, q_offset, left, right, softcap, dropout_p, layout, deterministic, precision, backend = options
    made: dict[str, Any] = {"layout": layout}
    if causal:
        made["causal"] = True
    if q_offset is not None:
        made["q_offset"] = q_offset
    if scale is not None:
        made["scale"] = _number(scale)
    if left is not None or right is not None:
        made["window"] = left, right
    if softcap is not None:
        made["softcap"] = _number(softcap)
    if dropout_p:
        made["dropout_p"] = _number(dropout_p)
    if deterministic:
        made["deterministic"] = True
    if precision is not None:
        made["precision"] = precision
    if backend is not None:
        made["backend"] = backend
    for name, tensor in tensors.items():
        if name == "seed":
            made["seed"] = int(tensor)
        elif name == "q_offsets":
            made["q_offset"] = tensor
        elif name == "cu_seqlens_q":
            made["cu_seqlens"] = tensor
        elif name == "cu_seqlens_k":
            made["cu_seqlens"] = made["cu_seqlens"], tensor
        else:
            made[name] = tensor
    return made | mods if mods else made


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, torch.Tensor) else x


def _bhnd_in_bnhd_memory(q: Any, layout: str) -> bool:
    """Whether q is a transposed view of (B, N, H, D), as models make it: the result becomes one, too."""
    return layout == "bhnd" and q.dim() == 4 and q.stride(1) < q.stride(2) and q.shape[2] != 1


def _known(call: Any, given: tuple[Any, ...], tensors: Tensors, options: tuple[Any, ...], mods: Any) -> Any:
    """The plan of such a call, and whether its result is turned; None if there is no such plan yet."""
    return None if tensors or mods else torch_plans.find(torch_plans.name_of(call, options), given)


def _forward(
    known: Any, with_lse: bool, q: Any, k: Any, v: Any, tensors: Tensors, options: tuple[Any, ...],
    mods: dict[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """out, and lse or None. known: of `_known` for `with_lse` and q, k and v."""
    with interop.TORCH.scope(q):
        if known is not None:
            planned, turned = known
            memory = View if q.is_cuda else interop.TORCH.memory
            found = planned.run_on(memory(q), memory(k), memory(v), None)  # it reads addresses, in whatever order the axes
        else:
            given, own_options = (q, k, v), options
            turned = _bhnd_in_bnhd_memory(q, options[LAYOUT]) and "page_table" not in tensors
            if turned:
                given = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                own_options = (*options[:LAYOUT], "bnhd", *options[LAYOUT + 1 :])
            keywords = _keywords(tensors, own_options, mods)
            by_plan = None if tensors or mods else _by_cached_plan(with_lse, given, keywords)
            if by_plan is not None:
                found, planned = by_plan
            else:
                lent = interop.Loan(interop.TORCH, q).lend(*given, **keywords)
                found = _attention(**lent, return_lse=with_lse)
                planned = None if tensors or mods else _cached_plan(return_lse=with_lse, recorded=False, **lent)
            if planned is not None:
                torch_plans.keep(torch_plans.name_of(with_lse, options), (q, k, v), (planned, turned))
    out, lse = found if with_lse else (found, None)
    out = interop.TORCH.own(out, q)
    return out.transpose(1, 2) if turned else out, None if lse is None else interop.TORCH.own(lse, q)


def _results(dout: Any, dlse: Any, out: Any, lse: Any) -> tuple[Any, ...]:
    """The tensors that a backward pass reads beside the inputs of the call."""
    return (out, lse, dout) if dlse is None else (out, lse, dout, dlse)


def _backward(
    known: Any, dout: Any, dlse: Any, out: Any, lse: Any, of_bias: bool, q: Any, k: Any, v: Any, tensors: Tensors,
    options: tuple[Any, ...], mods: dict[str, Any],
) -> tuple[Any, ...]:  # fmt: skip
    """dq, dk and dv, contiguous as (B, H, N, D), dsinks or None, dbias or None.

    known: of `_known` for the number of `_results`, and q, k, v and these.
    """
    with interop.TORCH.scope(q):
        if known is not None:
            planned, memory = known[0], interop.TORCH.memory
            of_results = planned.recorded(memory(q), memory(k), memory(v), memory(out), memory(lse))
            vjp: Any = Vjp(planned.problem, *of_results)
            arrays = memory(dout), None if dlse is None else memory(dlse)
        else:
            loan = interop.Loan(interop.TORCH, q)
            lent = loan.views(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse)
            arrays = lent.pop("dout"), lent.pop("dlse")
            keywords = loan.borrow(**_keywords(tensors, options, mods))
            vjp = vjp_of(**lent, **keywords)
            planned = None if tensors or mods else _cached_plan(lent["q"], lent["k"], lent["v"], **keywords)
            if planned is not None:
                results = _results(dout, dlse, out, lse)
                torch_plans.keep(torch_plans.name_of(len(results), options), (q, k, v, *results), (planned, False))
        empty = arrays[0].empty if type(arrays[0]) is View else None
        found = vjp.gradients(*arrays, WRT if "sinks" in tensors else WRT[:3], empty)
        dq, dk, dv, *dsinks = [interop.TORCH.own(x, q) for x in found]
        dbias = None
        if of_bias:
            given = dict.fromkeys(TENSORS) | tensors | dict(zip(OPTIONS, options, strict=True))
            dbias = bias_gradient(vjp.shape, dout, dlse, out, lse, q, k, v, given)
    return dq, dk, dv, dsinks[0] if dsinks else None, dbias


def _cached_plan(q: Any, k: Any, v: Any, out: Any = None, **keywords: Any) -> Planned | None:
    """The plan that `attention` has cached for a call, if it is for any call of these layouts and reads addresses."""
    if type(q) is not View and not isinstance(q, np.ndarray):
        return None
    entry = entry_of(q, k, v, **keywords)
    return None if entry is None else entry.repeated


def _by_cached_plan(
    with_lse: bool, given: tuple[Any, Any, Any], keywords: dict[str, Any]
) -> tuple[Any, Planned | None] | None:
    """The results of plain tensors on a CPU by the plan that `attention` has cached for such a call, and that plan, if
    it is for any call of these layouts. None without such a plan.
    """
    if not (_PLAIN.issuperset(map(type, given)) and all(x.is_cpu for x in given)):
        return None
    q, k, v = map(interop.TORCH.memory, given)
    entry = entry_of(q, k, v, return_lse=with_lse, recorded=False, **keywords)
    return None if entry is None or entry.planned is None else (entry.run(q, k, v, None), entry.repeated)


# --- the operators ----------------------------------------------------------------------------------------------------

DEFAULTS = (None,) * len(TENSORS) + (None, False, None, None, None, None, 0.0, "bhnd", False, None, None, 0)


def _given(rest: tuple[Any, ...]) -> tuple[Tensors, tuple[Any, ...], int]:
    """An operator's arguments behind v: tensors, options, the number of modifications."""
    *filled, mods = rest + DEFAULTS[len(rest) :]  # operators drop defaults at the end of their arguments
    tensors = {name: x for name, x in zip(TENSORS, filled, strict=False) if x is not None}
    return tensors, tuple(filled[len(TENSORS) :]), mods


def _lse_dtype(q: Any) -> Any:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward_impl(with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    tensors, options, mods = _given(rest)
    with torch.no_grad():  # below autograd; `requires_grad` says nothing here
        known = _known(with_lse, (q, k, v), tensors, options, mods)
        out, lse = _forward(known, with_lse, q, k, v, tensors, options, _mods[mods] if mods else {})
    return out, q.new_empty(0, dtype=_lse_dtype(q)) if lse is None else lse


def _backward_impl(
    dout: Any, dlse: Any, out: Any, lse: Any, of_bias: bool, q: Any, k: Any, v: Any, *rest: Any
) -> tuple[Any, ...]:
    tensors, options, mods = _given(rest)
    with torch.no_grad():
        results = _results(dout, dlse, out, lse)
        known = _known(len(results), (q, k, v, *results), tensors, options, mods)
        found = _backward(known, dout, dlse, out, lse, of_bias, q, k, v, tensors, options, _mods[mods] if mods else {})
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _fake_forward(with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    tensors, layout = _layout(rest)
    if _bhnd_in_bnhd_memory(q, layout) and "page_table" not in tensors:
        out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)
    else:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = q.shape[:-1] if layout == "bhnd" or q.dim() == 2 else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(rows if with_lse else (0,), dtype=_lse_dtype(q))


def _fake_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, of_bias: bool, q: Any, k: Any, v: Any, *rest: Any
) -> tuple[Any, ...]:
    tensors, layout = _layout(rest)

    def like(x: Any) -> Any:
        if layout == "bhnd" or x.dim() == 2:
            return x.new_empty(x.shape)
        return x.new_empty((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1])).transpose(-3, -2)

    dsinks, dbias = (
        x.new_empty(x.shape) if x is not None else q.new_empty(0)
        for x in (tensors.get("sinks"), tensors["bias"] if of_bias else None)
    )
    return like(q), like(k), like(v), dsinks, dbias


def _layout(rest: tuple[Any, ...]) -> tuple[Tensors, str]:
    """Tensors, and the layout of q, k and v: packed sequences are (T, H, D)."""
    tensors, options, _ = _given(rest)
    return tensors, "bnhd" if "cu_seqlens_q" in tensors else options[OPTIONS.index("layout")]


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _forward_impl, _device)
    _library.impl("attention_backward", _backward_impl, _device)
torch.library.register_fake("flashkit::attention", _fake_forward, lib=_library)
torch.library.register_fake("flashkit::attention_backward", _fake_backward, lib=_library)
_forward_op = torch.ops.flashkit.attention.default
_backward_op = torch.ops.flashkit.attention_backward.default


def _is_watched() -> bool:
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
    batched gradients; and the first three tensors are memory. Guards find the same (`torch_plans`).
    """
    return (
        not torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS)
        and not torch.jit.is_tracing()
        and _PLAIN.issuperset(map(type, tensors))
        and tensors[0].layout is tensors[1].layout is tensors[2].layout is torch.strided
    )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_BATCHED_GRADIENTS = torch._C._parse_dispatch_key("VmapMode")  # torch.autograd.grad(..., is_grads_batched=True)


def _refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """NotImplementedError where forward mode differentiates: operators without a rule for it would drop tangents."""
    if not torch.compiler.is_compiling() and any(map(interop.is_dual, tensors)):
        raise NotImplementedError("flashkit has no forward mode AD of attention; torch.autograd and torch.func.vjp fit")


# --- autograd ---------------------------------------------------------------------------------------------------------


class _Function(torch.autograd.Function):
    """Inputs: names of tensors, options, modifications or None, q, k, v, and the tensors."""

    @staticmethod
    def forward(
        ctx: Any, names: tuple[str, ...], options: tuple[Any, ...], mods: Mods | None, q: Any, k: Any, v: Any,
        *given: Any,
    ) -> Any:  # fmt: skip
        out, lse = _call(True, q, k, v, dict(zip(names, given, strict=True)), options, mods)
        ctx.save_for_backward(q, k, v, *given, out, lse)
        ctx.names, ctx.options, ctx.mods = names, options, mods  # which lives until backward
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * (6 + len(ctx.names))
        if not torch.is_grad_enabled():
            return _Function.gradients(ctx, dout, dlse)
        with torch.no_grad():
            found = _Function.gradients(ctx, dout, dlse)
        if torch.compiler.is_compiling():
            return found
        # create_graph=True
        known = [n for n, gradient in enumerate(found) if gradient is not None]
        marked = _NoSecondDerivative.apply(*ctx.saved_tensors[:3], dout, dlse, *(found[n] for n in known))
        return tuple(marked[known.index(n)] if n in known else None for n in range(len(found)))

    @staticmethod
    def gradients(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        q, k, v, *given, out, lse = ctx.saved_tensors
        tensors, options, mods = dict(zip(ctx.names, given, strict=True)), ctx.options, ctx.mods
        of_bias = "bias" in tensors and ctx.needs_input_grad[6 + ctx.names.index("bias")]
        dout = torch.zeros_like(out) if dout is None else dout
        arguments, all_tensors = (dout, dlse, out, lse, of_bias, q, k, v), (q, k, v, *_results(dout, dlse, out, lse))
        watched = _is_watched()
        known = None if watched else _known(len(all_tensors) - 3, all_tensors, tensors, options, mods)
        if watched:
            _refuse_tangents(all_tensors)
        if known is not None or (not watched and _is_plain((*all_tensors, *given))):
            found = _backward(known, *arguments, tensors, options, {} if mods is None else _mods[mods.number])
        else:
            found = _backward_op(*arguments, *_flat(tensors, options, mods))
        dq, dk, dv, dsinks, dbias = found
        if not given:
            return None, None, None, dq, dk, dv
        own = {"bias": dbias if of_bias else None, "sinks": dsinks}
        return None, None, None, dq, dk, dv, *[own.get(name) for name in ctx.names]


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients as they are. They depend on the five first inputs, and to differentiate them again is an error: a
    derivative that is missing would pass for one that is zero.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
        return tuple(gradient.view_as(gradient) for gradient in inputs[5:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("flashkit has no second derivatives of attention")


def _flat(tensors: Tensors, options: tuple[Any, ...], mods: Mods | None) -> tuple[Any, ...]:
    """An operator's arguments behind v."""
    return *(tensors.get(name) for name in TENSORS), *options, 0 if mods is None else mods.number


def _call(
    with_lse: bool, q: Any, k: Any, v: Any, tensors: Tensors, options: tuple[Any, ...], mods: Mods | None
) -> tuple[Any, Any]:
    """out and lse, which without `with_lse` is of no use."""
    watched = _is_watched()
    known = None if watched else _known(with_lse, (q, k, v), tensors, options, mods)
    if known is not None or (not watched and _is_plain((q, k, v, *tensors.values()))):
        return _forward(known, with_lse, q, k, v, tensors, options, {} if mods is None else _mods[mods.number])
    if watched:
        _refuse_tangents((q, k, v, *tensors.values()))
    found: tuple[Any, Any] = _forward_op(with_lse, q, k, v, *_flat(tensors, options, mods))
    return found


# --- functions --------------------------------------------------------------------------------------------------------


def attention(
    q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False, q_offset: Any = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, alibi_slopes: Any = None,
    bias: Any = None, mask: Any = None, block_mask: Any = None, score_mod: Any = None, mask_mod: Any = None,
    mods: Mods | None = None, kv_lengths: Any = None, q_lengths: Any = None, cu_seqlens: Any = None,
    page_table: Any = None, dropout_p: float = 0.0, seed: Any = None, sinks: Any = None,
    layout: str = "bhnd", return_lse: bool = False, deterministic: bool = False, precision: str | None = None,
    backend: str | None = None,
) -> Any:  # fmt: skip
    """`flashkit.attention` of tensors, differentiable by q, k, v, sinks, bias and a floating mask.

    Parameters
    ----------
    q, k, v
        As for `flashkit.attention`. Under autocast q, k and v are converted to its dtype.
    scale, causal, q_offset, window, softcap, alibi_slopes, bias, mask
        As for `flashkit.attention`.
    kv_lengths, q_lengths, cu_seqlens, page_table, dropout_p, sinks, layout
        As for `flashkit.attention`.
    return_lse, deterministic, precision, backend
        As for `flashkit.attention`; torch.use_deterministic_algorithms asks for deterministic results, too.
    block_mask, score_mod, mask_mod
        As for `flashkit.attention`, or as `Mods` takes them. In a compiled function pass `mods` instead.
    mods
        Modifications and a block mask made before.
    seed
        An integer, or a tensor of one. By default drawn from PyTorch's generator on the CPU.

    Returns
    -------
    out : torch.Tensor
        (..., Hq, Nq, Dv), of q's dtype, in q's layout.
    lse : torch.Tensor
        If return_lse: (..., Hq, Nq), float32 or float64. It is differentiable.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit. The message names it, what came and what would fit.
    NotImplementedError
        No backend can compute it, or a gradient is asked for that there is none of: that of `alibi_slopes`, and that of
        a bias beside modifications.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import attention
    >>> q, k, v = (torch.randn(1, 8, 64, 32, requires_grad=True) for _ in range(3))
    >>> attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 8, 64, 32])
    """
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        if mods is not None:
            raise TypeError("mods are given beside score_mod, mask_mod or block_mask; one of the two ways fits")
        if torch.compiler.is_compiling():
            raise TypeError(
                "score_mod, mask_mod or block_mask in a compiled function; make flashkit.torch.Mods(...) of them "
                "outside and pass it as mods="
            )
        mods = Mods(score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, torch.Tensor))
        fits = "flashkit.attention takes it" if isinstance(x, Quantized) else "torch.from_numpy makes one"
        raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor fits here ({fits})")
    if precision == "fp8":
        raise ValueError("precision is 'fp8', which flashkit.attention takes; None, 'highest' or 'tf32' fits here")
    if mask is not None and mask.is_floating_point():
        bias, mask = mask if bias is None else bias + mask, None
    offsets = None
    if q_offset is not None and isinstance(q_offset, torch.Tensor):
        offsets, q_offset = q_offset, None
    if not dropout_p:
        seed = None
    elif not isinstance(seed, torch.Tensor):
        seed = torch.randint(2**62, ()) if seed is None else torch.tensor(seed)
    left, right = (None, None) if window is None else window
    device = "cuda" if q.is_cuda else q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    cu_q, cu_k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, None)
    given = bias, mask, alibi_slopes, sinks, kv_lengths, offsets, seed, q_lengths, cu_q, cu_k, page_table
    tensors: Tensors = {}
    if not (bias is mask is alibi_slopes is sinks is kv_lengths is offsets is seed is q_lengths is cu_q is cu_k
            is page_table is None):  # fmt: skip
        tensors = {name: x for name, x in zip(TENSORS, given, strict=True) if x is not None}
    options = scale, causal, q_offset, left, right, softcap, dropout_p, layout, deterministic, precision, backend
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
        or (sinks is not None and sinks.requires_grad) or (bias is not None and bias.requires_grad)
        or (alibi_slopes is not None and alibi_slopes.requires_grad)
    ):  # fmt: skip
        _check_differentiable(bias, alibi_slopes, mods)
        out, lse = _Function.apply(tuple(tensors), options, mods, q, k, v, *tensors.values())
    else:
        out, lse = _call(return_lse, q, k, v, tensors, options, mods)
    return (out, lse) if return_lse else out


def _check_differentiable(bias: Any, alibi_slopes: Any, mods: Mods | None) -> None:
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise NotImplementedError("alibi_slopes requires grad; there is a gradient of q, k, v, sinks and bias")
    if bias is not None and bias.requires_grad and mods is not None:
        raise NotImplementedError(
            "bias (or a floating mask) requires grad beside modifications; it has a gradient without them"
        )


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention, computed by flashkit.

    Parameters
    ----------
    query, key, value
        (..., Hq, Nq, D), (..., Hkv, Nk, D) and (..., Hkv, Nk, Dv). Batch axes broadcast.
    attn_mask
        Broadcasts to (..., Hq, Nq, Nk): bool, True = attend, or floating, added to the scores.
    dropout_p
        Probability of dropping a weight; pass 0 for evaluation.
    is_causal
        Query i sees keys 0 to i: top-left alignment, as in PyTorch.
    scale
        1 / sqrt(D) by default.
    enable_gqa
        Whether Hq may be a multiple of Hkv.

    Returns
    -------
    torch.Tensor
        (..., Hq, Nq, Dv). Rows without a visible key are 0.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; both attn_mask and is_causal.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(scaled_dot_product_attention(q, k, v, is_causal=True), expected, atol=1e-5)
    True
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given beside is_causal=True; one of them fits")
    shape = query.shape
    if len(shape) > 2 and not shape == key.shape == value.shape:
        batches = [x.shape[:-3] for x in (query, key, value)]
        if batches[0] != batches[1] or batches[1] != batches[2]:
            batch = torch.broadcast_shapes(*batches)
            query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))
        if not enable_gqa and shape[-3] != key.shape[-3]:
            raise ValueError(
                f"query has {shape[-3]} heads, key {key.shape[-3]}; equal numbers fit, or enable_gqa=True"
            )
    return attention(
        query, key, value, mask=attn_mask, dropout_p=dropout_p, causal=is_causal, q_offset=0 if is_causal else None,
        scale=scale,
    )  # fmt: skip


def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, *, mods: Mods | None = None,
) -> Any:  # fmt: skip
    """torch.nn.attention.flex_attention.flex_attention, computed by flashkit, compiled or not.

    Parameters
    ----------
    query, key, value
        (B, Hq, Nq, D), (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).
    score_mod
        `score_mod(score, b, h, q_idx, kv_idx) -> score`, with PyTorch's operations; tensors that it indexes are read
        in place. Its derivative by the score is exact, and it has none by these tensors.
    block_mask
        Made by PyTorch's create_block_mask, or a flashkit.BlockMask.
    scale
        1 / sqrt(D) by default.
    enable_gqa
        Whether Hq may be a multiple of Hkv.
    return_lse
        Return (out, lse).
    mods
        Both modifications, made before, for compiled functions.

    Returns
    -------
    out : torch.Tensor
        (B, Hq, Nq, Dv).
    lse : torch.Tensor
        If return_lse: (B, Hq, Nq), natural logarithm.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit, or a function cannot be traced.

    References
    ----------
    Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024,
    arXiv 2412.05496.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import flex_attention
    >>> q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))
    >>> slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    >>> flex_attention(q, k, v, lambda score, b, h, q, k: score - slopes[h] * torch.abs(q - k)).shape
    torch.Size([1, 4, 16, 8])
    """
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query has {query.shape[-3]} heads, key {key.shape[-3]}; equal numbers fit, or enable_gqa=True"
        )
    return attention(
        query, key, value, score_mod=score_mod, block_mask=block_mask, mods=mods, scale=scale, q_offset=0,
        return_lse=return_lse,
    )  # fmt: skip

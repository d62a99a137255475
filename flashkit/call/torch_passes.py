"""The forward and the backward pass of flashkit.torch on tensors, by a plan that a call like this has left if there is
one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..api import attention, entry_of, vjp_of
from . import foreign, torch_plans
from .planned import Planned
from .torch_bias import bias_gradient
from .torch_mods import Mods
from .views import View
from .vjp import WRT, Vjp

TENSORS = (
    "bias", "mask", "alibi_slopes", "sinks", "kv_lengths", "q_offsets", "seed", "q_lengths", "cu_seqlens_q",
    "cu_seqlens_k", "page_table",
)  # fmt: skip
OPTIONS = (
    "scale", "causal", "q_offset", "window_left", "window_right", "softcap", "dropout_p", "layout", "deterministic",
    "precision", "backend",
)  # fmt: skip
LAYOUT = OPTIONS.index("layout")
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that are no more than their memory."""

Tensors = dict[str, Any]
"""The tensors among the arguments of a call beside q, k and v, by the names of TENSORS."""


def _keywords(tensors: Tensors, options: tuple[Any, ...], mods: Mods | None) -> dict[str, Any]:
    """The arguments of a call as those of flashkit.attention, without those at their defaults. options: see OPTIONS."""
    scale, causal, q_offset, left, right, softcap, dropout_p, layout, deterministic, precision, backend = options
    made: dict[str, Any] = {"layout": layout}
    if causal:
        made["causal"] = True
    if q_offset is not None:
        made["q_offset"] = q_offset
    if scale is not None:
        made["scale"] = scale
    if left is not None or right is not None:
        made["window"] = left, right
    if softcap is not None:
        made["softcap"] = softcap
    if dropout_p:
        made["dropout_p"] = dropout_p
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
    return made if mods is None else made | mods.options()


def bhnd_in_bnhd_memory(q: Any, layout: str) -> bool:
    """Whether q is a transposed view of (B, N, H, D), as models make it: the result becomes one, too."""
    return layout == "bhnd" and q.dim() == 4 and q.stride(1) < q.stride(2) and q.shape[2] != 1


def known_plan(call: Any, given: tuple[Any, ...], tensors: Tensors, options: tuple[Any, ...], mods: Any) -> Any:
    """The plan of such a call, and whether its result is turned; None if there is no such plan yet."""
    return None if tensors or mods else torch_plans.find(torch_plans.name_of(call, options), given)


def forward(
    known: Any, with_lse: bool, q: Any, k: Any, v: Any, tensors: Tensors, options: tuple[Any, ...],
    mods: Mods | None,
) -> tuple[Any, Any]:  # fmt: skip
    """out, and lse or None. known: of `known_plan` for `with_lse` and q, k and v."""
    with foreign.TORCH.scope(q):
        if known is not None:
            planned, turned = known
            memory = View if q.is_cuda else foreign.TORCH.memory
            found = planned.run(memory(q), memory(k), memory(v), None)  # it reads addresses, in whatever order the axes
        else:
            given, own_options = (q, k, v), options
            turned = bhnd_in_bnhd_memory(q, options[LAYOUT]) and "page_table" not in tensors
            if turned:
                given = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                own_options = (*options[:LAYOUT], "bnhd", *options[LAYOUT + 1 :])
            keywords = _keywords(tensors, own_options, mods)
            by_plan = None if tensors or mods else _by_cached_plan(with_lse, given, keywords)
            if by_plan is not None:
                found, planned = by_plan
            else:
                lent = foreign.Loan(foreign.TORCH, q).lend(*given, **keywords)
                found = attention(**lent, return_lse=with_lse)
                planned = None if tensors or mods else _cached_plan(return_lse=with_lse, recorded=False, **lent)
            if planned is not None:
                torch_plans.keep(torch_plans.name_of(with_lse, options), (q, k, v), (planned, turned))
    out, lse = found if with_lse else (found, None)
    out = foreign.TORCH.own(out, q)
    return out.transpose(1, 2) if turned else out, None if lse is None else foreign.TORCH.own(lse, q)


def results_of(dout: Any, dlse: Any, out: Any, lse: Any) -> tuple[Any, ...]:
    """The tensors that a backward pass reads beside the inputs of the call."""
    return (out, lse, dout) if dlse is None else (out, lse, dout, dlse)


def backward(
    known: Any, dout: Any, dlse: Any, out: Any, lse: Any, of_bias: bool, q: Any, k: Any, v: Any, tensors: Tensors,
    options: tuple[Any, ...], mods: Mods | None,
) -> tuple[Any, ...]:  # fmt: skip
    """dq, dk and dv, contiguous as (B, H, N, D), dsinks or None, dbias or None.

    known: of `known_plan` for the number of `results_of`, and q, k, v and these.
    """
    with foreign.TORCH.scope(q):
        if known is not None:
            planned, memory = known[0], foreign.TORCH.memory
            of_results = planned.recorded(memory(q), memory(k), memory(v), memory(out), memory(lse))
            vjp: Any = Vjp(planned.problem, *of_results)
            arrays = memory(dout), None if dlse is None else memory(dlse)
        else:
            loan = foreign.Loan(foreign.TORCH, q)
            lent = loan.views(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse)
            arrays = lent.pop("dout"), lent.pop("dlse")
            keywords = loan.borrow(**_keywords(tensors, options, mods))
            vjp = vjp_of(**lent, **keywords)
            planned = None if tensors or mods else _cached_plan(lent["q"], lent["k"], lent["v"], **keywords)
            if planned is not None:
                results = results_of(dout, dlse, out, lse)
                torch_plans.keep(torch_plans.name_of(len(results), options), (q, k, v, *results), (planned, False))
        empty = arrays[0].empty if type(arrays[0]) is View else None
        found = vjp.gradients(*arrays, WRT if "sinks" in tensors else WRT[:3], empty)
        dq, dk, dv, *dsinks = [foreign.TORCH.own(x, q) for x in found]
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
    if not (PLAIN.issuperset(map(type, given)) and all(x.is_cpu for x in given)):
        return None
    q, k, v = map(foreign.TORCH.memory, given)
    entry = entry_of(q, k, v, return_lse=with_lse, recorded=False, **keywords)
    return None if entry is None or entry.planned is None else (entry.run(q, k, v, None), entry.repeated)

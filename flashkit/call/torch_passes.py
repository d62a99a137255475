"""The forward and the backward pass of flashkit.torch on tensors, by a plan that a call like this has left if there is
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..options import DEFAULTS, OPTIONS, TYPES, Layout, Precision, Role
from . import arrays, interop, torch_plans
from .call import Call
from .planned import Planned
from .plans import plan_of
from .torch_mods import Mods
from .views import View
from .vjp import TENSORS as QKV
from .vjp import Vjp

ARRAYS = tuple(name for name, option in OPTIONS.items() if option.axes)
NAMES = {"q_offset": ("q_offsets",), "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k")}
"""What operators call the tensors of an option, where that is not its own name."""

TENSORS = {each: OPTIONS[name].axes for name in ARRAYS for each in NAMES.get(name, (name,))} | {"seed": ""}
"""Arguments of operators that are tensors, beside q, k and v, and the axes of these options."""

_SCALARS: dict[Any, str] = {
    float | None: "float? {}=None", float: "float {}=0.0", bool: "bool {}=False", Layout: 'str {}="bhnd"',
    Precision | None: "str? {}=None",
    tuple[int | None, int | None] | None: "SymInt? {0}_left=None, SymInt? {0}_right=None",
}  # fmt: skip
"""The schema of an option of this type."""

SCHEMA = ", ".join((
    *(f"Tensor? {name}=None" for name in TENSORS),
    *(_SCALARS[TYPES[name]].format(name) for name in OPTIONS if TYPES[name] in _SCALARS),
    "SymInt? q_offset=None", "str? backend=None",
))  # fmt: skip
SCALARS = {
    (name := part.split()[1].partition("=")[0]): DEFAULTS.get(name) for part in SCHEMA.split(", ")[len(TENSORS) :]
}
"""The other arguments of operators, in their order, and their defaults."""

PAIRS = frozenset(name for name in TENSORS if name in OPTIONS and OPTIONS[name].role is Role.PAIRS)
"""Those of score modifications and masks, of which a plan reads the addresses."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that are no more than their memory."""

Tensors = dict[str, Any]
"""The tensors among the arguments of a call beside q, k and v, by the names of TENSORS."""

Scalars = tuple[tuple[str, Any], ...]
"""Those of SCALARS among them, with their names, without those at their defaults."""


def keywords_of(tensors: Tensors, options: Scalars, mods: Mods | None) -> dict[str, Any]:
    """The arguments of a call as those of flashkit.attention, tensors without marks of autograd."""
    keywords: dict[str, Any] = {**dict(options), **{name: x.detach() for name, x in tensors.items()}}
    window = keywords.pop("window_left", None), keywords.pop("window_right", None)
    if window != (None, None):
        keywords["window"] = window
    if "seed" in keywords:
        keywords["seed"] = int(keywords["seed"])
    for name, own in NAMES.items():
        if given := [keywords.pop(each) for each in own if each in keywords]:
            keywords[name] = given[0] if len(given) == 1 else tuple(given)
    return keywords if mods is None else keywords | mods.options()


def bhnd_in_bnhd_memory(q: Any, layout: str) -> bool:
    """Whether q is a transposed view of (B, N, H, D), as models make it: the result becomes one, too."""
    return layout == "bhnd" and q.dim() == 4 and q.stride(1) < q.stride(2) and q.shape[2] != 1


def known_plan(call: Any, given: tuple[Any, ...], tensors: Tensors, options: Scalars, mods: Any) -> Any:
    """The plan of such a call, and whether its result is transposed; None if there is no such plan yet."""
    read = _read(tensors, mods)
    if read is None:
        return None
    if read:
        given = *given, *read.values()
    return torch_plans.find(_name_of(call, read, options, mods), given)


def _read(tensors: Tensors, mods: Any) -> Tensors | None:
    """The tensors that a plan of such a call reads beside q, k and v; None where it depends on their contents."""
    if not PAIRS.issuperset(tensors):
        return None
    if mods is None:
        return tensors
    return tensors | mods.captured if isinstance(mods, Mods) and mods.form is not None else None


def _name_of(call: Any, read: Tensors, options: Scalars, mods: Mods | None) -> Any:
    return torch_plans.name_of(call, read if mods is None else (*read, mods.form), options)


def forward(
    known: Any, with_lse: bool, q: Any, k: Any, v: Any, tensors: Tensors, options: Scalars, mods: Mods | None
) -> tuple[Any, Any]:  # fmt: skip
    """out, and lse or None. known: of `known_plan` for `with_lse` and q, k and v."""
    if known is not None:
        planned, transposed = known
        with interop.TORCH.scope(q):
            memory = View if q.is_cuda else interop.TORCH.memory
            # A plan reads addresses, whatever the order of the axes.
            read = tensors if mods is None else tensors | mods.captured
            more = [memory(x) for x in read.values()] if read else ()
            output = planned.run_on(memory(q), memory(k), memory(v), None, *more)
            result = [interop.TORCH.own(x, q) for x in (output if with_lse else (output,))]
    else:
        qkv = q, k, v
        keywords = keywords_of(tensors, options, mods)
        transposed = bhnd_in_bnhd_memory(q, keywords.get("layout", "bhnd")) and "page_table" not in tensors
        if transposed:
            qkv = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            keywords["layout"] = "bnhd"
        backend = keywords.pop("backend", None)
        with Call("attention", *qkv, keywords) as call:
            is_memory = type(call.q) in (View, np.ndarray)  # and no copy with what a tensor puts off computed
            planned = plan_of(call, backend, with_lse)
            output = call.to_caller(planned.run(call))
            result = [*output] if with_lse else [output]
            if is_memory:
                _keep(with_lse, call, planned, transposed, (q, k, v), tensors, options, mods)
    out, lse = result if with_lse else (*result, None)
    return out.transpose(1, 2) if transposed else out, lse


def _keep(
    kind: Any, call: Call, planned: Any, transposed: bool, given: tuple[Any, ...], tensors: Tensors, options: Scalars,
    mods: Mods | None,
) -> None:  # fmt: skip
    """Keep the plan if it serves any call of these layouts: it reads addresses, and of `given` and tensors alone."""
    read, (own, axis, lengths, offsets, *_) = _read(tensors, mods), call.per_call
    if read is None or not (isinstance(planned, Planned) and planned.reads_addresses):
        return
    if axis or lengths is not None or offsets or len(own) != len(read):
        return
    if all(type(x) in PLAIN and arrays.address(y) == x.data_ptr() for x, y in zip(read.values(), own, strict=True)):
        torch_plans.keep(_name_of(kind, read, options, mods), (*given, *read.values()), (planned, transposed))


def results_of(dout: Any, dlse: Any, out: Any, lse: Any) -> tuple[Any, ...]:
    """The tensors that a backward pass reads beside the inputs of the call."""
    return (out, lse, dout) if dlse is None else (out, lse, dout, dlse)


def backward(
    known: Any, dout: Any, dlse: Any, out: Any, lse: Any, more: Sequence[str], q: Any, k: Any, v: Any, tensors: Tensors,
    options: Scalars, mods: Mods | None,
) -> list[Any]:  # fmt: skip
    """dq, dk and dv, contiguous as (B, H, N, D), and the gradients by `more`, names as of `Vjp.__call__`.

    known: of `known_plan` for the number of `results_of`, and q, k, v and these.
    """
    names = *QKV, *more
    if known is not None:
        planned, memory = known[0], interop.TORCH.memory
        with interop.TORCH.scope(q):
            read = tensors if mods is None else tensors | mods.captured
            given = q, k, v, out, lse, *read.values()
            recorded = planned.recorded_on(*map(memory, given))
            return _gradients(Vjp(recorded), q, memory(dout), None if dlse is None else memory(dlse), names)
    keywords = keywords_of(tensors, options, mods)
    backend = keywords.pop("backend", None)
    with Call("attention", q, k, v, keywords) as call:
        is_memory = type(call.q) in (View, np.ndarray)
        planned = plan_of(call, backend, True, recorded=True)
        adapter: Any = call.foreign
        take = adapter.views if type(call.q) is View else adapter.to_native
        native = take(out=out, lse=lse, dout=dout, dlse=dlse)
        vjp: Any = Vjp(planned.recorded(call, native["out"], native["lse"], kept=True), call.options)
        vjp.check_names(names)
        gradients = _gradients(vjp, q, native["dout"], native["dlse"], names)
        if is_memory:
            results = results_of(dout, dlse, out, lse)
            _keep(len(results), call, planned, False, (q, k, v, *results), tensors, options, mods)
    return gradients


def _gradients(vjp: Any, q: Any, dout: Any, dlse: Any, names: tuple[str, ...]) -> list[Any]:
    """The gradients of native arrays or Views as tensors."""
    empty = dout.empty if type(dout) is View else None
    return [interop.TORCH.own(x, q) for x in vjp.gradients(dout, dlse, names, empty)]

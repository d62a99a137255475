"""The forward and the backward pass of flashkit.torch on tensors, by a plan that a call like this has left if there is
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import dispatch
from ..backends.base import BoundBackward
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
        keywords["seed"] = int(keywords["seed"]) % 2**64
    for name, own in NAMES.items():
        if given := [keywords.pop(each) for each in own if each in keywords]:
            keywords[name] = given[0] if len(given) == 1 else tuple(given)
    return keywords if mods is None else keywords | mods.options()


def bhnd_in_bnhd_memory(q: Any, layout: str) -> bool:
    """Whether q is a transposed view of (B, N, H, D), as models make it: the result becomes one, too."""
    return layout == "bhnd" and q.dim() == 4 and q.stride(1) < q.stride(2) and q.shape[2] != 1


class Known(NamedTuple):
    """A plan of calls, which reads addresses, so that the order of axes does not matter to it."""

    planned: Planned
    transposed: bool
    """Whether its result is in (B, N, H, D)."""
    backward: dict[Any, torch_plans.Layouts]
    """The `PullBack`s of these calls."""

    def pull_back(self, more: Sequence[str], given: tuple[Any, ...]) -> Any:
        """The `PullBack` of such a call; None if there is none yet. given: q, k, v, `results_of` and `read_by`."""
        layouts = self.backward.get(_kind(more, given))
        return layouts and layouts.find(given)


class PullBack(NamedTuple):
    """A backward pass that reads addresses, and the slots of the values by which it has gradients."""

    planned: Planned
    run: BoundBackward
    slots: tuple[str, ...]


def _kind(more: Sequence[str], given: tuple[Any, ...]) -> Any:
    return len(given), tuple(more), dispatch.state()


def known_plan(with_lse: bool, q: Any, k: Any, v: Any, tensors: Tensors, options: Scalars, mods: Any) -> Any:
    """The `Known` of such a call; None if there is none yet."""
    if not _has_form(tensors, mods):
        return None
    return torch_plans.find(_name_of(with_lse, tensors, options, mods), (q, k, v, *read_by(tensors, mods)))


def read_by(tensors: Tensors, mods: Any) -> list[Any]:
    """The tensors that a call reads beside q, k and v."""
    return [*tensors.values()] if mods is None else [*tensors.values(), *mods.captured.values()]


def _has_form(tensors: Tensors, mods: Any) -> bool:
    """Whether the plan of such a call does not depend on the contents of these tensors."""
    return PAIRS.issuperset(tensors) and (mods is None or (isinstance(mods, Mods) and mods.form is not None))


def _name_of(with_lse: bool, tensors: Tensors, options: Scalars, mods: Mods | None) -> Any:
    names = tensors if mods is None else (*tensors, *mods.captured, mods.form)
    return torch_plans.name_of(with_lse, names, options)


def forward(
    known: Known | None, with_lse: bool, q: Any, k: Any, v: Any, tensors: Tensors, options: Scalars, mods: Mods | None
) -> tuple[Any, Any]:  # fmt: skip
    """out, and lse or None. known: the plan of such calls."""
    if known is not None:
        transposed = known.transposed
        with interop.TORCH.scope(q):
            memory, own = View if q.is_cuda else interop.TORCH.memory, interop.TORCH.own
            output = known.planned.run_on(*map(memory, (q, k, v)), None, *map(memory, read_by(tensors, mods)))
            out, lse = (own(output[0], q), own(output[1], q)) if with_lse else (own(output, q), None)
    else:
        qkv, keywords = (q, k, v), keywords_of(tensors, options, mods)
        transposed = bhnd_in_bnhd_memory(q, keywords.get("layout", "bhnd")) and "page_table" not in tensors
        if transposed:
            qkv = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            keywords["layout"] = "bnhd"
        backend = keywords.pop("backend", None)
        with Call("attention", *qkv, keywords) as call:
            is_memory = type(call.q) in (View, np.ndarray)  # and no copy with what a tensor puts off computed
            planned = plan_of(call, backend, with_lse)
            output = call.to_caller(planned.run(call))
            if is_memory and (shared := _shared(call, planned, tensors, mods)):
                given = q, k, v, *read_by(tensors, mods)
                torch_plans.keep(_name_of(with_lse, tensors, options, mods), given, Known(shared, transposed, {}))
        out, lse = output if with_lse else (output, None)
    return out.transpose(1, 2) if transposed else out, lse


def _shared(call: Call, planned: Any, tensors: Tensors, mods: Mods | None) -> Planned | None:
    """The plan if it serves any call of these layouts: it reads addresses, and of q, k, v and these tensors alone."""
    own, axis, lengths, offsets, *_ = call.per_call
    if not (_has_form(tensors, mods) and isinstance(planned, Planned) and planned.reads_addresses):
        return None
    read = read_by(tensors, mods)
    others = axis or lengths is not None or offsets or len(own) != len(read)
    return None if others or not _same_memory(read, own) else planned


def _same_memory(tensors: Iterable[Any], own: Iterable[Any]) -> bool:
    return all(type(x) in PLAIN and arrays.address(y) == x.data_ptr() for x, y in zip(tensors, own))


def results_of(dout: Any, dlse: Any, out: Any, lse: Any) -> tuple[Any, ...]:
    """The tensors that a backward pass reads beside the inputs of the call."""
    return (out, lse, dout) if dlse is None else (out, lse, dout, dlse)


def backward(
    known: Known | None, found: PullBack | None, dout: Any, dlse: Any, out: Any, lse: Any, more: Sequence[str],
    q: Any, k: Any, v: Any, tensors: Tensors, options: Scalars, mods: Mods | None,
) -> list[Any]:  # fmt: skip
    """dq, dk and dv, contiguous as (B, H, N, D), and the gradients by `more`, names as of `Vjp.__call__`.

    known: the plan of the call. found: this pass of it; None if `known` has yet to learn it.
    """
    results, own = results_of(dout, dlse, out, lse), interop.TORCH.own
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = dlse if dlse is None else dlse.contiguous()
    if found is not None:
        with interop.TORCH.scope(q):
            memory = View if q.is_cuda else interop.TORCH.memory
            lent = map(memory, (q, k, v, out, lse, *read_by(tensors, mods)))
            towards = memory(dout), None if dlse is None else memory(dlse)
            return [own(x, q) for x in found.planned.pull_back(found.run, found.slots, *towards, *lent)]
    names = *QKV, *more
    keywords = keywords_of(tensors, options, mods)
    backend = keywords.pop("backend", None)
    with Call("attention", q, k, v, keywords) as call:
        is_memory = type(call.q) in (View, np.ndarray)
        planned = plan_of(call, backend, True, recorded=True)
        adapter: Any = call.foreign
        take = adapter.views if type(call.q) is View else adapter.to_native
        native = take(stored_out=out, lse=lse, dout=dout, dlse=dlse)
        vjp: Any = Vjp(planned.recorded(call, native["stored_out"], native["lse"], kept=True), call.options)
        vjp.check_names(names)
        op, to = vjp.operands, vjp.to_fill(native["dout"], native["dlse"], names)
        vjp.backward(op, to)
        if known is not None and is_memory and (shared := _shared(call, planned, tensors, mods)):
            run, reads_addresses = vjp.backward.bound(op, to)
            own_results = op.out, op.lse, to.dout, to.dlse
            if reads_addresses and _same_memory(results_of(dout, dlse, out, lse), own_results):
                given, slots = (q, k, v, *results, *read_by(tensors, mods)), vjp.slots(names)
                layouts = known.backward.setdefault(_kind(more, given), torch_plans.Layouts())
                layouts.keep(given, PullBack(shared, run, tuple([slots[name] for name in more])))
        return [own(x, q) for x in vjp.returned(to, names)]

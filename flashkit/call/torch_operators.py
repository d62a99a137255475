"""The operators of flashkit.torch: the two passes as compilers, modes, profilers and transforms see them.

Operators take no functions: modifications are text and tensors (`torch_mods.Content`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .torch_mods import Mods, value_names
from .torch_passes import (
    SCALARS,
    SCHEMA,
    TENSORS,
    Scalars,
    Tensors,
    backward,
    bhnd_in_bnhd_memory,
    forward,
    known_plan,
    read_by,
    results_of,
)

# functorch does not find the batched tensors of an optional list, and is_grads_batched refuses lists of tensors.
_SCHEMA = f"Tensor q, Tensor k, Tensor v, Tensor?[] values, {SCHEMA}, str? mods=None"
_DEFAULTS = (*(None,) * len(TENSORS), *SCALARS.values(), None)

_library = torch.library.Library("flashkit", "DEF")  # operators exist as long as it does
_library.define(f"attention(bool with_lse, {_SCHEMA}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, str[] more, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def flat(tensors: Tensors, options: Scalars, text: str | None, values: Any) -> tuple[Any, ...]:
    """An operator's arguments behind v."""
    scalars = (SCALARS | dict(options)).values()
    return list(values), *(tensors.get(name) for name in TENSORS), *scalars, text


def _given(rest: tuple[Any, ...]) -> tuple[Tensors, Scalars, tuple[Any, Any]]:
    """An operator's arguments behind v: tensors, options, the content of the modifications."""
    values, given = rest[0], rest[1:]
    *filled, text = given + _DEFAULTS[len(given) :]  # operators drop defaults at the end of their arguments
    tensors = {name: x for name, x in zip(TENSORS, filled, strict=False) if x is not None}
    scalars = zip(SCALARS.items(), filled[len(TENSORS) :], strict=True)
    options = tuple((name, x) for (name, default), x in scalars if x is not default)
    return tensors, options, (text, values)


def _mods(content: tuple[Any, Any]) -> Mods | None:
    return None if content[0] is None else Mods.of_content(*content)


def _lse_dtype(q: Any) -> Any:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward_impl(with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    tensors, options, content = _given(rest)
    with torch.no_grad():  # below autograd; `requires_grad` says nothing here
        mods = _mods(content)
        known = known_plan(with_lse, q, k, v, tensors, options, mods)
        out, lse = forward(known, with_lse, q, k, v, tensors, options, mods)
    return out, q.new_empty(0, dtype=_lse_dtype(q)) if lse is None else lse


def _backward_impl(
    dout: Any, dlse: Any, out: Any, lse: Any, more: list[str], q: Any, k: Any, v: Any, *rest: Any
) -> tuple[Any, ...]:
    tensors, options, content = _given(rest)
    with torch.no_grad():
        mods, inputs = _mods(content), (q, k, v)
        known = known_plan(True, *inputs, tensors, options, mods)
        given = *inputs, *results_of(dout, dlse, out, lse), *read_by(tensors, mods)
        found = known and known.pull_back(more, given)
        dq, dk, dv, *others = backward(
            known, found, dout, dlse, out, lse, more, *inputs, tensors, options, mods
        )  # fmt: skip
    numbers = [x.reshape(-1).to(lse.dtype) for x in others]
    if len(numbers) != 1:
        numbers = [torch.cat(numbers) if numbers else lse.new_empty(0)]
    return dq, dk, dv, *numbers  # a list has no batching rule of autograd's


def unpacked(gradients: Any, tensors: Sequence[Any]) -> list[Any]:
    """The gradients by these tensors, which the operator returns one after another."""
    parts = gradients.split([x.numel() for x in tensors]) if tensors else ()
    return [part.reshape(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]


def _fake_forward(with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    tensors, layout = _layout(rest)
    if bhnd_in_bnhd_memory(q, layout) and "page_table" not in tensors:
        out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)
    else:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = q.shape[:-1] if layout == "bhnd" or q.dim() == 2 else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(rows if with_lse else (0,), dtype=_lse_dtype(q))


def _fake_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, more: list[str], q: Any, k: Any, v: Any, *rest: Any
) -> tuple[Any, ...]:
    tensors, layout = _layout(rest)

    def like(x: Any) -> Any:
        if layout == "bhnd" or x.dim() == 2:
            return x.new_empty(x.shape)
        return x.new_empty((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1])).transpose(-3, -2)

    text, values = _given(rest)[2]
    own = tensors | dict(zip(value_names(text), values, strict=True))
    return like(q), like(k), like(v), lse.new_empty(sum(own[name].numel() for name in more))


def _layout(rest: tuple[Any, ...]) -> tuple[Tensors, str]:
    """Tensors, and the layout of q, k and v: packed sequences are (T, H, D)."""
    tensors, options, _ = _given(rest)
    return tensors, "bnhd" if "cu_seqlens_q" in tensors else dict(options).get("layout", "bhnd")


# --- under torch.vmap -------------------------------------------------------------------------------------------------
# One call with a further batch axis, or one for each entry where results depend on the number of a batch entry, or
# arguments have no batch axes.


Batched = dict[str, tuple[Any, int | None]]
"""Tensors by name, and the axis of each along which it is batched."""

_AXES = TENSORS | dict.fromkeys(("q", "k", "v", "out", "dout"), "tokens") | dict.fromkeys(("lse", "dlse"), "rows")


def batched_results(
    call: Callable[[dict[str, Any]], tuple[Any, ...]], size: int, given: Batched, options: Scalars,
    names: tuple[str, ...], alone: bool, more: Collection[str] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """The results of these names, each batched along its first axis.

    call: the pass, of tensors by name. alone: whether each entry needs its own call regardless. more: tensors by which
    each entry has a gradient of its own.
    """
    if alone or not _fits_one_call(given, options):
        entries = [
            call({name: x if axis is None else x.select(axis, i) for name, (x, axis) in given.items()})
            for i in range(size)
        ]
        return tuple(torch.stack(each) for each in zip(*entries, strict=True))
    q, axis = given["q"]
    shape = [n for i, n in enumerate(q.shape) if i != axis]
    head = 1 if dict(options).get("layout", "bhnd") == "bhnd" else 2
    lent = {name: _as_batch(name, x, axis, size, shape, head, name in more) for name, (x, axis) in given.items()}
    outputs = zip(names, call(lent), strict=True)
    return tuple(_as_entries(name, x, size, len(shape), head) for name, x in outputs)


def _fits_one_call(given: Batched, options: Scalars) -> bool:
    """Whether a further batch axis changes no result: entries are not numbered, and all arguments have batch axes."""
    alike = all(
        axes != "memory" and (axes != "heads" or (given[name][1] is None and given[name][0].dim() == 1))
        for name, axes in TENSORS.items() if name in given
    )  # fmt: skip
    return alike and not dict(options).get("dropout_p")


def _as_batch(name: str, x: Any, axis: int | None, size: int, shape: list[int], head: int, own: bool) -> Any:
    """An argument of all entries; shape: of q in one of them. own: whether each entry has a gradient by it."""
    axes = _AXES.get(name, "")
    if axes in ("", "heads", "memory") or (axes == "pairs" and axis is None and not own):
        return x
    x = x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
    if axes == "pairs":
        return x.reshape(size, *[1] * (max(len(shape), 3) + 1 - x.dim()), *x.shape[1:])
    if axes == "entries":
        batch = shape[:-3]
        return x.reshape(size, -1).expand(size, math.prod(batch)).reshape(size, *batch)
    if len(shape) == 2:  # without heads, which q, k and v may lack if they have no batch axis
        return x.unsqueeze(1 if axes == "rows" else head)
    return x


def _as_entries(name: str, x: Any, size: int, axes: int, head: int) -> Any:
    """A result of all entries. axes: of q in one of them."""
    if x.dim() == 1:  # numbers of all entries, or none
        return x.reshape(size, x.numel() // size)
    if axes == 2:
        return x.squeeze(1 if name == "lse" else head)
    return x


def _batched(rest: tuple[Any, ...], axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments behind v: tensors by name with their axes, options, text, names of the text's tensors."""
    tensors, options, (text, values) = _given(rest)
    of_values, *of_tensors = axes
    names = value_names(text)
    given = {name: (x, of_tensors[list(TENSORS).index(name)]) for name, x in tensors.items()}
    return given | dict(zip(names, zip(values, of_values or [None] * len(values)), strict=True)), options, text, names


def _batched_forward(info: Any, axes: tuple[Any, ...], with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    given, options, text, values = _batched(rest, axes[4:])

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        arguments = flat(x, options, text, [x[name] for name in values])
        return forward_op(with_lse, x["q"], x["k"], x["v"], *arguments)

    given |= dict(zip("qkv", zip((q, k, v), axes[1:4]), strict=True))
    return batched_results(call, info.batch_size, given, options, ("out", "lse"), text is not None), (0, 0)


def _batched_backward(
    info: Any, axes: tuple[Any, ...], dout: Any, dlse: Any, out: Any, lse: Any, more: list[str], q: Any, k: Any, v: Any,
    *rest: Any,
) -> Any:  # fmt: skip
    given, options, text, values = _batched(rest, axes[8:])

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        arguments = flat(x, options, text, [x[name] for name in values])
        results = x["dout"], x.get("dlse"), x["out"], x["lse"], more
        return backward_op(*results, x["q"], x["k"], x["v"], *arguments)

    own = (("dout", dout), ("dlse", dlse), ("out", out), ("lse", lse), ("", None), ("q", q), ("k", k), ("v", v))
    given |= {name: (x, axis) for (name, x), axis in zip(own, axes) if x is not None}
    alone = text is not None or any(TENSORS.get(name) != "pairs" for name in more)
    return batched_results(call, info.batch_size, given, options, ("dq", "dk", "dv", "more"), alone, more), (0,) * 4


def _no_gradient(ctx: Any, *_: Any) -> Any:
    """Without it the derivative of an operator that no autograd.Function surrounds would be 0, with a warning."""
    raise NotImplementedError(
        "flashkit's operators have no gradient by themselves; flashkit.torch.attention has one, but not where "
        "torch.compile traces transforms of torch.func"
    )


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _forward_impl, _device)
    _library.impl("attention_backward", _backward_impl, _device)
for _name, _fake, _rule in (
    ("attention", _fake_forward, _batched_forward), ("attention_backward", _fake_backward, _batched_backward),
):  # fmt: skip
    torch.library.register_fake(f"flashkit::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"flashkit::{_name}", _rule, lib=_library)
    torch.library.register_autograd(f"flashkit::{_name}", _no_gradient, lib=_library)
forward_op = torch.ops.flashkit.attention.default
backward_op = torch.ops.flashkit.attention_backward.default

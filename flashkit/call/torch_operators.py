"""The operators of flashkit.torch: the two passes as compilers, modes, profilers and transforms see them.

Operators take no functions: modifications are text and tensors (`torch_mods.Content`).
"""

from __future__ import annotations

from typing import Any

import torch

from . import torch_batching
from .torch_mods import Mods
from .torch_passes import (
    LAYOUT,
    OPTION_DEFAULTS,
    SCHEMA,
    TENSORS,
    Tensors,
    backward,
    bhnd_in_bnhd_memory,
    forward,
    known_plan,
    results_of,
)

_SCHEMA = f"Tensor q, Tensor k, Tensor v, {SCHEMA}, str? mods=None, Tensor[]? values=None"
_DEFAULTS = (*(None,) * len(TENSORS), *OPTION_DEFAULTS, None, None)

_library = torch.library.Library("flashkit", "DEF")  # operators exist as long as it does
_library.define(f"attention(bool with_lse, {_SCHEMA}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool of_bias, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def flat(tensors: Tensors, options: tuple[Any, ...], text: str | None, values: Any) -> tuple[Any, ...]:
    """An operator's arguments behind v."""
    return *(tensors.get(name) for name in TENSORS), *options, text, None if text is None else list(values)


def _given(rest: tuple[Any, ...]) -> tuple[Tensors, tuple[Any, ...], tuple[Any, Any]]:
    """An operator's arguments behind v: tensors, options, the content of the modifications."""
    *filled, text, values = rest + _DEFAULTS[len(rest) :]  # operators drop defaults at the end of their arguments
    tensors = {name: x for name, x in zip(TENSORS, filled, strict=False) if x is not None}
    return tensors, tuple(filled[len(TENSORS) :]), (text, values or ())


def _mods(content: tuple[Any, Any]) -> Mods | None:
    return None if content[0] is None else Mods.of_content(*content)


def _lse_dtype(q: Any) -> Any:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward_impl(with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    tensors, options, content = _given(rest)
    with torch.no_grad():  # below autograd; `requires_grad` says nothing here
        mods = _mods(content)
        known = known_plan(with_lse, (q, k, v), tensors, options, mods)
        out, lse = forward(known, with_lse, q, k, v, tensors, options, mods)
    return out, q.new_empty(0, dtype=_lse_dtype(q)) if lse is None else lse


def _backward_impl(
    dout: Any, dlse: Any, out: Any, lse: Any, of_bias: bool, q: Any, k: Any, v: Any, *rest: Any
) -> tuple[Any, ...]:
    tensors, options, content = _given(rest)
    with torch.no_grad():
        mods, results = _mods(content), results_of(dout, dlse, out, lse)
        known = known_plan(len(results), (q, k, v, *results), tensors, options, mods)
        found = backward(known, dout, dlse, out, lse, of_bias, q, k, v, tensors, options, mods)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _fake_forward(with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    tensors, layout = _layout(rest)
    if bhnd_in_bnhd_memory(q, layout) and "page_table" not in tensors:
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
    return tensors, "bnhd" if "cu_seqlens_q" in tensors else options[LAYOUT]


# --- under torch.vmap -------------------------------------------------------------------------------------------------


def _batched(rest: tuple[Any, ...], axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments behind v: tensors by name with their axes, options, text, names of the text's tensors."""
    tensors, options, (text, values) = _given(rest)
    of_values = axes[-1] if values and axes[-1] is not None else [None] * len(values)
    names = torch_batching.value_names(values)
    given = {name: (x, axes[list(TENSORS).index(name)]) for name, x in tensors.items()}
    return given | dict(zip(names, zip(values, of_values), strict=True)), options, text, names


def _batched_forward(info: Any, axes: tuple[Any, ...], with_lse: bool, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    given, options, text, values = _batched(rest, axes[4:])

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        arguments = flat(x, options, text, [x[name] for name in values])
        return forward_op(with_lse, x["q"], x["k"], x["v"], *arguments)

    given |= dict(zip("qkv", zip((q, k, v), axes[1:4]), strict=True))
    return torch_batching.results(call, info.batch_size, given, options, ("out", "lse"), text is not None), (0, 0)


def _batched_backward(
    info: Any, axes: tuple[Any, ...], dout: Any, dlse: Any, out: Any, lse: Any, of_bias: bool, q: Any, k: Any, v: Any,
    *rest: Any,
) -> Any:  # fmt: skip
    given, options, text, values = _batched(rest, axes[8:])

    def call(x: dict[str, Any]) -> tuple[Any, ...]:
        arguments = flat(x, options, text, [x[name] for name in values])
        results = x["dout"], x.get("dlse"), x["out"], x["lse"], of_bias
        return backward_op(*results, x["q"], x["k"], x["v"], *arguments)

    own = (("dout", dout), ("dlse", dlse), ("out", out), ("lse", lse), ("", None), ("q", q), ("k", k), ("v", v))
    given |= {name: (x, axis) for (name, x), axis in zip(own, axes) if x is not None}
    names = ("dq", "dk", "dv", "dsinks", "dbias")
    alone = text is not None or "sinks" in given
    return torch_batching.results(call, info.batch_size, given, options, names, alone, of_bias), (0,) * 5


def _no_gradient(ctx: Any, *_: Any) -> Any:
    """Without it the derivative of an operator that no autograd.Function surrounds would be 0, with a warning."""
    raise NotImplementedError(
        "flashkit's operators have no gradient by themselves; flashkit.torch.attention has one, but not where "
        "torch.compile traces transforms of torch.func, and no second derivatives"
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

"""Calls under `torch.vmap`: one call with a further batch axis, or one for each entry where results depend on the
number of a batch entry, or arguments have no batch axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .torch_passes import LAYOUT, OPTION_NAMES, TENSORS

Batched = dict[str, tuple[Any, int | None]]
"""Tensors by name, and the axis of each along which it is batched."""

_AXES = TENSORS | dict.fromkeys(("q", "k", "v", "out", "dout"), "tokens") | dict.fromkeys(("lse", "dlse"), "rows")
_DROPOUT = OPTION_NAMES.index("dropout_p")


def value_names(values: Any) -> list[str]:
    """Names of the tensors of modifications."""
    return [f"value{i}" for i in range(len(values))]


def results(
    call: Callable[[dict[str, Any]], tuple[Any, ...]], size: int, given: Batched, options: tuple[Any, ...],
    names: tuple[str, ...], alone: bool, of_bias: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The results of these names, each batched along its first axis.

    call: the pass, of tensors by name. alone: whether each entry needs its own call regardless. of_bias: whether
    each entry has a gradient of its own by a bias.
    """
    if alone or not _fits_one_call(given, options):
        entries = [
            call({name: x if axis is None else x.select(axis, i) for name, (x, axis) in given.items()})
            for i in range(size)
        ]
        return tuple(torch.stack(each) for each in zip(*entries, strict=True))
    q, axis = given["q"]
    shape = [n for i, n in enumerate(q.shape) if i != axis]
    head = 1 if options[LAYOUT] == "bhnd" else 2
    lent = {name: _as_batch(name, x, axis, size, shape, head, of_bias) for name, (x, axis) in given.items()}
    outputs = zip(names, call(lent), strict=True)
    return tuple(_as_entries(name, x, size, len(shape), head, given) for name, x in outputs)


def _fits_one_call(given: Batched, options: tuple[Any, ...]) -> bool:
    """Whether a further batch axis changes no result: entries are not numbered, and all arguments have batch axes."""
    alike = all(
        axes != "memory" and (axes != "heads" or (given[name][1] is None and given[name][0].dim() == 1))
        for name, axes in TENSORS.items() if name in given
    )  # fmt: skip
    return alike and not options[_DROPOUT]


def _as_batch(name: str, x: Any, axis: int | None, size: int, shape: list[int], head: int, of_bias: bool) -> Any:
    """An argument of all entries; shape: of q in one of them."""
    axes = _AXES.get(name, "")
    if axes in ("", "heads", "memory") or (axes == "pairs" and axis is None and not (of_bias and name == "bias")):
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


def _as_entries(name: str, x: Any, size: int, axes: int, head: int, given: Batched) -> Any:
    """A result of all entries. axes: of q in one of them."""
    if x.dim() == 1:  # stands for a result that is not asked for
        return x.new_empty(size, 0)
    if name == "dbias":
        bias, axis = given["bias"]
        return x.reshape(size, *[n for i, n in enumerate(bias.shape) if i != axis])
    if axes == 2:
        return x.squeeze(1 if name == "lse" else head)
    return x

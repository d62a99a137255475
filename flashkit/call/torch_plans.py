"""Plans of repeated calls of tensors, found by guards of PyTorch's.

`torch.compile` asks before each call of compiled code whether tensors are like those that it was compiled for. The
same functions tell here whether a plan fits. In one call they compare the class of a tensor, its dispatch keys and this
thread's, dtype, device, sizes, strides and whether it requires grad. Equal dispatch keys mean that PyTorch would do the
same with both: they differ for negated and sparse memory, under transforms, tracing and autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import dispatch
from ..options import PLAIN
from . import plans

_MAX_LAYOUTS = 8
"""Layouts of calls with the same options."""


class Layouts:
    """What is known of calls with the same options, by the layouts of their tensors; the last found out first."""

    __slots__ = "known", "last_use"

    def __init__(self) -> None:
        self.known: tuple[tuple[Callable[..., bool], Any], ...] = ()
        self.last_use = 0


def name_of(call: Any, tensors: Iterable[str], options: tuple[tuple[str, Any], ...]) -> Any:
    """The key of calls of one kind with these tensors and options. Types belong to it, since True == 1."""
    return call, tuple([type(x) for _, x in options]), options, tuple(tensors), dispatch.state()


def find(name: Any, tensors: tuple[Any, ...]) -> Any:
    """What is known of calls of this name and of such tensors, q, k and v first; None if nothing is."""
    layouts = plans.get(name)
    if layouts is not None:
        for tensor in tensors:
            if tensor.is_nested:  # without strides, for which guards end the process
                return None
        for fits, known in layouts.known:
            if fits(*tensors):
                return known if _is_aligned(*tensors[:3]) else None
    return None


def keep(name: Any, tensors: tuple[Any, ...], known: Any) -> None:
    """Keep what is known of calls of this name and of such tensors, which are plain and aligned."""
    if not PLAIN.issuperset(name[1]):
        return
    try:
        fits = _guard(tensors)
    except (AttributeError, TypeError):  # another version of PyTorch
        return
    layouts = plans.get(name) or Layouts()
    layouts.known = ((fits, known), *layouts.known[: _MAX_LAYOUTS - 1])
    plans.put(name, layouts)


def _is_aligned(q: Any, k: Any, v: Any) -> bool:
    """The memory of other libraries may begin anywhere. On a GPU it does not, and plans do not ask."""
    return not q.is_cpu or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % q.element_size() == 0


def _guard(tensors: tuple[Any, ...]) -> Callable[..., bool]:
    """Whether other tensors are like these."""
    if len(set(map(id, tensors))) == len(tensors):
        made = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = made.check
        return check
    apart = [_guard((tensor,)) for tensor in tensors]  # a guard refuses tensors some of which are the same
    return lambda *others: all(map(operator.call, apart, others))

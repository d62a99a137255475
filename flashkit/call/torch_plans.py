"""Plans of repeated calls of tensors, found by guards of PyTorch's.

`torch.compile` asks before each call of compiled code whether tensors are like those that it was compiled for. The
same functions tell here whether a plan fits. In one call they compare the class of a tensor, its dispatch keys and this
thread's, dtype, device, sizes, strides and whether it requires grad. Equal dispatch keys mean that PyTorch would do the
same with both: they differ for negated and sparse memory, under transforms, tracing and autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from .. import dispatch
from ..options import PLAIN
from . import plans

_MAX_LAYOUTS = 8
"""Layouts of calls with the same options."""


class Layouts:
    """What is known of calls with the same options, by the layouts of their tensors; the last found out first."""

    __slots__ = "_known", "last_use"

    def __init__(self) -> None:
        self._known: tuple[tuple[Callable[..., bool], Any], ...] = ()
        self.last_use = 0

    def find(self, tensors: tuple[Any, ...]) -> Any:
        """What is known of calls of such tensors; None if nothing is."""
        for tensor in tensors:
            if tensor.is_nested:  # without strides, for which guards end the process
                return None
        for fits, known in self._known:
            if fits(*tensors):
                return known if tensors[0].is_cuda or _are_aligned(tensors) else None
        return None

    def keep(self, tensors: tuple[Any, ...], known: Any) -> None:
        """Keep what is known of calls of such tensors, which are plain and aligned."""
        with suppress(AttributeError, TypeError):  # another version of PyTorch
            self._known = ((_guard(tensors), known), *self._known[: _MAX_LAYOUTS - 1])


def name_of(call: Any, tensors: Iterable[str], options: tuple[tuple[str, Any], ...]) -> Any:
    """The key of calls of one kind with these tensors and options. Types belong to it, since True == 1."""
    return call, tuple([type(x) for _, x in options]), options, tuple(tensors), dispatch.state()


def find(name: Any, tensors: tuple[Any, ...]) -> Any:
    """What is known of calls of this name and of such tensors; None if nothing is."""
    layouts = plans.get(name)
    return None if layouts is None else layouts.find(tensors)


def keep(name: Any, tensors: tuple[Any, ...], known: Any) -> None:
    """Keep what is known of calls of this name and of such tensors, as `Layouts.keep`."""
    if PLAIN.issuperset(name[1]):
        layouts = plans.get(name) or Layouts()
        layouts.keep(tensors, known)
        plans.put(name, layouts)


def _are_aligned(tensors: tuple[Any, ...]) -> bool:
    """The memory of other libraries may begin anywhere. On a GPU it does not, and plans do not ask."""
    return not any(tensor.data_ptr() % tensor.element_size() for tensor in tensors)


def _guard(tensors: tuple[Any, ...]) -> Callable[..., bool]:
    """Whether other tensors are like these."""
    if len(set(map(id, tensors))) == len(tensors):
        made = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = made.check
        return check
    apart = [_guard((tensor,)) for tensor in tensors]  # a guard refuses tensors some of which are the same
    return lambda *others: all(map(operator.call, apart, others))

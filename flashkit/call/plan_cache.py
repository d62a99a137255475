"""The plans that `attention` caches, by the layout of its arrays, its options and its block mask.

A repeated call costs a look-up. Whatever a plan depends on is part of its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from .. import dispatch
from ..devices.forking import inner_lock
from ..mods.block_mask import BlockMask
from ..spec import Operands
from . import arrays
from .planned import Planned
from .shape import LAYOUTS

FEW_QUERIES, MIN_KEYS = 8, 16
"""Fewer queries over at least so many keys are decoded on the CPU. Then nothing but lengths depends on the exact number
of keys, so calls over more and more keys share a plan and give the bits of a plan for each."""

_MAX_PLANS = 256
_MAX_MASK_BYTES = 1 << 20  # of a block mask that a cached plan keeps alive
_plans: OrderedDict[Any, Planned] = OrderedDict()
_lock = inner_lock()


def accepts(block_mask: Any) -> bool:
    """Whether a plan with this block mask (or None) may be cached: it keeps the arrays of the mask alive, so they have
    to be small.
    """
    if block_mask is None:
        return True
    if not isinstance(block_mask, BlockMask):
        return False
    return sum(array.nbytes for array in block_mask.mod.arrays.values()) <= _MAX_MASK_BYTES


def varying(q: Any, k: Any, v: Any, layout: str, kv_lengths: Any, plain: bool) -> int:
    """What each call passes anew, although it is of integers: the axis of the keys, a negative number, for few queries
    over slices of a cache; 1 for kv_lengths; 0 for nothing. plain: whether the call has no arrays of pairs.
    """
    if not (plain and type(q) is type(k) is type(v) is np.ndarray and type(layout) is str):
        return 0
    if kv_lengths is not None:
        return 1
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    axis = -2 if len(of_q) == 2 or layout == "bhnd" else -3
    if not len(of_q) == len(of_k) == len(of_v) > 1 or layout not in LAYOUTS:
        return 0
    return axis if of_q[axis] < FEW_QUERIES and of_k[axis] == of_v[axis] >= MIN_KEYS else 0


def room(k: Any, axis: int) -> int | None:
    """The keys that a plan for k is for, where each call has its own number: its key has their bits. None elsewhere."""
    return (1 << k.shape[axis].bit_length()) - 1 if axis < 0 else None


def key(tensors: tuple[Any, Any, Any], others: Sequence[Any], options: tuple[Any, ...], vary: int = 0) -> Any:
    """The key of a call of attention(): it determines the call except for the contents of arrays.

    Parameters
    ----------
    tensors
        q, k and v.
    others
        Arrays of modifications, or None.
    options
        Numbers, flags, strings, None, tuples of these, and block masks, which are equal only to themselves. The types
        belong to the key, since True == 1. So does the state that chooses the backend.
    vary
        Of `varying`: these integers are not part of the key, but for the number of bits of the number of keys.

    Returns
    -------
    object or None
        None for a call that cannot be cached.
    """
    q, k, v = tensors
    kind = type(q)
    if not kind is type(k) is type(v) or (kind is not np.ndarray and arrays.kind_of(q) != "cupy"):
        return None
    if others and not {kind, type(None)}.issuperset(map(type, others)):
        return None
    of_others = tuple([None if array is None else arrays.layout(array) for array in others]) if others else ()
    layouts: Any
    if vary < 0:  # the path of a step of decoding
        of_k, of_v, after = k.shape, v.shape, vary + 1
        layouts = (
            q.shape, of_k[:vary], of_k[after:], of_v[:vary], of_v[after:], of_k[vary].bit_length(), q.strides,
            k.strides, v.strides, q.dtype, k.dtype, v.dtype, q.flags.aligned, k.flags.aligned, v.flags.aligned,
        )  # fmt: skip
    else:
        layouts = arrays.layout(q), arrays.layout(k), arrays.layout(v), of_others
    return layouts, options, tuple(map(type, options)), dispatch.state(), vary


def names_of(given: Sequence[Any], operands: Operands) -> tuple[str, ...] | None:
    """The names of these arrays among the operands' arrays.

    None if one of them was copied or reshaped, or matches two: a kernel reads an array in the layout of the operand.
    """
    found = [
        [
            name
            for name, own in operands.arrays.items()
            if arrays.layout(own) == arrays.layout(array) and arrays.same_address(array, own)
        ]
        for array in given
    ]
    names = tuple(chain.from_iterable(found))
    return names if all(len(each) == 1 for each in found) and len(set(names)) == len(names) else None


def get(key: Any) -> Planned | None:
    """The cached plan of this key."""
    with _lock:
        try:
            found = _plans.get(key)
        except TypeError:  # an option cannot be hashed
            return None
        if found is not None:
            _plans.move_to_end(key)
        return found


def put(key: Any, planned: Planned) -> None:
    """Cache a plan; the least recently used ones are dropped."""
    with _lock, suppress(TypeError):
        _plans[key] = planned
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)


def clear() -> None:
    """Drop all plans."""
    with _lock:
        _plans.clear()

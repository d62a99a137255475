"""The plans that `attention` caches, by the layout of its arrays, its options and its block mask.

A repeated call costs a look-up. Whatever a plan depends on is part of its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from .. import dispatch
from ..devices.forking import inner_lock
from ..mods.block_mask import BlockMask
from ..spec import Operands
from . import arrays
from .planned import Planned
from .shape import HEADS_AND_TOKENS

FEW_QUERIES, MIN_KEYS = 8, 16
"""Fewer queries over at least so many keys are decoded on the CPU. Then nothing but lengths depends on the exact number
of keys, so calls over more and more keys share a plan and give the bits of a plan for each."""

_TOKENS = {layout: tokens for layout, (_, tokens) in HEADS_AND_TOKENS.items()}
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
    if not plain or type(q) is not np.ndarray:
        return 0
    if kv_lengths is not None:
        return 1
    axis = -2 if q.ndim == 2 else _TOKENS.get(layout, -1)
    if not (type(k) is type(v) is np.ndarray and q.ndim == k.ndim == v.ndim > 1):
        return 0
    few = q.shape[axis] < FEW_QUERIES and k.shape[axis] >= MIN_KEYS and k.shape[axis] == v.shape[axis]
    return axis if few and axis != -1 else 0


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
    of_keys: Any = arrays.layout(k), arrays.layout(v)
    if vary < 0:
        of_keys = tuple([(shape[:vary], shape[vary + 1 :], *rest) for _, shape, *rest in of_keys]), room(k, vary)
    made = (arrays.layout(q), of_keys, of_others), options, tuple(map(type, options)), dispatch.state(), vary
    try:
        hash(made)
    except TypeError:
        return None
    return made


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
        found = _plans.get(key)
        if found is not None:
            _plans.move_to_end(key)
        return found


def put(key: Any, planned: Planned) -> None:
    """Cache a plan; the least recently used ones are dropped."""
    with _lock:
        _plans[key] = planned
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)


def clear() -> None:
    """Drop all plans."""
    with _lock:
        _plans.clear()

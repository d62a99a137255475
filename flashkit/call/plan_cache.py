"""The plans that `attention` caches, by the layout of its arrays, its options and its block mask.

A repeated call costs a look-up. Whatever a plan depends on is part of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Any

import numpy as np

from .. import dispatch
from ..devices.forking import inner_lock
from ..mods.block_mask import BlockMask
from ..spec import Operands, Problem
from . import arrays
from .planned import Planned
from .shape import LAYOUTS, Shape
from .views import View
from .vjp import Vjp

FEW_QUERIES, MIN_KEYS = 8, 16
"""Fewer queries over at least so many keys are decoded on the CPU. Then nothing but lengths depends on the exact number
of keys, so calls over more and more keys share a plan and give the bits of a plan for each."""

_MAX_PLANS = 256
_MAX_MASK_BYTES = 1 << 20  # of a block mask that a cached plan keeps alive
_MAX_OFFSET_BYTES = 1 << 14  # of offsets that are part of a key
_plans: dict[Any, Any] = {}  # plans, and `torch_plans.Layouts`; each has a `last_use`
_lock = inner_lock()
_ticks = count()


class Entry:
    """The place in the cache of the plan of one call of attention(), and what each such call passes anew.

    Attributes
    ----------
    planned : Planned or None
        The plan that an earlier call has put there.
    """

    __slots__ = "_anew", "_follows", "_keys_axis", "_kv_lengths", "_name", "_offsets", "_tokens", "planned"

    @property
    def repeated(self) -> Planned | None:
        """The plan, if it reads addresses and its calls pass nothing anew but q, k and v, of one layout."""
        if self._anew or self._keys_axis != 0 or self._kv_lengths is not None or self._offsets:
            return None
        return self.planned if self.planned is not None and self.planned.reads_addresses else None

    def __init__(
        self, name: Any, anew: tuple[Any, ...], keys_axis: int, kv_lengths: Any, offsets: tuple[Any, ...],
        tokens: tuple[int, int], follows: bool,
    ) -> None:  # fmt: skip
        self._name, self._anew, self._keys_axis, self._kv_lengths = name, anew, keys_axis, kv_lengths
        self._offsets, self._tokens, self._follows = offsets, tokens, follows
        self.planned = get(name)

    def plan(
        self, problem: Problem, operands: Operands, shape: Shape, given: tuple[Any, Any, Any], q_offset: Any,
        backend: str | None, return_lse: bool,
    ) -> bool:  # fmt: skip
        """Plan the prepared call here. False if its plan cannot serve other calls, and so has to be thrown away."""
        anew = names_of(self._anew, operands)
        if anew is None:
            return False
        if self._offsets:
            anew += tuple(name for name in operands.sequences() if self._follows or name != "q_offset")
        axis, varies = self._keys_axis, self._keys_axis < 0 or self._kv_lengths is not None
        self.planned = Planned(
            problem, operands, shape, given, backend, return_lse, anew, varies,
            follows=problem.n_q if varies and q_offset is None else None,
            room=_room(given[1].shape[axis]) if axis < 0 else None,
        )  # fmt: skip
        if not varies or self.planned.takes_lengths:
            put(self._name, self.planned)
        return True

    def vjp(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Vjp[Any]:
        """The vector-Jacobian product of a call by the plan that is here, of its results."""
        planned: Any = self.planned
        return Vjp(planned.problem, *planned.recorded(q, k, v, out, lse, *self._anew))

    def run(self, q: Any, k: Any, v: Any, out: Any) -> Any:
        """The call by the plan that is here."""
        planned: Any = self.planned
        if self._kv_lengths is not None:
            return planned.with_lengths(q, k, v, out, self._kv_lengths)
        if self._keys_axis < 0:
            return planned.with_keys(q, k, v, out, self._keys_axis)
        if self._offsets:
            from ..backends.cuda_common.cu_seqlens import derive

            found = derive(self._offsets[0], self._tokens[0], self._offsets[1], self._tokens[1])
            return planned.run(q, k, v, out, *self._anew, *(found if self._follows else found[:-1]))
        return planned.run(q, k, v, out, *self._anew)


def entry(
    tensors: tuple[Any, Any, Any], out: Any, others: tuple[Any, Any, Any], block_mask: Any, kv_lengths: Any,
    layout: str, options: tuple[Any, ...], cu_seqlens: Any = None, packed: Any = None, q_offset: Any = None,
    recorded: bool = False,
) -> Entry | None:  # fmt: skip
    """The cache's entry for a call; None if its plan cannot be cached.

    Parameters
    ----------
    tensors, out, block_mask, kv_lengths, layout
        Of the call. kv_lengths are no part of the key, nor is the number of keys where few queries decode slices of a
        cache.
    others
        alibi_slopes, bias and mask: their layouts are part of the key.
    options
        All else that determines the call, but for
    cu_seqlens, packed, q_offset
        Of the call; packed is the contents of cu_seqlens, from `frozen`. Offsets that lie on a device are no part of
        the key.
    recorded
        Whether a backward pass follows: then all lengths are those of the plan.
    """
    if not ((block_mask is None or _is_small(block_mask)) and (out is None or arrays.contiguous(out))):
        return None
    q, k, v = tensors
    alibi_slopes, bias, mask = others
    offsets = () if cu_seqlens is None or packed is not None else _on_device(q, cu_seqlens)
    if cu_seqlens is not None and packed is None and not offsets:
        return None
    anew: tuple[Any, ...] = ()
    axis = 0
    differ = kv_lengths is not None or packed is not None
    if not (alibi_slopes is bias is mask is block_mask is None):
        if differ:
            return None
        others = tuple([array.view() if arrays.kind_of(array) else array for array in others])  # see own_forms
        anew = tuple([array for array in others if array is not None])
    elif type(q) is type(k) is type(v) is np.ndarray and not recorded:
        axis = 0 if differ else keys_axis(q.shape, k.shape, v.shape, layout)
    elif kv_lengths is not None:
        return None
    given = (*(others if anew else ()), *offsets)
    name = key(tensors, given, (*options, layout, block_mask, packed, kv_lengths is None), axis)
    if name is None:
        return None
    tokens = (name[0][0][0][1][0], name[0][0][1][1][0]) if offsets else (0, 0)  # of q and k, as the key has them
    made = Entry(name, anew, axis, kv_lengths, offsets, tokens, q_offset is None)
    if type(q) is View and not (made.planned is not None and made.planned.reads_addresses):
        return None  # it takes arrays to make a plan
    return made


def _on_device(q: Any, cu_seqlens: Any) -> tuple[Any, ...]:
    """The offsets of q and of k, where all lie on the device of q, or nothing."""
    given = cu_seqlens if type(cu_seqlens) is tuple else (cu_seqlens, cu_seqlens)
    on_device = arrays.kind_of(q) == "cupy" and all(arrays.kind_of(each) == "cupy" for each in given)
    if not (on_device and len(given) == 2):
        return ()
    of_q = given[0].view()  # see arrays.own_forms
    return of_q, of_q if given[1] is given[0] else given[1].view()


def frozen(cu_seqlens: Any) -> tuple[Any, Any]:
    """The contents of cu_seqlens as a part of a key, and the same numbers in memory of the key's own: the caller's
    arrays may change at any time.

    (None, cu_seqlens) where it is no NumPy array, or two, of integers, or a large one.
    """
    parts = cu_seqlens if type(cu_seqlens) is tuple and len(cu_seqlens) == 2 else (cu_seqlens,)
    for part in parts:
        if type(part) is not np.ndarray or part.dtype.kind not in "iu" or part.ndim != 1:
            return None, cu_seqlens
        if part.nbytes > _MAX_OFFSET_BYTES:
            return None, cu_seqlens
    contents = tuple([(part.dtype.str, part.tobytes()) for part in parts])
    copies = tuple([np.frombuffer(data, dtype) for dtype, data in contents])
    return contents, copies if len(copies) == 2 else copies[0]


def _is_small(block_mask: Any) -> bool:
    """Whether a plan with this block mask may be cached: it keeps the arrays of the mask alive."""
    if not isinstance(block_mask, BlockMask):
        return False
    return sum(array.nbytes for array in block_mask.mod.arrays.values()) <= _MAX_MASK_BYTES


def keys_axis(of_q: tuple[int, ...], of_k: tuple[int, ...], of_v: tuple[int, ...], layout: Any) -> int:
    """The axis of the keys, a negative number, if each call of these shapes brings its own number of keys; else 0."""
    if not (type(layout) is str and layout in LAYOUTS and len(of_q) == len(of_k) == len(of_v) > 1):
        return 0
    axis = -2 if len(of_q) == 2 or layout == "bhnd" else -3
    return axis if of_q[axis] < FEW_QUERIES and of_k[axis] == of_v[axis] >= MIN_KEYS else 0


def _room(n_k: int) -> int:
    """The most keys of calls that share a plan with a call of n_k: their numbers have as many bits."""
    return (1 << n_k.bit_length()) - 1


def key(
    tensors: tuple[Any, Any, Any], others: Sequence[Any], options: tuple[Any, ...], keys_axis: int = 0
) -> Any:  # fmt: skip
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
    keys_axis
        Below 0, the size of k and v along this axis is no part of the key, but its number of bits is.

    Returns
    -------
    object or None
        None for a call that cannot be cached.
    """
    q, k, v = tensors
    kind = type(q)
    if not kind is type(k) is type(v) or (kind is not np.ndarray and arrays.kind_of(q) != "cupy"):
        return None
    if others and not {arrays.layout(q)[0], type(None)}.issuperset(map(type, others)):
        return None
    of_others = tuple([None if array is None else arrays.layout(array) for array in others]) if others else ()
    layouts: Any
    if keys_axis < 0:  # the path of a step of decoding
        at, after, of_k, of_v = keys_axis, keys_axis + 1, k.shape, v.shape
        layouts = (
            q.shape, of_k[:at], of_k[after:], of_v[:at], of_v[after:], of_k[at].bit_length(), q.strides, k.strides,
            v.strides, q.dtype, k.dtype, v.dtype, q.flags.aligned, k.flags.aligned, v.flags.aligned,
        )  # fmt: skip
    else:
        layouts = arrays.layouts(q, k, v), of_others
    return layouts, options, tuple(map(type, options)), dispatch.state(), keys_axis


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


def get(key: Any) -> Any:
    """The cached plan of this key, or None."""
    try:
        found = _plans.get(key)
    except TypeError:  # an option cannot be hashed
        return None
    if found is not None:
        found.last_use = next(_ticks)
    return found


def put(key: Any, planned: Any) -> None:
    """Cache a plan, or what else has a `last_use`; the least recently used ones are dropped."""
    with _lock, suppress(TypeError):
        _plans[key] = planned
        planned.last_use = next(_ticks)
        if len(_plans) > _MAX_PLANS:
            del _plans[min(_plans, key=lambda each: _plans[each].last_use)]


def clear() -> None:
    """Drop all plans."""
    with _lock:
        _plans.clear()

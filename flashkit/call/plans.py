"""The plans of calls: `plan_of` finds the cached plan of a call, or makes one.

A plan is cached by the layout of a call's arrays and by its options. What the key leaves out (contents of arrays,
lengths) each call passes to the plan. Kernels have a cache of their own (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Any

import numpy as np

from .. import dispatch
from ..devices.forking import inner_lock
from ..mods import Mod
from ..mods.block_mask import BlockMask
from ..options import OPTIONS, PLAIN, Role
from ..spec import ALIGNMENT, SCALES, Operands
from . import arrays
from .arguments import Prepared, prepare
from .call import ONLY_TENSORS, Call, PerCall
from .codes import on_codes, scales_of, transposed_of
from .compose import is_checked_once
from .planned import Once, Planned
from .quantized import Quantized
from .shape import LAYOUTS
from .views import View

FEW_QUERIES, MIN_KEYS = 8, 16
"""Below FEW_QUERIES queries and from MIN_KEYS keys on, the CPU uses the decode kernel. Then only lengths depend on the
exact number of keys, so calls over more and more keys share a plan and give the bits of a plan for each."""

_MAX_PLANS = 256
_MAX_MASK_BYTES = 1 << 20  # of a block mask that a cached plan keeps alive
_plans: dict[Any, Any] = {}  # plans, and `torch_plans.Layouts`; each has a `last_use`
_lock = inner_lock()
_ticks = count()


def plan_of(call: Call, backend: str | None, return_lse: bool, recorded: bool = False) -> Planned | Once:
    """The plan of a call, cached or made; it sets `call.per_call`. recorded: a backward pass follows."""
    if call.quantised is not None:
        if not recorded and (of_codes := _on_codes(call, backend, return_lse)) is not None:
            return of_codes
        call.dequantise()
    key = key_of(call, backend, return_lse, recorded)
    planned: Planned | None = get(key)
    if planned is not None and (planned.reads_addresses or type(call.q) is not View):
        return planned
    call.require_arrays()
    prepared = prepare(call.q, call.k, call.v, out=call.out, **call.options)
    return _made(key, call, prepared, backend, return_lse) or Once(prepared, backend, return_lse)


def plan_with(
    call: Call, backend: str | None, more: dict[str, Any], prepared: Callable[[], Prepared]
) -> Planned | Once:  # fmt: skip
    """The plan of a call with more arrays, by name, behind all else; None for those that each call makes itself."""
    fixed = call.has_out or not call.offsets  # offsets on the host belong to the plan
    key = None if type(call.q) is np.ndarray else key_of(call, backend, True, recorded=fixed)
    if key is not None:
        key = key, *[(name, None if x is None else arrays.layout(x)) for name, x in more.items()]
    planned: Planned | None = get(key)
    if planned is not None:
        return planned
    found = prepared()
    tangents = found.operands.tangents or ()
    read = zip((x for x in more.values() if x is not None), (x for x in tangents[:3] if x is not None))
    if not all(arrays.same_address(x, own) for x, own in read):
        key = None  # copies
    return _made(key, call, found, backend, True, more=tuple(more)) or Once(found, backend, True)


class Refused:
    """Codes for which no backend has a plan."""

    last_use = 0


def _on_codes(call: Call, backend: str | None, return_lse: bool) -> Planned | Once | None:
    """The plan of a call on the codes of its arrays, as `plan_of`; None if they have to be dequantised."""
    quantised: Any = call.quantised
    given = tensors = _take_codes(call, call.q, call.k, call.v)
    on_host = type(call.q) is np.ndarray
    facts = [
        x.signature if type(x) is Quantized else on_host or (arrays.layout(x), x.data.ptr % ALIGNMENT) for x in given
    ]
    key = key_of(call, backend, return_lse, facts=tuple(facts))
    planned: Any = get(key)
    if quantised.fp8 and type(planned) is not Refused:
        tensors = _take_codes(call, *quantised.quantise_all({} if planned is None else planned.quantisers))
    if planned is None:
        found = on_codes(quantised, *tensors, call.options, call.out, return_lse, backend)
        if isinstance(found, str):
            put(key, planned := Refused())
        else:
            names = SCALES[1:] if found.problem.spec.kv_format else SCALES
            call.scales = scales_of(names, tensors)
            planned = _made(key, call, found, backend, return_lse, names) or Once(found, backend, return_lse)
    elif isinstance(planned, Planned):
        call.scales = scales_of(planned.scales, tensors)
    if isinstance(planned, Refused):
        call.q, call.k, call.v = given
        return None
    call.quantised = None
    return planned


def _take_codes(call: Call, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Let the call pass the codes of these tensors, of v on a device V^T, to its plan."""
    call.q, call.k, call.v = [x.data if type(x) is Quantized else x for x in (q, k, v)]
    if type(call.q) is not np.ndarray and (transposed := transposed_of(v, call.options)) is not None:
        call.v = transposed
    return q, k, v


def _made(
    key: Any, call: Call, prepared: Prepared, backend: str | None, return_lse: bool, scales: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> Planned | None:  # fmt: skip
    """The plan of a prepared call, put into the cache; None if it cannot serve other calls."""
    per_call, operands = call.per_call, prepared.operands
    given = call.q, call.k, call.v
    if prepared.problem.spec.fp8:
        read = operands.q, operands.k, operands.v, *(operands.scales or ())
        if not all(map(arrays.same_address, read, (*given, *call.scales))):
            return None  # copies: that Hopper's copy engine reaches, or with a scale for each token
    names = names_of(per_call.arrays, operands)
    if key is None or names is None:
        return None
    if per_call.offsets:
        names += tuple(name for name in operands.sequences() if per_call.follows or name != "q_offset")
    names += more
    axis, varies = per_call.keys_axis, per_call.keys_axis < 0 or per_call.lengths is not None
    planned = Planned(
        prepared, given, backend, return_lse, names, varies, scales=scales,
        room=_room(call.k.shape[axis]) if axis < 0 else None,
    )  # fmt: skip
    if call.quantised is not None:
        planned.quantisers = call.quantised.quantisers
    if more and not planned.reads_addresses:
        return None  # copies
    if not varies or planned.takes_lengths:
        put(key, planned)
    return planned


def key_of(
    call: Call, backend: str | None, return_lse: bool, recorded: bool = False, facts: tuple[Any, ...] = ()
) -> Any:  # fmt: skip
    """The key of a call, which determines it but for the contents of arrays; None if its plan cannot be cached. facts:
    of quantised arrays; on a device they have the layouts.

    It sets `call.per_call`. The types of options belong to the key, since True == 1, and so does the state that chooses
    the backend. Block masks are equal only to themselves.
    """
    q, k, v, options, out = call.q, call.k, call.v, call.options, call.out
    call.per_call = ONLY_TENSORS
    kind = type(q)
    on_host = kind is np.ndarray
    if not kind is type(k) is type(v) or not (on_host or arrays.kind_of(q) == "cupy"):
        return None
    if call.has_out and (recorded or (out is not None and not arrays.contiguous(out))):
        return None
    parts: list[Any] = []
    pairs: list[Any] = []
    lengths, mask, modified = None, None, False
    offsets: tuple[Any, ...] = ()
    for name, value in options.items():
        if type(value) in PLAIN:
            if name == "dropout_p" and value:
                return None
            parts += name, type(value), value
            continue
        role = OPTIONS[name].role
        if role is Role.CONSTANT and type(value).__hash__ is not None:
            parts += name, type(value), value, tuple(map(type, value)) if type(value) is tuple else ()
        elif role is Role.PAIRS:
            pairs.append(value.view() if arrays.kind_of(value) else value)  # see arrays.own_forms
            parts += name, arrays.layout(pairs[-1])
        elif role is Role.LENGTHS:
            if recorded or not on_host:
                return None
            lengths = value
            parts.append(name)
        elif role is Role.OFFSETS:
            if recorded:
                return None
            if call.offsets:
                parts += name, call.offsets
            elif offsets := _on_device(q, value):
                parts += name, *map(arrays.layout, offsets)
            else:
                return None
        elif role is Role.IDENTITY and _is_small(value):
            mask = value
            parts += name, value
        elif isinstance(value, Mod) and is_checked_once(value):
            modified = True
            parts += name, value.kind, value.expr, *((key, type(x), x) for key, x in value.params.items())
            for key, array in value.arrays.items():
                pairs.append(array.view() if arrays.kind_of(array) else array)
                parts += key, arrays.layout(pairs[-1])
        else:
            return None
    axis, differ = 0, lengths is not None or bool(call.offsets) or bool(offsets)
    if pairs or modified or mask is not None:
        if differ or not {kind if on_host else arrays.layout(q)[0]}.issuperset(map(type, pairs)):
            return None
    elif on_host and not (recorded or differ):
        axis = keys_axis(q.shape, k.shape, v.shape, options.get("layout", "bhnd"))
    if axis < 0:  # the path of a step of decoding
        at, after, of_k, of_v = axis, axis + 1, k.shape, v.shape
        layouts: Any = (
            q.shape, of_k[:at], of_k[after:], of_v[:at], of_v[after:], of_k[at].bit_length(), q.strides, k.strides,
            v.strides, q.dtype, k.dtype, v.dtype, q.flags.aligned, k.flags.aligned, v.flags.aligned,
        )  # fmt: skip
    else:
        layouts = arrays.layouts(q, k, v) if on_host or not facts else None
    if pairs or axis or differ:
        tokens = (0, 0)
        if offsets:  # as the key has them
            tokens = (len(q), len(k)) if layouts is None else (layouts[0][1][0], layouts[1][1][0])
        call.per_call = PerCall(tuple(pairs), axis, lengths, offsets, tokens, options.get("q_offset") is None)
    return layouts, tuple(parts), axis, type(backend), backend, return_lse, dispatch.state(), facts


def _on_device(q: Any, cu_seqlens: Any) -> tuple[Any, ...]:
    """The offsets of q and of k, where all lie on the device of q, or nothing."""
    given = cu_seqlens if type(cu_seqlens) is tuple else (cu_seqlens, cu_seqlens)
    on_device = arrays.kind_of(q) == "cupy" and all(arrays.kind_of(each) == "cupy" for each in given)
    if not (on_device and len(given) == 2):
        return ()
    of_q = given[0].view()  # see arrays.own_forms
    return of_q, of_q if given[1] is given[0] else given[1].view()


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


def names_of(given: Sequence[Any], operands: Operands) -> tuple[str, ...] | None:
    """Names of these arrays among the operands'; None if one was copied or reshaped, or matches two."""
    matches = [
        [
            name
            for name, own in operands.arrays.items()
            if arrays.layout(own) == arrays.layout(array) and arrays.same_address(array, own)
        ]
        for array in given
    ]
    names = tuple(chain.from_iterable(matches))
    return names if all(len(each) == 1 for each in matches) and len(set(names)) == len(names) else None


def get(key: Any) -> Any:
    """The cached plan of this key, or None."""
    if key is None:
        return None
    try:
        plan = _plans.get(key)
    except TypeError:  # an option cannot be hashed
        return None
    if plan is not None:
        plan.last_use = next(_ticks)
    return plan


def put(key: Any, planned: Any) -> None:
    """Cache a plan, or what else has a `last_use`, by a key other than None; the least recently used are dropped."""
    if key is None:
        return
    with _lock, suppress(TypeError):
        _plans[key] = planned
        planned.last_use = next(_ticks)
        if len(_plans) > _MAX_PLANS:
            del _plans[min(_plans, key=lambda each: _plans[each].last_use)]


def clear() -> None:
    """Drop all plans."""
    with _lock:
        _plans.clear()

"""Calls on quantised arrays whose backend reads the codes themselves, and why others are dequantised."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from .. import dispatch
from ..spec import Fp8
from . import arrays
from .arguments import Fp8Arrays, Memory, Prepared, prepare
from .call import Call
from .quantized import BLOCK, Quantized, block_scales, token_scales

ALIGNMENT = 16
"""Bytes, of addresses and strides: what Hopper's copy engine (TMA) needs."""


def on_codes(call: Call, backend: str | None, return_lse: bool) -> Prepared | str:
    """The call on the codes of its arrays, for which `dispatch.plan` has a backend, or a sentence that says why they
    are dequantised.
    """
    on_host = call.quantised is not None and call.quantised.kind == "numpy"
    prepared = _keys_of_8_bits(call) if on_host else prepared_on(codes_of(call, return_lse), call)
    if isinstance(prepared, str):
        return prepared
    ranked = dispatch.candidates(prepared.problem, only=dispatch.forced(backend))
    if not any(candidate.verdict for candidate in ranked):
        of_fp8 = prepared.problem.spec.fp8 is not None
        asked = [c for c in ranked if not of_fp8 or getattr(dispatch.registry()[c.name], "takes_fp8", False)]
        return "; ".join(f"{c.name}: {c.verdict.reason}" for c in asked) or "this backend has no kernels for e4m3"
    return prepared


def _keys_of_8_bits(call: Call) -> Prepared | str:
    """Keys and values of 8 bits beside float queries. Scales are factors of scores and weights then: they belong to
    tokens, or to more than a token, and there is no rotation and no mean.
    """
    q, k, v, options = call.q, call.k, call.v, call.options
    if isinstance(q, Quantized) or call.quantised is None or call.quantised.fp8:
        return "queries are quantised, and the CPU has kernels for quantised keys and values alone"
    if not (isinstance(k, Quantized) and isinstance(v, Quantized) and k.format == v.format):
        return "k and v are not both quantised to one format"
    packed_or_paged = options.get("cu_seqlens") is not None or options.get("page_table") is not None
    layout = "bnhd" if packed_or_paged else options.get("layout", "bhnd")
    if any(x.seed is not None or x.mean is not None or x.per == "block" for x in (k, v)):
        return "k or v is rotated, smoothed or has scales per block"
    if not all(x.per == "tensor" or x.ndim == 2 or x.layout == layout for x in (k, v)):
        return "scales of k or v are of another layout"
    scales = np.broadcast_to(k.scale, (*k.shape[:-1], 1)), np.broadcast_to(v.scale, (*v.shape[:-1], 1))
    memory = Memory(kv_format=k.format, scales=scales)
    return prepare(q, k.data, v.data, out=call.out, described=call.described, memory=memory, **options)


class Codes(NamedTuple):
    """A call on codes of e4m3.

    Attributes
    ----------
    arrays
        q, k and v; v as V^T where spec.transposed.
    scales
        Those of the quantised arrays.
    dtype, spec
        Of the output; what the kernel is to know of the codes.
    """

    tensors: tuple[Any, Any, Any]
    arrays: tuple[Any, Any, Any]
    scales: tuple[Any, Any, Any]
    dtype: np.dtype
    spec: Fp8


def codes_of(call: Call, return_lse: bool) -> Codes | str:
    """The codes of e4m3 of q, k and v, or why they do not give the result."""
    quantised: Any = call.quantised
    options = call.options
    if options.get("precision") == "highest":
        return "precision='highest' is float32"
    tensors: Any = tuple([quantised.quantise(name, x) for name, x in (("q", call.q), ("k", call.k), ("v", call.v))])
    if refused := _refused(tensors):
        return refused
    q, k, v = tensors
    has_sequences = options.get("cu_seqlens") is not None or options.get("page_table") is not None
    layout = "bnhd" if has_sequences else options.get("layout", "bhnd")
    # With lengths the kernel's transpose warps hide what lies behind them.
    plain = not has_sequences and options.get("kv_lengths") is None and v.layout == layout and v.ndim > 2
    transposed = v.transposed if plain else None
    spec = Fp8(_shared_by(tensors, layout, has_sequences), transposed is not None, return_lse)
    arrays_of = q.data, k.data, v.data if transposed is None else transposed
    return Codes(tensors, arrays_of, (q.scale, k.scale, v.scale), q.dtype, spec)


def prepared_on(codes: Codes | str, call: Call) -> Prepared | str:
    """The checked call on these codes, or why there is none."""
    if isinstance(codes, str):
        return codes
    quantised: Any = call.quantised
    q, k, v = codes.tensors
    scales = tuple(map(block_scales if codes.spec.per == "block" else token_scales, codes.tensors))
    transposed = codes.arrays[2].reshape((-1, *codes.arrays[2].shape[-3:])) if codes.spec.transposed else None
    memory = Memory(fp8=Fp8Arrays(codes.dtype, codes.spec, scales, transposed))
    options = {**call.options, "precision": None if quantised.fp8 else call.options.get("precision")}
    prepared = prepare(q.data, k.data, v.data, out=call.out, described=call.described, memory=memory, **options)
    operands = prepared.operands
    if not operands.k.shape[2]:
        return "there are no keys"
    if not operands.scale > 1e-30:
        return f"scale is {operands.scale:g}, and kernels for e4m3 mask scores before they multiply by it"
    if not call.described:
        operands.q, operands.k, operands.v = map(_addressable, (operands.q, operands.k, operands.v))
    return prepared


def _shared_by(tensors: tuple[Any, ...], layout: str, has_sequences: bool) -> Literal["head", "block", "token"]:
    """What shares a scale of k and v, as the kernel takes them: the finest of both. Of q rows may have scales of their
    own beside heads of k and v, as blocks beside blocks.
    """
    levels = []
    for x in tensors:
        own = x.layout == layout and not (has_sequences or x.ndim == 2)
        block = own and x.per == "block" and x.block == BLOCK
        levels.append(0 if x.per == "tensor" or (own and x.per == "head") else 1 if block else 2)
    of_q, finest = levels[0], max(levels[1:])
    return "token" if finest == 2 or (finest == 1 and of_q == 2) else "block" if 1 in (of_q, finest) else "head"


def _refused(tensors: tuple[Any, ...]) -> str:
    """Why codes and scales of these arrays do not give the scores, or nothing."""
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Quantized):
            return f"{name} is {x.dtype.name}"
        if x.format != "e4m3":
            return f"{name} is {x.format}"
        if x.mean is not None:
            return f"{name} is smoothed: its mean is no part of the codes"
    q, k, v = tensors
    if q.seed != k.seed:
        return "q and k are rotated differently"
    return "v is rotated" if v.seed is not None else ""


def _addressable(x: Any) -> Any:
    """The array itself, or a copy, whose rows the copy engine reaches."""
    strides = [stride for stride, n in zip(x.strides, x.shape) if n > 1]
    if not (x.data.ptr | sum({s % ALIGNMENT for s in strides[:-1]})) % ALIGNMENT and min(strides[:-1], default=1) > 0:
        return x
    return arrays.namespace("cupy").array(x, order="C", copy=True)

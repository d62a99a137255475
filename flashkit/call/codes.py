"""Calls with quantised arrays: on their codes where a backend reads these, and dequantised otherwise.

The key of a plan on codes leaves out the scales, which each call passes like an array of a modification. `Dequantised`
is the adapter between quantised and float arrays. A quantised array is dequantised to the computing dtype, float32 or
float64, as a number of e4m3 times its scale is not representable in bfloat16. Of pages only those that the table names
are dequantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from .. import dispatch
from ..devices.lazy import cached_property
from ..spec import ALIGNMENT, BLOCK, DTYPES, Fp8
from . import arrays
from .arguments import Memory, Prepared, prepare
from .checks import check_out
from .quantized import Per, Quantized, block_scales, check_shape, one_pass, quantize, scale_shape, token_scales

FP8_DTYPES = ("float16", "bfloat16")
"""What precision="fp8" quantises."""

SEQUENCES = frozenset({"kv_lengths", "cu_seqlens", "page_table"})
"""Options with which precision="fp8" takes scales of tokens, which do not depend on what lies behind the keys."""


def _has_sequences(options: dict[str, Any]) -> bool:
    return not SEQUENCES.isdisjoint(options) and any(options.get(name) is not None for name in SEQUENCES)


class Dequantised:
    """The arrays of a call with quantised ones, dequantised. TypeError unless they are of one library and dtype."""

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any], fp8: bool, described: bool = False) -> None:
        self.fp8, self._described, self._named = fp8, described, {"q": q, "k": k, "v": v}
        self._quantised: dict[str, Quantized] = {}
        self.quantisers: dict[str, Any] = {}  # of `one_pass`
        if fp8:
            self.share_scales(options)

    def share_scales(self, options: dict[str, Any]) -> None:
        """Choose by the options of a call what shares a scale where float arrays are quantised."""
        self._per: Per = "token" if _has_sequences(options) else "block"
        self._layout = options.get("layout", "bhnd") if self._per == "block" else "bhnd"

    def check(self) -> None:
        """Raise the errors of the class. A call that finds a plan needs no check."""
        for name, x in self._named.items():
            arrays.require(name, memory_of(x), self.kind)
            if (dtype := arrays.dtype_name(name, x)) != self.dtype:
                raise TypeError(f"{name}: expected dtype {self.dtype} (q's, before quantisation), got {dtype}")
            if self.fp8 and not isinstance(x, Quantized) and dtype not in FP8_DTYPES:
                raise TypeError(
                    f"{name}: expected dtype {' or '.join(FP8_DTYPES)} with precision='fp8', got {dtype}; pass "
                    f"flashkit.quantize({name}, ...) or another precision"
                )

    @cached_property
    def kind(self) -> str:
        """The library of the arrays."""
        return arrays.require("q", memory_of(self._named["q"]))

    @cached_property
    def dtype(self) -> str:
        """The name of q's dtype before quantisation."""
        return arrays.dtype_name("q", self._named["q"])

    @property
    def _dtype(self) -> str:
        return DTYPES[self.dtype].accumulator

    @property
    def rounds(self) -> bool:
        """Whether results are rounded to the caller's dtype."""
        return self.dtype != self._dtype

    def scope(self) -> AbstractContextManager[Any]:
        """Where to compute: on q's device."""
        return arrays.scope(memory_of(self._named["q"]))

    def to_native(self, **arguments: Any) -> dict[str, Any]:
        """Arguments with arrays of the computing dtype. An `out` of another dtype is left to `from_native`."""
        self.check()
        arguments = self._pages_in_use(arguments)
        return {name: self._wide(name, value) for name, value in arguments.items()}

    def _pages_in_use(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the pages that a table on the host names, if that are fewer than there are."""
        k, v, table = (arguments.get(name) for name in ("k", "v", "page_table"))
        if not (isinstance(k, Quantized) and isinstance(v, Quantized) and k.shape[:1] == v.shape[:1]):
            return arguments
        if self._described or not isinstance(table, np.ndarray) or table.dtype.kind not in "iu":
            return arguments
        count = k.shape[0]
        known = (table >= 0) & (table < count)
        pages = np.unique(table[known])
        if not 0 < len(pages) < count:
            return arguments
        renumbered = np.where(known, np.searchsorted(pages, table), np.where(table < 0, table, len(pages)))
        return arguments | {"k": k.pages(pages), "v": v.pages(pages), "page_table": renumbered}

    def _wide(self, name: str, value: Any) -> Any:
        if name in ("q", "k", "v"):
            if self._described:
                return arrays.stand_in(self.kind, value.shape, self._dtype)
            value = self.quantise(name, value)
            self._quantised.pop(name, None)
            return self._widened(value) if not isinstance(value, Quantized) else value.dequantize(self._dtype)
        if name == "precision":
            return None if self.fp8 else value
        if name == "out":
            return None if self.rounds else value
        if name == "dout":
            arrays.require(name, value, self.kind)
            if arrays.dtype_name(name, value) != self.dtype:
                raise TypeError(f"dout: expected dtype {self.dtype}, got {value.dtype}")
            return self._widened(value)
        return value

    def quantise(self, name: str, value: Any) -> Any:
        """q, k or v as precision="fp8" makes it, until it is dequantised; the array itself without it."""
        if not self.fp8 or isinstance(value, Quantized):
            return value
        per, layout, of_v, made = self._per, self._layout, name == "v", self._quantised.get(name)
        if made is not None:
            return made
        self.check()
        check_shape(name, value.shape)
        if self._described:
            scale = arrays.stand_in(self.kind, scale_shape(value.shape, per, BLOCK, layout), np.float32, 1)
            data = arrays.stand_in(self.kind, value.shape, "float8_e4m3fn" if self.kind == "numpy" else "uint8")
            return Quantized(data, scale, value.dtype, per, layout=layout, seed=None if of_v else 0)
        if per == "block" and (quantiser := one_pass(value, layout, None if of_v else 0, of_v)) is not None:
            self.quantisers[name], made = quantiser, quantiser(value)
        else:
            transpose = of_v and self.kind == "cupy" and per == "block"
            made = quantize(value, "e4m3", per, rotate=not of_v, layout=layout, transpose=transpose)
        self._quantised[name] = made
        return made

    def quantise_all(self, known: dict[str, Any]) -> list[Any]:
        """`quantise` of q, k and v, by those quantisers that a plan has for them."""
        return [known[name](x) if name in known else self.quantise(name, x) for name, x in self._named.items()]

    def _widened(self, value: Any) -> Any:
        return value.astype(self._dtype, copy=False)

    def from_native(self, name: str, result: Any, out: Any = None) -> Any:
        """A result ("out", "lse", "dq", ...) in the caller's dtype; in `out`, if that is given and of another dtype."""
        if name not in ("out", "dq", "dk", "dv"):
            return result
        result = self._rounded(result)
        if out is None or not self.rounds:
            return result
        check_out(out, self.kind, self.dtype, result.shape)
        out[...] = result
        return out

    def _rounded(self, result: Any) -> Any:
        dtype = self._named["q"].dtype
        if result.dtype == dtype:
            return result
        with np.errstate(over="ignore"):  # to infinity, as kernels round
            return result.astype(dtype)

    def described(self, problem: str, why: str) -> str:
        """The description of the call that runs, with what comes before it, and why."""
        rest = f"e4m3 per {self._per}" if self.fp8 else self.dtype
        described = (
            f"{name} {f'{x.format} per {x.per}' if isinstance(x, Quantized) else rest}"
            for name, x in self._named.items()
        )
        return f"{problem}; dequantised before: {', '.join(described)} ({why})"


def memory_of(x: Any) -> Any:
    """The array that holds the numbers."""
    return x.data if isinstance(x, Quantized) else x


# --- codes ------------------------------------------------------------------------------------------------------------


def on_codes(
    quantised: Dequantised, q: Any, k: Any, v: Any, options: dict[str, Any], out: Any, return_lse: bool,
    backend: str | None, described: bool = False,
) -> Prepared | str:  # fmt: skip
    """The call on codes, for which there is a backend, or why not; a function of signatures and the plan's key."""
    quantised.check()
    is_batch = options.get("cu_seqlens") is None and options.get("page_table") is None
    layout, tensors = options.get("layout", "bhnd") if is_batch else "bnhd", [q, k, v]
    if quantised.kind == "numpy":
        memory = _keys_and_values(tensors, layout, quantised.fp8)
    elif options.get("precision") == "highest":
        memory = "precision='highest' is float32"
    else:
        tensors = [quantised.quantise(name, x) for name, x in zip("qkv", tensors)]
        memory = _e4m3(tensors, layout, is_batch, transposed_of(tensors[2], options), return_lse)
    if isinstance(memory, str):
        return memory
    options = {**options, "precision": None} if quantised.fp8 else options
    prepared = prepare(*map(memory_of, tensors), out=out, described=described, memory=memory, **options)
    operands, of_fp8 = prepared.operands, memory.fp8 is not None
    if of_fp8 and not operands.k.shape[2]:
        return "there are no keys"
    if of_fp8 and not operands.scale > 1e-30:
        return f"scale is {operands.scale:g}, and kernels for e4m3 mask scores before they multiply by it"
    if of_fp8 and not described:
        operands.q, operands.k, operands.v = map(_addressable, (operands.q, operands.k, operands.v))
    ranked = dispatch.candidates(prepared.problem, only=dispatch.forced(backend))
    if not any(candidate.verdict for candidate in ranked):
        asked = [c for c in ranked if not of_fp8 or "fp8" in getattr(dispatch.registry()[c.name], "takes", ())]
        return "; ".join(f"{c.name}: {c.verdict.reason}" for c in asked) or "this backend has no kernels for e4m3"
    return prepared


def _keys_and_values(tensors: list[Any], layout: str, fp8: bool) -> Memory | str:
    """Numbers of 8 bits on the host: scales of tokens, or more, are factors of scores and weights."""
    q, k, v = tensors
    if isinstance(q, Quantized) or fp8:
        return "queries are quantised, and the CPU has kernels for quantised keys and values alone"
    if not (isinstance(k, Quantized) and isinstance(v, Quantized) and k.format == v.format):
        return "k and v are not both quantised to one format"
    for x in (k, v):
        if x.seed is not None or x.mean is not None or x.per == "block":
            return "k or v is rotated, smoothed or has scales per block"
        if not (x.per == "tensor" or x.ndim == 2 or x.layout == layout):
            return "scales of k or v are of another layout"
    return Memory(kv_format=k.format, scales=(None, k.scale, v.scale))


def _e4m3(tensors: list[Any], layout: str, is_batch: bool, transposed: Any, return_lse: bool) -> Memory | str:
    """Codes of e4m3 of q, k and v on a device."""
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
    if v.seed is not None:
        return "v is rotated"
    per = _shared_by(tensors, layout, is_batch)
    if transposed is not None:
        transposed = arrays.as_batch(transposed)
    of_q, of_k, of_v = map(block_scales if per == "block" else token_scales, tensors)
    fp8 = Fp8(per, transposed is not None, return_lse)
    return Memory(fp8=fp8, dtype=q.dtype, v_transposed=transposed, scales=(of_q, of_k, of_v))


def scales_of(names: tuple[str, ...], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The scales of these names, the last of q, k and v."""
    return tuple([x.scale for x in tensors[-len(names) :]])


def transposed_of(v: Any, options: dict[str, Any]) -> Any:
    """V^T, where the kernel takes it, or None. What lies behind lengths the kernel hides as it transposes V."""
    if type(v) is not Quantized or v.transposed is None or _has_sequences(options):
        return None
    return v.transposed if v.transposed.ndim > 2 and v.layout == options.get("layout", "bhnd") else None


def _shared_by(tensors: Sequence[Any], layout: str, is_batch: bool) -> Literal["head", "block", "token"]:
    """What shares a scale of k and v, as the kernel takes them: the finest of both; blocks of q need blocks."""
    levels = []
    for x in tensors:
        own = x.layout == layout and is_batch and x.ndim != 2
        block = own and x.per == "block" and x.block == BLOCK
        levels.append(0 if x.per == "tensor" or (own and x.per == "head") else 1 if block else 2)
    of_q, finest = levels[0], max(levels[1:])
    return "token" if finest == 2 or (finest == 1 and of_q == 2) else "block" if 1 in (of_q, finest) else "head"


def _addressable(x: Any) -> Any:
    """The array itself, or a copy, whose rows the copy engine reaches."""
    strides = [stride for stride, n in zip(x.strides, x.shape) if n > 1]
    if not (x.data.ptr | sum({s % ALIGNMENT for s in strides[:-1]})) % ALIGNMENT and min(strides[:-1], default=1) > 0:
        return x
    return arrays.namespace("cupy").array(x, order="C", copy=True)

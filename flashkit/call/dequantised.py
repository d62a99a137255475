"""Calls with quantised arrays: `Dequantised` is the adapter between these and float arrays.

A quantised array is dequantised to the computing dtype, float32 or float64, as a number of e4m3 times its scale does
not representable in bfloat16. Of pages only those that the table names are dequantised. Backends may read codes instead
(codes.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..spec import DTYPES
from . import arrays
from .checks import check_out
from .quantized import BLOCK, Per, Quantized, check_shape, quantize, scale_shape

FP8_DTYPES = ("float16", "bfloat16")
"""What precision="fp8" quantises."""

SEQUENCES = "kv_lengths", "cu_seqlens", "page_table"
"""Options with which precision="fp8" takes scales of tokens, which do not depend on what lies behind the keys."""


class Dequantised:
    """The arrays of a call with quantised ones among them, in the computing dtype.

    Raises
    ------
    TypeError
        q, k and v, or what they were quantised from, are not of one library and one dtype, or not of one that
        precision="fp8" takes.
    """

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any], fp8: bool, described: bool = False) -> None:
        self.fp8, self._described, self._q = fp8, described, q
        self.per: Per = "block" if all(options.get(name) is None for name in SEQUENCES) else "token"
        self.layout = options.get("layout", "bhnd") if self.per == "block" else "bhnd"
        self._quantised: dict[str, Quantized] = {}
        self._given = named = {"q": q, "k": k, "v": v}
        self.kind = arrays.require("q", _memory(q))
        self.dtype = arrays.dtype_name("q", q)
        for name, x in named.items():
            arrays.require(name, _memory(x), self.kind)
            if (dtype := arrays.dtype_name(name, x)) != self.dtype:
                raise TypeError(f"{name}: expected dtype {self.dtype} (q's, before quantisation), got {dtype}")
            if fp8 and not isinstance(x, Quantized) and dtype not in FP8_DTYPES:
                raise TypeError(
                    f"{name}: expected dtype {' or '.join(FP8_DTYPES)} with precision='fp8', got {dtype}; pass "
                    f"flashkit.quantize({name}, ...) or another precision"
                )
        self._dtype = DTYPES[self.dtype].accumulator

    @property
    def rounds(self) -> bool:
        """Whether results are rounded to the caller's dtype."""
        return self.dtype != self._dtype

    def scope(self) -> AbstractContextManager[Any]:
        """Where to compute: on q's device."""
        return arrays.scope(_memory(self._q))

    def to_native(self, **arguments: Any) -> dict[str, Any]:
        """Arguments with arrays of the computing dtype. An `out` of another dtype is left to `from_native`."""
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
                return arrays.stand_in(arrays.namespace(self.kind).zeros((), self._dtype), value.shape)
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
        check_shape(name, value.shape)
        if self._described:
            xp = arrays.namespace(self.kind)
            codes = "float8_e4m3fn" if self.kind == "numpy" else "uint8"
            shape = scale_shape(value.shape, self.per, BLOCK, self.layout)
            scale = arrays.stand_in(xp.ones((), np.float32), shape)
            data = arrays.stand_in(xp.zeros((), codes), value.shape)
            seed = 0 if name != "v" else None
            return Quantized(data, scale, value.dtype, self.per, layout=self.layout, seed=seed)
        if name not in self._quantised:
            transpose = name == "v" and self.kind == "cupy" and self.per == "block"
            self._quantised[name] = quantize(
                value, "e4m3", self.per, rotate=name != "v", layout=self.layout, transpose=transpose
            )
        return self._quantised[name]

    def _widened(self, value: Any) -> Any:
        return value.astype(self._dtype, copy=False)

    def from_native(self, name: str, result: Any, out: Any = None) -> Any:
        """A result ("out", "lse", "dq", ...) in the caller's dtype; in `out`, if that is given and of another dtype."""
        if name in ("lse", "dsinks"):
            return result
        result = self._rounded(result)
        if out is None or not self.rounds:
            return result
        check_out(out, self.kind, self.dtype, result.shape)
        out[...] = result
        return out

    def _rounded(self, result: Any) -> Any:
        dtype = self._q.dtype
        if result.dtype == dtype:
            return result
        with np.errstate(over="ignore"):  # to infinity, as kernels round
            return result.astype(dtype)

    def described(self, problem: str, why: str) -> str:
        """The description of the call that runs, with what comes before it, and why."""
        described = ", ".join(f"{name} {self._describe(x)}" for name, x in self._given.items())
        return f"{problem}; dequantised before: {described} ({why})"

    def _describe(self, x: Any) -> str:
        if isinstance(x, Quantized):
            return f"{x.format} per {x.per}"
        return f"e4m3 per {self.per}" if self.fp8 else self.dtype


def _memory(x: Any) -> Any:
    """The array that holds the numbers."""
    return x.data if isinstance(x, Quantized) else x

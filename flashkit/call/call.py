"""One call of a public function: its arrays as NumPy's or CuPy's, its options, and the way back to the caller.

Every public function begins `with Call(name, q, k, v, options) as call`. Arrays of other libraries become native ones
here, quantised ones are recognised, and `to_caller` undoes both. So plans and backends know NumPy and CuPy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from .. import options as table
from ..options import OPTIONS
from . import arrays, interop
from .codes import Dequantised, memory_of
from .interop import Foreign
from .quantized import Quantized
from .views import View

_MAX_OFFSET_BYTES = 1 << 14  # of offsets that are part of a key


Adapter = Foreign | Dequantised
"""How arrays become native (`scope`, `to_native`), and results the caller's again (`from_native`)."""


class PerCall(NamedTuple):
    """What a call passes to its plan beside q, k and v."""

    arrays: tuple[Any, ...] = ()  # of modifications
    keys_axis: int = 0  # negative where calls bring their own number of keys: the axis of k that has it
    lengths: Any = None  # kv_lengths
    offsets: tuple[Any, ...] = ()  # cu_seqlens of q and of k, on a device
    tokens: tuple[int, int] = (0, 0)  # of q and of k, where there are such offsets
    follows: bool = True  # whether positions follow lengths and offsets


ONLY_TENSORS = PerCall()


class Call:
    """The arguments of one call, inside a `with` block: on q's device, and on its library's current stream.

    function: the name of the public function, for errors. described: whether arrays that take no memory may stand in
    for others. From the beginning of the block on q, k, v, out and options are native. q, k and v may be `Quantized`
    arrays, until `dequantise`, or Views, until `require_arrays`.
    """

    __slots__ = (
        "_of_caller", "_scopes", "described", "foreign", "k", "offsets", "options", "out", "per_call", "q",
        "quantised", "scales", "v",
    )  # fmt: skip

    def __init__(
        self, function: str, q: Any, k: Any, v: Any, options: dict[str, Any], out: Any = None, described: bool = False
    ) -> None:
        if not OPTIONS.keys() >= options.keys():
            raise table.unknown(function, [name for name in options if name not in OPTIONS])
        self.q, self.k, self.v = arrays.own_forms(q, k, v)
        self.options, self.out = options, out
        self.described, self._of_caller = described, out
        self.foreign: Foreign | None = None  # the adapter of q's library, if that is neither NumPy nor CuPy
        self.quantised: Dequantised | None = None  # how quantised arrays are dequantised, or float ones quantised
        self.offsets: tuple[Any, ...] = ()  # the contents of cu_seqlens on the host, as part of a plan's key
        self.per_call = ONLY_TENSORS  # what it passes to its plan,
        self.scales: tuple[Any, ...] = ()  # and the scales of codes

    def __enter__(self) -> Self:
        self._scopes: list[Any] = []
        library = interop.library_of(self.q)
        precision = self.options.get("precision")
        fp8 = isinstance(precision, str) and precision == "fp8"
        if library is not None or fp8 or Quantized in (type(self.q), type(self.k), type(self.v)):
            try:
                self._adapt(library, fp8)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        if self.options.get("cu_seqlens") is not None:
            self.offsets, frozen = frozen_offsets(self.options["cu_seqlens"])
            self.options = {**self.options, "cu_seqlens": frozen}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        while self._scopes:
            self._scopes.pop().__exit__(kind, error, where)

    def _adapt(self, library: interop.Library | None, fp8: bool) -> None:
        if library is not None:
            self.foreign = adapter = Foreign(library, self.q)
            self._enter(adapter.scope())
            given = {"q": self.q, "k": self.k, "v": self.v}
            floats = {name: x for name, x in given.items() if type(x) is not Quantized}  # codes are native already
            found = adapter.views(**floats) if len(floats) == 3 else adapter.to_native(**floats)
            self.q, self.k, self.v = (given | found).values()
            self.options = adapter.to_native(**self.options)
            self.out = None if self.out is None else adapter.to_native(out=self.out)["out"]
        if fp8 or Quantized in (type(self.q), type(self.k), type(self.v)):
            self.require_arrays()
            self.quantised = Dequantised(self.q, self.k, self.v, self.options, fp8, self.described)
            memory = memory_of(self.q)
            if type(memory) is not np.ndarray and not arrays.is_here(memory):
                self._enter(self.quantised.scope())

    def _enter(self, scope: Any) -> None:
        scope.__enter__()
        self._scopes.append(scope)

    def require_arrays(self) -> None:
        """Arrays of CuPy instead of Views, and memory of the caller's library for the result."""
        if type(self.q) is not View:
            return
        tensor, v = self.q.tensor, self.v
        if self.out is None and v.ndim and not self.described:
            self._of_caller = tensor.new_empty((*self.q.shape[:-1], v.shape[-1]))
            self.out = interop.native("out", self._of_caller)
        self.q, self.k, self.v = (getattr(self, name).as_array(name) for name in ("q", "k", "v"))

    def dequantise(self) -> None:
        """Plain arrays in the computing dtype instead of quantised ones."""
        if self.quantised is not None:
            named = self.quantised.to_native(q=self.q, k=self.k, v=self.v, out=self.out, **self.options)
            self.q, self.k, self.v, self.out = (named.pop(name) for name in ("q", "k", "v", "out"))
            self.options = named

    def to_caller(self, result: Any) -> Any:
        """out, or (out, lse, ...), in the caller's library and dtype, and out in the caller's array if there is one."""
        if self.quantised is None and self.foreign is None:
            return result
        out, *lse = result if isinstance(result, tuple) else (result,)
        if self.quantised is not None:
            out = self.quantised.from_native("out", out, self.native_out)
        if self.foreign is not None:
            out = self.foreign.from_native("out", out) if self._of_caller is None else self._of_caller
            lse = [self.foreign.from_native("lse", x) for x in lse]
        elif self._of_caller is not None:
            out = self._of_caller
        return (out, *lse) if lse else out

    @property
    def has_out(self) -> bool:
        """Whether the caller has an array for the result."""
        return self._of_caller is not None

    @property
    def native_out(self) -> Any:
        """The caller's array for the result as an array of NumPy or CuPy, or None."""
        return None if self._of_caller is None else interop.native("out", self._of_caller)

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The adapters of this call, the outermost first."""
        return [x for x in (self.foreign, self.quantised) if x is not None]


def frozen_offsets(cu_seqlens: Any) -> tuple[tuple[Any, ...], Any]:
    """The contents of cu_seqlens for a key, and copies; ((), cu_seqlens) unless it is of few integers of NumPy."""
    parts = cu_seqlens if type(cu_seqlens) is tuple and len(cu_seqlens) == 2 else (cu_seqlens,)
    for part in parts:
        if type(part) is not np.ndarray or part.dtype.kind not in "iu" or part.ndim != 1:
            return (), cu_seqlens
        if part.nbytes > _MAX_OFFSET_BYTES:
            return (), cu_seqlens
    contents = tuple([(part.dtype.str, part.tobytes()) for part in parts])
    copies = tuple([np.frombuffer(data, dtype) for dtype, data in contents])
    return contents, copies if len(copies) == 2 else copies[0]

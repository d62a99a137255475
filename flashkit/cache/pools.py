"""The memory of a layer: pools of pages of keys and values, as they are or in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..call.arguments import Memory
from ..call.quantized import LARGEST, Quantized, quantize

SCALE_BYTES = 4
"""Of a token's scale, a float32 behind its numbers: at the same distance in every layer, so that a plan serves all."""


class Pools(NamedTuple):
    """Keys and values of a layer, (pages, page, Hkv, D) and (pages, page, Hkv, Dv)."""

    k: Any
    v: Any
    kv_format: str = ""  # "e4m3" or "int8" where these are numbers of 8 bits
    k_scale: Any = None  # float32 (pages, page, Hkv, 1)
    v_scale: Any = None

    @classmethod
    def of(cls, memory: Sequence[Any], kv_format: str, dim: int, value_dim: int) -> Pools:
        """From the memory of a layer, (pages, page, Hkv, width): keys and values, or keys that hold the values."""
        k, v = memory[0], memory[-1]
        if not kv_format:
            return cls(k, v[..., :value_dim])
        parts = [_parts(x, kv_format, d) for x, d in ((k, dim), (v, value_dim))]
        return cls(parts[0][0], parts[1][0], kv_format, parts[0][1], parts[1][1])

    @property
    def memory(self) -> Memory:
        """What `prepare` has to know of keys and values."""
        return Memory(kv_format=self.kv_format, scales=(None, self.k_scale, self.v_scale) if self.kv_format else None)

    def as_arrays(self, dtype: Any) -> tuple[Any, Any]:
        """Keys and values as `attention` takes them. dtype: that of its queries, for numbers of 8 bits."""
        if not self.kv_format:
            return self.k, self.v
        quantised = ((self.k, self.k_scale), (self.v, self.v_scale))
        k, v = (Quantized(data, scale, dtype, "token", layout="bnhd") for data, scale in quantised)
        return k, v


def width(dim: int, kv_format: str) -> int:
    """Elements of a token: numbers, or bytes of numbers and of a scale."""
    return -(-dim // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES if kv_format else dim


def write_quantised(x: Any, data: Any, scale: Any, kv_format: Any, at: tuple[Any, Any]) -> None:
    """Tokens x (B, H, N, D) in 8 bits into pools: at `at`, (pages, slots) of (B, N)."""
    quantised = quantize(x, kv_format, "token")
    data[at] = quantised.data.swapaxes(1, 2)
    scale[at] = quantised.scale.swapaxes(1, 2)


def _parts(memory: Any, kv_format: str, dim: int) -> tuple[Any, Any]:
    """Numbers and scales."""
    codes, scales = memory[..., :dim], memory[..., -SCALE_BYTES:].view(np.float32)
    if kv_format == "int8":
        return codes.view(np.int8), scales
    if isinstance(memory, np.ndarray):
        import ml_dtypes

        codes = codes.view(ml_dtypes.float8_e4m3fn)
    return codes, scales


FORMATS = tuple(LARGEST)


def format_of(dtype: Any) -> str:
    """The format of 8 bits that a dtype names; "" if it is another."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", ""))
    return "e4m3" if name == "float8_e4m3fn" else name if name in FORMATS else ""

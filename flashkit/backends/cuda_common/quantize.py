"""`flashkit.quantize` on a GPU in one pass: the kernel of quantize.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ...spec import name_of
from . import compiler, device, launch

BLOCK, DIMS = 128, (64, 128, 256)
"""Tokens that share a scale, and head dims, that the kernel is for."""

_THREADS = 256
_CAPABILITY = 8, 9  # has instructions for e4m3


def takes(x: Any) -> bool:
    """Whether the kernel can read an array (B, H, N, D) of CuPy: on the current device, in vectors of 16 bytes."""
    on, strides = device.current(), x.strides
    return (
        on.capability >= _CAPABILITY and x.data.device_id == on.ordinal and x.shape[3] in DIMS and x.size > 0
        and name_of(x.dtype) in ("float16", "bfloat16") and strides[3] == 2
        and not (x.data.ptr | strides[0] | strides[1] | strides[2]) % 16
    )  # fmt: skip


def quantize_blocks(x: Any, codes: Any, scale: Any, transposed: Any, signs: tuple[int, ...] | None) -> None:
    """Enqueue the quantisation of x (B, H, N, D).

    codes: uint8 like x, the last axis contiguous; scale: float32 (B, H, blocks, 1); transposed: V^T, (B, H, D, padded
    tokens), or None. signs: for each column a bit, whether the rotation changes its sign; None without one.
    """
    batch, heads, tokens, dim = x.shape
    padded = 0 if transposed is None else transposed.shape[3]
    words = [x.data.ptr, codes.data.ptr, scale.data.ptr, 0 if transposed is None else transposed.data.ptr]
    for array in (x, codes, scale):
        words += [stride // array.itemsize for stride in array.strides[:3]]
    words += [heads, tokens, padded, int(signs is not None), *(signs or (0, 0, 0, 0))]
    stream = launch.stream()
    kernel = _kernel(dim, name_of(x.dtype) == "bfloat16", x.data.device_id)
    kernel.launch(batch * heads * -(-tokens // BLOCK), _THREADS, launch.KernelArguments(words), stream)
    launch.keep(stream, x, codes, scale, transposed)


@cache
def _kernel(dim: int, is_bfloat16: bool, ordinal: int) -> launch.Kernel:
    """It stays loaded, as a CUDA graph may have captured a launch."""
    on = device.of(ordinal)
    head = f"constexpr int DIM = {dim};\nconstexpr bool IS_BFLOAT16 = {str(is_bfloat16).lower()};\n"
    source = compiler.Source("quantize", head + Path(__file__).with_name("quantize.cu").read_text())
    return launch.Library(compiler.binary(source, compiler.target(on.capability))).kernel("quantize_blocks", on)

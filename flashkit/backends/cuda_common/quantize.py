"""`flashkit.quantize` on a GPU in one pass: the kernel of quantize.cu."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...spec import BLOCK, PADDING, name_of
from . import compiler, device, launch

DIMS = 64, 128, 256
"""Head dims that the kernel is for."""

_THREADS = 256
_CAPABILITY = 8, 9  # has instructions for e4m3
_CODES, _FLOATS = np.dtype("uint8"), np.dtype("float32")


@lru_cache(maxsize=256)
def planned(
    form: Any, swapped: bool, transpose: bool, signs: tuple[int, ...] | None
) -> Callable[[Any], tuple[Any, Any, Any]] | None:
    """The quantisation of arrays of CuPy of one layout, or None: the kernel reads vectors of 16 bytes.

    A function that enqueues it, and gives new arrays: codes, uint8; scales, float32 with a token for each block; and
    V^T, (B, H, D, padded tokens), or None. form: of `arrays.layout`, for axes (B, H, N, D), or (B, N, H, D) if swapped.
    signs: for each column a bit, whether the rotation changes its sign; None without one.
    """
    _, shape, strides, dtype, ordinal = form
    on, is_bfloat16 = device.of(ordinal), str(name_of(dtype) == "bfloat16").lower()
    if on.capability < _CAPABILITY or name_of(dtype) not in ("float16", "bfloat16") or 0 in shape:
        return None
    if shape[3] not in DIMS or strides[3] != 2 or any(stride % 16 for stride in strides[:3]):
        return None
    import cupy

    h, n = (2, 1) if swapped else (1, 2)  # axes of heads and tokens
    batch, heads, tokens, dim = shape[0], shape[h], shape[n], shape[3]
    blocks, padded = -(-tokens // BLOCK), -(-tokens // PADDING) * PADDING * transpose
    of_scale = (batch, blocks, heads, 1) if swapped else (batch, heads, blocks, 1)
    new = [(a * b * d, b * d, d) for _, a, b, d in (shape, of_scale)]  # strides of C-contiguous arrays
    steps = [each[axis] for each in ([stride // 2 for stride in strides], *new) for axis in (0, h, n)]
    words = [0, 0, 0, 0, *steps, heads, tokens, padded, signs is not None, *(signs or (0, 0, 0, 0))]
    head = f"constexpr int DIM = {dim};\nconstexpr bool IS_BFLOAT16 = {is_bfloat16};\n"
    source = compiler.Source("quantize", head + Path(__file__).with_name("quantize.cu").read_text())
    library = launch.shared_library((source, on.capability), lambda: source, compiler.target(on.capability))
    kernel, ctas, pool = library.kernel("quantize_blocks", on), batch * heads * blocks, deque[Any](maxlen=8)
    array, stream_of = cupy.ndarray, launch.stream

    def quantise(x: Any) -> tuple[Any, Any, Any]:
        codes, scale = array(shape, _CODES), array(of_scale, _FLOATS)
        transposed = array((batch, heads, dim, padded), _CODES) if transpose else None
        try:
            arguments = pool.pop()  # no other thread uses it until it is returned
        except IndexError:
            arguments = launch.KernelArguments(words)
        own = arguments.words
        own[0], own[1], own[2] = x.data.ptr, codes.data.ptr, scale.data.ptr
        if transposed is not None:
            own[3] = transposed.data.ptr
        stream = stream_of()
        kernel.launch(ctas, _THREADS, arguments, stream)
        pool.append(arguments)
        launch.keep(stream, kernel, x, codes, scale, transposed)
        return codes, scale, transposed

    return quantise

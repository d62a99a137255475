"""`flashkit.quantize` on a GPU in one pass: the kernel of quantize.cu."""

from __future__ import annotations

from collections import deque
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


@lru_cache(maxsize=256)
def planned(form: Any, swapped: bool, transpose: bool, signs: tuple[int, ...] | None) -> Quantisation | None:
    """The quantisation of arrays of CuPy of one layout, or None: the kernel reads vectors of 16 bytes.

    form: of `arrays.layout`, for axes (B, H, N, D), or (B, N, H, D) if swapped. transpose: whether V^T is made. signs:
    for each column a bit, whether the rotation changes its sign; None without one.
    """
    _, shape, strides, dtype, ordinal = form
    taken = device.of(ordinal).capability >= _CAPABILITY and name_of(dtype) in ("float16", "bfloat16")
    vectors = shape[3] in DIMS and strides[3] == 2 and not any(stride % 16 for stride in strides[:3])
    return Quantisation(form, swapped, transpose, signs) if taken and vectors and 0 not in shape else None


class Quantisation:
    """Calling it with an array enqueues its quantisation, and gives new arrays: codes like it, uint8; scales, float32
    with a token for each block; and V^T, (B, H, D, padded tokens), or None.
    """

    def __init__(self, form: tuple[Any, ...], swapped: bool, transpose: bool, signs: tuple[int, ...] | None) -> None:
        import cupy

        _, shape, strides, dtype, ordinal = form
        head_axis, token_axis = (2, 1) if swapped else (1, 2)
        batch, heads, tokens, dim = shape[0], shape[head_axis], shape[token_axis], shape[3]
        blocks, padded = -(-tokens // BLOCK), -(-tokens // PADDING) * PADDING * transpose
        of_scale = (batch, blocks, heads, 1) if swapped else (batch, heads, blocks, 1)
        words = [0, 0, 0, 0]
        new = [(n * m * d, m * d, d) for _, n, m, d in (shape, of_scale)]  # strides of C-contiguous arrays
        for steps in ([stride // 2 for stride in strides], *new):
            words += steps[0], steps[head_axis], steps[token_axis]
        self._words = [*words, heads, tokens, padded, int(signs is not None), *(signs or (0, 0, 0, 0))]
        self._pool: deque[launch.KernelArguments] = deque(maxlen=8)
        self._new, codes = cupy.ndarray, np.dtype("uint8")
        self._codes, self._scale = (shape, codes), (of_scale, np.dtype("float32"))
        self._transposed = ((batch, heads, dim, padded), codes) if transpose else None
        on, is_bfloat16 = device.of(ordinal), str(name_of(dtype) == "bfloat16").lower()
        head = f"constexpr int DIM = {dim};\nconstexpr bool IS_BFLOAT16 = {is_bfloat16};\n"
        library = launch.shared_library((head, arch := compiler.target(on.capability)), lambda: _source(head), arch)
        self._kernel, self._ctas = library.kernel("quantize_blocks", on), batch * heads * blocks

    def __call__(self, x: Any) -> tuple[Any, Any, Any]:
        codes, scale = self._new(*self._codes), self._new(*self._scale)
        transposed = None if self._transposed is None else self._new(*self._transposed)
        try:
            arguments = self._pool.pop()  # no other thread uses it until it is returned
        except IndexError:
            arguments = launch.KernelArguments(self._words)
        words = arguments.words
        words[0], words[1], words[2] = x.data.ptr, codes.data.ptr, scale.data.ptr
        if transposed is not None:
            words[3] = transposed.data.ptr
        stream = launch.stream()
        self._kernel.launch(self._ctas, _THREADS, arguments, stream)
        self._pool.append(arguments)
        launch.keep(stream, self, x, codes, scale, transposed)
        return codes, scale, transposed


def _source(head: str) -> compiler.Source:
    return compiler.Source("quantize", head + Path(__file__).with_name("quantize.cu").read_text())

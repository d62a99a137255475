"""The array functions of cpu.py, which describes them, in CuPy: products by cuBLAS, everything else by kernels.cu.

`adamw` also writes the values in their dtype.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import cublas, device

from .parameters import Parameters

Array = Any
xp = cupy

BLOCKS = 792  # that sum columns, six for each multiprocessor of a large GPU
ROW_BLOCKS = 396  # where a warp has a row in its registers
MAX_WIDTH = 2048  # that it can have there
_CUDA_TYPES = {"float32": 0, "float64": 1, "bfloat16": 14}  # cudaDataType_t
_COMPUTE = {"float32": 68, "float64": 70, "bfloat16": 68}  # cublasComputeType_t
_BFLOAT16 = """struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  explicit __device__ bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  explicit __device__ operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};
"""
_HEADS = {
    "float32": "using T = float;\nusing WIDE = float;\n",
    "float64": "using T = double;\nusing WIDE = double;\n",
    "bfloat16": _BFLOAT16 + "using T = bfloat16;\nusing WIDE = float;\n",
}


@cache
def _kernel(name: str, dtype: Any, width: int) -> Any:
    if name:
        return _kernel("", dtype, width).get_function(name)
    text = Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
    code = f"{_HEADS[dtype.name]}#define WIDTH {width}\n{text}"
    return cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")


def _launch(name: str, like: Array, blocks: int, threads: int, *arguments: Any, width: int = 0) -> None:
    """A kernel for this array's dtype and width. Integers are 32 bits, None is no address."""
    given = tuple(np.int32(x) if type(x) is int else np.uintp(0) if x is None else x for x in arguments)
    _kernel(name, like.dtype, width or like.shape[-1])((blocks,), (threads,), given)


def _vectors(x: Array) -> int:
    """What a row has of those that a thread loads at once."""
    n = 16 // x.itemsize
    return x.shape[-1] // n if x.shape[-1] % n == 0 else x.shape[-1]


def _threads(vectors: int) -> int:
    """Of a block, so that all have equally many."""
    rounds = -(-vectors // 1024)
    return -(-vectors // (32 * rounds)) * 32


def _add_sums(sums: Array, *totals: Array | None) -> None:
    """sums: (blocks, so many totals, width)."""
    blocks, arrays, width = sums.shape
    given = *(*totals, None, None)[:3], sums, blocks, width, arrays * width
    _launch("add_sums", sums, -(-arrays * width // 32), 1024, *given, width=1)


def _wide(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


# --- products ---------------------------------------------------------------------------------------------------------


def _gemm(a: Array, b: Array, out: Array, add: float) -> None:
    """out = a b + add out, all by rows. cuBLAS counts by columns, so it computes the transpose: b' a'."""

    def operand(x: Array) -> tuple[int, int]:
        """Whether cuBLAS has to transpose x', and its leading dimension."""
        if x.flags.c_contiguous:
            return 0, x.shape[1]
        assert x.T.flags.c_contiguous, "products take contiguous matrices and their transposes"
        return 1, x.shape[0]

    (m, k), n = a.shape, b.shape[1]
    transposed_a, step_a = operand(a)
    transposed_b, step_b = operand(b)
    kind = _COMPUTE[a.dtype.name]
    scalar = ctypes.c_double if kind == 70 else ctypes.c_float
    one, beta = scalar(1), scalar(add)
    cublas.gemmEx(
        device.get_cublas_handle(), transposed_b, transposed_a, n, m, k, ctypes.addressof(one),
        b.data.ptr, _CUDA_TYPES[b.dtype.name], step_b, a.data.ptr, _CUDA_TYPES[a.dtype.name], step_a,
        ctypes.addressof(beta), out.data.ptr, _CUDA_TYPES[out.dtype.name], n, kind, -1,
    )  # fmt: skip


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    found = cupy.empty((len(a), b.shape[1]), a.dtype) if out is None else out
    _gemm(a, b, found, 0)
    return found


def add_product(total: Array, a: Array, b: Array) -> None:
    _gemm(a, b, total, 1)


def add_bias(x: Array, bias: Array) -> Array:
    _launch("add", x, len(x), _threads(_vectors(x)), x, x, None, bias, None, 0)
    return x


def join(parts: list[Array], total: Array) -> Array:
    rows, width = parts[0].shape
    out, sums = cupy.empty((rows, 3 * width), parts[0].dtype), cupy.empty((BLOCKS, 1, 3 * width), total.dtype)
    parts = [cupy.ascontiguousarray(x) for x in parts]
    _launch("join", parts[0], BLOCKS, _threads(3 * _vectors(parts[0])), out, *parts, sums, rows)
    _add_sums(sums, total)
    return out


# --- embedding --------------------------------------------------------------------------------------------------------


def embed(ids: Any, positions: Any, words: Array, places: Array) -> Array:
    index = cupy.asarray(np.stack([ids, positions]).astype(np.int32))
    x = cupy.empty((len(ids), words.shape[1]), words.dtype)
    _launch("add", x, len(x), _threads(_vectors(x)), x, words, index[0], places, index[1], 0)
    return x


def add_rows(total: Array, index: Any, x: Array) -> None:
    order = np.argsort(index, kind="stable")
    rows, begins = np.unique(index[order], return_index=True)
    found = cupy.asarray(np.concatenate([rows, begins, [len(order)], order]).astype(np.int32))
    n = len(rows)
    blocks = n * -(-_vectors(x) // 32)
    _launch("add_rows", x, blocks, 512, total, found[:n], found[n : 2 * n + 1], found[2 * n + 1 :], x)


# --- normalisation, GELU, cross-entropy -------------------------------------------------------------------------------


def add_norm(x: Array, added: Array | None, bias: Array | None, weight: Array, shift: Array) -> tuple[Array, ...]:
    if x.shape[1] > MAX_WIDTH:
        raise ValueError(f"width: expected at most {MAX_WIDTH}, got {x.shape[1]}")
    total = x if added is None else cupy.empty_like(x)
    y, stats = cupy.empty_like(x), cupy.empty((2, len(x)), _wide(x.dtype))
    _launch("add_norm", x, -(-len(x) // 4), 128, x, added, bias, weight, shift, total, y, stats, len(x))
    return total, y, stats


def norm_gradient(
    dy: Array, x: Array, stats: Array, weight: Array, dx: Array | None, totals: tuple[Array | None, ...]
) -> Array:
    found, sums = cupy.empty_like(x), cupy.empty((ROW_BLOCKS, 3, x.shape[1]), stats.dtype)
    _launch("norm_gradient", x, ROW_BLOCKS, 128, dy, x, stats, weight, dx, found, sums, len(x))
    _add_sums(sums, *totals)
    return found


def gelu(x: Array, bias: Array) -> Array:
    out = cupy.empty_like(x)
    _launch("add", x, len(x), _threads(_vectors(x)), out, x, None, bias, None, 1)
    return out


def gelu_gradient(dy: Array, x: Array, bias: Array, total: Array) -> Array:
    sums = cupy.empty((BLOCKS, 1, x.shape[1]), total.dtype)
    _launch("gelu_gradient", x, BLOCKS, _threads(_vectors(x)), dy, x, bias, sums, len(x))
    _add_sums(sums, total)
    return dy


def cross_entropy(logits: Array, targets: Any, scale: float | None) -> Array:
    losses = cupy.empty(len(logits), _wide(logits.dtype))
    _launch(
        "cross_entropy", logits, len(logits), _threads(_vectors(logits)), logits,
        cupy.asarray(np.asarray(targets, np.int32)), losses, losses.dtype.type(scale or 0), int(scale is not None),
    )  # fmt: skip
    return losses.sum(dtype=np.float64)


# --- the optimizer ----------------------------------------------------------------------------------------------------


def adamw(
    p: Parameters,
    factor: Array,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    corrections: tuple[float, float],
) -> None:
    size = p.masters.size
    _launch(
        "adamw", p.values, -(-size // 1024), 256, p.masters, p.values, p.gradients, p.mean, p.variance, factor,
        *map(p.masters.dtype.type, (rate, decay, *betas, *corrections)), np.int64(p.decayed), np.int64(size),
        width=1,
    )  # fmt: skip

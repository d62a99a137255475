"""The array functions of cpu.py, which describes them, in CuPy: products by cuBLAS, everything else by kernels.cu.

`adamw` also writes `value`, the master in its dtype.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import cublas, device

Array = Any
xp = cupy

ROW_THREADS = 128  # of the block that has a row
PARTS = 264  # blocks that sum rows into gradients of a normalisation
MAX_WIDTH = 4096  # of kernels.cu: columns of a thread, times 1024
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
def _module(dtype: str) -> Any:
    code = _HEADS[dtype] + Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
    return cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")


@cache
def _kernel(name: str, dtype: str) -> Any:
    return _module(dtype).get_function(name)


def _launch(name: str, dtype: Any, blocks: int, threads: int, *arguments: Any) -> None:
    _kernel(name, np.dtype(dtype).name)((blocks,), (threads,), arguments)


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


@cache
def _ones(rows: int, dtype: str) -> Array:
    return cupy.ones((1, rows), np.dtype(dtype))


def add_column_sums(total: Array, x: Array) -> None:
    _gemm(_ones(len(x), x.dtype.name), x, total[None], 1)


def add_bias(x: Array, bias: Array) -> Array:
    _launch("add_bias", x.dtype, len(x), ROW_THREADS, x, bias, np.int32(x.shape[1]))
    return x


# --- embedding --------------------------------------------------------------------------------------------------------


def embed(ids: Any, positions: Any, words: Array, places: Array) -> Array:
    index = cupy.asarray(np.stack([ids, positions]).astype(np.int32))
    x = cupy.empty((len(ids), words.shape[1]), words.dtype)
    _launch("embed", x.dtype, len(x), ROW_THREADS, x, index[0], index[1], words, places, np.int32(x.shape[1]))
    return x


def add_rows(total: Array, index: Any, x: Array) -> None:
    order = np.argsort(index, kind="stable").astype(np.int32)
    rows, begins = np.unique(index[order], return_index=True)
    found = cupy.asarray(np.concatenate([rows, begins, [len(order)], order]).astype(np.int32))
    n = len(rows)
    _launch(
        "add_rows", x.dtype, n, ROW_THREADS, total, found[:n], found[n : 2 * n + 1], found[2 * n + 1 :], x,
        np.int32(x.shape[1]),
    )  # fmt: skip


# --- normalisation, GELU, cross-entropy -------------------------------------------------------------------------------


def add_norm(x: Array, added: Array | None, bias: Array | None, weight: Array, shift: Array) -> tuple[Array, ...]:
    rows, width = x.shape
    total = x if added is None else cupy.empty_like(x)
    y, stats = cupy.empty_like(x), cupy.empty((2, rows), _wide(x.dtype))
    none = np.uintp(0)
    _launch(
        "add_norm", x.dtype, rows, ROW_THREADS, x, none if added is None else added, none if bias is None else bias,
        weight, shift, total, y, stats, np.int32(rows), np.int32(width),
    )  # fmt: skip
    return total, y, stats


def norm_gradient(
    dy: Array, x: Array, stats: Array, weight: Array, dx: Array | None, dweight: Array, dshift: Array
) -> Array:
    rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"width: expected at most {MAX_WIDTH}, got {width}")
    found, parts = cupy.empty_like(x), min(PARTS, rows)
    sums = cupy.empty((2, parts, width), stats.dtype)
    _launch(
        "norm_gradient", x.dtype, parts, min(1024, -(-width // 64) * 32), dy, x, stats, weight,
        np.uintp(0) if dx is None else dx, found, sums, np.int32(rows), np.int32(width),
    )  # fmt: skip
    add_column_sums(dweight, sums[0])
    add_column_sums(dshift, sums[1])
    return found


def gelu(x: Array, bias: Array) -> Array:
    out = cupy.empty_like(x)
    _launch("gelu", x.dtype, len(x), ROW_THREADS, out, x, bias, np.int32(x.shape[1]))
    return out


def gelu_gradient(dy: Array, x: Array, bias: Array) -> Array:
    _launch("gelu_gradient", x.dtype, len(x), ROW_THREADS, dy, x, bias, np.int32(x.shape[1]))
    return dy


def cross_entropy(logits: Array, targets: Any, scale: float | None) -> Array:
    losses = cupy.empty(len(logits), _wide(logits.dtype))
    _launch(
        "cross_entropy", logits.dtype, len(logits), 512, logits, cupy.asarray(np.asarray(targets, np.int32)), losses,
        _wide(logits.dtype)(scale or 0), np.int32(scale is not None), np.int32(logits.shape[1]),
    )  # fmt: skip
    return losses.sum(dtype=np.float64)


# --- the optimizer ----------------------------------------------------------------------------------------------------


def adamw(
    master: Array, value: Array, gradient: Array, mean: Array, variance: Array, factor: Array,
    rate: float, decay: float, betas: tuple[float, float], corrections: tuple[float, float],
) -> None:  # fmt: skip
    wide = _wide(value.dtype)
    scalars = (rate, decay, *betas, *corrections)
    _launch(
        "adamw", value.dtype, -(-len(master) // 256), 256, master, value, gradient, mean, variance, factor,
        *map(wide, scalars), np.int64(len(master)),
    )  # fmt: skip

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

THREADS = 128  # of a block, where each has a vector or a column
BLOCKS = 1056  # that sum columns: eight for each multiprocessor of a large GPU
ROW_SUMS = 396  # blocks of a normalisation's gradient, whose warps need more registers
NONE = np.uintp(0)
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
def _module(dtype: str, width: int) -> Any:
    sizes = f"constexpr int WIDTH = {width}, LANES = {_lanes(width)};\n"
    code = _HEADS[dtype] + sizes + Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
    return cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")


@cache
def _kernel(name: str, dtype: Any, width: int) -> Any:
    return _module(np.dtype(dtype).name, width).get_function(name)


def _launch(name: str, like: Array, blocks: int, threads: int, *arguments: Any) -> None:
    """A kernel of this array's dtype and width. Integers are 32 bits, and None is no address."""
    given = tuple(np.int32(x) if type(x) is int else NONE if x is None else x for x in arguments)
    _kernel(name, like.dtype, like.shape[-1])((blocks,), (threads,), given)


def _lanes(width: int) -> int:
    """Threads that have a row: a warp for 1024 columns."""
    return 32 * -(-width // 1024)


def _row_blocks(x: Array) -> tuple[int, int]:
    """Blocks and threads, where `_lanes` threads have a row."""
    lanes = _lanes(x.shape[1])
    rows = 4 if lanes == 32 else 1
    return -(-len(x) // rows), rows * lanes


def _vector(x: Array) -> int:
    """Elements that a thread loads at once."""
    n = 16 // x.itemsize
    return 1 if x.shape[-1] % n else n


def _vector_blocks(x: Array) -> int:
    return -(-x.size // (THREADS * _vector(x)))


def _column_blocks(x: Array, arrays: int = 1) -> tuple[int, int]:
    """Blocks that sum columns, and the parts of the rows that these are for."""
    slabs = arrays * -(-x.shape[1] // (THREADS * _vector(x)))
    parts = min(len(x), -(-BLOCKS // slabs))
    return slabs * parts, parts


def _add_sums(sums: Array, *totals: Array | None) -> None:
    """sums: (parts, so many totals, width)."""
    parts, arrays, width = sums.shape
    totals = (*totals, None, None)[:3]
    _launch("add_sums", sums, -(-arrays * width // 32), 1024, *totals, sums, parts, width, arrays * width)


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
    _launch("add", x, _vector_blocks(x), THREADS, x, x, None, bias, None, len(x))
    return x


def join(parts: list[Array], total: Array) -> Array:
    rows, width = parts[0].shape
    out = cupy.empty((rows, 3 * width), parts[0].dtype)
    blocks, count = _column_blocks(parts[0], 3)
    sums = cupy.empty((count, 3 * width), total.dtype)
    _launch("join", parts[0], blocks, THREADS, out, *map(cupy.ascontiguousarray, parts), sums, rows)
    _add_sums(sums[:, None], total)
    return out


# --- embedding --------------------------------------------------------------------------------------------------------


def embed(ids: Any, positions: Any, words: Array, places: Array) -> Array:
    index = cupy.asarray(np.stack([ids, positions]).astype(np.int32))
    x = cupy.empty((len(ids), words.shape[1]), words.dtype)
    _launch("add", x, _vector_blocks(x), THREADS, x, words, index[0], places, index[1], len(x))
    return x


def add_rows(total: Array, index: Any, x: Array) -> None:
    order = np.argsort(index, kind="stable")
    rows, begins = np.unique(index[order], return_index=True)
    found = cupy.asarray(np.concatenate([rows, begins, [len(order)], order]).astype(np.int32))
    n = len(rows)
    blocks = n * -(-x.shape[1] // (32 * _vector(x)))
    _launch("add_rows", x, blocks, 512, total, found[:n], found[n : 2 * n + 1], found[2 * n + 1 :], x)


# --- normalisation, GELU, cross-entropy -------------------------------------------------------------------------------


def add_norm(x: Array, added: Array | None, bias: Array | None, weight: Array, shift: Array) -> tuple[Array, ...]:
    total = x if added is None else cupy.empty_like(x)
    y, stats = cupy.empty_like(x), cupy.empty((2, len(x)), _wide(x.dtype))
    _launch("add_norm", x, *_row_blocks(x), x, added, bias, weight, shift, total, y, stats, len(x))
    return total, y, stats


def norm_gradient(
    dy: Array, x: Array, stats: Array, weight: Array, dx: Array | None, totals: tuple[Array | None, ...]
) -> Array:
    found, (blocks, threads) = cupy.empty_like(x), _row_blocks(x)
    blocks = min(blocks, ROW_SUMS)
    sums = cupy.empty((blocks, 3, x.shape[1]), stats.dtype)
    _launch("norm_gradient", x, blocks, threads, dy, x, stats, weight, dx, found, sums, len(x))
    _add_sums(sums, *totals)
    return found


def gelu(x: Array, bias: Array) -> Array:
    out = cupy.empty_like(x)
    _launch("gelu", x, _vector_blocks(x), THREADS, out, x, bias, len(x))
    return out


def gelu_gradient(dy: Array, x: Array, bias: Array, total: Array) -> Array:
    blocks, parts = _column_blocks(x)
    sums = cupy.empty((parts, 1, x.shape[1]), total.dtype)
    _launch("gelu_gradient", x, blocks, THREADS, dy, x, bias, sums, len(x))
    _add_sums(sums, total)
    return dy


def cross_entropy(logits: Array, targets: Any, scale: float | None) -> Array:
    rows, width = logits.shape
    losses = cupy.empty(rows, _wide(logits.dtype))
    vectors = width // _vector(logits)
    rounds = -(-vectors // 1024)
    threads = -(-vectors // (32 * rounds)) * 32
    _launch(
        "cross_entropy", logits, rows, threads, logits, cupy.asarray(np.asarray(targets, np.int32)), losses,
        losses.dtype.type(scale or 0), int(scale is not None),
    )  # fmt: skip
    return losses.sum(dtype=np.float64)


# --- the optimizer ----------------------------------------------------------------------------------------------------


def adamw(
    master: Array, value: Array, gradient: Array, mean: Array, variance: Array, factor: Array, decayed: int,
    rate: float, decay: float, betas: tuple[float, float], corrections: tuple[float, float],
) -> None:  # fmt: skip
    scalars = map(master.dtype.type, (rate, decay, *betas, *corrections))
    _launch(
        "adamw", value[:1], -(-len(master) // 1024), 256, master, value, gradient, mean, variance, factor,
        *scalars, np.int64(decayed), np.int64(len(master)),
    )  # fmt: skip

"""The array functions of cpu.py, which describes them, in CuPy: products by cuBLAS, everything else by kernels.cu."""

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
Totals = tuple[Array | None, ...]
xp = cupy

BLOCKS = 792  # that sum columns, six for each multiprocessor of a large GPU
ROW_BLOCKS = 396  # where a warp has a row in its registers
_CUDA_TYPES = {"float32": 0, "float64": 1, "bfloat16": 14}  # cudaDataType_t
_C_TYPES = {"float32": "float", "float64": "double", "bfloat16": "bfloat16"}


@cache
def _kernel(name: str, dtype: Any, width: int) -> Any:
    if name:
        return _kernel("", dtype, width).get_function(name)
    text = Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
    wide = "double" if dtype == np.float64 else "float"
    head = f"#define T {_C_TYPES[dtype.name]}\n#define WIDE {wide}\n#define WIDTH {width}\n"
    return cupy.RawModule(code=head + text, options=("-std=c++17",), backend="nvrtc")


def _launch(name: str, like: Array, blocks: int, threads: int, *arguments: Any, width: int = 0) -> None:
    """A kernel for this array's dtype and width. Integers are 32 bits, None is no address."""
    given = tuple(np.int32(x) if type(x) is int else np.uintp(0) if x is None else x for x in arguments)
    _kernel(name, like.dtype, width or like.shape[-1])((blocks,), (threads,), given)


def _threads(x: Array, rows: int = 1) -> int:
    """Of a block that has so many rows of x, equally many vectors for each thread."""
    n = 16 // x.itemsize
    vectors = rows * x.shape[-1] // (1 if x.shape[-1] % n else n)
    rounds = -(-vectors // 1024)
    return -(-vectors // (32 * rounds)) * 32


def _add_sums(sums: Array, *totals: Array | None) -> None:
    """sums: (blocks, so many of three totals, width)."""
    blocks, n, width = sums.shape
    _launch("add_sums", sums, -(-n * width // 32), 1024, *totals, sums, blocks, width, n * width, width=1)


def _gemm(a: Array, b: Array, out: Array, add: float) -> None:
    """out = a b + add out, all by rows. cuBLAS counts by columns, so it computes the transpose: b' a'."""

    def operand(x: Array) -> tuple[bool, int]:
        """Whether cuBLAS has to transpose x', and its leading dimension."""
        assert x.flags.c_contiguous or x.flags.f_contiguous
        return not x.flags.c_contiguous, x.shape[x.flags.c_contiguous]

    (m, k), n = a.shape, b.shape[1]
    transposed_a, step_a = operand(a)
    transposed_b, step_b = operand(b)
    kind, scalar = (70, ctypes.c_double) if a.dtype == np.float64 else (68, ctypes.c_float)  # cublasComputeType_t
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
    _launch("add", x, len(x), _threads(x), x, x, None, bias, None, 0)
    return x


def join(parts: list[Array], total: Array) -> Array:
    rows, width = parts[0].shape
    out, sums = cupy.empty((rows, 3 * width), parts[0].dtype), cupy.empty((BLOCKS, 1, 3 * width), total.dtype)
    _launch("join", parts[0], BLOCKS, _threads(parts[0], 3), out, *map(cupy.ascontiguousarray, parts), sums, rows)
    _add_sums(sums, total, None, None)
    return out


def embed(ids: Any, positions: Any, words: Array, places: Array) -> Array:
    index = cupy.asarray(np.stack([ids, positions]).astype(np.int32))
    x = cupy.empty((len(ids), words.shape[1]), words.dtype)
    _launch("add", x, len(x), _threads(x), x, words, index[0], places, index[1], 0)
    return x


def add_rows(total: Array, index: Any, x: Array) -> None:
    order = np.argsort(index)
    rows, begins = np.unique(index[order], return_index=True)
    found = cupy.asarray(np.concatenate([rows, begins, [len(order)], order]).astype(np.int32))
    n = len(rows)
    _launch("add_rows", x, n, 512, total, found[:n], found[n : 2 * n + 1], found[2 * n + 1 :], x)


def add_norm(x: Array, added: Array | None, bias: Array | None, weight: Array, shift: Array) -> tuple[Array, ...]:
    total = x if added is None else cupy.empty_like(x)
    y, stats = cupy.empty_like(x), cupy.empty((2, len(x)), np.result_type(x.dtype, np.float32))
    _launch("add_norm", x, -(-len(x) // 4), 128, x, added, bias, weight, shift, total, y, stats, len(x))
    return total, y, stats


def norm_gradient(dy: Array, x: Array, stats: Array, weight: Array, dx: Array | None, totals: Totals) -> Array:
    found, sums = cupy.empty_like(x), cupy.empty((ROW_BLOCKS, 3, x.shape[1]), stats.dtype)
    _launch("norm_gradient", x, ROW_BLOCKS, 128, dy, x, stats, weight, dx, found, sums, len(x))
    _add_sums(sums, *totals)
    return found


def gelu(x: Array, bias: Array) -> Array:
    out = cupy.empty_like(x)
    _launch("add", x, len(x), _threads(x), out, x, None, bias, None, 1)
    return out


def gelu_gradient(dy: Array, x: Array, bias: Array, total: Array) -> Array:
    sums = cupy.empty((BLOCKS, 1, x.shape[1]), total.dtype)
    _launch("gelu_gradient", x, BLOCKS, _threads(x), dy, x, bias, sums, len(x))
    _add_sums(sums, total, None, None)
    return dy


def cross_entropy(logits: Array, targets: Any, scale: float | None) -> Array:
    losses = cupy.empty(len(logits), np.result_type(logits.dtype, np.float32))
    told, factor, backward = np.asarray(targets, np.int32), losses.dtype.type(scale or 0), int(scale is not None)
    given = logits, cupy.asarray(told), losses, factor, backward
    _launch("cross_entropy", logits, len(logits), _threads(logits), *given)
    return losses.sum(dtype=np.float64)


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

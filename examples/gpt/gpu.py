"""The array functions of cpu.py, which describes them, in CuPy: products by cuBLAS, everything else by kernels.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import device

from .parameters import Parameters

Array = Any
xp = cupy

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


def _threads(x: Array) -> int:
    """Of a block that has a row of x: one for 16 bytes, as far as that goes."""
    return min(-(-x.shape[-1] * x.itemsize // 512) * 32, 1024)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed: cublasStatus_t {status}")


@cache
def _blas() -> tuple[Any, Array]:
    """cuBLAS, and memory to work in. CuPy's functions refuse to be captured."""
    device.get_cublas_handle()  # loads the library
    library = ctypes.CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
    return library, cupy.empty(1 << 25, np.uint8)


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
    (library, memory), handle = _blas(), ctypes.c_void_p(device.get_cublas_handle())
    _check(library.cublasSetStream_v2(handle, ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)))
    _check(library.cublasSetWorkspace_v2(handle, ctypes.c_void_p(memory.data.ptr), ctypes.c_size_t(memory.size)))
    of_a, of_b, of_out = ((ctypes.c_void_p(x.data.ptr), _CUDA_TYPES[x.dtype.name]) for x in (a, b, out))
    _check(library.cublasGemmEx(
        handle, int(transposed_b), int(transposed_a), n, m, k, ctypes.byref(scalar(1)), *of_b, step_b, *of_a, step_a,
        ctypes.byref(scalar(add)), *of_out, n, kind, -1,
    ))  # fmt: skip


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    found = cupy.empty((len(a), b.shape[1]), a.dtype) if out is None else out
    _gemm(a, b, found, 0)
    return found


def add_product(total: Array, a: Array, b: Array) -> None:
    _gemm(a, b, total, 1)


@cache
def _ones(n: int, dtype: Any) -> Array:
    return cupy.ones((1, n), dtype)


def add_sum(total: Array, x: Array) -> None:
    _gemm(_ones(len(x), x.dtype), x, total[None], 1)


def add_bias(x: Array, bias: Array) -> Array:
    _launch("add", x, len(x), _threads(x), x, x, None, bias, None, 0)
    return x


def index(x: np.ndarray) -> Array:
    """x, then what add_rows reads: T rows, T + 1 places where the tokens of each begin, and tokens in this order."""
    order = np.argsort(x)
    rows, begins = np.unique(x[order], return_index=True)
    behind = np.full(len(x) - len(rows), len(x))
    return cupy.asarray(np.concatenate([x, rows, behind, begins, behind, [len(x)], order]).astype(np.int32))


def embed(ids: Array, positions: Array, words: Array, places: Array) -> Array:
    x = cupy.empty((len(ids) // 4, words.shape[1]), words.dtype)
    _launch("add", x, len(x), _threads(x), x, words, ids, places, positions, 0)
    return x


def add_rows(total: Array, index: Array, x: Array) -> None:
    n = len(x)
    given = index[n : 2 * n], index[2 * n : 3 * n + 1], index[3 * n + 1 :]
    _launch("add_rows", x, min(n, len(total)), 512, total, *given, x)


def add_norm(x: Array, added: Array | None, bias: Array | None, weight: Array, shift: Array) -> tuple[Array, ...]:
    total = x if added is None else cupy.empty_like(x)
    y, stats = cupy.empty_like(x), cupy.empty((2, len(x)), np.result_type(x.dtype, np.float32))
    _launch("add_norm", x, -(-len(x) // 4), 128, x, added, bias, weight, shift, total, y, stats, len(x))
    return total, y, stats


def norm_gradient(dy: Array, x: Array, stats: Array, weight: Array, dx: Array | None, totals: Any) -> Array:
    found, sums = cupy.empty_like(x), cupy.empty((2, ROW_BLOCKS, x.shape[1]), stats.dtype)
    _launch("norm_gradient", x, ROW_BLOCKS, 128, dy, x, stats, weight, dx, found, sums, len(x))
    for total, of_blocks in zip(totals, sums, strict=True):
        add_sum(total, of_blocks)
    return found


def gelu(x: Array, bias: Array) -> Array:
    out = cupy.empty_like(x)
    _launch("add", x, len(x), _threads(x), out, x, None, bias, None, 1)
    return out


def gelu_gradient(dy: Array, x: Array, bias: Array) -> Array:
    _launch("gelu_gradient", x, len(x), _threads(x), dy, x, bias)
    return dy


def cross_entropy(logits: Array, targets: Array, scale: float | None) -> Array:
    losses = cupy.empty(len(logits), np.result_type(logits.dtype, np.float32))
    given = logits, targets, losses, losses.dtype.type(scale or 0), int(scale is not None)
    _launch("cross_entropy", logits, len(logits), _threads(logits), *given)
    return losses


def adamw(p: Parameters, factor: Array, rate: float, decay: float, betas: Any, corrections: Any) -> None:
    size = p.masters.size
    _launch(
        "adamw", p.values, -(-size // 1024), 256, p.masters, p.values, p.gradients, p.mean, p.variance, factor,
        *map(p.masters.dtype.type, (rate, decay, *betas, *corrections)), np.int64(p.decayed), np.int64(size),
        width=1,
    )  # fmt: skip


class Replay:
    """A CUDA graph of a function. Its memory is of a pool of its own: what the function frees, the graph still uses."""

    def __init__(self) -> None:
        self._key, self.pool, self._stream = None, cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)

    def __call__(self, function: Callable[..., Any], given: list[Array], key: Hashable) -> Any:
        """What the function returns for these arrays, until the next call. The first one with a key loads kernels and
        fills the pool, the second one is captured.
        """
        capture = key == self._key
        if not capture:
            self._key, self.graph, self._given = key, None, given
        for to, x in zip(self._given, given, strict=True):
            to[...] = x
        if self.graph is None:
            cupy.cuda.Device().synchronize()
            with self._stream, cupy.cuda.using_allocator(self.pool.malloc):
                if capture:
                    self._stream.begin_capture()
                self._found = function(*self._given)
                if capture:
                    self.graph = self._stream.end_capture()
                self._stream.synchronize()
        if capture:
            self.graph.launch()
        return self._found

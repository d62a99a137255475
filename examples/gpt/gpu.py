"""The array functions of cpu.py, which describes them, in CuPy: products by cuBLAS, everything else by kernels.cu."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import device

from .parameters import Parameters

Array = Any
Totals = tuple[Array | None, ...]
xp = cupy

BLOCKS = 792  # that sum columns, six for each multiprocessor of a large GPU
POOLS: set[Any] = set()  # of CUDA graphs
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


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed: cublasStatus_t {status}")


@cache
def _blas() -> tuple[Any, ctypes.c_void_p, Array]:
    """cuBLAS, a handle, and memory to work in. CuPy's functions refuse to be captured."""
    device.get_cublas_handle()  # loads the library
    library, handle = ctypes.CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"), ctypes.c_void_p()
    _check(library.cublasCreate_v2(ctypes.byref(handle)))
    return library, handle, cupy.empty(1 << 25, np.uint8)


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
    library, handle, memory = _blas()
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


def add_bias(x: Array, bias: Array) -> Array:
    _launch("add", x, len(x), _threads(x), x, x, None, bias, None, 0)
    return x


def join(parts: list[Array], total: Array) -> Array:
    width, (*batch, tokens, _, dim) = len(total) // 3, parts[0].shape
    rows = math.prod(batch) * tokens
    out, sums = cupy.empty((rows, 3 * width), parts[0].dtype), cupy.empty((BLOCKS, 1, 3 * width), total.dtype)
    if dim * out.itemsize % 16:  # a vector would have parts of two heads
        parts, tokens, dim = [cupy.ascontiguousarray(x).reshape(rows, 1, width) for x in parts], rows, width
    assert all(x.strides == parts[0].strides for x in parts)
    steps = [step // out.itemsize for step in (0, *parts[0].strides)[-4:-1]]
    _launch("join", out, BLOCKS, _threads(out), out, *parts, sums, rows, tokens, dim, *steps, width=width)
    _add_sums(sums, total, None, None)
    return out


def index(x: np.ndarray, to_add: bool = True) -> Array:
    """x, then what add_rows reads: T rows, T + 1 places where the tokens of each begin, and tokens in this order."""
    if to_add:
        order = np.argsort(x)
        rows, begins = np.unique(x[order], return_index=True)
        behind = np.full(len(x) - len(rows), len(x))
        x = np.concatenate([x, rows, behind, begins, behind, [len(x)], order])
    return cupy.asarray(x.astype(np.int32))


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


def cross_entropy(logits: Array, targets: Array, scale: float | None) -> Array:
    losses = cupy.empty(len(logits), np.result_type(logits.dtype, np.float32))
    given = logits, targets, losses, losses.dtype.type(scale or 0), int(scale is not None)
    _launch("cross_entropy", logits, len(logits), _threads(logits), *given)
    return losses


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


class Replay:
    """A CUDA graph of a function. Its memory is of a pool of its own: what the function frees, the graph still uses."""

    def __init__(self) -> None:
        self._key, self._pool = None, None
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def __call__(self, function: Callable[..., Any], given: list[Array], key: Hashable) -> Any:
        """What the function returns for these arrays, until the next call. The first one with a key loads kernels and
        fills the pool, the second one is captured.
        """
        if key != self._key:
            POOLS.discard(self._pool)
            self._key, self.graph, self._given, self._pool = key, None, given, cupy.cuda.MemoryPool()
            POOLS.add(self._pool)
            return self._run(function)
        for to, x in zip(self._given, given, strict=True):
            to[...] = x
        if self.graph is None:
            self._found = self._run(function, capture=True)
        self.graph.launch()
        return self._found

    def _run(self, function: Callable[..., Any], capture: bool = False) -> Any:
        cupy.cuda.Device().synchronize()
        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            if capture:
                self._stream.begin_capture()
            found = function(*self._given)
            if capture:
                self.graph = self._stream.end_capture()
            self._stream.synchronize()
        return found

"""The baselines of `flashkit bench --device cuda`, on CuPy arrays whose memory they share, and its yardsticks.

PyTorch's scaled_dot_product_attention with the kernels of FlashAttention-2, of cuDNN and with the memory-efficient
kernels of xFormers, each selected by name; FlashAttention-3; FlexAttention; JAX's attention in Pallas.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import dispatch
from ...devices import timing
from ...errors import UnsupportedError
from ...options import OPTIONS
from ...spec import Direction
from .cases import BLOCK, Case, dense, dense_flops
from .contender import Contender, Entry, Yardstick, in_numpy, torch_entry, with_flashkit

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def _in_numpy(case: Case, x: Any) -> np.ndarray:
    import cupy

    return in_numpy(case, cupy.from_dlpack(x.detach().contiguous()))


def _with_torch(name: str, case: Case, arrays: Sequence[Any], direction: Direction, threads: int) -> Entry | None:
    """scaled_dot_product_attention with one of its backends."""
    import torch
    from torch.nn import attention as choices

    if case.masked or (case.causal and case.n_q != case.keys):
        return None  # its causal mask is aligned at the top left
    backend = getattr(choices.SDPBackend, BACKENDS[name])
    q, k, v, dout = (torch.from_dlpack(x) for x in arrays)
    if case.group > 1 and name == "efficient":  # it has no grouped queries
        return None

    def attend(q: Any, k: Any, v: Any) -> Any:
        with choices.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.group > 1
            )

    return _if_it_runs(attend, (q, k, v), dout, case, direction)


def _if_it_runs(attend: Any, tensors: tuple[Any, ...], dout: Any, case: Case, direction: Direction) -> Entry | None:
    """The entry of attend(q, k, v) of PyTorch, None where there is no kernel for the case or the direction."""
    with contextlib.suppress(RuntimeError):
        entry = torch_entry(attend, tensors, dout, partial(_in_numpy, case), direction)
        entry.call()
        return entry
    return None


def _with_fa3(case: Case, arrays: Sequence[Any], direction: Direction, threads: int) -> Entry | None:
    """FlashAttention-3, from the package that its own repository builds for Hopper."""
    import torch
    from flash_attn_interface import flash_attn_func

    if case.kept is not None or case.dtype not in ("float16", "bfloat16"):
        return None
    *qkv, dout = (torch.from_dlpack(x) for x in arrays)
    window = (-1, -1) if case.window is None else (case.window - 1, 0)

    def attend(q: Any, k: Any, v: Any) -> Any:
        tokens_first = (x.transpose(1, 2) for x in (q, k, v))
        found = flash_attn_func(*tokens_first, causal=case.causal, window_size=window)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return _if_it_runs(attend, tuple(qkv), dout, case, direction)  # a build may lack head dims or the backward pass


def _with_flex(case: Case, arrays: Sequence[Any], direction: Direction, threads: int) -> Entry | None:
    """FlexAttention, compiled, with the block mask of the case; for masked cases alone, since each is compiled."""
    import torch
    from torch.nn.attention import flex_attention as flex

    if not case.masked or case.n_q != case.keys:
        return None
    *qkv, dout = (torch.from_dlpack(x) for x in arrays)
    grid = None if case.kept is None else torch.from_numpy(case.grid).to(dout.device)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        pair = j <= i if case.causal or case.window is not None else j == j
        if case.window is not None:
            pair &= j > i - case.window
        return pair if grid is None else pair & grid[i // BLOCK, j // BLOCK]

    mask = flex.create_block_mask(visible, None, None, case.n_q, case.keys, device=dout.device, BLOCK_SIZE=BLOCK)
    attend = partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=mask, enable_gqa=case.group > 1)
    return torch_entry(attend, tuple(qkv), dout, partial(_in_numpy, case), direction)


def _with_pallas(case: Case, arrays: Sequence[Any], direction: Direction, threads: int) -> Entry | None:
    """JAX's attention for Hopper in Pallas, by the fastest tile. It takes float16 and no scale: queries are scaled."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise it takes most of the memory
    import jax
    from jax.experimental.pallas.ops.gpu.attention_mgpu import TuningConfig, attention

    plain = not case.masked and case.group == 1 and case.n_q == case.keys and case.head_dim == case.columns
    plain = plain and case.n_q % max(_PALLAS_TILES) == 0
    if direction == "backward" or not plain or case.dtype not in ("float16", "bfloat16") or case.head_dim % 64:
        return None
    q, k, v, _ = arrays
    scaled = q.astype("float32") * case.head_dim**-0.5
    q, k, v = (jax.dlpack.from_dlpack(x.swapaxes(1, 2).astype("float16", order="C")) for x in (scaled, k, v))

    def attend(keys: int) -> Callable[[], Any]:
        config = TuningConfig(block_q=64, block_kv=keys, max_concurrent_steps=2, causal=case.causal)
        compiled = jax.jit(partial(attention, config=config))  # otherwise each call is traced
        return partial(compiled, q, k, v)

    call = attend(_pallas_tile(case, attend))

    def result() -> tuple[np.ndarray]:
        return (np.asarray(call()[:1, :, :1]).swapaxes(1, 2).astype(arrays[0].dtype),)

    return Entry(call, result)


_PALLAS_TILES = 256, 128, 64
_pallas_best: dict[tuple[int, bool], int] = {}


def _pallas_tile(case: Case, attend: Callable[[int], Callable[[], Any]]) -> int:
    """Keys of the fastest tile, measured once for a head dim and mask. ValueError if no tile runs."""
    import cupy

    kind = case.head_dim, case.causal
    if kind not in _pallas_best:
        calls = {}
        for keys in _PALLAS_TILES:
            with contextlib.suppress(ValueError):  # too large for shared memory
                calls[keys] = attend(keys)
                calls[keys]()
        found = timing.interleaved(calls, rounds=3, synchronize=cupy.cuda.runtime.deviceSynchronize)
        _pallas_best[kind] = min(found, key=lambda keys: found[keys].median)
    return _pallas_best[kind]


MODIFIED = 4096
"""Tokens at which the cost of a score modification is measured."""


def yardsticks(
    case: Case, arrays: Sequence[Any], direction: Direction, baselines: Collection[str], threads: int
) -> dict[str, Yardstick]:
    """flashkit itself with other options, by name.

    dense: without the mask, for masked cases. alibi, and options that are numbers: with that score modification.
    deterministic: the backward pass with reproducible bits. tf32: float32 inputs with precision="tf32". numba_cuda: the
    Numba CUDA backend.
    """
    import cupy

    if case.masked:
        return {"dense": Yardstick(with_flashkit(dense(case), arrays, direction, 0).call, dense_flops(case, direction))}
    if case.n_q == 1:
        return {}
    wanted: dict[str, dict[str, Any]] = {}
    if case.dtype == "float32":
        wanted["tf32"] = {"precision": "tf32"}
    else:
        wanted["numba_cuda"] = {"backend": "numba_cuda"}
        if direction == "backward":
            wanted["deterministic"] = {"deterministic": True}
        if (case.n_q, case.head_dim) == (MODIFIED, 128):
            slopes = cupy.asarray(np.geomspace(0.5, 2**-8, case.heads), np.float32)
            modifying = {name: option.usual for name, option in OPTIONS.items() if not option.hides}
            wanted |= {name: {name: usual} for name, usual in modifying.items() if usual}
            wanted["alibi"] = {"alibi_slopes": slopes}
    by_name = {}
    for name, options in wanted.items():
        if options.get("backend", "cupy_raw") not in dispatch.registry():
            continue
        with contextlib.suppress(UnsupportedError):
            by_name[name] = Yardstick(with_flashkit(case, arrays, direction, threads, **options).call)
    return by_name


BASELINES: dict[str, Contender] = {name: partial(_with_torch, name) for name in BACKENDS} | {
    "fa3": _with_fa3, "flex": _with_flex, "pallas": _with_pallas,
}  # fmt: skip
REQUIRES = dict.fromkeys(BASELINES, ("torch",)) | {"fa3": ("torch", "flash_attn_interface"), "pallas": ("jax",)}

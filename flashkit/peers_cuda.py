"""The same attention by PyTorch on a CUDA device, for `flashkit bench --device cuda`: the kernels of FlashAttention-2,
of cuDNN and the memory-efficient ones of xFormers, each asked for by name.

A peer is what peers.py says, on CuPy arrays. PyTorch's tensors share their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .api import attention, attention_vjp
from .peers import Case, Entry, Peer, torch_entry
from .spec import Direction

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def arrays_of(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """q, k, v and dout, normally distributed, made on the device."""
    import cupy
    import ml_dtypes

    rng = cupy.random.default_rng(seed)
    kind = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    queries = case.batch, case.heads, case.n_q, case.head_dim
    keys = case.batch, case.heads // case.group, case.keys, case.head_dim
    return tuple(
        rng.standard_normal(shape, dtype=cupy.float32).astype(kind, copy=False)
        for shape in (queries, keys, keys, queries)
    )


def with_flashkit(case: Case, arrays: Sequence[Any], direction: Direction, threads: int) -> Entry:
    """The backward pass is timed alone: the pull-back of a forward pass made before."""
    q, k, v, dout = arrays
    if direction == "forward":
        forward = partial(attention, q, k, v, **case.options)
        return Entry(forward, lambda: (first(case, forward()),))
    _, vjp = attention_vjp(q, k, v, **case.options)
    return Entry(partial(vjp, dout), lambda: tuple(first(case, x) for x in vjp(dout)))


def first(case: Case, x: Any) -> np.ndarray:
    """What belongs to the first key/value head of the first batch entry, in NumPy: all is gigabytes."""
    return np.asarray(x[:1, : case.group if x.shape[1] == case.heads else 1].get())


def _with_torch(name: str, case: Case, arrays: Sequence[Any], direction: Direction, threads: int) -> Entry | None:
    """scaled_dot_product_attention with one of its backends; None where that cannot do the case."""
    import torch
    from torch.nn import attention as choices

    if case.masked or (case.causal and case.n_q != case.keys):
        return None  # its causal mask is aligned at the top left
    backend = getattr(choices.SDPBackend, BACKENDS[name])
    q, k, v, dout = (torch.from_dlpack(x) for x in arrays)
    if case.group > 1 and name == "efficient":  # which knows no grouped queries: as many keys as it would read
        return None

    def attend(q: Any, k: Any, v: Any) -> Any:
        with choices.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.group > 1
            )

    def array(x: Any) -> np.ndarray:
        import cupy

        return first(case, cupy.from_dlpack(x.detach().contiguous()))

    try:
        attend(q, k, v)
    except RuntimeError:  # no kernel of this backend
        return None
    return torch_entry(attend, (q, k, v), dout, array, direction)


PEERS: dict[str, Peer] = {name: partial(_with_torch, name) for name in BACKENDS}
REQUIRES = dict.fromkeys(PEERS, ("torch",))

"""The same attention by others, for `flashkit bench`: plain NumPy, PyTorch, JAX, ONNX Runtime.

A peer is a function of a case and its arrays that gives two callables, or None where it cannot do the case: one that is
timed, and one that brings its result into NumPy, so that what is compared is known to be the same. Libraries are
imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from .spec import Direction

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Case:
    """One attention problem; arrays are (batch, heads, tokens, head_dim)."""

    n_q: int
    head_dim: int = 64
    heads: int = 8
    dtype: str = "float32"
    causal: bool = False
    batch: int = 1
    n_k: int | None = None  # as n_q
    heads_kv: int | None = None  # as heads

    @property
    def keys(self) -> int:
        return self.n_q if self.n_k is None else self.n_k

    @property
    def group(self) -> int:
        return self.heads // (self.heads_kv or self.heads)

    def arrays(self, seed: int = 0) -> Arrays:
        """q, k, v and dout, normally distributed."""
        import ml_dtypes

        rng = np.random.default_rng(seed)
        kind = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        queries = self.batch, self.heads, self.n_q, self.head_dim
        keys = self.batch, self.heads // self.group, self.keys, self.head_dim
        return tuple(rng.standard_normal(shape, np.float32).astype(kind) for shape in (queries, keys, keys, queries))

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}:{self.heads // self.group}"
        batch = f"batch {self.batch}, " if self.batch > 1 else ""
        mask = ", causal" if self.causal else ""
        return f"{batch}heads {heads}, {self.n_q} x {self.keys}, head dim {self.head_dim}, {self.dtype}{mask}"


class Entry(NamedTuple):
    """`call` is timed; `result` computes the same once more as NumPy arrays: (out,) or (dq, dk, dv)."""

    call: Callable[[], object]
    result: Callable[[], Arrays]


Peer = Callable[[Case, Arrays, Direction, int], Entry | None]
"""(case, (q, k, v, dout), direction, threads) -> Entry, or None where the peer cannot do it."""


def with_flashkit(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry:
    """The backward pass is timed alone: the pull-back of a forward pass made before."""
    from .api import attention, attention_vjp

    q, k, v, dout = arrays
    if direction == "forward":
        forward = partial(attention, q, k, v, causal=case.causal)
        return Entry(forward, lambda: (forward(),))
    _, vjp = attention_vjp(q, k, v, causal=case.causal)
    return Entry(partial(vjp, dout), lambda: vjp(dout))


MOST_SCORES = 1 << 30
"""Bytes of one score matrix (all heads) beyond which plain NumPy is not asked: it keeps up to three of them."""


def with_numpy(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """matmul, softmax, matmul, in place where NumPy can; 16-bit inputs in float32, for NumPy has nothing narrower."""
    q, k, v, dout = arrays
    compute = np.float64 if case.dtype == "float64" else np.float32
    if case.batch * case.heads * case.n_q * case.keys * np.dtype(compute).itemsize > MOST_SCORES:
        return None
    scale, group = compute(case.head_dim**-0.5), case.group
    hidden = np.arange(case.keys) > np.arange(case.n_q)[:, None] + case.keys - case.n_q if case.causal else None

    def wide(x: np.ndarray) -> np.ndarray:
        return x.astype(compute, copy=False)

    def expand(x: np.ndarray) -> np.ndarray:
        return wide(x) if group == 1 else np.repeat(wide(x), group, axis=1)

    def weights() -> np.ndarray:
        s = (wide(q) * scale) @ expand(k).swapaxes(-1, -2)
        if hidden is not None:
            np.copyto(s, -np.inf, where=hidden)
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return s

    def forward() -> np.ndarray:
        return (weights() @ expand(v)).astype(q.dtype, copy=False)

    if direction == "forward":
        return Entry(forward, lambda: (forward(),))
    p = weights()  # kept from the forward pass

    def backward() -> Arrays:
        do = wide(dout)
        dp = do @ expand(v).swapaxes(-1, -2)
        dp -= np.sum(dp * p, axis=-1, keepdims=True)
        dp *= p
        dp *= scale
        dv, dk, dq = p.swapaxes(-1, -2) @ do, dp.swapaxes(-1, -2) @ wide(q), dp @ expand(k)
        if group > 1:
            dk, dv = (x.reshape(case.batch, -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
        return tuple(x.astype(q.dtype, copy=False) for x in (dq, dk, dv))

    return Entry(backward, backward)


def with_torch(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """scaled_dot_product_attention on tensors that share NumPy's memory."""
    import torch

    if case.causal and case.n_q != case.keys:
        return None  # its causal mask is aligned at the top left
    torch.set_num_threads(threads)
    half = case.dtype == "bfloat16"  # which torch and NumPy exchange as bits only

    def tensor(x: np.ndarray) -> Any:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(x)

    def array(x: Any) -> np.ndarray:
        return x.detach().view(torch.int16).numpy().view(arrays[0].dtype) if half else x.detach().numpy()

    q, k, v, dout = map(tensor, arrays)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=case.causal, enable_gqa=case.group > 1)
    if direction == "forward":

        def forward() -> Any:
            with torch.inference_mode():
                return attend(q, k, v)

        return Entry(forward, lambda: (array(attend(q, k, v)),))
    inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
    out = attend(*inputs)
    backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    return Entry(backward, lambda: tuple(map(array, backward())))


def with_jax(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """jax.nn.dot_product_attention, jitted. Its thread pool cannot be limited and disturbs others: only on request."""
    import jax

    if case.dtype == "float64" or (case.causal and case.n_q != case.keys):
        return None
    q, k, v, dout = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in arrays)  # (batch, tokens, heads, head_dim)
    attend = jax.jit(partial(jax.nn.dot_product_attention, is_causal=case.causal))

    def array(x: Any) -> np.ndarray:
        return np.asarray(x).swapaxes(1, 2)

    if direction == "forward":
        return Entry(lambda: attend(q, k, v).block_until_ready(), lambda: (array(attend(q, k, v)),))
    _, pull = jax.vjp(attend, q, k, v)
    backward = jax.jit(pull)
    return Entry(lambda: jax.block_until_ready(backward(dout)), lambda: tuple(map(array, backward(dout))))


def with_onnxruntime(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """com.microsoft.MultiHeadAttention, forward and float32 only; its inputs are (batch, tokens, heads * head_dim)."""
    onnx, runtime = import_module("onnx"), import_module("onnxruntime")
    if direction == "backward" or case.dtype != "float32" or case.group > 1 or (case.causal and case.n_q != case.keys):
        return None
    names, make = ("q", "k", "v"), onnx.helper
    node = make.make_node(
        "MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=case.heads,
        unidirectional=int(case.causal),
    )  # fmt: skip
    shape, kind = [None, None, case.heads * case.head_dim], onnx.TensorProto.FLOAT
    values = [make.make_tensor_value_info(name, kind, shape) for name in (*names, "out")]
    domains = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
    graph = make.make_graph([node], "attention", values[:3], values[3:])
    model = make.make_model(graph, opset_imports=domains, ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    flat = (np.ascontiguousarray(x.swapaxes(1, 2)).reshape(case.batch, x.shape[2], -1) for x in arrays)
    forward = partial(session.run, None, dict(zip(names, flat)))
    return Entry(forward, lambda: (forward()[0].reshape(case.batch, case.n_q, case.heads, -1).swapaxes(1, 2),))


PEERS: dict[str, Peer] = {"numpy": with_numpy, "torch": with_torch, "jax": with_jax, "onnxruntime": with_onnxruntime}
REQUIRES = {"torch": ("torch",), "jax": ("jax",), "onnxruntime": ("onnxruntime", "onnx")}


def missing(name: str) -> list[str]:
    """Packages that a peer needs and that are not installed."""
    return [package for package in REQUIRES.get(name, ()) if find_spec(package) is None]

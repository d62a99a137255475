"""The baselines of `flashkit bench` on a CPU: plain NumPy, PyTorch, JAX and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...spec import Direction
from .cases import Arrays, Case
from .contender import Contender, Entry, torch_entry

MAX_SCORES = 1 << 30
"""Bytes of one score matrix (all heads) beyond which baselines that store up to three of them are skipped."""


def _scores_bytes(case: Case) -> int:
    return case.batch * case.heads * case.n_q * case.keys * (8 if case.dtype == "float64" else 4)


def with_numpy(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """matmul, softmax, matmul, in place where NumPy can; in float32 for 16-bit types, which NumPy multiplies slowly."""
    q, k, v, dout = arrays
    compute = np.float64 if case.dtype == "float64" else np.float32
    if _scores_bytes(case) > MAX_SCORES:
        return None
    scale, group = compute(case.head_dim**-0.5), case.group
    visible = case.visible
    hidden = None if visible is None else ~visible

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
    p = weights()  # of the forward pass, which is not timed here

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

    if case.causal and case.n_q != case.keys and not case.masked:
        return None  # its causal mask is aligned at the top left
    torch.set_num_threads(threads)
    bfloat16 = case.dtype == "bfloat16"  # NumPy and PyTorch exchange it as 16-bit integers

    def tensor(x: np.ndarray) -> Any:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(x)

    def to_numpy(x: Any) -> np.ndarray:
        return x.detach().view(torch.int16).numpy().view(arrays[0].dtype) if bfloat16 else x.detach().numpy()

    q, k, v, dout = map(tensor, arrays)
    if case.masked:
        mask: dict[str, Any] = {"attn_mask": torch.from_numpy(case.visible)}
    else:
        mask = {"is_causal": case.causal}
    attend = partial(torch.nn.functional.scaled_dot_product_attention, **mask, enable_gqa=case.group > 1)
    return torch_entry(attend, (q, k, v), dout, to_numpy, direction)


def with_jax(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """jax.nn.dot_product_attention, jitted. It stores the scores, and its thread pool has no limit that can be set."""
    import jax

    if case.dtype == "float64" or case.masked or (case.causal and case.n_q != case.keys):
        return None
    if _scores_bytes(case) > MAX_SCORES:
        return None
    q, k, v, dout = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in arrays)  # (batch, tokens, heads, head_dim)
    attend = jax.jit(partial(jax.nn.dot_product_attention, is_causal=case.causal))

    def to_numpy(x: Any) -> np.ndarray:
        return np.asarray(x).swapaxes(1, 2)

    if direction == "forward":
        return Entry(lambda: attend(q, k, v).block_until_ready(), lambda: (to_numpy(attend(q, k, v)),))
    _, pullback = jax.vjp(attend, q, k, v)
    backward = jax.jit(pullback)
    return Entry(lambda: jax.block_until_ready(backward(dout)), lambda: tuple(map(to_numpy, backward(dout))))


def with_onnxruntime(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """com.microsoft.MultiHeadAttention, forward and float32 only; its inputs are (batch, tokens, heads * head_dim)."""
    onnx, runtime = import_module("onnx"), import_module("onnxruntime")
    if direction == "backward" or case.dtype != "float32" or case.group > 1 or case.masked or case.head_dim_v:
        return None
    if case.causal and (case.n_q != case.keys or _scores_bytes(case) > MAX_SCORES):
        return None  # with a mask it stores the scores
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
    # Spinning idle threads would take cores from the next contender.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    flat = (np.ascontiguousarray(x.swapaxes(1, 2)).reshape(case.batch, x.shape[2], -1) for x in arrays)
    forward = partial(session.run, None, dict(zip(names, flat)))
    return Entry(forward, lambda: (forward()[0].reshape(case.batch, case.n_q, case.heads, -1).swapaxes(1, 2),))


BASELINES: dict[str, Contender] = {
    "numpy": with_numpy, "torch": with_torch, "jax": with_jax, "onnxruntime": with_onnxruntime,
}  # fmt: skip
REQUIRES = {"torch": ("torch",), "jax": ("jax",), "onnxruntime": ("onnxruntime", "onnx")}
"""Packages that a baseline needs."""


def missing(name: str, requires: Mapping[str, tuple[str, ...]] = REQUIRES) -> list[str]:
    """Packages that a baseline needs and that are not installed."""
    return [package for package in requires.get(name, ()) if find_spec(package) is None]

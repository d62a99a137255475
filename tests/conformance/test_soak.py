"""Many random calls on a device, of every size and mix of sizes, each held against the formula, with its gradients.

A barrier protocol may be right a thousand times and hang the next time. FLASHKIT_SOAK says how many calls there are;
with FLASHKIT_CUDA_WATCHDOG=1 a kernel that waits too long fails instead of hanging.
"""

from __future__ import annotations

import os
from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import dispatch
from flashkit.backends.cuda_common import backend as cuda_backend

pytestmark = pytest.mark.gpu

CALLS = int(os.environ.get("FLASHKIT_SOAK") or 300)
NAME = "cupy_raw"

KINDS: list[dict[str, Any]] = [
    {"d": 64}, {"d": 64, "causal": True}, {"d": 64, "causal": True, "group": 4}, {"d": 64, "lengths": True},
    {"d": 128}, {"d": 128, "causal": True}, {"d": 128, "causal": True, "window": 70}, {"d": 128, "cap": 20.0},
    {"d": 128, "causal": True, "dtype": "float16"}, {"d": 128, "dv": 64, "causal": True, "lengths": True},
    {"d": 128, "slopes": True, "causal": True}, {"d": 256}, {"d": 256, "causal": True, "group": 2},
    {"d": 96, "group": 8}, {"d": 128, "blocks": True}, {"d": 64, "bias": True},
    {"d": 64, "sinks": True, "causal": True}, {"d": 128, "causal": True, "ordered": True},
    {"d": 64, "dtype": "float32", "causal": True}, {"d": 128, "dtype": "float32"},
]  # fmt: skip
"""What kernels are compiled for."""

LARGEST_ERROR = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Of the sum of the magnitudes that a result is the sum of."""

LARGEST_LSE_ERROR = {"cap": 2.0**-8 + 20 * 2.0**-11}
"""By kind, 2e-3 for others: soft-capped weights are summed as rounded to bfloat16, and the device's tanh has 2^-11."""

BLOCK = 64
"""Of a block mask."""


def random_call(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """q, k, v and dout, the options of a call, and its kind."""
    import cupy

    def random(*shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape, dtype=np.float32))

    kind = KINDS[rng.integers(len(KINDS))]
    n_q, n_k = (int(2 ** rng.uniform(0, 10.5)) for _ in range(2))
    batch, heads, group = int(rng.integers(1, 4)), int(2 ** rng.uniform(0, 5)), kind.get("group", 1)
    d, dtype = kind["d"], cases.numpy_dtype(kind.get("dtype", "bfloat16"))
    while batch * heads * group * n_q * n_k > 4e6:
        batch, heads = max(1, batch // 2), heads // 2 or 1
        n_q, n_k = (n_q // 2 or 1, n_k // 2 or 1) if batch == heads == 1 else (n_q, n_k)
    n_q = max(n_q, 64 // group + 1)  # fewer rows are for other kernels
    if "blocks" in kind:
        n_k = max(n_k, BLOCK + 1)  # an axis of one block is another kernel
    dv = kind.get("dv", d)
    q, dout = (random(batch, heads * group, n_q, columns) for columns in (d, dv))
    k, v = (random(batch, heads, n_k, columns) for columns in (d, dv))
    q *= float(rng.choice([1, 1, 1, 4, 20]))  # sometimes scores that outgrow what a first look promises
    options: dict[str, Any] = {"causal": bool(kind.get("causal")), "deterministic": bool(kind.get("ordered"))}
    if "window" in kind:
        options["window"] = (kind["window"], 0)
    if "cap" in kind:
        options["softcap"] = kind["cap"]
    if "lengths" in kind:
        options["kv_lengths"] = cupy.asarray(rng.integers(0, n_k + 1, batch))
        options["q_offset"] = options["kv_lengths"] - n_q
    if "slopes" in kind:
        options["alibi_slopes"] = cupy.asarray(rng.uniform(0, 0.3, heads * group).astype(np.float32))
    if "bias" in kind:
        options["bias"] = random(heads * group, n_q, n_k)
    if "sinks" in kind:
        options["sinks"] = random(heads * group)
    if "blocks" in kind:
        grid = rng.random((-(-n_q // BLOCK), -(-n_k // BLOCK))) < rng.uniform(0, 1)
        options["block_mask"] = flashkit.BlockMask.from_dense(grid, BLOCK, BLOCK, n_q, n_k)
    return tuple(x.astype(dtype) for x in (q, k, v, dout)), options, kind


def formula(q: Any, k: Any, v: Any, dout: Any, options: dict[str, Any]) -> tuple[Any, list[tuple[Any, Any]]]:
    """Log-sum-exp, then output, dq, dk and dv, each with the sum of its summands' magnitudes: in float32, with the
    whole matrix of scores in memory."""
    import cupy

    batch, heads, n_q, d = q.shape
    heads_kv, n_k = k.shape[1:3]
    q, k, v, dout = (x.astype(cupy.float32) for x in (q, k, v, dout))
    k, v = (cupy.repeat(x, heads // heads_kv, axis=1) for x in (k, v))
    scale = d**-0.5
    s = (q * scale) @ k.swapaxes(2, 3)
    slope = cupy.float32(1)
    if cap := options.get("softcap"):
        t = cupy.tanh(s / cap)
        s, slope = cap * t, 1 - t * t
    lengths = options.get("kv_lengths", cupy.full(batch, n_k))[:, None, None, None]
    row, key = cupy.arange(n_q)[:, None], cupy.arange(n_k)
    position = row + lengths - n_q
    if (slopes := options.get("alibi_slopes")) is not None:
        s = s - slopes[:, None, None] * abs(position - key)
    s = s + options.get("bias", 0)
    hidden = key >= lengths
    if options["causal"]:
        hidden = hidden | (key > position)
    if "window" in options:
        hidden = hidden | (key < position - options["window"][0])
    if "block_mask" in options:
        hidden = hidden | ~cupy.asarray(options["block_mask"].to_dense_mask()).reshape(n_q, n_k)
    s = cupy.where(hidden, -np.inf, s)
    sink = options.get("sinks", cupy.full(heads, -np.inf, np.float32))[:, None, None]
    top = cupy.maximum(s.max(-1, keepdims=True), sink)
    top_or_0 = cupy.where(cupy.isinf(top), 0, top)
    p = cupy.exp(s - top_or_0)
    total = p.sum(-1, keepdims=True) + cupy.exp(sink - top_or_0)
    lse = (top + cupy.log(total))[..., 0]
    p /= cupy.where(total == 0, 1, total)

    def of_keys(x: Any) -> Any:
        return x.reshape(batch, heads_kv, heads // heads_kv, *x.shape[2:]).sum(2)

    out = p @ v
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (out * dout).sum(-1, keepdims=True)) * slope * scale
    # What ds is a difference of, whose rounding stays when they cancel.
    parts = p * (abs(dp) + (abs(out) * abs(dout)).sum(-1, keepdims=True)) * scale
    turned, parts_turned, p_turned = ds.swapaxes(2, 3), parts.swapaxes(2, 3), p.swapaxes(2, 3)
    return lse, [
        (out, p @ abs(v)),
        (ds @ k, parts @ abs(k)),
        (of_keys(turned @ q), of_keys(parts_turned @ abs(q))),
        (of_keys(p_turned @ dout), of_keys(p_turned @ abs(dout))),
    ]


def test_random_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.skip_unless(NAME)
    import cupy

    generations = dispatch.registry()[NAME].allowed()  # type: ignore[attr-defined]
    monkeypatch.setenv(cuda_backend.VARIABLE, generations[0].name)
    dispatch.forget()
    seed = int(os.environ.get("FLASHKIT_SOAK_SEED") or 0)
    if seed % 2:
        cases.arbitrary_dq_order(monkeypatch)
    rng, done, wrong = np.random.default_rng(seed), 0, []
    while done < CALLS:
        (q, k, v, dout), options, kind = random_call(rng)
        out = cupy.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
        try:
            got, lse = flashkit.attention(q, k, v, **options, out=out, return_lse=True, backend=NAME)
            gradients = flashkit.attention_vjp(q, k, v, **options, backend=NAME)[1](dout)
        except flashkit.UnsupportedError:
            continue
        done += 1
        right_lse, right = formula(q, k, v, dout, options)
        allowed = LARGEST_ERROR[str(q.dtype)]
        errors = [
            float(abs(x.astype(cupy.float32) - y).max()) / (float(size.max()) or 1.0)
            for x, (y, size) in zip((got, *gradients), right, strict=True)
        ]
        same = cupy.isneginf(lse) == cupy.isneginf(right_lse)
        largest = max(LARGEST_LSE_ERROR.get(name, 2e-3) for name in kind)
        near_lse = cupy.where(cupy.isneginf(right_lse), 0, abs(lse - right_lse)).max() < largest
        if not (max(errors) < allowed and same.all() and near_lse):  # NaN is not less
            wrong.append((kind, q.shape, k.shape, options, errors))
    dispatch.forget()
    assert not wrong, (len(wrong), wrong[:5])

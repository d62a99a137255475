"""Many random calls on a device, of every size and mix of sizes, each held against the formula.

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
    {"d": 96, "group": 8},
]  # fmt: skip
"""What kernels are compiled for."""


def random_call(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """q, k and v, the options of a call, and its kind."""
    import cupy

    kind = KINDS[rng.integers(len(KINDS))]
    n_q, n_k = (int(2 ** rng.uniform(0, 10.5)) for _ in range(2))
    batch, heads, group = int(rng.integers(1, 4)), int(2 ** rng.uniform(0, 5)), kind.get("group", 1)
    d, dtype = kind["d"], cases.numpy_dtype(kind.get("dtype", "bfloat16"))
    while batch * heads * group * n_q * n_k > 4e6:
        batch, heads = max(1, batch // 2), heads // 2 or 1
        n_q, n_k = (n_q // 2 or 1, n_k // 2 or 1) if batch == heads == 1 else (n_q, n_k)
    n_q = max(n_q, 64 // group + 1)  # fewer rows are for other kernels
    shapes = (batch, heads * group, n_q, d), (batch, heads, n_k, d), (batch, heads, n_k, kind.get("dv", d))
    # Sometimes scores that outgrow what a first look promises.
    factor = float(rng.choice([1, 1, 1, 4, 20]))
    q, k, v = (cupy.asarray(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes)
    q *= factor
    options: dict[str, Any] = {"causal": bool(kind.get("causal"))}
    if "window" in kind:
        options["window"] = (kind["window"], 0)
    if "cap" in kind:
        options["softcap"] = kind["cap"]
    if "lengths" in kind:
        options["kv_lengths"] = cupy.asarray(rng.integers(0, n_k + 1, batch))
    if "slopes" in kind:
        options["alibi_slopes"] = cupy.asarray(rng.uniform(0, 0.3, heads * group).astype(np.float32))
    return tuple(x.astype(dtype) for x in (q, k, v)), options, kind


def formula(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Output and log-sum-exp in float32, with the whole matrix of scores in memory."""
    import cupy

    batch, heads, n_q, d = q.shape
    n_k, group = k.shape[2], heads // k.shape[1]
    q, k, v = (x.astype(cupy.float32) for x in (q, k, v))
    k, v = (cupy.repeat(x, group, axis=1) for x in (k, v))
    s = (q * d**-0.5) @ k.swapaxes(2, 3)
    if cap := options.get("softcap"):
        s = cap * cupy.tanh(s / cap)
    lengths = options.get("kv_lengths", cupy.full(batch, n_k))[:, None, None, None]
    row, key = cupy.arange(n_q)[:, None], cupy.arange(n_k)
    position = row + lengths - n_q
    if (slopes := options.get("alibi_slopes")) is not None:
        s = s - slopes[:, None, None] * abs(position - key)
    hidden = key >= lengths
    if options["causal"]:
        hidden = hidden | (key > position)
    if "window" in options:
        hidden = hidden | (key < position - options["window"][0])
    s = cupy.where(hidden, -np.inf, s)
    top = s.max(-1, keepdims=True)
    p = cupy.exp(s - cupy.where(cupy.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    out = p @ v / cupy.where(total == 0, 1, total)
    return out, (top + cupy.log(total))[..., 0]


def test_random_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.skip_unless(NAME)
    import cupy

    generations = dispatch.registry()[NAME].allowed()  # type: ignore[attr-defined]
    monkeypatch.setenv(cuda_backend.VARIABLE, generations[0].name)
    dispatch.forget()
    rng, done, wrong = np.random.default_rng(int(os.environ.get("FLASHKIT_SOAK_SEED") or 0)), 0, []
    while done < CALLS:
        (q, k, v), options, kind = random_call(rng)
        out = cupy.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
        try:
            got, lse = flashkit.attention(q, k, v, **options, out=out, return_lse=True, backend=NAME)
        except flashkit.UnsupportedError:
            continue
        done += 1
        right, right_lse = formula(q, k, v, options)
        # Both are rounded, and products of large scores to few digits.
        size = float(abs(v.astype(cupy.float32)).max())
        near = abs(got.astype(cupy.float32) - right).max() < (2e-2 if q.dtype != np.float16 else 4e-3) * size
        same = cupy.isneginf(lse) == cupy.isneginf(right_lse)
        near_lse = cupy.where(cupy.isneginf(right_lse), 0, abs(lse - right_lse)).max() < 2e-3
        if not (near and same.all() and near_lse):
            wrong.append((kind, q.shape, k.shape, options))
    dispatch.forget()
    assert not wrong, (len(wrong), wrong[:5])

"""Many random calls on a device, of every size and mix of sizes, each held against the formula, with its gradients.

A barrier protocol may be right a thousand times and hang the next time. FLASHKIT_SOAK says how many calls there are;
with FLASHKIT_CUDA_WATCHDOG=1 a kernel that waits too long fails instead of hanging.
"""

from __future__ import annotations

import os
from functools import partial
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
    {"d": 64, "packed": True}, {"d": 64, "packed": True, "causal": True},
    {"d": 128, "packed": True, "causal": True, "group": 4}, {"d": 128, "packed": True, "causal": True, "ordered": True},
    {"d": 128, "packed": True, "causal": True, "window": 70},
    {"d": 64, "page": 128}, {"d": 128, "page": 16, "causal": True, "group": 4},
    {"d": 64, "scales": "head"}, {"d": 128, "scales": "token", "causal": True},
    {"d": 128, "scales": "head", "lengths": True}, {"d": 256, "scales": "block", "causal": True, "group": 2},
]  # fmt: skip
"""What kernels are compiled for."""

LARGEST_ERROR = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 2e-2, "e4m3": 6e-2}
"""Of the sum of the magnitudes that a result is the sum of. Weights of e4m3 have 4 bits."""

LARGEST_LSE_ERROR = {"cap": 2.0**-8 + 20 * 2.0**-11}
"""By kind, 2e-3 for others: soft-capped weights are summed as rounded to bfloat16, and the device's tanh has 2^-11."""

E4M3_SUM_ERROR = 2.0**-11
"""Of the sum of magnitudes that a score is the sum of: the tensor core adds e4m3 products in 14 bits, and truncates."""

BLOCK = 64
"""Of a block mask."""


def normal(rng: np.random.Generator, *shape: int) -> Any:
    import cupy

    return cupy.asarray(rng.standard_normal(shape, dtype=np.float32))


def size_of_scores(rng: np.random.Generator) -> float:
    """Sometimes scores that outgrow what a first look promises."""
    return float(rng.choice([1, 1, 1, 4, 20]))


def plain_options(kind: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": bool(kind.get("causal")), "deterministic": bool(kind.get("ordered"))}
    if "window" in kind:
        options["window"] = (kind["window"], 0)
    return options


def packed_call(
    rng: np.random.Generator, kind: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Few or many sequences, short, long or both, some of them empty, and rows behind the last one."""
    import cupy

    d, dtype, group = kind["d"], cases.numpy_dtype("bfloat16"), kind.get("group", 1)
    sequences, typical = int(2 ** rng.uniform(0, 8.5)), 2 ** rng.uniform(0, 9, 2)
    long = rng.random(sequences) < rng.choice([0, 0.1, 0.5])
    sizes = [
        (rng.exponential(typical[side], sequences) + 300 * long * rng.random(sequences)).astype(int) for side in (0, 1)
    ]
    if rng.random() < 0.5:
        sizes[1] = sizes[0]
    offsets = [np.concatenate([[0], np.minimum(np.cumsum(n), 3000)]) for n in sizes]
    total, total_k = (int(o[-1] + rng.choice([0, 0, 70])) or 1 for o in offsets)
    heads = max(1, min(4, int(5e7 / (total * total_k * group))))
    q, dout = (normal(rng, total, heads * group, d) for _ in "qo")
    k, v = (normal(rng, total_k, heads, d) for _ in "kv")
    q *= size_of_scores(rng)
    options = plain_options(kind) | {"cu_seqlens": tuple(cupy.asarray(o, np.int32) for o in offsets)}
    return tuple(x.astype(dtype) for x in (q, k, v, dout)), options, kind


def in_pages(rng: np.random.Generator, page: int, lengths: Any, *arrays: Any) -> tuple[Any, list[Any]]:
    """A page table, and K and V in pages that lie in any order. What is in none is NaN."""
    import cupy

    batch, heads, n_k = arrays[0].shape[:3]
    pages = -(-n_k // page)
    table = rng.permutation(2 * batch * pages)[: batch * pages].reshape(batch, pages)
    pools = []
    for x in arrays:
        pool = cupy.full((2 * batch * pages, page, heads, x.shape[3]), np.nan, x.dtype)
        padded = cupy.full((batch, pages * page, heads, x.shape[3]), np.nan, x.dtype)
        padded[:, :n_k] = x.swapaxes(1, 2)
        for b in range(batch):
            padded[b, int(lengths[b]) :] = np.nan
        pool[cupy.asarray(table)] = padded.reshape(batch, pages, page, heads, -1)
        pools.append(pool)
    return cupy.asarray(table.astype(np.int32)), pools


def random_call(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """q, k, v and dout, the options of a call, and its kind."""
    import cupy

    random = partial(normal, rng)
    kind = KINDS[rng.integers(len(KINDS))]
    n_q, n_k = (int(2 ** rng.uniform(0, 10.5)) for _ in range(2))
    batch, heads, group = int(rng.integers(1, 4)), int(2 ** rng.uniform(0, 5)), kind.get("group", 1)
    d, dtype = kind["d"], cases.numpy_dtype(kind.get("dtype", "bfloat16"))
    if "packed" in kind:
        return packed_call(rng, kind)
    while batch * heads * group * n_q * n_k > 4e6:
        batch, heads = max(1, batch // 2), heads // 2 or 1
        n_q, n_k = (n_q // 2 or 1, n_k // 2 or 1) if batch == heads == 1 else (n_q, n_k)
    n_q = max(n_q, 64 // group + 1)  # fewer rows are for other kernels
    if "blocks" in kind:
        n_k = max(n_k, BLOCK + 1)  # an axis of one block is another kernel
    dv = kind.get("dv", d)
    q, dout = (random(batch, heads * group, n_q, columns) for columns in (d, dv))
    k, v = (random(batch, heads, n_k, columns) for columns in (d, dv))
    q *= size_of_scores(rng)
    options = plain_options(kind)
    if "cap" in kind:
        options["softcap"] = kind["cap"]
    if "lengths" in kind or "page" in kind:
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

    packed = "cu_seqlens" in options
    q, k, v, dout = (x.astype(cupy.float32) for x in (q, k, v, dout))
    if packed:
        q, k, v, dout = (x.swapaxes(0, 1)[None] for x in (q, k, v, dout))
    batch, heads, n_q, d = q.shape
    heads_kv, n_k = k.shape[1:3]
    k, v = (cupy.repeat(x, heads // heads_kv, axis=1) for x in (k, v))
    scale = d**-0.5
    s = (q * scale) @ k.swapaxes(2, 3)
    slope = cupy.float32(1)
    if cap := options.get("softcap"):
        t = cupy.tanh(s / cap)
        s, slope = cap * t, 1 - t * t
    lengths = options.get("kv_lengths", cupy.full(batch, n_k))[:, None, None, None]
    row, key = cupy.arange(n_q)[:, None], cupy.arange(n_k)
    position, hidden = row + lengths - n_q, key >= lengths
    if packed:
        (begin, begin_k), end = options["cu_seqlens"], len(options["cu_seqlens"][0]) - 1
        number, number_k = (
            cupy.searchsorted(o, x.ravel(), side="right") - 1 for o, x in ((begin, row), (begin_k, key))
        )
        more_keys = cupy.append(cupy.diff(begin_k) - cupy.diff(begin), 0)
        hidden = (number[:, None] != number_k) | (number == end)[:, None]
        position, key = (row.ravel() - begin[number] + more_keys[number])[:, None], key - begin_k[number_k]
    if (slopes := options.get("alibi_slopes")) is not None:
        s = s - slopes[:, None, None] * abs(position - key)
    s = s + options.get("bias", 0)
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
    results = [
        (out, p @ abs(v)),
        (ds @ k, parts @ abs(k)),
        (of_keys(turned @ q), of_keys(parts_turned @ abs(q))),
        (of_keys(p_turned @ dout), of_keys(p_turned @ abs(dout))),
    ]
    if packed:
        return lse[0], [(x[0].swapaxes(0, 1), size) for x, size in results]
    return lse, results


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
    ran: dict[str, int] = {}
    while done < CALLS:
        (q, k, v, dout), options, kind = random_call(rng)
        out = cupy.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
        given, of_forward = (q, k, v), dict(options)
        if "scales" in kind:
            given = tuple(flashkit.quantize(x, "e4m3", kind["scales"]) for x in given)
            q, k, v = (x.dequantize("float32") for x in given)
        if "page" in kind:
            of_forward["page_table"], pools = in_pages(rng, kind["page"], options["kv_lengths"], k, v)
            given = q, *pools
        try:
            got, lse = flashkit.attention(*given, **of_forward, out=out, return_lse=True, backend=NAME)
            gradients = []
            if given[1] is k:
                gradients = flashkit.attention_vjp(q, k, v, **options, backend=NAME)[1](dout)
        except flashkit.UnsupportedError:
            continue
        done += 1
        ran[str(kind)] = ran.get(str(kind), 0) + 1
        right_lse, right = formula(q, k, v, dout, options)
        allowed = LARGEST_ERROR["e4m3" if "scales" in kind else str(q.dtype)]
        errors = [
            float(abs(x.astype(cupy.float32) - y).max()) / (float(size.max()) or 1.0)
            for x, (y, size) in zip((got, *gradients), right if gradients else right[:1], strict=True)
        ]
        same = cupy.isneginf(lse) == cupy.isneginf(right_lse)
        largest = max(LARGEST_LSE_ERROR.get(name, 2e-3) for name in kind)
        if "scales" in kind:
            keys = cupy.repeat(abs(k), q.shape[1] // k.shape[1], axis=1)
            largest += E4M3_SUM_ERROR * float((abs(q) @ keys.swapaxes(2, 3)).max()) * q.shape[3] ** -0.5
        lse_error = float(cupy.where(cupy.isneginf(right_lse), 0, abs(lse - right_lse)).max())
        if not (max(errors) < allowed and same.all() and lse_error < largest):  # NaN is not less
            wrong.append((kind, q.shape, k.shape, options, errors, lse_error, largest))
    dispatch.forget()
    assert not wrong, (len(wrong), wrong[:5])
    assert 10 * len(KINDS) > CALLS or len(ran) == len(KINDS), ran

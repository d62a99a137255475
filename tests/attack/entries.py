"""Calls of the other public functions, made from a call of attention: what is wrong with them, in words."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import cases
import numpy as np

import flashkit
from flashkit.call.arguments import prepare

from . import caches, codes, derivatives
from .caches import Found


def merge(call: cases.Call, r: Random) -> Found:
    """Attention over parts of the keys, merged."""
    tokens = call.k.ndim - (3 if call.options.get("layout") == "bnhd" and call.k.ndim > 2 else 2)
    n_k = call.k.shape[tokens]
    ends = [0, *sorted(r.randint(0, n_k) for _ in range(r.choice([0, 1, 1, 2, 4]))), n_k]
    lengths = call.options.get("kv_lengths", n_k)
    offset = call.options.get("q_offset", lengths - call.plain["q"].shape[2])
    parts = []
    for first, end in pairwise(ends):
        options = {name: x for name, x in call.options.items() if name not in ("out", "sinks" if parts else "out")}
        options["q_offset"] = offset - first
        if "kv_lengths" in options:
            options["kv_lengths"] = np.clip(lengths - first, 0, end - first)
        for name in ("bias", "mask"):
            if name in options and options[name].ndim and options[name].shape[-1] == n_k > 1:
                options[name] = options[name][..., first:end]
        k, v = (x[(*[slice(None)] * tokens, slice(first, end))] for x in (call.k, call.v))
        parts.append(flashkit.attention(call.q, k, v, return_lse=True, **options))
    out, lse = flashkit.merge(*parts, layout=call.options.get("layout", "bhnd"))
    return Found([("out", call.to_plain(out).copy()), ("lse", call.rows_to_plain(lse).copy())], [])


def weights(call: cases.Call, r: Random) -> Found:
    """The probabilities of some rows and heads times the values are rows of out."""
    options = {name: x for name, x in call.options.items() if name != "out"}
    batch, heads, n_q = call.plain_dout.shape[:3]
    row = sorted(r.sample(range(n_q), min(n_q, r.randint(1, 5))))
    head = r.randrange(heads)
    if call.choice["sequences"] != "batch":
        return Found([], [])
    found = flashkit.weights(call.q, call.k, rows=row, heads=head, **options)
    problem, operands, _ = prepare(**call.plain)
    exact = cases.computed(problem.spec, operands, None, None, np.float64).out[:, head, row]
    single = replace(problem.spec, dtype=found.dtype.name)
    sums = cases.magnitudes(single, operands, call.plain_dout, call.plain_dlse).out[:, head, row]
    v = call.plain["v"][:, head // problem.spec.group].astype(np.float64)
    n_k = v.shape[1]
    if "kv_lengths" in call.plain:
        v = np.where(np.arange(n_k)[:, None] < np.asarray(call.plain["kv_lengths"])[:, None, None], v, 0)
    got = found.reshape((batch, len(row), n_k)).astype(np.float64) @ v
    off = np.abs(got - exact).max(initial=0)
    allowed = 4 * cases.epsilon(found.dtype.name) * sums.max(initial=0)
    return Found([], [] if off <= allowed else [f"weights @ v is {off:.3g} off, of {allowed:.3g} allowed"])


def rotary(call: cases.Call, r: Random) -> Found:
    """Pairs of an array of any strides, turned by tables of any, against the formula."""
    x, layout, d = call.q, call.options.get("layout", "bhnd"), call.q.shape[-1]
    plain = call.plain["q"].astype(np.float64)
    batch, _, n, _ = plain.shape
    if d < 2:
        return Found([], [])
    half, longest = r.randint(1, d // 2), n + r.randint(1, 5)
    interleaved, sign = r.random() < 0.5, r.choice([1, -1])
    tables = flashkit.rotary_table(longest, 2 * half, dtype=r.choice(["float32", "float64"]))
    tables = [cases.stored(np, table, f"strides {r.randrange(1000)}") for table in tables]
    draw = np.random.default_rng(r.randrange(10**6))
    kind = r.choice(["default", "tokens", "entries"])
    positions = np.broadcast_to(np.arange(n), (batch, n))
    given: dict[str, Any] = {}
    if kind == "tokens":
        given["positions"] = draw.integers(0, longest, n)
        positions = np.broadcast_to(given["positions"], (batch, n))
    elif kind == "entries":
        positions = draw.integers(0, longest, (batch, n))
        given["positions"] = positions.reshape((*x.shape[:-3], n))
    if r.random() < 0.5:
        given["out"] = cases.stored(np, np.full(x.shape, np.nan, x.dtype), f"strides {r.randrange(1000)}")
    turned = flashkit.rotary if sign > 0 else flashkit.rotary_vjp
    got = call.to_plain(turned(x, *tables, interleaved=interleaved, layout=layout, **given)).astype(np.float64)
    cos, sin = (table[positions][:, None].astype(np.float64) for table in tables)
    pairs = [np.s_[..., : 2 * half : 2], np.s_[..., 1 : 2 * half : 2]] if interleaved else [
        np.s_[..., :half], np.s_[..., half : 2 * half]]  # fmt: skip
    a, b = (plain[pair] for pair in pairs)
    exact, size = plain.copy(), np.abs(plain)
    exact[pairs[0]], exact[pairs[1]] = a * cos - sign * b * sin, sign * a * sin + b * cos
    size[pairs[0]] = size[pairs[1]] = np.abs(a) + np.abs(b)
    unit = cases.epsilon(call.choice["dtype"])
    with np.errstate(invalid="ignore"):
        off = np.abs(got - exact) / np.maximum(size, np.finfo(np.float32).tiny)
    return Found([], [] if (off <= 2 * unit).all() else [f"rotary is {off.max() / unit:.3g} units off"])


def pages(call: cases.Call, r: Random) -> Found:
    """Attention over pools whose arrays lie in memory in ways of their own; pages often follow each other."""
    draw, page, latent = np.random.default_rng(r.randrange(10**6)), int(call.choice["page"]), r.random() < 0.4
    (heads, d), (heads_kv, dv) = call.plain["q"].shape[1::2], call.plain["v"].shape[1::2]
    batch, width, n_q = r.randint(1, 3), r.randint(1, max(1, 200 // page)), r.choice([1, 1, 2, 7, 8, 20])
    lengths = draw.integers(0, width * page + 1, batch)
    table = np.arange(width) + draw.integers(0, 3, (batch, 1))
    if r.random() < 0.5:
        table = draw.permuted(table, axis=1)
    q = draw.standard_normal((batch, heads, n_q, d), dtype=np.float32)
    options: dict[str, Any] = {"q_offset": lengths - n_q, "causal": r.random() < 0.5, "scale": r.choice([0.3, 1.0])}
    if r.random() < 0.3:
        options["sinks"] = draw.standard_normal(heads, dtype=np.float32)
    if r.random() < 0.3:
        options["alibi_slopes"] = draw.random(heads, dtype=np.float32)

    def laid(x: np.ndarray) -> np.ndarray:
        if r.random() < 0.6:  # the pages of a head follow each other
            return x.transpose(2, 0, 1, 3).copy().transpose(1, 2, 0, 3)
        stored: np.ndarray = cases.stored(np, x, r.choice(["packed", "gaps", "reversed", "swapped"]), -2, -3)
        return stored

    given = {**options, "page_table": table, "kv_lengths": lengths, "return_lse": True}
    if latent and d > 1:
        heads_kv, dv = 1, r.randint(1, d - 1)
        pool = draw.standard_normal((width + 2, page, 1, d), dtype=np.float32)
        parts = [laid(part)[:, :, 0] for part in (pool[..., :dv], pool[..., dv:])]
        pools = pool, pool[..., :dv]
        out, lse = flashkit.mla(q[..., :dv], q[..., dv:], *parts, **given)
    else:
        codes = [draw.integers(-127, 128, (width + 2, page, heads_kv, x)).astype(np.int8) for x in (d, dv)]
        scales = [draw.random((*x.shape[:-1], 1), dtype=np.float32) / 64 for x in codes]
        pools = tuple(x * scale for x, scale in zip(codes, scales))
        quantised = [
            flashkit.Quantized(laid(x), laid(scale), per="token", layout="bnhd") for x, scale in zip(codes, scales)
        ]
        out, lse = flashkit.attention(q, *quantised, **given)
    wrong: list[str] = []
    for b, n in enumerate(lengths):
        k, v = (x[table[b]].reshape(1, width * page, heads_kv, -1)[:, :n].swapaxes(1, 2) for x in pools)
        one = options | {"q": q[b : b + 1], "k": k, "v": v, "q_offset": int(n) - n_q}
        wrong += caches.off_definition(one, out[b : b + 1], lse[b : b + 1], "pages")
    return Found([], wrong)


ENTRIES = {
    "merge": merge, "weights": weights, "rotary": rotary, "cache": caches.trace, "pages": pages,
    "codes": codes.attention, "derivatives": derivatives.both,
}  # fmt: skip
"""By name, as a choice has it."""

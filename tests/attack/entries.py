"""Calls of the other public functions, made from a call of attention: what is wrong with them, in words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import cases
import numpy as np

import flashkit
from flashkit.call.arguments import prepare

LEEWAY = 8.0
"""A cache's results in units of the tolerance of one call: its error is measured on few rows."""


class Found(NamedTuple):
    """What a function gave: results of attention, to be held against the definition, and what is wrong already."""

    results: list[tuple[str, np.ndarray]]
    wrong: list[str]


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
    exact = cases.computed(problem.spec, operands, call.plain_dout, call.plain_dlse, np.float64).out[:, head, row]
    v = call.plain["v"][:, head // problem.spec.group].astype(np.float64)
    n_k = v.shape[1]
    if "kv_lengths" in call.plain:
        v = np.where(np.arange(n_k)[:, None] < np.asarray(call.plain["kv_lengths"])[:, None, None], v, 0)
    got = found.reshape((batch, len(row), n_k)).astype(np.float64) @ v
    off = np.abs(got - exact).max(initial=0)
    allowed = 4 * cases.epsilon(found.dtype.name) * np.abs(v).sum(axis=1).max(initial=0)
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


def cache(call: cases.Call, r: Random) -> Found:
    """A trace of appends, forks, trims and frees, with attention after each append, against lists of tokens."""
    plain, page = call.plain, int(call.choice["page"])
    dtype, (heads, d), (heads_kv, dv) = plain["q"].dtype, plain["q"].shape[1::2], plain["v"].shape[1::2]
    sequences = r.randint(1, 4)
    window = r.choice([None, None, r.randint(0, 20)])
    made = flashkit.KVCache(
        sequences, heads_kv, d, dv, pages=r.choice([-(-200 // page), -(-60 // page)]), page=page, dtype=dtype,
        window=None if window is None else (window, 0),
    )  # fmt: skip
    for layer in made:
        layer.k_pages[...] = layer.v_pages[...] = np.nan
    draw = np.random.default_rng(r.randrange(10**6))
    table = flashkit.rotary_table(400, d // 2 * 2) if d > 1 and r.random() < 0.5 else None
    turn: Callable[[Any, int], Any] = lambda x, first: (
        x if table is None else flashkit.rotary(x, *table, positions=np.arange(first, first + len(x)), layout="bnhd")
    )
    keys: list[Any] = [np.empty((0, heads_kv, d), dtype) for _ in range(sequences)]
    values: list[Any] = [np.empty((0, heads_kv, dv), dtype) for _ in range(sequences)]
    wrong: list[str] = []
    for _ in range(r.randint(3, 8)):
        what, i = r.choice(["append", "append", "append", "fork", "trim", "free"]), r.randrange(sequences)
        if what == "fork" and not made.lengths.all():
            into = made.fork(i)
            keys[into], values[into] = keys[i], values[i]
        elif what == "trim":
            n = r.randint(0, min(3, len(keys[i])))
            try:
                made.trim(i, n)
            except ValueError as error:  # what the window has dropped
                wrong += [] if "the window has dropped" in str(error) else [f"trim: {error}"]
                continue
            keys[i], values[i] = keys[i][: len(keys[i]) - n], values[i][: len(values[i]) - n]
        elif what == "free":
            made.free(i)
            keys[i], values[i] = keys[i][:0], values[i][:0]
        elif what == "append":
            counts = draw.integers(0, 30, sequences) if r.random() < 0.6 else np.ones(sequences, np.int64)
            offsets = np.concatenate([[0], np.cumsum(counts)])
            k, v, q = (
                draw.standard_normal((offsets[-1], h, width)).astype(dtype)
                for h, width in ((heads_kv, d), (heads_kv, dv), (heads, d))
            )
            kinds = [f"strides {r.randrange(1000)}" for _ in "kvq"]
            given = [cases.stored(np, x, kind, -2, -3) for x, kind in zip((k, v, q), kinds)]
            try:
                made.append(*given[:2], cu_seqlens=offsets, rotary=table)
            except flashkit.OutOfPagesError:
                continue
            spans = [slice(a, b) for a, b in pairwise(offsets)]
            for j, span in enumerate(spans):
                keys[j] = np.concatenate([keys[j], turn(k[span], len(keys[j]))])
                values[j] = np.concatenate([values[j], v[span]])
            out, lse = made.attend(given[2], causal=True, return_lse=True, rotary=table)
            for j, span in enumerate(spans):
                turned = turn(q[span], len(keys[j]) - int(counts[j]))
                one = {name: x.swapaxes(0, 1)[None] for name, x in (("q", turned), ("k", keys[j]), ("v", values[j]))}
                one |= {"causal": True} | ({} if window is None else {"window": (window, 0)})
                wrong += off_definition(one, out[span].swapaxes(0, 1)[None], lse[None, :, span])
        if made.lengths.tolist() != [len(x) for x in keys]:
            wrong.append(f"lengths are {made.lengths.tolist()}, not {[len(x) for x in keys]}")
    return Found([], wrong)


def off_definition(options: dict[str, Any], out: np.ndarray, lse: np.ndarray) -> list[str]:
    """Whether a call's results differ from the definition."""
    problem, operands, _ = prepare(**options)
    given = problem.spec, operands, np.zeros(out.shape, out.dtype), None
    yardstick = cases.Yardstick(out.dtype.name)
    exact = yardstick.measure(*given)
    allowed = yardstick.tolerance(cases.magnitudes(*given))
    got = cases.Results(out, lse, exact.dq, exact.dk, exact.dv, None)
    ratios = cases.ratios(got, exact, allowed)
    return [f"{name} of a cache is {x:.3g} times the tolerance off" for name, x in ratios.items() if not x <= LEEWAY]


ENTRIES = {"merge": merge, "weights": weights, "rotary": rotary, "cache": cache}
"""By name, as a choice has it."""

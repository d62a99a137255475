"""Attention on 8-bit numbers, in any form of a call, against exact arithmetic on what they stand for."""

from functools import partial
from random import Random
from typing import Any

import cases
import numpy as np

import flashkit

from .caches import Found

SPREADS = 8.0
"""An error in units of its spread that no luck explains."""

ROUNDING = 0.036
"""Spread of one rounding to three bits of mantissa: of numbers spread evenly over 1/16, relative to their size."""


def attention(call: cases.Call, r: Random) -> Found:
    """Output and log-sum-exp of quantised q, k and v.

    Weights may be rounded to e4m3: errors that differ from key to key. So the error of a sum is held against the root
    of the sum of (p v)^2, which is no more than the largest weight times the sum of p v^2.
    """
    options = {name: x for name, x in call.options.items() if name != "out"}
    given = quantised(call, r, "page_table" in options)
    got = flashkit.attention(*given, return_lse=True, **options)
    q, k, v = (cases.to_numpy(x.dequantize("float64")) for x in given)
    definition = partial(flashkit.attention, q, k, return_lse=True, **by_definition(call, options))
    out, lse, statistics = definition(v, return_stats=("max_logit",))
    absolute, squares = definition(np.abs(v))[0], definition(v * v)[0]

    largest = np.where(np.isneginf(statistics["max_logit"]), lse, statistics["max_logit"])
    exact, absolute, squares, found = (call.to_plain(x).astype(np.float64) for x in (out, absolute, squares, got[0]))
    lse, largest, found_lse = map(call.rows_to_plain, (lse, largest, got[1]))
    unit = max(cases.epsilon(call.choice["dtype"]), cases.epsilon("float32"))
    of_score, n_k = error_of_score(q, k, options, unit), int(call.choice["sizes"].partition("x")[2])
    with np.errstate(invalid="ignore", over="ignore"):
        heaviest = np.nan_to_num(np.exp(largest - lse))[..., None] / (1 - options.get("dropout", 0.0))
        luck = SPREADS * ROUNDING * np.sqrt(heaviest * np.maximum(squares, 0))
        lse_is_close = (found_lse == lse) | (np.isnan(found_lse) & np.isnan(lse))
        lse_is_close |= np.abs(found_lse - lse) <= 2 * of_score + 1e-5 * (1 + np.abs(lse))
    truncated = 2.0**-12 * (min(n_k, 4096) / 24 + 1)  # what tensor cores cut off sums of e4m3 products, until promoted
    least = 2.0**-17 * n_k * heaviest * np.nan_to_num(np.abs(v)).max(initial=0)  # weights that e4m3 takes for 0
    allowed = np.minimum(luck, absolute / 16) + (2 * of_score + truncated) * absolute + 2 * unit * np.abs(exact) + least
    zero = 2.0**-24 if call.choice["dtype"] == "float16" else 1e-30  # float16 has no number under it
    is_close = (np.abs(found - exact) <= allowed + zero) | (np.isnan(found) & np.isnan(exact))
    return Found([], [
        f"{name}{list(map(int, at))} is {x[at]:.6g}, not {y[at]:.6g} ({given})"
        for name, x, y, close in (("out", found, exact, is_close), ("lse", found_lse, lse, lse_is_close))
        for at in map(tuple, np.argwhere(~close)[:1])
    ])  # fmt: skip


def by_definition(call: cases.Call, options: dict[str, Any]) -> dict[str, Any]:
    """Options for the reference, of NumPy."""
    mine = {name: x.get() if hasattr(x, "get") else x for name, x in options.items()}
    mods = {name: x for name, x in call.plain.items() if name in ("score_mod", "mask_mod", "block_mask")}
    return {**mine, **mods, "backend": "reference"}


def quantised(call: cases.Call, r: Random, paged: bool) -> list[flashkit.Quantized]:
    """q, k and v of the call in 8 bits, in ways that are drawn."""
    tokens_outside = call.choice["layout"].endswith("bnhd") or "packed" in call.choice["sequences"]
    layout = "bnhd" if tokens_outside and call.q.ndim > 2 else "bhnd"
    hidden_nan = any(np.isnan(cases.to_numpy(x)).any() for x in (call.q, call.k, call.v))  # int8 has none
    more: dict[str, Any] = {"per": r.choice(["tensor", "head", "block", "token"])}
    more["dtype"] = "e4m3" if hidden_nan else r.choice(["e4m3", "e4m3", "e4m3", "int8"])
    rotate, transpose = r.random() < 0.3, more["dtype"] == "e4m3" and r.random() < 0.7
    return [
        flashkit.quantize(call.q, layout=layout, rotate=rotate, **more),
        flashkit.quantize(call.k, layout="bnhd" if paged else layout, rotate=rotate, **more),
        flashkit.quantize(call.v, layout="bnhd" if paged else layout, transpose=transpose, **more),
    ]


def error_of_score(q: np.ndarray, k: np.ndarray, options: dict[str, Any], unit: float) -> float:
    """Of sums that a tensor core truncates, or of numbers rounded to the dtype of the call."""
    dim = q.shape[-1]
    scale: float = abs(options.get("scale", dim**-0.5))
    for x in (q, k):  # what is hidden may be NaN
        scale *= float(np.sqrt(np.nan_to_num(x * x).sum(-1).max(initial=0)))
    steep = 8 if "score_mod" in options else 1
    return steep * scale * max(2.0**-13 * (dim / 32 + 1), 4 * unit * dim**-0.5)

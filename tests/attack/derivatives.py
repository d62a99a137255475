"""Tangents and statistics of a call, against the definition."""

from functools import partial
from random import Random
from typing import Any

import cases
import numpy as np

import flashkit
from flashkit.call import arrays

from .caches import Found
from .codes import by_definition

UNITS = 8.0
"""An error in units of what one rounding of every input does."""

FLOAT32 = 2.0**-22
"""A unit of float32, and the roundings of a sum of products."""

NAMES = "entropy", "max_logit", "key_weight"


def both(call: cases.Call, r: Random) -> Found:
    """Tangents along some of q, k and v, and statistics, where the call has them."""
    options = {name: x for name, x in call.options.items() if name not in ("out", "deterministic")}
    plain, draw = by_definition(call, options), np.random.default_rng(r.randrange(10**6))
    tensors = [cases.to_numpy(x) for x in (call.q, call.k, call.v)]
    wide = [x.astype(np.float64) for x in tensors]
    wrong = []
    if "page_table" not in options:
        along = [r.random() < 0.8 for _ in range(3)]
        tangents = [draw.standard_normal(x.shape).astype(x.dtype) for x in tensors]
        xp = arrays.namespace(arrays.require("q", call.q))
        given = [xp.asarray(t) if use else None for t, use in zip(tangents, along)]
        (out, lse), (dout, dlse) = flashkit.attention_jvp(call.q, call.k, call.v, *given, return_lse=True, **options)
        six = wide + [t.astype(np.float64) if use else None for t, use in zip(tangents, along)]
        definition = partial(_tangents, plain)
        unit = max(cases.epsilon(call.choice["dtype"]), FLOAT32)
        wrong += far("tangents", (out, lse, dout, dlse), definition, six, unit, draw)
    _, found = flashkit.attention(call.q, call.k, call.v, return_stats=NAMES, **options)
    unit = FLOAT32 if call.choice["dtype"] in ("float32", "float64") else 2.0**-15  # of a quick exponential
    wrong += far("statistics", [found[name] for name in NAMES], partial(_statistics, plain), wide, unit, draw)
    return Found([], wrong)


def _tangents(options: dict[str, Any], *six: Any) -> list[np.ndarray]:
    (out, lse), (dout, dlse) = flashkit.attention_jvp(*six, return_lse=True, **options)
    return [out, lse, dout, dlse]


def _statistics(options: dict[str, Any], *tensors: Any) -> list[np.ndarray]:
    found = flashkit.attention(*tensors, return_stats=NAMES, **options)[1]
    return [found[name] for name in NAMES]


def far(what: str, got: Any, definition: Any, given: list[Any], unit: float, draw: np.random.Generator) -> list[str]:
    """What is further from the definition than rounding every input explains."""
    exact = definition(*given)
    rounded = [x if x is None else x * (1 + unit * draw.uniform(-1, 1, x.shape)) for x in given]
    wrong = []
    for place, (x, right, moved) in enumerate(zip(got, exact, definition(*rounded), strict=True)):
        found = cases.to_numpy(x).astype(np.float64)
        with np.errstate(invalid="ignore"):
            by_rounding = np.nan_to_num(np.abs(moved - right), posinf=0).max(initial=0)
            size = np.abs(right[np.isfinite(right)]).max(initial=0)
            close = (found == right) | (np.isnan(found) & np.isnan(right))
            close |= np.abs(found - right) <= UNITS * (by_rounding + unit * np.abs(right) + FLOAT32 * (1 + size))
        for at in map(tuple, np.argwhere(~close)[:1]):
            wrong.append(f"{what} {place}: {list(map(int, at))} is {found[at]:.6g}, not {right[at]:.6g}")
    return wrong

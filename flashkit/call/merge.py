"""`merge`: results over parts of the keys as the result over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from ..errors import shown
from . import arrays, interop
from .checks import choice
from .shape import LAYOUTS

LSE_DTYPES = ("float32", "float64")


def merge(*parts: tuple[Any, Any], layout: str = "bhnd") -> tuple[Any, Any]:
    """Combine attention over disjoint parts of the keys, exactly, by the log-sum-exps of the parts.

    Attention across devices, cascades with a shared prefix and attention to keys larger than memory are built from it.

    Parameters
    ----------
    *parts
        One or more pairs (out, lse), as `attention` returns them with return_lse=True for the same queries. All are
        arrays of one library (see `attention`). All out are of one shape (..., Hq, Nq, Dv) and one dtype: float64,
        float32, float16 or bfloat16. All lse are (..., Hq, Nq), float32 or float64, natural logarithms.
    layout
        "bhnd", or "bnhd" for out of shape (..., Nq, Hq, Dv). lse is (..., Hq, Nq) in both.

    Returns
    -------
    out : array
        New, of the shape and dtype of the parts'. Sums are accumulated in float32, or in float64 if an argument is
        float64.
    lse : array
        (..., Hq, Nq), float64 if an lse or out is, else float32.

    Notes
    -----
    A part without a visible key for a row, lse -inf, does not affect that row, whatever its out holds. A row without a
    visible key in any part is 0, and its lse -inf. NaN in a visible part shows in its rows alone.

    With sinks, pass them for one of the parts only: each part's log-sum-exp includes the sinks it was given.

    References
    ----------
    Dao, "FlashAttention-2", 2023, arXiv 2307.08691, section 3.1; Ye et al., "FlashInfer", 2025, arXiv 2501.01005,
    section 2.2, where a pair is called an attention state.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 60, 16))
    >>> halves = [flashkit.attention(q, k[:, i], v[:, i], return_lse=True) for i in (slice(0, 25), slice(25, 60))]
    >>> out, lse = flashkit.merge(*halves)
    >>> bool(abs(out - flashkit.attention(q, k, v)).max() < 1e-12)
    True
    """
    first = parts[0][0] if parts and isinstance(parts[0], (tuple, list)) and parts[0] else None
    adapter = interop.adapter_of(first)
    with adapter.scope():
        out, lse = _merged([_native(adapter, *part) for part in enumerate(parts)], layout)
        return adapter.from_native("out", out), adapter.from_native("lse", lse)


def _merged(parts: Sequence[Any], layout: str) -> tuple[Any, Any]:
    """`merge` of arrays of NumPy or CuPy."""
    kind = _checked(parts, layout)
    xp: Any = arrays.namespace(kind)
    dtype = parts[0][0].dtype
    wide = "float64" if "float64" in (dtype.name, *(lse.dtype.name for _, lse in parts)) else "float32"
    scores = [lse.astype(wide, copy=False) for _, lse in parts]
    greatest = reduce(xp.maximum, scores)
    reference = xp.where(greatest == -math.inf, xp.zeros_like(greatest), greatest)
    with np.errstate(all="ignore"):  # rows without a key: log(0), 0 / 0; inf - inf
        weights = [xp.exp(score - reference) for score in scores]
        total = sum(weights)
        merged = reference + xp.log(total)
        result = xp.zeros(parts[0][0].shape, wide)
        for (out, lse), weight in zip(parts, weights, strict=True):
            weight /= total
            if layout == "bnhd" and out.ndim > 2:
                weight, lse = weight.swapaxes(-1, -2), lse.swapaxes(-1, -2)
            term = out.astype(wide)
            term *= weight[..., None]
            term[lse == -math.inf] = 0  # selected, not multiplied: without keys the row may hold anything
            result += term
    return result.astype(dtype, copy=False), merged


def _native(adapter: interop.Foreign, number: int, part: Any) -> Any:
    """A part with arrays of NumPy or CuPy, as views, whose forms no other thread changes."""
    if not isinstance(part, (tuple, list)):
        return part
    names = (f"{name} of part {number}" for name in ("out", "lse", *map(str, range(2, len(part)))))
    native = adapter.to_native(**dict(zip(names, part)))
    return tuple(x.view() if arrays.kind_of(x) is not None else x for x in native.values())


def _checked(parts: Sequence[Any], layout: str) -> str:
    """The kind of the arrays and the shape of an lse; an error if the parts disagree."""
    choice("layout", layout, LAYOUTS)
    expected = "expected (out, lse), as attention(..., return_lse=True) returns it"
    if not parts:
        raise TypeError(f"merge(): {expected}, once or more, got no parts")
    kind, first = None, parts[0]
    for number, pair in enumerate(parts):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            what = f"an array of shape {pair.shape}" if hasattr(pair, "shape") else shown(pair)
            raise TypeError(f"part {number}: {expected}, got {what}")
        out, lse = pair
        for name, array in ((f"out of part {number}", out), (f"lse of part {number}", lse)):
            kind = arrays.require(name, array, kind)
        if arrays.dtype_name(f"out of part {number}", out) != first[0].dtype.name:
            raise TypeError(f"out of part {number}: expected dtype {first[0].dtype} (part 0's), got {out.dtype}")
        if lse.dtype.name not in LSE_DTYPES:
            raise TypeError(f"lse of part {number}: expected dtype {' or '.join(LSE_DTYPES)}, got {lse.dtype}")
        if out.ndim < 2:
            raise ValueError(f"out of part {number}: expected shape (..., heads, queries, Dv), got {out.shape}")
        if out.shape != first[0].shape:
            raise ValueError(f"out of part {number}: expected shape {first[0].shape} (part 0's), got {out.shape}")
        rows = out.shape[:-1]
        wanted = (*rows[:-2], rows[-1], rows[-2]) if layout == "bnhd" and len(rows) > 1 else rows
        if lse.shape != wanted:
            raise ValueError(f"lse of part {number}: expected shape {wanted}, one number for each row, got {lse.shape}")
    return str(kind)

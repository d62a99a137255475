"""`rotary` and `rotary_vjp`: queries and keys rotated by their positions.

NumPy arrays are rotated by a compiled kernel, backends/cpu/kernels/rotary.py; others by array expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..call import arrays, interop
from ..call.checks import can_write, check_out, choice, flag
from ..call.sequences import integers_of
from ..call.shape import LAYOUTS, Shape
from ..mods.expr import MAX_POSITION
from ..spec import DTYPES
from .tables import cos_sin, rates


class Table(NamedTuple):
    """Checked cosines and sines, (P, dims / 2) of the accumulators' dtype, C-contiguous."""

    cos: Any
    sin: Any
    interleaved: bool = False


@interop.takes_every_library(0, "x")
def rotary(
    x: Any, cos: Any = None, sin: Any = None, *, positions: Any = None, base: float | None = None,
    dims: int | None = None, scaling: Mapping[str, Any] | None = None, interleaved: bool = False, layout: str = "bhnd",
    out: Any = None,
) -> Any:  # fmt: skip
    """Rotary position embedding: each pair (a, b) of a head's first elements becomes (a cos - b sin, a sin + b cos).

    Parameters
    ----------
    x
        (..., H, N, D) queries or keys, float64, float32, float16 or bfloat16; (H, N, D) and (N, D) work too. Products
        are float32, or float64 for float64.
    cos, sin
        Tables (P, dims / 2), from `rotary_table` or of your own: row p is for position p. Without them the angles of
        `positions` are computed.
    positions
        Integers (N,) or (..., N): the position of each token; 0 ... N - 1 by default. In tables on a device they are
        clamped to the table and not read.
    base, dims, scaling
        As for `rotary_table`, for calls without tables; dims is D by default. Tables say themselves how many elements
        are rotated. The others stay as they are.
    interleaved
        Pairs are (x[0], x[1]), (x[2], x[3]) ... as in GPT-J and RoFormer. By default they are (x[0], x[dims / 2]) ...,
        the halves of GPT-NeoX, Llama and Hugging Face transformers.
    layout
        "bhnd", or "bnhd" for (..., N, H, D) arrays; packed (T, H, D) arrays have this one.
    out
        Array for the result, of x's shape and dtype; it may be x.

    Returns
    -------
    array
        Of x's shape and dtype.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv 2104.09864, equation 34.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q = np.random.default_rng(0).standard_normal((1, 8, 16, 64), dtype=np.float32)
    >>> cos, sin = flashkit.rotary_table(4096, 64)
    >>> flashkit.rotary(q, cos, sin, positions=np.arange(100, 116)).shape
    (1, 8, 16, 64)
    >>> bool(np.allclose(flashkit.rotary(q, cos, sin), flashkit.rotary(q, base=10000.0), atol=1e-5))
    True
    """
    return _checked_and_rotated("x", x, cos, sin, positions, base, dims, scaling, interleaved, layout, out, 1)


@interop.takes_every_library(0, "dout")
def rotary_vjp(
    dout: Any, cos: Any = None, sin: Any = None, *, positions: Any = None, base: float | None = None,
    dims: int | None = None, scaling: Mapping[str, Any] | None = None, interleaved: bool = False, layout: str = "bhnd",
    out: Any = None,
) -> Any:  # fmt: skip
    """The gradient of sum(rotary(x, ...) * dout) by x: a rotation by the negative angles.

    Parameters
    ----------
    dout
        Array of the shape of x.
    cos, sin, positions, base, dims, scaling, interleaved, layout, out
        As for `rotary`. Where tables are scaled by a factor, so is the gradient; otherwise this is `rotary`'s inverse.

    Returns
    -------
    array
        dx, of dout's shape and dtype.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> x = np.random.default_rng(0).standard_normal((8, 16, 64))
    >>> bool(np.allclose(flashkit.rotary_vjp(flashkit.rotary(x)), x))
    True
    """
    return _checked_and_rotated("dout", dout, cos, sin, positions, base, dims, scaling, interleaved, layout, out, -1)


def _checked_and_rotated(
    name: str, x: Any, cos: Any, sin: Any, positions: Any, base: Any, dims: Any, scaling: Any, interleaved: Any,
    layout: Any, out: Any, sign: int,
) -> Any:  # fmt: skip
    kind = arrays.require(name, x)
    dtype = arrays.dtype_name(name, x)
    choice("layout", layout, LAYOUTS)
    in_place, x = out is x, x.view()  # before its form is looked at; see arrays.own_forms
    if x.ndim < 2:
        raise ValueError(f"{name}: expected shape (..., heads, tokens, head_dim) or (tokens, head_dim), got {x.shape}")
    shape = Shape(x.ndim, tuple(x.shape[:-3]), layout)
    x4 = shape.to_four(x)
    batch, _, n, d = x4.shape
    if cos is None and sin is None:
        where = _positions(positions, "numpy", shape, batch, n, None)
        longest = int(where.max()) + 1 if where.size else 0
        cos, sin = cos_sin(where, rates(d if dims is None else dims, base, scaling, longest), np.float64)
        xp = arrays.namespace(kind)
        accumulator = DTYPES[dtype].accumulator
        table = checked_table(xp.asarray(cos, accumulator), xp.asarray(sin, accumulator), interleaved, x4, dtype)
        where = xp.arange(batch * n, dtype=np.int64).reshape(batch, n)
    else:
        if not base is dims is scaling is None:
            raise TypeError("expected base, dims and scaling, or cos and sin, whose angles they define, but not both")
        table = checked_table(cos, sin, interleaved, x4, dtype)
        where = _positions(positions, kind, shape, batch, n, table.cos.shape[0])
    own = out
    if out is not None:
        own = arrays.own_form("out", out, kind)
        check_out(own, kind, dtype, x.shape)
    if (in_place and arrays.same_address(x4, x) and can_write(x)) or (
        out is not None and can_write(own, x, table.cos, table.sin)
    ):
        target = shape.to_four(own)
    else:
        target = shape.empty(arrays.namespace(kind).empty, batch, x4.shape[1], n, d, x.dtype)
    rotate(x4, target, table, where, sign)
    result = shape.like(target)
    if out is None:
        return result
    if not arrays.same_address(out, result):
        out[...] = result
    return out


def checked_table(cos: Any, sin: Any, interleaved: Any, x: Any, dtype: str) -> Table:
    """Checked tables for x (..., D); float tables of another precision are converted."""
    kind, d = arrays.require("x", x), x.shape[-1]
    flag("interleaved", interleaved)
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            raise TypeError(f"{name}: expected a table, got None; flashkit.rotary_table returns cos and sin")
        arrays.require(name, table, kind)
    cos, sin = cos.view(), sin.view()
    for name, table in (("cos", cos), ("sin", sin)):
        if table.ndim != 2 or 2 * table.shape[1] > d or not table.shape[1]:
            half = f"; pass {name}[:, : {d // 2}]" if table.ndim == 2 and table.shape[1] == d else ""
            raise ValueError(f"{name}: expected shape (positions, dims / 2), dims at most {d}, got {table.shape}{half}")
        if table.dtype.kind != "f":
            raise TypeError(f"{name}: expected dtype float32 or float64, got {table.dtype}")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: expected the shape of cos, {cos.shape}, got {sin.shape}")
    xp = arrays.namespace(kind)
    cos, sin = (xp.ascontiguousarray(table, DTYPES[dtype].accumulator) for table in (cos, sin))
    return Table(cos, sin, interleaved)


def _positions(positions: Any, kind: str, shape: Shape, batch: int, n: int, rows: int | None) -> Any:
    """int64 (B, N), a copy, below `rows` where they lie on the host."""
    what = "integers (N,) or (..., N), one for each token,"
    where, on_device = integers_of("positions", np.arange(n) if positions is None else positions, kind, what)
    if where.shape not in ((n,), (*shape.batch, n)):
        raise ValueError(f"positions: expected shape {(n,)} or {(*shape.batch, n)}, got {where.shape}")
    xp = arrays.namespace(kind)
    whole = (xp if on_device else np).empty((batch, n), np.int64)
    whole[...] = where if where.ndim == 1 else where.reshape(batch, n)
    if on_device:
        return whole if rows is None else xp.clip(whole, 0, max(rows - 1, 0), out=whole)
    low, high = (int(where.min()), int(where.max())) if where.size else (0, -1)
    most = MAX_POSITION if rows is None else rows
    if low < 0 or high >= most:
        rows_of_table = "" if rows is None else ", the table's rows"
        raise ValueError(f"positions: expected 0 to {most - 1}{rows_of_table}, got values from {low} to {high}")
    return xp.asarray(whole)


def rotate(x: Any, out: Any, table: Table, positions: Any, sign: int) -> None:
    """out = x rotated: (B, H, N, D) arrays, positions (B, N)."""
    if isinstance(x, np.ndarray):
        from ..backends.cpu.rotary import rotate as compiled

        compiled(x, out, table.cos, table.sin, positions, table.interleaved, sign)
        return
    out[...] = rotated(x, table, positions[:, None], sign)


def rotated(x: Any, table: Table, positions: Any, sign: int = 1) -> Any:
    """x (..., D) rotated, by array expressions; positions broadcast to x's other axes."""
    dims = 2 * table.cos.shape[1]
    cos, sin = table.cos[positions], table.sin[positions] * sign
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if table.interleaved else (slice(0, dims // 2), slice(dims // 2, dims))
    )
    a, b = x[..., first].astype(cos.dtype), x[..., second].astype(cos.dtype)
    out = x.copy()
    out[..., first], out[..., second] = (a * cos - b * sin).astype(x.dtype), (a * sin + b * cos).astype(x.dtype)
    return out

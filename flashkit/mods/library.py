"""The ready-made masks and score modifications of flashkit.mods."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import shown
from ..numeric import integer, number
from . import expr
from .expr import Array, Expr
from .mod import Mod, mask, score
from .tracing import native_array, pure

__all__ = [
    "alibi", "bias", "causal", "dilated", "document", "prefix_lm", "sliding_window", "softcap", "t5_bias", "visible",
]  # fmt: skip

# --- masks ------------------------------------------------------------------------------------------------------------


def causal() -> Mod:
    """A query sees the keys up to its own position: k <= q.

    With the default `q_offset` the last query sees the last key (bottom-right alignment, as since FlashAttention 2.1).

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.causal().evaluate(b=0, h=0, q=[[0], [1], [2]], k=[0, 1, 2])
    array([[ True, False, False],
           [ True,  True, False],
           [ True,  True,  True]])
    """
    return mask(_causal)


@pure
def _causal(b: Expr, h: Expr, q: Expr, k: Expr) -> Expr:
    return k <= q


def sliding_window(left: int | None, right: int | None = 0) -> Mod:
    """A query at position q sees the keys from q - left to q + right.

    Parameters
    ----------
    left, right
        Numbers of keys, 0 or more; None is no bound on that side.

    References
    ----------
    Beltagy et al., "Longformer", 2020, arXiv 2004.05150, section 3.1.

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.sliding_window(1, 1).evaluate(b=0, h=0, q=2, k=[0, 1, 2, 3, 4])
    array([False,  True,  True,  True, False])
    """
    given = ("left", left), ("right", right)
    sides = {name: integer(f"{name} of a sliding window", n, 0) for name, n in given if n is not None}
    # A side beyond all positions is no bound, and q + right could overflow.
    sides = {name: n for name, n in sides.items() if n < 4 * expr.MAX_POSITION}
    functions: dict[tuple[str, ...], Callable[..., Any]] = {
        (): _everything, ("left",): _window_left, ("right",): _window_right, ("left", "right"): _window,
    }  # fmt: skip
    return mask(functions[tuple(sides)], **sides)


@pure
def _everything(b: Expr, h: Expr, q: Expr, k: Expr) -> bool:
    return True


@pure
def _window_left(b: Expr, h: Expr, q: Expr, k: Expr, *, left: Expr) -> Expr:
    return q - left <= k


@pure
def _window_right(b: Expr, h: Expr, q: Expr, k: Expr, *, right: Expr) -> Expr:
    return k <= q + right


@pure
def _window(b: Expr, h: Expr, q: Expr, k: Expr, *, left: Expr, right: Expr) -> Expr:
    return (q - left <= k) & (k <= q + right)


def prefix_lm(n: Any) -> Mod:
    """The first n keys are visible to all queries; beyond them a query sees the keys up to its own position.

    Parameters
    ----------
    n
        Length of the prefix: an integer, or integers (B,), one for each batch entry.

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
    arXiv 1910.10683, section 3.2.1.

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.prefix_lm(2).evaluate(b=0, h=0, q=[[0], [3]], k=[0, 1, 2, 3, 4])
    array([[ True,  True, False, False, False],
           [ True,  True,  True,  True, False]])

    Prefixes of two batch entries, for the query at position 0:

    >>> mods.prefix_lm([2, 4]).evaluate(b=[[0], [1]], h=0, q=0, k=[0, 1, 2, 3, 4])
    array([[ True,  True, False, False, False],
           [ True,  True,  True,  True, False]])
    """
    lengths = native_array("n", n)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"n of a prefix: expected an integer or integers (B,), got {shown(n)}")
    if lengths.ndim > 1:
        raise ValueError(f"n of a prefix: expected an integer or integers (B,), got shape {lengths.shape}")
    return mask(_prefix_lm_of_entries, n=lengths) if lengths.ndim else mask(_prefix_lm, n=int(lengths))


@pure
def _prefix_lm(b: Expr, h: Expr, q: Expr, k: Expr, *, n: Expr) -> Expr:
    return (k < n) | (k <= q)


@pure
def _prefix_lm_of_entries(b: Expr, h: Expr, q: Expr, k: Expr, *, n: Array) -> Expr:
    return (k < n[b]) | (k <= q)


def dilated(step: int) -> Mod:
    """A query sees the keys whose distance from it is a multiple of `step`.

    Parameters
    ----------
    step
        Distance between visible keys, 1 or more.

    References
    ----------
    The dilated window of Longformer, arXiv 2004.05150, section 3.1, without its window.

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.dilated(2).evaluate(b=0, h=0, q=2, k=[0, 1, 2, 3, 4])
    array([ True, False,  True, False,  True])
    """
    return mask(_dilated, step=integer("step", step, 1, expr.INT64[1]))


@pure
def _dilated(b: Expr, h: Expr, q: Expr, k: Expr, *, step: Expr) -> Expr:
    return (q - k) % step == 0


def document(ids: Any, kv_ids: Any = None) -> Mod:
    """Tokens see only their own document, as in packed sequences.

    Parameters
    ----------
    ids
        Integers, (Nk,) or (B, Nk): the document of each position on the axis of the keys, and of the query that stands
        there: ids[q] == ids[k]. A position outside belongs to no document. With kv_ids: (Nq,) or (B, Nq), the document
        of each query, wherever `q_offset` places it: ids[row] == kv_ids[k].
    kv_ids
        Integers, (Nk,) or (B, Nk): the document of each key.

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.document([0, 0, 1, 1]).evaluate(b=0, h=0, q=[[1], [2]], k=[0, 1, 2, 3])
    array([[ True,  True, False, False],
           [False, False,  True,  True]])

    Two queries and four keys:

    >>> mods.document([1, 0], [0, 0, 1, 1]).evaluate(b=0, h=0, q=[[2], [3]], k=[0, 1, 2, 3], row=[[0], [1]])
    array([[False, False,  True,  True],
           [ True,  True, False, False]])
    """
    q_ids, k_ids = (native_array("ids", x) for x in (ids, ids if kv_ids is None else kv_ids))
    for name, x in (("ids", q_ids), ("kv_ids", k_ids)):
        if x.ndim not in (1, 2) or x.dtype.kind not in "iu":
            raise ValueError(
                f"{name} of a document mask: expected integers of shape (N,) or (B, N), got shape {x.shape} and dtype "
                f"{x.dtype}"
            )
    return mask(_document, ids=q_ids, n=q_ids.shape[-1]) if kv_ids is None else mask(_own, ids=q_ids, kv_ids=k_ids)


@pure
def _document(b: Expr, h: Expr, q: Expr, k: Expr, *, ids: Array, n: Expr) -> Expr:
    known = (q >= 0) & (q < n) & (k < n)
    return known & (_at(ids, b, expr.clip(q, 0, n - 1)) == _at(ids, b, expr.clip(k, 0, n - 1)))


@pure
def _own(b: Expr, h: Expr, q: Expr, k: Expr, *, ids: Array, kv_ids: Array) -> Expr:
    return _at(ids, b, expr.ROW) == _at(kv_ids, b, k)


def _at(array: Array, b: Expr, index: Expr) -> Expr:
    return array[index] if array.ndim == 1 else array[b, index]


def visible(array: Any) -> Mod:
    """A mask as an array.

    Parameters
    ----------
    array
        Bools that broadcast to (B, Hq, Nq, Nk), True = attend. The third axis is that of the rows of queries: it is
        not shifted by `q_offset`.

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.visible([[True, False]]).evaluate(b=0, h=0, q=0, k=[0, 1])
    array([ True, False])
    """
    array = native_array("array", array)
    if array.dtype.kind != "b":
        raise TypeError(f"mask: expected dtype bool, True where a key is visible, got {array.dtype}")
    return mask(_indexed(_visible, array), array=array)


def _visible(b: Expr, h: Expr, q: Expr, k: Expr, *, array: Array, axes: tuple[bool, ...]) -> Expr:
    return _element(array, axes, b, h, k)


# --- scores -----------------------------------------------------------------------------------------------------------


def softcap(cap: float) -> Mod:
    """Soft-capping: cap * tanh(s / cap), so that scores stay within -cap and cap.

    Parameters
    ----------
    cap
        The bound, above 0.

    References
    ----------
    Gemma Team, "Gemma 2", 2024, arXiv 2408.00118, section 2.

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.softcap(2.0).evaluate(b=0, h=0, q=0, k=0, s=[0.0, 2.0, 100.0]).round(3)
    array([0.   , 1.523, 2.   ])
    """
    cap = number("softcap", cap)
    if not cap > 0:
        raise ValueError(f"softcap: expected a number above 0, a bound on the scores, got {cap}")
    return score(_softcap, cap=cap)


@pure
def _softcap(s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, cap: Expr) -> Expr:
    return cap * expr.tanh(s / cap)


def alibi(slopes: Any) -> Mod:
    """ALiBi: s - slopes[h] * |q - k|.

    Parameters
    ----------
    slopes
        (Hq,) or (B, Hq).

    References
    ----------
    Press et al., "Train Short, Test Long", 2022, arXiv 2108.12409, section 3.

    Examples
    --------
    >>> from flashkit import mods
    >>> mods.alibi([0.5]).evaluate(b=0, h=0, q=2, k=[0, 1, 2], s=[1.0, 1.0, 1.0])
    array([0. , 0.5, 1. ])
    """
    slopes = native_array("slopes", slopes)
    if slopes.ndim not in (1, 2):
        raise ValueError(f"slopes: expected shape (Hq,) or (B, Hq), got {slopes.shape}")
    return score(_alibi, slopes=slopes)


@pure
def _alibi(s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, slopes: Array) -> Expr:
    return s - expr.to_float(_at(slopes, b, h)) * abs(q - k)


def bias(array: Any) -> Mod:
    """An additive bias: s + array[b, h, row, k].

    Parameters
    ----------
    array
        Broadcasts to (B, Hq, Nq, Nk); -inf masks a pair. The third axis is that of the rows of queries: it is not
        shifted by `q_offset`.

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit import mods
    >>> mods.bias(np.array([[0.0, -np.inf]])).evaluate(b=0, h=0, q=0, k=[0, 1], s=[1.0, 1.0])
    array([  1., -inf])
    """
    array = native_array("array", array)
    return score(_indexed(_bias, array), array=array)


def _bias(s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, array: Array, axes: tuple[bool, ...]) -> Expr:
    return s + expr.to_float(_element(array, axes, b, h, k))


def t5_bias(table: Any, *, bidirectional: bool = True, max_distance: int = 128) -> Mod:
    """The relative position bias of T5: s + table[bucket of k - q, h].

    Half of the buckets are for one distance each, the others for ranges that grow with the distance up to
    `max_distance`, beyond which all distances share the last one.

    Parameters
    ----------
    table
        (buckets, Hq), floating: as the weight of an embedding of transformers' `relative_attention_bias`.
    bidirectional
        Whether keys behind the query have buckets of their own, the second half of the table. Otherwise they are in
        bucket 0.
    max_distance
        The distance from which on all are in the last bucket.

    Returns
    -------
    Mod
        `attention_vjp(..., score_mod=...)` differentiates by the table, by the name "score.table".

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
    arXiv 1910.10683, section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit import mods
    >>> near = mods.t5_bias(np.arange(8.0)[:, None], max_distance=8)
    >>> near.evaluate(b=0, h=0, q=9, k=[0, 4, 6, 7, 8, 9, 10, 11, 12, 20], s=np.zeros(10))
    array([3., 3., 2., 2., 1., 0., 5., 6., 6., 7.])
    """
    table = native_array("table", table)
    sides = 2 if bidirectional else 1
    if table.ndim != 2 or table.shape[0] < 2 * sides or table.shape[0] % sides:
        raise ValueError(
            f"table: expected shape (buckets, Hq) with {'an even number, 4' if bidirectional else '2'} or more, of "
            f"buckets, got {table.shape}"
        )
    buckets = table.shape[0] // sides
    exact = buckets // 2
    farthest = integer("max_distance", max_distance, exact + 1)
    rate = (buckets - exact) / math.log(farthest / exact)
    function = _t5_both_sides if bidirectional else _t5_one_side
    return score(function, table=table, buckets=buckets, exact=exact, rate=rate)


@pure
def _t5_both_sides(
    s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, table: Array, buckets: Expr, exact: Expr, rate: Expr
) -> Expr:  # fmt: skip
    return s + expr.to_float(table[expr.where(k > q, buckets, 0) + _t5_bucket(abs(q - k), buckets, exact, rate), h])


@pure
def _t5_one_side(
    s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, table: Array, buckets: Expr, exact: Expr, rate: Expr
) -> Expr:  # fmt: skip
    return s + expr.to_float(table[_t5_bucket(expr.maximum(q - k, 0), buckets, exact, rate), h])


def _t5_bucket(n: Expr, buckets: Expr, exact: Expr, rate: Expr) -> Expr:
    # A little more, so that a quotient at the edge of a bucket is not rounded below it.
    far = exact + expr.to_int(expr.log(n / exact) * rate + 1e-5)
    return expr.where(n < exact, expr.minimum(n, buckets - 1), expr.clip(far, 0, buckets - 1))


def _indexed(function: Callable[..., Any], array: Any) -> Callable[..., Any]:
    """The function with the axes of length 1 compiled in, so that the graph does not depend on their positions."""
    if array.ndim > 4:
        raise ValueError(f"array: expected up to 4 axes that broadcast to (B, Hq, Nq, Nk), got shape {array.shape}")
    return _with_axes(function, tuple(n == 1 for n in array.shape))


@cache
def _with_axes(function: Callable[..., Any], axes: tuple[bool, ...]) -> Callable[..., Any]:
    @pure
    def bound(*symbols: Expr, array: Array) -> Any:
        return function(*symbols, array=array, axes=axes)

    bound.__name__ = function.__name__
    return bound


def _element(array: Array, axes: tuple[bool, ...], b: Expr, h: Expr, k: Expr) -> Expr:
    indices = (b, h, expr.ROW, k)[4 - len(axes) :]
    return array[tuple(expr.const(0) if single else index for single, index in zip(axes, indices, strict=True))]

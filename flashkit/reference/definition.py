"""The definition of attention: its formulas, with the whole matrix of scores."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from ..mods import expr
from ..spec import AttentionSpec, Operands
from .heads import Grads, Head, blocks, empty_results, groups, load_tile, rows_of_keys, store_tile, zero_gradients
from .steps import (
    add_sink_gradient,
    drop,
    finite,
    modify,
    quiet,
    row_max,
    row_sum,
    scores,
    select,
    softmax,
    tile_gradients,
    weighted_sum,
)


@quiet
def formulas(q: Any, k: Any, v: Any, visible: Any = None, scale: float | None = None) -> tuple[Any, Any]:
    """Attention as above, of arrays, in a few lines to read; `standard` is the same with all features.

    Parameters
    ----------
    q, k, v
        (..., Nq, D), (..., Nk, D) and (..., Nk, Dv).
    visible
        Bool, broadcasts to (..., Nq, Nk): which keys a query sees. All by default.
    scale
        1 / sqrt(D) by default.

    Returns
    -------
    out, lse : numpy.ndarray
        (..., Nq, Dv) and (..., Nq).

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> from flashkit.reference import formulas
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> out, lse = formulas(q, k, v, visible=np.tri(5, dtype=bool))
    >>> bool(np.allclose(out, flashkit.attention(q, k, v, causal=True)))
    True
    """
    s = (1 / np.sqrt(q.shape[-1]) if scale is None else scale) * q @ k.swapaxes(-1, -2)
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    row_max = s.max(axis=-1, keepdims=True, initial=np.finfo(s.dtype).min)
    p = np.exp(s - row_max)
    row_sum = p.sum(axis=-1, keepdims=True)
    return p @ v / np.where(row_sum == 0, 1, row_sum), (row_max + np.log(row_sum))[..., 0]


@quiet
def standard(spec: AttentionSpec, operands: Operands, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Attention by its formulas, with the whole matrix of scores.

    In float64 this is the definition. In another dtype every intermediate result is rounded to it, and the error is the
    yardstick for the error of a kernel. `formulas` takes plain arrays.

    Parameters
    ----------
    spec
        Features of the call: modifications, grouped heads, dropout, sinks.
    operands
        Arrays and numbers of the call: q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv). out and lse are not
        read.
    dtype
        Of the computation.

    Returns
    -------
    out : numpy.ndarray
        (B, Hq, Nq, Dv), of `dtype`.
    lse : numpy.ndarray
        (B, Hq, Nq), natural logarithm; float64 for float64, else float32.

    Raises
    ------
    MemoryError
        The matrix of scores is larger than memory.

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit.call.arguments import prepare
    >>> from flashkit.reference import standard
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 4))
    >>> problem, operands, _ = prepare(q, k, v, causal=True)
    >>> out, lse = standard(problem.spec, operands)
    >>> out.shape, lse.shape
    ((1, 2, 5, 4), (1, 2, 5))
    >>> bool(np.allclose(out[0, :, 0], v[0, :, 0]))  # the first row sees one key
    True
    """
    out, lse = empty_results(spec, operands, dtype)
    for head in chain.from_iterable(groups(spec, operands, dtype, out=out, lse=lse)):
        q, k, v = (load_tile(head, name) for name in ("q", "k", "v"))
        s = modify(head, scores(q, k, head.scale), *head.everything)
        p, head.memory["lse"][...] = softmax(s, head.sink)
        o = weighted_sum(drop(head, p, *head.everything), v)
        o[np.isnan(head.memory["lse"])] = np.nan  # also where dropout keeps none of the NaN weights
        head.memory["out"][...] = o
    return out, lse


@quiet
def standard_gradients(
    spec: AttentionSpec, operands: Operands, dout: Any, dlse: Any = None, dtype: Any = np.float64,
    values: dict[str, np.ndarray] | None = None,
) -> Grads:  # fmt: skip
    """Gradients by the formulas, with the whole matrices P and dS.

    Parameters
    ----------
    spec, operands, dtype
        As for `standard`.
    dout
        Gradient with respect to out, (B, Hq, Nq, Dv).
    dlse
        Gradient with respect to lse, (B, Hq, Nq), or None for 0.
    values
        Zeros in the shape of each value of `spec.sums`, by its slot; the gradients are added.

    Returns
    -------
    Grads
        Gradients of sum(dout * out) + sum(dlse * lse), of `dtype`.

    Raises
    ------
    MemoryError
        A matrix of Nq x Nk elements is larger than memory.

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit.call.arguments import prepare
    >>> from flashkit.reference import standard_gradients
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 4))
    >>> problem, operands, _ = prepare(q, k, v)
    >>> grads = standard_gradients(problem.spec, operands, dout=np.ones_like(q))
    >>> bool(np.allclose(grads.dv.sum(axis=2), 5))  # rows of P sum to 1
    True
    """
    grads = zero_gradients(spec, operands, dtype)
    memory = {"dout": dout, "dlse": dlse, **grads._asdict()}
    for head in chain.from_iterable(groups(spec, operands, dtype, values=values, **memory)):
        q, k, v, do = (load_tile(head, name) for name in ("q", "k", "v", "dout"))
        s = scores(q, k, head.scale)
        p, lse = softmax(modify(head, s, *head.everything), head.sink)
        out = weighted_sum(drop(head, p, *head.everything), v)
        delta = row_sum(do * out) - (load_tile(head, "dlse") if "dlse" in head.memory else 0)
        dq, dk, dv = tile_gradients(head, q, k, v, do, s, p, delta, *head.everything)
        head.memory["dq"][...] = dq
        head.memory["dk"][...] += dk  # summed over the query heads that share k and v
        head.memory["dv"][...] += dv
        add_sink_gradient(head, grads.dsinks, lse, delta)
    return grads


@quiet
def weights(head: Head, rows: slice) -> np.ndarray:
    """What multiplies the values in the output of these rows, (rows, keys): P, or P after dropout."""
    keys = head.everything[1]
    s = modify(head, scores(load_tile(head, "q", rows), load_tile(head, "k"), head.scale), rows, keys)
    return drop(head, softmax(s, head.sink)[0], rows, keys)


# --- statistics and tangents ------------------------------------------------------------------------------------------


@quiet
def statistics(
    spec: AttentionSpec, operands: Operands, dtype: Any = np.float64, block_q: int = 128
) -> dict[str, np.ndarray]:
    """Statistics of P = softmax(S) before dropout: of each row its entropy, lse - E[S], and its largest score, (B, Hq,
    Nq); of each key its weight, the sum of its column, (B, Hq, Nk). The entropy counts a sink as one more outcome, the
    others leave it out. An empty row has the entropy 0 and the largest score -inf; where lse is NaN both are. block_q:
    rows that are computed at a time.
    """
    rows_shape, entries, n_k = operands.q.shape[:3], operands.k.shape[0], operands.k.shape[2]
    if operands.page_table is not None:
        entries, n_k = len(operands.page_table), n_k * operands.page_table.shape[1]
    entropy, max_logit = np.empty(rows_shape, dtype), np.empty(rows_shape, dtype)
    key_weight = np.zeros((entries, rows_shape[1], n_k), dtype)
    for head in chain.from_iterable(groups(spec, operands, dtype, entropy=entropy, max_logit=max_logit)):
        own_keys = rows_of_keys(operands, key_weight, head)
        for rows in blocks(head.n_q, block_q):
            s = modify(head, scores(load_tile(head, "q", rows), load_tile(head, "k"), head.scale), rows, head.keys)
            p, lse = softmax(s, head.sink)
            of_sink = np.exp(head.sink - finite(lse))
            mean = row_sum(select(p != 0, p * (s - finite(lse)[:, None])))
            mean += select(of_sink != 0, of_sink * (head.sink - finite(lse)))
            is_nan = np.isnan(lse)
            store_tile(head, "entropy", rows, np.where(is_nan, np.nan, -mean))
            store_tile(head, "max_logit", rows, np.where(is_nan, np.nan, row_max(s)))
            own_keys += p.sum(axis=0)
    return {"entropy": entropy, "max_logit": max_logit, "key_weight": key_weight}


@quiet
def standard_jvp(
    spec: AttentionSpec, operands: Operands, dtype: Any = np.float64, block_q: int = 128
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Attention and its tangent along those of q, k and v, which operands.tangents has, by the formulas: out and lse as
    from `standard`, and their tangents. block_q: rows that are computed at a time.

    With dS the tangent of the modified scores, d lse = E[dS] = rowsum(P dS), and dO = P (dS - E[dS]) v + P dv: Lu and
    Song 2024, arXiv 2410.11081, appendix F; Geng et al. 2025, arXiv 2505.13447.
    """
    assert operands.tangents is not None
    tq, tk, tv, *_ = operands.tangents
    (out, lse), (dout, dlse) = (empty_results(spec, operands, dtype) for _ in range(2))
    results: Any = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    for head in chain.from_iterable(groups(spec, operands, dtype, dq=tq, dk=tk, dv=tv, **results)):
        k, v = load_tile(head, "k"), load_tile(head, "v")
        for rows in blocks(head.n_q, block_q):
            q = load_tile(head, "q", rows)
            s, ds = scores(q, k, head.scale), np.zeros((len(q), len(k)), dtype)
            if tq is not None:
                ds += scores(load_tile(head, "dq", rows), k, head.scale)
            if tk is not None:
                ds += scores(q, load_tile(head, "dk"), head.scale)
            if spec.score is not None:
                ds *= head.evaluate(expr.derivative(spec.score), rows, head.keys, s)
            p, row_lse = softmax(modify(head, s, rows, head.keys), head.sink)
            pds = select(p != 0, p * ds)
            mean = row_sum(pds)
            o = weighted_sum(drop(head, p, rows, head.keys), v)
            do = weighted_sum(drop(head, pds, rows, head.keys), v) - mean[:, None] * o
            if tv is not None:
                do += weighted_sum(drop(head, p, rows, head.keys), load_tile(head, "dv"))
            is_nan = np.isnan(row_lse)
            o[is_nan], do[is_nan], mean[is_nan] = np.nan, np.nan, np.nan
            for name, tile in (("out", o), ("lse", row_lse), ("dout", do), ("dlse", mean)):
                store_tile(head, name, rows, tile)
    return out, lse, dout, dlse


# --- quantised arrays -------------------------------------------------------------------------------------------------


def e4m3_or_int8(y: np.ndarray, format: str) -> np.ndarray:
    """The number of an 8-bit format that is nearest to each element, ties to the even code; NaN stays NaN.

    A code c of e4m3 has 4 bits of exponent and 3 of mantissa, c = 8 e + m, and stands for (1 + m / 8) 2^(e - 7), or for
    m / 8 * 2^-6 where e is 0; the greatest is 448. A code of int8 stands for itself.
    """
    e, m = np.divmod(np.arange(127), 8)
    numbers = np.arange(128.0) if format == "int8" else np.where(e > 0, (8 + m) * 2.0 ** (e - 10), m * 2.0**-9)
    above = np.searchsorted(numbers, np.minimum(np.abs(y), numbers[-1]))
    above = np.minimum(above, len(numbers) - 1)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - np.abs(y), np.abs(y) - numbers[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(y), np.nan, np.copysign(numbers[code], y))


@quiet
def dequantised(x: Any, format: str, scale: Any, rotation: Any = None, mean: Any = 0) -> np.ndarray:
    """The array that a quantised one stands for; attention of that is attention of this. See `flashkit.quantize`.

    scale and mean broadcast to x; rotation: an orthonormal matrix (D, D).
    """
    turn = np.eye(x.shape[-1]) if rotation is None else rotation
    return (e4m3_or_int8((x - mean) @ turn / scale, format) * scale) @ turn.T + mean

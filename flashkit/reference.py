"""The definition of attention, and FlashAttention in plain NumPy. Everything in flashkit is tested against this file.

Attention of one head, for queries q (Nq, D), keys k (Nk, D), values v (Nk, Dv):

    S = scale * q k^T        scores
    S = modify(S)            the score modification; -inf where the mask hides a key
    P = softmax(S)           over the keys
    O = P v                  lse = log(rowsum(exp(S)))

`standard` computes these formulas and stores the Nq x Nk matrix S. FlashAttention gets the same result with one tile of
S at a time, by an online softmax. Of the keys seen so far each row keeps

    m        row_max, the greatest score
    l        row_sum, the sum of exp(S - m)
    o_acc    the sum of exp(S - m) * v

A new tile that raises m multiplies l and o_acc by exp(m_old - m_new). At the end O = o_acc / l and lse = m + log(l).
The backward pass does not store P either. It recomputes S tile by tile, and P = exp(S - lse). With
delta = rowsum(dO * O):

    dP = dO v^T    dS = P * (dP - delta)    dq = scale * dS k    dk = scale * dS^T q    dv = P^T dO

A score modification multiplies the dS of q and k by its slope, d modify(s) / d s. A value that it reads, such as an
element of a bias, has as its gradient the sum of dS * d modify(s) / d value over the pairs that read it.

FlashAttention-1 (Dao et al. 2022, arXiv 2205.14135, Algorithms 1 and 4) loops over tiles of K and V outside and of Q
inside, so O, m and l of all queries are read and written for each tile of keys. FlashAttention-2 (Dao 2023, arXiv
2307.08691, Algorithms 1 and 2) loops over tiles of Q outside: o_acc, m and l stay in fast memory until the row is done,
and only O and lse are written. Here fast memory is a local variable, slow memory an array behind `load_tile` and
`store_tile`, and `Traffic` counts what moves between them.

The steps have the same names in every backend: load_tile, scores, modify, online_softmax, accumulate, epilogue.

At the edges, here and in every backend:
- A row without a visible key has O = 0, lse = -inf (with a sink: the sink's logit) and gradients 0.
- Masked keys never affect the result, even if they hold NaN or inf; nor do keys past kv_lengths.
- NaN in a visible input gives NaN in O and lse of the rows that see it, and in no other. A score of +inf gives NaN in
  its row (inf - inf).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from .devices.lazy import cached_property
from .mods import codegen, dropout, expr
from .mods.expr import Expr
from .mods.ranges import tables
from .spec import AttentionSpec, Operands


class Grads(NamedTuple):
    """Gradients with respect to q, k, v and the sinks, in their shapes; dsinks is None where there are no sinks."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None


quiet = np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore")  # log(0) and inf - inf occur


# --- the formulas -----------------------------------------------------------------------------------------------------


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


# --- standard attention: the definition -------------------------------------------------------------------------------


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
    out, lse = _empty_results(spec, operands, dtype)
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
        Zeros in the shape of each value of `spec.wrt`, by its slot; the gradients are added.

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
    grads = _zero_gradients(spec, operands, dtype)
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


def softmax(s: np.ndarray, sink: Any) -> tuple[np.ndarray, np.ndarray]:
    """(P, lse) of each row. The sink is one more logit in the sum, without a value."""
    m = np.maximum(row_max(s), sink)
    e = np.exp(s - finite(m)[:, None])
    l = row_sum(e) + np.exp(sink - finite(m))
    p = e / select(l != 0, l, otherwise=1)[:, None]
    return select(s != -np.inf, p), finite(m) + np.log(l)


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
    (out, lse), (dout, dlse) = (_empty_results(spec, operands, dtype) for _ in range(2))
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


@quiet
def weights(head: Head, rows: slice) -> np.ndarray:
    """What multiplies the values in the output of these rows, (rows, keys): P, or P after dropout."""
    keys = head.everything[1]
    s = modify(head, scores(load_tile(head, "q", rows), load_tile(head, "k"), head.scale), rows, keys)
    return drop(head, softmax(s, head.sink)[0], rows, keys)


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


# --- the steps --------------------------------------------------------------------------------------------------------


def load_tile(head: Head, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Copy rows of an array from slow to fast memory, converted to the dtype of the computation."""
    tile = head.memory[name][rows].astype(head.dtype)
    head.traffic.reads[name] += tile.size
    return tile


def store_tile(head: Head, name: str, rows: slice, tile: np.ndarray) -> None:
    """Copy rows to slow memory."""
    head.memory[name][rows] = tile
    head.traffic.writes[name] += tile.size


def scores(q: np.ndarray, k: np.ndarray, scale: Any) -> np.ndarray:
    """S = scale * q k^T, (rows, keys)."""
    return matmul(q, k.T) * scale


def modify(head: Head, s: np.ndarray, rows: slice, keys: slice, state: int = 1) -> np.ndarray:
    """The score modification, then -inf where the mask hides a key. A FULL tile has no hidden pair."""
    if head.spec.score is not None:
        s = head.evaluate(head.spec.score, rows, keys, s)
    if head.spec.mask is not None and state != FULL:
        s = select(head.evaluate(head.spec.mask, rows, keys), s, otherwise=-np.inf)
    return s


def online_softmax(s: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, ...]:
    """(P, m_new, l_new, rescale) of one more tile of scores: P = exp(S - m_new), rescale = exp(m_old - m_new)."""
    m_new = np.maximum(m, row_max(s))
    p = np.exp(s - finite(m_new)[:, None])
    rescale = np.exp(m - finite(m_new))
    return p, m_new, rescale * l + row_sum(p), rescale


def accumulate(o_acc: np.ndarray, rescale: np.ndarray, p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """o_acc relative to the new row_max, plus P v."""
    return o_acc * rescale[:, None] + weighted_sum(p, v)


def epilogue(o_acc: np.ndarray, m: np.ndarray, l: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(O, lse) of rows that have seen all their keys."""
    return o_acc / select(l != 0, l, otherwise=1)[:, None], finite(m) + np.log(l)


def initial(head: Head, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(o_acc, m, l) of rows that have seen no key: the sink is their first logit."""
    m = np.full(rows.stop - rows.start, head.sink)
    return np.zeros((m.size, head.spec.head_dim_v), head.dtype), m, np.exp(m - finite(m))


# --- FlashAttention, forward ------------------------------------------------------------------------------------------


@quiet
def flash_attention_1(
    spec: AttentionSpec, operands: Operands, block_q: int = 64, block_k: int = 64,
    dtype: Any = None, traffic: Traffic | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """FlashAttention-1, forward: K and V in the outer loop.

    A tile of K and V is read once; O, m and l of all queries are read and written for each of them.

    Parameters
    ----------
    spec, operands
        As for `standard`.
    block_q, block_k
        Rows and keys of a tile.
    dtype
        Of the computation; by default float64 for float64 operands, else float32.
    traffic
        Counts the elements that move between slow and fast memory.

    Returns
    -------
    out, lse : numpy.ndarray
        As from `standard`.

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit.call.arguments import prepare
    >>> from flashkit.reference import flash_attention_1, standard
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 50, 4))
    >>> problem, operands, _ = prepare(q, k, v, causal=True)
    >>> out, lse = flash_attention_1(problem.spec, operands, block_q=16, block_k=8)
    >>> bool(np.allclose(out, standard(problem.spec, operands)[0]))
    True
    """
    out, lse = _empty_results(spec, operands, dtype or spec.lse_dtype)
    m, l = np.empty_like(lse), np.empty_like(lse)
    for head in chain.from_iterable(groups(spec, operands, out.dtype, traffic, out=out, lse=lse, m=m, l=l)):
        states = tile_states(head, block_q, block_k)
        for rows in blocks(head.n_q, block_q):
            for name, tile in zip(("out", "m", "l"), initial(head, rows)):
                store_tile(head, name, rows, tile)
        for j, keys in enumerate(blocks(head.n_k, block_k)):
            k, v = load_tile(head, "k", keys), load_tile(head, "v", keys)
            for i, rows in enumerate(blocks(head.n_q, block_q)):
                if states[i, j] == EMPTY:
                    continue
                q, o_i, m_i, l_i = (load_tile(head, name, rows) for name in ("q", "out", "m", "l"))
                s = modify(head, scores(q, k, head.scale), rows, keys, states[i, j])
                o_acc = o_i * l_i[:, None]
                p, m_i, l_i, rescale = online_softmax(s, m_i, l_i)
                o_acc = accumulate(o_acc, rescale, drop(head, p, rows, keys), v)
                for name, tile in (("out", epilogue(o_acc, m_i, l_i)[0]), ("m", m_i), ("l", l_i)):
                    store_tile(head, name, rows, tile)
        for rows in blocks(head.n_q, block_q):
            m_i, l_i = load_tile(head, "m", rows), load_tile(head, "l", rows)
            store_tile(head, "lse", rows, finite(m_i) + np.log(l_i))
    return out, lse


@quiet
def flash_attention_2(
    spec: AttentionSpec, operands: Operands, block_q: int = 64, block_k: int = 64,
    dtype: Any = None, traffic: Traffic | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """FlashAttention-2, forward: Q in the outer loop.

    o_acc, m and l stay in fast memory; the tiles of K and V are read once per tile of Q.

    Parameters
    ----------
    spec, operands, block_q, block_k, dtype, traffic
        As for `flash_attention_1`.

    Returns
    -------
    out, lse : numpy.ndarray
        As from `standard`.

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit.call.arguments import prepare
    >>> from flashkit.reference import Traffic, flash_attention_2
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 64, 8))
    >>> problem, operands, _ = prepare(q, k, v)
    >>> traffic = Traffic()
    >>> out, lse = flash_attention_2(problem.spec, operands, block_q=16, block_k=16, traffic=traffic)
    >>> traffic.reads["q"] == q.size, traffic.reads["k"] == 4 * k.size  # four tiles of Q
    (True, True)
    """
    out, lse = _empty_results(spec, operands, dtype or spec.lse_dtype)
    for head in chain.from_iterable(groups(spec, operands, out.dtype, traffic, out=out, lse=lse)):
        states = tile_states(head, block_q, block_k)
        for i, rows in enumerate(blocks(head.n_q, block_q)):
            q = load_tile(head, "q", rows)
            o_acc, m, l = initial(head, rows)
            for j, keys in enumerate(blocks(head.n_k, block_k)):
                if states[i, j] == EMPTY:
                    continue
                k, v = load_tile(head, "k", keys), load_tile(head, "v", keys)
                s = modify(head, scores(q, k, head.scale), rows, keys, states[i, j])
                p, m, l, rescale = online_softmax(s, m, l)
                o_acc = accumulate(o_acc, rescale, drop(head, p, rows, keys), v)
            for name, tile in zip(("out", "lse"), epilogue(o_acc, m, l)):
                store_tile(head, name, rows, tile)
    return out, lse


# --- FlashAttention, backward -----------------------------------------------------------------------------------------


@quiet
def flash_attention_backward(
    spec: AttentionSpec, operands: Operands, dout: Any, dlse: Any = None, block_q: int = 64, block_k: int = 64,
    dtype: Any = None, traffic: Traffic | None = None, values: dict[str, np.ndarray] | None = None, order: int = 2,
) -> Grads:  # fmt: skip
    """FlashAttention, backward: the gradients of `standard_gradients`, from operands.out and operands.lse.

    Both papers loop over K and V outside: dk and dv of a tile stay in fast memory, dq goes through slow memory. The
    first one (order=1) computes delta from O and dO in each tile, the second one once, before the loops. Algorithm 4 of
    the first reads m and l; P depends on lse = m + log(l) alone, so this reads lse.
    """
    store_delta = order == 2
    grads = _zero_gradients(spec, operands, dtype or spec.lse_dtype)
    memory = {"out": operands.out, "lse": operands.lse, "dout": dout, "dlse": dlse, **grads._asdict()}
    memory["delta"] = np.empty(operands.lse.shape, grads.dq.dtype)
    for group in groups(spec, operands, grads.dq.dtype, traffic, values, **memory):
        states = [tile_states(head, block_q, block_k) for head in group]
        for head in group:
            for rows in blocks(head.n_q, block_q):
                store_tile(head, "dq", rows, np.zeros_like(head.memory["dq"][rows]))
                if store_delta or spec.sinks:
                    delta = row_delta(head, load_tile(head, "dout", rows), rows)
                if store_delta:
                    store_tile(head, "delta", rows, delta)
                if spec.sinks:
                    add_sink_gradient(head, grads.dsinks, load_tile(head, "lse", rows), delta)
        for j, keys in enumerate(blocks(group[0].n_k, block_k)):
            k, v = load_tile(group[0], "k", keys), load_tile(group[0], "v", keys)
            dk, dv = np.zeros_like(k), np.zeros_like(v)
            for g, head in enumerate(group):
                for i, rows in enumerate(blocks(head.n_q, block_q)):
                    if states[g][i, j] == EMPTY:
                        continue
                    q, do, dq, lse = (load_tile(head, name, rows) for name in ("q", "dout", "dq", "lse"))
                    delta = load_tile(head, "delta", rows) if store_delta else row_delta(head, do, rows)
                    s = scores(q, k, head.scale)
                    p = recompute_p(modify(head, s, rows, keys, states[g][i, j]), lse)
                    tile_dq, tile_dk, tile_dv = tile_gradients(head, q, k, v, do, s, p, delta, rows, keys)
                    store_tile(head, "dq", rows, dq + tile_dq)
                    dk, dv = dk + tile_dk, dv + tile_dv
            store_tile(group[0], "dk", keys, dk)
            store_tile(group[0], "dv", keys, dv)
    return grads


def recompute_p(s: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """P = exp(S - lse), from modified scores and the lse of the forward pass."""
    return select(s != -np.inf, np.exp(s - finite(lse)[:, None]))


def row_delta(head: Head, do: np.ndarray, rows: slice) -> np.ndarray:
    """delta = rowsum(dO * O) - dlse. dlse belongs here since d lse / dS = P, and dS = P * (dP - delta)."""
    delta = row_sum(do * load_tile(head, "out", rows))
    return delta - load_tile(head, "dlse", rows) if "dlse" in head.memory else delta


def tile_gradients(
    head: Head, q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray,
    s: np.ndarray, p: np.ndarray, delta: np.ndarray, rows: slice, keys: slice,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """What a tile adds to (dq, dk, dv). s: the scores before modification; p: P before dropout.

    The softmax gives dS = P * (dP - rowsum(P * dP)), and rowsum(P * dP) = rowsum(dO * O) = delta.
    """
    dp = drop(head, matmul(do, v.T), rows, keys)
    ds = p * (dp - delta[:, None])
    add_value_gradients(head, s, p, ds, rows, keys)
    if head.spec.score is not None:
        ds = ds * head.evaluate(expr.derivative(head.spec.score), rows, keys, s)
    ds = select(p != 0, ds) * head.scale
    return weighted_sum(ds, k), weighted_sum(ds.T, q), weighted_sum(drop(head, p, rows, keys).T, do)


def add_value_gradients(
    head: Head, s: np.ndarray, p: np.ndarray, ds: np.ndarray, rows: slice, keys: slice
) -> None:  # fmt: skip
    """What a tile adds to the gradients by the values that the score modification reads."""
    values = head.values or {}
    for read in head.spec.reads if values else ():
        index = tuple(head.evaluate(i, rows, keys) for i in read.indices)
        terms = select(p != 0, ds * head.evaluate(read.slope, rows, keys, s))
        np.add.at(values[read.name], index, terms if index else terms.sum())


def add_sink_gradient(head: Head, dsinks: np.ndarray | None, lse: np.ndarray, delta: np.ndarray) -> None:
    """P of the sink is exp(sink - lse), and its dP is 0, since it has no value."""
    if dsinks is not None and head.sink != -np.inf:
        dsinks[head.h] -= row_sum(np.exp(head.sink - lse) * delta)


# --- arithmetic in which masked elements have no effect ---------------------------------------------------------------


def select(condition: Any, x: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """x where the condition holds, else the number."""
    return np.where(condition, x, x.dtype.type(otherwise))


def finite(m: np.ndarray) -> np.ndarray:
    """m, with 0 for -inf: exp(s - m) of a row that has seen no key is then exp(-inf - 0) = 0, not NaN."""
    return select(m != -np.inf, m)


def row_max(s: np.ndarray) -> np.ndarray:
    return s.max(axis=1, initial=s.dtype.type(-np.inf))


def row_sum(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis; 16-bit dtypes are accumulated in float32 and rounded once."""
    return x.sum(axis=-1, dtype=x.dtype if x.dtype.itemsize >= 4 else np.float32).astype(x.dtype)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in their dtype, accumulated as in `row_sum`."""
    if a.dtype.itemsize >= 4:
        return a @ b
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)


def weighted_sum(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """w @ x, in which a weight of 0 skips a row of x whatever it holds: 0 * NaN and 0 * inf count as 0."""
    is_finite = np.isfinite(x).all(axis=1)
    if is_finite.all():
        return matmul(w, x)
    total = matmul(w[:, is_finite], x[is_finite])
    for j in np.flatnonzero(~is_finite):
        total += select(w[:, j : j + 1] != 0, w[:, j : j + 1] * x[j])
    return total


def drop(head: Head, x: np.ndarray, rows: slice, keys: slice) -> np.ndarray:
    """Dropout of P, or of dP: dropped elements become 0, kept ones are multiplied by 1 / (1 - dropout_p)."""
    if not head.spec.dropout:
        return x
    operands, row, key = head.operands, np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
    keep = dropout.keep(operands.seed, operands.dropout_p, head.b, head.h, row[:, None], key)
    return select(keep, x / x.dtype.type(1 - operands.dropout_p))


# --- slow memory: the arrays of one head, and its tiles ---------------------------------------------------------------


@dataclass
class Traffic:
    """Elements that move between slow and fast memory, by the name of the array."""

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.reads.total() + self.writes.total()


@dataclass
class Head:
    """One query head of one batch entry. memory: its slice of each array, rows first, keys up to kv_lengths."""

    spec: AttentionSpec
    operands: Operands
    dtype: np.dtype
    b: int
    h: int
    memory: dict[str, np.ndarray]
    traffic: Traffic
    values: dict[str, np.ndarray] | None = None  # gradients by values of the score modification

    def __post_init__(self) -> None:
        self.n_q, self.n_k = len(self.memory["q"]), len(self.memory["k"])
        self.everything = _, self.keys = slice(0, self.n_q), slice(0, self.n_k)
        self.kv_head = self.h // self.spec.group
        self.offset = int(self.operands.q_offset[self.b])
        self.scale = self.dtype.type(self.operands.scale)
        self.sink = self.dtype.type(self.operands.sinks[self.h] if self.spec.sinks else -np.inf)

    @cached_property
    def env(self) -> dict[str, Any]:
        """Values of a modification's symbols, scalars and arrays, except positions."""
        params = {name: x if isinstance(x, int) else self.dtype.type(x) for name, x in self.operands.params.items()}
        return {"b": self.b, "h": self.h, **params, **self.operands.arrays}

    def evaluate(self, graph: Expr, rows: slice, keys: slice, s: np.ndarray | None = None) -> np.ndarray:
        """A modification's graph on the pairs of a tile, (rows, keys), in the dtype of the computation."""
        row, k = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
        if not k.size:  # queries behind packed sequences are of no batch entry, whose arrays could be read
            return np.empty((row.size, 0), bool if graph.kind == "bool" else self.dtype)
        value = codegen.evaluate(graph, {**self.env, "s": s, "row": row, "q": row + self.offset, "k": k}, self.dtype)
        dtype: Any = {"bool": bool, "int": np.int64, "float": self.dtype}[graph.kind]
        return np.broadcast_to(np.asarray(value, dtype), (row.size, k.size))


def groups(
    spec: AttentionSpec, operands: Operands, dtype: Any, traffic: Traffic | None = None,
    values: dict[str, np.ndarray] | None = None, **more: np.ndarray | None,
) -> Iterator[list[Head]]:
    """For each key/value head of each batch entry, its query heads. more: further arrays in slow memory."""
    queries = {"q": operands.q, **{name: x for name, x in more.items() if name not in ("dk", "dv", "dsinks")}}
    keys = {"k": operands.k, "v": operands.v, **{name: x for name, x in more.items() if name in ("dk", "dv")}}
    traffic = traffic or Traffic()
    for b, kv_head in np.ndindex(len(operands.q_offset), operands.k.shape[1]):
        of_keys = {name: keys_of(operands, x, b, kv_head) for name, x in keys.items() if x is not None}
        if operands.k_pe is not None:
            of_keys["k"] = np.concatenate([of_keys["k"], keys_of(operands, operands.k_pe, b, kv_head)], axis=1)
        group = []
        for h in range(kv_head * spec.group, (kv_head + 1) * spec.group):
            of_rows = {name: rows_of(operands, x, b, h) for name, x in queries.items() if x is not None}
            group.append(Head(spec, operands, np.dtype(dtype), b, h, of_rows | of_keys, traffic, values))
        yield group


def rows_of(operands: Operands, x: np.ndarray, b: int, h: int) -> np.ndarray:
    """The rows of sequence b and head h, in an array of queries; packed sequences follow each other."""
    if operands.cu_seqlens is None:
        return x[b, h]
    begin, end = operands.cu_seqlens[0][b : b + 2]
    return x[0, h, begin:end]


def keys_of(operands: Operands, x: np.ndarray, b: int, kv_head: int) -> np.ndarray:
    """The rows of sequence b and head h, in an array of keys, up to kv_lengths; pages are gathered."""
    n = int(operands.kv_lengths[b])
    if operands.page_table is not None:
        page = x.shape[2]
        pages = operands.page_table[b, : -(-n // page)] if n else []
        return np.concatenate([x[:0, kv_head].reshape(0, x.shape[3]), *(x[i, kv_head] for i in pages)])[:n]
    if operands.cu_seqlens is None:
        return x[b, kv_head, :n]
    begin = operands.cu_seqlens[1][b]
    return x[0, kv_head, begin : begin + n]


def rows_of_keys(operands: Operands, x: np.ndarray, head: Head) -> np.ndarray:
    """The numbers of the keys of a head, in an array (B, Hq, Nk) that has one for each."""
    if operands.cu_seqlens is None or operands.page_table is not None:
        return x[head.b : head.b + 1, head.h, : head.n_k]
    begin = operands.cu_seqlens[1][head.b]
    return x[0, head.h, begin : begin + head.n_k]


def blocks(n: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover 0 .. n; the last may be shorter."""
    return (slice(first, min(first + size, n)) for first in range(0, n, size))


EMPTY, PARTIAL, FULL = range(3)


def tile_states(head: Head, block_q: int, block_k: int) -> np.ndarray:
    """(tiles of rows, tiles of keys): EMPTY where no pair is visible, FULL where all are, else PARTIAL.

    Bounds of the mask over each tile decide (`expr.classify`), without evaluating pairs. `standard` does not use it.
    """
    row0, k0 = np.arange(0, head.n_q, block_q)[:, None], np.arange(0, head.n_k, block_k)
    if head.spec.mask is None:
        return np.full((row0.size, k0.size), FULL)
    row1, k1 = np.minimum(row0 + block_q, head.n_q) - 1, np.minimum(k0 + block_k, head.n_k) - 1
    env = {**head.env, **tables(head.operands.arrays), "row0": row0, "row1": row1}
    env |= {"q0": row0 + head.offset, "q1": row1 + head.offset, "k0": k0, "k1": k1}
    empty, full = (codegen.evaluate(graph, env) for graph in head.spec.tile_state)
    return np.broadcast_to(np.where(full, FULL, np.where(empty, EMPTY, PARTIAL)), (row0.size, k0.size))


def _empty_results(spec: AttentionSpec, operands: Operands, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    shape = operands.q.shape[:3]
    lse_dtype = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return np.empty((*shape, spec.head_dim_v), dtype), np.empty(shape, lse_dtype)


def _zero_gradients(spec: AttentionSpec, operands: Operands, dtype: Any) -> Grads:
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (operands.q, operands.k, operands.v))
    return Grads(dq, dk, dv, np.zeros(operands.q.shape[1], dtype) if spec.sinks else None)

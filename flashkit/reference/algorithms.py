"""FlashAttention: the same results as the definition, with one tile of the scores at a time."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from ..spec import AttentionSpec, Operands
from .heads import (
    EMPTY,
    Grads,
    Traffic,
    blocks,
    empty_results,
    groups,
    load_tile,
    store_tile,
    tile_states,
    zero_gradients,
)
from .steps import (
    accumulate,
    add_sink_gradient,
    drop,
    epilogue,
    finite,
    initial,
    modify,
    online_softmax,
    quiet,
    recompute_p,
    row_delta,
    scores,
    tile_gradients,
)


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
    out, lse = empty_results(spec, operands, dtype or spec.lse_dtype)
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
    out, lse = empty_results(spec, operands, dtype or spec.lse_dtype)
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
    grads = zero_gradients(spec, operands, dtype or spec.lse_dtype)
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

"""Calls that ranks make together and that one process repeats: sizes that no number of ranks divides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import flashkit
from flashkit import mods

BATCH, HEADS, HEADS_KV, DIM, DIM_V = 2, 4, 2, 8, 12


class Case(NamedTuple):
    """Arguments of attention on all tokens. rows: names of options whose rows are spread like those of q."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    rows: tuple[str, ...] = ()


def tilted(s: Any, b: Any, h: Any, q: Any, k: Any, *, slopes: Any, of_rows: Any) -> Any:
    return s - slopes[h] * (q - k) + of_rows[b, flashkit.mods.expr.ROW]


def chunked(b: Any, h: Any, q: Any, k: Any, *, size: int) -> Any:
    return (q // size == k // size) | (k + h < 3)


def cases(rng: np.random.Generator) -> dict[str, Case]:
    """Every option that depends on positions, heads or batch entries."""
    n_q, n_k = 37, 45

    def tensors(n_q: int = n_q, n_k: int = n_k) -> tuple[Any, Any, Any]:
        return (
            rng.standard_normal((BATCH, HEADS, n_q, DIM)),
            rng.standard_normal((BATCH, HEADS_KV, n_k, DIM)),
            rng.standard_normal((BATCH, HEADS_KV, n_k, DIM_V)),
        )

    def case(rows: tuple[str, ...] = (), **options: Any) -> Case:
        return Case(*tensors(), options, rows)

    slopes = rng.random(HEADS)
    packed_q, packed_k = np.array([0, 5, 5, 22, 30]), np.array([0, 9, 12, 12, 40])
    t, t_k = 33, 41

    def packed(**options: Any) -> Case:
        q = rng.standard_normal((t, HEADS, DIM))
        k, v = rng.standard_normal((t_k, HEADS_KV, DIM)), rng.standard_normal((t_k, HEADS_KV, DIM_V))
        return Case(q, k, v, {"cu_seqlens": (packed_q, packed_k), **options})

    def swapped(made: Case) -> Case:
        q, k, v = (x.swapaxes(1, 2).copy() for x in made[:3])
        return Case(q, k, v, {**made.options, "layout": "bnhd"}, made.rows)

    block_mask = flashkit.BlockMask.from_mod(mods.sliding_window(7, 4), n_q, n_k, block_q=4, block_k=8, q_offset=3)
    one = case(causal=True)
    return {
        "plain": case(),
        "causal": case(causal=True),
        "causal from the left": case(causal=True, q_offset=0, scale=0.4),
        "offsets": case(causal=True, q_offset=np.array([-3, 20])),
        "window": case(window=(5, 2)),
        "left of a window": case(window=(3, None), q_offset=2),
        "window of one": case(causal=True, window=(0, 0)),
        "softcap": case(causal=True, softcap=2.0),
        "alibi": case(alibi_slopes=slopes),
        "alibi of entries": case(alibi_slopes=rng.random((BATCH, HEADS)), causal=True, softcap=3.0),
        "sinks": case(sinks=rng.standard_normal(HEADS), causal=True, q_offset=-10),
        "bias": case(("bias",), bias=rng.standard_normal((HEADS, n_q, n_k)), causal=True),
        "bias of keys": case(bias=rng.standard_normal((BATCH, 1, 1, n_k))),
        "bias of rows": case(("bias",), bias=rng.standard_normal((n_q, 1))),
        "mask": case(("mask",), mask=rng.random((BATCH, 1, n_q, n_k)) < 0.5),
        "mask of keys": case(mask=rng.random(n_k) < 0.5),
        "lengths": case(kv_lengths=np.array([30, 0])),
        "lengths of both": case(kv_lengths=np.array([40, 11]), q_lengths=np.array([37, 8]), causal=True),
        "lengths and a window": case(kv_lengths=np.array([45, 20]), q_offset=np.array([8, -2]), window=(6, 6)),
        "score_mod": case(
            score_mod=mods.score(tilted, slopes=slopes, of_rows=rng.standard_normal((BATCH, n_q))), causal=True
        ),
        "mask_mod": case(mask_mod=mods.mask(chunked, size=6), alibi_slopes=slopes),
        "block mask": case(block_mask=block_mask, q_offset=3),
        "dropout": case(dropout_p=0.4, seed=7, causal=True),
        "bnhd": swapped(case(causal=True, alibi_slopes=slopes, kv_lengths=np.array([44, 12]), q_offset=0)),
        "packed": packed(),
        "packed causal": packed(causal=True, sinks=rng.standard_normal(HEADS)),
        "packed window": packed(window=(4, 3), alibi_slopes=slopes),
        "packed mods": packed(
            score_mod=mods.score(tilted, slopes=slopes, of_rows=rng.standard_normal((4, 20))), causal=True,
            q_offset=np.array([2, 0, -4, 9]),
        ),
        "one head": Case(one.q[0, 0], one.k[0, 0], one.v[0, 0], {"causal": True}),
        "three axes": Case(one.q[0], one.k[0], one.v[0], {"causal": True, "window": (9, None)}),
        "few tokens": Case(*tensors(3, 2), {"causal": True}),
    }  # fmt: skip

"""Step 5, FlashAttention-2's loop order: tiles of queries outside, whose output stays in fast memory until it is
final.

m, l and out of a tile of queries never leave fast memory, and tiles of queries do not need each other: each can have a
core or a multiprocessor of its own. The division comes once, at the end. What is kept for the backward pass is one
number a row, the log of the sum of exp: lse = m + log l (Dao 2023, arXiv 2307.08691, Algorithm 1).
"""

from __future__ import annotations

import numpy as np

from examples.ladder.memory import FAST, Array, SlowMemory, show
from examples.ladder.step3_tiles import update
from examples.ladder.step4_flash1 import attention as flash1


def tile_sizes(d: int, fast: int = FAST) -> tuple[int, int]:
    """Rows of queries and of keys."""
    tile_q = fast // (4 * d)
    return tile_q, min(tile_q, d)


def forward(q: Array, k: Array, v: Array, memory: SlowMemory) -> tuple[Array, Array]:
    """out and lse."""
    n, d = q.shape
    tile_q, tile_k = tile_sizes(d)
    out, lse = np.empty_like(q), np.empty(n, q.dtype)
    for i in range(0, n, tile_q):
        queries = memory.load(q[i : i + tile_q])
        rows = len(queries)
        m, l, total = np.full(rows, -np.inf, q.dtype), np.zeros(rows, q.dtype), np.zeros_like(queries)
        for j in range(0, n, tile_k):
            m, l, total = update(queries, memory.load(k[j : j + tile_k]), memory.load(v[j : j + tile_k]), m, l, total)
        memory.store(out[i : i + rows], total / l[:, None])
        memory.store(lse[i : i + rows], m + np.log(l))
    return out, lse


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    return forward(q, k, v, memory)[0]


def main() -> None:
    show("5 FlashAttention-2", attention, flash1)


if __name__ == "__main__":
    main()

"""Step 7, block-sparse: tiles that a mask hides whole are neither loaded nor computed.

A mask has three kinds of tiles: hidden, which are left out; whole, which need no mask; and those on its border, where
pairs are hidden one by one. Under a causal mask (a query sees itself and earlier keys) nearly half of the tiles are
left out, and bytes fall with them (Dao et al. 2022, section 3.3). The step before is step 1 with scores set to -inf.
"""

from __future__ import annotations

import numpy as np

from examples.ladder.memory import Array, SlowMemory, show
from examples.ladder.step3_tiles import update
from examples.ladder.step5_flash2 import tile_sizes


def masked_standard(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    n, d = q.shape
    s = memory.load(q) @ memory.load(k).T / d**0.5
    s[np.arange(n)[:, None] < np.arange(n)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ memory.load(v)


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    """Causal attention."""
    n, d = q.shape
    tile_q, tile_k = tile_sizes(d)
    out = np.empty_like(q)
    for i in range(0, n, tile_q):
        queries = memory.load(q[i : i + tile_q])
        rows = len(queries)
        m, l, total = np.full(rows, -np.inf, q.dtype), np.zeros(rows, q.dtype), np.zeros_like(queries)
        for j in range(0, n, tile_k):
            first, last = (i, i + rows - 1), (j, min(j + tile_k, n) - 1)
            if first[1] < last[0]:  # the last query is before the first key: hidden
                continue
            hidden = None
            if first[0] < last[1]:  # the border
                hidden = np.arange(i, i + rows)[:, None] < np.arange(j, last[1] + 1)
            m, l, total = update(
                queries, memory.load(k[j : j + tile_k]), memory.load(v[j : j + tile_k]), m, l, total, hidden
            )
        memory.store(out[i : i + rows], total / l[:, None])
    return out


def main() -> None:
    show("7 block-sparse, causal", attention, masked_standard)


if __name__ == "__main__":
    main()

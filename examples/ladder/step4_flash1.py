"""Step 4, FlashAttention's first loop order: tiles of keys outside, each loaded once, and as large as fast memory
allows.

Fast memory holds M numbers. A tile of M / 4 D keys leaves room for its values, and for queries and output. The output
of all queries passes through memory for each tile of keys: that is the traffic, Theta(N^2 D^2 / M) of Theorem 2 in Dao
et al. 2022 (arXiv 2205.14135, Algorithm 1). Twice the fast memory, half the bytes.
"""

from __future__ import annotations

import numpy as np

from examples.ladder.memory import FAST, Array, SlowMemory, show
from examples.ladder.step3_tiles import attention as tiled
from examples.ladder.step3_tiles import update


def attention(q: Array, k: Array, v: Array, memory: SlowMemory, fast: int = FAST) -> Array:
    n, d = q.shape
    tile_k = fast // (4 * d)
    tile_q = min(tile_k, d)
    out, m, l = np.zeros_like(q), np.full(n, -np.inf, q.dtype), np.zeros(n, q.dtype)
    for j in range(0, n, tile_k):
        keys, values = memory.load(k[j : j + tile_k]), memory.load(v[j : j + tile_k])
        for i in range(0, n, tile_q):
            rows = slice(i, i + tile_q)
            state = memory.load(m[rows]), memory.load(l[rows]), memory.load(out[rows])
            for to, x in zip((m, l, out), update(memory.load(q[rows]), keys, values, *state), strict=True):
                memory.store(to[rows], x)
    memory.store(out, memory.load(out) / memory.load(l)[:, None])
    return out


def main() -> None:
    show("4 FlashAttention-1", attention, tiled)
    for fast in (FAST // 2, FAST, 2 * FAST):
        memory = SlowMemory()
        attention(*np.zeros((3, 1024, 64), np.float32), memory, fast)
        print(f"    fast memory of {fast // 1024:3} K numbers: {memory.moved / 1e6:6.2f} MB moved")


if __name__ == "__main__":
    main()

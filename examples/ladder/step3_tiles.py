"""Step 3, tiles: many keys at a time, for many queries at a time.

The correction of step 2 works for a tile of keys as for one key. Products of tiles are matrix products, which machines
are made for, and whatever is loaded is used as often as the tile has rows. q, k, v and out move once for each pair of
tiles.
"""

from __future__ import annotations

import numpy as np

from examples.ladder.memory import Array, SlowMemory, show
from examples.ladder.step2_one_pass import attention as one_pass

ROWS = KEYS = 64  # of a tile


def update(
    q: Array, k: Array, v: Array, m: Array, l: Array, out: Array, hidden: Array | None = None
) -> tuple[Array, Array, Array]:
    """Maximum m, sum l and output of a tile of queries with a further tile of keys. hidden: pairs that do not count."""
    s = q @ k.T / q.shape[1] ** 0.5
    if hidden is not None:
        s[hidden] = -np.inf
    m_new = np.maximum(m, s.max(1))
    correction, p = np.exp(m - m_new), np.exp(s - m_new[:, None])
    return m_new, correction * l + p.sum(1), correction[:, None] * out + p @ v


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    n = len(q)
    out, m, l = np.zeros_like(q), np.full(n, -np.inf, q.dtype), np.zeros(n, q.dtype)
    for i in range(0, n, ROWS):
        rows = slice(i, i + ROWS)
        for j in range(0, n, KEYS):
            keys = slice(j, j + KEYS)
            load = memory.load
            m[rows], l[rows], found = update(
                load(q[rows]), load(k[keys]), load(v[keys]), m[rows], l[rows], load(out[rows])
            )
            memory.store(out[rows], found)
        memory.store(out[rows], memory.load(out[rows]) / l[rows, None])
    return out


def main() -> None:
    show("3 tiles", attention, one_pass)


if __name__ == "__main__":
    main()

"""Step 8, all cores: step 5 compiled by Numba, with a tile of queries for each turn of a parallel loop.

Tiles of queries do not need each other, so any thread takes the next. Scores of a tile are a local array of the
thread, in its core's cache. Loops over a tile's keys inside have no branch, and LLVM turns them into vector
instructions. flashkit's CPU kernels are this loop, with micro-kernels that keep sums in registers in place of the
inner loops.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from examples.ladder.memory import Array, SlowMemory, show
from examples.ladder.step5_flash2 import attention as flash2

ROWS, KEYS = 128, 64  # of a tile


@njit(parallel=True, fastmath={"contract", "reassoc", "nsz"}, boundscheck=False)
def compiled(q, kt, v, out):  # type: ignore[no-untyped-def]
    """kt: k transposed, (D, N), so that the innermost loops run along memory."""
    n, d = q.shape
    scale = np.float32(1 / math.sqrt(d))
    for tile in prange(-(-n // ROWS)):
        begin, end = tile * ROWS, min(tile * ROWS + ROWS, n)
        s, total = np.empty(KEYS, np.float32), np.zeros((ROWS, d), np.float32)
        m, l = np.full(ROWS, np.float32(-np.inf)), np.zeros(ROWS, np.float32)
        for j in range(0, n, KEYS):
            keys = min(KEYS, n - j)
            for i in range(end - begin):
                s[:keys] = 0
                for c in range(d):
                    x = q[begin + i, c] * scale
                    for key in range(keys):
                        s[key] += x * kt[c, j + key]
                top = m[i]
                for key in range(keys):
                    top = max(top, s[key])
                correction = math.exp(m[i] - top)
                m[i] = top
                l[i] *= correction
                for c in range(d):
                    total[i, c] *= correction
                for key in range(keys):
                    p = math.exp(s[key] - top)
                    l[i] += p
                    for c in range(d):
                        total[i, c] += p * v[j + key, c]
        for i in range(end - begin):
            for c in range(d):
                out[begin + i, c] = total[i, c] / l[i]


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    out, tiles = np.empty_like(q), -(-len(q) // ROWS)
    compiled(q, np.ascontiguousarray(k.T), v, out)
    memory.moved += q.nbytes + out.nbytes + tiles * (k.nbytes + v.nbytes)
    return out


def main() -> None:
    show("8 all cores", attention, flash2)


if __name__ == "__main__":
    main()

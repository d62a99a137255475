"""Step 9, a GPU: the loop of step 5 with a block of threads for each tile of queries, in Numba CUDA.

Fast memory is the shared memory of a multiprocessor: the block loads a tile of keys and values there once, and all its
threads read them. A thread has one query: its row of q, its maximum, its sum and its output are in registers. Blocks
do not need each other. flashkit's simt kernels are this loop with tiles of rows and columns for each thread.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, float32

from examples.ladder.memory import Array, D, N, SlowMemory, show
from examples.ladder.step5_flash2 import attention as flash2

ROWS, KEYS = 64, 32  # of a tile; a thread has a row


@cuda.jit(fastmath=True)
def kernel(q, k, v, out):  # type: ignore[no-untyped-def]
    n, row = q.shape[0], cuda.blockIdx.x * ROWS + cuda.threadIdx.x
    tile_k = cuda.shared.array((KEYS, D), float32)
    tile_v = cuda.shared.array((KEYS, D), float32)
    query = cuda.local.array(D, float32)
    total = cuda.local.array(D, float32)
    for c in range(D):
        query[c] = q[min(row, n - 1), c] * float32(1 / math.sqrt(D))
        total[c] = 0
    m, l = float32(-np.inf), float32(0)
    for j in range(0, n, KEYS):
        cuda.syncthreads()  # all have used the tile before
        for x in range(cuda.threadIdx.x, KEYS * D, ROWS):
            key = j + x // D
            tile_k[x // D, x % D] = k[key, x % D] if key < n else float32(0)
            tile_v[x // D, x % D] = v[key, x % D] if key < n else float32(0)
        cuda.syncthreads()
        for key in range(min(KEYS, n - j)):
            s = float32(0)
            for c in range(D):
                s += query[c] * tile_k[key, c]
            m_new = max(m, s)
            correction, p = math.exp(m - m_new), math.exp(s - m_new)
            m, l = m_new, l * correction + p
            for c in range(D):
                total[c] = total[c] * correction + p * tile_v[key, c]
    if row < n:
        for c in range(D):
            out[row, c] = total[c] / l


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    blocks, out = -(-len(q) // ROWS), cuda.device_array_like(q)
    kernel[blocks, ROWS](*(cuda.to_device(x) for x in (q, k, v)), out)
    memory.moved += q.nbytes + out.nbytes + blocks * (k.nbytes + v.nbytes)
    return out.copy_to_host()


def main() -> None:
    if not cuda.is_available():
        print(f"9 a GPU: none here ({N} tokens wait)")
    else:
        show("9 a GPU, one query a thread", attention, flash2)


if __name__ == "__main__":
    main()

"""Step 1, standard attention: the formula, with the matrix of scores in slow memory.

    S = q k^T / sqrt(D)        P = softmax of each row of S        out = P v

Every line reads and writes N^2 numbers. This is Algorithm 0 of Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

import numpy as np

from examples.ladder.memory import Array, SlowMemory, show


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    n, d = q.shape
    scores, weights, out = np.empty((n, n), q.dtype), np.empty((n, n), q.dtype), np.empty_like(q)
    memory.store(scores, memory.load(q) @ memory.load(k).T / d**0.5)
    s = memory.load(scores)
    p = np.exp(s - s.max(1, keepdims=True))  # less the maximum, so that exp does not overflow
    memory.store(weights, p / p.sum(1, keepdims=True))
    memory.store(out, memory.load(weights) @ memory.load(v))
    return out


def main() -> None:
    show("1 standard attention", attention, None)


if __name__ == "__main__":
    main()

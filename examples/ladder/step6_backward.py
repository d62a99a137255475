"""Step 6, the backward pass: the weights are computed again, a tile at a time, from the scores and the lse.

    P = exp(S - lse)      dv = P^T dout      dP = dout v^T      dS = P (dP - delta)      dq = dS k      dk = dS^T q

delta of a row is the sum of P dP, which is that of dout out and needs no P. A tile of keys stays in fast memory with
its dk and dv, which are sums over queries; dq passes through memory (Dao 2023, Algorithm 2). The step before, for
gradients, is the same with whole matrices.
"""

from __future__ import annotations

import numpy as np

from examples.ladder.memory import Array, SlowMemory, problem, show
from examples.ladder.step5_flash2 import forward, tile_sizes

Gradients = tuple[Array, Array, Array]


def standard_backward(q: Array, k: Array, v: Array, dout: Array, memory: SlowMemory) -> Gradients:
    """dq, dk, dv with all weights in memory."""
    n, d = q.shape
    weights, dscores = np.empty((n, n), q.dtype), np.empty((n, n), q.dtype)
    s = memory.load(q) @ memory.load(k).T / d**0.5
    p = np.exp(s - s.max(1, keepdims=True))
    memory.store(weights, p / p.sum(1, keepdims=True))
    dp = memory.load(dout) @ memory.load(v).T
    p = memory.load(weights)
    memory.store(dscores, p * (dp - (p * dp).sum(1, keepdims=True)) / d**0.5)
    gradients = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    memory.store(gradients[0], memory.load(dscores) @ k)
    memory.store(gradients[1], memory.load(dscores).T @ q)
    memory.store(gradients[2], memory.load(weights).T @ dout)
    return gradients


def backward(q: Array, k: Array, v: Array, dout: Array, memory: SlowMemory) -> Gradients:
    """dq, dk, dv in memory linear in N."""
    (n, d), (out, lse) = q.shape, forward(q, k, v, SlowMemory())
    tile_k, tile_q = tile_sizes(d)
    load, delta = memory.load, (memory.load(dout) * memory.load(out)).sum(1)
    dq, dk, dv = np.zeros_like(q), np.empty_like(k), np.empty_like(v)
    for j in range(0, n, tile_k):
        keys = slice(j, j + tile_k)
        kj, vj = load(k[keys]), load(v[keys])
        dkj, dvj = np.zeros_like(kj), np.zeros_like(vj)
        for i in range(0, n, tile_q):
            rows = slice(i, i + tile_q)
            qi, douti = load(q[rows]), load(dout[rows])
            p = np.exp(qi @ kj.T / d**0.5 - load(lse[rows])[:, None])
            ds = p * (douti @ vj.T - load(delta[rows])[:, None]) / d**0.5
            memory.store(dq[rows], load(dq[rows]) + ds @ kj)
            dkj += ds.T @ qi
            dvj += p.T @ douti
        memory.store(dk[keys], dkj)
        memory.store(dv[keys], dvj)
    return dq, dk, dv


def main() -> None:
    q, k, v = problem()
    dout = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    show("  standard backward pass", standard_backward, None, [q, k, v, dout])
    show("6 recomputing backward pass", backward, standard_backward, [q, k, v, dout])


if __name__ == "__main__":
    main()

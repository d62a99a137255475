"""Step 2, the softmax in one pass: a row's maximum and sum are known so far, and corrected when the maximum grows.

Standard softmax reads a row three times: for its maximum, for its sum, to divide. Here keys come one after the other.
With m the maximum and l the sum of exp(s - m) so far, a new score s gives

    m' = max(m, s)        l' = exp(m - m') l + exp(s - m')

(Milakov and Gimelshein 2018, arXiv 1805.02867). The output is a sum too, so it is corrected alike and no weight is
stored: a row of q sees k and v once. All rows do that here, and their out passes through memory for every key.
"""

from __future__ import annotations

import numpy as np

from examples.ladder.memory import Array, SlowMemory, show
from examples.ladder.step1_standard import attention as standard


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    n, d = q.shape
    out, m, l = np.zeros_like(q), np.full(n, -np.inf, q.dtype), np.zeros(n, q.dtype)
    for key, value in zip(k, v, strict=True):
        s = memory.load(q) @ memory.load(key) / d**0.5  # (N,): the scores of one key
        m_new = np.maximum(m, s)
        correction, p = np.exp(m - m_new), np.exp(s - m_new)
        l = correction * l + p
        memory.store(out, memory.load(out) * correction[:, None] + p[:, None] * memory.load(value))
        m = m_new
    memory.store(out, memory.load(out) / l[:, None])
    return out


def main() -> None:
    show("2 softmax in one pass", attention, standard)


if __name__ == "__main__":
    main()

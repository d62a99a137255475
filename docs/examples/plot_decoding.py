"""
Decoding with a KV cache
========================

A language model makes one token a step, and each step reads the keys and values of all tokens before. A
:class:`flashkit.KVCache` holds them in pages, and a step takes time in proportion to them: without it the whole
sequence would be computed again.
"""

from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np

import flashkit

rng = np.random.default_rng(0)
heads, kv_heads, dim = 16, 4, 64
cache = flashkit.KVCache(1, kv_heads, dim, pages=72)
q, k, v = (rng.standard_normal((1, h, 1, dim), dtype=np.float32) for h in (heads, kv_heads, kv_heads))

# %%
# The median of 30 steps behind prompts of these lengths.

lengths, steps = [256, 512, 1024, 2048, 4096], []
for n in lengths:
    cache.free(0)
    prompt = rng.standard_normal((2, 1, kv_heads, n, dim), dtype=np.float32)
    cache.append(*prompt)
    seconds = []
    for _ in range(30):
        start = perf_counter()
        cache.append(k, v)
        cache.attend(q, causal=True)
        seconds.append(perf_counter() - start)
    steps.append(np.median(seconds) * 1e6)

# %%
# Computing every token of the sequence again takes longer, and ever longer.

again = []
for n in lengths:
    x, y, z = (rng.standard_normal((1, h, n, dim), dtype=np.float32) for h in (heads, kv_heads, kv_heads))
    flashkit.attention(x, y, z, causal=True)
    start = perf_counter()
    flashkit.attention(x, y, z, causal=True)
    again.append((perf_counter() - start) * 1e6)

fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.loglog(lengths, again, "o-", label="all tokens again")
ax.loglog(lengths, steps, "o-", label="a step with KVCache")
ax.set(xlabel="tokens before", ylabel="microseconds")
ax.legend()
plt.show()

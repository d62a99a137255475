"""
Time and memory by length
=========================

Attention by the formula stores a score for every pair, so its memory grows with the square of the number of tokens.
flashkit computes the same result tile by tile; its memory grows linearly.
"""

import tracemalloc
from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np

import flashkit


def formula(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def peak_memory(function, *arrays):
    """Bytes that NumPy allocates at once during a call."""
    tracemalloc.start()
    function(*arrays)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def best_time(function, *arrays):
    times = []
    for _ in range(3):
        start = perf_counter()
        function(*arrays)
        times.append(perf_counter() - start)
    return min(times)


lengths = [128, 256, 512, 1024, 2048]
rng = np.random.default_rng(0)
flashkit.attention(*rng.standard_normal((3, 1, 8, 64), dtype=np.float32))  # compiles

seconds, bytes_ = {"formula": [], "flashkit": []}, {"formula": [], "flashkit": []}
for n in lengths:
    q, k, v = rng.standard_normal((3, 2, n, 64), dtype=np.float32)
    for name, function in (("formula", formula), ("flashkit", flashkit.attention)):
        seconds[name].append(best_time(function, q, k, v))
        bytes_[name].append(peak_memory(function, q, k, v))

# %%
# Both axes are logarithmic: a steeper line means a higher power of the number of tokens.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name in seconds:
    left.plot(lengths, [1e3 * s for s in seconds[name]], "o-", label=name)
    right.plot(lengths, [b / 2**20 for b in bytes_[name]], "o-", label=name)
left.set(title="time", ylabel="ms")
right.set(title="peak memory", ylabel="MiB")
for ax in (left, right):
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("tokens")
left.legend()
plt.show()

# %%
# ``tracemalloc`` counts NumPy's arrays. flashkit's scratch memory, a fixed amount per thread, comes on top.

for n, plain, ours in zip(lengths, bytes_["formula"], bytes_["flashkit"]):
    print(f"{n:5} tokens: {plain / 2**20:7.1f} MiB, {ours / 2**20:5.1f} MiB")

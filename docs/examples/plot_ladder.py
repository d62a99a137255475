"""
FlashAttention in steps
=======================

The steps from standard attention to a parallel kernel, one short file each in
`examples/ladder <https://flashkit-attention.example/source>`_. Each checks itself against the step before and counts
the bytes that move between slow and fast memory: ``python -m examples.ladder``.
"""

import importlib
from time import perf_counter

import matplotlib.pyplot as plt

from examples.ladder.memory import SlowMemory, problem

steps = {
    "standard": "step1_standard",
    "one pass": "step2_one_pass",
    "tiles": "step3_tiles",
    "FlashAttention-1": "step4_flash1",
    "FlashAttention-2": "step5_flash2",
    "block-sparse, causal": "step7_block_sparse",
    "all cores": "step8_numba",
}
arrays, milliseconds, megabytes = problem(), [], []
for module in steps.values():
    attention, memory = importlib.import_module(f"examples.ladder.{module}").attention, SlowMemory()
    attention(*arrays, memory)  # compiles, in the last step
    start = perf_counter()
    attention(*arrays, SlowMemory())
    milliseconds.append(1e3 * (perf_counter() - start))
    megabytes.append(memory.moved / 1e6)

# %%
# Bytes fall step by step. Time falls with them only where moving is what takes the time: NumPy's fast memory is the
# cache, which loads without being told.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for axis, values, title in zip(axes, (megabytes, milliseconds), ("MB moved", "ms"), strict=True):
    bars = axis.barh(list(steps), values, color="#4c72b0")
    axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.set(title=title, xscale="log", xlim=(None, 4 * max(values)))
axes[0].invert_yaxis()
plt.show()

# %%
# The larger fast memory is, the fewer bytes: FlashAttention-1 loads each tile of keys once, and passes over all queries
# for each of them. Twice the memory, half the passes.

flash1 = importlib.import_module("examples.ladder.step4_flash1").attention
sizes, moved = [2**i for i in range(13, 19)], []
for numbers in sizes:
    memory = SlowMemory()
    flash1(*arrays, memory, numbers)
    moved.append(memory.moved / 1e6)
figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
axis.loglog(sizes, moved, "o-", base=2)
axis.set(xlabel="numbers that fast memory holds", ylabel="MB moved")
axis.grid(alpha=0.3)
plt.show()

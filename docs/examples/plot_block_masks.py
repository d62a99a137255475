"""
Block-sparse patterns
=====================

A :class:`flashkit.BlockMask` says which tiles of the score matrix exist. The pictures show the patterns of the
literature for 1,024 queries and keys in tiles of 32: white tiles are EMPTY and skipped, dark ones are FULL and need no
masking, and the others are PARTIAL.
"""

from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

import flashkit
from flashkit import mods

n, block = 1024, 32
documents = mods.document(np.repeat([0, 1, 2, 3], [400, 100, 324, 200]))
BlockMask = flashkit.BlockMask
masks = {
    "causal": BlockMask.from_mod(mods.causal(), n, n, block, block),
    "window of 200": BlockMask.from_mod(mods.sliding_window(200), n, n, block, block),
    "prefix LM of 300": BlockMask.from_mod(mods.prefix_lm(300), n, n, block, block),
    "documents, causal": BlockMask.from_mod(documents & mods.causal(), n, n, block, block),
    "strided": BlockMask.strided(n, n, stride_blocks=6, block=block),
    "fixed": BlockMask.fixed(n, n, stride_blocks=6, block=block),
    "butterfly": BlockMask.butterfly(n, n, block=block),
    "Big Bird": BlockMask.bigbird(n, n, block=block),
    "Longformer": BlockMask.longformer(n, n, 128, global_tokens=[0, 500], block=block),
}

colours = ListedColormap(["white", "#9ecae1", "#08519c"])
figure, axes = plt.subplots(3, 3, figsize=(8, 8.6), layout="constrained")
for ax, (name, mask) in zip(axes.flat, masks.items()):
    ax.imshow(mask.to_dense()[0, 0], cmap=colours, vmin=0, vmax=2, interpolation="nearest")
    ax.set(title=f"{name}: {mask.density:.0%}", xticks=[], yticks=[])
figure.supxlabel("keys")
figure.supylabel("queries")
plt.show()

# %%
# The percentage is the share of tiles that are left. Fewer tiles take less time:

x = np.random.default_rng(0).standard_normal((8, n, 64), dtype=np.float32)
for name, mask in {"all pairs": None, **masks}.items():
    flashkit.attention(x, x, x, block_mask=mask)  # compiles on first use
    start = perf_counter()
    for _ in range(3):
        flashkit.attention(x, x, x, block_mask=mask)
    print(f"{name:22} {1e3 * (perf_counter() - start) / 3:6.2f} ms")

"""
Attention weights
=================

flashkit never stores the weights of the softmax. To look at them, :func:`flashkit.weights` computes those of the rows
and heads asked for. The pictures show how modifications change them.
"""

import matplotlib.pyplot as plt
import numpy as np

import flashkit
from flashkit import mods

n, dim = 48, 32
rng = np.random.default_rng(0)
smooth = np.cumsum(rng.standard_normal((n, dim)), axis=0)  # neighbours are alike
q = k = 4 * smooth / np.linalg.norm(smooth, axis=1, keepdims=True)


def weights(**options):
    return flashkit.weights(q, k, **options)


def relative(s, b, h, q, k, *, table):
    """A bias looked up by distance."""
    return s + table[flashkit.clip(q - k, 0, 15)]


pictures = {
    "plain": weights(),
    "causal": weights(causal=True),
    "causal, window of 8": weights(causal=True, window=(8, 0)),
    "causal, ALiBi": weights(causal=True, alibi_slopes=np.array([0.25])),
    "causal, soft-capped at 1": weights(causal=True, softcap=1.0),
    "causal, a bias every 4 tokens": weights(
        causal=True, score_mod=mods.score(relative, table=2.0 * (np.arange(16) % 4 == 0))
    ),
}
figure, axes = plt.subplots(2, 3, figsize=(8.4, 6), layout="constrained")
for ax, (name, picture) in zip(axes.flat, pictures.items()):
    ax.imshow(picture, cmap="magma", vmin=0, vmax=0.3)
    ax.set(title=name, xticks=[], yticks=[])
figure.supxlabel("keys")
figure.supylabel("queries")
plt.show()

# %%
# Attention sinks take a share of each row, so its weights no longer sum to one:

sums = weights(causal=True, sinks=np.array([3.0])).sum(-1)
plt.figure(figsize=(6, 2.6), layout="constrained")
plt.plot(sums)
plt.xlabel("query")
plt.ylabel("sum of weights")
plt.ylim(0, 1)
plt.show()

# %%
# :func:`flashkit.plot_weights` draws the heads of one batch entry:

heads = np.stack([q, np.roll(q, 8, axis=0)])
flashkit.plot_weights(heads, np.stack([k, k]), rows=slice(16, 48), causal=True)
plt.show()

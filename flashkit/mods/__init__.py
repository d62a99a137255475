"""Masks and score modifications: `flashkit.mods.causal()`, and how to make one of a function (library.py).

The modules beside it hold what all of them are made of: expr.py the expression graphs, codegen.py their code, ranges.py
bounds of arrays, block_mask.py, patterns.py and tile_lists.py block-sparse masks, dropout.py the random generator.
"""

from .library import (
    Mod,
    ModKind,
    after,
    alibi,
    bias,
    causal,
    combine,
    dilated,
    document,
    mask,
    prefix_lm,
    score,
    sliding_window,
    softcap,
    trace,
    visible,
)

__all__ = [
    "Mod", "ModKind", "after", "alibi", "bias", "causal", "combine", "dilated", "document", "mask", "prefix_lm",
    "score", "sliding_window", "softcap", "trace", "visible",
]  # fmt: skip

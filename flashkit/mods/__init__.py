"""Masks and score modifications: the ready-made ones, such as `flashkit.mods.causal()`, and `mask` and `score`, which
make one of a function.

library.py has the ready-made ones, mod.py `Mod`, tracing.py the trace of a function. What these stand on: expr/ the
expression graphs, codegen.py their code, ranges.py bounds of arrays. Block-sparse masks: block_mask.py, patterns.py
and tile_lists.py. dropout.py is the random generator.
"""

from . import library
from .library import *
from .mod import Mod, after, combine, mask, score, trace
from .tracing import ModKind

__all__ = ["Mod", "ModKind", "after", "combine", "mask", "score", "trace"]
__all__ += library.__all__


def __dir__() -> list[str]:
    return sorted(__all__)

"""Chunks of queries and keys, on which Dask's and the distributed functions call attention: modifications in positions
of the whole, and which chunks see nothing of each other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from .. import mods
from ..mods import Mod, codegen, expr
from ..mods.expr import Expr
from ..mods.ranges import tables


def moved(mod: Mod, places: Mapping[Expr, tuple[Expr, Any, int]]) -> Mod:
    """The modification of the whole as a chunk sees it, which counts its own positions from 0.

    places: a symbol as (symbol of the chunk, first, step): it stands for first + step * that symbol. first: an integer,
    or integers (B,), one for each batch entry. They become values given at run time, so that chunks share their
    kernels.
    """
    params, values, new = dict(mod.params), dict(mod.arrays), {}
    for symbol, (own, first, step) in places.items():
        if not expr.uses(mod.expr, symbol):
            continue
        name = f"first_{symbol.value}"
        while name in params or name in values:
            name += "_"
        if np.ndim(first):
            values[name], shift = first, expr.Array(name, 1, "int")[expr.B]
        else:
            params[name], shift = int(first), expr.param(name, "int")
        new[id(symbol)] = own * step + shift
    graph = expr.substitute([mod.expr], lambda node: new.get(id(node), node))[0]
    return Mod(mod.kind, graph, params, values)


def joined(masks: Sequence[Mod | None]) -> Mod | None:
    """One mask of those that there are."""
    present = [mod for mod in masks if mod is not None]
    return mods.combine(lambda *graphs: reduce(operator.and_, graphs), "mask", *present) if present else None


def hiding(seen: Mod) -> Callable[..., Any]:
    """A function of positions in the whole that says whether the mask hides all pairs of a chunk."""
    values = {**seen.params, **tables(seen.arrays)}
    empty = expr.classify(seen.expr, expr.int32_arrays({name: a.dtype for name, a in seen.arrays.items()}))[0]
    return lambda **corners: codegen.evaluate(empty, {**corners, **values})

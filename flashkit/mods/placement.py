"""A mask modification placed on n_q x n_k scores: positions as rows, numbers of batch entries and heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..numeric import integer
from . import expr
from .expr import Expr
from .mod import Mod
from .tracing import as_array


def placed(mod: Mod, offset: Any) -> Mod:
    """The mod with the position q replaced by row + offset. The offset is a value given at run time."""
    offset = as_array("q_offset", offset)
    if offset.dtype.kind not in "iu" or offset.ndim > 1:
        raise ValueError(
            f"q_offset: expected an integer or integers of shape (batch,), got {offset.dtype} of shape {offset.shape}"
        )
    if offset.size and max(-int(offset.min()), int(offset.max())) > expr.MAX_POSITION:
        raise ValueError(f"q_offset: expected positions within 2^48, got {offset.min()} to {offset.max()}")
    if not expr.uses(mod.expr, expr.Q):
        return mod
    name = "q_offset"
    while name in mod.params or name in mod.arrays:
        name += "_"
    if offset.ndim:
        small = offset.astype(np.int32)  # a sum with a 32-bit array cannot overflow, see expr.int32_arrays
        offset = small if np.array_equal(small, offset) else offset
        shift, params, arrays = expr.Array(name, 1, "int")[expr.B], {}, {name: offset}
    else:
        shift, params, arrays = expr.param(name, "int"), {name: int(offset)}, {}
    graph = expr.substitute([mod.expr], lambda node: expr.ROW + shift if node is expr.Q else node)[0]
    return Mod("mask", graph, {**mod.params, **params}, {**mod.arrays, **arrays})


def entries(mod: Mod, name: str, symbol: Expr, wanted: int | None) -> tuple[int, Mod]:
    """The number of batch entries or heads, and the mod. With 1 the mod no longer depends on the symbol."""
    if not expr.uses(mod.expr, symbol):
        return 1, mod
    lengths = axis_lengths(mod, symbol)
    if wanted is None and not lengths:
        raise ValueError(f"the mask depends on {symbol.value}; say how many there are: {name}=")
    count = min(lengths.values()) if wanted is None else integer(name, wanted, 1)
    for array, n in lengths.items():
        if n < count or (wanted is None and n != count):
            raise ValueError(f"array {array}: expected {name} = {count} entries along {symbol.value}, got {n}")
    if count == 1:
        graph = expr.substitute([mod.expr], lambda node: expr.const(0) if node is symbol else node)[0]
        mod = Mod("mask", graph, mod.params, mod.arrays)
    return count, mod


def axis_lengths(mod: Mod, symbol: Expr) -> dict[str, int]:
    """The length of each axis that the mod indexes by the symbol alone, by the name of the array."""
    loads = (node for node in expr.walk([mod.expr]) if node.op == "load")
    indexed = ((node.value, axis) for node in loads for axis, index in enumerate(node.args) if index is symbol)
    return {name: mod.arrays[name].shape[axis] for name, axis in indexed}

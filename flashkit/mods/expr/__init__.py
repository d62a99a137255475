"""Expression graphs: a score or mask modification, traced once, from which everything else is derived.

A modification is an ordinary Python function. Called with symbols instead of numbers it returns a small immutable
graph. The code in three languages (codegen.py), the derivative by the score, the bounds over a tile and the cache key
all come from that graph.

graph.py: nodes, and how graphs are read and rebuilt. functions.py: what a modification may call. operations.py: the
table of operations, and the derivative. interval_rules.py and intervals.py: bounds, and the class of a tile.
"""

from .functions import (
    clip,
    cos,
    erf,
    exp,
    exp2,
    floor,
    log,
    log2,
    maximum,
    minimum,
    sigmoid,
    sign,
    sin,
    sqrt,
    tanh,
    to_int,
    where,
)
from .graph import (
    FALSE,
    INT64,
    K0,
    K1,
    MAX_PARAM,
    MAX_POSITION,
    Q0,
    Q1,
    ROW,
    ROW0,
    ROW1,
    TRUE,
    Array,
    B,
    Expr,
    H,
    K,
    Kind,
    Q,
    S,
    as_expr,
    const,
    is_const,
    is_name,
    key,
    param,
    rename,
    substitute,
    symbol,
    to_float,
    uses,
    walk,
    wrapped,
)
from .intervals import bounds, classify, int32_arrays, reaches
from .operations import OPS, Op, derivative

__all__ = [
    "FALSE", "INT64", "K0", "K1", "MAX_PARAM", "MAX_POSITION", "OPS", "Q0", "Q1", "ROW", "ROW0", "ROW1", "TRUE",
    "Array", "B", "Expr", "H", "K", "Kind", "Op", "Q", "S", "as_expr", "bounds", "classify", "clip", "const", "cos",
    "derivative", "erf", "exp", "exp2", "floor", "int32_arrays", "is_const", "is_name", "key", "log", "log2", "maximum",
    "minimum", "param", "reaches", "rename", "sigmoid", "sign", "sin", "sqrt", "substitute", "symbol", "tanh",
    "to_float", "to_int", "uses", "walk", "where", "wrapped",
]  # fmt: skip

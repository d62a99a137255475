"""Interval analysis of a graph: what a node can be in any call, and over one tile.

Bounds over a tile classify it as EMPTY, FULL or PARTIAL (`classify`), which is how block-sparse masks skip tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from .functions import where
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
    Expr,
    K,
    Q,
    const,
    to_float,
    walk,
)
from .interval_rules import Range, is_point
from .operations import OPS


def reaches(
    exprs: Iterable[Expr], narrow: frozenset[str] = frozenset()
) -> tuple[dict[Expr, tuple[int, int] | None], set[Expr]]:
    """The values that each node can have in any call, by the rules of the table on exact integers.

    Parameters
    ----------
    exprs
        Graphs.
    narrow
        Names of arrays whose elements have at most 32 bits.

    Returns
    -------
    ranges : dict
        (least, greatest) of each integer or bool node, None for a float.
    overflowing : set
        The nodes that may overflow. Their result may be any int64.
    """
    known: dict[Expr, tuple[int, int] | None] = {}
    overflowing: set[Expr] = set()
    for node in walk(exprs):
        ranges = [known[a] for a in node.args]
        result: tuple[int, int] | None = None
        if node.op == "const":
            result = None if node.kind == "float" else (node.value, node.value)
        elif node.kind == "bool" and (node.op not in OPS or None in ranges):
            result = False, True
        elif node.op == "symbol" and node.kind == "int":
            result = -2 * MAX_POSITION, 2 * MAX_POSITION
        elif node.op == "param" and node.kind == "int":
            result = -MAX_PARAM, MAX_PARAM
        elif node.kind != "float":
            narrower = node.op.startswith("load") and node.value in narrow
            rule = OPS[node.op].bounds if node.op in OPS else None
            result = (-(2**32), 2**32) if narrower else rule(*ranges) if rule else None  # type: ignore[assignment]
            if result is None:
                result = INT64
            elif result[0] < INT64[0] or result[1] > INT64[1]:
                overflowing.add(node)
                result = INT64
        known[node] = result
    return known, overflowing


_ANY = const(INT64[0]), const(INT64[1])
_SURE = 2.0**62
"""Where a result computed in floating point stays within this bound, the exact result is an int64."""


@lru_cache(maxsize=512)
def bounds(expr: Expr, narrow: frozenset[str] = frozenset()) -> Range:
    """Bounds over the tile q0 <= q <= q1, k0 <= k <= k1 (row likewise), at one (b, h), as expressions in those symbols.

    This is interval arithmetic on symbols, so one rule serves the tile lists in NumPy and the tile loops of every
    kernel. The bounds hold for integers that wrap: on tiles where a node may overflow, its bounds are all of int64.
    narrow: as in `reaches`.
    """
    overflowing = reaches([expr], narrow)[1]
    known: dict[int, Range] = {id(Q): (Q0, Q1), id(K): (K0, K1), id(ROW): (ROW0, ROW1)}
    for node in walk([expr]):
        if id(node) in known:
            continue
        ranges = [known[id(a)] for a in node.args]
        if node.kind == "int" and node.op in _BOUNDING:
            ranges = [r or _ANY for r in ranges]
        result: Range = None
        if node.kind != "float":
            if not node.args:
                result = (node, node)
            elif None not in ranges:
                of = _load_bounds if node.op == "load" else _op_bounds
                result = of(node, ranges)  # type: ignore[arg-type]
        if result is not None and node in overflowing:
            result = _where_sure(node, ranges, result)  # type: ignore[arg-type]
        if result is None and node.kind == "bool":
            result = (FALSE, TRUE)
        known[id(node)] = result
    return known[id(expr)]


_BOUNDING = "min", "max", "mod"
"""Operations whose result has bounds even if an operand has none."""


def _op_bounds(node: Expr, ranges: list[tuple[Expr, Expr]]) -> Range:
    rule = OPS[node.op].bounds
    return rule(*ranges) if rule else None


def _where_sure(node: Expr, ranges: list[tuple[Expr, Expr]], found: tuple[Expr, Expr]) -> Range:
    """The bounds found, on tiles where the same computation in floating point proves that nothing overflows."""
    low, high = _op_bounds(node, [(to_float(r[0]), to_float(r[1])) for r in ranges])  # type: ignore[misc]
    sure = (low >= -_SURE) & (high <= _SURE)
    return where(sure, found[0], _ANY[0]), where(sure, found[1], _ANY[1])


def _load_bounds(node: Expr, ranges: list[tuple[Expr, Expr]]) -> Range:
    if all(map(is_point, ranges)):
        value = Expr("load", tuple(r[0] for r in ranges), node.value, node.kind)
        return value, value
    corners = tuple(x for r in ranges for x in r)
    return Expr("load_min", corners, node.value, node.kind), Expr("load_max", corners, node.value, node.kind)


@lru_cache(maxsize=512)
def classify(mask: Expr, narrow: frozenset[str] = frozenset()) -> tuple[Expr, Expr]:
    """(empty, full): bool expressions over a tile's corners that prove that no pair, or every pair, is visible.

    narrow: as in `reaches`. Without it the analysis proves less, but never anything wrong.
    """
    sure, possible = bounds(mask, narrow)  # type: ignore[misc]
    return ~possible, sure


def narrow(dtypes: Mapping[str, Any]) -> frozenset[str]:
    """Names of the arrays, given with their dtypes, whose elements have at most 32 bits."""
    return frozenset(name for name, dtype in dtypes.items() if str(dtype) not in ("int64", "uint64"))

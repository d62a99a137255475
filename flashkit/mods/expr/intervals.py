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
    MAX_INTEGER,
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
    walk,
)
from .interval_rules import End, Range, Reach, is_point
from .operations import OPS

__all__ = ["bounds", "classify", "int32_arrays", "reaches"]


def reaches(
    exprs: Iterable[Expr], int32_arrays: frozenset[str] = frozenset()
) -> tuple[dict[Expr, Reach | None], set[Expr]]:
    """The values that each node can have in any call, by the rules of the table on exact integers: (least, greatest) of
    each integer or bool node, None for a float; and the nodes that may overflow, whose result may be any int64.
    int32_arrays: names of arrays whose elements have at most 32 bits.
    """
    known: dict[Expr, Reach | None] = {}
    overflowing: set[Expr] = set()
    for node in walk(exprs):
        ranges = [known[a] for a in node.args]
        result = _leaf_reach(node, int32_arrays)
        if result is None and node.kind == "int":
            rule = OPS[node.op].bounds
            result = (rule(*ranges) if rule else None) or (INT64 if node.op != "int" else (-MAX_INTEGER, MAX_INTEGER))
            if result[0] < INT64[0] or result[1] > INT64[1]:
                overflowing.add(node)
                result = INT64
        elif result is None and node.kind == "bool":
            result = (False, True) if None in ranges else OPS[node.op].bounds(*ranges)  # type: ignore[misc]
        known[node] = result
    return known, overflowing


def _leaf_reach(node: Expr, int32_arrays: frozenset[str]) -> Reach | None:
    """What a symbol, a value or a literal can be in any call; None for an operation, and for floats."""
    if node.kind == "float" or node.op in OPS:
        return None
    if node.op == "const":
        return node.value, node.value
    if node.kind == "bool":
        return False, True
    if node.op == "symbol":
        return -2 * MAX_POSITION, 2 * MAX_POSITION
    if node.op == "param":
        return -MAX_PARAM, MAX_PARAM
    return (-(2**32), 2**32) if node.value in int32_arrays else INT64


_ANY = End(const(INT64[0]), (INT64[0], INT64[0])), End(const(INT64[1]), (INT64[1], INT64[1]))
_SURE = 2.0**62
"""Where a result computed in floating point stays within this bound, the exact result is an int64."""


@lru_cache(maxsize=512)
def bounds(expr: Expr, int32_arrays: frozenset[str] = frozenset()) -> tuple[Expr, Expr] | None:
    """Bounds over the tile q0 <= q <= q1, k0 <= k <= k1 (row likewise), at one (b, h), as expressions in those symbols.
    None: nothing is known.

    This is interval arithmetic on symbols, so one rule serves the tile lists in NumPy and the tile loops of every
    kernel. The bounds hold for integers that wrap: on tiles where an end may itself have wrapped (`End.doubts`), they
    are all of int64. Where none has, neither has the node between them.
    int32_arrays: as in `reaches`.
    """
    known: dict[int, Range] = {}
    for node in walk([expr]):
        ranges = [known[id(a)] for a in node.args]
        if node.op in _BOUNDING:
            ranges = [r or _ANY for r in ranges]
        result: Range = None
        if node.kind == "float":
            pass
        elif node.op == "int":
            result = End(const(-MAX_INTEGER), (-MAX_INTEGER,) * 2), End(const(MAX_INTEGER), (MAX_INTEGER,) * 2)
        elif not node.args:
            result = _leaf_bounds(node, int32_arrays)
        elif None not in ranges:
            of = _load_bounds if node.op == "load" else _op_bounds
            result = of(node, ranges, int32_arrays)  # type: ignore[arg-type]
        if result is None and node.kind == "bool":
            result = _EITHER
        known[id(node)] = result
    ends = known[id(expr)]
    return ends and (ends[0].node, ends[1].node)


_BOUNDING = "min", "max", "mod"
"""Operations whose result has bounds even if an operand has none."""

_EITHER = End(FALSE, (False, True)), End(TRUE, (False, True))

_CORNERS = {Q: (Q0, Q1), K: (K0, K1), ROW: (ROW0, ROW1)}


def _leaf_bounds(node: Expr, int32_arrays: frozenset[str]) -> Range:
    first, last = (End(end, _leaf_reach(end, int32_arrays) or INT64) for end in _CORNERS.get(node, (node, node)))
    return first, last


def _op_bounds(node: Expr, ranges: list[tuple[End, End]], int32_arrays: frozenset[str]) -> Range:
    rule = OPS[node.op].bounds
    found = rule(*ranges) if rule else None
    return found and _where_sure(*found)


def _where_sure(first: End, last: End) -> Range:
    """The bounds; on tiles where floating point does not prove that they are exact, all of int64."""
    sure = TRUE
    for doubt in dict.fromkeys((*first.doubts, *last.doubts)):
        sure = sure & (doubt >= -_SURE) & (doubt <= _SURE)
    if sure is TRUE:
        return first, last
    first, last = (End(where(sure, end.node, any_.node), INT64) for end, any_ in zip((first, last), _ANY))
    return first, last


def _load_bounds(node: Expr, ranges: list[tuple[End, End]], int32_arrays: frozenset[str]) -> Range:
    reach = _leaf_reach(node, int32_arrays) or INT64
    if all(map(is_point, ranges)):
        value = End(Expr("load", tuple(r[0].node for r in ranges), node.value, node.kind), reach)
        return value, value
    corners = tuple(x.node for r in ranges for x in r)
    first, last = (End(Expr(f"load_{end}", corners, node.value, node.kind), reach) for end in ("min", "max"))
    return first, last


@lru_cache(maxsize=512)
def classify(mask: Expr, int32_arrays: frozenset[str] = frozenset()) -> tuple[Expr, Expr]:
    """(empty, full): expressions of a tile's corners that prove that no pair, or every pair, is visible."""
    sure, possible = bounds(mask, int32_arrays)  # type: ignore[misc]
    return ~possible, sure


def int32_arrays(dtypes: Mapping[str, Any]) -> frozenset[str]:
    """Names of the arrays whose elements have at most 32 bits, from the dtypes by name."""
    return frozenset(name for name, dtype in dtypes.items() if str(dtype) not in ("int64", "uint64"))

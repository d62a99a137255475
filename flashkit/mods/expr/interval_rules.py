"""Rules of interval arithmetic (Moore, Interval Analysis, 1966), one for each operation that has bounds.

A rule takes the ranges of the operands and gives the range of the result. It works on the ends of bounds over a tile
(`End`) and on Python's exact integers and bools (`intervals.reaches`) alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from .functions import maximum, minimum, where
from .graph import INT64, Expr, as_expr, is_const, to_float

Reach = tuple[int, int]
"""The least and the greatest integer that something can be in any call, exact; (False, True) for bools."""


class End:
    """One end of the bounds of an integer or a bool over a tile: an expression in the tile's corners.

    Every operation on ends asks whether its exact result can lie beyond int64. So what a rule makes of ends says itself
    where it holds, whatever the rule computes in between.

    reach: what the node can be in any call. doubts: the results that may have wrapped on the way to it, computed in
    floating point: it holds where these are small.
    """

    __slots__ = ("doubts", "node", "reach")

    def __init__(self, node: Expr, reach: Reach, doubts: Sequence[Expr] = ()) -> None:
        self.node, self.reach, self.doubts = node, reach, tuple(doubts)

    def __add__(self, other: Any) -> End: return _applied(operator.add, self, other)
    def __sub__(self, other: Any) -> End: return _applied(operator.sub, self, other)
    def __mul__(self, other: Any) -> End: return _applied(operator.mul, self, other)
    def __floordiv__(self, other: Any) -> End: return _applied(operator.floordiv, self, other)
    def __mod__(self, other: Any) -> End: return _applied(operator.mod, self, other)
    def __neg__(self) -> End: return _applied(operator.neg, self)
    def __lt__(self, other: Any) -> End: return _applied(operator.lt, self, other)
    def __le__(self, other: Any) -> End: return _applied(operator.le, self, other)
    def __eq__(self, other: Any) -> End: return _applied(operator.eq, self, other)  # type: ignore[override]
    def __and__(self, other: Any) -> End: return _applied(operator.and_, self, other)
    def __or__(self, other: Any) -> End: return _applied(operator.or_, self, other)
    def __invert__(self) -> End: return _applied(operator.invert, self)

    __hash__ = None  # type: ignore[assignment]


Range = tuple[End, End] | None
"""Bounds of a node over a tile: (least, greatest) of an integer, (surely true, possibly true) of a bool, None: unknown.

Floats have none: a bound that is rounded differently from the value in the kernel could hide a visible pair."""


def _end(x: Any) -> End:
    return x if isinstance(x, End) else End(as_expr(x), (x, x))


def _applied(function: Callable[..., Any], *operands: Any) -> End:
    """A function of expressions and of numbers alike, of ends."""
    ends = [_end(x) for x in operands]
    node, doubts = function(*[end.node for end in ends]), [doubt for end in ends for doubt in end.doubts]
    if node.kind == "bool":
        return End(node, (False, True), doubts)
    reaches = [end.reach for end in ends]
    if function in (operator.floordiv, operator.mod):
        exact = (floordiv if function is operator.floordiv else mod)(*reaches)
    else:  # monotonic in each operand, so the extremes are at the corners
        corners = [function(*corner) for corner in product(*reaches)]
        exact = min(corners), max(corners)
    if INT64[0] <= exact[0] and exact[1] <= INT64[1]:
        return End(node, exact, doubts)
    return End(node, INT64, [*doubts, function(*[to_float(end.node) for end in ends])])


def least(x: Any, y: Any) -> Any:
    if isinstance(x, End) or isinstance(y, End):
        return _applied(least, x, y)
    return minimum(x, y) if isinstance(x, Expr) or isinstance(y, Expr) else min(x, y)


def greatest(x: Any, y: Any) -> Any:
    if isinstance(x, End) or isinstance(y, End):
        return _applied(greatest, x, y)
    return maximum(x, y) if isinstance(x, Expr) or isinstance(y, Expr) else max(x, y)


def choose(condition: Any, x: Any, y: Any) -> Any:
    if not isinstance(condition, End):
        return x if condition else y
    x, y = _end(x), _end(y)
    node = where(condition.node, x.node, y.node)
    reach = x.reach if node is x.node else y.reach if node is y.node else hull([*x.reach, *y.reach])
    return End(node, reach, (*condition.doubts, *x.doubts, *y.doubts))


def negation(x: Any) -> Any:
    return ~x if isinstance(x, End) else not x


def is_bool(x: Any) -> bool:
    return x.node.kind == "bool" if isinstance(x, End) else isinstance(x, bool)


def is_zero(x: Any) -> bool:
    """Whether a divisor is known to be 0: x // 0 and x % 0 are 0 in kernels, as in NumPy."""
    return is_const(x.node, 0) if isinstance(x, End) else x == 0


def hull(values: Sequence[Any]) -> Any:
    low = high = values[0]
    for value in values[1:]:
        low, high = least(low, value), greatest(high, value)
    return low, high


def is_point(r: tuple[Any, Any]) -> bool:
    return r[0].node is r[1].node if isinstance(r[0], End) else r[0] == r[1]


def _ends(r: tuple[Any, Any]) -> tuple[Any, ...]:
    return r[:1] if is_point(r) else r


def mul(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    return hull([x * y for x in _ends(a) for y in _ends(b)])


def floordiv(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    if is_zero(b[0]) and is_point(b):
        return b
    if is_point(b):
        return hull([a[0] // b[0], a[1] // b[0]])
    return least(least(a[0], -a[1]), 0), greatest(greatest(a[1], -a[0]), 0)


def mod(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    low, high = least(b[0] + 1, 0), greatest(b[1] - 1, 0)
    if not is_point(b) or is_zero(b[0]):
        return low, high
    divisor = b[0]
    same_quotient = _turn(a[0], divisor) == _turn(a[1], divisor)  # then the remainder is monotonic
    return choose(same_quotient, a[0] % divisor, low), choose(same_quotient, a[1] % divisor, high)


def _turn(x: Any, divisor: Any) -> Any:
    """x // divisor. It may wrap for the divisor -1 alone, and all remainders by that are 0."""
    turn = x // divisor
    return End(turn.node, turn.reach) if isinstance(turn, End) else turn


def select(c: tuple[Any, Any], x: tuple[Any, Any], y: tuple[Any, Any]) -> Any:
    low, high = (x[0] & y[0], x[1] | y[1]) if is_bool(x[0]) else (least(x[0], y[0]), greatest(x[1], y[1]))
    return tuple(choose(c[0], x[i], choose(c[1], either, y[i])) for i, either in enumerate((low, high)))


def bools_only(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for bools only: the same operator on integers works on bits, which has no simple bounds."""
    return lambda *ranges: rule(*ranges) if is_bool(ranges[0][0]) else None

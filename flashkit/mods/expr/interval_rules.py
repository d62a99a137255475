"""Rules of interval arithmetic (Moore, Interval Analysis, 1966), one for each operation that has bounds.

A rule takes the ranges of the operands and gives the range of the result. It works on expressions (`intervals.bounds`)
and on Python's exact integers and bools (`intervals.reaches`) alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .functions import maximum, minimum, where
from .graph import Expr, is_const

Range = tuple[Expr, Expr] | None
"""Bounds of a node over a tile, as expressions: (least, greatest) of an integer, (surely true, possibly true) of a
bool, None: unknown.

Floats have none: a bound that is rounded differently from the value in the kernel could hide a visible pair."""


def least(x: Any, y: Any) -> Any:
    return minimum(x, y) if isinstance(x, Expr) or isinstance(y, Expr) else min(x, y)


def greatest(x: Any, y: Any) -> Any:
    return maximum(x, y) if isinstance(x, Expr) or isinstance(y, Expr) else max(x, y)


def choose(condition: Any, x: Any, y: Any) -> Any:
    return where(condition, x, y) if isinstance(condition, Expr) else x if condition else y


def negation(x: Any) -> Any:
    return ~x if isinstance(x, Expr) else not x


def is_bool(x: Any) -> bool:
    return x.kind == "bool" if isinstance(x, Expr) else isinstance(x, bool)


def is_zero(x: Any) -> bool:
    """Whether a divisor is known to be 0: x // 0 and x % 0 are 0 in kernels, as in NumPy."""
    return is_const(x, 0) if isinstance(x, Expr) else x == 0


def hull(values: Sequence[Any]) -> Range:
    low = high = values[0]
    for value in values[1:]:
        low, high = least(low, value), greatest(high, value)
    return low, high


def is_point(r: tuple[Any, Any]) -> bool:
    return r[0] is r[1]


def mul(a: tuple[Any, Any], b: tuple[Any, Any]) -> Range:
    return hull([x * y for x in dict.fromkeys(a) for y in dict.fromkeys(b)])


def floordiv(a: tuple[Any, Any], b: tuple[Any, Any]) -> Range:
    if is_zero(b[0]) and is_point(b):
        return b
    if is_point(b):
        return hull([a[0] // b[0], a[1] // b[0]])
    return least(least(a[0], -a[1]), 0), greatest(greatest(a[1], -a[0]), 0)


def mod(a: tuple[Any, Any], b: tuple[Any, Any]) -> Range:
    low, high = least(b[0] + 1, 0), greatest(b[1] - 1, 0)
    if not is_point(b) or is_zero(b[0]):
        return low, high
    divisor = b[0]
    same_quotient = (a[0] // divisor) == (a[1] // divisor)  # then the remainder is monotonic
    return choose(same_quotient, a[0] % divisor, low), choose(same_quotient, a[1] % divisor, high)


def select(c: tuple[Any, Any], x: tuple[Any, Any], y: tuple[Any, Any]) -> Range:
    low, high = (x[0] & y[0], x[1] | y[1]) if is_bool(x[0]) else (least(x[0], y[0]), greatest(x[1], y[1]))
    return tuple(choose(c[0], x[i], choose(c[1], either, y[i])) for i, either in enumerate((low, high)))


def bools_only(rule: Callable[..., Range]) -> Callable[..., Range]:
    """A rule for bools only: the same operator on integers works on bits, which has no simple bounds."""
    return lambda *ranges: rule(*ranges) if is_bool(ranges[0][0]) else None

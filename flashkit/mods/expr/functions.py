"""Functions for use in masks and score modifications; `flashkit.where` and the like.

Their operands are traced expressions, Python's and NumPy's scalars. Arithmetic, comparison and the operators `&`, `|`,
`^`, `~` work on expressions as well, and so do the NumPy functions of the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .graph import Expr, arithmetic, as_expr, floating, number, select, to_float
from .graph import sign as _sign

__all__ = [
    "clip", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "maximum", "minimum", "sigmoid", "sign", "sin", "sqrt",
    "tanh", "to_int", "where",
]  # fmt: skip

_Unary = Callable[[Any], Expr]


def where(condition: Any, x: Any, y: Any) -> Expr:
    """x where the condition holds, else y.

    Parameters
    ----------
    condition
        Bool.
    x, y
        Bools, integers or floats. Both are computed, so array indices in both must be in range.

    Returns
    -------
    Expr
        Of the kind of x and y; a float if one of them is.

    Examples
    --------
    >>> import flashkit
    >>> far = flashkit.mods.score(lambda s, b, h, q, k: flashkit.where(q - k > 1, s - 10.0, s))
    >>> far.evaluate(b=0, h=0, q=3, k=[1, 2, 3], s=[5.0, 5.0, 5.0])
    array([-5.,  5.,  5.])
    """
    return select(condition, x, y)


def _extreme(name: str, op: str, which: str, result: str) -> Callable[[Any, Any], Expr]:
    """The function of min or max. result: of the example in its docstring."""

    def function(x: Any, y: Any) -> Expr:
        return arithmetic(op, x, y)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""The {which} of x and y.

    Parameters
    ----------
    x, y
        Integers or floats; a bool counts as 0 or 1.

    Returns
    -------
    Expr
        A float if x or y is one, else an integer.

    Examples
    --------
    >>> import flashkit
    >>> mod = flashkit.mods.score(lambda s, b, h, q, k: flashkit.{name}(s, 1.0))
    >>> mod.evaluate(b=0, h=0, q=0, k=0, s=[-1.0, 4.0])
    {result}
    """
    return function


minimum = _extreme("minimum", "min", "smaller", "array([-1.,  1.])")
maximum = _extreme("maximum", "max", "greater", "array([1., 4.])")


def clip(x: Any, low: Any, high: Any) -> Expr:
    """x brought within low and high: minimum(maximum(x, low), high).

    An index of an array in a modification has to be in range at every position, also where the result does not matter.
    `clip` brings it there.

    Parameters
    ----------
    x, low, high
        Integers or floats; a bool counts as 0 or 1.

    Returns
    -------
    Expr
        A float if one of them is, else an integer.

    Examples
    --------
    >>> import flashkit
    >>> def relative(s, b, h, q, k, *, table):
    ...     return s + table[flashkit.clip(q - k, 0, 2)]
    >>> mod = flashkit.mods.score(relative, table=[0.5, 0.25, 0.0])
    >>> mod.evaluate(b=0, h=0, q=3, k=[0, 1, 2, 3], s=[0.0, 0.0, 0.0, 0.0])
    array([0.  , 0.  , 0.25, 0.5 ])
    """
    return minimum(maximum(x, low), high)


def to_int(x: Any) -> Expr:
    """x without its fraction, as an integer, which can index an array. Its derivative counts as 0.

    Parameters
    ----------
    x
        A float, an integer or a bool. A float beyond 2^30 counts as 2^30, one below -2^30 as that, and NaN as 0.

    Returns
    -------
    Expr
        An integer.

    Examples
    --------
    >>> import flashkit
    >>> def by_magnitude(s, b, h, q, k, *, table):
    ...     return s + table[flashkit.clip(flashkit.to_int(flashkit.log2(1 + q - k)), 0, 2)]
    >>> mod = flashkit.mods.score(by_magnitude, table=[0.5, 0.25, 0.0])
    >>> mod.evaluate(b=0, h=0, q=3, k=[0, 1, 2, 3], s=[0.0, 0.0, 0.0, 0.0])
    array([0.  , 0.25, 0.25, 0.5 ])
    """
    x = as_expr(x)
    return Expr("int", (x,), None, "int") if x.kind == "float" else number(x)


def _function(
    name: str, summary: str, given: str, result: str, compute: _Unary | None = None, kind: str = "A float"
) -> _Unary:
    """A function of one operand; by default of the operation of this name. given, result: in its docstring."""
    of = compute or (lambda x: floating(name, x))

    def function(x: Any) -> Expr:
        return of(x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""{summary}

    Parameters
    ----------
    x
        An integer or a float; a bool counts as 0 or 1.

    Returns
    -------
    Expr
        {kind}.

    Examples
    --------
    >>> import flashkit
    >>> mod = flashkit.mods.score(lambda s, b, h, q, k: flashkit.{name}(s))
    >>> mod.evaluate(b=0, h=0, q=0, k=0, s={given})
    {result}
    """
    return function


exp = _function("exp", "e to the power of x.", "[0.0, 1.0]", "array([1.        , 2.71828183])")
exp2 = _function("exp2", "2 to the power of x.", "[0.0, 3.0]", "array([1., 8.])")
log = _function("log", "The natural logarithm of x.", "[1.0, 2.0]", "array([0.        , 0.69314718])")
log2 = _function("log2", "The logarithm of x to base 2.", "[1.0, 8.0]", "array([0., 3.])")
sqrt = _function("sqrt", "The square root of x.", "[4.0, 9.0]", "array([2., 3.])")
tanh = _function("tanh", "The hyperbolic tangent of x.", "[0.0, 1.0]", "array([0.        , 0.76159416])")
sin = _function("sin", "The sine of x, in radians.", "[0.0, 1.0]", "array([0.        , 0.84147098])")
cos = _function("cos", "The cosine of x, in radians.", "[0.0, 1.0]", "array([1.        , 0.54030231])")
erf = _function("erf", "The error function of x.", "[0.0, 1.0]", "array([0.        , 0.84270079])")
floor = _function(
    "floor", "The greatest integer that is not above x, as a float. Its derivative counts as 0.", "[1.5, -1.5]",
    "array([ 1., -2.])",
)  # fmt: skip


def _sigmoid(x: Any) -> Expr:
    x = to_float(x)
    e = exp(where(x >= 0.0, -x, x))  # at most 1: nothing overflows, here and in the derivative
    return where(x >= 0.0, 1.0, e) / (1.0 + e)


sigmoid = _function(
    "sigmoid", "The logistic function of x, 1 / (1 + exp(-x)).", "[0.0, 1.0]", "array([0.5       , 0.73105858])",
    _sigmoid,
)  # fmt: skip
sign = _function(
    "sign", "1 where x is above 0, -1 where it is below, else 0; NaN gives 0.", "[2.0, -2.0, 0.0]",
    "array([ 1., -1.,  0.])", _sign, "An integer",
)  # fmt: skip

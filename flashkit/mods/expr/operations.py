"""The table of operations: for each its text in three languages, its derivative and its interval bounds.

A new operation is one row of `OPS` (and its exact value in graph.py, if it has one on integers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import interval_rules as rules
from .functions import cos, exp, exp2, floor, sin, sqrt, tanh, where
from .graph import MAX_INTEGER, Expr, S, const, is_const, walk

__all__ = ["OPS", "Op", "derivative"]


@dataclass(frozen=True)
class Op:
    """One operation: how code writes it, and what follows from it."""

    cuda: str
    numba: str
    numpy: str
    derivative: Callable[..., Expr] | None = None  # (args, d_args) -> d; None: constant in s
    bounds: Callable[..., Any] | None = None  # (ranges of the args) -> range; None: unknown


def _product(x: Expr, y: Expr) -> Expr:
    """x * y in a derivative, 0 where a factor is identically 0."""
    return const(0.0) if is_const(x, 0) or is_const(y, 0) else x * y


def _same(text: str, derivative: Any = None, bounds: Any = None) -> Op:
    """An operation that all languages write alike."""
    return Op(text, text, text, derivative, bounds)


def _function(name: str, factor: Callable[[Expr], Expr] | None = None) -> Op:
    """A function of one float, of the same name in all languages; factor: its derivative."""
    derivative = None if factor is None else lambda a, d: _product(factor(a[0]), d[0])
    return Op(f"fk_{name}({{0}})", f"{name}({{0}})", f"np.{name}({{0}})", derivative)


OPS: dict[str, Op] = {
    "add": _same("{0} + {1}", lambda a, d: d[0] + d[1], lambda a, b: (a[0] + b[0], a[1] + b[1])),
    "sub": _same("{0} - {1}", lambda a, d: d[0] - d[1], lambda a, b: (a[0] - b[1], a[1] - b[0])),
    "mul": _same("{0} * {1}", lambda a, d: _product(d[0], a[1]) + _product(a[0], d[1]), rules.mul),
    "div": Op("fk_div({0}, {1})", "{0} / {1}", "{0} / {1}",
              lambda a, d: _product(d[0], 1.0 / a[1]) - _product(_product(d[1], a[0]), 1.0 / (a[1] * a[1]))),
    "floordiv": Op("fk_floordiv({0}, {1})", "{0} // {1}", "{0} // {1}", None, rules.floordiv),
    "mod": Op("fk_mod({0}, {1})", "{0} % {1}", "{0} % {1}",
              lambda a, d: d[0] - _product(d[1], floor(a[0] / a[1])), rules.mod),
    "neg": _same("-{0}", lambda a, d: -d[0], lambda a: (-a[1], -a[0])),
    "abs": Op("fk_abs({0})", "abs({0})", "np.abs({0})", lambda a, d: _product(where(a[0] < 0, -1.0, 1.0), d[0]),
              lambda a: (rules.greatest(rules.greatest(a[0], -a[1]), 0), rules.greatest(-a[0], a[1]))),
    "min": Op("fk_min({0}, {1})", "minimum({0}, {1})", "np.minimum({0}, {1})",
              lambda a, d: where(a[1] < a[0], d[1], d[0]),
              lambda a, b: (rules.least(a[0], b[0]), rules.least(a[1], b[1]))),
    "max": Op("fk_max({0}, {1})", "maximum({0}, {1})", "np.maximum({0}, {1})",
              lambda a, d: where(a[0] < a[1], d[1], d[0]),
              lambda a, b: (rules.greatest(a[0], b[0]), rules.greatest(a[1], b[1]))),
    "where": Op("{0} ? {1} : {2}", "{1} if {0} else {2}", "np.where({0}, {1}, {2})",
                lambda a, d: where(a[0], d[1], d[2]), rules.select),
    "lt": _same("{0} < {1}", None, lambda a, b: (a[1] < b[0], a[0] < b[1])),
    "le": _same("{0} <= {1}", None, lambda a, b: (a[1] <= b[0], a[0] <= b[1])),
    "eq": _same("{0} == {1}", None,
                lambda a, b: ((a[0] == b[1]) & (a[1] == b[0]), (a[0] <= b[1]) & (b[0] <= a[1]))),
    "and": _same("{0} & {1}", None, rules.bools_only(lambda a, b: (a[0] & b[0], a[1] & b[1]))),
    "or": _same("{0} | {1}", None, rules.bools_only(lambda a, b: (a[0] | b[0], a[1] | b[1]))),
    "xor": _same("{0} ^ {1}", None, rules.bools_only(
        lambda a, b: ((a[0] & rules.negation(b[1])) | (b[0] & rules.negation(a[1])),
                      rules.negation((a[0] & b[0]) | (rules.negation(a[1]) & rules.negation(b[1])))))),
    "not": Op("!{0}", "not {0}", "np.logical_not({0})", None,
              lambda a: (rules.negation(a[1]), rules.negation(a[0]))),
    "float": Op("(fk_float)({0})", "F({0})", "F({0})"),
    "int": Op("fk_int({0})", "to_int({0})", f"I(np.clip(np.nan_to_num({{0}}), -{MAX_INTEGER}.0, {MAX_INTEGER}.0))"),
    "exp": _function("exp", exp),
    "exp2": _function("exp2", lambda x: exp2(x) * 0.6931471805599453),
    "log": _function("log", lambda x: 1.0 / x),
    "log2": _function("log2", lambda x: 1.4426950408889634 / x),
    "sqrt": _function("sqrt", lambda x: 0.5 / sqrt(x)),
    "tanh": _function("tanh", lambda x: 1.0 - tanh(x) * tanh(x)),
    "sin": _function("sin", cos),
    "cos": _function("cos", lambda x: -sin(x)),
    "floor": _function("floor"),
    "erf": Op("fk_erf({0})", "erf({0})", "erf({0})",
              lambda a, d: _product(1.1283791670955126 * exp(-(a[0] * a[0])), d[0])),
}  # fmt: skip


@lru_cache(maxsize=512)
def derivative(expr: Expr, by: Expr = S) -> Expr:
    """d expr / d by, a float, as a graph. At a kink (abs, min, max, where) it is that of the side taken."""
    zero, d = const(0.0), {}
    for node in walk([expr]):
        rule = OPS[node.op].derivative if node.op in OPS else None
        if node is by:
            d[id(node)] = const(1.0)
        elif rule is None or node.kind != "float" or all(is_const(d[id(a)], 0) for a in node.args if a.kind == "float"):
            d[id(node)] = zero
        else:
            d[id(node)] = rule(node.args, [d[id(a)] for a in node.args])
    return d[id(expr)]

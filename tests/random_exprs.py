"""Random modifications for the tests: each a graph together with what it means, computed by plain Python alone.

The generators take a random.Random; hypothesis gives one that it can replay and shrink (st.randoms). Values stay small
enough that 64-bit integers never wrap. A float that goes through exp, tanh and the like is only ever part of smooth
functions: no comparison and no floor of it, since those would turn the last bit's difference between two libraries into
another number.

`wide_mask` and `wide_score` are the opposite: integers that wrap, and bits of them, next to what has bounds whatever it
is computed from.
"""

import math
import operator
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np

from flashkit import mods
from flashkit.mods import Mod, expr
from flashkit.mods.expr import INT64, Array, Expr

Env = dict[str, Any]


class Case(NamedTuple):
    graph: Expr
    value: Callable[[Env], Any]  # on Python ints, floats and bools


_data = np.random.default_rng(7)
ARRAYS: dict[str, np.ndarray] = {
    "ids": np.sort(_data.integers(0, 6, 23)), "table": _data.integers(-9, 9, (5, 7)).astype(np.int32),
    "flags": _data.integers(0, 2, 17).astype(bool), "grid": _data.integers(0, 4, (6, 9)) > 0,
    "weights": _data.normal(size=11),
}  # fmt: skip
PARAMS: dict[str, int | float] = {"n": 5, "step": 3, "cap": 1.75}
KINDS = {"ids": "int", "table": "int", "flags": "bool", "grid": "bool", "weights": "float"}


def leaf(graph: Expr, name: str) -> Case:
    return Case(graph, lambda env: env[name])


def load(r: Random, name: str, depth: int, smooth: bool = False) -> Case:
    array = ARRAYS[name]
    indices = []
    for size in array.shape:
        i = integer(r, depth - 1)
        if r.random() < 0.5:
            indices.append(
                Case(expr.clip(i.graph, 0, size - 1), lambda env, i=i, size=size: min(max(i.value(env), 0), size - 1))
            )
        else:
            indices.append(Case(i.graph % size, lambda env, i=i, size=size: i.value(env) % size))
    named = Array(name, array.ndim, KINDS[name])  # type: ignore[arg-type]
    return Case(named[tuple(i.graph for i in indices)], lambda env: array[tuple(i.value(env) for i in indices)].item())


def small(r: Random) -> Case:
    value = r.randint(-9, 9)
    return Case(expr.const(value), lambda env: value)


def divisor(r: Random, depth: int) -> Case:
    """Not zero: a constant, a param, or something that varies."""
    which = r.randrange(4)
    if which == 0:
        return leaf(expr.param("step", "int"), "step")
    if which == 1 and depth > 1:
        x = integer(r, depth - 1)
        return Case(expr.maximum(x.graph, 1), lambda env: max(x.value(env), 1))
    value = r.choice([-7, -3, -2, -1, 1, 2, 3, 4, 8, 13])
    return Case(expr.const(value), lambda env: value)


BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{name: (getattr(operator, name),) * 2 for name in ("add", "sub", "xor", "lt", "le", "gt", "ge", "eq", "ne")},
    "and": (operator.and_, operator.and_), "or": (operator.or_, operator.or_),
    "min": (expr.minimum, min), "max": (expr.maximum, max),
}  # fmt: skip
"""Operations on graphs, and on Python's numbers."""


def binary(op: str, x: Case, y: Case) -> Case:
    of_graphs, of_values = BINARY[op]
    return Case(of_graphs(x.graph, y.graph), lambda env: of_values(x.value(env), y.value(env)))


def integer(r: Random, depth: int) -> Case:
    if depth <= 0 or r.random() < 0.1:
        name = r.choice(["q", "k", "row", "q", "k", "b", "h", "n", "const"])
        if name == "const":
            return small(r)
        return leaf(expr.param("n", "int") if name == "n" else expr.symbol(name), name)
    x, y = integer(r, depth - 1), integer(r, depth - 1)
    op = r.choice([
        "add", "sub", "mul", "floordiv", "mod", "neg", "abs", "min", "max", "where", "and", "or", "xor", "load",
        "bool", "sign", "power",
    ])  # fmt: skip
    if op in BINARY:
        return binary(op, x, y)
    if op == "mul":
        z = small(r) if r.random() < 0.7 else leaf(expr.Q, "q")
        return Case(x.graph * z.graph, lambda env: x.value(env) * z.value(env))
    if op in ("floordiv", "mod"):
        z = divisor(r, depth)
        if op == "mod":
            return Case(x.graph % z.graph, lambda env: x.value(env) % z.value(env))
        return Case(x.graph // z.graph, lambda env: x.value(env) // z.value(env))
    if op == "neg":
        return Case(-x.graph, lambda env: -x.value(env))
    if op == "abs":
        return Case(abs(x.graph), lambda env: abs(x.value(env)))
    if op == "where":
        c = boolean(r, depth - 1)
        return Case(expr.where(c.graph, x.graph, y.graph), lambda env: x.value(env) if c.value(env) else y.value(env))
    if op == "load":
        return load(r, r.choice(["ids", "table"]), depth)
    if op == "bool":
        c = boolean(r, depth - 1)
        return Case(c.graph + x.graph, lambda env: int(c.value(env)) + x.value(env))
    if op == "sign":
        return Case(expr.sign(x.graph), lambda env: (x.value(env) > 0) - (x.value(env) < 0))
    e = r.randint(0, 2)
    z = expr.clip(x.graph, -9, 9)
    return Case(z**e, lambda env: min(max(x.value(env), -9), 9) ** e)


def comparison(r: Random, x: Case, y: Case) -> Case:
    return binary(r.choice(["lt", "le", "gt", "ge", "eq", "ne"]), x, y)


def boolean(r: Random, depth: int, floats: bool = False) -> Case:
    """floats: comparisons of floats too, which have no bounds."""
    if depth <= 0:
        value = r.random() < 0.5
        return r.choice(
            [
                lambda: Case(expr.const(value), lambda env: value),
                lambda: comparison(r, integer(r, 0), integer(r, 0)),
                lambda: comparison(r, integer(r, 0), integer(r, 0)),
            ]
        )()
    op = r.choice(["compare", "compare", "compare", "and", "or", "xor", "not", "where", "load", "eq", "float"])
    if op == "float" and floats:
        return comparison(r, exact(r, depth - 1), exact(r, depth - 1))
    if op in ("compare", "float"):
        return comparison(r, integer(r, depth - 1), integer(r, depth - 1))
    x, y = boolean(r, depth - 1, floats), boolean(r, depth - 1, floats)
    if op in BINARY:
        return binary(op, x, y)
    if op == "not":
        return Case(~x.graph, lambda env: not x.value(env))
    if op == "where":
        c = boolean(r, depth - 1, floats)
        return Case(expr.where(c.graph, x.graph, y.graph), lambda env: x.value(env) if c.value(env) else y.value(env))
    return load(r, r.choice(["flags", "grid"]), depth)


def exact(r: Random, depth: int) -> Case:
    """A float made by operations that every library rounds alike."""
    if depth <= 0 or r.random() < 0.1:
        which = r.choice(["s", "cap", "const", "load", "int"])
        if which == "load":
            return load(r, "weights", 1)
        if which == "int":
            x = integer(r, 1)
            return Case(expr.to_float(x.graph), lambda env: float(x.value(env)))
        if which == "const":
            value = r.choice([-2.5, -0.1, 0.3, 1e-3, 7.0])
            return Case(expr.const(value), lambda env: value)
        return leaf(expr.S if which == "s" else expr.param("cap", "float"), which)
    x, y = exact(r, depth - 1), exact(r, depth - 1)
    op = r.choice([
        "add", "sub", "mul", "div", "neg", "abs", "min", "max", "where", "floor", "mod", "floordiv", "power",
    ])  # fmt: skip
    if op in BINARY:
        return binary(op, x, y)
    if op == "mul":
        return Case(x.graph * 0.75, lambda env: x.value(env) * 0.75)
    if op == "div":
        return Case(x.graph / (abs(y.graph) + 1), lambda env: x.value(env) / (abs(y.value(env)) + 1.0))
    if op == "neg":
        return Case(-x.graph, lambda env: -x.value(env))
    if op == "abs":
        return Case(abs(x.graph), lambda env: abs(x.value(env)))
    if op == "where":
        c = boolean(r, depth - 1, floats=True)
        return Case(expr.where(c.graph, x.graph, y.graph), lambda env: x.value(env) if c.value(env) else y.value(env))
    if op == "floor":
        return Case(expr.floor(x.graph), lambda env: float(math.floor(x.value(env))))
    if op == "mod":
        return Case(x.graph % 2.5, lambda env: x.value(env) % 2.5)
    if op == "floordiv":
        return Case(x.graph // 2.5, lambda env: x.value(env) // 2.5)
    return Case((x.graph * 0.01) ** 2, lambda env: (x.value(env) * 0.01) * (x.value(env) * 0.01))


def smooth(r: Random, depth: int) -> Case:
    """A float that is smooth in s, and of moderate size."""
    if depth <= 0:
        return r.choice([lambda: leaf(expr.S, "s"), lambda: leaf(expr.S, "s"), lambda: exact_constant(r)])()
    x, y = smooth(r, depth - 1), smooth(r, depth - 1)
    op = r.choice([
        "add", "sub", "mul", "div", "neg", "where", "exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid", "sin",
        "cos", "power",
    ])  # fmt: skip
    if op in BINARY:
        return binary(op, x, y)
    if op == "mul":
        return Case(expr.tanh(x.graph) * y.graph, lambda env: math.tanh(x.value(env)) * y.value(env))
    if op == "div":
        return Case(x.graph / (y.graph**2 + 1.5), lambda env: x.value(env) / (y.value(env) ** 2 + 1.5))
    if op == "neg":
        return Case(-x.graph, lambda env: -x.value(env))
    if op == "where":
        c = boolean(r, depth - 1)
        return Case(expr.where(c.graph, x.graph, y.graph), lambda env: x.value(env) if c.value(env) else y.value(env))
    if op in ("exp", "exp2"):
        f = {"exp": math.exp, "exp2": lambda v: 2.0**v}[op]
        return Case(getattr(expr, op)(expr.tanh(x.graph)), lambda env: f(math.tanh(x.value(env))))
    if op in ("log", "log2"):
        f = getattr(math, op)
        return Case(getattr(expr, op)(x.graph**2 + 1.25), lambda env: f(x.value(env) ** 2 + 1.25))
    if op == "sqrt":
        return Case(expr.sqrt(x.graph**2 + 0.5), lambda env: math.sqrt(x.value(env) ** 2 + 0.5))
    if op == "sigmoid":
        return Case(expr.sigmoid(x.graph), lambda env: 0.5 + 0.5 * math.tanh(x.value(env) / 2))
    if op == "power":
        return Case(expr.tanh(x.graph) ** 3, lambda env: math.tanh(x.value(env)) ** 3)
    f = getattr(math, op)
    return Case(getattr(expr, op)(x.graph), lambda env: f(x.value(env)))


def exact_constant(r: Random) -> Case:
    value = r.choice([-1.5, -0.25, 0.5, 2.0])
    return Case(expr.const(value), lambda env: value)


def environment(r: Random) -> Env:
    """Positions and a score, as plain Python numbers."""
    row = r.randint(0, 30)
    return {
        "b": r.randint(0, 2), "h": r.randint(0, 3), "row": row, "q": row + r.randint(-6, 6), "k": r.randint(0, 30),
        "s": r.uniform(-4, 4), **PARAMS,
    }  # fmt: skip


MAKERS: dict[str, Callable[[Random, int], Case]] = {
    "int": integer, "bool": lambda r, d: boolean(r, d, floats=True), "float": exact, "smooth": smooth,
}  # fmt: skip


# --- integers that wrap -----------------------------------------------------------------------------------------------

LEAST, GREATEST = INT64
WIDE_ARRAYS = {
    "wide": np.array([LEAST, -(2**62) - 7, -1, 0, 3, 2**61, 2**62 + 5, GREATEST]),
    "ulong": np.array([0, 2**63 + 9, 7, 2**64 - 2, 2**63 - 1, 12], np.uint64),
    "small": np.array([[-(2**31), 5, 2**31 - 1], [0, -9, 4]], np.int32),
    "few": np.array([3, 0, 5, 1], np.int8),
}
WIDE_PARAMS = {"n": 5, "none": 0, "minus": -1, "most": 2**60, "multiplier": 6364136223846793005, "least": LEAST}
SMALL = [-128, -7, -2, -1, 0, 1, 2, 3, 8, 13, 4096]
EXTREME = [
    LEAST, LEAST + 1, -(2**62), -(2**61) - 1, -(2**49), 2**13, 2**31, 2**48, 2**59, 2**62, GREATEST - 1, GREATEST,
    6364136223846793005, 1442695040888963407,
]  # fmt: skip
UNARY: list[Callable[..., Any]] = [operator.neg, abs, expr.sign]
ARITHMETIC: list[Callable[..., Any]] = [operator.add, operator.sub, operator.mul]
DIVISIONS: list[Callable[..., Any]] = [operator.floordiv, operator.mod]
LIMITS: list[Callable[..., Any]] = [expr.minimum, expr.maximum]
BITS: list[Callable[..., Any]] = [operator.and_, operator.or_, operator.xor]
COMPARISONS: list[Callable[..., Any]] = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def wide_constant(r: Random) -> Expr:
    return expr.const(r.choice(SMALL if r.random() < 0.6 else EXTREME))


def wide_leaf(r: Random, names: dict[str, Any]) -> Expr:
    which = r.random()
    if which < 0.65:
        return r.choice([expr.Q, expr.K, expr.Q, expr.K, expr.ROW, expr.B, expr.H])
    return names[r.choice(list(WIDE_PARAMS))] if which < 0.8 else wide_constant(r)


def wide_integer(r: Random, depth: int, names: dict[str, Any]) -> Expr:
    if depth <= 0 or r.random() < 0.08:
        return wide_leaf(r, names)
    x = wide_integer(r, depth - 1, names)
    which = r.random()
    if which < 0.1:
        name = r.choice(list(WIDE_ARRAYS))
        indices = [expr.clip(x, 0, n - 1) if r.random() < 0.5 else x % n for n in WIDE_ARRAYS[name].shape]
        return names[name][tuple(indices)]
    if which < 0.18:
        return r.choice(UNARY)(x)
    # Half of the right operands are literals: what people write, and what bounds are tightest for.
    y = wide_constant(r) if r.random() < 0.5 else wide_integer(r, depth - 1, names)
    if which < 0.26:
        return expr.where(wide_boolean(r, depth - 1, names), x, y)
    function = r.choice(r.choice([ARITHMETIC, ARITHMETIC, DIVISIONS, LIMITS, BITS]))
    try:
        return function(x, y) if r.random() < 0.8 else function(y, x)
    except ZeroDivisionError:  # of constants, which is refused
        return x


def wide_boolean(r: Random, depth: int, names: dict[str, Any]) -> Expr:
    if depth <= 0 or r.random() < 0.6:
        return r.choice(COMPARISONS)(wide_integer(r, depth, names), wide_integer(r, depth, names))
    x, y = wide_boolean(r, depth - 1, names), wide_boolean(r, depth - 1, names)
    return r.choice([lambda: x & y, lambda: x | y, lambda: x ^ y, lambda: ~x])()


def wide_mask(r: Random, depth: int | None = None) -> Mod:
    depth = r.randint(1, 4) if depth is None else depth
    return mods.mask(lambda b, h, q, k, **names: wide_boolean(r, depth, names), **WIDE_PARAMS, **WIDE_ARRAYS)


def wide_score(r: Random, elements: int = 1) -> Mod:
    """Reads an array `table` of so many elements at an integer that wraps."""
    depth = r.randint(1, 5)
    table = np.broadcast_to(np.int8(0), (elements,))
    return mods.score(
        lambda s, b, h, q, k, *, table, **names: s + table[wide_integer(r, depth, names)],
        table=table, **WIDE_PARAMS, **WIDE_ARRAYS,
    )  # fmt: skip

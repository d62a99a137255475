"""Expression graphs: a score or mask modification, traced once, from which everything else is derived.

A modification is an ordinary Python function. Called with symbols instead of numbers it leaves a small immutable
graph; code in three languages (codegen.py), the derivative by the score, the bounds over a tile and the cache key all
come from that graph. One row of the table `OPS` holds all there is to say about an operation, so a new one is one row.

Symbols: `s` the score, `b` the batch entry, `h` the query head, `k` the key's index, `row` the query's index and
`q` its position on the key axis, `row + q_offset`. Integers are int64 and wrap on overflow, as NumPy's do; floats have
the kernel's computing precision.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

Kind = Literal["bool", "int", "float"]
_RANK = {"bool": 0, "int": 1, "float": 2}

INT64 = -(2**63), 2**63 - 1
MAX_POSITION = 2**48
"""Positions, rows and keys lie within this."""
MAX_PARAM = 2**60
"""Integer params lie within this, so that a position and a few of them add up without overflow; see mods.trace."""

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_intern_lock = threading.Lock()


class Expr:
    """One node of a graph. Equal nodes are the same object, so `is` compares and a node's id is its identity."""

    __slots__ = ("__weakref__", "args", "kind", "op", "value")
    op: str
    args: tuple[Expr, ...]
    value: Any
    kind: Kind

    def __new__(cls, op: str, args: tuple[Expr, ...] = (), value: Any = None, kind: Kind = "float") -> Expr:
        # repr tells 0.0 from -0.0 and 1 from 1.0, which == would not.
        identity = (op, tuple(map(id, args)), repr(value), kind)
        with _intern_lock:
            node = _interned.get(identity)
            if node is None:
                node = object.__new__(cls)
                for name, content in (("op", op), ("args", args), ("value", value), ("kind", kind)):
                    object.__setattr__(node, name, content)
                _interned[identity] = node
            return node

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("an expression is immutable")

    def __repr__(self) -> str:
        return key(self)

    __hash__ = object.__hash__

    # Arithmetic
    def __add__(self, other: Any) -> Expr: return _arithmetic("add", self, other)
    def __radd__(self, other: Any) -> Expr: return _arithmetic("add", other, self)
    def __sub__(self, other: Any) -> Expr: return _arithmetic("sub", self, other)
    def __rsub__(self, other: Any) -> Expr: return _arithmetic("sub", other, self)
    def __mul__(self, other: Any) -> Expr: return _arithmetic("mul", self, other)
    def __rmul__(self, other: Any) -> Expr: return _arithmetic("mul", other, self)
    def __truediv__(self, other: Any) -> Expr: return _floating("div", self, other)
    def __rtruediv__(self, other: Any) -> Expr: return _floating("div", other, self)
    def __floordiv__(self, other: Any) -> Expr: return _arithmetic("floordiv", self, other)
    def __rfloordiv__(self, other: Any) -> Expr: return _arithmetic("floordiv", other, self)
    def __mod__(self, other: Any) -> Expr: return _arithmetic("mod", self, other)
    def __rmod__(self, other: Any) -> Expr: return _arithmetic("mod", other, self)
    def __pow__(self, other: Any) -> Expr: return _power(self, other)
    def __neg__(self) -> Expr: return _arithmetic("neg", self)
    def __pos__(self) -> Expr: return self
    def __abs__(self) -> Expr: return _arithmetic("abs", self)

    # Comparison
    def __lt__(self, other: Any) -> Expr: return _comparison("lt", self, other)
    def __le__(self, other: Any) -> Expr: return _comparison("le", self, other)
    def __gt__(self, other: Any) -> Expr: return _comparison("lt", other, self)
    def __ge__(self, other: Any) -> Expr: return _comparison("le", other, self)
    def __eq__(self, other: Any) -> Expr: return _comparison("eq", self, other)  # type: ignore[override]
    def __ne__(self, other: Any) -> Expr: return ~_comparison("eq", self, other)  # type: ignore[override]

    # Logic on bools, bits on integers
    def __and__(self, other: Any) -> Expr: return _bitwise("and", self, other)
    def __rand__(self, other: Any) -> Expr: return _bitwise("and", other, self)
    def __or__(self, other: Any) -> Expr: return _bitwise("or", self, other)
    def __ror__(self, other: Any) -> Expr: return _bitwise("or", other, self)
    def __xor__(self, other: Any) -> Expr: return _bitwise("xor", self, other)
    def __rxor__(self, other: Any) -> Expr: return _bitwise("xor", other, self)
    def __invert__(self) -> Expr: return _not(self)

    # What a symbol cannot do: it stands for every score at once.
    def __bool__(self) -> bool:
        raise TypeError(
            "a symbol has no truth value: `if`, `and`, `or`, `not` and chained comparisons cannot be traced; "
            "use flashkit.where(condition, a, b) and the operators &, |, ~ instead"
        )

    def _no_number(self, *_: Any) -> Any:
        raise TypeError("a symbol stands for every position at once and has no single value here; loops and int() or "
                        "float() of a symbol cannot be traced; pass arrays as keyword arguments, "
                        "flashkit.mods.score(f, name=array), so that "
                        "name[index] is understood")

    __int__ = __float__ = __index__ = __len__ = __iter__ = _no_number

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Let np.tanh(s) and the like mean the same as flashkit's own functions."""
        function = _UFUNCS.get(ufunc)
        if function is None or method != "__call__" or kwargs:
            known = ", ".join(sorted(u.__name__ for u in _UFUNCS))
            raise TypeError(f"numpy.{ufunc.__name__} cannot be traced; known: {known}")
        return function(*inputs)


@dataclass(frozen=True)
class Array:
    """A named array inside a graph; indexing it by expressions reads one element."""

    name: str
    ndim: int
    kind: Kind

    def __getitem__(self, index: Any) -> Expr:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != self.ndim:
            raise ValueError(f"{self.name} has {self.ndim} axes, so it takes {self.ndim} indices, not {len(indices)}")
        nodes = tuple(as_expr(i) for i in indices)
        for node in nodes:
            if node.kind != "int":
                raise TypeError(f"an index of {self.name} is {node.kind}; indices are integers")
        return Expr("load", nodes, self.name, self.kind)


# --- making nodes -----------------------------------------------------------------------------------------------------


def const(value: bool | int | float) -> Expr:
    """A literal that is compiled in."""
    if isinstance(value, (bool, np.bool_)):
        return Expr("const", (), bool(value), "bool")
    if isinstance(value, (int, np.integer)):
        return Expr("const", (), int(value), "int")
    return Expr("const", (), float(value), "float")


def param(name: str, kind: Kind) -> Expr:
    """A scalar that is given at run time, so that changing it compiles nothing."""
    return Expr("param", (), name, kind)


def symbol(name: str, kind: Kind = "int") -> Expr:
    return Expr("symbol", (), name, kind)


S = symbol("s", "float")
B, H, Q, K, ROW = (symbol(name) for name in ("b", "h", "q", "k", "row"))
Q0, Q1, K0, K1, ROW0, ROW1 = (symbol(name) for name in ("q0", "q1", "k0", "k1", "row0", "row1"))
TRUE, FALSE = const(True), const(False)


def as_expr(value: Any) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:  # what np.int64(3) < q arrives as
        value = value[()]
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return const(value)  # type: ignore[arg-type]
    raise TypeError(
        f"{type(value).__name__} cannot be part of a traced modification; scalars and symbols can, and arrays that are "
        "passed as keyword arguments: flashkit.mods.score(f, name=array)"
    )


def to_float(x: Any) -> Expr:
    """The same number as a float; a bool counts as 0 or 1."""
    x = _number(as_expr(x))
    if x.kind == "float":
        return x
    return const(float(x.value)) if x.op == "const" else Expr("float", (x,), None, "float")


def _number(x: Expr) -> Expr:
    return where(x, 1, 0) if x.kind == "bool" else x


def wrapped(value: int) -> int:
    """The int64 that integer arithmetic gives for an exact result."""
    return (value - INT64[0]) % 2**64 + INT64[0]


def _fold(op: str, args: tuple[Expr, ...], kind: Kind) -> Expr:
    """Make the node, or compute it where all is known. Only exact integer and logical folding: floats keep the
    kernel's rounding.
    """
    try:
        return _folded(Expr(op, args, None, kind))
    except ZeroDivisionError:
        raise ZeroDivisionError(f"division by zero in a modification: {op} of {args[0]!r} by 0") from None


def _folded(node: Expr) -> Expr:
    known = node.op in OPS and node.args and all(a.op == "const" and a.kind != "float" for a in node.args)
    if not known or node.kind == "float":
        return node
    value = OPS[node.op].fold(*(a.value for a in node.args))
    return const(wrapped(value) if node.kind == "int" else value)


def _arithmetic(op: str, *operands: Any) -> Expr:
    args = tuple(_number(as_expr(x)) for x in operands)
    kind: Kind = "float" if any(a.kind == "float" for a in args) else "int"
    if kind == "float":
        args = tuple(map(to_float, args))
    if op == "add" and _is(args[0], 0):
        return args[1]
    if op in ("add", "sub") and _is(args[1], 0):
        return args[0]
    if op == "mul" and _is(args[0], 1):
        return args[1]
    if op == "mul" and _is(args[1], 1):
        return args[0]
    return _fold(op, args, kind)


def _is(x: Expr, value: int) -> bool:
    # x + (-0.0) would be x too, but -0.0 never comes out of tracing; 0.0 + x only differs for x = -0.0, which no
    # kernel tells apart.
    return x.op == "const" and x.kind != "bool" and x.value == value


def _floating(op: str, *operands: Any) -> Expr:
    return Expr(op, tuple(map(to_float, operands)), None, "float")


def _power(x: Any, exponent: Any) -> Expr:
    if isinstance(exponent, int) and not isinstance(exponent, bool) and 0 <= exponent <= 8:
        result = const(1.0) if as_expr(x).kind == "float" else const(1)
        for _ in range(exponent):
            result = result * x
        return result
    if isinstance(exponent, float) and exponent == 0.5:
        return sqrt(x)
    fits = "an integer exponent from 0 to 8, or 0.5"
    raise ValueError(f"** takes {fits}, not {exponent!r}; use exp(y * log(x)) otherwise")


def _comparison(op: str, x: Any, y: Any) -> Expr:
    a, b = as_expr(x), as_expr(y)
    if a.kind == b.kind == "bool":
        if op == "eq":
            return ~(a ^ b)
        raise TypeError("bools have no order; use &, | and ~")
    a, b = _number(a), _number(b)
    if "float" in (a.kind, b.kind):
        a, b = to_float(a), to_float(b)
    return _fold(op, (a, b), "bool")


def _bitwise(op: str, x: Any, y: Any) -> Expr:
    a, b = as_expr(x), as_expr(y)
    if a.kind != b.kind or a.kind == "float":
        raise TypeError(f"&, | and ^ take two bools or two integers, not {a.kind} and {b.kind}")
    if a.kind == "int":
        return _fold(op, (a, b), "int")
    for known, other in ((a, b), (b, a)):
        if known.op == "const":
            absorbing = {"and": not known.value, "or": known.value, "xor": False}[op]
            return known if absorbing else (~other if op == "xor" and known.value else other)
    return a if a is b and op != "xor" else Expr(op, (a, b), None, "bool")


def _logical(op: str, x: Any, y: Any) -> Expr:
    """np.logical_and and np.logical_or: on integers they are not the operations on bits."""
    for kind in (as_expr(x).kind, as_expr(y).kind):
        if kind != "bool":
            raise TypeError(f"numpy.logical_{op} of a traced {kind}: it takes bools; compare with != 0 first")
    return _bitwise(op, x, y)


def _not(x: Any) -> Expr:
    x = as_expr(x)
    if x.kind != "bool":
        raise TypeError(f"~ takes a bool, not {x.kind}")
    return x.args[0] if x.op == "not" else _fold("not", (x,), "bool")


# --- functions for use in modifications -------------------------------------------------------------------------------


def where(condition: Any, x: Any, y: Any) -> Expr:
    """x where the condition holds, else y. Both are computed, so indices in both must be in range."""
    c, a, b = as_expr(condition), as_expr(x), as_expr(y)
    if c.kind != "bool":
        raise TypeError(f"the condition of where() is a bool, not {c.kind}")
    if a.kind != b.kind:
        a, b = (to_float(a), to_float(b)) if "float" in (a.kind, b.kind) else (_number(a), _number(b))
    if c.op == "const":
        return a if c.value else b
    return a if a is b else Expr("where", (c, a, b), None, a.kind)


def minimum(x: Any, y: Any) -> Expr: return _arithmetic("min", x, y)
def maximum(x: Any, y: Any) -> Expr: return _arithmetic("max", x, y)
def clip(x: Any, low: Any, high: Any) -> Expr: return minimum(maximum(x, low), high)
def exp(x: Any) -> Expr: return _floating("exp", x)
def exp2(x: Any) -> Expr: return _floating("exp2", x)
def log(x: Any) -> Expr: return _floating("log", x)
def log2(x: Any) -> Expr: return _floating("log2", x)
def sqrt(x: Any) -> Expr: return _floating("sqrt", x)
def tanh(x: Any) -> Expr: return _floating("tanh", x)
def sigmoid(x: Any) -> Expr: return 1.0 / (1.0 + exp(-to_float(x)))
def sin(x: Any) -> Expr: return _floating("sin", x)
def cos(x: Any) -> Expr: return _floating("cos", x)
def floor(x: Any) -> Expr: return _floating("floor", x)
def sign(x: Any) -> Expr: return where(as_expr(x) > 0, 1, where(as_expr(x) < 0, -1, 0))


_UFUNCS: dict[np.ufunc, Callable[..., Expr]] = {
    np.exp: exp, np.exp2: exp2, np.log: log, np.log2: log2, np.sqrt: sqrt, np.tanh: tanh,
    np.sin: sin, np.cos: cos, np.floor: floor,
    np.sign: sign, np.minimum: minimum, np.maximum: maximum,
    np.abs: lambda x: abs(as_expr(x)), np.negative: lambda x: -as_expr(x),
    np.add: lambda x, y: _arithmetic("add", x, y), np.subtract: lambda x, y: _arithmetic("sub", x, y),
    np.multiply: lambda x, y: _arithmetic("mul", x, y), np.true_divide: lambda x, y: _floating("div", x, y),
    np.floor_divide: lambda x, y: _arithmetic("floordiv", x, y), np.remainder: lambda x, y: _arithmetic("mod", x, y),
    np.less: lambda x, y: _comparison("lt", x, y), np.less_equal: lambda x, y: _comparison("le", x, y),
    np.greater: lambda x, y: _comparison("lt", y, x), np.greater_equal: lambda x, y: _comparison("le", y, x),
    np.equal: lambda x, y: _comparison("eq", x, y), np.not_equal: lambda x, y: ~_comparison("eq", x, y),
    np.logical_and: lambda x, y: _logical("and", x, y), np.logical_or: lambda x, y: _logical("or", x, y),
    np.logical_not: _not, np.invert: _not,
    np.bitwise_and: lambda x, y: _bitwise("and", x, y), np.bitwise_or: lambda x, y: _bitwise("or", x, y),
}  # fmt: skip


# --- the table --------------------------------------------------------------------------------------------------------

Range = tuple[Expr, Expr] | None
"""Bounds of a node over a tile, as expressions: (least, greatest) of an integer, (surely true, possibly true) of a
bool, None: unknown.

Floats have none: a bound that is rounded differently from the value in the kernel could hide a visible pair.
The rules of the table work on expressions (`bounds`) and on Python's exact integers and bools (`reaches`) alike."""


@dataclass(frozen=True)
class Op:
    """All there is to say about one operation."""

    cuda: str
    numba: str
    numpy: str
    derivative: Callable[..., Expr] | None = None  # (args, d_args) -> d; None: constant in s
    bounds: Callable[..., Range] | None = None  # (ranges of the args) -> range; None: unknown
    fold: Callable[..., Any] = lambda *_: None  # exact value from Python ints and bools


def _product(x: Expr, y: Expr) -> Expr:
    """x * y in a derivative, where a factor that is identically zero ends the matter."""
    return const(0.0) if _is(x, 0) or _is(y, 0) else x * y


def _least(x: Any, y: Any) -> Any:
    return minimum(x, y) if isinstance(x, Expr) or isinstance(y, Expr) else min(x, y)


def _most(x: Any, y: Any) -> Any:
    return maximum(x, y) if isinstance(x, Expr) or isinstance(y, Expr) else max(x, y)


def _choose(condition: Any, x: Any, y: Any) -> Any:
    return where(condition, x, y) if isinstance(condition, Expr) else x if condition else y


def _opposite(x: Any) -> Any:
    return ~x if isinstance(x, Expr) else not x


def _is_bool(x: Any) -> bool:
    return x.kind == "bool" if isinstance(x, Expr) else isinstance(x, bool)


def _is_zero(x: Any) -> bool:
    """Whether a divisor is known to be 0: x // 0 and x % 0 are 0 in kernels, as in NumPy."""
    return _is(x, 0) if isinstance(x, Expr) else x == 0


def _hull(values: Sequence[Any]) -> Range:
    low = high = values[0]
    for value in values[1:]:
        low, high = _least(low, value), _most(high, value)
    return low, high


def _point(r: tuple[Any, Any]) -> bool:
    return r[0] is r[1]


def _mul_bounds(a: tuple[Any, Any], b: tuple[Any, Any]) -> Range:
    return _hull([x * y for x in dict.fromkeys(a) for y in dict.fromkeys(b)])


def _floordiv_bounds(a: tuple[Any, Any], b: tuple[Any, Any]) -> Range:
    if _is_zero(b[0]) and _point(b):
        return b
    if _point(b):
        return _hull([a[0] // b[0], a[1] // b[0]])
    return _least(_least(a[0], -a[1]), 0), _most(_most(a[1], -a[0]), 0)


def _mod_bounds(a: tuple[Any, Any], b: tuple[Any, Any]) -> Range:
    low, high = _least(b[0] + 1, 0), _most(b[1] - 1, 0)
    if not _point(b) or _is_zero(b[0]):
        return low, high
    divisor = b[0]
    same_turn = (a[0] // divisor) == (a[1] // divisor)  # then the remainder grows with the number
    return _choose(same_turn, a[0] % divisor, low), _choose(same_turn, a[1] % divisor, high)


def _where_bounds(c: tuple[Any, Any], x: tuple[Any, Any], y: tuple[Any, Any]) -> Range:
    low, high = (x[0] & y[0], x[1] | y[1]) if _is_bool(x[0]) else (_least(x[0], y[0]), _most(x[1], y[1]))
    return tuple(_choose(c[0], x[i], _choose(c[1], either, y[i])) for i, either in enumerate((low, high)))


def _integer_op(rule: Callable[..., Range]) -> Callable[..., Range]:
    """A rule for bools only: the same operator on integers works on bits, which has no simple bounds."""
    return lambda *ranges: rule(*ranges) if _is_bool(ranges[0][0]) else None


OPS: dict[str, Op] = {
    "add": Op("{0} + {1}", "{0} + {1}", "{0} + {1}", lambda a, d: d[0] + d[1],
              lambda a, b: (a[0] + b[0], a[1] + b[1]), lambda a, b: a + b),
    "sub": Op("{0} - {1}", "{0} - {1}", "{0} - {1}", lambda a, d: d[0] - d[1],
              lambda a, b: (a[0] - b[1], a[1] - b[0]), lambda a, b: a - b),
    "mul": Op("{0} * {1}", "{0} * {1}", "{0} * {1}", lambda a, d: _product(d[0], a[1]) + _product(a[0], d[1]),
              _mul_bounds, lambda a, b: a * b),
    "div": Op("fk_div({0}, {1})", "{0} / {1}", "{0} / {1}",
              lambda a, d: _product(d[0], 1.0 / a[1]) - _product(_product(d[1], a[0]), 1.0 / (a[1] * a[1]))),
    "floordiv": Op("fk_floordiv({0}, {1})", "{0} // {1}", "{0} // {1}", None, _floordiv_bounds, lambda a, b: a // b),
    "mod": Op("fk_mod({0}, {1})", "{0} % {1}", "{0} % {1}",
              lambda a, d: d[0] - _product(d[1], floor(a[0] / a[1])), _mod_bounds, lambda a, b: a % b),
    "neg": Op("-{0}", "-{0}", "-{0}", lambda a, d: -d[0], lambda a: (-a[1], -a[0]), lambda a: -a),
    "abs": Op("fk_abs({0})", "abs({0})", "np.abs({0})", lambda a, d: _product(where(a[0] < 0, -1.0, 1.0), d[0]),
              lambda a: (_most(_most(a[0], -a[1]), 0), _most(-a[0], a[1])), abs),
    "min": Op("fk_min({0}, {1})", "minimum({0}, {1})", "np.minimum({0}, {1})",
              lambda a, d: where(a[1] < a[0], d[1], d[0]),
              lambda a, b: (_least(a[0], b[0]), _least(a[1], b[1])), min),
    "max": Op("fk_max({0}, {1})", "maximum({0}, {1})", "np.maximum({0}, {1})",
              lambda a, d: where(a[0] < a[1], d[1], d[0]),
              lambda a, b: (_most(a[0], b[0]), _most(a[1], b[1])), max),
    "where": Op("{0} ? {1} : {2}", "{1} if {0} else {2}", "np.where({0}, {1}, {2})",
                lambda a, d: where(a[0], d[1], d[2]),
                _where_bounds, lambda c, a, b: a if c else b),
    "lt": Op("{0} < {1}", "{0} < {1}", "{0} < {1}", None, lambda a, b: (a[1] < b[0], a[0] < b[1]), lambda a, b: a < b),
    "le": Op("{0} <= {1}", "{0} <= {1}", "{0} <= {1}", None,
             lambda a, b: (a[1] <= b[0], a[0] <= b[1]), lambda a, b: a <= b),
    "eq": Op("{0} == {1}", "{0} == {1}", "{0} == {1}", None,
             lambda a, b: ((a[0] == b[1]) & (a[1] == b[0]), (a[0] <= b[1]) & (b[0] <= a[1])), lambda a, b: a == b),
    "and": Op("{0} & {1}", "{0} & {1}", "{0} & {1}", None,
              _integer_op(lambda a, b: (a[0] & b[0], a[1] & b[1])), lambda a, b: a & b),
    "or": Op("{0} | {1}", "{0} | {1}", "{0} | {1}", None,
             _integer_op(lambda a, b: (a[0] | b[0], a[1] | b[1])), lambda a, b: a | b),
    "xor": Op("{0} ^ {1}", "{0} ^ {1}", "{0} ^ {1}", None,
              _integer_op(lambda a, b: ((a[0] & _opposite(b[1])) | (b[0] & _opposite(a[1])),
                                    _opposite((a[0] & b[0]) | (_opposite(a[1]) & _opposite(b[1]))))),
              lambda a, b: a ^ b),
    "not": Op("!{0}", "not {0}", "np.logical_not({0})", None,
              lambda a: (_opposite(a[1]), _opposite(a[0])), lambda a: not a),
    "float": Op("(fk_float)({0})", "F({0})", "F({0})"),
    "exp": Op("fk_exp({0})", "exp({0})", "np.exp({0})", lambda a, d: _product(exp(a[0]), d[0])),
    "exp2": Op("fk_exp2({0})", "exp2({0})", "np.exp2({0})",
               lambda a, d: _product(exp2(a[0]) * 0.6931471805599453, d[0])),
    "log": Op("fk_log({0})", "log({0})", "np.log({0})", lambda a, d: _product(1.0 / a[0], d[0])),
    "log2": Op("fk_log2({0})", "log2({0})", "np.log2({0})", lambda a, d: _product(1.4426950408889634 / a[0], d[0])),
    "sqrt": Op("fk_sqrt({0})", "sqrt({0})", "np.sqrt({0})", lambda a, d: _product(0.5 / sqrt(a[0]), d[0])),
    "tanh": Op("fk_tanh({0})", "tanh({0})", "np.tanh({0})", lambda a, d: _product(1.0 - tanh(a[0]) * tanh(a[0]), d[0])),
    "sin": Op("fk_sin({0})", "sin({0})", "np.sin({0})", lambda a, d: _product(cos(a[0]), d[0])),
    "cos": Op("fk_cos({0})", "cos({0})", "np.cos({0})", lambda a, d: _product(-sin(a[0]), d[0])),
    "floor": Op("fk_floor({0})", "floor({0})", "np.floor({0})"),
}  # fmt: skip


# --- reading a graph --------------------------------------------------------------------------------------------------


def walk(roots: Iterable[Expr]) -> list[Expr]:
    """Every node once, operands before the nodes that use them."""
    order: dict[int, Expr] = {}
    stack = list(roots)[::-1]  # no recursion: a mask with a thousand terms is a chain that deep
    while stack:
        waiting = [argument for argument in reversed(stack[-1].args) if id(argument) not in order]
        if waiting:
            stack += waiting
        else:
            node = stack.pop()
            order.setdefault(id(node), node)
    return list(order.values())


def key(expr: Expr) -> str:
    """The canonical text: equal for equal graphs, the part of a cache key that stands for a modification."""
    names: dict[int, str] = {}
    lines: list[str] = []
    for node in walk([expr]):
        operands = [names[id(a)] for a in node.args]
        if node.op in ("const", "symbol", "param"):
            texts = {"const": repr(node.value), "symbol": str(node.value), "param": f"{node.value}:{node.kind}"}
            names[id(node)] = texts[node.op]
        else:
            names[id(node)] = f"t{len(lines)}"
            head = f"{node.op}[{node.value}:{node.kind}]" if node.value is not None else node.op
            lines.append(f"t{len(lines)}={head}({','.join(operands)})")
    return ";".join(lines) if lines else names[id(expr)]


def rename(exprs: Sequence[Expr], names: Mapping[str, str]) -> list[Expr]:
    """The same graphs with the params and arrays renamed."""

    def renamed(node: Expr) -> Expr:
        named = node.op in ("param", "load") and node.value in names
        return Expr(node.op, node.args, names[node.value], node.kind) if named else node

    return substitute(exprs, renamed)


def substitute(exprs: Sequence[Expr], change: Callable[[Expr], Expr]) -> list[Expr]:
    """Rebuild graphs bottom up; `change` sees each node with its operands already rebuilt."""
    new: dict[int, Expr] = {}
    for node in walk(exprs):
        args = tuple(new[id(a)] for a in node.args)
        same = all(new_one is old for new_one, old in zip(args, node.args, strict=True))
        new[id(node)] = change(node if same else _rebuilt(node, args))
    return [new[id(e)] for e in exprs]


def _rebuilt(node: Expr, args: tuple[Expr, ...]) -> Expr:
    try:
        return _folded(Expr(node.op, args, node.value, node.kind))
    except ZeroDivisionError:
        return const(0)


def uses(expr: Expr, *symbols: Expr) -> bool:
    return any(node is s for node in walk([expr]) for s in symbols)


@lru_cache(maxsize=512)
def derivative(expr: Expr) -> Expr:
    """d expr / d s as a graph. At a kink (abs, min, max, where) it is the derivative of the side that is taken."""
    zero, d = const(0.0), {}
    for node in walk([expr]):
        rule = OPS[node.op].derivative if node.op in OPS else None
        if node is S:
            d[id(node)] = const(1.0)
        elif rule is None or node.kind != "float" or all(_is(d[id(a)], 0) for a in node.args if a.kind == "float"):
            d[id(node)] = zero
        else:
            d[id(node)] = rule(node.args, [d[id(a)] for a in node.args])
    return d[id(expr)]


def reaches(
    exprs: Iterable[Expr], narrow: frozenset[str] = frozenset()
) -> tuple[dict[Expr, tuple[int, int] | None], set[Expr]]:
    """What each node can be in any call: (least, greatest) of an integer or bool, None of a float; and the nodes that
    may overflow, whose result may be any int64. narrow: arrays whose elements have at most 32 bits.

    Interval arithmetic by the rules of the table, on exact integers.
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
"""Where a result computed in floating point stays within this, the exact one is an int64."""


@lru_cache(maxsize=512)
def bounds(expr: Expr, narrow: frozenset[str] = frozenset()) -> Range:
    """Bounds over the tile q0 <= q <= q1, k0 <= k <= k1 (row likewise), at one (b, h), as expressions in those symbols.

    Interval arithmetic (Moore, Interval Analysis, 1966) done on symbols, so that one rule serves the tile lists in
    NumPy and the tile loops of every kernel. They hold for integers that wrap: a node that may overflow is bounded by
    all of int64 on the tiles where it does. narrow: as in `reaches`.
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
                result = _load_bounds(node, ranges) if node.op == "load" else _op_bounds(node, ranges)  # type: ignore[arg-type]
        if result is not None and node in overflowing:
            result = _where_sure(node, ranges, result)  # type: ignore[arg-type]
        if result is None and node.kind == "bool":
            result = (FALSE, TRUE)
        known[id(node)] = result
    return known[id(expr)]


_BOUNDING = "min", "max", "mod"
"""Operations that bound what has no bounds."""


def _op_bounds(node: Expr, ranges: list[tuple[Expr, Expr]]) -> Range:
    rule = OPS[node.op].bounds
    return rule(*ranges) if rule else None


def _where_sure(node: Expr, ranges: list[tuple[Expr, Expr]], found: tuple[Expr, Expr]) -> Range:
    """The bounds found, on tiles where the same in floating point says that nothing overflows."""
    low, high = _op_bounds(node, [(to_float(r[0]), to_float(r[1])) for r in ranges])  # type: ignore[misc]
    sure = (low >= -_SURE) & (high <= _SURE)
    return where(sure, found[0], _ANY[0]), where(sure, found[1], _ANY[1])


def _load_bounds(node: Expr, ranges: list[tuple[Expr, Expr]]) -> Range:
    if all(map(_point, ranges)):
        value = Expr("load", tuple(r[0] for r in ranges), node.value, node.kind)
        return value, value
    corners = tuple(x for r in ranges for x in r)
    return tuple(Expr(op, corners, node.value, node.kind) for op in ("load_min", "load_max"))  # type: ignore[return-value]


@lru_cache(maxsize=512)
def classify(mask: Expr, narrow: frozenset[str] = frozenset()) -> tuple[Expr, Expr]:
    """(empty, full): bool expressions over a tile's corners that prove that no pair, or every pair, is visible.

    narrow: as in `reaches`. Fewer proofs are found without it, no wrong ones.
    """
    sure, possible = bounds(mask, narrow)  # type: ignore[misc]
    return ~possible, sure


def narrow(dtypes: Mapping[str, Any]) -> frozenset[str]:
    """Names of the arrays, given with their dtypes, whose elements have at most 32 bits."""
    return frozenset(name for name, dtype in dtypes.items() if str(dtype) not in ("int64", "uint64"))

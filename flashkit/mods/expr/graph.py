"""Nodes of expression graphs: symbols, literals and operations, and how a graph is read and rebuilt.

Symbols: `s` the score, `b` the batch entry, `h` the query head, `k` the index of the key, `row` the index of the query
and `q` its position on the key axis, `row + q_offset`. Integers are int64 and wrap on overflow, as NumPy's do. Floats
have the kernel's computing precision.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from ...devices.forking import inner_lock
from ...errors import shown

__all__ = [
    "FALSE", "INT64", "K0", "K1", "MAX_PARAM", "MAX_POSITION", "Q0", "Q1", "ROW", "ROW0", "ROW1", "TRUE", "Array", "B",
    "Expr", "H", "K", "Kind", "Q", "S", "as_expr", "const", "is_const", "is_name", "key", "param", "rename",
    "substitute", "symbol", "to_float", "uses", "walk", "wrapped",
]  # fmt: skip

Kind = Literal["bool", "int", "float"]

INT64 = -(2**63), 2**63 - 1
MAX_POSITION = 2**48
"""Greatest absolute value of positions, rows and keys."""
MAX_PARAM = 2**60
"""Greatest absolute value of integer params: a position and a few of them add up without overflow (mods.trace)."""

MAX_INTEGER = 2**30
"""Greatest absolute value of a float as an integer (functions.to_int): float32 holds it, and indices are made of it."""

MAX_BITS = 1023
"""Of integer constants: float64 holds them. Those beyond int64 are for floats only (mods.trace)."""

_SYMBOL = re.compile(r"[a-z][a-z0-9]*(\.[a-z]+\[[0-9]+\])?")
_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float}
LOADS = "load", "load_min", "load_max"


def is_name(text: Any) -> bool:
    """Whether code can name a value so: a Python identifier in its normal form, no keyword, and nothing of Python's."""
    return (
        type(text) is str and text.isidentifier() and not keyword.iskeyword(text) and not text.startswith("__")
        and (text.isascii() or unicodedata.normalize("NFKC", text) == text)
    )  # fmt: skip


_NUMBERS = ("int", "int", "int"), ("float", "float", "float")
FUNCTIONS = "exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor", "erf"
"""Operations that are functions of one float."""

KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("add", "sub", "mul", "floordiv", "mod", "min", "max"), _NUMBERS),
    **dict.fromkeys(("neg", "abs"), (("int", "int"), ("float", "float"))),
    **dict.fromkeys(("lt", "le", "eq"), (("int", "int", "bool"), ("float", "float", "bool"))),
    **dict.fromkeys(("and", "or", "xor"), (("bool", "bool", "bool"), ("int", "int", "int"))),
    **dict.fromkeys(FUNCTIONS, (("float", "float"),)),
    "not": (("bool", "bool"),), "float": (("int", "float"),), "int": (("float", "int"),),
    "div": (("float", "float", "float"),),
    "where": tuple(("bool", kind, kind, kind) for kind in _TYPES),
}  # fmt: skip
"""For each operation the kinds of its operands and, last, of its result: one tuple for each way to use it."""


def _check(op: Any, args: Any, value: Any, kind: Any) -> None:
    """Refuse a node with other text than names, numbers and operations, or with operands of a wrong kind."""
    kinds = tuple(arg.kind if type(arg) is Expr else None for arg in args) if type(args) is tuple else (None,)
    if type(op) is not str or kind not in _TYPES:
        fits = False
    elif op in LOADS:
        fits = is_name(value) and bool(args) and set(kinds) == {"int"}
    elif op == "param":
        fits = is_name(value) and not args
    elif op == "symbol":
        fits = type(value) is str and _SYMBOL.fullmatch(value) is not None and not args
    elif op == "const":
        fits = type(value) is _TYPES[kind] and not args
    else:
        fits = value is None and (*kinds, kind) in KINDS.get(op, ())
    if not fits:
        raise ValueError(f"no node of an expression: {op!r} with value {value!r:.80} of kind {kind!r}")


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_intern_lock = inner_lock()


class Expr:
    """One node of a graph. Nodes are interned: equal nodes are the same object, so `is` compares them."""

    __slots__ = ("__weakref__", "args", "kind", "op", "value")
    op: str
    args: tuple[Expr, ...]
    value: Any
    kind: Kind

    def __new__(cls, op: str, args: tuple[Expr, ...] = (), value: Any = None, kind: Kind = "float") -> Expr:
        # repr distinguishes 0.0 from -0.0 and 1 from 1.0; == does not.
        identity = (op, tuple(map(id, args)), repr(value), kind)
        with _intern_lock:
            node = _interned.get(identity)
            if node is None:
                _check(op, args, value, kind)
                node = object.__new__(cls)
                for name, content in (("op", op), ("args", args), ("value", value), ("kind", kind)):
                    object.__setattr__(node, name, content)
                node = _interned.setdefault(identity, node)  # a signal handler may have come first
            return node

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("an expression is immutable")

    def __reduce__(self) -> Any:
        """As a list of nodes, which name their operands by their places in it: a pickled graph may be deep."""
        nodes = walk([self])
        place = {id(node): i for i, node in enumerate(nodes)}
        rows = tuple((node.op, tuple(place[id(a)] for a in node.args), node.value, node.kind) for node in nodes)
        return from_rows, (rows,)

    def __repr__(self) -> str:
        return key(self)

    __hash__ = object.__hash__

    # Arithmetic
    def __add__(self, other: Any) -> Expr: return arithmetic("add", self, other)
    def __radd__(self, other: Any) -> Expr: return arithmetic("add", other, self)
    def __sub__(self, other: Any) -> Expr: return arithmetic("sub", self, other)
    def __rsub__(self, other: Any) -> Expr: return arithmetic("sub", other, self)
    def __mul__(self, other: Any) -> Expr: return arithmetic("mul", self, other)
    def __rmul__(self, other: Any) -> Expr: return arithmetic("mul", other, self)
    def __truediv__(self, other: Any) -> Expr: return floating("div", self, other)
    def __rtruediv__(self, other: Any) -> Expr: return floating("div", other, self)
    def __floordiv__(self, other: Any) -> Expr: return arithmetic("floordiv", self, other)
    def __rfloordiv__(self, other: Any) -> Expr: return arithmetic("floordiv", other, self)
    def __mod__(self, other: Any) -> Expr: return arithmetic("mod", self, other)
    def __rmod__(self, other: Any) -> Expr: return arithmetic("mod", other, self)
    def __pow__(self, other: Any) -> Expr: return power(self, other)
    def __rpow__(self, other: Any) -> Expr: return power(other, self)
    def __neg__(self) -> Expr: return arithmetic("neg", self)
    def __pos__(self) -> Expr: return self
    def __abs__(self) -> Expr: return arithmetic("abs", self)

    def clip(self, min: Any = None, max: Any = None, out: None = None) -> Expr:
        """What numpy.clip calls."""
        low = self if min is None else arithmetic("max", self, min)
        return low if max is None else arithmetic("min", low, max)

    # Comparison
    def __lt__(self, other: Any) -> Expr: return comparison("lt", self, other)
    def __le__(self, other: Any) -> Expr: return comparison("le", self, other)
    def __gt__(self, other: Any) -> Expr: return comparison("lt", other, self)
    def __ge__(self, other: Any) -> Expr: return comparison("le", other, self)
    def __eq__(self, other: Any) -> Expr: return comparison("eq", self, other)  # type: ignore[override]
    def __ne__(self, other: Any) -> Expr: return ~comparison("eq", self, other)  # type: ignore[override]

    # Logic on bools, bits on integers
    def __and__(self, other: Any) -> Expr: return bitwise("and", self, other)
    def __rand__(self, other: Any) -> Expr: return bitwise("and", other, self)
    def __or__(self, other: Any) -> Expr: return bitwise("or", self, other)
    def __ror__(self, other: Any) -> Expr: return bitwise("or", other, self)
    def __xor__(self, other: Any) -> Expr: return bitwise("xor", self, other)
    def __rxor__(self, other: Any) -> Expr: return bitwise("xor", other, self)
    def __invert__(self) -> Expr: return logical_not(self)
    def __lshift__(self, bits: Any) -> Expr: return shifted("mul", self, bits)
    def __rshift__(self, bits: Any) -> Expr: return shifted("floordiv", self, bits)

    # A symbol has no single value, so Python's control flow and conversions raise.
    def __bool__(self) -> bool:
        raise TypeError(
            "a symbol has no truth value: `if`, `and`, `or`, `not` and chained comparisons cannot be traced; "
            "use flashkit.where(condition, a, b) and the operators &, |, ~ instead"
        )

    def _no_number(self, *_: Any) -> Any:
        raise TypeError("a symbol stands for every position at once and has no single value here; loops and int() or "
                        "float() of a symbol cannot be traced; pass arrays as keyword arguments, "
                        "flashkit.mods.score(f, name=array), so that name[index] is understood")

    __int__ = __float__ = __index__ = __len__ = __iter__ = _no_number

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Trace np.tanh(s) and the like as flashkit's own functions."""
        function = partial(floating, "erf") if ufunc.__name__ == "erf" else _UFUNCS.get(ufunc)  # SciPy's
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
            raise ValueError(f"{self.name}: expected {self.ndim} indices, one for each axis, got {len(indices)}")
        nodes = tuple(as_expr(i) for i in indices)
        for node in nodes:
            if node.kind != "int":
                raise TypeError(f"index of {self.name}: expected an integer, got {node.kind}")
        return Expr("load", nodes, self.name, self.kind)

# --- making nodes -----------------------------------------------------------------------------------------------------


def const(value: bool | int | float) -> Expr:
    """A literal, which is compiled in."""
    if isinstance(value, (bool, np.bool_)):
        return Expr("const", (), bool(value), "bool")
    if isinstance(value, (int, np.integer)):
        return Expr("const", (), int(value), "int")
    return Expr("const", (), float(value), "float")


def param(name: str, kind: Kind) -> Expr:
    """A scalar given at run time. Another value needs no compilation."""
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
    if isinstance(value, np.ndarray) and value.ndim == 0:  # np.int64(3) < q passes one
        value = value[()]
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"constant of a modification: expected a number within float64, got {shown(value)}")
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return const(value)  # type: ignore[arg-type]
    if isinstance(value, Array):
        raise TypeError(
            f"{value.name}: expected {value.ndim} indices, one for each axis, got none; pass a number for an array "
            "without axes"
        )
    raise TypeError(
        f"{type(value).__name__} cannot be part of a traced modification; scalars and symbols can, and arrays that are "
        "passed as keyword arguments: flashkit.mods.score(f, name=array)"
    )


def to_float(x: Any) -> Expr:
    """The same number as a float; a bool counts as 0 or 1."""
    x = number(as_expr(x))
    if x.kind == "float":
        return x
    return const(float(x.value)) if x.op == "const" else Expr("float", (x,), None, "float")


def number(x: Expr) -> Expr:
    """The node itself, or 0 or 1 for a bool."""
    return select(x, 1, 0) if x.kind == "bool" else x


def wrapped(value: int) -> int:
    """The int64 that integer arithmetic gives for an exact result."""
    return (value - INT64[0]) % 2**64 + INT64[0]


_FOLD: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "mod": operator.mod, "neg": operator.neg, "abs": abs, "min": min, "max": max,
    "where": lambda c, x, y: x if c else y, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.not_,
}  # fmt: skip
"""Operations on Python's exact ints and bools."""


def _fold(op: str, args: tuple[Expr, ...], kind: Kind) -> Expr:
    """Make the node, or its value where all operands are literal integers; floats keep the kernel's rounding."""
    try:
        return _folded(Expr(op, args, None, kind))
    except ZeroDivisionError:
        raise ZeroDivisionError(f"division by zero in a modification: {op} of {args[0]!r} by 0") from None


def _folded(node: Expr) -> Expr:
    known = node.op in _FOLD and all(a.op == "const" and a.kind != "float" for a in node.args)
    if not known or node.kind == "float":
        return node
    value = _FOLD[node.op](*(a.value for a in node.args))
    return const(wrapped(value) if node.kind == "int" else value)


def arithmetic(op: str, *operands: Any) -> Expr:
    args = tuple(number(as_expr(x)) for x in operands)
    kind: Kind = "float" if any(a.kind == "float" for a in args) else "int"
    if kind == "float":
        args = tuple(map(to_float, args))
    neutral = {"add": 0, "sub": 0, "mul": 1}.get(op)
    if neutral is not None and is_const(args[1], neutral):
        return args[0]
    if neutral is not None and op != "sub" and is_const(args[0], neutral):
        return args[1]
    return _fold(op, args, kind)


def is_const(x: Expr, value: int) -> bool:
    # 0.0 + x differs from x for x = -0.0 alone, which no kernel distinguishes. Tracing never yields a literal -0.0.
    return x.op == "const" and x.kind != "bool" and x.value == value


def floating(op: str, *operands: Any) -> Expr:
    return Expr(op, tuple(map(to_float, operands)), None, "float")


def power(x: Any, exponent: Any) -> Expr:
    exponent = exponent.item() if isinstance(exponent, np.generic) else exponent
    if isinstance(exponent, int) and not isinstance(exponent, bool) and 0 <= exponent <= 8:
        result = const(1.0) if as_expr(x).kind == "float" else const(1)
        for _ in range(exponent):
            result = result * x
        return result
    if isinstance(exponent, float) and exponent == 0.5:
        return floating("sqrt", x)
    if isinstance(exponent, float) and exponent.is_integer() and 0 <= exponent <= 8:
        return power(to_float(x), int(exponent))
    if isinstance(exponent, Expr) and isinstance(x, int | float) and 0 < x < math.inf:
        return floating("exp2", exponent if x == 2 else exponent * math.log2(x))
    expected = "an integer exponent from 0 to 8, or 0.5, or a positive number as the base"
    raise ValueError(f"**: expected {expected}, got {exponent!r}; use exp(y * log(x)) otherwise")


def comparison(op: str, x: Any, y: Any) -> Expr:
    a, b = as_expr(x), as_expr(y)
    if a.kind == b.kind == "bool":
        if op == "eq":
            return ~(a ^ b)
        raise TypeError("bools have no order; use &, | and ~")
    a, b = number(a), number(b)
    if "float" in (a.kind, b.kind):
        a, b = to_float(a), to_float(b)
    return _fold(op, (a, b), "bool")


def bitwise(op: str, x: Any, y: Any) -> Expr:
    a, b = as_expr(x), as_expr(y)
    if a.kind != b.kind or a.kind == "float":
        raise TypeError(f"&, | and ^: expected two bools or two integers, got {a.kind} and {b.kind}")
    if a.kind == "int":
        return _fold(op, (a, b), "int")
    for known, other in ((a, b), (b, a)):
        if known.op == "const":
            absorbing = {"and": not known.value, "or": known.value, "xor": False}[op]
            return known if absorbing else (~other if op == "xor" and known.value else other)
    return a if a is b and op != "xor" else Expr(op, (a, b), None, "bool")


def shifted(op: str, x: Expr, bits: Any) -> Expr:
    """x << bits or x >> bits, as a multiplication or a division by a power of two."""
    if x.kind == "float" or not isinstance(bits, int | np.integer) or not 0 <= bits <= 62:
        raise TypeError(f"<< and >>: expected an integer and a number of bits from 0 to 62, got {x.kind} and {bits!r}")
    return arithmetic(op, x, 1 << int(bits))


def _logical(op: str, x: Any, y: Any) -> Expr:
    """np.logical_and and np.logical_or, which differ from the bitwise operators on integers."""
    for kind in (as_expr(x).kind, as_expr(y).kind):
        if kind != "bool":
            raise TypeError(f"numpy.logical_{op}: expected traced bools, got {kind}; compare with != 0 first")
    return bitwise(op, x, y)


def logical_not(x: Any) -> Expr:
    x = as_expr(x)
    if x.kind != "bool":
        raise TypeError(f"~: expected a bool, got {x.kind}")
    return x.args[0] if x.op == "not" else _fold("not", (x,), "bool")


def select(condition: Any, x: Any, y: Any) -> Expr:
    """See functions.where."""
    c, a, b = as_expr(condition), as_expr(x), as_expr(y)
    if c.kind != "bool":
        raise TypeError(f"condition of where(): expected a bool, got {c.kind}")
    if a.kind != b.kind:
        a, b = (to_float(a), to_float(b)) if "float" in (a.kind, b.kind) else (number(a), number(b))
    if c.op == "const":
        return a if c.value else b
    return a if a is b else Expr("where", (c, a, b), None, a.kind)


def sign(x: Any) -> Expr:
    """See functions.sign."""
    return select(as_expr(x) > 0, 1, select(as_expr(x) < 0, -1, 0))


_UFUNCS: dict[np.ufunc, Callable[..., Expr]] = {
    **{getattr(np, name): partial(floating, name) for name in FUNCTIONS if name != "erf"},
    np.sign: sign, np.minimum: partial(arithmetic, "min"), np.maximum: partial(arithmetic, "max"),
    np.abs: partial(arithmetic, "abs"), np.negative: partial(arithmetic, "neg"),
    np.add: partial(arithmetic, "add"), np.subtract: partial(arithmetic, "sub"),
    np.multiply: partial(arithmetic, "mul"), np.true_divide: partial(floating, "div"),
    np.floor_divide: partial(arithmetic, "floordiv"), np.remainder: partial(arithmetic, "mod"),
    np.less: partial(comparison, "lt"), np.less_equal: partial(comparison, "le"),
    np.greater: lambda x, y: comparison("lt", y, x), np.greater_equal: lambda x, y: comparison("le", y, x),
    np.equal: partial(comparison, "eq"), np.not_equal: lambda x, y: ~comparison("eq", x, y),
    np.logical_and: partial(_logical, "and"), np.logical_or: partial(_logical, "or"),
    np.logical_not: logical_not, np.invert: logical_not,
    np.bitwise_and: partial(bitwise, "and"), np.bitwise_or: partial(bitwise, "or"),
}  # fmt: skip


# --- reading and rebuilding a graph -----------------------------------------------------------------------------------


def walk(roots: Iterable[Expr]) -> list[Expr]:
    """Every node once, operands before the nodes that use them."""
    order: dict[int, Expr] = {}
    stack = list(roots)[::-1]  # no recursion: the chain of a mask with a thousand terms is a thousand nodes deep
    while stack:
        waiting = [argument for argument in reversed(stack[-1].args) if id(argument) not in order]
        if waiting:
            stack += waiting
        else:
            node = stack.pop()
            order.setdefault(id(node), node)
    return list(order.values())


def from_rows(rows: Any) -> Expr:
    """The graph of this pickled form, interned again. ValueError if a row is no node, or comes before an operand."""
    nodes: list[Expr] = []
    for row in rows:
        if type(row) is not tuple or len(row) != 4 or type(row[1]) is not tuple:
            raise ValueError(f"no node of a pickled expression: {shown(row)}")
        op, places, value, kind = row
        if not all(type(place) is int and 0 <= place < len(nodes) for place in places):
            raise ValueError(f"a node of a pickled expression names operands that do not come before it: {shown(row)}")
        nodes.append(Expr(op, tuple(nodes[place] for place in places), value, kind))
    if not nodes:
        raise ValueError("a pickled expression without nodes")
    return nodes[-1]


def key(expr: Expr) -> str:
    """The canonical text, equal for equal graphs: the part of a cache key that stands for a modification."""
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
    """Whether the graph has one of these symbols."""
    return any(node is s for node in walk([expr]) for s in symbols)

"""From a Python function to an expression graph: it is called once, with symbols for its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np

from ..call import interop
from ..errors import shown
from . import expr
from .expr import Array, Expr, Kind

ModKind = Literal["mask", "score"]
Function = TypeVar("Function", bound=Callable[..., Any])

SYMBOLS: dict[str, tuple[Expr, ...]] = {
    "mask": (expr.B, expr.H, expr.Q, expr.K),
    "score": (expr.S, expr.B, expr.H, expr.Q, expr.K),
}

# Names that the rendered code uses itself: symbols, tile corners, temporaries, helpers, and keywords of C++.
_RESERVED = re.compile(
    r"s|b|h|(q|k|row)[01]?|t\d+|np|F|I|fk_.*|load_m(in|ax)\d*|float|abs|minimum|maximum|exp2?|log2?|sqrt|tanh|sin|"
    "cos|erf|to_int|floor|auto|bool|case|char|const|default|delete|do|double|enum|extern|goto|inline|int|long|"
    "namespace|new|operator|private|public|register|short|signed|sizeof|static|struct|switch|template|this|throw|"
    "typename|union|unsigned|using|virtual|void|volatile"
)


def graph_name(name: str) -> str:
    """The name of a keyword argument in the graph: its own, with _ appended if the rendered code uses that name."""
    return name + "_" if _RESERVED.fullmatch(name.rstrip("_")) else name


def pure(function: Function) -> Function:
    """Mark a function that closes over nothing that changes and has no defaults, so that its graph is cached."""
    function.__flashkit_pure__ = True  # type: ignore[attr-defined]
    return function


def is_marked_pure(function: Any) -> bool:
    """Whether `pure` marked it."""
    return getattr(function, "__flashkit_pure__", False) is True


def as_array(name: str, value: Any, expected: str = "an array") -> np.ndarray:
    """The value as a NumPy array; TypeError with `expected` if it is masked, or of lists of different lengths."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected a plain array, got a masked array; pass x.filled(...)")
    try:
        return np.asarray(value)
    except ValueError:
        raise TypeError(f"{name}: expected {expected}, got lists of different lengths: {shown(value)}") from None


def native_array(name: str, value: Any) -> Any:
    """An array of NumPy or CuPy for that of any library, or a list; TypeError if it cannot be read in place."""
    value = interop.native(name, value)
    return value if hasattr(value, "__cuda_array_interface__") else as_array(name, value)


DTYPES: dict[str, Kind] = {
    "bool": "bool", **{f"{sign}int{bits}": "int" for bits in (8, 16, 32, 64) for sign in ("", "u")},
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "float"),
}  # fmt: skip
"""What values of a modification can be."""


def value_kind(name: str, value: Any) -> Kind:
    """The kind of a value; TypeError for another dtype. `name` is for the error."""
    kind = DTYPES.get(str(value.dtype.name))
    if kind is None:
        raise TypeError(f"{name}: expected dtype bool, an integer or a float of up to 64 bits, got {value.dtype}")
    return kind


def high_name(name: str) -> str:
    """The name in the graph of the upper 32 bits of a wide integer."""
    return f"fk_high_{name}"


def trace_graph(
    function: Callable[..., Any], kind: ModKind, slots: Sequence[tuple[str, int | None, Kind, bool]]
) -> Expr:
    """The checked graph of a function of symbols. slots: name, axes (None: a scalar), kind, beyond MAX_PARAM."""
    symbols = SYMBOLS[kind]
    named: dict[str, Expr | Array] = {}
    for name, ndim, of_value, wide in slots:
        inside = graph_name(name)
        named[name] = expr.param(inside, of_value) if ndim is None else Array(inside, ndim, of_value)
        if wide:
            named[name] = expr.param(high_name(name), "int") * 2**32 + named[name]
    what = getattr(function, "__name__", repr(function))
    try:
        result = function(*symbols, **named)
    except IndexError as error:  # NumPy raises it for an index that is a symbol
        raise TypeError(
            f"{kind}_mod {what}: an array was indexed by a symbol ({error}); pass the array as a keyword argument: "
            f"flashkit.mods.{kind}({what}, name=array)"
        ) from error
    except TypeError as error:
        raise TypeError(f"{kind}_mod {what}({', '.join(s.value for s in symbols)}): {error}") from error
    graph = expr.as_expr(result)
    for node in expr.walk([graph]):
        if node.op == "const" and node.kind == "int" and not expr.INT64[0] <= node.value <= expr.INT64[1]:
            raise ValueError(f"{kind}_mod {what}: expected integers within int64, got {shown(node.value)}")
    if kind == "score":
        return expr.to_float(graph)
    if graph.kind != "bool":
        raise TypeError(f"mask_mod {what}: expected a bool, got {graph.kind}; compare with ==, <, ... or use where()")
    if expr.uses(graph, expr.S):
        raise TypeError(f"mask_mod {what} must not depend on the score; return -inf from a score_mod instead")
    return graph


def check_traced(graph: Expr, kind: ModKind) -> None:
    """ValueError unless the graph is one that `trace_graph` could make, whose names have one use each."""
    if graph.kind != {"mask": "bool", "score": "float"}[kind]:
        raise ValueError(f"the graph of a {kind} mod gives {graph.kind}")
    named: dict[str, tuple[Any, ...]] = {}
    for node in expr.walk([graph]):
        if node.op == "symbol" and not any(node is known for known in (*SYMBOLS[kind], expr.ROW)):
            raise ValueError(f"the graph of a {kind} mod has the symbol {node.value}")
        if node.op in ("load_min", "load_max"):
            raise ValueError(f"the graph of a {kind} mod has {node.op}, which is for bounds of tiles")
        if node.op == "const" and node.kind == "int" and not expr.INT64[0] <= node.value <= expr.INT64[1]:
            raise ValueError(f"graph of a {kind} mod: expected integers within int64, got {shown(node.value)}")
        if node.op in ("param", "load"):
            use = node.op, len(node.args), node.kind
            if named.setdefault(node.value, use) != use:
                raise ValueError(f"the graph of a {kind} mod uses {node.value} in two ways")


trace_pure = lru_cache(maxsize=None)(trace_graph)


@lru_cache(maxsize=1024)
def values_of(graph: Expr) -> tuple[tuple[tuple[str, int | None, Kind], ...], frozenset[str]]:
    """(name, axes or None for a scalar, kind) of each value, and names of arrays that indices are computed from."""
    nodes = [node for node in expr.walk([graph]) if node.op in ("param", "load")]
    traced = {node.value: (node.value, len(node.args) if node.op == "load" else None, node.kind) for node in nodes}
    within = (inner for node in nodes for inner in expr.walk(node.args))
    return tuple(traced.values()), frozenset(inner.value for inner in within if inner.op == "load")

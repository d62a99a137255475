"""Expression graphs as code in CUDA C++, in Python for Numba and in NumPy, and their evaluation with NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from .expr import INT64, OPS, Expr, reaches, walk

Language = Literal["cuda", "numba", "numpy"]

_TYPES = {"bool": "bool", "int": "long long", "float": "fk_float"}
_LITERALS: dict[str, Callable[[Any], str]] = {
    "bool": lambda v: str(v), "int": repr, "float": lambda v: f"F({v!r})" if np.isfinite(v) else f"F(float('{v!r}'))",
}  # fmt: skip
_CUDA_LITERALS: dict[str, Callable[[Any], str]] = {
    "bool": lambda v: str(v).lower(), "int": lambda v: f"{v}ll" if v > INT64[0] else f"({v + 1}ll - 1)",
    # fk_special(1), (-1) and (0): inf, -inf and NaN
    "float": lambda v: f"(fk_float)({v!r})" if np.isfinite(v) else f"fk_special({0 if v != v else int(np.sign(v))})",
}  # fmt: skip


def load_text(node: Expr, operands: list[str], language: Language) -> str:
    """The text that reads an array, or its least or greatest element, at indices."""
    if node.op != "load":  # load_min, load_max
        text = f"{node.op}{len(operands) // 2 if language == 'numba' else ''}({node.value}, {', '.join(operands)})"
        return f"fk_{text}" if language == "cuda" else f"({text} != 0)" if node.kind == "bool" else text
    if language == "cuda":
        offset = " + ".join(f"(long long)({i}) * {node.value}_stride{axis}" for axis, i in enumerate(operands)) or "0"
        return f"fk_load_{node.kind}({node.value}, {offset})"
    scalar = "0" if language == "numba" else "()"  # an array without axes; Numba's views have at least one
    element = f"{node.value}[{', '.join(operands) or scalar}]"
    return {"float": f"F({element})", "int": f"I({element})", "bool": f"({element} != 0)"}[node.kind]


def _bits_of_divisor(node: Expr) -> int | None:
    """log2 of the divisor of // and % on integers, if it is a power of two: shifts and masks round as these do."""
    if node.op not in ("floordiv", "mod") or node.kind != "int":
        return None
    divisor = node.args[1]
    known = divisor.op == "const" and divisor.value > 0 and divisor.value & (divisor.value - 1) == 0
    return divisor.value.bit_length() - 1 if known else None


_UNSIGNED = "np.int64(np.uint64(I({0})) %s np.uint64(I({1})))"
_NEGATED = "np.int64(np.uint64(0) - np.uint64(I({0})))"
_WRAPPING = {
    "add": _UNSIGNED % "+", "sub": _UNSIGNED % "-", "mul": _UNSIGNED % "*", "neg": _NEGATED,
    "abs": f"{_NEGATED} if {{0}} < 0 else I({{0}})", "floordiv": f"{_NEGATED} if {{1}} == -1 else {{0}} // {{1}}",
}  # fmt: skip


def _wrapping_text(node: Expr, operands: list[str], language: Language) -> str:
    """The text of an operation that may overflow. In C++, and in LLVM as Numba uses it, only unsigned integers wrap."""
    if language == "cuda" and node.op != "floordiv":  # fk_floordiv does
        return f"fk_wrapping_{node.op}({', '.join(operands)})"
    text = _WRAPPING[node.op] if language == "numba" else getattr(OPS[node.op], language)
    return text.format(*operands)


def assignments(
    exprs: Sequence[Expr], language: Language, load: Callable[[Expr, list[str]], str] | None = None,
    int32_arrays: frozenset[str] = frozenset(),
) -> tuple[list[tuple[Expr, str, str]], list[str]]:  # fmt: skip
    """The operations of graphs in order, each once, as (node, name, text), and the text of each result.

    The text refers to symbols, params and arrays by name, and to helpers that each language's prelude defines: `F` (to
    the computing precision) and `I` (to 64-bit integer) in Python, `fk_...` functions in CUDA C++.

    load: gives the text that reads an array, or its least or greatest element, at indices; by default the language's.
    int32_arrays: as in `expr.reaches`.
    """
    names: dict[int, str] = {}
    steps: list[tuple[Expr, str, str]] = []
    literals = _CUDA_LITERALS if language == "cuda" else _LITERALS
    overflowing = reaches(exprs, int32_arrays)[1]
    for node in walk(exprs):
        if node.op == "const":
            names[id(node)] = literals[node.kind](node.value)
        elif node.op in ("symbol", "param"):
            names[id(node)] = node.value
        else:
            operands = [f"({text})" if text.startswith("-") else text for text in (names[id(a)] for a in node.args)]
            is_load = node.op.startswith("load")
            if is_load:
                text = load(node, operands) if load else load_text(node, operands, language)
            elif language == "cuda" and (bits := _bits_of_divisor(node)) is not None:
                text = f"{operands[0]} >> {bits}" if node.op == "floordiv" else f"{operands[0]} & {2**bits - 1}"
            elif node in overflowing:
                text = _wrapping_text(node, operands, language)
            else:
                text = getattr(OPS[node.op], language).format(*operands)
            names[id(node)] = f"t{len(steps)}"
            steps.append((node, f"t{len(steps)}", text))
    return steps, [names[id(e)] for e in exprs]


def render(
    exprs: Sequence[Expr], language: Language, indent: str = "", int32_arrays: frozenset[str] = frozenset()
) -> tuple[list[str], list[str]]:
    """The lines of code that compute the expressions, and the text of each result; see `assignments`."""
    steps, results = assignments(exprs, language, int32_arrays=int32_arrays)
    if language == "cuda":
        return [f"{indent}const {_TYPES[node.kind]} {name} = {text};" for node, name, text in steps], results
    return [f"{indent}{name} = {text}" for _, name, text in steps], results


@lru_cache(maxsize=512)
def _numpy_function(expr: Expr) -> tuple[dict[str, Any], Callable[..., Any]]:
    """The names that have values, each with a scalar's kind or False; and the function of these and `_HELPERS`."""
    kinds = {node.value: node.op in ("symbol", "param") and node.kind
             for node in walk([expr]) if node.op in ("symbol", "param") or node.op.startswith("load")}  # fmt: skip
    kinds = dict(sorted(kinds.items()))
    lines, (result,) = render([expr], "numpy", "    ")
    source = f"def f({', '.join([*kinds, *_HELPERS])}):\n" + "\n".join([*lines, f"    return {result}"])
    scope: dict[str, Any] = {"np": np, "erf": _erf}
    exec(compile(source, "<flashkit expression>", "exec"), scope)
    return kinds, scope["f"]


def _erf(x: Any) -> Any:
    """The error function of an array of NumPy or CuPy, of its dtype."""
    if hasattr(x, "__cuda_array_interface__"):
        from cupyx.scipy.special import erf

        return erf(x)
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x), np.asarray(x).dtype)[()]


_HELPERS = "F", "I", "load_min", "load_max"


def evaluate(expr: Expr, env: Mapping[str, Any], dtype: Any = np.float64) -> Any:
    """Compute the expression with NumPy or CuPy. env: values by name; KeyError if one is missing. dtype: of floats."""
    kinds, function = _numpy_function(expr)
    missing = [name for name in kinds if name not in env]
    if missing:
        raise KeyError(f"no value given for {', '.join(missing)}")

    def cast(x: Any, to: Any) -> Any:
        return x.astype(to, copy=False) if hasattr(x, "__cuda_array_interface__") else np.asarray(x, to)[()]

    helpers: tuple[Callable[..., Any], ...] = (
        lambda x: cast(x, dtype), lambda x: cast(x, np.int64),
        lambda a, *corners: a.bounds(0, corners), lambda a, *corners: a.bounds(1, corners),
    )  # fmt: skip
    # NumPy's 64-bit scalars: plain Python numbers raise on division by zero, and int32 positions wrap too early.
    scalars: dict[Any, Callable[..., Any]] = {
        "float": helpers[0], "int": helpers[1], "bool": lambda x: cast(x, bool),
        False: lambda array: array,
    }  # fmt: skip
    values = [scalars[kind](env[name]) for name, kind in kinds.items()]
    with np.errstate(all="ignore"):
        return function(*values, *helpers)

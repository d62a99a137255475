"""Score and mask modifications: the ready-made ones, and how to make one from an ordinary function.

A mask mod is a function of positions that says which pairs are visible; a score mod changes the score:

    def causal(b, h, q, k):                return k <= q
    def alibi(s, b, h, q, k, *, slopes):   return s - slopes[h] * abs(q - k)

`q` is the query's position on the key axis: its row plus `q_offset`. Keyword arguments are scalars or arrays; they are
given at run time, so other values compile nothing. `flashkit.mods.mask(f, **values)` and `score(f, **values)` bind
them.

Sources: causal and bottom-right alignment, FlashAttention 2.1; ALiBi, Press et al. 2022 (arXiv 2108.12409);
soft-capping, Gemma 2 (arXiv 2408.00118); sliding window, Longformer (arXiv 2004.05150); prefix LM, Raffel et al.
2020 (arXiv 1910.10683).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal

import numpy as np

from . import codegen, expr
from .expr import Array, Expr, Kind

ModKind = Literal["mask", "score"]
_SYMBOLS: dict[str, tuple[Expr, ...]] = {
    "mask": (expr.B, expr.H, expr.Q, expr.K),
    "score": (expr.S, expr.B, expr.H, expr.Q, expr.K),
}
_KINDS: dict[str, Kind] = {"b": "bool", "i": "int", "u": "int", "f": "float"}

# Names that the rendered code uses itself: symbols, tile corners, temporaries, helpers, and the words of C++.
_RESERVED = re.compile(
    r"s|b|h|(q|k|row)[01]?|t\d+|np|F|I|fk_.*|load_m(in|ax)\d*|float|abs|minimum|maximum|exp2?|log2?|sqrt|tanh|sin|cos|floor|"
    r"auto|bool|case|char|const|default|delete|do|double|enum|extern|goto|inline|int|long|namespace|new|operator|private|public|register|"
    r"short|signed|sizeof|static|struct|switch|template|this|throw|typename|union|unsigned|using|virtual|void|volatile"
)


def _free(name: str) -> str:
    """The name under which a keyword argument goes in the graph: its own, with _ added where the code needs that
    itself.
    """
    return name + "_" if _RESERVED.fullmatch(name.rstrip("_")) else name


@dataclass(frozen=True, eq=False)
class Mod:
    """A traced modification: its graph, and the values of the scalars (params) and arrays that it names."""

    kind: ModKind
    expr: Expr
    params: Mapping[str, int | float]
    """By name; what lies beyond 2^60 has its upper 32 bits under fk_high_<name>."""
    arrays: Mapping[str, Any]

    def __and__(self, other: Mod | Callable[..., Any]) -> Mod:
        return combine(lambda a, b: a & b, "mask", self, other)

    def __or__(self, other: Mod | Callable[..., Any]) -> Mod:
        return combine(lambda a, b: a | b, "mask", self, other)

    def __rand__(self, other: Callable[..., Any]) -> Mod:
        return trace(other, "mask") & self

    def __ror__(self, other: Callable[..., Any]) -> Mod:
        return trace(other, "mask") | self

    def __invert__(self) -> Mod:
        return combine(lambda a: ~a, "mask", self)

    def then(self, other: Mod | Callable[..., Any]) -> Mod:
        """The score mod that applies this one first and `other` to its result."""
        return combine(after, "score", self, other)

    def snapshot(self, *, whole: bool = False) -> Mod:
        """The same modification with values of its own, as one call takes it, so that what is checked of them is what
        a kernel reads: integers, and bools that an index depends on, are copies; of other arrays it has views, whose
        contents alone can change. whole: all arrays are copies.

        Raises TypeError where a value is no longer of the kind or of the number of axes that the function was traced
        with.
        """
        params, arrays = dict(self.params), dict(self.arrays)
        traced, indexing = _values_of(self.expr)
        for name, ndim, kind in traced:
            if ndim is None:
                if not isinstance(params.get(name), int if kind == "int" else int | float):
                    raise TypeError(f"{name} of a {self.kind} mod is {params.get(name)!r}; {kind}, as traced, fits")
            else:
                copied = whole or kind == "int" or (kind == "bool" and name in indexing)
                arrays[name] = _own(f"{name} of a {self.kind} mod", arrays.get(name), ndim, kind, copied)
        return Mod(self.kind, self.expr, params, arrays)

    @property
    def key(self) -> str:
        """Canonical text of the graph; the values are no part of it."""
        return expr.key(self.expr)

    def evaluate(self, b: Any, h: Any, q: Any, k: Any, *, row: Any = None, s: Any = None) -> Any:
        """The definition: compute the modification with NumPy on positions (and scores) that broadcast."""
        positions = {
            name: np.asarray(x)
            for name, x in (("b", b), ("h", h), ("q", q), ("k", k), ("row", q if row is None else row))
        }
        scores = {} if s is None else {"s": np.asarray(s, np.float64)}
        return codegen.evaluate(self.expr, {**positions, **scores, **self.params, **self.arrays})

    def __repr__(self) -> str:
        return f"<{self.kind} mod {self.key}>"


def mask(function: Callable[..., Any], **values: Any) -> Mod:
    """Trace `function(b, h, q, k, *, name, ...) -> bool`: True where key k is visible to the query at position q.

    values: scalars and arrays for the keyword-only arguments. Raises TypeError or ValueError where it cannot be traced.
    """
    return trace(partial(function, **values), "mask")


def score(function: Callable[..., Any], **values: Any) -> Mod:
    """Trace `function(s, b, h, q, k, *, name, ...) -> score`. Its derivative for the backward pass is derived from
    the trace.
    """
    return trace(partial(function, **values), "score")


def trace(function: Mod | Callable[..., Any], kind: ModKind) -> Mod:
    """A Mod from a Mod (checked), a plain function or a functools.partial that binds its keyword arguments."""
    if isinstance(function, Mod):
        if function.kind != kind:
            raise TypeError(f"{kind}_mod got a {function.kind} mod; make one with flashkit.mods.{kind}(f)")
        return function
    if not callable(function):
        raise TypeError(
            f"{kind}_mod takes a function of ({', '.join(s.value for s in _SYMBOLS[kind])}) or a flashkit.mods.Mod, "
            f"not {type(function).__name__}"
        )
    values = dict(function.keywords) if isinstance(function, partial) else {}
    plain = function.func if isinstance(function, partial) and not function.args else function
    ready_made = getattr(plain, "__module__", None) == __name__
    if not ready_made:  # those have no defaults, and to ask takes longer than all else here
        values = {**_keyword_defaults(plain), **values}
    params: dict[str, int | float] = {}
    arrays: dict[str, Any] = {}
    slots: list[tuple[str, int | None, Kind, bool]] = []
    for name, value in values.items():
        wide = False
        if isinstance(value, (int, np.integer)) and not expr.INT64[0] <= value <= expr.INT64[1]:
            raise ValueError(f"{name} of a modification is {value}; an integer from -2^63 to 2^63 - 1 fits")
        if np.isscalar(value) or isinstance(value, np.generic):
            scalar = np.asarray(value)
            scalar_kind = _value_kind(name, scalar)
            if scalar_kind == "bool":
                scalar, scalar_kind = scalar.astype(np.int64), "int"
            number = scalar.item()
            wide = scalar_kind == "int" and abs(number) > expr.MAX_PARAM
            if wide:
                params[_high(name)], number = number >> 32, number & (2**32 - 1)
            params[_free(name)] = number
            slots.append((name, None, scalar_kind, wide))
        else:
            arrays[_free(name)] = value = value if hasattr(value, "__cuda_array_interface__") else np.asarray(value)
            slots.append((name, value.ndim, _value_kind(name, value), False))
    # A plain function is traced anew for each call: what it closes over may have changed since. The ready-made ones
    # are pure.
    make = _trace_pure if ready_made else _trace
    return Mod(kind, make(plain, kind, tuple(slots)), params, arrays)


def _keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def _value_kind(name: str, value: Any) -> Kind:
    kind = "f" if value.dtype.name in ("bfloat16", "float16") else value.dtype.kind
    if kind not in _KINDS:
        raise TypeError(
            f"{name} of a modification has dtype {value.dtype}; bools, integers and floats fit, alone or in an array"
        )
    return _KINDS[kind]


def _high(name: str) -> str:
    """The name in the graph of the upper 32 bits of a wide integer."""
    return f"fk_high_{name}"


def _trace(function: Callable[..., Any], kind: ModKind, slots: Sequence[tuple[str, int | None, Kind, bool]]) -> Expr:
    """slots: name, axes (None: a scalar), kind, and whether a scalar lies beyond expr.MAX_PARAM."""
    symbols = _SYMBOLS[kind]
    named: dict[str, Expr | Array] = {}
    for name, ndim, value_kind, wide in slots:
        named[name] = expr.param(_free(name), value_kind) if ndim is None else Array(_free(name), ndim, value_kind)
        if wide:
            named[name] = expr.param(_high(name), "int") * 2**32 + named[name]
    what = getattr(function, "__name__", repr(function))
    try:
        result = function(*symbols, **named)
    except IndexError as error:  # NumPy's word for "that is no index"
        raise TypeError(
            f"{kind}_mod {what}: an array was indexed by a symbol ({error}); pass the array as a keyword argument: "
            f"flashkit.mods.{kind}({what}, name=array)"
        ) from error
    except TypeError as error:
        raise TypeError(f"{kind}_mod {what}({', '.join(s.value for s in symbols)}): {error}") from error
    graph = expr.as_expr(result)
    for node in expr.walk([graph]):
        if node.op == "const" and node.kind == "int" and not expr.INT64[0] <= node.value <= expr.INT64[1]:
            raise ValueError(f"{kind}_mod {what} has the integer {node.value}; -2^63 to 2^63 - 1 fits")
    if kind == "score":
        return expr.to_float(graph)
    if graph.kind != "bool":
        raise TypeError(f"mask_mod {what} gave {graph.kind}, not a bool; compare with ==, <, <= ... or use where()")
    if expr.uses(graph, expr.S):
        raise TypeError(f"mask_mod {what} depends on the score; a score_mod can return -inf instead")
    return graph


_trace_pure = lru_cache(maxsize=None)(_trace)


@lru_cache(maxsize=1024)
def _values_of(graph: Expr) -> tuple[tuple[tuple[str, int | None, Kind], ...], frozenset[str]]:
    """The values that a graph names, each with its number of axes (None: a scalar) and kind, and the names of the
    arrays that indices are computed from.
    """
    nodes = [node for node in expr.walk([graph]) if node.op in ("param", "load")]
    traced = {node.value: (node.value, len(node.args) if node.op == "load" else None, node.kind) for node in nodes}
    within = (inner for node in nodes for inner in expr.walk(node.args))
    return tuple(traced.values()), frozenset(inner.value for inner in within if inner.op == "load")


def _own(name: str, array: Any, ndim: int, kind: Kind, copied: bool) -> Any:
    """The array as a call may keep it; see Mod.snapshot."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"{name} is a {type(array).__name__}; an array of {ndim} axes, as traced, fits")
    own = array.view()  # its shape and dtype are no longer the caller's to change
    if own.ndim != ndim or _value_kind(name, own) != kind:
        raise TypeError(f"{name} has {own.ndim} axes and dtype {own.dtype}; {ndim} axes and {kind}s, as traced, fit")
    if not own.dtype.isnative:
        return own.astype(own.dtype.newbyteorder("="))
    return own.copy() if copied else own


def after(first: Expr, second: Expr) -> Expr:
    """`second` with its score replaced by `first`."""
    return expr.substitute([second], lambda node: first if node is expr.S else node)[0]


def combine(join: Callable[..., Expr], kind: ModKind, *mods: Mod | Callable[..., Any]) -> Mod:
    """One Mod from several; a name that two of them use for different values is told apart."""
    graphs: list[Expr] = []
    params: dict[str, int | float] = {}
    arrays: dict[str, Any] = {}
    for mod in (trace(m, kind) for m in mods):
        names = {}
        for name, value in (*mod.params.items(), *mod.arrays.items()):
            new = name
            while new in params or new in arrays:
                if arrays.get(new) is value:
                    break
                new += "_"
            names[name] = new
            (params if name in mod.params else arrays)[new] = value
        graphs += expr.rename([mod.expr], names)
    return Mod(kind, join(*graphs), params, arrays)


# --- masks ------------------------------------------------------------------------------------------------------------


def causal() -> Mod:
    """A query sees the keys up to its own position."""
    return mask(_causal)


def _causal(b: Expr, h: Expr, q: Expr, k: Expr) -> Expr:
    return k <= q


def sliding_window(left: int | None, right: int | None = 0) -> Mod:
    """A query at position q sees the keys from q - left to q + right; None is no bound on that side."""
    sides = {name: int(n) for name, n in (("left", left), ("right", right)) if n is not None}
    for name, n in sides.items():
        if n < 0:
            raise ValueError(f"{name} of a sliding window is a number of keys, 0 or more, or None; got {n}")
    # What reaches further than positions do bounds nothing, and could overflow when a position is added.
    sides = {name: n for name, n in sides.items() if n < 4 * expr.MAX_POSITION}
    functions: dict[tuple[str, ...], Callable[..., Any]] = {
        (): _everything, ("left",): _window_left, ("right",): _window_right, ("left", "right"): _window,
    }  # fmt: skip
    return mask(functions[tuple(sides)], **sides)


def _everything(b: Expr, h: Expr, q: Expr, k: Expr) -> bool:
    return True


def _window_left(b: Expr, h: Expr, q: Expr, k: Expr, *, left: Expr) -> Expr:
    return q - left <= k


def _window_right(b: Expr, h: Expr, q: Expr, k: Expr, *, right: Expr) -> Expr:
    return k <= q + right


def _window(b: Expr, h: Expr, q: Expr, k: Expr, *, left: Expr, right: Expr) -> Expr:
    return (q - left <= k) & (k <= q + right)


def prefix_lm(n: int) -> Mod:
    """The first n keys are visible to all; beyond them a query sees the keys up to its own position."""
    return mask(_prefix_lm, n=int(n))


def _prefix_lm(b: Expr, h: Expr, q: Expr, k: Expr, *, n: Expr) -> Expr:
    return (k < n) | (k <= q)


def dilated(step: int) -> Mod:
    """A query sees the keys whose distance from it is a multiple of `step`."""
    if step < 1:
        raise ValueError(f"step is the distance between visible keys, 1 or more; got {step}")
    return mask(_dilated, step=int(step))


def _dilated(b: Expr, h: Expr, q: Expr, k: Expr, *, step: Expr) -> Expr:
    return (q - k) % step == 0


def document(ids: Any, kv_ids: Any = None) -> Mod:
    """Tokens see their own document alone: ids[q] == kv_ids[k].

    ids: integers, one for each position, (N,) or (B, N); kv_ids likewise for the keys, `ids` where not given. A
    position outside of `ids` belongs to no document.
    """
    q_ids, k_ids = (
        np.asarray(x) if isinstance(x, (list, tuple)) else x for x in (ids, ids if kv_ids is None else kv_ids)
    )
    for name, x in (("ids", q_ids), ("kv_ids", k_ids)):
        if x.ndim not in (1, 2) or x.dtype.kind not in "iu":
            raise ValueError(
                f"{name} of a document mask has shape {x.shape} and dtype {x.dtype}; "
                "integers of shape (N,) or (B, N) fit"
            )
    n = {"n_q": q_ids.shape[-1], "n_k": k_ids.shape[-1]}
    rows = {"ids": q_ids} if k_ids is q_ids else {"ids": q_ids, "kv_ids": k_ids}
    return mask(_document if k_ids is q_ids else _document_pair, **rows, **n)


def _document(b: Expr, h: Expr, q: Expr, k: Expr, *, ids: Array, n_q: Expr, n_k: Expr) -> Expr:
    return _document_pair(b, h, q, k, ids=ids, kv_ids=ids, n_q=n_q, n_k=n_k)


def _document_pair(b: Expr, h: Expr, q: Expr, k: Expr, *, ids: Array, kv_ids: Array, n_q: Expr, n_k: Expr) -> Expr:
    known = (q >= 0) & (q < n_q) & (k < n_k)
    return known & (_at(ids, b, expr.clip(q, 0, n_q - 1)) == _at(kv_ids, b, expr.clip(k, 0, n_k - 1)))


def _at(array: Array, b: Expr, index: Expr) -> Expr:
    return array[index] if array.ndim == 1 else array[b, index]


def visible(array: Any) -> Mod:
    """A mask given as an array of bools, True = attend, that broadcasts to (B, Hq, Nq, Nk)."""
    array = np.asarray(array) if isinstance(array, (list, tuple)) else array
    if array.dtype.kind != "b":
        raise TypeError(f"mask has dtype {array.dtype}; bool fits, True where a key is visible")
    return mask(_indexed(_visible, array), array=array)


def _visible(b: Expr, h: Expr, q: Expr, k: Expr, *, array: Array, axes: tuple[bool, ...]) -> Expr:
    return _element(array, axes, b, h, k)


# --- scores -----------------------------------------------------------------------------------------------------------


def softcap(cap: float) -> Mod:
    """cap * tanh(s / cap): scores stay within -cap and cap."""
    if not cap > 0:
        raise ValueError(f"softcap is a bound on the scores, above 0; got {cap}")
    return score(_softcap, cap=float(cap))


def _softcap(s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, cap: Expr) -> Expr:
    return cap * expr.tanh(s / cap)


def alibi(slopes: Any) -> Mod:
    """s - slopes[h] * |q - k|, slopes of shape (Hq,) or (B, Hq)."""
    slopes = np.asarray(slopes) if isinstance(slopes, (list, tuple)) else slopes
    if slopes.ndim not in (1, 2):
        raise ValueError(f"slopes has shape {slopes.shape}; (Hq,) or (B, Hq) fits")
    return score(_alibi, slopes=slopes)


def _alibi(s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, slopes: Array) -> Expr:
    return s - expr.to_float(_at(slopes, b, h)) * abs(q - k)


def bias(array: Any) -> Mod:
    """s + array[b, h, row, k]; the array broadcasts to (B, Hq, Nq, Nk), -inf hides a key."""
    array = np.asarray(array) if isinstance(array, (list, tuple)) else array
    return score(_indexed(_bias, array), array=array)


def _bias(s: Expr, b: Expr, h: Expr, q: Expr, k: Expr, *, array: Array, axes: tuple[bool, ...]) -> Expr:
    return s + expr.to_float(_element(array, axes, b, h, k))


def _indexed(function: Callable[..., Any], array: Any) -> Callable[..., Any]:
    """The function with the axes of length 1 compiled in: what does not vary along an axis is then known not to."""
    if array.ndim > 4:
        raise ValueError(
            f"an array of shape {array.shape} has {array.ndim} axes; up to 4 that broadcast to (B, Hq, Nq, Nk) fit"
        )
    return _with_axes(function, tuple(n == 1 for n in array.shape))


@cache
def _with_axes(function: Callable[..., Any], axes: tuple[bool, ...]) -> Callable[..., Any]:
    def bound(*symbols: Expr, array: Array) -> Any:
        return function(*symbols, array=array, axes=axes)

    bound.__name__ = function.__name__
    return bound


def _element(array: Array, axes: tuple[bool, ...], b: Expr, h: Expr, k: Expr) -> Expr:
    indices = (b, h, expr.ROW, k)[4 - len(axes) :]
    return array[tuple(expr.const(0) if single else index for single, index in zip(axes, indices, strict=True))]

"""`Mod`, a traced mask or score modification, and how it is made of an ordinary function.

A mask mod is a function of positions that says which pairs are visible; a score mod changes the score:

    def causal(b, h, q, k):                return k <= q
    def alibi(s, b, h, q, k, *, slopes):   return s - slopes[h] * abs(q - k)

`q` is the query's position on the key axis: its row plus `q_offset`. Keyword arguments are scalars or arrays. They are
given at run time, so other values need no compilation. `mask(f, **values)` and `score(f, **values)` bind them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import shown
from . import codegen, expr, svg
from .expr import Expr, Kind
from .tracing import (
    SYMBOLS,
    ModKind,
    check_traced,
    graph_name,
    high_name,
    is_marked_pure,
    native_array,
    trace_graph,
    trace_pure,
    value_kind,
    values_of,
)

_SHOWN = 32
"""Queries and keys of a mask's picture."""


@dataclass(frozen=True, eq=False)
class Mod:
    """A traced mask or score modification. Made by `mask`, `score` and the ready-made functions of flashkit.mods.

    Masks combine by `&`, `|` and `~`, score modifications by `then`.

    Attributes
    ----------
    kind : {"mask", "score"}
        What the modification gives: a bool, or a score.
    expr : Expr
        Its graph.
    params : Mapping[str, int | float]
        Values of the scalars that the graph names. The upper 32 bits of an integer beyond 2^60 are the param
        fk_high_<name>.
    arrays : Mapping[str, Any]
        Values of the arrays that the graph names.

    Examples
    --------
    >>> from flashkit import mods
    >>> (mods.causal() & ~mods.sliding_window(2)).evaluate(b=0, h=0, q=4, k=[0, 1, 2, 3, 4, 5])
    array([ True,  True, False, False, False, False])
    """

    kind: ModKind
    expr: Expr
    params: Mapping[str, int | float]
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
        """Apply this score modification, then another one to its result.

        Parameters
        ----------
        other
            A score mod, or a function (s, b, h, q, k) -> s.

        Examples
        --------
        >>> from flashkit import mods
        >>> both = mods.score(lambda s, b, h, q, k: s + 2.0).then(lambda s, b, h, q, k: s * 10.0)
        >>> float(both.evaluate(b=0, h=0, q=0, k=0, s=1.0))
        30.0
        """
        return combine(after, "score", self, other)

    def snapshot(self, *, whole: bool = False) -> Mod:
        """The same modification with values of its own, so that a kernel reads what was checked. TypeError or
        ValueError if a value has another kind, range or number of axes than the function was traced with.

        whole: copy all arrays. By default integers, and bools that an index depends on, are copied; other arrays are
        views, of which only the contents can change afterwards.
        """
        params, arrays = dict(self.params), dict(self.arrays)
        traced, indexing = values_of(self.expr)
        for name, ndim, kind in traced:
            if ndim is None:
                if not isinstance(params.get(name), int if kind == "int" else int | float):
                    raise TypeError(f"{name} of a {self.kind} mod: expected {kind}, got {params.get(name)!r}")
                # What indexes can reach was found for such integers.
                if kind == "int" and abs(params[name]) > expr.MAX_PARAM:
                    value = shown(params[name])
                    raise ValueError(f"{name} of a {self.kind} mod: expected an integer within 2^60, got {value}")
            else:
                copied = whole or kind == "int" or (kind == "bool" and name in indexing)
                arrays[name] = _own(f"{name} of a {self.kind} mod", arrays.get(name), ndim, kind, copied)
        return Mod(self.kind, self.expr, params, arrays)

    def __reduce__(self) -> Any:
        return _restored, (self.kind, self.expr, dict(self.params), dict(self.arrays))

    @property
    def key(self) -> str:
        """Canonical text of the graph, without the values."""
        return expr.key(self.expr)

    def evaluate(self, b: Any, h: Any, q: Any, k: Any, *, row: Any = None, s: Any = None) -> Any:
        """Compute the modification with NumPy: its definition.

        Parameters
        ----------
        b, h, q, k
            Batch entry, query head, position of the query on the key axis, index of the key: integers that broadcast.
        row
            Index of the query, `q` by default.
        s
            The score, for a score modification.

        Returns
        -------
        numpy.ndarray or scalar
            Bools of a mask, float64 of a score modification.

        Raises
        ------
        KeyError
            The modification depends on the score, and `s` is missing.

        Examples
        --------
        >>> from flashkit import mods
        >>> mods.causal().evaluate(b=0, h=0, q=1, k=[0, 1, 2])
        array([ True,  True, False])
        """
        positions = {
            name: np.asarray(x)
            for name, x in (("b", b), ("h", h), ("q", q), ("k", k), ("row", q if row is None else row))
        }
        scores = {} if s is None else {"s": np.asarray(s, np.float64)}
        return codegen.evaluate(self.expr, {**positions, **scores, **self.params, **self.arrays})

    def __repr__(self) -> str:
        return f"<{self.kind} mod {self.key}>"

    def _repr_html_(self) -> str:
        """For notebooks: a mask on the first positions, if it can be evaluated there."""
        try:
            if self.kind == "mask":
                first = np.arange(_SHOWN)
                seen = np.broadcast_to(self.evaluate(b=0, h=0, q=first[:, None], k=first), (_SHOWN, _SHOWN))
                return svg.picture(seen * np.int64(2), f"{_SHOWN} queries x {_SHOWN} keys: {self!r}")
        except Exception:  # arrays may be short, or lie on a device
            pass
        from html import escape

        return f"<code>{escape(repr(self))}</code>"


def _restored(kind: Any, graph: Any, params: Any, arrays: Any) -> Mod:
    """The modification of this pickled form. TypeError or ValueError if tracing does not give such ones."""
    if type(kind) is not str or kind not in SYMBOLS or type(graph) is not Expr:
        raise ValueError(f"no pickled modification: kind {shown(kind)} with a {type(graph).__name__} as its graph")
    check_traced(graph, kind)  # type: ignore[arg-type]
    return Mod(kind, graph, params, arrays).snapshot()  # type: ignore[arg-type]


def mask(function: Callable[..., Any], **values: Any) -> Mod:
    """Make a mask of a function of positions.

    Parameters
    ----------
    function
        `function(b, h, q, k, *, name, ...) -> bool`, called once with symbols: True where key k is visible to the
        query at position q, of batch entry b and query head h.
    **values
        Scalars and arrays for the keyword-only arguments. They are given at run time: other values of the same kinds
        need no compilation.

    Returns
    -------
    Mod
        For `mask_mod=`, `BlockMask.from_mod`, and `&`, `|`, `~`.

    Raises
    ------
    TypeError
        The function cannot be traced, does not return a bool, depends on the score, or a value has a dtype other than
        bool, integer or float.
    ValueError
        An integer is beyond 64 bits.

    Examples
    --------
    >>> from flashkit import mods
    >>> chunked = mods.mask(lambda b, h, q, k, *, size: q // size == k // size, size=2)
    >>> chunked.evaluate(b=0, h=0, q=3, k=[0, 1, 2, 3])
    array([False, False,  True,  True])
    """
    return trace(partial(function, **values), "mask")


def score(function: Callable[..., Any], **values: Any) -> Mod:
    """Make a score modification of a function.

    Parameters
    ----------
    function
        `function(s, b, h, q, k, *, name, ...) -> score`, called once with symbols. The backward pass uses the
        derivative by s, which follows from the trace.
    **values
        Scalars and arrays for the keyword-only arguments. They are given at run time: other values of the same kinds
        need no compilation.

    Returns
    -------
    Mod
        For `score_mod=` and `Mod.then`.

    Raises
    ------
    TypeError
        The function cannot be traced, or a value has a dtype other than bool, integer or float.
    ValueError
        An integer is beyond 64 bits.

    Examples
    --------
    >>> from flashkit import mods
    >>> temperature = mods.score(lambda s, b, h, q, k, *, scale: s * scale[h], scale=[1.0, 0.5])
    >>> temperature.evaluate(b=0, h=[0, 1], q=0, k=0, s=4.0)
    array([4., 2.])
    """
    return trace(partial(function, **values), "score")


def trace(function: Mod | Callable[..., Any], kind: ModKind) -> Mod:
    """Make a Mod of what `mask_mod=` and `score_mod=` take.

    Parameters
    ----------
    function
        A Mod of this kind, a plain function, or a functools.partial that binds keyword arguments of one.
    kind
        "mask" or "score".

    Raises
    ------
    TypeError
        It is a Mod of the other kind, no function, or cannot be traced.
    ValueError
        An integer is beyond 64 bits.

    Examples
    --------
    >>> from functools import partial
    >>> from flashkit import mods
    >>> def near(b, h, q, k, *, reach):
    ...     return abs(q - k) <= reach
    >>> mods.trace(partial(near, reach=1), "mask").evaluate(b=0, h=0, q=2, k=[0, 1, 2])
    array([False,  True,  True])
    """
    if isinstance(function, Mod):
        if function.kind != kind:
            raise TypeError(f"{kind}_mod: expected one of flashkit.mods.{kind}(f), got a {function.kind} mod")
        return function
    if not callable(function):
        raise TypeError(
            f"{kind}_mod: expected a function of ({', '.join(s.value for s in SYMBOLS[kind])}) or a flashkit.mods.Mod, "
            f"got {type(function).__name__}"
        )
    values = dict(function.keywords) if isinstance(function, partial) else {}
    plain = function.func if isinstance(function, partial) and not function.args else function
    is_pure = is_marked_pure(plain)
    if not is_pure:  # pure functions have no defaults, and inspect.signature is slow
        values = {**_keyword_defaults(plain), **values}
    params: dict[str, int | float] = {}
    arrays: dict[str, Any] = {}
    slots: list[tuple[str, int | None, Kind, bool]] = []
    for name, value in values.items():
        wide = False
        if not expr.is_name(name):
            raise ValueError(f"name of a value: expected a Python identifier without __, got {name!r:.80}")
        if isinstance(value, (int, np.integer)) and not expr.INT64[0] <= value <= expr.INT64[1]:
            raise ValueError(f"{name} of a modification: expected an integer within int64, got {shown(value)}")
        if np.isscalar(value) or isinstance(value, np.generic):
            scalar = np.asarray(value)
            scalar_kind = value_kind(f"{name} of a modification", scalar)
            if scalar_kind == "bool":
                scalar, scalar_kind = scalar.astype(np.int64), "int"
            number = scalar.item()
            wide = scalar_kind == "int" and abs(number) > expr.MAX_PARAM
            if wide:
                params[high_name(name)], number = number >> 32, number & (2**32 - 1)
            params[graph_name(name)] = number
            slots.append((name, None, scalar_kind, wide))
        else:
            value = native_array(f"{name} of a modification", value)
            arrays[graph_name(name)] = value
            slots.append((name, value.ndim, value_kind(f"{name} of a modification", value), False))
    # A plain function is traced again for each call: what it closes over may have changed.
    make = trace_pure if is_pure else trace_graph
    return Mod(kind, make(plain, kind, tuple(slots)), params, arrays)


def _keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def _own(name: str, array: Any, ndim: int, kind: Kind, copied: bool) -> Any:
    """The array as a snapshot has it; see Mod.snapshot."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"{name}: expected an array of {ndim} axes, as traced, got {type(array).__name__}")
    own = array.view()  # the caller can no longer change its shape and dtype
    if own.ndim != ndim or value_kind(name, own) != kind:
        raise TypeError(f"{name}: expected {ndim} axes of {kind}, as traced, got {own.ndim} of {own.dtype}")
    if not own.dtype.isnative:
        return own.astype(own.dtype.newbyteorder("="))
    return own.copy() if copied else own


def after(first: Expr, second: Expr) -> Expr:
    """`second` with its score replaced by `first`: the graph of a composition."""
    return expr.substitute([second], lambda node: first if node is expr.S else node)[0]


def combine(join: Callable[..., Expr], kind: ModKind, *mods: Mod | Callable[..., Any]) -> Mod:
    """Join several modifications of one kind.

    Parameters
    ----------
    join
        Makes one graph of theirs.
    kind
        "mask" or "score".
    *mods
        Modifications, or functions. A name that two of them use for different values is renamed in one of them.

    Examples
    --------
    >>> from flashkit import mods
    >>> either = mods.combine(lambda a, b: a ^ b, "mask", mods.causal(), mods.prefix_lm(3))
    >>> either.evaluate(b=0, h=0, q=1, k=[0, 1, 2, 3])
    array([False, False,  True, False])
    """
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

"""Modifications written with PyTorch: functions of flex_attention and of transformers' masks, traced as `Mod`s.

Such a function gets positions as tensors, computes with PyTorch's operations and indexes tensors by positions. Here it
gets symbols. A TorchFunctionMode sees the indexing of a plain tensor by a symbol, which Python alone does not announce.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import mods
from ..mods import Mod, ModKind, expr
from ..mods.expr import Expr, Kind
from ..mods.tracing import DTYPES, SYMBOLS, trace_graph
from . import interop


def trace(function: Mod | Callable[..., Any], kind: ModKind) -> Mod:
    """A Mod of a Mod, a function that flashkit.mods takes, or one of flex_attention, which may use PyTorch. TypeError
    if it is none of these, or uses what has no counterpart in flashkit.
    """
    if isinstance(function, Mod) or not callable(function):
        return mods.trace(function, kind)
    try:
        return mods.trace(function, kind)
    except (TypeError, AttributeError):
        return trace_torch(function, kind)


def from_block_mask(block_mask: Any) -> Mod:
    """The mask of a BlockMask of torch.nn.attention.flex_attention."""
    function = getattr(block_mask, "mask_mod", None)
    if function is None:
        raise TypeError(
            f"block_mask: expected a flashkit.BlockMask or one of flex_attention, got a {interop.full_name(block_mask)}"
        )
    return trace(function, "mask")


def trace_torch(function: Callable[..., Any], kind: ModKind) -> Mod:
    """A Mod of a function of PyTorch's tensors, by calling it with symbols. Its values are tensors, so that they can be
    read at each call.
    """
    captured = Captured()

    def traced(*symbols: Expr) -> Any:
        with _Indexing(captured):
            return _unwrapped(function(*(Symbol(symbol, captured) for symbol in symbols)), captured)

    traced.__name__ = getattr(function, "__name__", repr(function))
    try:
        graph = trace_graph(traced, kind, ())
    except (TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        names = ", ".join(str(symbol.value) for symbol in SYMBOLS[kind])
        raise TypeError(f"{kind}_mod {traced.__name__}({names}) cannot be traced: {error}") from error
    return Mod(kind, graph, captured.params, captured.arrays)


class Captured:
    """The tensors that a function uses, by their names in its graph."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self._flat: list[tuple[Any, Any]] = []  # scalars on a device, and as arrays of one element

    def array(self, tensor: Any) -> expr.Array:
        """A tensor that is indexed by positions."""
        name = _named(tensor, self.arrays, "t")
        return expr.Array(name, tensor.dim(), _kind("an indexed tensor", tensor))

    def scalar(self, tensor: Any) -> Expr:
        """A tensor of one element, read at each call: as a number on the host, in place on a device."""
        if tensor.numel() != 1:
            raise TypeError(f"expected a tensor of one element, got shape {tuple(tensor.shape)}; index it by positions")
        if tensor.is_cuda:
            flat = next((flat for known, flat in self._flat if known is tensor), None)
            if flat is None:
                self._flat.append((tensor, flat := tensor.reshape(1)))
            return self.array(flat)[0]
        name, kind = _named(tensor, self.params, "n"), _kind("a tensor", tensor)
        return expr.param(name, "int") != 0 if kind == "bool" else expr.param(name, kind)


def _named(tensor: Any, known: dict[str, Any], letter: str) -> str:
    name = next((name for name, other in known.items() if other is tensor), f"{letter}{len(known)}_")
    known[name] = tensor
    return name


def _kind(name: str, tensor: Any) -> Kind:
    kind = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if kind is None:
        raise TypeError(f"{name}: expected dtype bool, an integer or a float of up to 64 bits, got {tensor.dtype}")
    return kind


class Symbol:
    """An expression that passes for a tensor of one element."""

    device = torch.device("cpu")

    def __init__(self, graph: Expr, captured: Captured) -> None:
        self.graph, self.captured = graph, captured

    def _of(self, graph: Expr) -> Symbol:
        return Symbol(graph, self.captured)

    @property
    def dtype(self) -> torch.dtype:
        return {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[self.graph.kind]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def to(self, *target: Any, dtype: Any = None, **_: Any) -> Symbol:
        """Conversion to another dtype; devices and all else change nothing."""
        wanted = dtype or next((x for x in target if isinstance(x, torch.dtype)), None)
        if wanted is None or wanted == self.dtype or (wanted.is_floating_point and self.dtype.is_floating_point):
            return self
        if wanted.is_floating_point:
            return self._of(expr.to_float(self.graph))
        if wanted == torch.bool:
            return self._of(self.graph != 0)
        return self._of(expr.to_int(self.graph))

    def __getattr__(self, name: str) -> Any:
        """A method of tensors: a conversion, or a function of PyTorch of this name."""
        if dtype := _CONVERSIONS.get(name):
            return lambda: self.to(dtype)
        if name not in _FUNCTIONS and name not in _LIKE:
            raise AttributeError(f"a position or the score has no counterpart of a tensor's {name!r}")
        return lambda *args, **kwargs: _call(getattr(torch.Tensor, name, getattr(torch, name)), (self, *args), kwargs)

    def new_full(self, size: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Any:
        return self._constant(size, fill_value, dtype)

    def new_ones(self, size: Any, dtype: Any = None, **_: Any) -> Any:
        return self._constant(size, 1, dtype)

    def new_zeros(self, size: Any, dtype: Any = None, **_: Any) -> Any:
        return self._constant(size, 0, dtype)

    def _constant(self, size: Any, value: Any, dtype: Any) -> Any:
        shape = (size,) if isinstance(size, int) else tuple(size)
        if shape not in ((), (1,)):
            raise TypeError(f"expected one element for a tensor made of a position, got shape {shape}")
        kind = dtype or self.dtype
        made: Any = bool(value) if kind == torch.bool else float(value) if kind.is_floating_point else int(value)
        return self._of(expr.as_expr(made))

    def __bool__(self) -> Any:
        raise TypeError("a branch must not depend on a position or the score: use torch.where")


def _unwrapped(x: Any, captured: Captured) -> Any:
    """What expressions compute with: a graph, or a number."""
    if isinstance(x, Symbol):
        return x.graph
    if isinstance(x, _Rows):
        x.refuse()
    return captured.scalar(x) if isinstance(x, torch.Tensor) else x


def _where(condition: Any, a: Any, b: Any) -> Any:
    return expr.where(condition, a, b)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else expr.maximum(x, min)
    return x if max is None else expr.minimum(x, max)


def _division(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return x / y
    return _floored(x, y) if rounding_mode == "floor" else _truncated(x, y)


def _floored(x: Any, y: Any) -> Any:
    return expr.floor(x / y) if "float" in (expr.as_expr(x).kind, expr.as_expr(y).kind) else x // y


def _truncated(x: Any, y: Any) -> Any:
    sizes = _floored(abs(expr.as_expr(x)), abs(expr.as_expr(y)))
    return expr.where((expr.as_expr(x) < 0) ^ (expr.as_expr(y) < 0), -sizes, sizes)


def _softplus(x: Any, beta: Any = 1.0, threshold: float = 20.0) -> Any:
    scaled = beta * x
    return expr.where(scaled > threshold, x, expr.log(1.0 + expr.exp(expr.minimum(scaled, threshold))) / beta)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + expr.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + expr.erf(x * 0.7071067811865476))


def _elu(x: Any, alpha: Any = 1.0, inplace: bool = False) -> Any:
    return expr.where(x > 0, x, alpha * (expr.exp(expr.minimum(x, 0)) - 1.0))


def _logical(op: Callable[..., Any]) -> Callable[..., Any]:
    """Of any numbers: all but 0 are True."""
    return lambda *operands: op(*(x if x.kind == "bool" else x != 0 for x in map(expr.as_expr, operands)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": _where, "clamp": _clamp, "clip": _clamp, "abs": abs, "neg": operator.neg, "masked_fill":
    lambda x, mask, value: _where(mask, value, x), "clamp_min": expr.maximum, "clamp_max": expr.minimum,
    "logical_and": _logical(operator.and_), "logical_or": _logical(operator.or_), "logical_xor": _logical(operator.xor),
    "logical_not": _logical(operator.invert), "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor, "bitwise_not": operator.invert, "add": operator.add, "sub": operator.sub,
    "rsub": lambda x, y: y - x, "mul": operator.mul, "div": _division, "floor_divide": _floored,
    "remainder": operator.mod, "fmod": lambda x, y: x - y * _truncated(x, y), "pow": operator.pow,
    "square": lambda x: x * x, "maximum": expr.maximum, "minimum": expr.minimum,
    "relu": lambda x, inplace=False: expr.maximum(x, 0), "ceil": lambda x: -expr.floor(-x),
    "trunc": lambda x: _truncated(x, 1), "reciprocal": lambda x: 1 / x, "rsqrt": lambda x: 1 / expr.sqrt(x),
    "log1p": lambda x: expr.log(1.0 + x), "log10": lambda x: expr.log(x) * 0.4342944819032518,
    "tan": lambda x: expr.sin(x) / expr.cos(x), "silu": lambda x, inplace=False: x * expr.sigmoid(x),
    "gelu": _gelu, "elu": _elu, "softplus": _softplus, "log_sigmoid": lambda x: -_softplus(-x),
    "logsigmoid": lambda x: -_softplus(-x), "leaky_relu": lambda x, negative_slope=0.01, inplace=False:
    _where(x > 0, x, negative_slope * x), "bitwise_left_shift": operator.lshift, "bitwise_right_shift": operator.rshift,
    "expm1": lambda x: expr.exp(x) - 1.0, "clone": lambda x: x, "detach": lambda x: x, "contiguous": lambda x: x,
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(expr, name) for name in
       ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "erf", "floor", "sigmoid", "sign")},
}  # fmt: skip
"""What functions of `torch` and methods of tensors do with expressions, by their names."""

for _alias, _name in {
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "float_power": "pow",
}.items():  # fmt: skip
    _FUNCTIONS[_alias] = _FUNCTIONS[_name]
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    _FUNCTIONS[f"__{_name.rstrip('_')}__"] = _operator = getattr(operator, _name)
    _FUNCTIONS[f"__r{_name.rstrip('_')}__"] = lambda a, b, op=_operator: op(b, a)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    _FUNCTIONS[f"__{_name}__"] = getattr(operator, _name)


def _operator_of(function: Callable[..., Any]) -> Callable[..., Symbol]:
    return lambda self, *other: self._of(function(self.graph, *(_unwrapped(x, self.captured) for x in other)))


for _name, _function in _FUNCTIONS.items():
    if _name.startswith("__"):
        setattr(Symbol, _name, _operator_of(_function))
Symbol.__hash__ = None  # type: ignore[assignment]  # as equality makes an expression

_LIKE = {"zeros_like": 0, "ones_like": 1, "full_like": None, "isin": None}

_OPERANDS = "input", "self", "other", "exponent"

_CONVERSIONS = {
    "bool": torch.bool, "int": torch.int32, "long": torch.int64, "float": torch.float32, "double": torch.float64,
    "half": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of PyTorch on symbols."""
    name = getattr(func, "__name__", str(func))
    captured = next(x.captured for x in (*args, *kwargs.values()) if isinstance(x, Symbol))
    if name in _LIKE and isinstance(args[0], Symbol):
        return _like(name, *args, **kwargs)
    if (known := _FUNCTIONS.get(name)) is None:
        raise TypeError(f"{name} of a position or the score has no counterpart in flashkit")
    if name == "where" and func is torch.Tensor.where:  # x.where(condition, other)
        args = args[1], args[0], *args[2:]
    first, second = ([kwargs[key] for key in keys if key in kwargs] for keys in (_OPERANDS[:2], _OPERANDS[2:]))
    named = {key: _unwrapped(x, captured) for key, x in kwargs.items() if key not in _OPERANDS}
    args = *first, *args, *second
    return Symbol(known(*(_unwrapped(x, captured) for x in args), **named), captured)


def _like(name: str, x: Symbol, other: Any = None, *, dtype: Any = None, **more: Any) -> Symbol:
    """A constant of the kind of x; or whether x is one of some numbers."""
    if name != "isin":
        value = more.get("fill_value", other) if name == "full_like" else _LIKE[name]
        return x._constant((), value, dtype) if not isinstance(value, Symbol) else value.to(dtype or x.dtype)
    tensor = torch.as_tensor(more.get("test_elements", other)).reshape(-1)
    if tensor.numel() > MAX_ELEMENTS:
        raise TypeError(f"isin: expected at most {MAX_ELEMENTS} elements, got {tensor.numel()}; index a table of bools")
    found: Any = expr.as_expr(False)
    array = x.captured.array(tensor) if tensor.numel() else None
    for i in range(tensor.numel()):
        found = found | (x.graph == array[i])  # type: ignore[index]
    return x._of(~found if more.get("invert") else found)


MAX_ELEMENTS = 64
"""Of `isin`: each is a comparison for every pair."""


class _Indexing(TorchFunctionMode):
    """While it is on, tensors that are indexed by symbols become arrays of the modification."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.captured = captured

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(x, Symbol) for x in index):
                return self.load(tensor, index)
        return func(*args, **(kwargs or {}))

    def load(self, tensor: Any, index: tuple[Any, ...]) -> Symbol | _Rows:
        if len(index) < tensor.dim() and all(isinstance(x, Symbol | int) for x in index):
            return _Rows(self, tensor, index)
        # Constant indices and new axes first; what is left is indexed by symbols alone.
        at = tuple(slice(None) if isinstance(x, Symbol) else x for x in index)
        symbols = [x.graph for x in index if isinstance(x, Symbol)]
        if any(not isinstance(x, int | slice) or (isinstance(x, slice) and x != slice(None)) for x in at):
            raise TypeError("expected positions and integers as the indices of a tensor")
        tensor = tensor[at]
        if tensor.dim() != len(symbols):
            raise TypeError(f"expected {tensor.dim()} positions to index a tensor of as many axes, got {len(symbols)}")
        return Symbol(self.captured.array(tensor)[tuple(symbols)], self.captured)


class _Rows:
    """A tensor that fewer positions have indexed than it has axes, until it is indexed by the others."""

    def __init__(self, indexing: _Indexing, tensor: Any, index: tuple[Any, ...]) -> None:
        self.indexing, self.tensor, self.index = indexing, tensor, index

    def __getitem__(self, more: Any) -> Any:
        return self.indexing.load(self.tensor, (*self.index, *(more if isinstance(more, tuple) else (more,))))

    def refuse(self, *_: Any) -> Any:
        axes = self.tensor.dim()
        raise TypeError(f"expected {axes} positions to index a tensor of as many axes, got {len(self.index)}")

    __getattr__ = __eq__ = __ne__ = __bool__ = refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)).refuse()

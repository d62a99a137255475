"""The arguments of attention(): checked, defaults filled in, and brought to the one form that backends get.

Every error names the argument, what came and what would fit.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .. import mods
from ..mods import Mod, codegen, expr
from ..mods.expr import INT64, MAX_POSITION, Expr
from ..spec import MAX_HEAD_DIM, AttentionSpec, Operands, Problem, Slot
from . import arrays

LAYOUTS = ("bhnd", "bnhd")
PRECISIONS = (None, "highest", "tf32")


class Shape:
    """How the caller's arrays map to (B, H, N, D): axes before the last three are batch axes, missing ones have
    length 1.
    """

    def __init__(self, ndim: int, batch: tuple[int, ...], layout: str) -> None:
        self.ndim, self.batch, self.layout = ndim, batch, layout

    def to_four(self, array: Any) -> Any:
        """View as (B, H, N, D) with an addressable last axis."""
        if self.ndim == 2:
            array = array[None] if self.layout == "bhnd" else array[:, None]
        if self.layout == "bnhd":
            array = array.swapaxes(-3, -2)
        return arrays.addressable(
            array.reshape((math.prod(self.batch), *array.shape[-3:])) if array.ndim != 4 else array
        )

    def like(self, tensor: Any) -> Any:
        """The caller's shape for a (B, H, N, D) tensor, as a view."""
        if self.layout == "bnhd":
            tensor = tensor.swapaxes(1, 2)
        tail = tensor.shape[1:]
        if self.ndim == 2:
            return tensor[0, 0] if self.layout == "bhnd" else tensor[0, :, 0]
        return tensor.reshape((*self.batch, *tail)) if self.ndim != 4 else tensor

    def rows(self, values: Any) -> Any:
        """The caller's shape of (B, H, N) numbers, one for each query."""
        return (
            values[0, 0]
            if self.ndim == 2
            else values.reshape((*self.batch, *values.shape[1:]))
            if self.ndim != 4
            else values
        )

    def empty(self, xp: Any, batch: int, heads: int, n: int, d: int, dtype: Any) -> Any:
        """A new (B, H, N, D) tensor that is C-contiguous in the caller's layout."""
        if self.layout == "bnhd":
            return xp.empty((batch, n, heads, d), dtype).swapaxes(1, 2)
        return xp.empty((batch, heads, n, d), dtype)


def prepare(
    q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False, q_offset: Any = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, alibi_slopes: Any = None,
    bias: Any = None, mask: Any = None, block_mask: Any = None, score_mod: Any = None, mask_mod: Any = None,
    kv_lengths: Any = None, dropout_p: float = 0.0, seed: int | None = None, sinks: Any = None, layout: str = "bhnd",
    out: Any = None, deterministic: bool = False, precision: str | None = None,
) -> tuple[Problem, Operands, Shape]:  # fmt: skip
    """Problem, operands (with new or given out, new lse) and the way back to the caller's shapes.

    Addresses are computed from lengths, offsets, integers of modifications, shapes and strides. The operands have
    these to themselves, copied before they are checked: the caller's arrays may change at any time. Lengths on a device
    stay where they are, and kernels bound them.
    """
    kind = arrays.require("q", q)
    for name, array in (("k", k), ("v", v)):
        arrays.require(name, array, kind)
    dtype = arrays.dtype_name("q", q)
    for name, array in (("k", k), ("v", v)):
        if arrays.dtype_name(name, array) != dtype:
            raise TypeError(f"{name} has dtype {array.dtype}, q has {dtype}; q, k and v have one dtype")
    shape = _shape(q, k, v, layout)
    q4, k4, v4 = (shape.to_four(x).view() for x in (q, k, v))
    batch, heads, n_q, d = q4.shape
    heads_kv, n_k, dv = v4.shape[1:]
    xp = arrays.namespace(kind)

    lengths = _lengths(kv_lengths, kind, shape, batch, n_k)
    offsets = _offsets(q_offset, kind, shape, batch, lengths, n_q, n_k)
    full = (batch, heads, n_q, n_k)
    scores, masks = [], []
    if softcap is not None:
        scores.append(mods.softcap(_number("softcap", softcap)))
    if alibi_slopes is not None:
        scores.append(mods.alibi(_slopes(alibi_slopes, kind, batch, heads)).snapshot())
    if bias is not None:
        scores.append(mods.bias(_pairwise("bias", bias, kind, shape, full, "f")).snapshot())
    if _flag("causal", causal, ", and mask= for an array of pairs"):
        masks.append(mods.causal())
    if window is not None:
        masks.append(mods.sliding_window(*_window(window)))
    if mask is not None:
        # A floating mask is added to the scores, as in other libraries.
        array = _pairwise("mask", mask, kind, shape, full, "bf")
        if array.dtype.kind == "b":
            masks.append(mods.visible(array).snapshot())
        else:
            scores.append(mods.bias(array).snapshot())
    given = [] if score_mod is None else [mods.trace(score_mod, "score").snapshot()]
    scores += given
    if block_mask is not None:
        given.append(_block_mask(block_mask, batch, heads, n_q, n_k).snapshot())
        masks.append(given[-1])
    if mask_mod is not None:
        given.append(mods.trace(mask_mod, "mask").snapshot())
        masks.append(given[-1])
    for mod in given:
        check_indices(mod, batch, heads, n_q, n_k, *_reach(offsets, q_offset is not None, batch, n_q, n_k))
    score, hidden, slots, params, values = _compose(scores, masks)

    if out is not None:
        check_out(out, kind, dtype, (*q.shape[:-1], v.shape[-1]))
    if not 0 <= _number("dropout_p", dropout_p) < 1:
        raise ValueError(f"dropout_p is {dropout_p}; a probability of at least 0 and below 1 fits")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; one of {', '.join(map(repr, PRECISIONS))} fits")
    spec = AttentionSpec(
        dtype, d, dv, heads // heads_kv if heads_kv else 1, score, hidden, slots, dropout_p > 0, sinks is not None,
        kv_lengths is not None, _deterministic(deterministic), None if precision == "highest" else precision,
    )  # fmt: skip
    problem = Problem(spec, batch, heads, n_q, n_k, kind)
    direct = out is not None and _direct(out, q, k, v, *values.values())
    operands = Operands(
        q4, k4, v4, 1 / math.sqrt(d) if scale is None else _number("scale", scale), offsets, lengths, params, values,
        _sinks(sinks, kind, heads, spec.lse_dtype), float(dropout_p), _seed(seed, dropout_p),
        shape.to_four(out) if direct else shape.empty(xp, batch, heads, n_q, dv, q.dtype),
        xp.empty((batch, heads, n_q), spec.lse_dtype), block_mask if len(masks) == 1 else None,
    )  # fmt: skip
    return problem, operands, shape


# --- shapes -----------------------------------------------------------------------------------------------------------


def _shape(q: Any, k: Any, v: Any, layout: str) -> Shape:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; {' or '.join(map(repr, LAYOUTS))} fits")
    form = "(..., heads, tokens, head_dim)" if layout == "bhnd" else "(..., tokens, heads, head_dim)"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim < 2:
            raise ValueError(f"{name} has shape {array.shape}; {form} fits, or (tokens, head_dim)")
        if array.ndim != q.ndim:
            raise ValueError(
                f"{name} has {array.ndim} axes {array.shape}, q has {q.ndim} {q.shape}; "
                f"q, k and v have equally many, {form}"
            )
        if array.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name} has batch axes {array.shape[:-3]} (shape {array.shape}), q has {q.shape[:-3]}; they are equal"
            )
        if not 1 <= array.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {array.shape[-1]} (shape {array.shape}); 1 to {MAX_HEAD_DIM} fits")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k has head dim {k.shape[-1]} (shape {k.shape}), q has {q.shape[-1]}; they are equal (only v's may differ)"
        )
    head_axis, token_axis = (-3, -2) if layout == "bhnd" else (-2, -3)
    if q.ndim == 2:
        token_axis = -2
    if v.shape[token_axis] != k.shape[token_axis]:
        raise ValueError(
            f"v has {v.shape[token_axis]} tokens (shape {v.shape}), k has {k.shape[token_axis]}; they are equal"
        )
    if q.ndim > 2:
        heads, heads_k, heads_v = (x.shape[head_axis] for x in (q, k, v))
        if heads_v != heads_k:
            raise ValueError(f"v has {heads_v} heads (shape {v.shape}), k has {heads_k}; they are equal")
        if (heads_k == 0 and heads != 0) or (heads_k and heads % heads_k):
            raise ValueError(f"q has {heads} heads (shape {q.shape}), k has {heads_k}; a multiple of k's heads fits")
    return Shape(q.ndim, tuple(q.shape[:-3]), layout)


def _pairwise(name: str, array: Any, kind: str, shape: Shape, full: tuple[int, ...], dtypes: str) -> Any:
    """An array that broadcasts to (B, Hq, Nq, Nk), with at most four axes."""
    arrays.require(name, array, kind)
    dtype_kind = "f" if array.dtype.name == "bfloat16" else array.dtype.kind
    if dtype_kind not in dtypes:
        words = {"f": "a floating dtype (added to the scores)", "b": "bool (True = attend)"}
        raise TypeError(f"{name} has dtype {array.dtype}; {' or '.join(words[x] for x in dtypes)} fits")
    wanted = (*shape.batch, *full[1:])
    axes = wanted[-array.ndim :] if array.ndim else ()
    if array.ndim > len(wanted) or any(n not in (1, m) for n, m in zip(array.shape, axes, strict=True)):
        raise ValueError(f"{name} has shape {array.shape}; what broadcasts to (..., Hq, Nq, Nk) = {wanted} fits")
    if array.ndim > 3 and len(shape.batch) != 1:
        rest = array.shape[-3:]
        if any(n != 1 for n in array.shape[:-3]):
            array = arrays.namespace(kind).broadcast_to(array, (*shape.batch, *rest))
        array = array.reshape((math.prod(array.shape[:-3]), *rest))
    return array if array.ndim else array.reshape(1)


def _per_entry(name: str, value: Any, kind: str, shape: Shape, batch: int, what: str) -> Any:
    """int64 (B,) from an integer or integers, one for each batch entry: a copy of its own. On the device where q and
    they are, since reading them here would wait for all that was enqueued before; there it may be the caller's array.
    """
    stays = kind != "numpy" and arrays.kind_of(value) == kind
    try:
        array = value if stays else np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {value!r}; {what} fits")
    if array.ndim and array.shape not in ((batch,), shape.batch):
        raise ValueError(f"{name} has shape {array.shape}; {what} fits, here ({batch},)")
    if not stays and array.size and array.max() > INT64[1]:
        raise ValueError(f"{name} is {value!r}; {what} fits, within 64 bits with a sign")
    flat = array.reshape(-1) if array.ndim else array
    if not stays:
        return np.broadcast_to(flat, (batch,)).astype(np.int64, order="C")
    xp = arrays.namespace(kind)
    return xp.ascontiguousarray(xp.broadcast_to(flat, (batch,)), np.int64)


def _lengths(value: Any, kind: str, shape: Shape, batch: int, n_k: int) -> Any:
    if value is None:
        return np.full(batch, n_k, np.int64)
    what = "integers (B,), the number of keys of each batch entry,"
    lengths = _per_entry("kv_lengths", value, kind, shape, batch, what)
    if isinstance(lengths, np.ndarray) and lengths.size and not (lengths.min() >= 0 and lengths.max() <= n_k):
        raise ValueError(
            f"kv_lengths has values from {lengths.min()} to {lengths.max()}; 0 to {n_k}, the number of keys, fits"
        )
    return lengths


def _offsets(value: Any, kind: str, shape: Shape, batch: int, lengths: Any, n_q: int, n_k: int) -> Any:
    """Where each batch entry's first query is; what lies on the device is brought within the bounds that are errors
    elsewhere.
    """
    if value is None:
        if isinstance(lengths, np.ndarray):
            return lengths - n_q
        offsets = arrays.namespace(kind).clip(lengths, 0, n_k)  # as kernels take them
        offsets -= n_q  # in place: a graph that records this writes to no memory that others may get
        return offsets
    offsets = _per_entry("q_offset", value, kind, shape, batch, "an integer, or integers (B,),")
    if not isinstance(offsets, np.ndarray):
        own = None if arrays.same_address(offsets, value) else offsets
        return arrays.namespace(kind).clip(offsets, -MAX_POSITION, MAX_POSITION, out=own)
    if offsets.size and not (offsets.min() >= -MAX_POSITION and offsets.max() <= MAX_POSITION):
        raise ValueError(f"q_offset is {value!r}; positions within 2^48 fit")
    return offsets


def _reach(offsets: Any, given: bool, batch: int, n_q: int, n_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest offset that each batch entry may have; on the device they are not looked at."""
    if isinstance(offsets, np.ndarray):
        return offsets, offsets
    low, high = (-MAX_POSITION, MAX_POSITION) if given else (-n_q, n_k - n_q)
    return np.full(batch, low), np.full(batch, high)


# --- single arguments -------------------------------------------------------------------------------------------------


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; a number fits") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r}; a finite number fits")
    return number


def _flag(name: str, value: Any, hint: str = "") -> bool:
    if not isinstance(value, (bool, np.bool_)):
        given = f"an array of shape {value.shape}" if hasattr(value, "shape") else repr(value)
        raise TypeError(f"{name} is {given}; True or False fits{hint}")
    return bool(value)


def _deterministic(value: Any) -> bool:
    """What the call or the process (FLASHKIT_DETERMINISTIC) asks for."""
    return _flag("deterministic", value) or (os.environ.get("FLASHKIT_DETERMINISTIC") or "0") != "0"


def _window(window: Any) -> tuple[int | None, int | None]:
    fits = "(left, right) fits, numbers of keys or None for no bound"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window is {window!r}; {fits}")
    for side in window:
        if side is not None and (not isinstance(side, (int, np.integer)) or isinstance(side, bool)):
            raise TypeError(f"window is {window!r}; {fits}")
        if side is not None and side < 0:
            raise ValueError(f"window is {window!r}; {fits}, 0 or more")
    left, right = (None if side is None else int(side) for side in window)
    return left, right


def _floats(name: str, values: Any, kind: str) -> Any:
    """An array of floating numbers, made from a list of them where one is given."""
    if isinstance(values, (list, tuple)):
        try:
            values = np.asarray(values, np.float32)
        except (TypeError, ValueError):
            raise TypeError(f"{name} is {values!r}; floating numbers fit") from None
    arrays.require(name, values, kind)
    if values.dtype.kind != "f" and values.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {values.dtype}; a floating dtype fits")
    return values


def _slopes(slopes: Any, kind: str, batch: int, heads: int) -> Any:
    slopes = _floats("alibi_slopes", slopes, kind)
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes has shape {slopes.shape}; (Hq,) = ({heads},) or (B, Hq) = ({batch}, {heads}) fits"
        )
    return slopes


def _sinks(sinks: Any, kind: str, heads: int, dtype: str) -> Any:
    if sinks is None:
        return None
    sinks = _floats("sinks", sinks, kind)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {sinks.shape}; (Hq,) = ({heads},) fits, one logit for each query head")
    return sinks.astype(dtype)


def _seed(seed: Any, dropout_p: float) -> int:
    if seed is None:
        return secrets.randbits(64) if dropout_p else 0
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise TypeError(f"seed is {seed!r}; an integer fits")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; 0 to 2^64 - 1 fits")
    return int(seed)


def _block_mask(block_mask: Any, batch: int, heads: int, n_q: int, n_k: int) -> Mod:
    from ..mods.block_mask import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}; a flashkit.BlockMask fits")
    if (block_mask.n_q, block_mask.n_k) != (n_q, n_k):
        raise ValueError(
            f"block_mask is for {block_mask.n_q} queries and {block_mask.n_k} keys; the call has {n_q} and {n_k}"
        )
    for what, count, n in (("batch entries", block_mask.batch, batch), ("heads", block_mask.heads, heads)):
        if count not in (1, n):
            raise ValueError(f"block_mask tells {count} {what} apart; the call has {n}, and {n} or 1 fits")
    return block_mask.mod


def check_out(out: Any, kind: str, dtype: str, wanted: tuple[int, ...]) -> None:
    """The array that the caller gives for the result can hold it."""
    arrays.require("out", out, kind)
    if arrays.dtype_name("out", out) != dtype:
        raise TypeError(f"out has dtype {out.dtype}; q's, {dtype}, fits")
    if out.shape != wanted:
        raise ValueError(f"out has shape {out.shape}; {wanted} fits")
    if kind == "numpy" and not out.flags.writeable:
        raise ValueError("out is read-only; an array that can be written fits")


def _direct(out: Any, *inputs: Any) -> bool:
    """Whether a kernel may write into `out`: addressable, no two elements in one place, no memory shared with an
    input.
    """
    if arrays.addressable(out) is not out or 0 in [s for s, n in zip(out.strides, out.shape, strict=True) if n > 1]:
        return False
    if out.ndim > 4 and not out.flags.c_contiguous:
        return False
    return not any(arrays.may_share(out, x) for x in inputs)


# --- modifications ----------------------------------------------------------------------------------------------------


def _compose(
    scores: Sequence[Mod], masks: Sequence[Mod]
) -> tuple[Expr | None, Expr | None, tuple[Slot, ...], dict[str, Any], dict[str, Any]]:
    """One score and one mask graph, the slots that they read, and the slots' values."""
    if not scores and not masks:
        return None, None, (), {}, {}
    score, mask, named = _compose_graphs(tuple(m.expr for m in scores), tuple(m.expr for m in masks))
    every = (*scores, *masks)
    slots, params, values = [], {}, {}
    for index, old, new, kind, ndim in named:
        mod = every[index]
        if ndim is None:
            params[new] = mod.params[old]
            slots.append(Slot(new, kind))
        else:
            values[new] = mod.arrays[old]
            slots.append(Slot(new, kind, ndim, values[new].dtype.name))
    return score, mask, tuple(slots), params, values


@lru_cache(maxsize=1024)
def _compose_graphs(
    scores: tuple[Expr, ...], masks: tuple[Expr, ...]
) -> tuple[Expr | None, Expr | None, tuple[tuple[int, str, str, Any, int | None], ...]]:
    """The graphs joined, with their slots renamed by where they occur, so that equal features give equal graphs."""
    named: list[tuple[int, str, str, Any, int | None]] = []
    renamed = []
    for index, graph in enumerate((*scores, *masks)):
        names: dict[str, str] = {}
        for node in expr.walk([graph]):
            if node.op in ("param", "load") and node.value not in names:
                names[node.value] = f"v{len(named)}"
                named.append(
                    (index, node.value, names[node.value], node.kind, len(node.args) if node.op == "load" else None)
                )
        renamed += expr.rename([graph], names)
    score: Expr = expr.S
    for graph in renamed[: len(scores)]:
        score = mods.after(score, graph)
    visible = expr.TRUE
    for graph in renamed[len(scores) :]:
        visible = visible & graph
    return None if score is expr.S else score, None if visible is expr.TRUE else visible, tuple(named)


def check_indices(
    mod: Mod, batch: int, heads: int, n_q: int, n_k: int, least: np.ndarray, greatest: np.ndarray
) -> None:  # fmt: skip
    """Every index that a modification computes lies within its array, for all positions of the call; kernels do not
    check. least, greatest: offset of each batch entry, (B,).

    An index that may overflow reaches all of int64, unless what follows brings it back, as clip() and % do.
    """
    loads = [node for node in expr.walk([mod.expr]) if node.op == "load"]
    if not loads or 0 in (batch, heads, n_q, n_k):
        return
    from ..mods.ranges import RangeTable

    env: dict[str, Any] = {
        "b": np.arange(batch)[:, None], "h": np.arange(heads), "row0": 0, "row1": n_q - 1, "k0": 0, "k1": n_k - 1,
        "q0": least[:, None], "q1": greatest[:, None] + (n_q - 1), **mod.params,
    }  # fmt: skip
    # What an index itself is read from. One on a device has to be waited for, so that no kernel reads out of range.
    for name in {inner.value for node in loads for inner in expr.walk(node.args) if inner.op == "load"}:
        array = mod.arrays[name] if isinstance(mod.arrays[name], np.ndarray) else mod.arrays[name].get()
        env[name] = RangeTable(array) if array.dtype.kind in "iub" else array
    for node in loads:
        array = mod.arrays[node.value]
        for axis, index in enumerate(node.args):
            n, bounds = array.shape[axis], expr.bounds(index)
            low, high = (0, n) if bounds is None else _extremes(bounds, env)
            if low < 0 or high >= n:
                reach = f"runs from {low} to {high}"
                if bounds is None:
                    reach = "cannot be bounded"
                elif INT64[0] == low or INT64[1] == high:
                    reach += " (it may overflow, or its bounds do)"
                raise ValueError(
                    f"{mod.kind}_mod: the index of axis {axis} of {node.value} (shape {array.shape}) {reach} in this "
                    f"call; 0 to {n - 1} fits, for instance {node.value}[clip(index, 0, {n - 1})]"
                )


def _extremes(bounds: tuple[Expr, Expr], env: dict[str, Any]) -> tuple[int, int]:
    low, high = (np.asarray(codegen.evaluate(bound, env)) for bound in bounds)
    return int(low.min()), int(high.max())

"""`prepare`: the arguments of attention(), checked, as the problem and the operands that backends get.

Every error names the argument, what was expected and what came.
"""

from __future__ import annotations

import math
import secrets
from types import SimpleNamespace
from typing import Any, NamedTuple, Unpack

import numpy as np

from .. import mods
from ..errors import shown, warn
from ..mods import Mod
from ..mods.block_mask import BlockMask
from ..mods.dropout import ChunkSeed
from ..mods.tracing import DTYPES
from ..numeric import integer, number
from ..options import DEFAULTS, Options
from ..spec import MAX_PAGE_RUN, AttentionSpec, Fp8, Operands, Problem, name_of
from . import arrays
from .checks import can_write, check_out, choice, flag, is_deterministic, window_of
from .compose import check_indices, compose
from .sequences import Sequences, sequences_of
from .shape import Shape

PRECISIONS = (None, "highest", "tf32", "fp8")


class Memory(NamedTuple):
    """Where the numbers of q, k and v are, if not in the three arrays alone. All of it has been checked."""

    k_pe: Any = None  # an array of the last columns of the keys; k has the other columns
    fp8: Fp8 | None = None  # q, k and v are codes of e4m3, uint8,
    dtype: Any = None  # for arrays of this dtype, that of the output,
    v_transposed: Any = None  # and V^T, four axes
    kv_format: str = ""  # k and v are numbers of 8 bits of this format
    scales: tuple[Any, Any, Any] | None = None  # of q, k and v, which broadcast to one for each token, or block


PLAIN = Memory()


def per_token(scale: Any, x: Any) -> Any:
    """Scales of an array, one for each token, as a view."""
    return np.broadcast_to(scale, (*x.shape[:-1], 1)) if isinstance(scale, np.ndarray) else scale


class Prepared(NamedTuple):
    """A checked call."""

    problem: Problem
    operands: Operands
    shape: Shape


def prepare(
    q: Any, k: Any, v: Any, *, out: Any = None, described: bool = False, memory: Memory = PLAIN,
    **given: Unpack[Options],
) -> Prepared:  # fmt: skip
    """Check the arguments of attention() and fill in defaults. The operands have a new lse, and `out` if a kernel may
    write to it, else a new one.

    described: the call is only described. Then nothing takes memory in proportion to its sizes: results, lengths and
    offsets are stand-ins, q, k and v are not copied, and axes of stride 0 of a bias and a mask count as of length 1.

    Kernels compute addresses from lengths, offsets, integers of modifications, shapes and strides. These are copied,
    and views of arrays are taken, before they are checked, because the caller's arrays may change at any time. Lengths
    on a device are not read; the kernels clamp them.
    """
    o: Any = SimpleNamespace(**DEFAULTS | given)
    kind = arrays.require("q", q)
    for name, array in (("k", k), ("v", v)):
        arrays.require(name, array, kind)
    q, k, v = q.view(), k.view(), v.view()  # before their forms are looked at; see arrays.own_forms
    fp8, k_pe = memory.fp8, memory.k_pe
    own_dtype = memory.dtype or q.dtype
    dtype = name_of(own_dtype) if fp8 else arrays.dtype_name("q", q)
    for name, array in () if fp8 or memory.kv_format else (("k", k), ("v", v)):
        if arrays.dtype_name(name, array) != dtype:
            raise TypeError(f"{name}: expected dtype {dtype} (q's), got {array.dtype}")
    pe_dim = 0 if k_pe is None else k_pe.shape[-1]
    q_of_k = q[..., : q.shape[-1] - pe_dim]
    seqs = sequences_of(q_of_k, k, v, kind, o, not described)
    shape, batch, most_q, most_k = seqs.shape, seqs.batch, seqs.most_q, seqs.most_k
    q4 = (shape.four_axes if described else shape.to_four)(q).view()
    k4, v4 = ((shape.four_axes if described and not shape.paged else shape.keys_to_four)(x).view() for x in (k, v))
    entries, heads, n_q, d = q4.shape
    heads_kv, dv = k4.shape[1], v4.shape[3]
    scores, masks, given_mods = _modifications(o, kind, heads, seqs, described)
    for mod in given_mods:
        n = seqs.n_q if isinstance(seqs.n_q, np.ndarray) else most_q
        check_indices(mod, batch, heads, n, most_k, *seqs.reach())
    score, hidden, slots, params, values, names = compose(scores, masks)
    offsets = seqs.offsets_for(kind, n_q, score, hidden)

    direct = False
    if out is not None:
        out = arrays.own_form("out", out, kind)
        check_out(out, kind, dtype, (*q.shape[:-1], v.shape[-1]))
        direct = can_write(out, q, k, v, *values.values(), *([] if k_pe is None else [k_pe]))
    dropout_p = number("dropout_p", o.dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected a probability of at least 0 and below 1, got {dropout_p}")
    choice("precision", o.precision, PRECISIONS)
    if o.precision == "fp8":  # the functions that take it quantise, and come here without it
        raise ValueError(
            "precision: expected None, 'highest' or 'tf32', got 'fp8', which only attention, attention_vjp, plan, "
            "explain and weights of flashkit itself take"
        )
    spec = AttentionSpec(
        dtype, d, dv, heads // heads_kv if heads_kv else 1, score, hidden, slots, dropout_p > 0, o.sinks is not None,
        o.kv_lengths is not None or o.cu_seqlens is not None, is_deterministic(o.deterministic),
        None if o.precision == "highest" else o.precision, o.cu_seqlens is not None, o.page_table is not None, pe_dim,
        fp8, memory.kv_format, 1 if o.page_table is None else math.gcd(k.shape[1], MAX_PAGE_RUN),
    )  # fmt: skip
    problem = Problem(spec, batch + seqs.extra, heads, most_q, most_k, kind, seqs.tokens(n_q))
    xp = arrays.namespace(kind)

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        return arrays.stand_in(kind, shape, dtype) if described else xp.empty(shape, dtype)

    of_q, *of_keys = memory.scales or (None,)
    scales = [shape.keys_to_four(per_token(scale, x)) for scale, x in zip(of_keys, (k, v))]
    operands = Operands(
        q4, k4, v4 if memory.v_transposed is None else memory.v_transposed,
        1 / math.sqrt(d) if o.scale is None else number("scale", o.scale),
        seqs.with_extra(offsets), seqs.with_extra(seqs.lengths), params, values,
        sinks_of(o.sinks, kind, heads, o.layout, spec.lse_dtype, not described), dropout_p, seed_of(o.seed, dropout_p),
        shape.to_four(out).view() if direct else shape.empty(empty, entries, heads, n_q, dv, own_dtype),
        empty((entries, heads, n_q), spec.lse_dtype), o.block_mask if len(masks) == 1 else None, seqs.cu_seqlens,
        seqs.page_table, None if k_pe is None else shape.keys_to_four(k_pe),
        (None if of_q is None else shape.four_axes(of_q), *scales) if memory.scales else None,
        follows=seqs.queries if o.q_offset is None else None, names=names,
    )  # fmt: skip
    return Prepared(problem, operands, shape)


def masks_by_position(causal: Any, window: Any) -> list[Mod]:
    """The masks that these options are, in their order."""
    masks = [mods.causal()] if flag("causal", causal, ", and mask= for an array of pairs") else []
    return masks if window is None else [*masks, mods.sliding_window(*window_of(window))]


def _modifications(
    o: Any, kind: str, heads: int, seqs: Sequences, described: bool
) -> tuple[dict[str, Mod], list[Mod], list[Mod]]:
    """The options that change scores, by name; those that hide pairs; and those whose indices need a proof."""
    batch, layout = seqs.batch, o.layout
    scores: dict[str, Mod] = {}
    masks: list[Mod] = []

    def pairs(name: str, array: Any, dtypes: str) -> Any:
        if seqs.cu_seqlens is not None:
            raise ValueError(f"{name}: expected None beside cu_seqlens; use a score_mod or a mask_mod")
        checked = pairwise(name, array, kind, seqs.shape, (batch, heads, seqs.most_q, seqs.room), dtypes)
        return arrays.without_repeats(checked) if described else checked

    if o.softcap is not None:
        scores["softcap"] = mods.softcap(o.softcap)
    if o.alibi_slopes is not None:
        slopes = slopes_of(o.alibi_slopes, kind, batch, heads, layout)
        scores["alibi_slopes"] = mods.alibi(slopes).snapshot()
    if o.bias is not None:
        scores["bias"] = mods.bias(pairs("bias", o.bias, "f")).snapshot()
    masks += [*masks_by_position(o.causal, o.window), *seqs.masks]
    if o.mask is not None:
        # A floating mask is added to the scores, as in other libraries.
        array = pairs("mask", o.mask, "bf")
        if array.dtype.kind == "b":
            masks.append(mods.visible(array).snapshot())
        else:
            scores["mask"] = mods.bias(array).snapshot()
    own_mods = [] if o.score_mod is None else [mods.trace(o.score_mod, "score").snapshot()]
    if own_mods:
        scores["score_mod"] = own_mods[0]
    if o.block_mask is not None:
        own_mods.append(
            block_mask_of(o.block_mask, batch, heads, seqs.most_q, seqs.most_k, layout, seqs.differ).snapshot()
        )
        masks.append(own_mods[-1])
    if o.mask_mod is not None:
        own_mods.append(mods.trace(o.mask_mod, "mask").snapshot())
        masks.append(own_mods[-1])
    return scores, masks, own_mods


# --- single arguments -------------------------------------------------------------------------------------------------


def pairwise(name: str, array: Any, kind: str, shape: Shape, full: tuple[int, ...], dtypes: str) -> Any:
    """An array that broadcasts to (B, Hq, Nq, Nk), with at most four axes."""
    array = arrays.own_form(name, array, kind)
    dtype_kind = DTYPES.get(array.dtype.name, " ")[0]
    if dtype_kind not in dtypes:
        words = {"f": "a floating dtype up to float64 (added to the scores)", "b": "bool (True = attend)"}
        raise TypeError(f"{name}: expected {' or '.join(words[x] for x in dtypes)}, got {array.dtype}")
    wanted, (batch, _, n_q, n_k) = (*shape.batch, *full[1:]), full
    axes = wanted[-array.ndim :] if array.ndim else ()
    keys_of_entries = array.ndim == 2 and array.shape == (batch, n_k) and batch > 1
    hint = f"{name}[:, None, None, :] is one of the keys of each batch entry, (B, Nk)"
    if array.ndim > len(wanted) or any(n not in (1, m) for n, m in zip(array.shape, axes, strict=True)):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to (..., Hq, Nq, Nk) = {wanted} with layout={shape.layout!r}, "
            f"got {array.shape}{f'; {hint}' if keys_of_entries else ''}"
        )
    if keys_of_entries and n_q == batch:
        warn(
            f"{name} of shape {array.shape} is read as (Nq, Nk), the pairs of all batch entries, and {batch} is the "
            f"number of batch entries too; {hint}, and {name}[None, None] one of pairs"
        )
    if array.ndim > 3 and len(shape.batch) != 1:
        rest = array.shape[-3:]
        if any(n != 1 for n in array.shape[:-3]):
            array = arrays.namespace(kind).broadcast_to(array, (*shape.batch, *rest))
        array = array.reshape((math.prod(array.shape[:-3]), *rest))
    return array if array.ndim else array.reshape(1)


def _floats(name: str, values: Any, kind: str) -> Any:
    """An array of floating numbers, or a list of them as an array."""
    if isinstance(values, (list, tuple)):
        try:
            values = np.asarray(values, np.float32)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"{name}: expected floating numbers, got {shown(values)}") from None
    values = arrays.own_form(name, values, kind)
    if DTYPES.get(values.dtype.name) != "float":
        raise TypeError(f"{name}: expected a floating dtype up to float64, got {values.dtype}")
    return values


def slopes_of(slopes: Any, kind: str, batch: int, heads: int, layout: str) -> Any:
    """alibi_slopes."""
    slopes = _floats("alibi_slopes", slopes, kind)
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes: expected shape (Hq,) = ({heads},) or (B, Hq) = ({batch}, {heads}) with layout={layout!r}, "
            f"got {slopes.shape}"
        )
    return slopes


def sinks_of(sinks: Any, kind: str, heads: int, layout: str, dtype: str, copied: bool = True) -> Any:
    """The sinks in the computing precision, unless `copied` is False, or None."""
    if sinks is None:
        return None
    sinks = _floats("sinks", sinks, kind)
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks: expected shape (Hq,) = ({heads},) with layout={layout!r}, one logit for each query head, got "
            f"{sinks.shape}"
        )
    return sinks.astype(dtype) if copied else sinks


def seed_of(seed: Any, dropout_p: float) -> int:
    """The seed, or a random one if dropout needs one."""
    if seed is None:
        return secrets.randbits(64) if dropout_p else 0
    return seed if isinstance(seed, ChunkSeed) else integer("seed", seed, 0, 2**64 - 1)


def block_mask_of(
    block_mask: Any, batch: int, heads: int, n_q: int, n_k: int, layout: str, larger: bool = False
) -> Mod:
    """The mask of a BlockMask for these sizes, or, where sequences differ in length, for larger ones."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: expected a flashkit.BlockMask, got {type(block_mask).__name__}")
    sizes = block_mask.n_q, block_mask.n_k
    if sizes != (n_q, n_k) and not (larger and sizes[0] >= n_q and sizes[1] >= n_k):
        least = ", those of the longest sequences, or more" if larger else ""
        raise ValueError(
            f"block_mask: expected one for {n_q} queries and {n_k} keys{least} (layout={layout!r}), got one for "
            f"{sizes[0]} and {sizes[1]}"
        )
    for what, count, n in (("batch entries", block_mask.batch, batch), ("heads", block_mask.heads, heads)):
        if count not in (1, n):
            raise ValueError(f"block_mask: expected 1 or {n} {what} (layout={layout!r}), got {count}")
    return block_mask.mod

"""`Whole`: a call on the tokens of all ranks, as the options of calls on chunks of its queries and keys.

A chunk of queries and one of keys are ranges of positions with the same step. In units of the step they are a call of
their own: a causal mask or a window between them is one with another offset. What reads positions otherwise gets them
from its chunk's number, first + step * number.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .. import mods
from ..call import arrays
from ..call.arguments import masks_by_position, prepare
from ..call.checks import window_of
from ..call.chunks import hiding, joined, moved
from ..call.shape import HEADS_AND_TOKENS
from ..errors import UnsupportedError
from ..mods import expr
from ..mods.dropout import ChunkSeed
from ..options import DEFAULTS, FIXED, with_axes
from .placement import along


class Axes(NamedTuple):
    """Where heads and tokens are, counted from the last axis; heads is None in arrays of two axes."""

    heads: int | None
    tokens: int

    @classmethod
    def of(cls, q: Any, options: dict[str, Any]) -> Axes:
        """Those of q, k, v and out."""
        if q.ndim == 2:
            return cls(None, -2)
        packed = options.get("cu_seqlens") is not None
        return cls(*HEADS_AND_TOKENS["bnhd" if packed else options.get("layout", "bhnd")])


OF_ROWS = Axes(-2, -1)
"""Of lse."""

NOT_TAKEN = {
    "page_table": "pages have no order among ranks; see Comm.attend",
    "precision": "a part of the keys has other scales than the whole",
}
"""Options that are refused, and why."""


class Spans(NamedTuple):
    """The part of each entry or sequence that a chunk has: its begin there, and its tokens; int64 (B,)."""

    first: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray | None  # cu_seqlens of the chunk


class Whole:
    """A call on all tokens, of a rank's arrays; its bias and mask have all keys. tokens: queries and keys in all."""

    def __init__(
        self, q: Any, k: Any, v: Any, options: dict[str, Any], tokens: tuple[int, int], backend: str | None
    ) -> None:
        o: Any = SimpleNamespace(**DEFAULTS | options)
        for name, why in NOT_TAKEN.items():
            if options.get(name) not in (None, "highest", "tf32"):
                raise UnsupportedError(f"{name}: not taken by distributed attention: {why}")
        self.xp: Any = arrays.namespace(arrays.require("q", q))
        self.axes, self.tokens, self._o = Axes.of(q, options), tokens, o
        self._q_tokens = q.shape[self.axes.tokens]
        integers = {name: _on_host(options[name]) for name in with_axes("entries", "memory") if name in options}
        described = {**options, **integers}
        for name in with_axes("pairs"):
            if options.get(name) is not None:
                described[name] = self._all_rows(name, options[name])
        stand_ins = [self._stand_in(x, n) for x, n in zip((q, k, v), (tokens[0], tokens[1], tokens[1]), strict=True)]
        problem, operands, _ = prepare(*stand_ins, described=True, **described)
        self.heads, self.heads_kv = problem.heads, operands.k.shape[1]
        self.lse_dtype, self.v_dim = np.dtype(problem.spec.lse_dtype), v.shape[-1]
        self.first_head = 0
        self.packed = problem.spec.packed
        self._offsets, self._lengths = operands.q_offset, operands.kv_lengths
        self._q_lengths: Any = None
        if self.packed:
            self._offsets, self._lengths = self._offsets[:-1], self._lengths[:-1]
            self._cu = tuple(x[:-1] for x in operands.cu_seqlens or ())
        batch = len(self._offsets)
        if o.q_lengths is not None:
            self._q_lengths = np.broadcast_to(integers["q_lengths"].reshape(-1), (batch,)).astype(np.int64)
        self._window = None if o.window is None else window_of(o.window)
        self._score = None if o.score_mod is None else mods.trace(o.score_mod, "score")
        own = None if o.mask_mod is None else mods.trace(o.mask_mod, "mask")
        self._mask = joined([own, o.block_mask and o.block_mask.mod])
        plain = joined(masks_by_position(o.causal, o.window))
        self._plain, self._hidden = (None if x is None else hiding(x) for x in (plain, joined([plain, self._mask])))
        self._dropout: Any = (operands.dropout_p, operands.seed) if operands.dropout_p else None
        self._fixed = {name: options[name] for name in FIXED if name in options} | {"backend": backend}

    def of_heads(self, heads: range) -> Whole:
        """The call on these query heads alone."""
        part: Whole = object.__new__(Whole)
        vars(part).update(vars(self), first_head=heads.start, heads=len(heads))
        part._o = SimpleNamespace(**vars(self._o))
        for name in with_axes("heads"):
            if (x := getattr(self._o, name)) is not None:
                setattr(part._o, name, self.xp.asarray(x)[..., heads.start : heads.stop])
        for name in with_axes("pairs"):
            if (x := getattr(self._o, name)) is not None:
                if x.ndim > 1 and x.shape[-2] > 1:
                    raise UnsupportedError(f"{name}: method='heads' needs all rows; use method='ring' or 'gather'")
                if x.ndim > 2 and x.shape[-3] > 1:
                    setattr(part._o, name, x[..., heads.start : heads.stop, :, :])
        return part

    @property
    def sinks(self) -> Any:
        """One logit a head of this library's, or None."""
        return None if self._o.sinks is None else self.xp.asarray(self._o.sinks, self.lse_dtype)

    def chunk(self, rows: range, place: slice, keys: range) -> dict[str, Any] | None:
        """The options of attention of these queries, at `place` of the rank's, to these keys; None if all is hidden."""
        o, step = self._o, rows.step
        of_q, of_k = self._spans(0, rows), self._spans(1, keys)
        q0, k0 = of_q.first + self._offsets, of_k.first
        q1, k1 = q0 + step * (of_q.counts - 1), k0 + step * (of_k.counts - 1)
        if not self._alive(self._hidden, of_q, of_k, step).any():
            return None
        both, options = (of_q.counts > 0) & (of_k.counts > 0), dict(self._fixed)
        score, mask, window, slopes = self._score, self._mask, self._window, o.alibi_slopes
        if step > 1:  # these count in tokens, not in steps
            if window is not None:
                mask, window = joined([mask, mods.sliding_window(*window)]), None
            if slopes is not None:
                alibi = mods.alibi(self.xp.asarray(slopes, self.lse_dtype))
                score, slopes = alibi if score is None else alibi.then(score), None
        places = {
            expr.H: (expr.H, self.first_head, 1), expr.ROW: (expr.ROW, self._value(of_q.first), step),
            expr.K: (expr.K, self._value(k0), step),
            expr.Q: (expr.Q, self._value(k0), 1) if step == 1 else (expr.ROW, self._value(q0), step),
        }  # fmt: skip
        if score is not None:
            options["score_mod"] = moved(score, places)
        if mask is not None:
            options["mask_mod"] = moved(mask, places)
        if slopes is not None:
            options["alibi_slopes"] = slopes
        if o.causal and (k1 > q0)[both].any():
            options["causal"] = True
        if window is not None:
            left, right = window
            if (left is not None and (k0 < q1 - left)[both].any()) or (
                right is not None and (k1 > q0 + right)[both].any()
            ):
                options["window"] = window
        if options.keys() & {"causal", "window", "alibi_slopes", "score_mod", "mask_mod"}:
            options["q_offset"] = _scalar((q0 - k0) // step)
        for name in with_axes("pairs"):
            if (x := getattr(o, name)) is not None:
                if x.ndim > 1 and x.shape[-2] > 1:
                    x = along(x, -2, place)
                options[name] = along(x, -1, keys) if x.shape[-1] > 1 else x
        if self._dropout:
            options |= self._dropped(_scalar(of_q.first), _scalar(k0), step)
        if self.packed:
            options["cu_seqlens"] = of_q.offsets, of_k.offsets
        else:
            if (of_k.counts < len(keys)).any():
                options["kv_lengths"] = of_k.counts
            if (of_q.counts < len(rows)).any():
                options["q_lengths"] = of_q.counts
        return options

    def _dropped(self, row: Any, key: Any, step: int) -> dict[str, Any]:
        """Dropout of the same pairs as in the whole, whose generator serves four neighbouring keys at a time."""
        of_cuda = self.xp is not np and isinstance(key, int) and key % 4
        if step > 1 or of_cuda or not (isinstance(row, int) and isinstance(key, int)):
            raise UnsupportedError(
                "dropout_p: expected order='contiguous' or 'zigzag', no cu_seqlens, and on a GPU chunks of a multiple "
                "of 4 keys, as random numbers are drawn for four keys at a time; method='heads' takes all"
            )
        probability, seed = self._dropout
        return {"dropout_p": probability, "seed": ChunkSeed.at(seed, row, key, self.first_head)}

    def sees(self, rows: range, keys: range) -> bool:
        """Whether a causal mask, the window and lengths, which all ranks know, leave a pair of these."""
        return bool(self._alive(self._plain, self._spans(0, rows), self._spans(1, keys), rows.step).any())

    def _alive(self, hidden: Any, of_q: Spans, of_k: Spans, step: int) -> np.ndarray:
        """Of which batch entries the chunks have a pair that may be visible."""
        alive = (of_q.counts > 0) & (of_k.counts > 0)
        if hidden is not None and alive.any():
            b, heads = alive.nonzero()[0], np.arange(self.first_head, self.first_head + self.heads)
            row0, k0, n_q, n_k = (x[b, None] for x in (of_q.first, of_k.first, of_q.counts, of_k.counts))
            row1, offset = row0 + step * (n_q - 1), self._offsets[b, None]
            state = hidden(
                b=b[:, None], h=heads, row0=row0, row1=row1, q0=row0 + offset, q1=row1 + offset, k0=k0,
                k1=k0 + step * (n_k - 1),
            )  # fmt: skip
            alive[b] = ~np.broadcast_to(state, (len(b), len(heads))).all(1)
        return alive

    def _spans(self, which: int, tokens: range) -> Spans:
        step = tokens.step
        if self.packed:
            cu = self._cu[which]
            own = np.clip(-((tokens.start - cu) // step), 0, len(tokens))
            counts = np.diff(own)
            return Spans(np.where(counts > 0, tokens.start + step * own[:-1] - cu[:-1], 0), counts, own)
        lengths = self._lengths if which else self._q_lengths
        first = np.full(len(self._lengths), tokens.start)
        if lengths is None:
            return Spans(first, np.full(len(first), len(tokens)), None)
        return Spans(first, np.clip(-((tokens.start - lengths) // step), 0, len(tokens)), None)

    def _value(self, first: np.ndarray) -> Any:
        value = _scalar(first)
        return value if isinstance(value, int) else self.xp.asarray(value)

    def _stand_in(self, x: Any, tokens: int) -> Any:
        shape = list(x.shape)
        shape[self.axes.tokens] = tokens
        return arrays.stand_in(arrays.require("q", x), shape, x.dtype)

    def _all_rows(self, name: str, x: Any) -> Any:
        """A stand-in for a bias or mask of all rows."""
        arrays.require(name, x)
        if x.ndim < 2 or x.shape[-2] == 1:
            return x
        if x.shape[-2] != self._q_tokens:
            raise ValueError(
                f"{name}: expected 1 or {self._q_tokens} rows, the rank's queries, and all keys, got shape {x.shape}"
            )
        return arrays.stand_in(arrays.require(name, x), (*x.shape[:-2], self.tokens[0], x.shape[-1]), x.dtype)


def _on_host(x: Any) -> Any:
    """Integers on the host; a tuple of them where there are two."""
    if isinstance(x, tuple):
        return tuple(map(_on_host, x))
    return None if x is None else np.asarray(x.get() if hasattr(x, "get") else x)


def _scalar(values: np.ndarray) -> Any:
    """One integer if all are equal."""
    return int(values[0]) if (values == values[:1]).all() and len(values) else values

"""`SpreadCache`: a KV cache whose tokens are spread over ranks, for contexts that one device does not hold.

Pages go round: tokens of page n of a sequence are on rank n mod ranks. A step of decoding attends to each rank's keys
and merges the partial results once. Masks and scores see the positions in the sequence: the position of a rank's key is
an expression of its number.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import mods
from ..cache.kv_cache import KVCache
from ..call import arrays, interop
from ..call.checks import window_of
from ..call.chunks import joined, moved
from ..mods import expr
from ..numeric import integer
from ..options import FIXED

TAKEN = {*FIXED} - {"layout", "precision"} | {"causal", "window", "alibi_slopes", "score_mod", "mask_mod", "backend"}


class SpreadCache:
    """The part of a KV cache that this rank holds. Made by `Comm.cache`.

    Attributes
    ----------
    lengths : numpy.ndarray
        (sequences,), the tokens of each sequence on all ranks.
    own : KVCache
        This rank's keys and values.
    """

    def __init__(self, merged: Callable[..., Any], rank: int, ranks: int, own: KVCache, sequences: int) -> None:
        """merged: of `Comm`."""
        self._merged, self._rank, self._ranks = merged, rank, ranks
        self.own, self.lengths = own, np.zeros(sequences, np.int64)

    def append(self, k: Any, v: Any, cu_seqlens: Any = None) -> None:
        """Append tokens, the same on all ranks; each keeps its own. A long prompt is appended in parts.

        Parameters
        ----------
        k, v, cu_seqlens
            As for `KVCache.append`, rotated if positions are.
        """
        if k.ndim == 4:
            batch, _, n, _ = k.shape
            k, v = (x.swapaxes(1, 2).reshape((-1, x.shape[1], x.shape[3])) for x in (k, v))
            cu = np.arange(batch + 1) * n
        else:
            cu = np.arange(len(k) + 1) if cu_seqlens is None else np.asarray(cu_seqlens)
        counts = np.diff(cu)
        positions = np.concatenate([start + np.arange(n) for start, n in zip(self.lengths, counts, strict=True)])
        mine = positions // self.own.page % self._ranks == self._rank
        own_cu = np.concatenate([[0], np.cumsum(mine)])[cu]
        index = arrays.namespace(arrays.require("k", k)).asarray(np.flatnonzero(mine))
        self.own.append(k[index], v[index], own_cu)
        self.lengths = self.lengths + counts

    def attend(self, q: Any, *, return_lse: bool = False, **options: Any) -> Any:
        """Attention of the last Nq tokens of each sequence to all its tokens: the same result on all ranks.

        Parameters
        ----------
        q
            (sequences, Hq, Nq, D), the same on all ranks.
        return_lse
            Return (out, lse).
        **options
            Of `flashkit.attention`: causal, window, alibi_slopes, score_mod, mask_mod and sinks, whose positions are
            those in the sequence, the numbers of scores, deterministic and backend.
        """
        library = interop.adapter_of(q)
        with library.scope():
            native = library.to_native(q=q, **options)
            out, lse = self._merged(native["q"], native.pop("sinks", None), lambda: self._attend(**native))
            out = library.from_native("out", out)
            return (out, library.from_native("lse", lse)) if return_lse else out

    def trim(self, i: int, n: int) -> None:
        """Drop the last n tokens of sequence i."""
        n = integer("n", n, 0, int(self.lengths[i]))
        last = np.arange(self.lengths[i] - n, self.lengths[i])
        self.own.trim(i, int((last // self.own.page % self._ranks == self._rank).sum()))
        self.lengths = self.lengths - n * (np.arange(len(self.lengths)) == i)

    def _attend(self, q: Any, **options: Any) -> tuple[Any, Any]:
        """Attention to this rank's keys: out and lse."""
        if unknown := options.keys() - TAKEN:
            raise TypeError(f"SpreadCache.attend() got an unexpected argument {min(unknown)!r}")
        if q.ndim != 4:
            raise ValueError(f"q: expected shape (sequences, Hq, Nq, D), got {q.shape}")
        o: Any = SimpleNamespace(**dict.fromkeys(TAKEN) | options)
        xp, n_q, page = arrays.namespace(arrays.require("q", q)), q.shape[2], self.own.page
        score = None if o.score_mod is None else mods.trace(o.score_mod, "score")
        if o.alibi_slopes is not None:
            alibi = mods.alibi(o.alibi_slopes)
            score = alibi if score is None else alibi.then(score)
        window = None if o.window is None else mods.sliding_window(*window_of(o.window))
        own_mask = None if o.mask_mod is None else mods.trace(o.mask_mod, "mask")
        mask = joined([mods.causal() if o.causal and n_q > 1 else None, window, own_mask])
        key = expr.K // page * (page * self._ranks) + expr.K % page
        first = xp.asarray(self.lengths - n_q)
        places = {expr.K: (key, self._rank * page, 1), expr.Q: (expr.ROW, first, 1)}
        plain = {name: x for name, x in options.items() if name in (*FIXED, "backend")}
        moved_mods = {"score_mod": score, "mask_mod": mask}
        given = {name: moved(mod, places) for name, mod in moved_mods.items() if mod is not None}
        found: tuple[Any, Any] = self.own.attend(q, return_lse=True, q_offset=0, **{**plain, **given})
        return found

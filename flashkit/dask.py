"""Attention on Dask arrays, chunk by chunk, so that q, k, v and the result may be larger than memory.

    from flashkit.dask import attention

Chunks of the batch, the heads and the queries are independent. Chunks of the keys give partial results, which
`flashkit.merge` reduces in a tree. The graph is lazy and runs on any scheduler of Dask. Importing this module imports
Dask.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Unpack

import dask.array as da
import numpy as np
from dask import delayed
from dask._task_spec import convert_legacy_graph
from dask.array.utils import meta_from_array
from dask.base import clone_key

from . import api, mods
from .call import arrays
from .call.arguments import masks_by_position, prepare
from .call.checks import flag
from .call.chunks import hiding, joined, moved
from .call.merge import merge
from .call.shape import HEADS_AND_TOKENS
from .mods import Mod, expr
from .numeric import integer
from .options import DEFAULTS, OPTIONS, Options, Role, by_position, documented, unknown, with_axes

__all__ = ["attention"]


NOT_TAKEN = (*with_axes("memory"), "dropout_p", "seed")
"""Options that are refused: pairs are dropped by their numbers within a call, and packed sequences have no chunks."""


@by_position
@documented(*NOT_TAKEN)
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, backend: str | None = None, split_every: int = 8,
    hold_kv: bool = True, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """`flashkit.attention` on Dask arrays. Nothing is computed until the result is.

    Parameters
    ----------
    q, k, v
        Dask arrays of NumPy or CuPy chunks, of shapes and dtypes as for `flashkit.attention`. Any axis may be chunked.
        Chunks are joined along the head dim, and those of k and v are split as q's along batch axes and heads.
    return_lse
        Return (out, lse).
    backend
        As for `flashkit.attention`.
    split_every
        Number of partial results that one task merges.
    hold_kv
        False: load or compute chunks of k and v for each chunk of queries, so that they need not be in memory
        together. True is faster where memory holds them, and where the scheduler spills to disk.
    {options}

    Returns
    -------
    out : dask.array.Array
        Of q's shape with v's head dim, in q's chunks.
    lse : dask.array.Array
        If return_lse: (..., Hq, Nq), in chunks accordingly.

    Notes
    -----
    Bias and mask may be Dask arrays. Lengths, offsets, slopes and sinks are no Dask arrays: they are small, and read
    when the graph is made. Positions are those in the whole arrays.

    Errors of backends come when the graph runs. There is no dropout, whose pairs are numbered within one call, and no
    gradient.

    Chunks of keys that no query of a chunk sees, by causal masks, windows, functions and block masks, are no part of
    the graph: nothing loads them. Results differ from those of one call by the rounding of partial results.

    Examples
    --------
    >>> import dask.array as da, numpy as np, flashkit
    >>> from flashkit.dask import attention
    >>> x = np.random.default_rng(0).standard_normal((4, 100, 16))
    >>> q, k, v = (da.from_array(x, chunks=(2, 40, 16)) for _ in range(3))
    >>> out = attention(q, k, v, causal=True)
    >>> out.chunks
    ((2, 2), (40, 40, 20), (16,))
    >>> bool(abs(out.compute() - flashkit.attention(x, x, x, causal=True)).max() < 1e-12)
    True
    """
    if not options.keys() <= DEFAULTS.keys() - {*NOT_TAKEN}:
        known = [name for name in DEFAULTS if name not in NOT_TAKEN]
        raise unknown("flashkit.dask.attention", [name for name in options if name not in known], known)
    o: Any = SimpleNamespace(**DEFAULTS | options)
    q, k, v = (_as_dask(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    pairs = {name: _as_dask(name, x) for name in with_axes("pairs") if (x := options.get(name)) is not None}
    small: Any = {name: x for name, x in options.items() if name in with_axes("entries", "heads")}
    for name, x in small.items():
        if isinstance(x, da.Array):
            raise TypeError(f"{name}: expected numbers, got a Dask array; pass {name}={name}.compute()")
    split_every = integer("split_every", split_every, 2)
    hold_kv = flag("hold_kv", hold_kv)
    fixed: dict[str, Any] = {name: x for name, x in options.items() if OPTIONS[name].role is Role.CONSTANT}
    tensors = {name: _stand_in(name, x) for name, x in {"q": q, "k": k, "v": v, **pairs}.items()}
    functions: dict[str, Any] = dict(block_mask=o.block_mask, score_mod=o.score_mod, mask_mod=o.mask_mod)
    score_mod, mask_mod, block_mask, layout = o.score_mod, o.mask_mod, o.block_mask, o.layout
    problem, operands, shape = prepare(**tensors, **fixed, **small, **functions, described=True)
    lengths, offsets = operands.kv_lengths, operands.q_offset
    for name, x in (("kv_lengths", lengths), ("q_offset", offsets)):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name}: expected integers of NumPy, got an array on a device")

    counted = {
        name: np.broadcast_to(np.asarray(x, np.int64).reshape(-1), (problem.batch,))
        for name, x in small.items() if OPTIONS[name].counts and x is not None
    }  # fmt: skip
    score = None if score_mod is None else mods.trace(score_mod, "score")
    listed = None if mask_mod is None else mods.trace(mask_mod, "mask"), block_mask and block_mask.mod
    hidden = joined(listed)
    seen = joined([*masks_by_position(o.causal, o.window), hidden])
    own = [None if mod is None else delayed(mod, traverse=False) for mod in (score, hidden)]
    fixed |= dict(backend=backend)

    axes = Axes(q.ndim, layout)
    q, k, v = axes.rechunked(q, k, v, problem.spec.group)
    rows, keys = _ranges(q.chunks[axes.token]), _ranges(k.chunks[axes.token])
    batches = list(itertools.product(*(_ranges(q.chunks[axis]) for axis in axes.batch)))
    heads = _ranges(q.chunks[axes.head]) if axes.head is not None else [range(1)]
    entries = np.arange(problem.batch).reshape(shape.batch)
    blocks_q = q.to_delayed(optimize_graph=False)
    of_pairs = {name: axes.pairs(x, q, k) for name, x in pairs.items()}
    blocks_k, blocks_v = (x.to_delayed(optimize_graph=False) for x in (k, v))
    partial_results: dict[tuple[int, ...], Any] = {}
    for i, row in enumerate(rows):
        if not hold_kv and i:
            blocks_k, blocks_v = (x.to_delayed(optimize_graph=False) for x in _cloned(k, v))
        for place, batch in zip(np.ndindex(*(q.numblocks[axis] for axis in axes.batch)), batches, strict=True):
            inside = entries[np.ix_(*batch)].ravel()
            if any(mod is not None and expr.uses(mod.expr, expr.B) for mod in (score, hidden)):
                _require_neighbours(inside)
            for h, head in enumerate(heads):
                visible = _visible(seen, inside, head, row, keys, offsets)
                if o.kv_lengths is not None:
                    visible &= np.array([key.start < lengths[inside].max(initial=0) for key in keys], bool)
                partial: list[Any] = []
                for j in np.flatnonzero(visible).tolist() or [0]:
                    key = keys[j]
                    local = offsets[inside] + (row.start - key.start)
                    of_chunk = fixed | {
                        "q_offset": int(local[0]) if local.size and (local == local[0]).all() else local,
                        "alibi_slopes": _of_heads(o.alibi_slopes, inside, head),
                        "sinks": None if partial else _of_heads(o.sinks, inside, head),  # they count once
                    }
                    for name, n in counted.items():
                        tokens = row if OPTIONS[name].counts == "queries" else key
                        of_chunk[name] = np.clip(n[inside] - tokens.start, 0, len(tokens))
                    entry = int(inside[0]) if inside.size else 0
                    first = {"b": entry, "h": head.start, "row": row.start, "k": key.start}
                    partial.append(
                        delayed(_partial, nout=2)(
                            blocks_q[axes.chunk(place, h, i)], blocks_k[axes.chunk(place, h, j)],
                            blocks_v[axes.chunk(place, h, j)],
                            *own, first, of_chunk,
                            **{name: x.block((*place, h, i, j)) for name, x in of_pairs.items()},
                        )
                    )  # fmt: skip
                while len(partial) > 1:
                    groups = [partial[at : at + split_every] for at in range(0, len(partial), split_every)]
                    partial = [delayed(_merged, nout=2)(g, layout) if len(g) > 1 else g[0] for g in groups]
                partial_results[(*place, h, i)] = partial[0]

    out_chunks = (*q.chunks[:-1], (v.shape[-1],))
    results = {axes.chunk(place[:-2], *place[-2:]): pair[0] for place, pair in partial_results.items()}
    out = _assembled(results, out_chunks, meta_from_array(q, q.ndim, q.dtype))
    if not return_lse:
        return out
    lse_chunks = tuple(q.chunks[axis] for axis in (*axes.batch, axes.head, axes.token) if axis is not None)
    of_rows = {place if axes.head is not None else place[-1:]: pair[1] for place, pair in partial_results.items()}
    return out, _assembled(of_rows, lse_chunks, meta_from_array(q, len(lse_chunks), problem.spec.lse_dtype))


# --- tasks ------------------------------------------------------------------------------------------------------------


def _partial(
    q: Any, k: Any, v: Any, score: Mod | None, hidden: Mod | None, first: dict[str, int], options: dict[str, Any],
    **pairs: Any,
) -> Any:  # fmt: skip
    """Attention of one chunk of queries to one chunk of keys: (out, lse)."""
    # q counts on the axis of the keys.
    named = {expr.B: "b", expr.H: "h", expr.ROW: "row", expr.K: "k", expr.Q: "k"}
    places = {symbol: (symbol, first[place], 1) for symbol, place in named.items()}
    score, hidden = (None if mod is None else moved(mod, places) for mod in (score, hidden))
    return api.attention(q, k, v, score_mod=score, mask_mod=hidden, return_lse=True, **pairs, **options)


def _merged(parts: list[Any], layout: str) -> Any:
    return merge(*parts, layout=layout)


# --- chunks -----------------------------------------------------------------------------------------------------------


class Axes(NamedTuple):
    """Where the axes of q, k and v are."""

    ndim: int
    layout: str

    @property
    def batch(self) -> range:
        return range(max(self.ndim - 3, 0))

    @property
    def head(self) -> int | None:
        return None if self.ndim == 2 else self.ndim + HEADS_AND_TOKENS[self.layout][0]

    @property
    def token(self) -> int:
        return self.ndim + (-2 if self.ndim == 2 else HEADS_AND_TOKENS[self.layout][1])

    def chunk(self, batch: tuple[int, ...], head: int, token: int) -> tuple[int, ...]:
        """The index of a chunk of q, k or v."""
        if self.head is None:
            return token, 0
        return (*batch, head, token, 0) if self.layout == "bhnd" else (*batch, token, head, 0)

    def rechunked(self, q: Any, k: Any, v: Any, group: int) -> tuple[Any, Any, Any]:
        """q, k and v with the same chunks of batch axes, heads and keys, and the head dim in one."""
        q, k, v = (x.rechunk({self.ndim - 1: -1}) for x in (q, k, v))
        chunks = {axis: q.chunks[axis] for axis in self.batch}
        if self.head is not None:
            own = q.chunks[self.head]
            if any(n % group for n in own):
                own = tuple(n * group for n in k.chunks[self.head])
                q = q.rechunk({self.head: own})
            chunks[self.head] = tuple(n // group for n in own)
        k = k.rechunk(chunks)
        return q, k, v.rechunk({**chunks, self.token: k.chunks[self.token]})

    def pairs(self, x: Any, q: Any, k: Any) -> Pairs:
        """A bias or mask in the chunks of q and k."""
        heads = (1,) if self.head is None else q.chunks[self.head]
        full = (*(q.chunks[axis] for axis in self.batch), heads, q.chunks[self.token], k.chunks[self.token])
        own = full[len(full) - x.ndim :]
        x = x.rechunk({axis: own[axis] if n > 1 else -1 for axis, n in enumerate(x.shape)})
        return Pairs(x.shape, x.to_delayed(optimize_graph=False))


class Pairs(NamedTuple):
    """The chunks of a bias or mask, which broadcasts."""

    shape: tuple[int, ...]
    chunks: Any

    def block(self, place: tuple[int, ...]) -> Any:
        """The chunk for (batch, ..., head, queries, keys)."""
        own = place[len(place) - len(self.shape) :]
        return self.chunks[tuple(i if n > 1 else 0 for i, n in zip(own, self.shape, strict=True))]


def _ranges(chunks: Sequence[int]) -> list[range]:
    ends = list(itertools.accumulate(chunks, initial=0))
    return [range(first, past) for first, past in itertools.pairwise(ends)]


def _as_dask(name: str, x: Any) -> Any:
    if not isinstance(x, da.Array):
        arrays.require(name, x)
        return da.from_array(x, chunks=x.shape, name=False, asarray=False)
    if any(math.isnan(n) for n in x.shape):
        raise ValueError(f"{name}: expected chunks of known sizes; call {name}.compute_chunk_sizes() first")
    return x


def _cloned(*arrays: Any) -> list[Any]:
    """The same arrays by tasks of their own. `dask.graph_manipulation.clone` leaves references of tasks to tasks of the
    same layer as they are, so that the pieces of rechunked chunks would stay in memory, or go with a culled layer.
    """
    seed = uuid.uuid4().hex
    graph = {key: task for x in arrays for key, task in convert_legacy_graph(dict(x.__dask_graph__())).items()}
    names = {key: clone_key(key, seed) for key in graph}
    tasks = {
        names[key]: task.substitute({each: names[each] for each in task.dependencies}, names[key])
        for key, task in graph.items()
    }
    return [da.Array(tasks, clone_key(x.name, seed), x.chunks, meta=meta_from_array(x)) for x in arrays]


def _stand_in(name: str, x: Any) -> Any:
    """An array of x's kind, shape and dtype that takes no memory."""
    return arrays.stand_in(arrays.require(f"a chunk of {name}", meta_from_array(x)), x.shape, x.dtype)


def _of_heads(values: Any, inside: np.ndarray, heads: range) -> Any:
    """Numbers for each head, or for each batch entry and head, of a chunk's heads and entries."""
    if values is None:
        return None
    if isinstance(values, (list, tuple)):
        values = np.asarray(values, np.float32)
    own = values[..., heads.start : heads.stop]
    return own if own.ndim == 1 else own[inside.tolist()]


# --- masks ------------------------------------------------------------------------------------------------------------


def _require_neighbours(inside: np.ndarray) -> None:
    if inside.size and not np.array_equal(inside, np.arange(inside[0], inside[0] + inside.size)):
        raise ValueError(
            "q: expected one chunk along each batch axis but the first, as a function or block mask depends on b, got "
            "chunks of batch entries that are not adjacent"
        )


def _visible(
    seen: Mod | None, inside: np.ndarray, heads: range, row: range, keys: list[range], offsets: np.ndarray
) -> np.ndarray:
    """Whether each chunk of keys may have a pair that the mask shows to a chunk of queries: bool, (chunks of keys,)."""
    first, last = (np.array([key[at] if key else 0 for key in keys]) for at in (0, -1))
    any_key = np.array([bool(key) for key in keys], bool)
    if seen is None or not row:
        return any_key
    place = offsets[inside][:, None, None]
    state = hiding(seen)(
        b=inside[:, None, None], h=np.array(heads)[:, None], row0=row[0], row1=row[-1],
        q0=place + row[0], q1=place + row[-1], k0=first, k1=last,
    )  # fmt: skip
    return any_key & ~np.broadcast_to(state, (len(inside), len(heads), len(keys))).all((0, 1))


# --- results ----------------------------------------------------------------------------------------------------------


def _assembled(blocks: dict[tuple[int, ...], Any], chunks: tuple[tuple[int, ...], ...], meta: Any) -> Any:
    """The array of these delayed blocks."""

    def nested(place: tuple[int, ...]) -> Any:
        if len(place) == len(chunks):
            shape = tuple(sizes[i] for sizes, i in zip(chunks, place, strict=True))
            return da.from_delayed(blocks[place], shape, meta.dtype, meta)
        return [nested((*place, i)) for i in range(len(chunks[len(place)]))]

    return da.block(nested(()))

"""`KVCache`: keys and values of growing sequences in pages that layers and sequences share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..call import arrays
from ..call.checks import choice, window_of
from ..call.shape import LAYOUTS
from ..errors import shown
from ..mods.tracing import as_array
from ..rope.apply import Table, checked_table, rotate, rotated
from ..spec import ITEMSIZE, MAX_HEAD_DIM
from .pages import PageTable


class Step(NamedTuple):
    """The tokens of one append, which every layer writes."""

    counts: np.ndarray  # int64 (B,): new tokens of each sequence
    offsets: np.ndarray  # int64 (B + 1,): cu_seqlens
    positions: np.ndarray  # int64 (T,), on the host
    slots: Any  # int64 (T,), of the cache's library: page * size + offset
    where: Any  # positions, of the cache's library

    @property
    def uniform(self) -> int:
        """Tokens of each sequence where all have equally many, else 0."""
        n = int(self.counts[0]) if len(self.counts) else 0
        return n if n * len(self.counts) == len(self.positions) and (self.counts == n).all() else 0


class KVCache:
    """Keys and values of growing sequences, in pages of a pool.

    A sequence holds the pages that its tokens need. Sequences share the pages of a common prefix, and layers share one
    table of pages, so its upkeep is done once for each step of the model.

    Parameters
    ----------
    sequences
        Number of sequences B. All are empty at first.
    kv_heads, dim
        Heads of keys and values, and the head dim of keys.
    value_dim
        Head dim of values; `dim` by default.
    pages
        Number of pages in the pool. It is allocated here, B tokens or more for each layer.
    page
        Tokens of a page.
    dtype
        float64, float32, float16 or bfloat16 (ml_dtypes); by default that of `like`, or float32.
    like
        An array whose library and device the cache uses; NumPy by default.
    window
        (left, right) as for `attention`: `attend` uses it, and pages that no later query sees go back to the pool. Keys
        of the last `append` stay visible to its own queries, so `trim` may take these tokens back.
    layers
        Number of layers. `cache[l]` is a layer, with `append` and `attend` of its own. None: the cache is a single
        layer itself.

    Attributes
    ----------
    lengths : array
        (B,) int64: tokens of each sequence.
    page_table : array
        (B, columns) int32: column c is the page of tokens c * page ... c * page + page - 1, -1 where there is none.
    positions : array
        (T,) int64: positions of the tokens of the last append within their sequences.
    free_pages : int
        Pages that no sequence holds.

    Notes
    -----
    Threads must not use one cache at the same time. Lengths, counts and offsets are integers on the host.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, arXiv
    2309.06180, section 4.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> rng = np.random.default_rng(0)
    >>> cache = flashkit.KVCache(2, kv_heads=2, dim=16, pages=8, page=4)
    >>> k, v = rng.standard_normal((2, 9, 2, 16), dtype=np.float32)
    >>> cache.append(k, v, cu_seqlens=[0, 6, 9])        # prompts of 6 and 3 tokens
    >>> q = rng.standard_normal((9, 8, 16), dtype=np.float32)
    >>> cache.attend(q, causal=True).shape
    (9, 8, 16)
    >>> cache.append(k[:2], v[:2])                      # one more token of each sequence
    >>> cache.lengths.tolist(), cache.free_pages
    ([7, 4], 5)
    """

    def __init__(
        self, sequences: int, kv_heads: int, dim: int, value_dim: int | None = None, *, pages: int, page: int = 64,
        dtype: Any = None, like: Any = None, window: tuple[int | None, int | None] | None = None,
        layers: int | None = None,
    ) -> None:  # fmt: skip
        sizes = {"sequences": sequences, "kv_heads": kv_heads, "dim": dim, "pages": pages, "page": page}
        sizes |= {"value_dim": dim if value_dim is None else value_dim, "layers": 1 if layers is None else layers}
        for name, size in sizes.items():
            if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
                raise TypeError(f"{name} is {shown(size)}; a whole number fits")
            most = MAX_HEAD_DIM if "dim" in name else 1 << 31
            if not 1 <= size <= most:
                raise ValueError(f"{name} is {shown(size)}; 1 to {most} fits")
        self._kind = "numpy" if like is None else arrays.require("like", like)
        made = np.empty(0, _dtype(dtype, like))
        self.dtype, self._dtype = made.dtype, arrays.dtype_name("dtype", made)
        self._layered = layers is not None
        self._window = None if window is None else window_of(window)
        left = None if self._window is None else self._window[0]
        self._pages = PageTable(int(sequences), int(pages), int(page), left)
        self._xp = arrays.namespace(self._kind)
        heads = int(sizes["layers"]), int(pages), int(kv_heads), int(page)
        # Slots of a head lie one after another, so that a kernel reads a page as one piece of memory.
        self._k = self._xp.empty((*heads, int(dim)), self.dtype)
        self._v = self._xp.empty((*heads, int(sizes["value_dim"])), self.dtype)
        self._layers = [Layer(self, l) for l in range(heads[0])]
        self._steps = 0  # that any layer has written
        self._step: Step | None = None
        self._device: tuple[Any, Any] | None = None  # lengths and table on the device
        self._publish()

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> Layer:
        return self._layers[layer]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    @property
    def page(self) -> int:
        return self._pages.page

    @property
    def free_pages(self) -> int:
        return self._pages.free_pages

    @property
    def lengths(self) -> Any:
        return self._lengths

    @property
    def page_table(self) -> Any:
        return self._table

    @property
    def positions(self) -> Any:
        return self._last_step().where

    def append(
        self, k: Any, v: Any, cu_seqlens: Any = None, *, rotary: tuple[Any, Any] | None = None,
        rotary_interleaved: bool = False, layout: str = "bhnd",
    ) -> None:  # fmt: skip
        """Append tokens to the sequences.

        Parameters
        ----------
        k, v
            (T, Hkv, D) and (T, Hkv, Dv): tokens of all sequences, one sequence after another; or (B, Hkv, N, D) and
            (B, Hkv, N, Dv), N tokens of each.
        cu_seqlens
            For (T, Hkv, D): integers (B + 1,), sequence i gets tokens cu_seqlens[i] ... cu_seqlens[i + 1] - 1. Without
            it each sequence gets one token, and T is B.
        rotary
            (cos, sin), tables of `rotary_table`: keys are rotated by their positions in their sequences.
        rotary_interleaved
            As `interleaved` of `rotary`.
        layout
            "bhnd", or "bnhd" for (B, N, Hkv, D).

        Returns
        -------
        None

        Raises
        ------
        TypeError, ValueError
            An argument does not fit. The message names it, what came and what would fit.
        flashkit.OutOfPagesError
            There are too few free pages. The cache is as it was.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> cache = flashkit.KVCache(1, kv_heads=2, dim=16, pages=4)
        >>> k = np.ones((1, 2, 5, 16), np.float32)
        >>> cache.append(k, k, rotary=flashkit.rotary_table(100, 16))
        >>> cache.lengths.tolist()
        [5]
        """
        self._only_layer("append").append(
            k, v, cu_seqlens, rotary=rotary, rotary_interleaved=rotary_interleaved, layout=layout
        )

    def attend(
        self, q: Any, *, rotary: tuple[Any, Any] | None = None, rotary_interleaved: bool = False, **options: Any
    ) -> Any:
        """Attention of queries over the keys and values of their sequences.

        Parameters
        ----------
        q
            (T, Hq, D): queries at the tokens of the last `append`, in its order, unless `cu_seqlens` says otherwise; or
            (B, Hq, Nq, D), Nq queries at the end of each sequence. Hq is a multiple of the cache's heads.
        rotary, rotary_interleaved
            As for `append`: queries at the tokens of the last append are rotated by their positions.
        **options
            The arguments of `attention`, but for kv_lengths and page_table. `window` is the cache's by default.

        Returns
        -------
        array or (array, array)
            What `attention` returns: out of q's shape with Dv for D, or (out, lse).

        Raises
        ------
        TypeError, ValueError
            An argument does not fit.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> cache = flashkit.KVCache(1, kv_heads=2, dim=16, pages=4)
        >>> q, k = np.ones((1, 8, 5, 16), np.float32), np.ones((1, 2, 5, 16), np.float32)
        >>> cache.append(k, k)
        >>> out, lse = cache.attend(q, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        ((1, 8, 5, 16), (1, 8, 5))
        """
        return self._only_layer("attend").attend(q, rotary=rotary, rotary_interleaved=rotary_interleaved, **options)

    def fork(self, i: int, into: int | None = None) -> int:
        """Copy sequence i into an empty sequence. No key is copied: they share pages until one of them appends.

        Parameters
        ----------
        i
            The sequence to copy.
        into
            An empty sequence; the first one by default.

        Returns
        -------
        int
            `into`.

        Raises
        ------
        ValueError
            `into` has tokens, or no sequence is empty.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> cache = flashkit.KVCache(3, kv_heads=1, dim=8, pages=4)
        >>> prompt = np.ones((6, 1, 8), np.float32)
        >>> cache.append(prompt, prompt, cu_seqlens=[0, 6, 6, 6])
        >>> cache.fork(0), cache.fork(0), cache.lengths.tolist(), cache.free_pages
        (1, 2, [6, 6, 6], 3)
        """
        i = self._sequence("i", i)
        empty = np.flatnonzero(self._pages.lengths == 0)
        if into is None and not empty.size:
            raise ValueError(f"all {len(self._pages.lengths)} sequences have tokens; free(i) empties one")
        target = int(empty[0]) if into is None else self._sequence("into", into)
        if self._pages.lengths[target]:
            raise ValueError(
                f"into is {target}, a sequence with {self._pages.lengths[target]} tokens; an empty one fits"
            )
        self._between_steps("fork")
        if target != i:
            self._pages.fork(i, target)
            self._publish()
        return target

    def trim(self, i: int, n: int) -> None:
        """Drop the last n tokens of sequence i, such as rejected drafts.

        Parameters
        ----------
        i
            The sequence.
        n
            Number of tokens.

        Returns
        -------
        None

        Raises
        ------
        ValueError
            The sequence has fewer tokens, or keys that the window of the shorter sequence needs are gone.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> cache = flashkit.KVCache(1, kv_heads=1, dim=8, pages=4)
        >>> drafts = np.ones((1, 1, 5, 8), np.float32)
        >>> cache.append(drafts, drafts)
        >>> cache.trim(0, 2)
        >>> cache.lengths.tolist()
        [3]
        """
        i = self._sequence("i", i)
        length = int(self._pages.lengths[i])
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or not 0 <= n <= length:
            raise ValueError(f"n is {shown(n)}; 0 to {length}, the tokens of sequence {i}, fits")
        first = int(self._pages.first[i]) * self._pages.page
        if n < length and self._pages.oldest(i, length - int(n)) < first:
            most = length - first - (self._pages.left or 0)
            raise ValueError(f"n is {n}, but the window has dropped the tokens before {first}; 0 to {most} fits")
        self._between_steps("trim")
        self._pages.trim(i, int(n))
        self._publish()

    def free(self, i: int) -> None:
        """Drop all tokens of sequence i.

        Parameters
        ----------
        i
            The sequence, which is empty then.

        Returns
        -------
        None

        Raises
        ------
        ValueError
            There is no such sequence.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> cache = flashkit.KVCache(1, kv_heads=1, dim=8, pages=4)
        >>> cache.append(np.ones((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32))
        >>> cache.free(0)
        >>> cache.free_pages
        4
        """
        i = self._sequence("i", i)
        self._between_steps("free")
        self._pages.trim(i, int(self._pages.lengths[i]))
        self._publish()

    # --- for layers ---------------------------------------------------------------------------------------------------

    def _only_layer(self, what: str) -> Layer:
        if self._layered:
            raise TypeError(f"this cache has layers; cache[l].{what}(...) fits")
        return self._layers[0]

    def _sequence(self, name: str, i: Any) -> int:
        sequences = len(self._pages.lengths)
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool) or not 0 <= i < sequences:
            raise ValueError(f"{name} is {shown(i)}; a sequence from 0 to {sequences - 1} fits")
        return int(i)

    def _between_steps(self, what: str) -> None:
        """Sequences change only where all layers have the same tokens. Then the last append is no more the last change,
        so its order says nothing about queries.
        """
        behind = [layer.number for layer in self._layers if layer.steps != self._steps]
        if behind:
            raise ValueError(f"{what} in the middle of a step: layer {behind[0]} has not appended its tokens yet")
        self._step = None

    def _last_step(self) -> Step:
        if self._step is None:
            raise ValueError(
                "the cache has had no append, or was changed since by fork, trim or free; give cu_seqlens, or q as "
                "(B, Hq, Nq, D)"
            )
        return self._step

    def _open(self, counts: np.ndarray, table: Table | None) -> Step:
        """Begin a step: bookkeeping for all layers."""
        before = self._pages.lengths
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        positions = before if (counts == 1).all() else np.arange(offsets[-1]) + np.repeat(before - offsets[:-1], counts)
        if table is not None:
            _check_rows(table, positions)
        copy = self._pages.append(counts)
        if copy.source:
            for pool in (self._k, self._v):
                pool[:, copy.target] = pool[:, copy.source]
        slots = self._pages.places(counts, positions)
        if self._kind != "numpy":
            slots, where = self._xp.asarray(slots), self._xp.asarray(positions)
        else:
            where = _fixed(positions)
        self._step = Step(counts, offsets, positions, slots, where)
        self._steps += 1
        self._publish()
        return self._step

    def _publish(self) -> None:
        """Lengths and table as the caller sees them. On a device the arrays stay the same while the table's width does,
        so that a captured CUDA graph follows them.
        """
        lengths, table = self._pages.lengths, self._pages.table
        if self._kind == "numpy":
            self._lengths, self._table = _fixed(lengths), _fixed(table)
        elif self._device is None or self._device[1].shape != table.shape:
            self._device = self._lengths, self._table = self._xp.asarray(lengths), self._xp.asarray(table)
        else:
            for array, host in zip(self._device, (lengths, table)):
                array[...] = self._xp.asarray(host)


class Layer:
    """One layer of a `KVCache`: its keys and values, in the pages of the cache.

    The first layer that appends a step's tokens does the bookkeeping for all; the others bring the same numbers of
    tokens.

    Attributes
    ----------
    number : int
        The index of the layer.
    k_pages, v_pages : array
        (pages, page, Hkv, D) and (pages, page, Hkv, Dv): the layer's pools, for `attention` with the cache's
        page_table. They are views; what lies in unused slots is undefined.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> cache = flashkit.KVCache(1, kv_heads=1, dim=8, pages=4, layers=2)
    >>> x = np.ones((1, 1, 5, 8), np.float32)
    >>> for layer in cache:
    ...     layer.append(x, x)
    ...     x = layer.attend(x, causal=True)
    >>> x.shape, cache.lengths.tolist()
    ((1, 1, 5, 8), [5])
    """

    def __init__(self, cache: KVCache, number: int) -> None:
        self._cache, self.number = cache, number
        self.steps = 0  # that this layer has written
        self._k, self._v = cache._k[number], cache._v[number]
        self.k_pages, self.v_pages = self._k.swapaxes(1, 2), self._v.swapaxes(1, 2)

    def append(
        self, k: Any, v: Any, cu_seqlens: Any = None, *, rotary: tuple[Any, Any] | None = None,
        rotary_interleaved: bool = False, layout: str = "bhnd",
    ) -> None:  # fmt: skip
        """As `KVCache.append`; `cu_seqlens` may be left out where another layer has begun the step."""
        cache = self._cache
        k4, v4 = self._four("k", k, self._k, layout), self._four("v", v, self._v, layout)
        if k4.shape[:3] != v4.shape[:3]:
            raise ValueError(f"v has shape {v.shape}, k has {k.shape}; they are equal but for the head dim")
        behind = cache._steps - self.steps
        if behind > 1 or (behind == 0 and any(layer.steps != cache._steps for layer in cache._layers)):
            late = next(layer.number for layer in cache._layers if layer.steps != cache._steps)
            raise ValueError(f"layer {late} has not appended the tokens of this step; a layer appends once a step")
        step = cache._step if behind else None
        counts = self._counts(k, k4, cu_seqlens, step)
        table = None if rotary is None else _table(rotary, rotary_interleaved, k4, cache._dtype)
        if step is None:
            step = cache._open(counts, table)
        else:
            if not np.array_equal(counts, step.counts):
                raise ValueError(
                    f"layer {self.number} appends {counts.tolist()} tokens to the sequences; {step.counts.tolist()}, as "
                    "the layer before it in this step, fits"
                )
            if table is not None:
                _check_rows(table, step.positions)
        shape = k4.shape[0], k4.shape[2]
        self._write(k4, self._k, step.slots.reshape(shape), table, step.where.reshape(shape))
        self._write(v4, self._v, step.slots.reshape(shape), None, None)
        self.steps = cache._steps

    def attend(
        self, q: Any, *, rotary: tuple[Any, Any] | None = None, rotary_interleaved: bool = False, **options: Any
    ) -> Any:
        """As `KVCache.attend`."""
        cache = self._cache
        arrays.require("q", q, cache._kind)
        for name in ("kv_lengths", "page_table"):
            if name in options:
                raise TypeError(f"attend takes no {name}: the cache has its own; attention() takes them")
        if self.steps != cache._steps:
            raise ValueError(f"layer {self.number} has not appended the tokens of this step yet; append, then attend")
        if cache._window is not None:
            options["window"] = _narrowed(options.get("window"), cache._window)
        packed = q.ndim == 3
        if packed and "cu_seqlens" not in options:
            step = cache._last_step()
            if q.shape[0] != len(step.positions):
                raise ValueError(
                    f"q has shape {q.shape}; (T, Hq, D) with the {len(step.positions)} tokens of the last append, or "
                    "(B, Hq, Nq, D), fits"
                )
            if options.setdefault("layout", "bnhd") != "bnhd":
                raise ValueError("layout is 'bhnd', but q is (T, Hq, D), tokens before heads; 'bnhd' fits")
            if rotary is not None:
                q = self._rotated(q.swapaxes(0, 1)[None], rotary, rotary_interleaved, step.where[None])[0].swapaxes(
                    0, 1
                )
            if not step.uniform:
                return self._attend(q, cu_seqlens=step.offsets, **options)
            return _flat(self._attend(*_unflat(q, step, options), **options), options)
        if rotary is not None:
            step = cache._last_step()
            bhnd = options.get("layout", "bhnd") == "bhnd"
            q4 = q if bhnd else q.swapaxes(1, 2)
            if packed or q4.ndim != 4 or (q4.shape[0], q4.shape[2]) != (len(step.counts), step.uniform):
                raise ValueError(f"q has shape {q.shape}; rotary= rotates queries at the tokens of the last append")
            q4 = self._rotated(q4, rotary, rotary_interleaved, step.where.reshape(len(step.counts), -1))
            q = q4 if bhnd else q4.swapaxes(1, 2)
        return self._attend(q, **options)

    def _attend(self, q: Any, **options: Any) -> Any:
        cache = self._cache
        lengths, table = np.asarray(cache._pages.lengths), np.maximum(cache._pages.table, 0)
        n = int(lengths.max())
        k, v = (
            np.ascontiguousarray(
                pool[table].swapaxes(1, 2).reshape(len(table), pool.shape[1], -1, pool.shape[3])[:, :, :n]
            )
            for pool in (self._k, self._v)
        )
        offsets = options.pop("cu_seqlens", None)
        if offsets is None:
            if options.get("layout") == "bnhd":
                k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            return attention(q, k, v, kv_lengths=lengths, **options)
        options.pop("layout", None)
        lse = options.get("return_lse")
        parts = [
            attention(
                q[offsets[i] : offsets[i + 1]].swapaxes(0, 1), k[i, :, : lengths[i]], v[i, :, : lengths[i]], **options
            )
            for i in range(len(lengths))
        ]
        outs = [part[0] if lse else part for part in parts]
        out = np.concatenate(outs, axis=1).swapaxes(0, 1)
        return (out, np.concatenate([part[1] for part in parts], axis=1)) if lse else out

    def _rotated(self, q: Any, rotary: Any, interleaved: Any, positions: Any) -> Any:
        """q (B, Hq, N, D) rotated; a new array with tokens before heads."""
        table = _table(rotary, interleaved, q, arrays.dtype_name("q", q))
        if self._cache._step is not None:
            _check_rows(table, self._cache._step.positions)
        batch, heads, n, d = q.shape
        out = arrays.namespace(self._cache._kind).empty((batch, n, heads, d), q.dtype).swapaxes(1, 2)
        rotate(arrays.addressable(q), out, table, arrays.namespace(self._cache._kind).ascontiguousarray(positions), 1)
        return out

    def _four(self, name: str, x: Any, pool: Any, layout: str) -> Any:
        """k or v as (B, H, N, D); packed tokens as (1, H, T, D)."""
        cache = self._cache
        arrays.require(name, x, cache._kind)
        choice("layout", layout, LAYOUTS)
        if arrays.dtype_name(name, x) != cache._dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; the cache's, {cache._dtype}, fits")
        _, heads, _, d = pool.shape
        sequences = len(cache._pages.lengths)
        axes = (sequences, heads, "N", d) if layout == "bhnd" else (sequences, "N", heads, d)
        four = x if x.ndim == 4 and layout == "bhnd" else x.swapaxes(1, 2) if x.ndim == 4 else None
        if x.ndim == 3:
            four = x.swapaxes(0, 1)[None]
        batch = sequences if x.ndim == 4 else 1
        if four is None or (four.shape[0], four.shape[1], four.shape[3]) != (batch, heads, d):
            shape = ", ".join(map(str, axes))
            raise ValueError(f"{name} has shape {x.shape}; (T, {heads}, {d}) or ({shape}) fits")
        return arrays.addressable(four)

    def _counts(self, k: Any, k4: Any, cu_seqlens: Any, step: Step | None) -> np.ndarray:
        """New tokens of each sequence."""
        sequences = len(self._cache._pages.lengths)
        if k.ndim == 4:
            if cu_seqlens is not None:
                raise TypeError(f"cu_seqlens is for k of shape (T, Hkv, D); k has {k.shape}")
            return np.full(sequences, k4.shape[2])
        tokens = k4.shape[2]
        if cu_seqlens is not None:
            return _counts(cu_seqlens, sequences, tokens)
        if step is not None and tokens == len(step.positions):
            return step.counts
        if tokens != sequences:
            raise ValueError(f"k has {tokens} tokens for {sequences} sequences; one of each, or cu_seqlens, fits")
        return np.ones(sequences, np.int64)

    def _write(self, x: Any, pool: Any, slots: Any, table: Table | None, positions: Any) -> None:
        """x (B, H, N, D) into the slots (B, N) of a pool (pages, H, page, D)."""
        if isinstance(x, np.ndarray):
            from ..backends.cpu.rotary import write

            write(x, pool, slots, table and (table.cos, table.sin, positions), table is not None and table.interleaved)
            return
        if table is not None:
            x = rotated(x, table, positions[:, None])
        page = pool.shape[2]
        pool[slots // page, :, slots % page] = x.swapaxes(1, 2)


def _dtype(dtype: Any, like: Any) -> np.dtype:
    if dtype is None:
        return np.dtype("float32") if like is None else like.dtype
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype is {shown(dtype)}; {', '.join(ITEMSIZE)} fit") from None
    return found


def _fixed(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def _counts(cu_seqlens: Any, sequences: int, tokens: int) -> np.ndarray:
    """int64 (B,) from offsets (B + 1,); those on a device are read."""
    what = f"integers ({sequences + 1},) from 0 to {tokens}, the tokens of k, that never decrease,"
    on_host = cu_seqlens.get() if arrays.kind_of(cu_seqlens) == "cupy" else as_array("cu_seqlens", cu_seqlens, what)
    if on_host.dtype.kind not in "iu":
        raise TypeError(f"cu_seqlens is {shown(cu_seqlens)}; {what} fit")
    if on_host.shape != (sequences + 1,):
        raise ValueError(f"cu_seqlens has shape {on_host.shape}; {what} fit")
    counts = np.diff(on_host.astype(np.int64))
    if on_host[0] != 0 or on_host[-1] != tokens or (counts < 0).any():
        raise ValueError(f"cu_seqlens is {shown(on_host.tolist())}; {what} fit")
    return counts


def _table(rotary: Any, interleaved: Any, x: Any, dtype: str) -> Table:
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(f"rotary is {shown(rotary)}; (cos, sin) fits, of flashkit.rotary_table")
    cos, sin = rotary
    return checked_table(cos, sin, interleaved, x, dtype)


def _check_rows(table: Table, positions: np.ndarray) -> None:
    rows = table.cos.shape[0]
    if positions.size and positions.max() >= rows:
        raise ValueError(f"rotary has {rows} rows; position {positions.max()} of a sequence needs more")


def _narrowed(given: Any, own: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The window of a call: the cache's, or a given one inside it."""
    if given is None:
        return own
    left, right = window_of(given)
    if own[0] is not None and (left is None or left > own[0]):
        raise ValueError(
            f"window is {shown(given)}, but the cache keeps the window {own}; a left of at most {own[0]} fits"
        )
    return left, right


def _unflat(q: Any, step: Step, options: dict[str, Any]) -> tuple[Any]:
    """(T, Hq, D) as (B, N, Hq, D), and so an `out` among the options."""
    shape = len(step.counts), step.uniform
    if (out := options.get("out")) is not None:
        arrays.require("out", out)
        if out.ndim != 3 or out.shape[0] != q.shape[0]:
            raise ValueError(f"out has shape {out.shape}; ({q.shape[0]}, Hq, Dv), as q, fits")
        options["out"] = out.reshape((*shape, *out.shape[1:]))
    return (q.reshape((*shape, *q.shape[1:])),)


def _flat(found: Any, options: dict[str, Any]) -> Any:
    """The result of a batch as that of packed tokens: out (T, Hq, Dv), lse (Hq, T)."""
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = out.reshape((-1, *out.shape[2:]))
    return out if lse is None else (out, lse.swapaxes(0, 1).reshape((lse.shape[1], -1)))

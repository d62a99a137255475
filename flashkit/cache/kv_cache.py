"""`KVCache`: keys and values of growing sequences in pages that layers and sequences share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar, overload

import numpy as np

from ..call import arrays, interop
from ..call.checks import flag, window_of
from ..call.sequences import MAX_PAGE
from ..errors import shown
from ..numeric import integer
from ..spec import ITEMSIZE, MAX_HEAD_DIM, dtype_of
from .cascade import Cascade
from .layer import Layer, on_host
from .pages import PageTable
from .pools import FORMATS, format_of, width
from .steps import Steps, one_at_a_time

GAP, LINE = 0.618, 64
"""Between the heads of a pool on the host: the part of a page, whose multiples lie evenly in a page for any number of
heads (the golden ratio), and the bytes of a cache line, of which it is a multiple.
"""


A = TypeVar("A")
"""The array type of a call."""


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
        Tokens of a page, up to 65,536.
    dtype
        float64, float32, float16 or bfloat16 (ml_dtypes); by default that of `like`, or float32. "e4m3" or "int8":
        `append` quantises keys and values of any of these dtypes to 8 bits, with a scale for each token of a head, as
        `quantize(x, dtype, per="token")` does. On the CPU, `attend` of fewer than 8 queries of each sequence reads
        them as they are; other calls dequantise the pages in use.
    like
        An array whose library and device the cache uses; NumPy by default.
    window
        (left, right) as for `attention`: `attend` uses it, and pages that no later query sees go back to the pool. What
        the queries of the last `append` see stays, so `trim` may take these tokens back.
    rollback
        With a window, the number of tokens before the last append that `trim` may take back too, and whose queries
        `attend` takes: more keys stay for them. Beyond it both are refused.
    layers
        Number of layers. `cache[l]` is a layer, with `append` and `attend` of its own. None: the cache is a single
        layer itself.
    cascade
        Whether `attend` reads the pages that sequences share (see `fork`) once for all of them, and merges the result
        with that of the rest (`merge`): up to 16 queries at the end of each sequence, with no option that depends on
        positions but causal. None: on the CPU, where that saves 12 MiB or more of keys and values in a layer, and the
        common pages have 1,024 tokens or more for each query of a sequence that uses one key. Results are equal up to
        rounding. A captured CUDA graph replays with the prefixes at capture time.
    latent
        Whether the first value_dim columns of the keys are the values, as in multi-head latent attention: `append(k)`
        takes keys alone, [ckv, k_pe] with k_pe rotated, and a token is held once, and read once on the CPU.
        `KVCache(B, 1, 576, 512, latent=True)` is for DeepSeek's models, with attend([q_nope, q_pe], scale=...) as in
        `mla`.

    Attributes
    ----------
    lengths : array
        (B,) int64: tokens of each sequence. On the host each access gives a copy; on a device these are the arrays that
        kernels and captured CUDA graphs read, and so is page_table.
    page_table : array
        (B, columns) int32: column c is the page of tokens c * page ... c * page + page - 1, or -1.
    positions : array
        (T,) int64: positions of the tokens of the last append within their sequences, a copy.
    free_pages : int
        Pages that no sequence holds.

    Notes
    -----
    A cache has one user at a time: a call during another one, by another thread or by a signal handler, is a
    RuntimeError. Lengths, counts and offsets are integers on the host.

    An error or a signal leaves the cache as it was. Only if an append reuses pages that the window drops, since no
    others are free, are these gone, so the last append cannot be trimmed then. A signal during `keep` may leave the
    tokens that `keep` does not move, and none behind them.

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
        layers: int | None = None, cascade: bool | None = None, latent: bool = False, rollback: int = 0,
    ) -> None:  # fmt: skip
        of_values, count = dim if value_dim is None else value_dim, 1 if layers is None else layers
        given = {
            "sequences": sequences, "kv_heads": kv_heads, "dim": dim, "value_dim": of_values, "pages": pages,
            "page": page, "layers": count,
        }  # fmt: skip
        most = {"dim": MAX_HEAD_DIM, "value_dim": MAX_HEAD_DIM, "page": MAX_PAGE}
        sizes = [integer(name, n, 1, most.get(name, 1 << 31)) for name, n in given.items()]
        sequences, kv_heads, dim, of_values, pages, page, count = sizes
        rollback = integer("rollback", rollback, 0, 1 << 31)
        like = interop.native("like", like)
        kind = "numpy" if like is None else arrays.require("like", like)
        kv_format = format_of(dtype)
        of_queries = np.empty(0, _dtype(None if kv_format else dtype, like))
        arrays.dtype_name("dtype", of_queries)
        stored = np.empty(0, np.uint8) if kv_format else of_queries
        window = None if window is None else window_of(window)
        if cascade is not None:
            flag("cascade", cascade)
        table = PageTable.empty(sequences, pages, page, None if window is None else window[0], rollback)
        widths = [width(d, kv_format) for d in (dim, of_values)]
        if flag("latent", latent):
            if not of_values < dim:
                raise ValueError(f"value_dim: expected 1 to {dim - 1} with latent=True, got {shown(value_dim)}")
            widths.pop()
        shared = Cascade(table, kind, kv_heads * sum(widths) * stored.itemsize, cascade)
        # Slots of a head lie one after another, so that a kernel reads a page as one piece of memory. On the host pages
        # of a head do so too: pages that a sequence took together are one piece.
        if kind != "numpy":
            xp: Any = arrays.namespace(kind)
            memory = [xp.empty((count, pages, kv_heads, page, n), stored.dtype) for n in widths]
        else:
            shape = count, kv_heads, pages, page
            memory = [_pool_with_gaps((*shape, n), stored.dtype).swapaxes(1, 2) for n in widths]
        self._steps = Steps(table, count, kind, shared, memory)
        self.dtype, self._layered = kv_format or stored.dtype, layers is not None
        self._layers = [
            Layer(number, self._steps, window, kv_format, (dim, of_values), of_queries.dtype) for number in range(count)
        ]

    def __repr__(self) -> str:
        pages, layers = self._pages, f"{len(self)} layers, " if self._layered else ""
        return (
            f"<KVCache: {int(pages.lengths.sum())} tokens of {len(pages.lengths)} sequences, {layers}"
            f"{self.free_pages} of {len(pages.references)} pages of {self.page} free, {self.dtype}>"
        )

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
        return len(self._pages.free)

    @property
    def lengths(self) -> Any:
        return _safe(self._steps.on_call[0])

    @property
    def page_table(self) -> Any:
        return _safe(self._steps.on_call[1])

    @property
    def positions(self) -> Any:
        return self._steps.last().where.copy()

    @property
    def _pages(self) -> PageTable:
        return self._steps.state.pages

    def append(
        self, k: Any, v: Any = None, cu_seqlens: Any = None, *, rotary: tuple[Any, Any] | None = None,
        rotary_interleaved: bool = False, layout: str = "bhnd",
    ) -> None:  # fmt: skip
        """Append tokens to the sequences.

        Parameters
        ----------
        k, v
            (T, Hkv, D) and (T, Hkv, Dv): tokens of all sequences, one sequence after another; or (B, Hkv, N, D) and
            (B, Hkv, N, Dv), N tokens of each. With latent=True v is left out.
        cu_seqlens
            For (T, Hkv, D): integers (B + 1,), sequence i gets tokens cu_seqlens[i] ... cu_seqlens[i + 1] - 1. Without
            it each sequence gets one token, and T is B.
        rotary
            (cos, sin), tables of `rotary_table`: keys are rotated by their positions in their sequences.
        rotary_interleaved
            As `interleaved` of `rotary`.
        layout
            "bhnd", or "bnhd" for (B, N, Hkv, D).

        Raises
        ------
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

    @overload
    def attend(
        self, q: A, *, return_lse: Literal[False] = False, rotary: tuple[Any, Any] | None = None,
        rotary_interleaved: bool = False, **options: Any,
    ) -> A: ...  # fmt: skip
    @overload
    def attend(
        self, q: A, *, return_lse: Literal[True], rotary: tuple[Any, Any] | None = None,
        rotary_interleaved: bool = False, **options: Any,
    ) -> tuple[A, A]: ...  # fmt: skip
    @overload
    def attend(
        self, q: A, *, return_lse: bool, rotary: tuple[Any, Any] | None = None, rotary_interleaved: bool = False,
        **options: Any,
    ) -> A | tuple[A, A]: ...  # fmt: skip
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

    @one_at_a_time
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
        pages, settled = self._pages, self._steps.state.settled.copy()
        empty = np.flatnonzero(pages.lengths == 0)
        if into is None and not empty.size:
            raise ValueError(f"all {len(pages.lengths)} sequences have tokens; free(i) empties one")
        target = int(empty[0]) if into is None else self._sequence("into", into)
        if pages.lengths[target]:
            raise ValueError(f"into: expected an empty sequence, got {target} with {pages.lengths[target]} tokens")
        self._steps.check_between("fork")
        if target != i:
            settled[target] = settled[i]
            self._steps.changed(pages.fork(i, target), settled)
        return target

    @one_at_a_time
    def trim(self, i: int, n: int) -> None:
        """Drop the last n tokens of sequence i, such as rejected drafts.

        Parameters
        ----------
        i
            The sequence.
        n
            Number of tokens.

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
        begin = self._begin_of_last(i, n)
        self._steps.check_between("trim")
        self._steps.changed(self._pages.trim(i, int(self._pages.lengths[i]) - begin))

    @one_at_a_time
    def keep(self, i: int, positions: Any, n: int | None = None) -> None:
        """Keep some of the last tokens of sequence i and drop the others, such as all but one path of a drafted tree.

        The kept tokens follow each other then, and the tokens before them, in the order of their positions. Keys are
        moved as they are: rotate those of a tree by their depth (`rotary`) before they are appended.

        Parameters
        ----------
        i
            The sequence.
        positions
            Integers in ascending order: the positions within the sequence of the tokens to keep.
        n
            How many of the last tokens to choose from; by default those of the last `append`.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or keys that the window of the shorter sequence needs are gone.
        flashkit.OutOfPagesError
            The tokens lie in pages shared with other sequences, and no page is free for copies. The cache is as it was.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> cache = flashkit.KVCache(1, kv_heads=1, dim=8, pages=4)
        >>> prompt, tree = np.ones((10, 1, 8), np.float32), np.ones((6, 1, 8), np.float32)
        >>> cache.append(prompt, prompt, cu_seqlens=[0, 10])
        >>> cache.append(tree, tree, cu_seqlens=[0, 6])     # positions 10 ... 15
        >>> cache.keep(0, [11, 14])
        >>> cache.lengths.tolist()
        [12]
        """
        i = self._sequence("i", i)
        length = int(self._pages.lengths[i])
        begin = self._begin_of_last(i, length - int(self._steps.state.settled[i]) if n is None else n)
        kept = np.array(on_host("positions", positions))  # a copy: the caller's array may change
        what = f"positions: expected ascending integers from {begin} to {length - 1}, those of the last tokens of"
        if kept.size and kept.dtype.kind not in "iu":
            raise TypeError(f"{what} sequence {i}, got {shown(positions)}")
        ascending = kept.ndim == 1 and (kept[1:] > kept[:-1]).all()
        if not ascending or (kept.size and not (begin <= kept[0] and kept[-1] < length)):
            raise ValueError(f"{what} sequence {i}, got {shown(positions)}")
        self._steps.check_between("keep")
        self._steps.keep(i, begin, kept.astype(np.int64))

    @one_at_a_time
    def free(self, i: int) -> None:
        """Drop all tokens of sequence i.

        Parameters
        ----------
        i
            The sequence, which is empty then.

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
        self._steps.check_between("free")
        self._steps.changed(self._pages.trim(i, int(self._pages.lengths[i])))

    def _only_layer(self, what: str) -> Layer:
        if self._layered:
            raise TypeError(f"{what}: expected a layer, got a cache of several; call cache[l].{what}(...)")
        return self._layers[0]

    def _sequence(self, name: str, i: Any) -> int:
        sequences = len(self._pages.lengths)
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool) or not 0 <= i < sequences:
            raise ValueError(f"{name}: expected a sequence from 0 to {sequences - 1}, got {shown(i)}")
        return int(i)

    def _begin_of_last(self, i: int, n: Any) -> int:
        """The first position of the last n tokens of sequence i; ValueError if it cannot do without them."""
        pages = self._pages
        length, first = int(pages.lengths[i]), pages.begin(i)
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or not 0 <= n <= length:
            raise ValueError(f"n: expected 0 to {length}, the tokens of sequence {i}, got {shown(n)}")
        if 0 < n < length and max(length - int(n) - (pages.left or 0), 0) < first:
            most = max(length - first - (pages.left or 0), 0)
            raise ValueError(
                f"n: expected 0 to {most}, got {n}: the window has dropped the tokens before {first}; "
                "KVCache(..., rollback=n) holds what n tokens before the last append need"
            )
        return length - int(n)


def _safe(array: Any) -> Any:
    """A copy, which the caller may write; of an array on a device the array itself, which kernels read with bounds."""
    return array.copy() if isinstance(array, np.ndarray) else array


def _pool_with_gaps(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty pool with part of a page between heads: pages at powers of two would share sets of a cache."""
    layers, heads, *_ = shape
    page = shape[-2] * shape[-1] * dtype.itemsize
    gap = round(GAP * page / LINE) * LINE
    head = shape[2] * page + gap
    memory = np.empty(layers * heads * head, np.uint8)
    strides = heads * head, head, page, shape[-1] * dtype.itemsize, dtype.itemsize
    return np.ndarray(shape, dtype, memory, 0, strides)


def _dtype(dtype: Any, like: Any) -> np.dtype:
    if dtype is None:
        return np.dtype("float32") if like is None else like.dtype
    try:
        return dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: expected one of {', '.join((*ITEMSIZE, *FORMATS))}, got {shown(dtype)}") from None

"""`Layer`: the keys and values of one layer of a cache, in pages."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..call import arrays, interop
from ..call.checks import choice, window_of
from ..call.sequences import offsets_of
from ..call.shape import LAYOUTS
from ..errors import shown
from ..mods.expr import MAX_POSITION
from ..mods.tracing import as_array
from ..rope.apply import Table, checked_table, rotate, rotated
from ..spec import name_of
from .pages import PageTable
from .pools import Pools, write_quantised
from .step_plans import CONSTANT
from .steps import Step, Steps, check_rows, one_at_a_time

Window = tuple[int | None, int | None]

_OF_EACH = CONSTANT - {"layout"} | {"cu_seqlens", "out"}
"""Options that mean the same for packed queries and for a batch."""

_OF_CACHE = frozenset({"kv_lengths", "page_table"})
"""Options that a cache has itself."""

MAX_FORMS = 32
"""Layouts of new keys and values that a layer knows."""


class Layer:
    """One layer of a `KVCache`: its keys and values, in the pages of the cache.

    The first layer that appends a step's tokens does the bookkeeping for all; the others bring the same numbers of
    tokens.

    Attributes
    ----------
    number : int
        The index of the layer.
    k_pages, v_pages : array or Quantized
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

    def __init__(
        self, number: int, steps: Steps, window: Window | None, kv_format: str, dims: tuple[int, int], dtype: Any
    ) -> None:
        """dtype: of queries."""
        self.number, self._steps, self._window = number, steps, window
        self._latent = len(steps.memory) == 1
        self._pools = pools = Pools.of([x[number].swapaxes(1, 2) for x in steps.memory], kv_format, *dims)
        self._k, self._v = pools.k.swapaxes(1, 2), pools.v.swapaxes(1, 2)
        self._sequences, self._dtype = len(steps.state.pages.lengths), name_of(dtype)
        self._table: tuple[Any, Table, Any] | None = None
        self._forms: dict[Any, Form] = {}
        self.k_pages, self.v_pages = pools.as_arrays(dtype)

    def __repr__(self) -> str:
        return f"<Layer {self.number}: k_pages {self.k_pages.shape}, v_pages {self.v_pages.shape}, {self._dtype}>"

    @interop.takes_every_library(1, "k")
    @one_at_a_time
    def append(
        self, k: Any, v: Any = None, cu_seqlens: Any = None, *, rotary: tuple[Any, Any] | None = None,
        rotary_interleaved: bool = False, layout: str = "bhnd",
    ) -> None:  # fmt: skip
        """As `KVCache.append`; `cu_seqlens` may be left out where another layer has opened the step."""
        if self._latent:
            self._check_latent(v, rotary)
        form = self._forms.get((arrays.layout(k), arrays.layout(v), layout))
        if form is None or form.writer is None or rotary is not None:
            k, v = (x.view() if isinstance(x, np.ndarray) else x for x in (k, v))  # whose form the caller cannot change
            form = self._form(k, v, layout)
        steps = self._steps
        step, state = steps.current(self.number), steps.state
        table = None if rotary is None else self._checked(rotary, rotary_interleaved, k)
        counts = self._counts(form, cu_seqlens, step)
        if step is None:
            state, copy = steps.opened(counts, table)
            steps.copy_pages(copy)
            step = state.step
            assert step is not None
        elif counts is not step.counts and not np.array_equal(counts, step.counts):
            raise ValueError(
                f"layer {self.number}: expected {step.counts.tolist()} tokens for the sequences, as from the layer "
                f"before it, got {counts.tolist()}"
            )
        else:
            check_rows(table, step.end)
        if form.writer is not None:
            form.writer(k, v, step, table)
        else:
            self._write("k", k, self._k, self._pools.k_scale, layout, step, table)
            if not self._latent:
                self._write("v", v, self._v, self._pools.v_scale, layout, step, None)
        steps.wrote(state, self.number)

    @interop.takes_every_library(1, "q")
    @one_at_a_time
    def attend(
        self, q: Any, *, rotary: tuple[Any, Any] | None = None, rotary_interleaved: bool = False, **options: Any
    ) -> Any:
        """As `KVCache.attend`."""
        steps = self._steps
        native = steps.kind == "numpy"
        if not native or type(q) is not np.ndarray:
            arrays.require("q", q, steps.kind)
        q = q.view() if native else q  # whose form the caller cannot change
        if not _OF_CACHE.isdisjoint(options):
            name = next(name for name in _OF_CACHE if name in options)
            raise TypeError(f"attend() got an unexpected argument {name!r}: the cache has its own")
        if options.get("precision") == "fp8":
            raise ValueError("precision: expected None, 'highest' or 'tf32' for a cache, got 'fp8'")
        if self._latent:
            self._check_latent(None, rotary)
        steps.check_written(self.number)
        if self._window is not None:
            options["window"] = _window_inside(options.get("window"), self._window)
        rotation = None if rotary is None else (rotary, rotary_interleaved)
        if q.ndim == 3 and "cu_seqlens" not in options:
            return self._attend_last(q, rotation, options)
        if rotation is not None:
            q = self._rotated_batch(q, rotation, options)
        elif q.ndim == 3 and _OF_EACH.issuperset(options):
            if each := self._each(options["cu_seqlens"], len(q)):
                del options["cu_seqlens"]
                options["layout"] = "bnhd"
                return self._attend_each(q, each, options)
        return self._attend(q, **options)

    def _attend_last(self, q: Any, rotation: Any, options: dict[str, Any]) -> Any:
        """Queries (T, Hq, D) at the tokens of the last append."""
        step = self._steps.last()
        if q.shape[0] != len(step.positions):
            raise ValueError(
                f"q: expected shape (T, Hq, D) with the {len(step.positions)} tokens of the last append, or "
                f"(B, Hq, Nq, D), got {q.shape}"
            )
        if options.setdefault("layout", "bnhd") != "bnhd":
            raise ValueError("layout: expected 'bnhd' for q of shape (T, Hq, D), tokens before heads, got 'bhnd'")
        if rotation is not None:
            q = self._rotated(q.swapaxes(0, 1)[None], rotation, step)[0].swapaxes(0, 1)
        if not step.each:
            return self._attend(q, cu_seqlens=step.offsets, **options)
        return self._attend_each(q, step.each, options)

    def _attend_each(self, q: Any, each: int, options: dict[str, Any]) -> Any:
        """Queries (T, Hq, D), equally many at the end of each sequence."""
        out = options.pop("out", None)
        if out is not None:
            arrays.require("out", out, self._steps.kind)
            if out.ndim != 3 or out.shape[0] != q.shape[0]:
                raise ValueError(f"out: expected shape ({q.shape[0]}, Hq, Dv), got {out.shape}")
            options["out"] = out.reshape((self._sequences, each, *out.shape[1:]))
        attended = self._attend(q.reshape((self._sequences, each, *q.shape[1:])), **options)
        result, *rest = attended if isinstance(attended, tuple) else (attended,)
        result = result.reshape((-1, *result.shape[2:])) if out is None else out
        return (result, *map(_packed, rest)) if rest else result

    def _rotated_batch(self, q: Any, rotation: Any, options: dict[str, Any]) -> Any:
        """Queries (B, Hq, N, D) or (B, N, Hq, D) at the tokens of the last append, rotated."""
        step = self._steps.last()
        first = options.get("layout", "bhnd") == "bhnd"
        q4 = q if first or q.ndim != 4 else q.swapaxes(1, 2)
        if q4.ndim != 4 or (q4.shape[0], q4.shape[2]) != (self._sequences, step.each):
            raise ValueError(f"q: expected the queries of the last append for rotary=, got shape {q.shape}")
        q4 = self._rotated(q4, rotation, step)
        return q4 if first else q4.swapaxes(1, 2)

    def _rotated(self, q: Any, rotation: Any, step: Step) -> Any:
        """q (B, Hq, N, D) rotated: a new array with tokens before heads."""
        (rotary, interleaved), xp = rotation, self._steps.xp
        table = self._checked(rotary, interleaved, q)
        check_rows(table, step.end)
        batch, heads, n, d = q.shape
        out = xp.empty((batch, n, heads, d), q.dtype).swapaxes(1, 2)
        rotate(arrays.addressable(q).view(), out, table, step.where.reshape(batch, n), 1)
        return out

    def _attend(self, q: Any, out: Any = None, **options: Any) -> Any:
        steps = self._steps
        pools, pages = self._pools, steps.state.pages
        if pages.left is not None:
            self._check_held(q, pages, options)
        if (merged := steps.cascade.attend(q, pools, options, pages, out)) is not None:
            return merged
        planned = steps.plans.find(q, pools, options, pages)
        if planned is not None:
            return planned.run_on(q, pools.k, pools.v, out)
        k, v = pools.as_arrays(q.dtype)
        return attention(q, k, v, page_table=steps.readable, kv_lengths=steps.on_call[0], out=out, **options)

    def _check_held(self, q: Any, pages: PageTable, options: dict[str, Any]) -> None:
        """Check that the window has dropped no key of the oldest query of a sequence; the rest is `attention`'s."""
        q_offset, cu_seqlens = options.get("q_offset"), options.get("cu_seqlens")
        counts: Any = q.shape[1 if options.get("layout") == "bnhd" else 2] if q.ndim == 4 else 0
        if cu_seqlens is not None and q.ndim == 3:
            offsets = offsets_of("cu_seqlens", on_host("cu_seqlens", cu_seqlens), "numpy", len(q), "q")[:-1]
            if len(offsets) != len(pages.lengths) + 1:
                return
            counts = offsets[1:] - offsets[:-1]
        oldest = pages.lengths - counts
        if q_offset is not None:
            first = on_host("q_offset", q_offset)
            if first.dtype.kind not in "iu" or first.shape not in ((), oldest.shape):
                return
            oldest = np.broadcast_to(first.clip(0, MAX_POSITION).astype(np.int64), oldest.shape)
        seen = np.maximum(oldest - options["window"][0], 0)
        begin = pages.first * pages.page
        if (late := (seen < begin) & (counts > 0)).any():
            i = int(late.argmax())
            raise ValueError(
                f"q: expected queries of sequence {i} from position {begin[i] + options['window'][0]} on, got one at "
                f"{oldest[i]}: the window has dropped the tokens before {begin[i]}; KVCache(..., rollback=n) holds "
                "those that queries n tokens before the last append see"
            )

    def _checked(self, rotary: Any, interleaved: Any, x: Any) -> Table:
        """The tables of `rotary`, checked once for the calls that pass the same arrays."""
        if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
            raise TypeError(f"rotary: expected (cos, sin) from flashkit.rotary_table, got {shown(rotary)}")
        key = (*map(id, rotary), interleaved, x.shape[-1], x.dtype)
        if self._table is not None and self._table[0] == key:
            return self._table[1]
        table = checked_table(rotary[0], rotary[1], interleaved, x, arrays.dtype_name("q", x))
        if arrays.same_address(table.cos, rotary[0]) and arrays.same_address(table.sin, rotary[1]):
            # No copies, which would not follow their contents. `rotary` is kept so that no array gets these identities.
            self._table = key, table, rotary
        return table

    def _form(self, k: Any, v: Any, layout: str) -> Form:
        """The form of new keys and values, checked once for those of one layout."""
        key = arrays.layout(k), arrays.layout(v), layout
        if (form := self._forms.get(key)) is None:
            form = self._checked_form(k, v, layout)
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[key] = form
        return form

    def _checked_form(self, k: Any, v: Any, layout: str) -> Form:
        """The form of new keys and values; an error if the cache cannot take them."""
        k4 = self._four("k", k, self._k, layout)
        v, v4 = (k, k4) if self._latent else (v, self._four("v", v, self._v, layout))
        if k4.shape[:3] != v4.shape[:3]:
            raise ValueError(f"v: expected the shape of k, {k.shape}, but for the head dim, got {v.shape}")
        read_in_place = arrays.same_address(k4, k) and arrays.same_address(v4, v)
        if self._steps.kind != "numpy" or not read_in_place or self._pools.kv_format:
            return Form(k4.shape[2], k.ndim == 3, None)
        return Form(k4.shape[2], k.ndim == 3, Writer(k4, None if self._latent else v4, self._k, self._v))

    def _check_latent(self, v: Any, rotary: Any) -> None:
        """Reject arguments that a latent cache does not accept."""
        if v is not None:
            raise TypeError("v: expected None for a cache with latent=True, whose values are columns of k")
        if rotary is not None:
            raise TypeError(
                "rotary: expected None for a cache with latent=True, whose rotary columns are the last; call "
                "flashkit.rotary on these columns of q and k first"
            )

    def _four(self, name: str, x: Any, pool: Any, layout: str) -> Any:
        """k or v as (B, H, N, D); packed tokens as (1, H, T, D)."""
        arrays.require(name, x, self._steps.kind)
        choice("layout", layout, LAYOUTS)
        if arrays.dtype_name(name, x) != self._dtype and not self._pools.kv_format:
            raise TypeError(f"{name}: expected dtype {self._dtype} (the cache's), got {x.dtype}")
        _, heads, _, d = pool.shape
        if x.ndim == 3:
            batch, four = 1, x.swapaxes(0, 1)[None]
        elif x.ndim == 4:
            batch, four = self._sequences, x.view() if layout == "bhnd" else x.swapaxes(1, 2)
        else:
            batch, four = 0, x.reshape(1, 1, -1, 1)
        if (four.shape[0], four.shape[1], four.shape[3]) != (batch, heads, d):
            axes = f"{self._sequences}, {heads}, N, {d}" if layout == "bhnd" else f"{self._sequences}, N, {heads}, {d}"
            raise ValueError(f"{name}: expected shape (T, {heads}, {d}) or ({axes}), got {x.shape}")
        return arrays.addressable(four)

    def _counts(self, form: Form, cu_seqlens: Any, step: Step | None) -> np.ndarray:
        """New tokens of each sequence."""
        tokens = form.tokens
        if not form.packed:
            if cu_seqlens is not None:
                raise TypeError("cu_seqlens: expected k of shape (T, Hkv, D) beside it, got one of four axes")
            if step is not None and step.each == tokens:
                return step.counts
            return self._steps.state.pages.one_each if tokens == 1 else np.full(self._sequences, tokens)
        if cu_seqlens is not None:
            if self._each(cu_seqlens, tokens) == 1:
                return self._steps.state.pages.one_each
            return _counts(on_host("cu_seqlens", cu_seqlens), self._sequences, tokens)
        if step is not None and tokens == len(step.positions):
            return step.counts
        if tokens != self._sequences:
            raise ValueError(
                f"k: expected one token for each of {self._sequences} sequences, got {tokens}; or pass cu_seqlens"
            )
        return self._steps.state.pages.one_each

    def _each(self, cu_seqlens: Any, tokens: int) -> int:
        """The tokens of each sequence, where offsets on the host give all equally many; else 0."""
        each, rest = divmod(tokens, self._sequences)
        if rest or not each:
            return 0
        if isinstance(cu_seqlens, list):
            cu_seqlens = on_host("cu_seqlens", cu_seqlens)
        if type(cu_seqlens) is not np.ndarray or cu_seqlens.dtype.kind not in "iu":
            return 0
        return each if cu_seqlens.tolist() == [*range(0, tokens + 1, each)] else 0

    def _write(self, name: str, x: Any, pool: Any, scale: Any, layout: str, step: Step, table: Table | None) -> None:
        """Rows of an array, rotated if there is a table, into the slots of a pool (pages, H, page, D)."""
        x = self._four(name, x, pool, layout)
        if scale is None and isinstance(x, np.ndarray):
            Writer(x, x, pool, pool).write_k(x, step, table)
            return
        shape, page = (x.shape[0], x.shape[2]), pool.shape[2]
        if table is not None:
            x = rotated(x, table, step.where.reshape(shape)[:, None])
        slots = step.slots.reshape(shape)
        if scale is not None:
            write_quantised(x, pool.swapaxes(1, 2), scale, self._pools.kv_format, (slots // page, slots % page))
        else:
            pool[slots // page, :, slots % page] = x.swapaxes(1, 2)


class Writer:
    """Writes keys and values like k4 and v4 (B, H, N, D) into NumPy pools. v4: None where keys hold the values."""

    def __init__(self, k4: Any, v4: Any, k_pool: Any, v_pool: Any) -> None:
        from ..backends.cpu.rotary import Write

        self._of_k = partial(Write, k4.shape, k4.strides, k_pool)
        self._k: dict[Any, Write] = {}  # by the shape of tables, and which elements are pairs
        self._v = None if v4 is None else Write(v4.shape, v4.strides, v_pool)

    def __call__(self, k: Any, v: Any, step: Step, table: Table | None) -> None:
        self.write_k(k, step, table)
        if self._v is not None:
            self._v(v, step.slots)

    def write_k(self, k: Any, step: Step, table: Table | None) -> None:
        """Keys, rotated if there is a table."""
        key = ((0, 0), False) if table is None else (table.cos.shape, table.interleaved)
        if (write := self._k.get(key)) is None:
            if len(self._k) >= MAX_FORMS:
                self._k.clear()
            write = self._k[key] = self._of_k(*key)
        write(k, step.slots, None if table is None else (table.cos, table.sin, step.where))


class Form(NamedTuple):
    """What new keys and values of one layout are."""

    tokens: int  # of all sequences, or of each
    packed: bool  # whether they are of all
    writer: Writer | None  # where they are read in place


def _packed(rows: Any) -> Any:
    """The log-sum-exps (B, Hq, N) of a batch, or its statistics by name, as those (Hq, B * N) of packed queries."""
    if isinstance(rows, dict):
        return {name: x if name == "key_weight" else _packed(x) for name, x in rows.items()}
    return rows.swapaxes(0, 1).reshape((rows.shape[1], -1))


def _counts(integers: np.ndarray, sequences: int, tokens: int) -> np.ndarray:
    """int64 (B,) from offsets (B + 1,)."""
    if integers.shape != (sequences + 1,):
        raise ValueError(
            f"cu_seqlens: expected integers of shape ({sequences + 1},), one more than there are sequences, got shape "
            f"{integers.shape}"
        )
    offsets = offsets_of("cu_seqlens", integers, "numpy", tokens, "k")[:-1]
    if offsets[-1] != tokens:
        raise ValueError(f"cu_seqlens: expected {tokens} at the end, the number of tokens of k, got {offsets[-1]}")
    counts: np.ndarray = offsets[1:] - offsets[:-1]
    return counts


def on_host(name: str, integers: Any) -> np.ndarray:
    """An argument of integers as an array of NumPy; those on a device are read."""
    return integers.get() if arrays.kind_of(integers) == "cupy" else as_array(name, integers, "integers")


def _window_inside(window: Any, own: Window) -> Window:
    """The window of a call: the cache's, or the caller's, which must lie inside it."""
    if window is None:
        return own
    left, right = window_of(window)
    if own[0] is not None and (left is None or left > own[0]):
        raise ValueError(
            f"window: expected a left side of at most {own[0]}, that of the cache's window, got {shown(window)}"
        )
    return left, right

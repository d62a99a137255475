"""BlockMask: which tiles of the score matrix exist, and which of them need their mask evaluated.

A BlockMask is a mask modification over (b, h, row, k) and two block sizes. The class of a tile follows from the
modification by interval bounds (flashkit.mods.expr.classify), so every kernel that can evaluate the modification can
run the mask, with tiles of any size. A tile is EMPTY (no pair is visible: skipped), FULL (every pair is visible: no
mask needed) or PARTIAL. The bounds err only towards PARTIAL: no visible pair is skipped, no masked pair is shown.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..devices.lazy import cached_property
from ..numeric import integer
from . import codegen, expr, svg
from .expr import Expr
from .mod import Mod, mask, trace
from .patterns import Patterns
from .placement import axis_lengths, entries, placed
from .ranges import tables
from .tile_lists import EMPTY, FULL, PARTIAL, TileLists, tile_lists
from .tracing import as_array

_PAIRS = 1 << 22  # pairs that a count evaluates at once

SAMPLES = 1 << 20
"""Pairs that an estimate evaluates."""


@dataclass(frozen=True, eq=False)
class BlockMask(Patterns):
    """A block-sparse mask: which tiles of n_q x n_k scores exist, and elementwise which pairs are visible.

    Made by `from_mod`, `from_dense` or a pattern of the literature: `local`, `dilated`, `strided`, `fixed`,
    `butterfly`, `bigbird`, `longformer`. Block masks combine by `&`, `|` and `~`, with each other and with mods.

    Parameters
    ----------
    mod
        The mask over b, h, row and k, elementwise. Its arrays are copied and made read-only.
    n_q, n_k
        Numbers of queries and keys.
    block_q, block_k
        Queries and keys of a tile. The last tile of an axis may be smaller.
    batch, heads
        Batch entries and heads for which the mask differs; 1 where it is the same for all.

    Raises
    ------
    ValueError
        A size is no integer or out of range, or the mod depends on the position q (see `from_mod`).

    Examples
    --------
    >>> import flashkit
    >>> mask = flashkit.BlockMask.from_mod(flashkit.mods.causal(), 512, 512)
    >>> mask
    <BlockMask 512 x 512: 4 x 4 tiles of 128 x 128, 62.5% kept>
    >>> mask.to_dense()[0, 0]
    array([[1, 0, 0, 0],
           [2, 1, 0, 0],
           [2, 2, 1, 0],
           [2, 2, 2, 1]], dtype=uint8)
    """

    mod: Mod
    n_q: int
    n_k: int
    block_q: int = 128
    block_k: int = 128
    batch: int = 1
    heads: int = 1

    def __post_init__(self) -> None:
        for name, least in (("n_q", 0), ("n_k", 0), ("block_q", 1), ("block_k", 1), ("batch", 1), ("heads", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least, expr.MAX_POSITION))
        mod = self.mod.snapshot(whole=True)
        for array in mod.arrays.values():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        object.__setattr__(self, "mod", mod)
        if expr.uses(mod.expr, expr.Q):
            raise ValueError("the mod depends on the position q; BlockMask.from_mod says where the queries are")

    def __reduce__(self) -> Any:
        """What it was made of: tile lists are found again, and the checks of the constructor run."""
        return BlockMask, (self.mod, self.n_q, self.n_k, self.block_q, self.block_k, self.batch, self.heads)

    # --- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def from_mod(
        cls, mod: Mod | Callable[..., Any], n_q: int, n_k: int, block_q: int = 128, block_k: int = 128,
        q_offset: Any = None, batch: int | None = None, heads: int | None = None,
    ) -> BlockMask:  # fmt: skip
        """The block mask of a mask modification.

        Parameters
        ----------
        mod
            A mask mod, or a function (b, h, q, k) -> bool.
        n_q, n_k
            Numbers of queries and keys.
        block_q, block_k
            Queries and keys of a tile.
        q_offset
            Position of the first query: an integer, or integers (batch,). n_k - n_q by default.
        batch, heads
            Numbers of batch entries and heads, if the mod depends on b or h. By default the length of the arrays that
            it indexes by them. With 1, b or h is 0 for all.

        Returns
        -------
        BlockMask

        Raises
        ------
        TypeError
            The function cannot be traced.
        ValueError
            A size is out of range, or an array of the mod is too short.

        Examples
        --------
        >>> import flashkit
        >>> window = flashkit.mods.sliding_window(100)
        >>> flashkit.BlockMask.from_mod(window, 1024, 1024, block_q=64, block_k=64).visible_pairs
        98374
        """
        mod = trace(mod, "mask")
        n_q, n_k = integer("n_q", n_q, 0), integer("n_k", n_k, 0)
        mod = placed(mod, n_k - n_q if q_offset is None else q_offset)
        for name, symbol, n in (("n_q", expr.ROW, n_q), ("n_k", expr.K, n_k)):
            for array, length in axis_lengths(mod, symbol).items():
                if length < n:
                    expected = f"{name} = {n} entries along {symbol.value}"
                    raise ValueError(f"array {array}: expected {expected}, got {length}")
        batch, mod = entries(mod, "batch", expr.B, batch)
        heads, mod = entries(mod, "heads", expr.H, heads)
        return cls(mod, n_q, n_k, block_q, block_k, batch, heads)

    @classmethod
    def from_dense(
        cls, grid: Any, block_q: int, block_k: int, n_q: int | None = None, n_k: int | None = None
    ) -> BlockMask:
        """The block mask in which the tiles where `grid` is True are visible as a whole, the others masked.

        Parameters
        ----------
        grid
            Bools, (tiles_q, tiles_k), (heads, tiles_q, tiles_k) or (batch, heads, tiles_q, tiles_k). Batch and heads
            may be 1.
        block_q, block_k
            Queries and keys of a tile.
        n_q, n_k
            Numbers of queries and keys. ceil(n_q / block_q) is tiles_q, and so for the keys. By default all tiles are
            whole.

        Returns
        -------
        BlockMask

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.from_dense([[True, False], [True, True]], block_q=64, block_k=64).density
        0.75
        """
        grid = as_array("grid", grid).copy()
        block_q, block_k = integer("block_q", block_q, 1), integer("block_k", block_k, 1)
        if grid.dtype != bool:
            raise TypeError(f"grid: expected dtype bool, True where a tile exists, got {grid.dtype}")
        if grid.ndim not in (2, 3, 4):
            raise ValueError(
                f"grid: expected shape (tiles_q, tiles_k), or (heads,) or (batch, heads) before these, got {grid.shape}"
            )
        sizes = []
        for axis, name, n, block in ((-2, "q", n_q, block_q), (-1, "k", n_k, block_k)):
            tiles = grid.shape[axis]
            n = tiles * block if n is None else integer(f"n_{name}", n, 0)
            if -(-n // block) != tiles:
                needed = f"{-(-n // block)} tiles along {name}, for n_{name} = {n} in blocks of {block}"
                raise ValueError(f"grid: expected {needed}, got {tiles}")
            sizes.append(n)
        batch, heads = ((1, 1) + grid.shape)[-4:-2]
        leading = [i for i, n in ((expr.B, batch), (expr.H, heads))[4 - grid.ndim :]]

        def listed(b: Expr, h: Expr, q: Expr, k: Expr, *, grid: expr.Array) -> Expr:
            tile = (*leading, expr.ROW // block_q, k // block_k)
            return grid[tuple(expr.const(0) if n == 1 else i for i, n in zip(tile, shape))]

        shape = grid.shape
        return cls(mask(listed, grid=grid), sizes[0], sizes[1], block_q, block_k, batch, heads)

    def with_blocks(self, block_q: int, block_k: int) -> BlockMask:
        """The same mask with tiles of another size, for example those of a kernel."""
        return BlockMask(self.mod, self.n_q, self.n_k, block_q, block_k, self.batch, self.heads)

    def __and__(self, other: BlockMask | Mod) -> BlockMask:
        return self._joined(other, operator.and_)

    def __or__(self, other: BlockMask | Mod) -> BlockMask:
        return self._joined(other, operator.or_)

    def __invert__(self) -> BlockMask:
        """The mask of exactly those pairs that this mask hides."""
        return BlockMask(~self.mod, self.n_q, self.n_k, self.block_q, self.block_k, self.batch, self.heads)

    def _joined(self, other: BlockMask | Mod, join: Callable[[Mod, Mod], Mod]) -> BlockMask:
        """Elementwise, a Mod at the default offset; with the greatest block sizes that divide both masks' sizes."""
        if isinstance(other, Mod):
            other = BlockMask.from_mod(other, self.n_q, self.n_k, self.block_q, self.block_k)
        if not isinstance(other, BlockMask):
            return NotImplemented
        if (self.n_q, self.n_k) != (other.n_q, other.n_k):
            sizes = f"{self.n_q} x {self.n_k} and {other.n_q} x {other.n_k}"
            raise ValueError(f"block masks for {sizes} scores do not combine; n_q and n_k must agree")
        counts = []
        for name in ("batch", "heads"):
            a, b = getattr(self, name), getattr(other, name)
            if a != b and 1 not in (a, b):
                raise ValueError(f"block masks for {name} = {a} and {b} do not combine; they must agree, or one be 1")
            counts.append(max(a, b))
        block_q, block_k = math.gcd(self.block_q, other.block_q), math.gcd(self.block_k, other.block_k)
        return BlockMask(join(self.mod, other.mod), self.n_q, self.n_k, block_q, block_k, counts[0], counts[1])

    # --- queries ----------------------------------------------------------------------------------------------------

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.n_q // self.block_q), -(-self.n_k // self.block_k)

    @property
    def tile_count(self) -> int:
        """Number of tiles of every class, over `batch` and `heads`."""
        return self.batch * self.heads * math.prod(self.tiles)

    def rows(self, b: int | None = None, h: int | None = None) -> TileLists:
        """The tiles of each row of tiles, as compressed sparse rows of runs: the loops of the forward pass and of dQ.

        Parameters
        ----------
        b, h
            Batch entry and head. Without both, the lines are (b, h, row of tiles) in C order, over `batch` and `heads`.

        Returns
        -------
        TileLists
            Runs of FULL and of PARTIAL tiles.

        Raises
        ------
        IndexError
            b or h is beyond `batch` or `heads`.

        Examples
        --------
        >>> import flashkit
        >>> mask = flashkit.BlockMask.from_mod(flashkit.mods.causal(), 512, 512)
        >>> full, partial = mask.rows()
        >>> full.lines(3, 4).expand()[1], partial.lines(3, 4).expand()[1]
        (array([0, 1, 2], dtype=int32), array([3], dtype=int32))
        """
        return self._part(self._rows, b, h)

    def cols(self, b: int | None = None, h: int | None = None) -> TileLists:
        """The tiles of each column of tiles, as compressed sparse columns: the loops of dK and dV. See `rows`."""
        return self._part(self._cols, b, h)

    def states(self, i: Any, j: Any, b: Any = 0, h: Any = 0) -> np.ndarray:
        """Class of each tile (0 EMPTY, 1 PARTIAL, 2 FULL) in rows i and columns j: integer arrays that broadcast."""
        i, j, b, h = np.broadcast_arrays(*(np.asarray(x, np.int64) for x in (i, j, b, h)))
        return self._classify(0, b, h, i, j)

    def to_dense(self) -> np.ndarray:
        """The classes of all tiles: uint8 (batch, heads, tiles_q, tiles_k), 0 EMPTY, 1 PARTIAL, 2 FULL."""
        # Difference coding: the class is added where a run starts and subtracted where it stops.
        grid = np.zeros((self.batch * self.heads * self.tiles[0], self.tiles[1] + 1), np.int8)
        for state, runs in ((FULL, self._rows.full), (PARTIAL, self._rows.partial)):
            line = np.repeat(np.arange(len(grid)), np.diff(runs.indptr))
            grid[line, runs.start] += state
            grid[line, runs.stop] -= state
        grid = np.cumsum(grid, axis=1, dtype=np.int8)[:, :-1].astype(np.uint8)
        return grid.reshape(self.batch, self.heads, *self.tiles)

    def to_dense_mask(self) -> np.ndarray:
        """The mask pair by pair: bool (batch, heads, n_q, n_k), True = visible. Takes memory for all pairs."""
        shape = (self.batch, self.heads, self.n_q, self.n_k)
        if 0 in shape:
            return np.zeros(shape, bool)
        b, h, row, k = np.ogrid[tuple(map(slice, shape))]
        return np.broadcast_to(self._evaluate(b, h, row, k), shape).copy()

    @cached_property
    def density(self) -> float:
        """Fraction of the tiles that are not EMPTY: the fraction of the work. 0 without tiles. `visible_pairs` counts
        pairs."""
        return sum(runs.total for runs in self._rows) / self.tile_count if self.tile_count else 0.0

    @cached_property
    def visible_pairs(self) -> int:
        """Number of visible pairs, over `batch` and `heads`: what `Problem.flops` takes.

        FULL tiles are counted by area and PARTIAL ones pair by pair, which is slow for large masks that are mostly
        PARTIAL.
        """
        partial, total = self._rows.partial, self._pairs_of_full
        step = max(1, _PAIRS // (self.block_q * self.block_k))
        for lines in range(0, len(partial.indptr) - 1, 256):  # the list of PARTIAL tiles may be long too
            last = min(lines + 256, len(partial.indptr) - 1)
            indptr, j = partial.lines(lines, last).expand()
            line = np.repeat(np.arange(lines, last), np.diff(indptr))
            for at in range(0, len(j), step):
                total += self._count(line[at : at + step], j[at : at + step].astype(np.int64))
        return total

    def estimated_pairs(self) -> float:
        """Number of visible pairs, estimated: in PARTIAL tiles from SAMPLES pairs of random rows and keys, the same
        each time. The error is about the area of the PARTIAL tiles over the root of SAMPLES.

        Examples
        --------
        >>> import flashkit
        >>> mask = flashkit.BlockMask.from_mod(flashkit.mods.causal(), 1_000_000, 1_000_000, 1024, 1024)
        >>> round(mask.estimated_pairs() / 1e12, 3)
        0.5
        """
        indptr, j = self._rows.partial.expand()
        if not len(j):
            return float(self._pairs_of_full)
        rng, chosen = np.random.default_rng(0), np.arange(SAMPLES) * len(j) // SAMPLES
        line = np.searchsorted(indptr, chosen, side="right") - 1
        group, i = np.divmod(line, self.tiles[0])
        row = i * self.block_q + rng.integers(self.block_q, size=SAMPLES)
        k = j[chosen].astype(np.int64) * self.block_k + rng.integers(self.block_k, size=SAMPLES)
        b, h = np.divmod(group, self.heads)
        seen = self._evaluate(b, h, np.minimum(row, self.n_q - 1), np.minimum(k, self.n_k - 1))
        share = int(np.count_nonzero(seen & (row < self.n_q) & (k < self.n_k))) / SAMPLES
        return self._pairs_of_full + share * len(j) * self.block_q * self.block_k

    @property
    def _pairs_of_full(self) -> int:
        """Number of pairs in FULL tiles."""
        full = self._rows.full
        row = np.repeat(np.arange(len(full.indptr) - 1), np.diff(full.indptr)) % max(self.tiles[0], 1) * self.block_q
        first, past = (x.astype(np.int64) * self.block_k for x in (full.start, full.stop))
        return int(((np.minimum(row + self.block_q, self.n_q) - row) * (np.minimum(past, self.n_k) - first)).sum())

    def _count(self, line: np.ndarray, j: np.ndarray) -> int:
        """Number of visible pairs in the tiles on the given lines, every pair evaluated."""
        group, i = np.divmod(line[:, None, None], self.tiles[0])
        row = i * self.block_q + np.arange(self.block_q)[:, None]
        k = j[:, None, None] * self.block_k + np.arange(self.block_k)
        b, h = np.divmod(group, self.heads)
        seen = self._evaluate(b, h, np.minimum(row, self.n_q - 1), np.minimum(k, self.n_k - 1))
        return int(np.count_nonzero(seen & (row < self.n_q) & (k < self.n_k)))

    def plot(self, ax: Any = None, b: int = 0, h: int = 0) -> Any:
        """Draw the tiles of one batch entry and head with matplotlib, in larger tiles above 1024 a side.

        Parameters
        ----------
        ax
            Matplotlib axes; new ones by default.
        b, h
            Batch entry and head.

        Returns
        -------
        matplotlib.axes.Axes
        """
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap

        coarse = -(-max(self.tiles) // 1024)
        shown = self.with_blocks(self.block_q * coarse, self.block_k * coarse) if coarse > 1 else self
        i, j = np.ogrid[: shown.tiles[0], : shown.tiles[1]]
        ax = plt.subplots()[1] if ax is None else ax
        colors: Any = ListedColormap(["white", *svg.COLOURS.values()])
        extent = (0, self.n_k, self.n_q, 0)
        ax.imshow(shown.states(i, j, b, h), colors, vmin=EMPTY, vmax=FULL, extent=extent, interpolation="nearest")
        title = f"tiles of {shown.block_q} x {shown.block_k}: dark full, light partial, white empty"
        ax.set(xlabel="key", ylabel="query", title=title)
        return ax

    def __repr__(self) -> str:
        each = "".join(f", {name} {n}" for name, n in (("batch", self.batch), ("heads", self.heads)) if n > 1)
        # The density of a large mask takes long, and debuggers call repr().
        small = self.tile_count <= 1 << 16
        kept = f", {self.density:.1%} kept" if small or "_rows" in self.__dict__ else ""
        tiles = f"{self.tiles[0]} x {self.tiles[1]} tiles of {self.block_q} x {self.block_k}"
        return f"<BlockMask {self.n_q} x {self.n_k}{each}: {tiles}{kept}>"

    def _repr_html_(self) -> str:
        """For notebooks: a picture of the first batch entry and head, in larger tiles where there are many."""
        coarse = max(1, -(-max(self.tiles) // svg.MOST))
        shown = self.with_blocks(self.block_q * coarse, self.block_k * coarse)
        return svg.picture(shown.states(*np.ogrid[: shown.tiles[0], : shown.tiles[1]]), repr(self))

    # --- tile classes -----------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> TileLists:
        return self._lists(by_column=False)

    @cached_property
    def _cols(self) -> TileLists:
        return self._lists(by_column=True)

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        on_host = {name: a.get() if hasattr(a, "get") else a for name, a in self.mod.arrays.items()}  # CuPy's get()
        return {name: np.asarray(array) for name, array in on_host.items()}

    @cached_property
    def _tables(self) -> dict[str, Any]:
        return tables(self._arrays)

    @cached_property
    def _state(self) -> Expr:
        dtypes = {name: array.dtype for name, array in self.mod.arrays.items()}
        empty, full = expr.classify(self.mod.expr, expr.int32_arrays(dtypes))
        return expr.where(empty, EMPTY, expr.where(full, FULL, PARTIAL))

    def _evaluate(self, b: Any, h: Any, row: Any, k: Any) -> Any:
        positions = {"b": b, "h": h, "row": row, "k": k}
        return codegen.evaluate(self.mod.expr, {**positions, **self.mod.params, **self._arrays})

    def _classify(self, level: int, b: Any, h: Any, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Classes of squares of 2**level tiles a side."""
        height, width = self.block_q << level, self.block_k << level
        corners = {
            "row0": i * height, "row1": np.minimum(i * height + height, self.n_q) - 1,
            "k0": j * width, "k1": np.minimum(j * width + width, self.n_k) - 1,
        }  # fmt: skip
        state = codegen.evaluate(self._state, {"b": b, "h": h, **corners, **self.mod.params, **self._tables})
        return np.broadcast_to(np.asarray(state, np.uint8), i.shape)

    def _lists(self, by_column: bool) -> TileLists:
        def classify(level: int, group: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
            b, h = np.divmod(group, self.heads) if self.batch * self.heads > 1 else (0, 0)
            return self._classify(level, b, h, i, j)

        return tile_lists(classify, self.batch * self.heads, self.tiles, by_column)

    def _part(self, lists: TileLists, b: int | None, h: int | None) -> TileLists:
        if b is None and h is None:
            return lists
        position = []
        for name, index, n in (("b", b, self.batch), ("h", h, self.heads)):
            index = integer(name, 0 if index is None else index, 0)
            if 1 < n <= index:
                raise IndexError(f"{name} = {index} is beyond the {n} that the block mask is for")
            position.append(index if n > 1 else 0)
        lines = (len(lists.full.indptr) - 1) // (self.batch * self.heads)
        first = (position[0] * self.heads + position[1]) * lines
        return TileLists(*(runs.lines(first, first + lines) for runs in lists))

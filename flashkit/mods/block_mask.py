"""BlockMask: which tiles of the score matrix exist, and which of those need their mask looked at.

A BlockMask is a mask modification over (b, h, row, k) and two block sizes. Nothing else is stored: the state of a tile
is derived from the modification by interval bounds (flashkit.mods.expr.classify), so every kernel that can run the
modification can run the mask, with tiles of any size. Tiles are EMPTY (no pair is visible: skip), FULL (every pair is:
no mask work) or PARTIAL. The bounds err on the side of PARTIAL alone, so no visible pair is ever skipped and no hidden
one ever shown.

The tiles are found by a quadtree: a square that is EMPTY or FULL as a whole is never looked into, and what is left is
kept as runs of neighbouring tiles. A causal mask of a million tokens so costs a few thousand bounds, not 67 million.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from . import codegen, expr
from . import library as mods
from .expr import Expr
from .library import Mod
from .patterns import Patterns, integer
from .ranges import RangeTable
from .tile_lists import TileLists, compressed, finer, merged

EMPTY, PARTIAL, FULL = 0, 1, 2

_FIRST = (
    1024  # squares looked at before any is divided: enough that NumPy's cost per call is shared, few enough to be cheap
)
_CHUNK = 1 << 15  # squares looked at together: what is at work then stays within a few megabytes, whatever the mask
_PAIRS = 1 << 22  # pairs evaluated together where a count needs them one by one


@dataclass(frozen=True, eq=False)
class BlockMask(Patterns):
    """Which tiles of n_q x n_k scores exist; made by `from_mod`, `from_dense` or one of the patterns below.

    mod: the mask over b, h, row and k that it stands for, elementwise; block_q, block_k: rows and keys of a tile, the
    last of an axis may be shorter. batch and heads: entries that the mask tells apart, 1 where it is the same for all.
    The mask has the mod's arrays as copies that cannot be written: its tiles are found once.
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
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        for name in ("n_q", "n_k"):
            if getattr(self, name) > expr.MAX_POSITION:
                raise ValueError(f"{name} is {getattr(self, name)}; positions within 2^48 fit")
        mod = self.mod.snapshot(whole=True)
        for array in mod.arrays.values():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        object.__setattr__(self, "mod", mod)
        if expr.uses(mod.expr, expr.Q):
            raise ValueError("the mod depends on the position q; BlockMask.from_mod says where the queries are")

    # --- making one -----------------------------------------------------------------------------------------------

    @classmethod
    def from_mod(
        cls, mod: Mod | Callable[..., Any], n_q: int, n_k: int, block_q: int = 128, block_k: int = 128,
        q_offset: Any = None, batch: int | None = None, heads: int | None = None,
    ) -> BlockMask:  # fmt: skip
        """The mask that `mod` (a mask mod, or a function of b, h, q, k) describes.

        q_offset: position of the first query, an integer or integers (batch,); n_k - n_q where not given. batch, heads:
        how many a mod that depends on b or h is for; where not given, as many as its arrays have entries for.
        Where that is 1, b or h is 0 for all. ValueError for sizes that do not fit.
        """
        mod = mods.trace(mod, "mask")
        n_q, n_k = integer("n_q", n_q, 0), integer("n_k", n_k, 0)
        mod = _placed(mod, n_k - n_q if q_offset is None else q_offset)
        for name, symbol, n in (("n_q", expr.ROW, n_q), ("n_k", expr.K, n_k)):
            for array, length in _lengths(mod, symbol).items():
                if length < n:
                    where = f"{length} entries along {symbol.value}"
                    raise ValueError(f"array {array} of the mask has {where}, but {name} is {n}")
        batch, mod = _entries(mod, "batch", expr.B, batch)
        heads, mod = _entries(mod, "heads", expr.H, heads)
        return cls(mod, n_q, n_k, block_q, block_k, batch, heads)

    @classmethod
    def from_dense(
        cls, grid: Any, block_q: int, block_k: int, n_q: int | None = None, n_k: int | None = None
    ) -> BlockMask:
        """The mask that shows the tiles where `grid` is True, all of each.

        grid: bool, (tiles_q, tiles_k), (heads, tiles_q, tiles_k) or (batch, heads, tiles_q, tiles_k), batch and heads
        may be 1. n_q, n_k: rows and keys where the last tiles are not whole; ceil(n_q / block_q) must be tiles_q, keys
        likewise.
        """
        grid = np.array(grid)
        block_q, block_k = integer("block_q", block_q, 1), integer("block_k", block_k, 1)
        if grid.dtype != bool:
            raise TypeError(f"grid has dtype {grid.dtype}; bool fits, True where a tile exists")
        if grid.ndim not in (2, 3, 4):
            raise ValueError(
                f"grid has shape {grid.shape}; (tiles_q, tiles_k) fits, with (heads,) or (batch, heads) before it"
            )
        sizes = []
        for axis, name, n, block in ((-2, "q", n_q, block_q), (-1, "k", n_k, block_k)):
            tiles = grid.shape[axis]
            n = tiles * block if n is None else integer(f"n_{name}", n, 0)
            if -(-n // block) != tiles:
                needed = f"n_{name} = {n} in blocks of {block} makes {-(-n // block)}"
                raise ValueError(f"grid has {tiles} tiles along {name}, but {needed}")
            sizes.append(n)
        batch, heads = ((1, 1) + grid.shape)[-4:-2]
        leading = [i for i, n in ((expr.B, batch), (expr.H, heads))[4 - grid.ndim :]]

        def listed(b: Expr, h: Expr, q: Expr, k: Expr, *, grid: expr.Array) -> Expr:
            tile = (*leading, expr.ROW // block_q, k // block_k)
            return grid[tuple(expr.const(0) if n == 1 else i for i, n in zip(tile, shape))]

        shape = grid.shape
        return cls(mods.mask(listed, grid=grid), sizes[0], sizes[1], block_q, block_k, batch, heads)

    def with_blocks(self, block_q: int, block_k: int) -> BlockMask:
        """The same mask in tiles of another size, for instance a kernel's."""
        return BlockMask(self.mod, self.n_q, self.n_k, block_q, block_k, self.batch, self.heads)

    def __and__(self, other: BlockMask | Mod) -> BlockMask:
        return self._joined(other, operator.and_)

    def __or__(self, other: BlockMask | Mod) -> BlockMask:
        return self._joined(other, operator.or_)

    def __invert__(self) -> BlockMask:
        """Shows exactly the pairs that this mask hides."""
        return BlockMask(~self.mod, self.n_q, self.n_k, self.block_q, self.block_k, self.batch, self.heads)

    def _joined(self, other: BlockMask | Mod, join: Callable[[Mod, Mod], Mod]) -> BlockMask:
        """Elementwise, with a Mod taken at the default offset; in tiles of the greatest size that divides both."""
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

    # --- asking it ------------------------------------------------------------------------------------------------

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.n_q // self.block_q), -(-self.n_k // self.block_k)

    @property
    def tile_count(self) -> int:
        """How many tiles there are, existing or not, in all batch entries and heads that the mask tells apart."""
        return self.batch * self.heads * math.prod(self.tiles)

    def rows(self, b: int | None = None, h: int | None = None) -> TileLists:
        """For each row of tiles, the runs of tiles it has (compressed sparse rows): the loops of the forward pass and
        of dQ.

        Without b and h for all: lines are (b, h, row of tiles) in C order, of the `batch` and `heads` that the mask
        tells apart.
        """
        return self._part(self._rows, b, h)

    def cols(self, b: int | None = None, h: int | None = None) -> TileLists:
        """For each column of tiles, the runs of rows that it has (compressed sparse columns): the loops of dK and dV.
        As `rows`."""
        return self._part(self._cols, b, h)

    def states(self, i: Any, j: Any, b: Any = 0, h: Any = 0) -> np.ndarray:
        """State (EMPTY, PARTIAL, FULL) of the tiles in rows i and columns j: integer arrays that broadcast, each
        classified by itself."""
        i, j, b, h = np.broadcast_arrays(*(np.asarray(x, np.int64) for x in (i, j, b, h)))
        return self._classify(0, b, h, i, j)

    def to_dense(self) -> np.ndarray:
        """The states of all tiles: uint8 (batch, heads, tiles_q, tiles_k)."""
        # The state is added where a run starts and taken off where it stops, so that a running sum fills the grid.
        grid = np.zeros((self.batch * self.heads * self.tiles[0], self.tiles[1] + 1), np.int8)
        for state, runs in ((FULL, self._rows.full), (PARTIAL, self._rows.partial)):
            line = np.repeat(np.arange(len(grid)), np.diff(runs.indptr))
            grid[line, runs.start] += state
            grid[line, runs.stop] -= state
        grid = np.cumsum(grid, axis=1, dtype=np.int8)[:, :-1].astype(np.uint8)
        return grid.reshape(self.batch, self.heads, *self.tiles)

    def to_dense_mask(self) -> np.ndarray:
        """The mask pair by pair: bool (batch, heads, n_q, n_k), True = visible. For small sizes, by its nature."""
        shape = (self.batch, self.heads, self.n_q, self.n_k)
        if 0 in shape:
            return np.zeros(shape, bool)
        b, h, row, k = np.ogrid[tuple(map(slice, shape))]
        return np.broadcast_to(self._evaluate(b, h, row, k), shape).copy()

    @cached_property
    def density(self) -> float:
        """Fraction of the tiles that exist, which is the fraction of the work left; not of the pairs, see
        `visible_pairs`. 0 without tiles."""
        return sum(runs.total for runs in self._rows) / self.tile_count if self.tile_count else 0.0

    @cached_property
    def visible_pairs(self) -> int:
        """Number of visible pairs, over `batch` and `heads`: what `Problem.flops` takes. FULL tiles are counted by area
        and PARTIAL ones pair by pair, which takes its time where much of a large mask is PARTIAL."""
        (full, partial), tiles_q = self._rows, self.tiles[0]
        row = np.repeat(np.arange(len(full.indptr) - 1), np.diff(full.indptr)) % max(tiles_q, 1) * self.block_q
        first, past = (x.astype(np.int64) * self.block_k for x in (full.start, full.stop))
        total = int(((np.minimum(row + self.block_q, self.n_q) - row) * (np.minimum(past, self.n_k) - first)).sum())
        step = max(1, _PAIRS // (self.block_q * self.block_k))
        for lines in range(0, len(partial.indptr) - 1, 256):  # the list of PARTIAL tiles may be long too
            last = min(lines + 256, len(partial.indptr) - 1)
            indptr, j = partial.lines(lines, last).expand()
            line = np.repeat(np.arange(lines, last), np.diff(indptr))
            for at in range(0, len(j), step):
                total += self._count(line[at : at + step], j[at : at + step].astype(np.int64))
        return total

    def _count(self, line: np.ndarray, j: np.ndarray) -> int:
        """Visible pairs in the tiles on the given lines, each evaluated."""
        group, i = np.divmod(line[:, None, None], self.tiles[0])
        row = i * self.block_q + np.arange(self.block_q)[:, None]
        k = j[:, None, None] * self.block_k + np.arange(self.block_k)
        b, h = np.divmod(group, self.heads)
        seen = self._evaluate(b, h, np.minimum(row, self.n_q - 1), np.minimum(k, self.n_k - 1))
        return int(np.count_nonzero(seen & (row < self.n_q) & (k < self.n_k)))

    def plot(self, ax: Any = None, b: int = 0, h: int = 0) -> Any:
        """Draw the tile states of one batch entry and head with matplotlib; returns the axes. Above 1024 tiles a side,
        larger ones are drawn."""
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap

        coarse = -(-max(self.tiles) // 1024)
        shown = self.with_blocks(self.block_q * coarse, self.block_k * coarse) if coarse > 1 else self
        i, j = np.ogrid[: shown.tiles[0], : shown.tiles[1]]
        ax = plt.subplots()[1] if ax is None else ax
        colors: Any = ListedColormap(["white", "#9ecae1", "#08519c"])
        extent = (0, self.n_k, self.n_q, 0)
        ax.imshow(shown.states(i, j, b, h), colors, vmin=EMPTY, vmax=FULL, extent=extent, interpolation="nearest")
        title = f"tiles of {shown.block_q} x {shown.block_k}: dark full, light partial, white empty"
        ax.set(xlabel="key", ylabel="query", title=title)
        return ax

    def __repr__(self) -> str:
        each = "".join(f", {name} {n}" for name, n in (("batch", self.batch), ("heads", self.heads)) if n > 1)
        # Not worth minutes of work in a debugger: the density is shown where it is known or quickly found.
        small = self.tile_count <= 1 << 16
        kept = f", {self.density:.1%} kept" if small or "_rows" in self.__dict__ else ""
        tiles = f"{self.tiles[0]} x {self.tiles[1]} tiles of {self.block_q} x {self.block_k}"
        return f"<BlockMask {self.n_q} x {self.n_k}{each}: {tiles}{kept}>"

    # --- the quadtree ---------------------------------------------------------------------------------------------

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
        return {name: RangeTable(a) if a.dtype.kind in "biu" else a for name, a in self._arrays.items()}

    @cached_property
    def _state(self) -> Expr:
        dtypes = {name: array.dtype for name, array in self.mod.arrays.items()}
        empty, full = expr.classify(self.mod.expr, expr.narrow(dtypes))
        return expr.where(empty, EMPTY, expr.where(full, FULL, PARTIAL))

    def _evaluate(self, b: Any, h: Any, row: Any, k: Any) -> Any:
        positions = {"b": b, "h": h, "row": row, "k": k}
        return codegen.evaluate(self.mod.expr, {**positions, **self.mod.params, **self._arrays})

    def _classify(self, level: int, b: Any, h: Any, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """States of squares of 2**level tiles a side."""
        height, width = self.block_q << level, self.block_k << level
        corners = {
            "row0": i * height, "row1": np.minimum(i * height + height, self.n_q) - 1,
            "k0": j * width, "k1": np.minimum(j * width + width, self.n_k) - 1,
        }  # fmt: skip
        state = codegen.evaluate(self._state, {"b": b, "h": h, **corners, **self.mod.params, **self._tables})
        return np.broadcast_to(np.asarray(state, np.uint8), i.shape)

    def _squares(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """(level, state, squares) with squares int64 (3, n): group b * heads + h, row and column in units of 2**level
        tiles.

        Together they hold every FULL tile once, in squares as large as they come, and every PARTIAL one, at level 0.
        """
        tiles = self.tiles
        groups = self.batch * self.heads
        if 0 in tiles:
            return
        level = 0
        while max(tiles) > 1 << level and groups * math.prod(-(-n >> level) for n in tiles) > _FIRST:
            level += 1
        first = np.indices((groups, *(-(-n >> level) for n in tiles))).reshape(3, -1)
        stack = [(level, first)]  # depth first, so that little is at work at a time
        while stack:
            level, squares = stack.pop()
            if squares.shape[1] > _CHUNK:
                stack.append((level, squares[:, _CHUNK:]))
                squares = squares[:, :_CHUNK]
            group, i, j = squares
            b, h = np.divmod(group, self.heads) if groups > 1 else (0, 0)
            states = self._classify(level, b, h, i, j)
            yield level, FULL, squares[:, states == FULL]
            rest = squares[:, states == PARTIAL]
            if level == 0:
                yield level, PARTIAL, rest
            elif rest.size:
                level -= 1
                four = np.repeat(rest, 4, axis=1)
                four[1:] *= 2
                four[1:] += np.tile([[0, 0, 1, 1], [0, 1, 0, 1]], rest.shape[1])
                inside = (four[1] << level < tiles[0]) & (four[2] << level < tiles[1])
                stack.append((level, four[:, inside]))

    def _lists(self, by_column: bool) -> TileLists:
        across, along = (2, 1) if by_column else (1, 2)
        lines, length = self.tiles[across - 1], self.tiles[along - 1]
        groups = self.batch * self.heads
        pieces: dict[int, list[np.ndarray]] = {FULL: [], PARTIAL: []}
        for level, state, squares in self._squares():
            if squares.size:
                runs = merged(squares[0] * (-(-lines >> level)) + squares[across], squares[along], squares[along] + 1)
                pieces[state].append(finer(runs, level, lines, length))
        return TileLists(*(compressed(pieces[state], groups * lines) for state in (FULL, PARTIAL)))

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


# --- pieces ----------------------------------------------------------------------------------------------------------


def _placed(mod: Mod, offset: Any) -> Mod:
    """The mod with a query's position written as row + offset; the offset is given at run time, as others of a mod."""
    offset = np.asarray(offset)
    if offset.dtype.kind not in "iu" or offset.ndim > 1:
        given = f"{offset.dtype} of shape {offset.shape}"
        raise ValueError(f"q_offset is an integer or integers of shape (batch,), not {given}")
    if offset.size and max(-int(offset.min()), int(offset.max())) > expr.MAX_POSITION:
        raise ValueError(f"q_offset runs from {offset.min()} to {offset.max()}; positions within 2^48 fit")
    if not expr.uses(mod.expr, expr.Q):
        return mod
    name = "q_offset"
    while name in mod.params or name in mod.arrays:
        name += "_"
    if offset.ndim:
        small = offset.astype(np.int32)  # expr.narrow: such a sum cannot overflow
        offset = small if np.array_equal(small, offset) else offset
        shift, params, arrays = expr.Array(name, 1, "int")[expr.B], {}, {name: offset}
    else:
        shift, params, arrays = expr.param(name, "int"), {name: int(offset)}, {}
    graph = expr.substitute([mod.expr], lambda node: expr.ROW + shift if node is expr.Q else node)[0]
    return Mod("mask", graph, {**mod.params, **params}, {**mod.arrays, **arrays})


def _entries(mod: Mod, name: str, symbol: Expr, given: int | None) -> tuple[int, Mod]:
    """How many batch entries or heads the mod tells apart, and the mod, which depends on them only if more than 1."""
    if not expr.uses(mod.expr, symbol):
        return 1, mod
    lengths = _lengths(mod, symbol)
    if given is None and not lengths:
        raise ValueError(f"the mask depends on {symbol.value}; say how many there are: {name}=")
    count = min(lengths.values()) if given is None else integer(name, given, 1)
    for array, n in lengths.items():
        if n < count or (given is None and n != count):
            raise ValueError(f"array {array} of the mask has {n} entries along {symbol.value}, but {name} is {count}")
    if count == 1:
        graph = expr.substitute([mod.expr], lambda node: expr.const(0) if node is symbol else node)[0]
        mod = Mod("mask", graph, mod.params, mod.arrays)
    return count, mod


def _lengths(mod: Mod, symbol: Expr) -> dict[str, int]:
    """The length of each axis that the mod indexes by nothing but the symbol, by the name of the array."""
    loads = (node for node in expr.walk([mod.expr]) if node.op == "load")
    indexed = ((node.value, axis) for node in loads for axis, index in enumerate(node.args) if index is symbol)
    return {name: mod.arrays[name].shape[axis] for name, axis in indexed}

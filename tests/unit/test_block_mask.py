"""Block masks: every tile's state and every list against the mask taken pair by pair."""

import contextlib
import inspect
import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashkit import mods
from flashkit.mods import Mod, block_mask, expr, tile_lists
from flashkit.mods.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from flashkit.mods.ranges import RangeTable
from flashkit.mods.tile_lists import Runs

randoms = st.randoms(use_true_random=False)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MILLION = 1 << 20


@contextlib.contextmanager
def tiny_steps():
    """Make the quadtree start from one square and classify few at a time, so that small masks reach every branch."""
    first, chunk, pairs = tile_lists._FIRST, tile_lists._CHUNK, block_mask._PAIRS
    tile_lists._FIRST, tile_lists._CHUNK, block_mask._PAIRS = 1, 5, 100
    try:
        yield
    finally:
        tile_lists._FIRST, tile_lists._CHUNK, block_mask._PAIRS = first, chunk, pairs


def tile_states(visible: np.ndarray, block_q: int, block_k: int) -> np.ndarray:
    """The state of each tile of a mask given pair by pair: bool (batch, heads, n_q, n_k)."""
    *leading, n_q, n_k = visible.shape
    states = np.zeros((*leading, -(-n_q // block_q), -(-n_k // block_k)), np.uint8)
    for i, j in np.ndindex(states.shape[-2:]):
        tile = visible[..., i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        states[..., i, j] = np.where(tile.all(axis=(-2, -1)), FULL, np.where(tile.any(axis=(-2, -1)), PARTIAL, EMPTY))
    return states


def pair_by_pair(mod: Mod, batch: int, heads: int, n_q: int, n_k: int, offset: int) -> np.ndarray:
    b, h, row, k = np.ogrid[:batch, :heads, :n_q, :n_k]
    return np.broadcast_to(mod.evaluate(b, h, row + offset, k, row=row), (batch, heads, n_q, n_k))


def check_lists(mask: BlockMask) -> np.ndarray:
    """Rows, columns and the dense grid agree; returns the grid."""
    grid = mask.to_dense()
    assert grid.dtype == np.uint8
    assert grid.shape == (mask.batch, mask.heads, *mask.tiles)
    for lists, wanted in ((mask.rows(), grid), (mask.cols(), grid.swapaxes(-1, -2))):
        lines = wanted.reshape(math.prod(wanted.shape[:-1]), wanted.shape[-1])
        for state, runs in ((FULL, lists.full), (PARTIAL, lists.partial)):
            check_runs(runs, [np.flatnonzero(line == state) for line in lines])
    for b, h in np.ndindex(mask.batch, mask.heads):
        for lists, wanted in ((mask.rows(b, h), grid[b, h]), (mask.cols(b, h), grid[b, h].T)):
            for state, runs in ((FULL, lists.full), (PARTIAL, lists.partial)):
                check_runs(runs, [np.flatnonzero(line == state) for line in wanted])
    return grid


def check_runs(runs: Runs, wanted: list[np.ndarray]) -> None:
    assert (runs.indptr.dtype, runs.start.dtype, runs.stop.dtype) == (np.int64, np.int32, np.int32)
    assert len(runs.indptr) == len(wanted) + 1
    assert runs.indptr[0] == 0
    assert runs.indptr[-1] == len(runs.start) == len(runs.stop)
    indptr, tiles = runs.expand()
    assert (indptr.dtype, tiles.dtype) == (np.int64, np.int32)
    assert runs.total == len(tiles) == sum(map(len, wanted))
    for n, line in enumerate(wanted):
        start, stop = (x[runs.indptr[n] : runs.indptr[n + 1]] for x in (runs.start, runs.stop))
        assert (start < stop).all()
        assert (start[1:] > stop[:-1]).all(), "runs ascend and do not touch"
        assert np.array_equal(tiles[indptr[n] : indptr[n + 1]], line)


def never_wrong(states: np.ndarray, visible: np.ndarray, block_q: int, block_k: int) -> None:
    """PARTIAL is always allowed; EMPTY and FULL must be true."""
    truth = tile_states(visible, block_q, block_k)
    assert not ((states == EMPTY) & (truth != EMPTY)).any(), "a visible pair would be skipped"
    assert not ((states == FULL) & (truth != FULL)).any(), "a hidden pair would be shown"


# --- classification ---------------------------------------------------------------------------------------------------

# n_q, n_k, block_q, block_k, q_offset
SIZES = [
    (64, 64, 8, 8, None), (64, 64, 16, 4, None), (61, 45, 8, 16, None), (45, 61, 16, 8, None), (50, 50, 7, 5, 3),
    (40, 70, 8, 8, 0), (1, 64, 1, 16, None), (1, 64, 64, 8, 20), (33, 1, 4, 4, None), (30, 30, 1, 1, -7),
    (20, 20, 128, 128, None), (30, 40, 8, 8, 45),
]  # fmt: skip


def ids(n: int) -> np.ndarray:
    return np.sort(np.random.default_rng(n).integers(0, max(n // 6, 1), n)).astype(np.int32)


# name: (mod for keys 0..n - 1, whether interval bounds find every EMPTY and FULL tile)
MODS = {
    "causal": (lambda n: mods.causal(), True),
    "window": (lambda n: mods.sliding_window(9, 0), True),
    "window both ways": (lambda n: mods.sliding_window(5, 11), True),
    "diagonal": (lambda n: mods.sliding_window(0, 0), True),
    "window without a left bound": (lambda n: mods.sliding_window(None, 3), True),
    "all": (lambda n: mods.sliding_window(None, None), True),
    "none": (lambda n: mods.mask(lambda b, h, q, k: False), True),
    "prefix": (lambda n: mods.prefix_lm(13), False),
    "document": (lambda n: mods.document(ids(n)), True),
    "document, any order": (lambda n: mods.document(ids(n)[::-1] % 3), False),
    "dilated": (lambda n: mods.dilated(3), False),
    "dilated far": (lambda n: mods.dilated(24), False),
    "array": (lambda n: mods.visible(np.add.outer(np.arange(n), np.arange(n)) // 9 % 2 == 0), True),
    "array of keys": (lambda n: mods.visible((np.arange(n) < n // 2)[None]), True),
    "bit pattern": (lambda n: mods.mask(lambda b, h, q, k: (q & 8) == (k & 8)), False),
    "float": (lambda n: mods.mask(lambda b, h, q, k: q * 0.5 < k + 1.0), False),
    "causal document": (lambda n: mods.causal() & mods.document(ids(n)), False),
    "window or prefix": (lambda n: mods.sliding_window(4, 4) | mods.mask(lambda b, h, q, k: k < 8), False),
    "not causal, not document": (lambda n: ~mods.causal() & ~mods.document(ids(n)), False),
    "blocks": (lambda n: mods.mask(lambda b, h, q, k: (q // 8 + k // 8) % 2 == 0), False),
    "keys by head": (
        lambda n: mods.mask(lambda b, h, q, k, *, first: (k >= first[h]) & (k <= q), first=np.array([0, 9, 30])),
        False,
    ),
    "lengths by batch": (
        lambda n: mods.mask(lambda b, h, q, k, *, length: k < length[b], length=np.array([17, 3, 64, 0])),
        True,
    ),
    "documents by batch": (lambda n: mods.document(np.stack([ids(n), ids(n)[::-1]])), True),
    "array by head": (lambda n: mods.visible(np.tri(n, dtype=bool) ^ (np.arange(3) == 1)[:, None, None]), True),
    "one array for all heads": (lambda n: mods.visible(np.tri(n, dtype=bool)[None, None]), True),
}


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, id=str(s), marks=[pytest.mark.slow] if i % 2 else []) for i, s in enumerate(SIZES)]
)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.one_in(1, slow=4)
def test_states_agree_with_every_pair(name, sizes):
    n_q, n_k, block_q, block_k, offset = sizes
    make, exact = MODS[name]
    mod = make(max(n_q, n_k))
    mask = BlockMask.from_mod(mod, n_q, n_k, block_q, block_k, offset)
    visible = pair_by_pair(mod, mask.batch, mask.heads, n_q, n_k, n_k - n_q if offset is None else offset)
    with tiny_steps():
        grid = check_lists(mask)
        assert mask.visible_pairs == visible.sum()
    never_wrong(grid, visible, block_q, block_k)
    if exact:
        assert np.array_equal(grid, tile_states(visible, block_q, block_k))
    assert np.array_equal(mask.to_dense_mask(), visible)
    b, h, i, j = np.ogrid[tuple(map(slice, grid.shape))]
    assert np.array_equal(mask.states(i, j, b, h), grid)
    assert mask.density == np.count_nonzero(grid) / grid.size


def test_batch_and_heads_are_counted_where_they_matter():
    counted = {
        name: (m.batch, m.heads)
        for name, (make, _) in MODS.items()
        for m in [BlockMask.from_mod(make(64), 64, 64, 8, 8)]
    }
    own = {"keys by head": (1, 3), "lengths by batch": (4, 1), "documents by batch": (2, 1), "array by head": (1, 3)}
    assert counted == {name: own.get(name, (1, 1)) for name in MODS}


def test_the_offset_is_fixed_at_construction():
    mask = BlockMask.from_mod(mods.causal(), 10, 30, 4, 4)
    assert not expr.uses(mask.mod.expr, expr.Q)
    assert mask.mod.params == {"q_offset": 20}
    assert mask.mod.key == BlockMask.from_mod(mods.causal(), 7, 7, 4, 4, q_offset=3).mod.key
    row, k = np.ogrid[:10, :30]
    assert np.array_equal(mask.mod.evaluate(0, 0, None, k, row=row), k <= row + 20)


def test_offsets_by_batch_entry():
    offsets = np.array([0, 11, -5])
    mask = BlockMask.from_mod(mods.causal(), 24, 32, 8, 8, q_offset=offsets)
    assert (mask.batch, mask.heads) == (3, 1)
    grid = check_lists(mask)
    for b, offset in enumerate(offsets):
        assert np.array_equal(grid[b], BlockMask.from_mod(mods.causal(), 24, 32, 8, 8, int(offset)).to_dense()[0])


def test_an_argument_called_q_offset_is_told_apart():
    mod = mods.mask(lambda b, h, q, k, *, q_offset: k <= q - q_offset, q_offset=2)
    mask = BlockMask.from_mod(mod, 12, 12, 4, 4, q_offset=5)
    assert np.array_equal(mask.to_dense_mask()[0, 0], np.arange(12) <= np.arange(12)[:, None] + 3)
    mod = mods.mask(lambda b, h, q, k, *, q_offset: k <= q - q_offset[h], q_offset=np.array([2]))
    mask = BlockMask.from_mod(mod, 12, 12, 4, 4, q_offset=np.array([5]))
    assert np.array_equal(mask.to_dense_mask()[0, 0], np.arange(12) <= np.arange(12)[:, None] + 3)


def test_one_batch_entry_stands_for_all():
    mask = BlockMask.from_mod(mods.document(ids(20)[None]), 20, 20, 4, 4)
    assert mask.batch == 1
    assert not expr.uses(mask.mod.expr, expr.B)
    assert np.array_equal(mask.rows(b=7).full.start, mask.rows().full.start)


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_keys(n_q, n_k):
    for mod in (mods.causal(), mods.mask(lambda b, h, q, k, *, first: k >= first[h], first=np.array([1, 2]))):
        mask = BlockMask.from_mod(mod, n_q, n_k, 4, 4)
        check_lists(mask)
        assert mask.density == 0.0
        assert mask.visible_pairs == 0
        assert mask.to_dense_mask().shape == (1, mask.heads, n_q, n_k)
        assert "BlockMask" in repr(mask)


# --- from a grid ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (3,), (1,), (2, 3), (2, 1), (1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "sizes", [(32, 48, 8, 16), (29, 35, 8, 16), (3, 40, 8, 4), (40, 3, 5, 8), (5, 5, 8, 8)], ids=str
)
def test_from_dense(leading, sizes):
    n_q, n_k, block_q, block_k = sizes
    tiles = -(-n_q // block_q), -(-n_k // block_k)
    grid = np.random.default_rng(5).random((*leading, *tiles)) < 0.4
    mask = BlockMask.from_dense(grid, block_q, block_k, n_q, n_k)
    shape = ((1, 1) + grid.shape)[-4:]
    assert (mask.batch, mask.heads) == shape[:2]
    with tiny_steps():
        assert np.array_equal(check_lists(mask), np.where(grid, FULL, EMPTY).reshape(shape))
    elementwise = grid.reshape(shape).repeat(block_q, 2).repeat(block_k, 3)[:, :, :n_q, :n_k]
    assert np.array_equal(mask.to_dense_mask(), elementwise)
    assert mask.visible_pairs == elementwise.sum()


@pytest.mark.parametrize("blocks", [(4, 4), (16, 16), (8, 2), (12, 20), (5, 3), (64, 64)], ids=str)
def test_other_block_sizes_keep_the_meaning(blocks):
    grid = np.random.default_rng(1).random((2, 5, 6)) < 0.5
    mask = BlockMask.from_dense(grid, 8, 8, 37, 48)
    other = mask.with_blocks(*blocks)
    assert (other.block_q, other.block_k) == blocks
    assert np.array_equal(other.to_dense_mask(), mask.to_dense_mask())
    assert np.array_equal(check_lists(other), tile_states(mask.to_dense_mask(), *blocks))


# --- operators --------------------------------------------------------------------------------------------------------


def test_operators_work_pair_by_pair():
    a = BlockMask.from_mod(mods.sliding_window(9, 2), 40, 52, 8, 4)
    b = BlockMask.from_dense(np.random.default_rng(2).random((3, 5, 4)) < 0.5, 8, 16, 40, 52)
    c = BlockMask.from_mod(mods.document(np.stack([ids(52), ids(52)[::-1]])), 40, 52, 20, 6)
    for result, wanted, blocks in (
        (a & b, a.to_dense_mask() & b.to_dense_mask(), (8, 4)),
        (a | b, a.to_dense_mask() | b.to_dense_mask(), (8, 4)),
        (~a, ~a.to_dense_mask(), (8, 4)),
        (b & c, b.to_dense_mask() & c.to_dense_mask(), (4, 2)),
        (~(a | ~b) & c, ~(a.to_dense_mask() | ~b.to_dense_mask()) & c.to_dense_mask(), (4, 2)),
        (b & mods.causal(), b.to_dense_mask() & np.tri(40, 52, 12, bool), (8, 16)),
        (b | mods.causal(), b.to_dense_mask() | np.tri(40, 52, 12, bool), (8, 16)),
    ):
        assert (result.block_q, result.block_k) == blocks
        assert np.array_equal(result.to_dense_mask(), wanted)
        never_wrong(check_lists(result), wanted, *blocks)


def test_masks_of_other_offsets_combine():
    a, b = (BlockMask.from_mod(mods.causal(), 16, 16, 4, 4, q_offset=o) for o in (0, 5))
    assert np.array_equal((~a & b).to_dense_mask(), ~a.to_dense_mask() & b.to_dense_mask())


# --- patterns of the literature, each said once more in loops ---------------------------------------------------------


def blockwise(rule, n_q: int, n_k: int, block: int, offset: int | None = None) -> np.ndarray:
    """Pair by pair from a rule on block numbers, bool (n_q, n_k)."""
    offset = n_k - n_q if offset is None else offset
    return np.array([[bool(rule((row + offset) // block, k // block)) for k in range(n_k)] for row in range(n_q)])


def strided(i, j, stride):
    recent = set(range(max(0, i - stride), i + 1))
    return j in recent or (j <= i and (i - j) % stride == 0)


def fixed(i, j, stride, summary):
    if j > i:
        return False
    return j // stride == i // stride or j % stride in range(stride - summary, stride)


def butterfly(i, j, max_stride):
    # The sum of the factors of strides 2, 4, ... max_stride: that of stride t joins i and j that differ in t / 2 alone.
    return i == j or any(i ^ j == t // 2 for t in (2**e for e in range(1, max_stride.bit_length())))


def made(name, **lengths):
    """A constructor with its lengths."""
    return lambda *sizes, **more: getattr(BlockMask, name)(*sizes, **lengths, **more)


PATTERNS = {
    "local": (made("local", left_blocks=2, right_blocks=1), lambda i, j: i - 2 <= j <= i + 1),
    "local, causal": (made("local", left_blocks=3), lambda i, j: i - 3 <= j <= i),
    "dilated": (made("dilated", step_blocks=3, reach_blocks=2), lambda i, j: i - j in (-6, -3, 0, 3, 6)),
    "strided": (made("strided", stride_blocks=4), lambda i, j: strided(i, j, 4)),
    "strided by one": (made("strided", stride_blocks=1), lambda i, j: j <= i),
    "fixed": (made("fixed", stride_blocks=4, summary_blocks=2), lambda i, j: fixed(i, j, 4, 2)),
    "fixed without summary": (made("fixed", stride_blocks=3, summary_blocks=0), lambda i, j: fixed(i, j, 3, 0)),
    "butterfly": (BlockMask.butterfly, lambda i, j: butterfly(i, j, 1 << 10)),
    "butterfly, short": (made("butterfly", max_stride_blocks=4), lambda i, j: butterfly(i, j, 4)),
    "butterfly, none": (made("butterfly", max_stride_blocks=1), lambda i, j: i == j),
}


PATTERN_SIZES = [
    (64, 64, 4, None), (50, 68, 4, None), (50, 77, 4, None), (30, 61, 5, 10), (64, 64, 16, None), (50, 30, 5, -25),
    (50, 30, 4, -7),
]  # fmt: skip


@pytest.mark.parametrize("sizes", PATTERN_SIZES, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, sizes):
    n_q, n_k, block, offset = sizes
    make, rule = PATTERNS[name]
    mask = make(n_q, n_k, block=block, q_offset=offset)
    wanted = blockwise(rule, n_q, n_k, block, offset)
    assert np.array_equal(mask.to_dense_mask()[0, 0], wanted)
    with tiny_steps():
        grid = check_lists(mask)
    if (
        (n_k - n_q) if offset is None else offset
    ) % block == 0:  # then rows of tiles are the pattern's blocks, and no tile is PARTIAL
        assert np.array_equal(grid[0, 0], tile_states(wanted, block, block))
        assert PARTIAL not in grid
    else:
        never_wrong(grid[0, 0], wanted, block, block)


@pytest.mark.parametrize(
    "settings",
    [{}, {"window_blocks": 1, "global_blocks": 0, "random_blocks": 4}, {"window_blocks": 5, "random_blocks": 0}],
    ids=str,
)
@pytest.mark.parametrize("offset", [-40, 0, 16])
def test_bigbird(offset, settings):
    """Blocks of queries before the first key and after the last are no global ones."""
    window, first, extra = (
        settings.get(name, n) for name, n in (("window_blocks", 3), ("global_blocks", 2), ("random_blocks", 3))
    )
    made = lambda **more: BlockMask.bigbird(160, 128, block=8, q_offset=offset, **settings, **more)
    grid = check_lists(made())[0, 0]
    assert PARTIAL not in grid
    rule = lambda i, j: abs(i - j) <= window // 2 or 0 <= i < first or j < first
    structured = blockwise(rule, 160, 128, 8, offset)[::8, ::8]
    assert (grid[structured] == FULL).all()
    random_blocks = ((grid == FULL) & ~structured).sum(axis=1)
    assert np.array_equal(random_blocks, np.minimum(extra, (~structured).sum(axis=1)))
    assert np.array_equal(made().to_dense()[0, 0], grid)
    if extra:
        assert not np.array_equal(made(seed=1).to_dense()[0, 0], grid)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("tokens", [(), (0,), (3, 17, 39)], ids=str)
def test_longformer(tokens, dilation):
    mask = BlockMask.longformer(40, 40, 6, tokens, dilation, block=8)
    near = lambda q, k: abs(q - k) <= 3 * dilation and (q - k) % dilation == 0
    wanted = np.array([[near(q, k) or q in tokens or k in tokens for k in range(40)] for q in range(40)])
    assert np.array_equal(mask.to_dense_mask()[0, 0], wanted)
    never_wrong(check_lists(mask)[0, 0], wanted, 8, 8)
    shifted = BlockMask.longformer(10, 40, 6, tokens, dilation, block=8)
    assert np.array_equal(shifted.to_dense_mask()[0, 0], wanted[30:])
    # Queries before the first position and after the last are no global tokens.
    beyond = BlockMask.longformer(64, 40, 6, tokens, dilation, block=8, q_offset=-12)
    wanted = np.array([[near(q, k) or q in tokens or k in tokens for k in range(40)] for q in range(-12, 52)])
    assert np.array_equal(beyond.to_dense_mask()[0, 0], wanted)
    never_wrong(check_lists(beyond)[0, 0], wanted, 8, 8)


# --- arrays -----------------------------------------------------------------------------------------------------------


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 19), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["bool", "int8", "int32", "int64", "uint8", "uint64"]))
    seed = draw(st.integers(0, 2**16))
    inside = draw(st.booleans())
    return shape, dtype, seed, inside


@settings(quick, max_examples=150)
@given(boxes())
def test_range_table_is_exact(box):
    shape, dtype, seed, inside = box
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    table, count = RangeTable(array), 12
    margin = 0 if inside else 3
    ends = [np.sort(rng.integers(0, n + margin, (2, count)), axis=0) for n in shape]
    low, high = (table.bounds(which, [end for pair in ends for end in pair]) for which in (0, 1))
    assert low.dtype == high.dtype == (bool if dtype == "bool" else np.int64)
    for n in range(count):
        part = array[tuple(slice(a[n], b[n] + 1) if a[n] < size else slice(None) for (a, b), size in zip(ends, shape))]
        assert (low[n], high[n]) == (part.min(), part.max())


def test_range_table_keeps_64_bit_numbers():
    big = np.array([2**62, -(2**62), 0])
    assert [int(RangeTable(big).bounds(which, (0, 2))) for which in (0, 1)] == [-(2**62), 2**62]


def test_range_table_refuses_floats_and_nothing():
    with pytest.raises(TypeError, match="float64 would be rounded"):
        RangeTable(np.zeros(3))
    with pytest.raises(IndexError, match="without elements"):
        RangeTable(np.zeros(0, int)).bounds(0, (0, 1))


# --- a million tokens -------------------------------------------------------------------------------------------------


def documents(n: int, mean: int) -> np.ndarray:
    lengths = np.random.default_rng(0).integers(1, 2 * mean, 2 * n // mean)
    return np.repeat(np.arange(len(lengths)), lengths)[:n]


LONG = {
    "causal": lambda: mods.causal(),
    "window": lambda: mods.sliding_window(4096, 0),
    "document": lambda: mods.document(documents(MILLION, 2000)),
    "short documents": lambda: mods.document(documents(MILLION, 60)),
    "causal document": lambda: mods.causal() & mods.document(documents(MILLION, 2000)),
    "prefix": lambda: mods.prefix_lm(100_000),
}


@pytest.mark.parametrize("name", LONG)
def test_a_million_tokens_take_less_than_a_second(name):
    mod = LONG[name]()
    best = math.inf
    for _ in range(2):  # the second try forgives a machine that was busy
        start = time.process_time()
        mask = BlockMask.from_mod(mod, MILLION, MILLION)
        lists = mask.rows(), mask.cols()
        best = min(best, time.process_time() - start)
    assert best < 1
    assert lists[0].full.total == lists[1].full.total
    assert lists[0].partial.total == lists[1].partial.total
    i, j = np.random.default_rng(1).integers(0, 8192, (2, 2000))
    i[:1000] = np.minimum(j[:1000] + i[:1000] % 40, 8191)  # half of them near the diagonal
    listed = np.full(2000, EMPTY)
    for state, runs in zip((FULL, PARTIAL), lists[0]):
        for n in range(2000):
            own = slice(runs.indptr[i[n]], runs.indptr[i[n] + 1])
            if ((runs.start[own] <= j[n]) & (j[n] < runs.stop[own])).any():
                listed[n] = state
    assert np.array_equal(listed, mask.states(i, j))


def test_where_no_tile_can_be_ruled_out_memory_stays_small():
    """A million tiles, all PARTIAL: nothing the size of the grid is ever made."""
    tracemalloc.start()
    try:
        mask = BlockMask.from_mod(mods.dilated(2), 1 << 15, 1 << 15, 32, 32)
        runs = mask.rows().partial
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert runs.total == 1 << 20
    assert len(runs.start) == 1024
    assert peak < 64 * 2**20


# --- the rest of the face ---------------------------------------------------------------------------------------------


def test_repr_says_what_it_is():
    mask = BlockMask.from_mod(mods.causal(), 1024, 1024)
    assert repr(mask) == "<BlockMask 1024 x 1024: 8 x 8 tiles of 128 x 128, 56.2% kept>"
    assert "kept" not in repr(BlockMask.from_mod(mods.causal(), MILLION, MILLION))  # not worked out for a description
    assert "heads 3" in repr(BlockMask.from_dense(np.ones((3, 2, 2), bool), 8, 8))


def test_lines_of_runs():
    runs = BlockMask.from_mod(mods.causal(), 64, 64, 8, 8).rows().full
    part = runs.lines(3, 5)
    assert part.indptr.tolist() == [0, 1, 2]
    assert part.expand()[1].tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    ax = BlockMask.from_mod(mods.causal(), 64, 64, 8, 8).plot()
    assert ax.images[0].get_array().shape == (8, 8)
    assert BlockMask.from_mod(mods.causal(), MILLION, MILLION).plot(ax) is ax
    assert ax.images[-1].get_array().shape == (1024, 1024)


CAUSAL = BlockMask.from_mod(mods.causal(), 64, 64, 8, 8)
GRID = np.ones((4, 6), bool)
ERRORS: dict[type[Exception], dict[str, Callable[[], Any]]] = {
    ValueError: {
        "block_q: expected an integer from 1 .* got 0": lambda: BlockMask.from_mod(mods.causal(), 64, 64, 0, 8),
        "block: expected an integer of 1 or more, got 0": lambda: BlockMask.butterfly(64, 64, block=0),
        "q_offset.*shape \\(1, 1\\)": lambda: BlockMask.from_mod(mods.causal(), 64, 64, q_offset=[[1]]),
        "BlockMask.from_mod": lambda: BlockMask(mods.causal(), 64, 64),
        "depends on h.*heads=": lambda: BlockMask.from_mod(lambda b, h, q, k: k % 4 == h, 64, 64),
        "array array: expected heads = 4 entries along h, got 3": lambda: BlockMask.from_mod(
            mods.visible(np.ones((3, 64, 64), bool)), 64, 64, heads=4
        ),
        "kv_ids: expected batch = 2 entries along b, got 3": lambda: BlockMask.from_mod(
            mods.document(np.zeros((2, 9), int), np.zeros((3, 9), int)), 9, 9
        ),
        "expected n_k = 64 entries along k, got 60": lambda: BlockMask.from_mod(
            mods.visible(np.ones((64, 60), bool)), 64, 64
        ),
        "expected n_q = 64 entries along row, got 6": lambda: BlockMask.from_mod(
            mods.visible(np.ones((6, 64), bool)), 64, 64
        ),
        "grid: .* got \\(6,\\)": lambda: BlockMask.from_dense(GRID[0], 8, 8),
        "grid: .* shape": lambda: BlockMask.from_dense(GRID[None, None, None], 8, 8),
        "expected 5 tiles along q, for n_q = 33 in blocks of 8, got 4": lambda: BlockMask.from_dense(
            GRID, 8, 8, 33, 48
        ),
        "expected 5 tiles along k, for n_k = 40 in blocks of 8, got 6": lambda: BlockMask.from_dense(
            GRID, 8, 8, 32, 40
        ),
        "block_k": lambda: BlockMask.from_dense(GRID, 8, 0),
        "64 x 64 and 64 x 60.*must agree": lambda: CAUSAL & BlockMask.from_mod(mods.causal(), 64, 60, 8, 8),
        "heads = 2 and 3": lambda: (
            BlockMask.from_dense(np.ones((2, 8, 8), bool), 8, 8) | BlockMask.from_dense(np.ones((3, 8, 8), bool), 8, 8)
        ),
        "h: expected an integer of 0 or more": lambda: CAUSAL.rows(0, -1),
        "stride.*got 0": lambda: BlockMask.strided(64, 64, 0),
        "0 to stride_blocks = 4, got 5": lambda: BlockMask.fixed(64, 64, 4, 5),
        "odd.*got 2": lambda: BlockMask.bigbird(64, 64, window_blocks=2),
        "power of two, got 6": lambda: BlockMask.butterfly(64, 64, 6),
        "0 to n_k - 1 = 63, got 64 to 64": lambda: BlockMask.longformer(64, 64, 4, [64]),
        "window_tokens: .* 0 or more.*-4": lambda: BlockMask.longformer(64, 64, -4),
        "left_blocks: .* 0 or more.*-1": lambda: BlockMask.local(64, 64, -1),
    },
    TypeError: {
        "mask_mod: .* got a score mod": lambda: BlockMask.from_mod(mods.softcap(2), 64, 64),
        "got int": lambda: BlockMask.from_mod(3, 64, 64),
        "grid: expected dtype bool.*float64": lambda: BlockMask.from_dense(GRID * 1.0, 8, 8),
        "global_tokens: expected integers.*got dtype bool": lambda: BlockMask.longformer(64, 64, 4, np.arange(64) < 3),
        "unsupported operand": lambda: CAUSAL & 3,
    },
    IndexError: {"h = 2 is beyond the 2": lambda: BlockMask.from_dense(np.ones((2, 8, 8), bool), 8, 8).rows(0, 2)},
}


@pytest.mark.parametrize(("error", "text"), [(error, text) for error, made in ERRORS.items() for text in made])
def test_errors_say_what_would_fit(error, text):
    with pytest.raises(error, match=text):
        ERRORS[error][text]()


def test_constructors_name_their_units() -> None:
    """Blocks or tokens: with a window of 3 both are meant, by different papers."""
    constructors = ("local", "dilated", "strided", "fixed", "butterfly", "bigbird", "longformer")
    plain = {"n_q", "n_k", "block", "q_offset", "seed"}
    for name in constructors:
        own = set(inspect.signature(getattr(BlockMask, name)).parameters) - plain
        unit = "_tokens" if name == "longformer" else "_blocks"
        assert own and all(each.endswith(unit) for each in own), name

"""Faults in block masks: tile lists, patterns, bounds of arrays."""

from __future__ import annotations

from . import Fault

TESTS = ("tests/unit/test_block_mask.py", "tests/unit/test_wrapping.py", "tests/unit/test_io_model.py")

MODS = "flashkit/mods"
MASK, PATTERNS, RANGES, LISTS, TREE, PLACED = (
    f"{MODS}/{name}.py" for name in ("block_mask", "patterns", "ranges", "tile_lists", "quadtree", "placement")
)
OWN = "tests/unit/test_memory_safety_calls.py -k block_mask"

FAULTS = (
    Fault(
        "local: one block too many", PATTERNS,
        "(j <= i + right_blocks)",
        "(j <= i + right_blocks + 1)",
    ),
    Fault("dilated: the reach", PATTERNS, "<= step_blocks * reach_blocks)", "<= reach_blocks)"),
    Fault("strided: the window", PATTERNS, "(i - stride_blocks <= j)", "(i - stride_blocks + 1 < j)"),
    Fault("fixed: the summary", PATTERNS, "(j % segment >= own)", "(j % segment > own)"),
    Fault("butterfly: bits", PATTERNS, "(i // (2 << bit) == j // (2 << bit)) & ", ""),
    Fault(
        "butterfly: the greatest stride", PATTERNS,
        "1 << max(blocks - 1, 0).bit_length()",
        "1 << max(blocks - 2, 0).bit_length()",
    ),
    Fault("bigbird: blocks before the first", PATTERNS, "((i >= 0) & (i < global_blocks))", "(i < global_blocks)"),
    Fault(
        "bigbird: random blocks twice", PATTERNS,
        "free = np.delete(np.arange(tiles_k), np.concatenate(taken))",
        "free = np.arange(tiles_k)",
    ),
    Fault("bigbird: one seed", PATTERNS, "rng = np.random.default_rng(seed)", "rng = np.random.default_rng(0)"),
    Fault("longformer: the window's half", PATTERNS, '"reach": window_tokens // 2 *', '"reach": window_tokens *'),
    Fault(
        "longformer: queries before the first", PATTERNS,
        "(q >= 0) & (q <= last) & is_global",
        "(q <= last) & is_global",
        "tests/unit/test_block_mask.py -k longformer",
    ),
    Fault("longformer: queries after the last", PATTERNS, "(q >= 0) & (q <= last) & is_global", "(q >= 0) & is_global"),
    Fault(
        "the last tile reaches past the keys", MASK,
        '"k0": j * width, "k1": np.minimum(j * width + width, self.n_k) - 1,',
        '"k0": j * width, "k1": j * width + width - 1,',
    ),
    Fault(
        "the last tile reaches past the queries", MASK,
        '"row1": np.minimum(i * height + height, self.n_q) - 1',
        '"row1": i * height + height - 1',
    ),
    Fault("the first tile of a larger square", MASK, '"row0": i * height,', '"row0": i * self.block_q,'),
    Fault(
        "batch and head of a group", MASK,
        "b, h = np.divmod(group, self.heads) if self.batch * self.heads > 1 else (0, 0)",
        "b, h = np.divmod(group, self.batch) if self.batch * self.heads > 1 else (0, 0)",
    ),
    Fault(
        "pairs past the end are counted", MASK,
        "return int(np.count_nonzero(seen & (row < self.n_q) & (k < self.n_k)))",
        "return int(np.count_nonzero(seen & (row < self.n_q)))",
    ),
    Fault("FULL pairs of the last tile", MASK, "(np.minimum(past, self.n_k) - first)", "(past - first)"),
    Fault(
        "joined blocks", MASK,
        "block_q, block_k = math.gcd(self.block_q, other.block_q), math.gcd(self.block_k, other.block_k)",
        "block_q, block_k = self.block_q, self.block_k",
    ),
    Fault("joined heads", MASK, "counts.append(max(a, b))", "counts.append(a)"),
    Fault("a mask's own arrays", MASK, "mod = self.mod.snapshot(whole=True)", "mod = self.mod.snapshot()", OWN),
    Fault("arrays stay writable", MASK, "array.flags.writeable = False\n", "pass\n", OWN),
    Fault(
        "from_mod: the default offset", MASK,
        "n_k - n_q if q_offset is None else q_offset",
        "0 if q_offset is None else q_offset",
    ),
    Fault(
        "from_dense: positions for rows", MASK,
        "tile = (*leading, expr.ROW // block_q, k // block_k)",
        "tile = (*leading, expr.ROW // block_k, k // block_k)",
    ),
    Fault(
        "lines of a head", MASK,
        "first = (position[0] * self.heads + position[1]) * lines",
        "first = (position[0] + position[1]) * lines",
    ),
    Fault(
        "to_dense: the last tile of a run", MASK,
        "grid[line, runs.stop] -= state",
        "grid[line, runs.stop - 1] -= state",
    ),
    Fault("ranges: an odd length", RANGES, "if len(finer) % 2 else", "if len(finer) % 2 and len(finer) > 3 else"),
    Fault(
        "ranges: the last node", RANGES,
        "(high, single | (several & (high % 2 == 0)))",
        "(high, single | (several & (high % 2 == 1)))",
    ),
    Fault("ranges: bools", RANGES, "neutral = which == 0 if logical else", "neutral = which == 1 if logical else"),
    Fault(
        "runs that touch", LISTS,
        "opens[1:-1] = (line[1:] != line[:-1]) | (start[1:] != stop[:-1])",
        "opens[1:-1] = line[1:] != line[:-1]",
    ),
    Fault(
        "runs of the next line", LISTS,
        "opens[1:-1] = (line[1:] != line[:-1]) | (start[1:] != stop[:-1])",
        "opens[1:-1] = start[1:] != stop[:-1]",
    ),
    Fault("finer runs end past the line", LISTS, "np.minimum(stop << level, length)", "(stop << level)"),
    Fault(
        "the total of many tiles", LISTS,
        "return int((self.stop - self.start).sum(dtype=np.int64))",
        "return int((self.stop - self.start).sum(dtype=np.int16))",
    ),
    Fault(
        "squares: outside", TREE,
        "inside = (four[1] << level < tiles[0]) & (four[2] << level < tiles[1])",
        "inside = four[1] << level < tiles[0]",
    ),
    Fault(
        "columns of other lengths", TREE,
        "across, along = (2, 1) if by_column else (1, 2)",
        "across, along = (2, 1)",
    ),
    Fault(
        "placed: offsets of more than 32 bits", PLACED,
        "offset = small if np.array_equal(small, offset) else offset",
        "offset = small",
    ),
    Fault(
        "placed: an argument of that name", PLACED,
        "while name in mod.params or name in mod.arrays:",
        "while name in mod.params:",
    ),
    Fault("entries: arrays that differ", PLACED, "if n < count or (given is None and n != count):", "if n < count:"),
    Fault("entries: one entry stands for all", PLACED, "    if count == 1:\n", "    if count == 0:\n"),
)  # fmt: skip

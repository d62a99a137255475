"""Patterns of the literature as block masks.

In blocks of one size, i = q // block and j = k // block, at the positions that BlockMask.from_mod gives the queries.
Those that the papers use with causal models are cut at the diagonal block; `& mods.causal()` cuts within it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from . import expr
from . import library as mods
from .expr import Expr


def integer(name: str, value: Any, least: int) -> int:
    """The value as an int, or a ValueError that says what is wanted."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} is an integer of {least} or more, not {value!r}")
    return number


class Patterns:
    """The constructors that BlockMask inherits."""

    from_mod: Callable[..., Self]
    from_dense: Callable[..., Self]

    @classmethod
    def local(cls, n_q: int, n_k: int, left: int, right: int = 0, block: int = 128, q_offset: Any = None) -> Self:
        """Each block sees `left` blocks before it, itself and `right` after it."""
        return cls._blockwise(
            lambda i, j: (i - left <= j) & (j <= i + right), n_q, n_k, block, q_offset, left=left, right=right
        )

    @classmethod
    def dilated(cls, n_q: int, n_k: int, step: int, reach: int, block: int = 128, q_offset: Any = None) -> Self:
        """Each block sees those at multiples of `step` blocks from it, `reach` of them to each side: the dilated window
        of Longformer (Beltagy et al. 2020, arXiv 2004.05150, section 3.1), in blocks."""
        integer("step", step, 1)
        seen = lambda i, j: ((i - j) % step == 0) & (abs(i - j) <= step * reach)
        return cls._blockwise(seen, n_q, n_k, block, q_offset, reach=reach)

    @classmethod
    def strided(cls, n_q: int, n_k: int, stride: int, block: int = 128, q_offset: Any = None) -> Self:
        """The last `stride` blocks and every stride-th one before: the strided pattern of Sparse Transformer (Child et
        al. 2019, arXiv 1904.10509, section 4.3), both of its sets in one mask, in blocks."""
        integer("stride", stride, 1)
        seen = lambda i, j: (j <= i) & ((i - stride <= j) | ((i - j) % stride == 0))
        return cls._blockwise(seen, n_q, n_k, block, q_offset)

    @classmethod
    def fixed(
        cls, n_q: int, n_k: int, stride: int, summary: int = 1, block: int = 128, q_offset: Any = None
    ) -> Self:
        """The own segment of `stride` blocks and the last `summary` blocks of each earlier one: the fixed pattern of
        Sparse Transformer (arXiv 1904.10509, section 4.3; its l and c), both of its sets in one mask, in blocks."""
        integer("stride", stride, 1)
        if not 0 <= summary <= stride:
            raise ValueError(f"summary is a number of blocks of a segment, 0 to stride = {stride}; got {summary}")
        seen = lambda i, j: (j <= i) & ((i // stride == j // stride) | (j % stride >= stride - summary))
        return cls._blockwise(seen, n_q, n_k, block, q_offset, summary=summary)

    @classmethod
    def butterfly(
        cls, n_q: int, n_k: int, max_stride: int | None = None, block: int = 128, q_offset: Any = None
    ) -> Self:
        """Flat block butterfly of Pixelated Butterfly (Dao et al. 2022, arXiv 2112.00029): a block sees
        itself and those whose number differs from its own in one bit below `max_stride`, a power of two; all bits where
        not given."""
        blocks = -(-max(integer("n_q", n_q, 0), integer("n_k", n_k, 0)) // integer("block", block, 1))
        largest = 1 << max(blocks - 1, 0).bit_length() if max_stride is None else integer("max_stride", max_stride, 1)
        if largest & (largest - 1):
            raise ValueError(f"max_stride is a power of two, not {max_stride}")

        def seen(i: Expr, j: Expr) -> Expr:
            result = i == j
            for bit in range(largest.bit_length() - 1):
                # i ^ j == 1 << bit, said in a way that has bounds over a range of blocks.
                result = result | ((i // (2 << bit) == j // (2 << bit)) & (abs(i - j) == 1 << bit))
            return result

        return cls._blockwise(seen, n_q, n_k, block, q_offset)

    @classmethod
    def bigbird(
        cls, n_q: int, n_k: int, window: int = 3, global_blocks: int = 2, random_blocks: int = 3, seed: int = 0,
        block: int = 128, q_offset: Any = None,
    ) -> Self:  # fmt: skip
        """Big Bird (Zaheer et al. 2020, arXiv 2007.14062, section 2), in blocks: a window of `window` blocks around
        the own one, the first `global_blocks`, which all see and which see all, and for each other row `random_blocks`
        of the rest, drawn by `seed`."""
        if integer("window", window, 1) % 2 == 0:
            raise ValueError(f"window is an odd number of blocks, so that it has a middle; got {window}")
        integer("random_blocks", random_blocks, 0)
        seen = lambda i, j: (abs(i - j) <= window // 2) | ((i >= 0) & (i < global_blocks)) | (j < global_blocks)
        base: Any = cls._blockwise(seen, n_q, n_k, block, q_offset, global_blocks=global_blocks)
        rng = np.random.default_rng(seed)
        (tiles_q, tiles_k), rows = base.tiles, base.rows()
        grid = np.zeros((tiles_q, tiles_k), bool)
        for row in range(tiles_q):
            taken = [runs.lines(row, row + 1).expand()[1] for runs in rows]
            free = np.delete(np.arange(tiles_k), np.concatenate(taken))
            grid[row, free[rng.choice(len(free), min(random_blocks, len(free)), replace=False)]] = True
        return base | cls.from_dense(grid, block, block, n_q, n_k)

    @classmethod
    def longformer(
        cls, n_q: int, n_k: int, window: int, global_tokens: Any = (), dilation: int = 1,
        block: int = 128, q_offset: Any = None,
    ) -> Self:  # fmt: skip
        """Longformer (Beltagy et al. 2020, arXiv 2004.05150, section 3.1), in tokens: window // 2 of them to each side,
        `dilation` apart, and the positions `global_tokens`, which all see and which see all."""
        integer("dilation", dilation, 1)
        tokens = np.asarray(global_tokens, np.int64).reshape(-1)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= n_k):
            given = f"{tokens.min()} to {tokens.max()}"
            raise ValueError(f"global_tokens are positions from 0 to n_k - 1 = {n_k - 1}; got {given}")
        is_global = np.zeros(max(n_k, 1), bool)
        is_global[tokens] = True

        def seen(b: Expr, h: Expr, q: Expr, k: Expr, *, reach: Expr, last: Expr, is_global: expr.Array) -> Expr:
            near = (abs(q - k) <= reach) & ((q - k) % dilation == 0)
            return near | is_global[k] | ((q >= 0) & (q <= last) & is_global[expr.clip(q, 0, last)])

        values = {"reach": window // 2 * dilation, "last": len(is_global) - 1, "is_global": is_global}
        return cls.from_mod(mods.mask(seen, **values), n_q, n_k, block, block, q_offset)

    @classmethod
    def _blockwise(
        cls, seen: Callable[..., Expr], n_q: int, n_k: int, block: int, q_offset: Any, **counts: int
    ) -> Self:
        """The mask of a rule on the numbers of blocks; counts: arguments of the pattern that must be 0 or more."""
        for name, value in counts.items():
            integer(name, value, 0)
        block = integer("block", block, 1)
        return cls.from_mod(lambda b, h, q, k: seen(q // block, k // block), n_q, n_k, block, block, q_offset)

"""Block-sparse patterns of the literature, as constructors of BlockMask.

They are defined in blocks of one size, i = q // block and j = k // block, at the positions that BlockMask.from_mod
gives the queries. Patterns that their papers use with causal models end at the diagonal block; `& mods.causal()` masks
within it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from ..numeric import integer
from ..options import F, filled
from . import expr
from .expr import Expr
from .mod import mask
from .tracing import as_array

_SIZES = """Parameters
----------
n_q, n_k
    Numbers of queries and keys."""

_BLOCKS = """block
    Queries and keys of a block, and of a tile.
q_offset
    Position of the first query; n_k - n_q by default.

Returns
-------
BlockMask"""


def _documented(function: F) -> F:
    """A constructor with what the docstrings of all have in common for {sizes} and {blocks}."""
    return filled(filled(function, "sizes", _SIZES), "blocks", _BLOCKS)


class Patterns:
    """The constructors that BlockMask inherits."""

    from_mod: Callable[..., Self]
    from_dense: Callable[..., Self]

    @classmethod
    @_documented
    def local(
        cls, n_q: int, n_k: int, left_blocks: int, right_blocks: int = 0, block: int = 128, q_offset: Any = None
    ) -> Self:
        """A block sees `left_blocks` blocks before it, itself, and `right_blocks` blocks after it.

        {sizes}
        left_blocks, right_blocks
            Numbers of blocks, 0 or more.
        {blocks}

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.local(512, 512, left_blocks=1).to_dense()[0, 0]
        array([[2, 0, 0, 0],
               [2, 2, 0, 0],
               [0, 2, 2, 0],
               [0, 0, 2, 2]], dtype=uint8)
        """
        seen = lambda i, j: (i - left_blocks <= j) & (j <= i + right_blocks)
        counts = {"left_blocks": left_blocks, "right_blocks": right_blocks}
        return cls._blockwise(seen, n_q, n_k, block, q_offset, **counts)

    @classmethod
    @_documented
    def dilated(
        cls, n_q: int, n_k: int, step_blocks: int, reach_blocks: int, block: int = 128, q_offset: Any = None
    ) -> Self:
        """A dilated window: a block sees `reach_blocks` blocks to each side, at multiples of `step_blocks` from it.

        {sizes}
        step_blocks
            Distance between visible blocks, 1 or more.
        reach_blocks
            Number of visible blocks to each side, 0 or more.
        {blocks}

        References
        ----------
        Beltagy et al., "Longformer", 2020, arXiv 2004.05150, section 3.1, here in blocks.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.dilated(512, 512, step_blocks=2, reach_blocks=1).to_dense()[0, 0]
        array([[2, 0, 2, 0],
               [0, 2, 0, 2],
               [2, 0, 2, 0],
               [0, 2, 0, 2]], dtype=uint8)
        """
        integer("step_blocks", step_blocks, 1)
        seen = lambda i, j: ((i - j) % step_blocks == 0) & (abs(i - j) <= step_blocks * reach_blocks)
        return cls._blockwise(seen, n_q, n_k, block, q_offset, reach_blocks=reach_blocks)

    @classmethod
    @_documented
    def strided(cls, n_q: int, n_k: int, stride_blocks: int, block: int = 128, q_offset: Any = None) -> Self:
        """The strided pattern of Sparse Transformer: the last `stride_blocks` blocks, and every stride-th block before.

        {sizes}
        stride_blocks
            1 or more.
        {blocks}

        References
        ----------
        Child et al., "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509, section 4.3: both of
        its sets in one mask, in blocks.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.strided(640, 640, stride_blocks=2).to_dense()[0, 0]
        array([[2, 0, 0, 0, 0],
               [2, 2, 0, 0, 0],
               [2, 2, 2, 0, 0],
               [0, 2, 2, 2, 0],
               [2, 0, 2, 2, 2]], dtype=uint8)
        """
        integer("stride_blocks", stride_blocks, 1)
        seen = lambda i, j: (j <= i) & ((i - stride_blocks <= j) | ((i - j) % stride_blocks == 0))
        return cls._blockwise(seen, n_q, n_k, block, q_offset)

    @classmethod
    @_documented
    def fixed(
        cls, n_q: int, n_k: int, stride_blocks: int, summary_blocks: int = 1, block: int = 128, q_offset: Any = None
    ) -> Self:
        """The fixed pattern of Sparse Transformer: the own segment, and the last blocks of each earlier segment.

        {sizes}
        stride_blocks
            Blocks of a segment (l in the paper), 1 or more.
        summary_blocks
            Visible blocks at the end of an earlier segment (c in the paper), 0 to stride.
        {blocks}

        References
        ----------
        Child et al., "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509, section 4.3: both of
        its sets in one mask, in blocks.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.fixed(640, 640, stride_blocks=2).to_dense()[0, 0]
        array([[2, 0, 0, 0, 0],
               [2, 2, 0, 0, 0],
               [0, 2, 2, 0, 0],
               [0, 2, 2, 2, 0],
               [0, 2, 0, 2, 2]], dtype=uint8)
        """
        integer("stride_blocks", stride_blocks, 1)
        if not 0 <= summary_blocks <= stride_blocks:
            raise ValueError(f"summary_blocks: expected 0 to stride_blocks = {stride_blocks}, got {summary_blocks}")
        segment, own = stride_blocks, stride_blocks - summary_blocks
        seen = lambda i, j: (j <= i) & ((i // segment == j // segment) | (j % segment >= own))
        return cls._blockwise(seen, n_q, n_k, block, q_offset, summary_blocks=summary_blocks)

    @classmethod
    @_documented
    def butterfly(
        cls, n_q: int, n_k: int, max_stride_blocks: int | None = None, block: int = 128, q_offset: Any = None
    ) -> Self:
        """The flat block butterfly: a block sees itself and the blocks whose index differs from its own in one bit.

        {sizes}
        max_stride_blocks
            A power of two; the bits below it count. All bits by default.
        {blocks}

        References
        ----------
        Dao et al., "Pixelated Butterfly", 2022, arXiv 2112.00029, section 3.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.butterfly(512, 512).to_dense()[0, 0]
        array([[2, 2, 2, 0],
               [2, 2, 0, 2],
               [2, 0, 2, 2],
               [0, 2, 2, 2]], dtype=uint8)
        """
        blocks = -(-max(integer("n_q", n_q, 0), integer("n_k", n_k, 0)) // integer("block", block, 1))
        largest = 1 << max(blocks - 1, 0).bit_length()
        if max_stride_blocks is not None:
            largest = integer("max_stride_blocks", max_stride_blocks, 1)
        if largest & (largest - 1):
            raise ValueError(f"max_stride_blocks: expected a power of two, got {max_stride_blocks}")

        def seen(i: Expr, j: Expr) -> Expr:
            result = i == j
            for bit in range(largest.bit_length() - 1):
                # i ^ j == 1 << bit, in operations that have interval bounds.
                result = result | ((i // (2 << bit) == j // (2 << bit)) & (abs(i - j) == 1 << bit))
            return result

        return cls._blockwise(seen, n_q, n_k, block, q_offset)

    @classmethod
    @_documented
    def bigbird(
        cls, n_q: int, n_k: int, window_blocks: int = 3, global_blocks: int = 2, random_blocks: int = 3, seed: int = 0,
        block: int = 128, q_offset: Any = None,
    ) -> Self:  # fmt: skip
        """Big Bird: a window of blocks, global blocks, and random blocks in each row.

        {sizes}
        window_blocks
            Blocks of the window around the own block, an odd number.
        global_blocks
            The first blocks that see all and are seen by all.
        random_blocks
            Further visible blocks in each row, or as many as are left.
        seed
            Of the random blocks.
        {blocks}

        References
        ----------
        Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, arXiv 2007.14062, section 2, here in blocks.

        Examples
        --------
        >>> import flashkit
        >>> mask = flashkit.BlockMask.bigbird(1024, 1024, global_blocks=1, random_blocks=1)
        >>> (mask.to_dense()[0, 0] > 0).sum(axis=1)
        array([8, 4, 5, 5, 5, 5, 5, 4])
        """
        if integer("window_blocks", window_blocks, 1) % 2 == 0:
            raise ValueError(f"window_blocks: expected an odd number, so that it has a middle, got {window_blocks}")
        integer("random_blocks", random_blocks, 0)
        seen = lambda i, j: (abs(i - j) <= window_blocks // 2) | ((i >= 0) & (i < global_blocks)) | (j < global_blocks)
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
    @_documented
    def longformer(
        cls, n_q: int, n_k: int, window_tokens: int, global_tokens: Any = (), dilation_tokens: int = 1,
        block: int = 128, q_offset: Any = None,
    ) -> Self:  # fmt: skip
        """Longformer: a (dilated) sliding window in tokens, and global tokens.

        {sizes}
        window_tokens
            A token sees window // 2 tokens to each side.
        global_tokens
            Positions, 0 to n_k - 1, that see all and are seen by all.
        dilation_tokens
            Distance between the tokens of the window, 1 or more.
        {blocks}

        References
        ----------
        Beltagy et al., "Longformer", 2020, arXiv 2004.05150, section 3.1.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.longformer(512, 512, window_tokens=64, global_tokens=[0]).visible_pairs
        33182
        """
        integer("dilation_tokens", dilation_tokens, 1)
        window_tokens = integer("window_tokens", window_tokens, 0)
        tokens = as_array("global_tokens", global_tokens).reshape(-1)
        if tokens.size and tokens.dtype.kind not in "iu":
            raise TypeError(f"global_tokens: expected integers, the positions of tokens, got dtype {tokens.dtype}")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= n_k):
            outside = f"{tokens.min()} to {tokens.max()}"
            raise ValueError(f"global_tokens: expected positions from 0 to n_k - 1 = {n_k - 1}, got {outside}")
        is_global = np.zeros(max(n_k, 1), bool)
        is_global[tokens.astype(np.int64)] = True

        def seen(b: Expr, h: Expr, q: Expr, k: Expr, *, reach: Expr, last: Expr, is_global: expr.Array) -> Expr:
            near = (abs(q - k) <= reach) & ((q - k) % dilation_tokens == 0)
            return near | is_global[k] | ((q >= 0) & (q <= last) & is_global[expr.clip(q, 0, last)])

        values = {"reach": window_tokens // 2 * dilation_tokens, "last": len(is_global) - 1, "is_global": is_global}
        return cls.from_mod(mask(seen, **values), n_q, n_k, block, block, q_offset)

    @classmethod
    def _blockwise(
        cls, seen: Callable[..., Expr], n_q: int, n_k: int, block: int, q_offset: Any, **counts: int
    ) -> Self:
        """The mask of a rule on block indices; counts: arguments of the pattern that must be 0 or more."""
        for name, value in counts.items():
            integer(name, value, 0)
        block = integer("block", block, 1)
        return cls.from_mod(lambda b, h, q, k: seen(q // block, k // block), n_q, n_k, block, block, q_offset)

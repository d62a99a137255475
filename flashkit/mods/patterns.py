"""Block-sparse patterns of the literature, as constructors of BlockMask.

They are defined in blocks of one size, i = q // block and j = k // block, at the positions that BlockMask.from_mod
gives the queries. Patterns that their papers use with causal models end at the diagonal block; `& mods.causal()` masks
within it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from . import expr
from .expr import Expr
from .mod import mask


def integer(name: str, value: Any, least: int) -> int:
    """The value as an int; ValueError if it is no integer or below `least`."""
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
        """A block sees `left` blocks before it, itself, and `right` blocks after it.

        Parameters
        ----------
        n_q, n_k
            Numbers of queries and keys.
        left, right
            Numbers of blocks, 0 or more.
        block
            Queries and keys of a block, and of a tile.
        q_offset
            Position of the first query; n_k - n_q by default.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError
            A number does not fit.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.local(512, 512, left=1).to_dense()[0, 0]
        array([[2, 0, 0, 0],
               [2, 2, 0, 0],
               [0, 2, 2, 0],
               [0, 0, 2, 2]], dtype=uint8)
        """
        return cls._blockwise(
            lambda i, j: (i - left <= j) & (j <= i + right), n_q, n_k, block, q_offset, left=left, right=right
        )

    @classmethod
    def dilated(cls, n_q: int, n_k: int, step: int, reach: int, block: int = 128, q_offset: Any = None) -> Self:
        """A dilated window: a block sees those at multiples of `step` blocks from it, `reach` of them to each side.

        Parameters
        ----------
        n_q, n_k
            Numbers of queries and keys.
        step
            Distance between visible blocks, 1 or more.
        reach
            Number of visible blocks to each side, 0 or more.
        block
            Queries and keys of a block, and of a tile.
        q_offset
            Position of the first query; n_k - n_q by default.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError
            A number does not fit.

        References
        ----------
        Beltagy et al., "Longformer", 2020, arXiv 2004.05150, section 3.1, here in blocks.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.dilated(512, 512, step=2, reach=1).to_dense()[0, 0]
        array([[2, 0, 2, 0],
               [0, 2, 0, 2],
               [2, 0, 2, 0],
               [0, 2, 0, 2]], dtype=uint8)
        """
        integer("step", step, 1)
        seen = lambda i, j: ((i - j) % step == 0) & (abs(i - j) <= step * reach)
        return cls._blockwise(seen, n_q, n_k, block, q_offset, reach=reach)

    @classmethod
    def strided(cls, n_q: int, n_k: int, stride: int, block: int = 128, q_offset: Any = None) -> Self:
        """The strided pattern of Sparse Transformer: the last `stride` blocks, and every stride-th block before.

        Parameters
        ----------
        n_q, n_k
            Numbers of queries and keys.
        stride
            1 or more.
        block
            Queries and keys of a block, and of a tile.
        q_offset
            Position of the first query; n_k - n_q by default.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError
            A number does not fit.

        References
        ----------
        Child et al., "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509, section 4.3: both of
        its sets in one mask, in blocks.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.strided(640, 640, stride=2).to_dense()[0, 0]
        array([[2, 0, 0, 0, 0],
               [2, 2, 0, 0, 0],
               [2, 2, 2, 0, 0],
               [0, 2, 2, 2, 0],
               [2, 0, 2, 2, 2]], dtype=uint8)
        """
        integer("stride", stride, 1)
        seen = lambda i, j: (j <= i) & ((i - stride <= j) | ((i - j) % stride == 0))
        return cls._blockwise(seen, n_q, n_k, block, q_offset)

    @classmethod
    def fixed(
        cls, n_q: int, n_k: int, stride: int, summary: int = 1, block: int = 128, q_offset: Any = None
    ) -> Self:
        """The fixed pattern of Sparse Transformer: the own segment, and the last blocks of each earlier segment.

        Parameters
        ----------
        n_q, n_k
            Numbers of queries and keys.
        stride
            Blocks of a segment (l in the paper), 1 or more.
        summary
            Visible blocks at the end of an earlier segment (c in the paper), 0 to stride.
        block
            Queries and keys of a block, and of a tile.
        q_offset
            Position of the first query; n_k - n_q by default.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError
            A number does not fit.

        References
        ----------
        Child et al., "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509, section 4.3: both of
        its sets in one mask, in blocks.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.fixed(640, 640, stride=2).to_dense()[0, 0]
        array([[2, 0, 0, 0, 0],
               [2, 2, 0, 0, 0],
               [0, 2, 2, 0, 0],
               [0, 2, 2, 2, 0],
               [0, 2, 0, 2, 2]], dtype=uint8)
        """
        integer("stride", stride, 1)
        if not 0 <= summary <= stride:
            raise ValueError(f"summary is a number of blocks of a segment, 0 to stride = {stride}; got {summary}")
        seen = lambda i, j: (j <= i) & ((i // stride == j // stride) | (j % stride >= stride - summary))
        return cls._blockwise(seen, n_q, n_k, block, q_offset, summary=summary)

    @classmethod
    def butterfly(
        cls, n_q: int, n_k: int, max_stride: int | None = None, block: int = 128, q_offset: Any = None
    ) -> Self:
        """The flat block butterfly: a block sees itself and the blocks whose index differs from its own in one bit.

        Parameters
        ----------
        n_q, n_k
            Numbers of queries and keys.
        max_stride
            A power of two; the bits below it count. All bits by default.
        block
            Queries and keys of a block, and of a tile.
        q_offset
            Position of the first query; n_k - n_q by default.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError
            A number does not fit.

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
        largest = 1 << max(blocks - 1, 0).bit_length() if max_stride is None else integer("max_stride", max_stride, 1)
        if largest & (largest - 1):
            raise ValueError(f"max_stride is a power of two, not {max_stride}")

        def seen(i: Expr, j: Expr) -> Expr:
            result = i == j
            for bit in range(largest.bit_length() - 1):
                # i ^ j == 1 << bit, in operations that have interval bounds.
                result = result | ((i // (2 << bit) == j // (2 << bit)) & (abs(i - j) == 1 << bit))
            return result

        return cls._blockwise(seen, n_q, n_k, block, q_offset)

    @classmethod
    def bigbird(
        cls, n_q: int, n_k: int, window: int = 3, global_blocks: int = 2, random_blocks: int = 3, seed: int = 0,
        block: int = 128, q_offset: Any = None,
    ) -> Self:  # fmt: skip
        """Big Bird: a window of blocks, global blocks, and random blocks in each row.

        Parameters
        ----------
        n_q, n_k
            Numbers of queries and keys.
        window
            Blocks of the window around the own block, an odd number.
        global_blocks
            The first blocks that see all and are seen by all.
        random_blocks
            Further visible blocks in each row, or as many as are left.
        seed
            Of the random blocks.
        block
            Queries and keys of a block, and of a tile.
        q_offset
            Position of the first query; n_k - n_q by default.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError
            A number does not fit.

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
        """Longformer: a (dilated) sliding window in tokens, and global tokens.

        Parameters
        ----------
        n_q, n_k
            Numbers of queries and keys.
        window
            A token sees window // 2 tokens to each side.
        global_tokens
            Positions, 0 to n_k - 1, that see all and are seen by all.
        dilation
            Distance between the tokens of the window, 1 or more.
        block
            Queries and keys of a block, and of a tile.
        q_offset
            Position of the first query; n_k - n_q by default.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError
            A number does not fit.

        References
        ----------
        Beltagy et al., "Longformer", 2020, arXiv 2004.05150, section 3.1.

        Examples
        --------
        >>> import flashkit
        >>> flashkit.BlockMask.longformer(512, 512, window=64, global_tokens=[0]).visible_pairs
        33182
        """
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

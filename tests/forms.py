"""The other forms of a call: padded batches, packed sequences, keys in pages.

A call in such a form is made from one on rectangles, in which lengths hide what the form leaves out. That one is what
the definition computes, so that a mistake in reading the form cannot hide in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

TAIL = 3
"""Tokens of packed arrays behind the last sequence."""


class Packed(NamedTuple):
    """Sequences that follow each other: rows of q and k of each, and where they begin."""

    counts: dict[str, np.ndarray]
    begins: dict[str, np.ndarray]
    most: dict[str, int]

    @classmethod
    def of(cls, rng: np.random.Generator, batch: int, n_q: int, n_k: int) -> Packed:
        most = {"q": n_q, "k": n_k}
        counts = {name: lengths_of(rng, batch, n) for name, n in most.items()}
        return cls(counts, {name: np.concatenate([[0], np.cumsum(x)]) for name, x in counts.items()}, most)

    def flat(self, of: str, x: np.ndarray, fill: float) -> np.ndarray:
        """(B, H, N, ...) as (T, H, ...), with `fill` in the tail."""
        parts = [each[:, :n] for each, n in zip(x, self.counts[of])]
        tail = np.full((x.shape[1], TAIL, *x.shape[3:]), fill, x.dtype)
        return np.concatenate([*parts, tail], axis=1).swapaxes(0, 1)

    def square(self, of: str, x: np.ndarray, fill: Any = 0) -> np.ndarray:
        """Back, with `fill` (a number, or one for each head) where the rectangle has more, as the tail has to have."""
        begins, x = self.begins[of], x.swapaxes(0, 1)
        found = np.empty((len(begins) - 1, x.shape[0], self.most[of], *x.shape[2:]), x.dtype)
        found[...] = fill
        for b, (begin, end) in enumerate(itertools.pairwise(begins)):
            found[b, :, : end - begin] = x[:, begin:end]
        tail = x[:, begins[-1] :].astype(np.float64)  # a sink's log-sum-exp comes from base 2, rounded
        np.testing.assert_allclose(tail, np.broadcast_to(fill, tail.shape), 2.0**-22, err_msg="the tail")
        return found


def lengths_of(rng: np.random.Generator, batch: int, n: int) -> np.ndarray:
    """One sequence as long as the rectangle, one empty where there are three, others between."""
    lengths = rng.integers(n // 2, n + 1, batch)
    lengths[0] = n
    lengths[2:3] = 0
    return lengths


PAGE = 5
"""Keys of a page."""


def paged(
    rng: np.random.Generator, lengths: np.ndarray, n_k: int, page: int = PAGE
) -> tuple[dict[str, Any], Callable[..., np.ndarray]]:
    """The table of pages, and the function that puts keys into a pool (pages, page, H, D) full of NaN."""
    batch, width = len(lengths), -(-n_k // page) + 1
    numbers = rng.permutation(batch * width + 2)[: batch * width].reshape(batch, width)
    used = np.arange(width) * page < lengths[:, None]
    unused = rng.choice([-1, -1, batch * width + 2, -(2**63), 2**63 - 1])

    def pool(x: np.ndarray) -> np.ndarray:
        found = np.full((batch * width + 2, page, x.shape[1], x.shape[3]), np.nan, x.dtype)
        for b, n in enumerate(lengths):
            for first in range(0, n, page):
                there = x[b, :, first : min(first + page, n)].swapaxes(0, 1)
                found[numbers[b, first // page], : len(there)] = there
        return found

    return {"page_table": np.where(used, numbers, unused), "kv_lengths": lengths}, pool

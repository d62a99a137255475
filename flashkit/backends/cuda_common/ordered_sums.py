"""Sums whose bits do not depend on the order of their terms: integers, in a unit that follows from the greatest term.

A kernel runs twice: first it finds the greatest finite term of each array of sums, then it adds. The memory of an array
is one word for the bits of that term, as a float64, and one for each sum, or two for float64: the second has what the
first rounds off. kernels/common/values.cuh does the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BITS = 60
"""A sum stays within 2^BITS units, first words begin at 2^(BITS + 1): bit BITS + 2 says that a term was not finite."""

_START, _NOT_FINITE = 2 ** (BITS + 1), 2 ** (BITS + 2)


def memory(sums: Any) -> Any:
    """The memory for an array, of which nothing has been added."""
    import cupy

    made = cupy.zeros(1 + sums.size * _words(sums), np.int64)
    made[1 :: _words(sums)] = _START
    return made


def _words(sums: Any) -> int:
    """Of a sum."""
    return int(sums.dtype.itemsize) // 4


def total(words: Any, sums: Any, log2_terms: int) -> None:
    """Write the sums, of at most 2^log2_terms terms each; NaN where a term was not finite."""
    exponent = np.minimum(np.maximum((words[:1] >> 52) + (log2_terms - BITS - 1022), -1000), 1000)
    high = words[1 :: _words(sums)]
    found = ((high & (_NOT_FINITE - 1)) - _START).astype(np.float64)
    if _words(sums) == 2:
        found = found + words[2::2].astype(np.float64) * 2.0 ** (log2_terms - BITS)
    found = np.ldexp(found, exponent.astype(np.int32)) + 0.0 / (1.0 - (high >> (BITS + 2)))  # 0 or NaN
    sums[...] = found.reshape(sums.shape)

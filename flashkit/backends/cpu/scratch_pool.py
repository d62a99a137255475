"""Scratch memory that calls borrow and return: fresh pages cost more than a small call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

MAX_BYTES = 2**27
"""Memory of more bytes than this is not kept for the next call."""


class Scratch:
    """Memory for all threads of a call, from an address that is a multiple of 64 on."""

    __slots__ = ("address", "array", "size")

    def __init__(self, size: int) -> None:
        self.array, self.size = np.empty(size + 64, np.uint8), size
        start = int(self.array.__array_interface__["data"][0])
        self.address = start + -start % 64


_free: deque[Scratch] = deque(maxlen=16)


def acquire(size: int) -> Scratch:
    """Memory of at least this size, the caller's own until `release`. Free memory that is too small is dropped."""
    try:
        scratch = _free.pop()
    except IndexError:
        return Scratch(size)
    return scratch if scratch.size >= size else Scratch(size)


def release(scratch: Scratch) -> None:
    """Give memory back, for other calls."""
    if scratch.size <= MAX_BYTES:
        _free.append(scratch)


@contextmanager
def borrowed(size: int) -> Iterator[np.ndarray]:
    """Memory of `size` bytes, as an array."""
    scratch = acquire(size)
    try:
        start = scratch.address - int(scratch.array.__array_interface__["data"][0])
        yield scratch.array[start : start + size]
    finally:
        release(scratch)

"""What the steps share: a memory that counts, a problem, and the line that each step prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

Array = np.ndarray
N, D = 1024, 64
FAST = 32 * 1024  # numbers that fast memory holds: a core's L2 cache, or the shared memory of a GPU's multiprocessor


@dataclass
class SlowMemory:
    """Where q, k, v and out are. It is large, and what moves to or from it takes the time. A step computes on what it
    has loaded, in fast memory; local variables are there.
    """

    moved: int = 0  # bytes

    def load(self, x: Array) -> Array:
        self.moved += x.nbytes
        return x

    def store(self, to: Array, x: Array | float) -> None:
        self.moved += to.nbytes
        to[...] = x


Attention = Callable[..., Any]


def problem() -> list[Array]:
    """q, k, v (N, D): one head."""
    return list(np.random.default_rng(0).standard_normal((3, N, D)).astype(np.float32))


def show(name: str, step: Attention, before: Attention | None, arrays: list[Array] | None = None) -> float:
    """Run a step and the one before on the same arrays, and print a line; the largest difference, of float32."""
    arrays = problem() if arrays is None else arrays
    memory, error = SlowMemory(), 0.0
    found = step(*arrays, memory)
    if before is not None:
        expected = before(*arrays, SlowMemory())
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        error = max(float(np.abs(a - b).max()) for a, b in pairs)
    times = []
    for _ in range(3):
        start = perf_counter()
        step(*arrays, SlowMemory())
        times.append(perf_counter() - start)
    ms, mb = 1e3 * min(times), memory.moved / 1e6
    print(f"{name:34} {ms:8.1f} ms {mb:9.2f} MB moved   differs from the step before by {error:.0e}", flush=True)
    return error

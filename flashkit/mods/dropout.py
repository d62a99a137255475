"""Which weights dropout drops: a function of (seed, b, h, row, k) alone, so the result does not depend on the backend
or the order of tiles.

Philox-4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3). The counter is (k // 4, row, h, b), the key is the seed's two halves, and key k takes word k % 4 of
the result; a weight is dropped where its word is below p * 2^32. A kernel evaluates it once for four neighbouring keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


class ChunkSeed(int):
    """The seed of a call on a chunk of a larger one, whose rows, keys and heads begin at these."""

    first_row = first_key = first_head = 0

    @classmethod
    def at(cls, seed: int, row: int, key: int, head: int) -> ChunkSeed:
        """The same pairs are dropped as in the larger call."""
        made = cls(seed)
        made.first_row, made.first_key, made.first_head = row, key, head
        return made


def first_of(seed: int) -> tuple[int, int, int]:
    """Row, key and head at which the counter of a call begins."""
    return (seed.first_row, seed.first_key, seed.first_head) if isinstance(seed, ChunkSeed) else (0, 0, 0)


def threshold(p: float) -> int:
    """Weights whose word is below this are dropped."""
    return min(round(p * 2**32), 2**32 - 1)


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[np.ndarray, ...]:
    """Four 32-bit words for each counter; the counter's parts are integer arrays that broadcast."""
    low32 = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x).astype(np.uint64) & low32 for x in counter]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(ROUNDS):
        products = [np.uint64(m) * x for m, x in zip(MULTIPLIERS, (c[0], c[2]), strict=True)]
        high, low = [p >> np.uint64(32) for p in products], [p & low32 for p in products]
        c = [high[1] ^ c[1] ^ np.uint64(key[0]), low[1], high[0] ^ c[3] ^ np.uint64(key[1]), low[0]]
        key = [(k + w) & 0xFFFFFFFF for k, w in zip(key, WEYL, strict=True)]
    return tuple(np.asarray(x, np.uint32) for x in np.broadcast_arrays(*c))


def keep(seed: int, p: float, b: Any, h: Any, row: Any, k: Any) -> np.ndarray:
    """True where the weight of the pair is not dropped; the arguments are integer arrays that broadcast."""
    first_row, first_key, first_head = first_of(seed)
    k = np.asarray(k) + first_key
    words = philox((k // 4, row + first_row, h + first_head, b), seed)
    lane = np.broadcast_to(k % 4, words[0].shape)
    return np.choose(lane, words) >= np.uint32(threshold(p))

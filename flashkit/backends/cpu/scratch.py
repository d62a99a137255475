"""How a thread's scratch memory is laid out: byte offsets, used by the kernels (functions.py tells Numba of them) and
by the host that allocates it.
"""

from __future__ import annotations

ALIGNMENT = 64


def _end(start: int, elements: int, itemsize: int) -> int:
    return (start + elements * itemsize + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def forward_layout(
    panels: int, panel: int, block_k: int, d: int, dv: int, itemsize: int, turned: int
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """Offsets of O^T panels (Q^T panels come first), score tile, widened K and V tiles, running maxima and sums,
    three rows of one panel, and `turned` tiles that a modification reads transposed; last the total."""
    queries = panels * panel
    outputs = _end(0, queries * d, itemsize)
    scores = _end(outputs, queries * dv, itemsize)
    keys = _end(scores, block_k * panel, itemsize)
    values = _end(keys, block_k * d, itemsize)
    maxima = _end(values, block_k * dv, itemsize)
    sums = _end(maxima, queries, itemsize)
    rows = _end(sums, queries, itemsize)
    tiles = _end(rows, 3 * panel, itemsize)
    return outputs, scores, keys, values, maxima, sums, rows, tiles, _end(tiles, turned * block_k * panel, 8)


def backward_layout(
    block_q: int, block_k: int, d: int, dv: int, itemsize: int, unit: int
) -> tuple[int, int, int, int, int, int, int, int, int, int, int]:
    """Offsets of the K^T, V^T, K, V, Q and dO tiles (K^T first), S, dP and slopes tiles, room for dS and a transpose
    where numbers are summed in pairs (unit 2), dK and dV sums; last the total.

    block_k is a multiple of the vector's lanes, so that rows of the score tiles are padded to whole vectors.
    """
    values_t = _end(0, block_k * d, itemsize)
    keys = _end(values_t, block_k * dv, itemsize)
    queries = _end(keys, block_k * max(d, dv), itemsize)
    douts = _end(queries, block_q * d, itemsize)
    scores = _end(douts, block_q * dv, itemsize)
    dscores = _end(scores, block_q * block_k, itemsize)
    slopes = _end(dscores, block_q * block_k, itemsize)
    spare = _end(slopes, block_q * block_k, itemsize)
    rows = (block_q + 15) // 16 * 16
    dkeys = _end(spare, (unit - 1) * rows * (block_k + max(d, dv)), itemsize)
    dvalues = _end(dkeys, block_k * d, itemsize)
    return (
        values_t,
        keys,
        queries,
        douts,
        scores,
        dscores,
        slopes,
        spare,
        dkeys,
        dvalues,
        _end(dvalues, block_k * dv, itemsize),
    )


def decode_layout(rows: int, group: int, keys: int, d: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Offsets of the scores (queries come first, their d padded to whole vectors), factors, and each head's state and
    end of its group of tiles; last the total.
    """
    scores = _end(0, rows * d, itemsize)
    factors = _end(scores, rows * keys, itemsize)
    states = _end(factors, rows, itemsize)
    ends = _end(states, group, 8)
    return scores, factors, states, ends, _end(ends, group, 8)


def part_layout(rows: int, dv: int, itemsize: int) -> tuple[int, int, int]:
    """Offsets of the maxima and sums of a part of the keys (its output comes first); last the total."""
    maxima = _end(0, rows * dv, itemsize)
    sums = _end(maxima, rows, itemsize)
    return maxima, sums, _end(sums, rows, itemsize)

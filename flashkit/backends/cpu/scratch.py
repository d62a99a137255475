"""Map of a thread's scratch memory: byte offsets, computed alike by the kernels (functions.py compiles these functions)
and by the host that allocates it.

The first region of every map begins at 0 and has no field. `total` is the size of all.
"""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 64


def _end(start: int, elements: int, itemsize: int) -> int:
    return (start + elements * itemsize + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class ForwardLayout(NamedTuple):
    """After the Q^T panels."""

    o_acc: int  # O^T panels
    scores: int  # one S^T tile
    k: int  # widened K tile
    v: int  # widened V tile
    m: int  # row_max
    l: int  # row_sum
    check: int  # a vector
    transposed: int  # tiles of arrays that a modification reads transposed
    k_pages: int  # K tile gathered from pages, or from K and K_PE
    v_pages: int
    more: int  # another tile of scores, of tangents; or a sum and a maximum of each query, for statistics
    total: int


def forward_layout(
    panels: int, panel: int, block_k: int, d: int, dv: int, itemsize: int, transposed_tiles: int, gathered: int,
    more: int,
) -> ForwardLayout:  # fmt: skip
    """gathered: size of an element of K and V where they are gathered, else 0. more: elements of the last region."""
    queries = panels * panel
    o_acc = _end(0, queries * d, itemsize)
    scores = _end(o_acc, queries * dv, itemsize)
    k = _end(scores, block_k * panel, itemsize)
    v = _end(k, block_k * d, itemsize)
    m = _end(v, block_k * dv, itemsize)
    l = _end(m, queries, itemsize)
    check = _end(l, queries, itemsize)
    transposed = _end(check, panel, itemsize)
    k_pages = _end(transposed, transposed_tiles * block_k * panel, 8)
    v_pages = _end(k_pages, block_k * d, gathered)
    another = _end(v_pages, block_k * dv, gathered)
    total = _end(another, more, itemsize)
    return ForwardLayout(o_acc, scores, k, v, m, l, check, transposed, k_pages, v_pages, another, total)


class BackwardLayout(NamedTuple):
    """After the packed K^T tile."""

    v_t: int  # packed V^T tile
    k: int
    q: int
    do: int
    scores: int  # S, then P
    ds: int  # dP, then dS
    slopes: int  # d score / d s, or scores before modification, and sums of diagonals
    pairs: int  # bf16 pairs of dS, and one transposed operand
    dk: int  # accumulators
    dv: int
    total: int


def backward_layout(block_q: int, block_k: int, d: int, dv: int, itemsize: int, k_pack: int) -> BackwardLayout:
    """block_k: a multiple of the vector's lanes, as rows of scores are padded. k_pack: 2 for bf16 pairs, else 1."""
    v_t = _end(0, block_k * d, itemsize)
    k = _end(v_t, block_k * dv, itemsize)
    q = _end(k, block_k * max(d, dv), itemsize)
    do = _end(q, block_q * d, itemsize)
    scores = _end(do, block_q * dv, itemsize)
    ds = _end(scores, block_q * block_k, itemsize)
    slopes = _end(ds, block_q * block_k, itemsize)
    pairs = _end(slopes, block_q * block_k + block_q + block_k, itemsize)
    rows = (block_q + 15) // 16 * 16
    dk = _end(pairs, (k_pack - 1) * rows * (block_k + max(d, dv)), itemsize)
    dv_acc = _end(dk, block_k * d, itemsize)
    total = _end(dv_acc, block_k * dv, itemsize)
    return BackwardLayout(v_t, k, q, do, scores, ds, slopes, pairs, dk, dv_acc, total)


class DecodeLayout(NamedTuple):
    """After the packed queries."""

    scores: int
    pe_scores: int  # of the keys' last columns, where these lie apart
    rescale: int
    states: int  # each query head's state of the current tiles
    ends: int  # and where it ends
    more: int  # another tile of scores, and two numbers for each row, for statistics
    total: int


def decode_layout(rows: int, group: int, keys: int, d: int, itemsize: int, k_parts: int, stats: bool) -> DecodeLayout:
    """d: words per query, padded to whole vectors. k_parts: arrays that hold the columns of the keys, 1 or 2."""
    scores = _end(0, rows * d, itemsize)
    pe_scores = _end(scores, rows * keys, itemsize)
    rescale = _end(pe_scores, (k_parts - 1) * rows * keys, itemsize)
    states = _end(rescale, rows, itemsize)
    ends = _end(states, group, 8)
    more = _end(ends, group, 8)
    return DecodeLayout(scores, pe_scores, rescale, states, ends, more, _end(more, rows * (keys + 2) * stats, itemsize))


class PartialLayout(NamedTuple):
    """After o_partial, the output of one split of the keys; m + log(l) is its lse_partial."""

    m: int
    l: int
    stats: int  # a sum for the entropy of each row
    total: int


def partial_layout(rows: int, dv: int, itemsize: int) -> PartialLayout:
    m = _end(0, rows * dv, itemsize)
    l = _end(m, rows, itemsize)
    stats = _end(l, rows, itemsize)
    return PartialLayout(m, l, stats, _end(stats, rows, itemsize))

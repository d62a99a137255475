"""Small pictures of masks for notebooks, as SVG inside HTML."""

from __future__ import annotations

import itertools

import numpy as np

from .tile_lists import FULL, PARTIAL

MOST = 64
"""Rows and columns of a picture, at most."""

COLOURS = {PARTIAL: "#9ecae1", FULL: "#08519c"}
"""Of a tile; EMPTY ones are left white. The same as in `BlockMask.plot`."""


def picture(states: np.ndarray, caption: str) -> str:
    """HTML with one square for each element of `states`, the classes of tiles (rows, columns), and a caption."""
    from html import escape  # takes longer than what else this file needs

    rows, columns = states.shape
    side = max(2, 192 // max(rows, columns, 1))
    squares = []
    for i, row in enumerate(states):
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1), columns]
        for start, stop in itertools.pairwise(starts):
            if colour := COLOURS.get(int(row[start])):
                x, y, width = start * side, i * side, (stop - start) * side
                squares.append(f'<rect x="{x}" y="{y}" width="{width}" height="{side}" fill="{colour}"/>')
    width, height = columns * side, rows * side
    return (
        f'<div><svg width="{width + 2}" height="{height + 2}" viewBox="-1 -1 {width + 2} {height + 2}">'
        f'<rect width="{width}" height="{height}" fill="white" stroke="#999"/>{"".join(squares)}</svg>'
        f"<br><code>{escape(caption)}</code></div>"
    )

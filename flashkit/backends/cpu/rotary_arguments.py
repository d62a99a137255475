"""Sizes that kernels/rotary.py gets: indices of 64-bit integers, in the order of backends/cpu/rotary.py. Strides are in
bytes.
"""

from __future__ import annotations

import numpy as np

(
    BATCH, HEADS, TOKENS, DIM,
    HALF,  # pairs that are rotated; 0: rows are copied, and there are no tables and positions
    INTERLEAVED, SIGN,
    ROWS,  # of the tables
    PAGE, SLOTS,  # of a page, and of all pages; 0: there are no places
    X_BATCH, X_HEAD, X_TOKEN, OUT_BATCH, OUT_HEAD, OUT_TOKEN,
    SIZE,
) = map(np.int64, range(17))  # fmt: skip

"""Rotary position embedding of rows, into an array or into the pages of a KV cache.

Arrays are (B, H, N, D) with a contiguous last axis. Token (b, n) goes to (b, n) of the result, or, where PAGE is
not 0, to the slot places[b, n] of pages that are (pages, H, page, D). A token is dropped if its slot or its position is
out of bounds: callers check both, and memory stays safe without them. specialise.py puts the dtype before this text.
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.views import integer_at, vector

(
    BATCH, HEADS, TOKENS, DIM,
    HALF,  # pairs that are rotated; 0: rows are copied, and there are no tables and positions
    INTERLEAVED, SIGN,
    ROWS,  # of the tables
    PAGE, SLOTS,  # of a page, and of all pages; 0: there are no places
    X_BATCH, X_HEAD, X_TOKEN, OUT_BATCH, OUT_HEAD, OUT_TOKEN,
    SIZE,
) = map(np.int64, range(17))  # fmt: skip
"""Indices in `sizes`, which backends/cpu/rotary.py makes. Strides are in bytes."""


@njit(**options)
def rotate_row(x, out, cos, sin, sign, interleaved):
    half = cos.shape[0]
    if interleaved:
        for i in range(half):
            a, b = widen(x[2 * i]), widen(x[2 * i + 1])
            out[2 * i] = narrow(a * cos[i] - b * (sin[i] * sign))
            out[2 * i + 1] = narrow(a * (sin[i] * sign) + b * cos[i])
    else:
        for i in range(half):
            a, b = widen(x[i]), widen(x[half + i])
            out[i] = narrow(a * cos[i] - b * (sin[i] * sign))
            out[half + i] = narrow(a * (sin[i] * sign) + b * cos[i])
    for i in range(2 * half, x.shape[0]):
        out[i] = x[i]


@njit(**options)
def data(arrays, i):
    """The address of the first element of an array. arrays: where the addresses of NumPy array objects lie."""
    return integer_at(integer_at(arrays + 8 * i) + ADDRESS)


@entry(types.void(types.int64))
def rotary(arrays):
    """sizes, and what they say is there of x, the result, cosines, sines, positions and places."""
    a = vector(data(arrays, 0), SIZE, 8, np.int64)
    sign, half, tokens = ACCUM(a[SIGN]), a[HALF], a[TOKENS]
    x, out, cos, sin = data(arrays, 1), data(arrays, 2), data(arrays, 3), data(arrays, 4)
    where = vector(data(arrays, 5), a[BATCH] * tokens, 8, np.int64)
    slots = vector(data(arrays, 6), a[BATCH] * tokens, 8, np.int64)
    for b in range(a[BATCH]):
        for n in range(tokens):
            to_b, to_n = b, n
            if a[PAGE]:
                slot = slots[b * tokens + n]
                if slot < 0 or slot >= a[SLOTS]:
                    continue
                to_b, to_n = slot // a[PAGE], slot % a[PAGE]
            at = np.int64(0)
            if half:
                position = where[b * tokens + n]
                if position < 0 or position >= a[ROWS]:
                    continue
                at = position * half * ACCUM_SIZE
            cos_row, sin_row = vector(cos + at, half, ACCUM_SIZE, ACCUM), vector(sin + at, half, ACCUM_SIZE, ACCUM)
            source = x + b * a[X_BATCH] + n * a[X_TOKEN]
            target = out + to_b * a[OUT_BATCH] + to_n * a[OUT_TOKEN]
            for h in range(a[HEADS]):
                row = vector(source + h * a[X_HEAD], a[DIM], STORAGE_SIZE, STORAGE)
                turned = vector(target + h * a[OUT_HEAD], a[DIM], STORAGE_SIZE, STORAGE)
                rotate_row(row, turned, cos_row, sin_row, sign, a[INTERLEAVED])

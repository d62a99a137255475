"""Products with quantized matrices on the CPU, in float32, by Numba.

A token of a small model costs the time of reading its weights once. In codes of 4 and 8 bits that is a fifth of the
bytes of float32; elements are unpacked in registers and are the same float32 numbers, up to the order of rounding.

A panel is 64 rows of the matrix. Its codes lie column by column, so that vector lanes are rows and no sum runs across
lanes. Several inputs are multiplied in strips of four, which unpack each element once.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from .checkpoint import BLOCK, Codes

Floats = NDArray[np.float32]

PANEL = 64
STRIP = 4  # inputs that are multiplied by an element while it is in a register


class Quantized:
    """x @ weight.T for a quantized weight (rows, columns)."""

    def __init__(self, weight: Codes) -> None:
        rows, columns = weight.code.shape
        if rows % PANEL or columns % BLOCK:
            raise ValueError(f"matrix: expected multiples of {PANEL} rows and {BLOCK} columns, got {rows} x {columns}")
        self.rows, self.columns, self.bits = rows, columns, weight.bits
        panels, blocks = rows // PANEL, columns // BLOCK
        code = weight.code.reshape(panels, PANEL, blocks, BLOCK).transpose(0, 2, 3, 1)
        if self.bits == 4:  # elements j and j + 16 of a block share a byte
            code = code[:, :, : BLOCK // 2] | code[:, :, BLOCK // 2 :] << 4
        self.code = np.ascontiguousarray(code)  # (panels, blocks, 16 or 32, PANEL)
        affine = np.stack([weight.scale, weight.minimum]).reshape(2, panels, PANEL, blocks)
        self.affine = np.ascontiguousarray(affine.transpose(1, 3, 0, 2))  # (panels, blocks, 2, PANEL)

    def __call__(self, x: Floats) -> Floats:
        """x (T, columns) -> (T, rows)."""
        t = len(x)
        if t == 1:
            out = np.empty((1, self.rows), np.float32)
            (multiply4 if self.bits == 4 else multiply8)(x[0], self.code, self.affine, out[0])
            return out
        padded = np.zeros((-(-t // STRIP) * STRIP, self.columns), np.float32)
        padded[:t] = x
        out = np.empty((len(padded), self.rows), np.float32)
        (multiply4_strips if self.bits == 4 else multiply8_strips)(padded, self.code, self.affine, out)
        return out[:t]


def compiled(function):  # type: ignore[no-untyped-def]
    # What Numba has on disk belongs to a module's name, but its files are named by the function: `flashkit generate`
    # imports this file by another name than `examples.generate`.
    function.__qualname__ = f"{__name__}.{function.__qualname__}"
    return njit(cache=True, parallel=True, nogil=True, fastmath={"contract", "nsz"}, boundscheck=False)(function)


@compiled
def multiply4(x, code, affine, out):  # type: ignore[no-untyped-def]
    panels, blocks = code.shape[:2]
    sums = np.empty(blocks, np.float32)
    for b in range(blocks):
        total = np.float32(0)
        for j in range(b * BLOCK, (b + 1) * BLOCK):
            total += x[j]
        sums[b] = total
    for p in prange(panels):
        s, acc = np.empty(PANEL, np.float32), np.zeros(PANEL, np.float32)
        for b in range(blocks):
            s[:] = 0
            for j in range(0, BLOCK // 2, 4):
                at = b * BLOCK + j
                x0, x1, x2, x3 = x[at], x[at + 1], x[at + 2], x[at + 3]
                y0, y1, y2, y3 = x[at + 16], x[at + 17], x[at + 18], x[at + 19]
                c0, c1, c2, c3 = code[p, b, j], code[p, b, j + 1], code[p, b, j + 2], code[p, b, j + 3]
                for r in range(PANEL):
                    t = np.float32(np.int32(c0[r] & 15)) * x0 + np.float32(np.int32(c0[r] >> 4)) * y0
                    t += np.float32(np.int32(c1[r] & 15)) * x1 + np.float32(np.int32(c1[r] >> 4)) * y1
                    t += np.float32(np.int32(c2[r] & 15)) * x2 + np.float32(np.int32(c2[r] >> 4)) * y2
                    t += np.float32(np.int32(c3[r] & 15)) * x3 + np.float32(np.int32(c3[r] >> 4)) * y3
                    s[r] += t
            scale, minimum, total = affine[p, b, 0], affine[p, b, 1], sums[b]
            for r in range(PANEL):
                acc[r] += scale[r] * s[r] + minimum[r] * total
        out[p * PANEL : (p + 1) * PANEL] = acc


@compiled
def multiply8(x, code, affine, out):  # type: ignore[no-untyped-def]
    panels, blocks = code.shape[:2]
    for p in prange(panels):
        s, acc = np.empty(PANEL, np.float32), np.zeros(PANEL, np.float32)
        for b in range(blocks):
            s[:] = 0
            for j in range(0, BLOCK, 4):
                at = b * BLOCK + j
                x0, x1, x2, x3 = x[at], x[at + 1], x[at + 2], x[at + 3]
                c0, c1, c2, c3 = code[p, b, j], code[p, b, j + 1], code[p, b, j + 2], code[p, b, j + 3]
                for r in range(PANEL):
                    # Centred here: the sum of unsigned codes would cancel against the minimum.
                    t = np.float32(np.int32(c0[r]) - 128) * x0 + np.float32(np.int32(c1[r]) - 128) * x1
                    t += np.float32(np.int32(c2[r]) - 128) * x2 + np.float32(np.int32(c3[r]) - 128) * x3
                    s[r] += t
            scale = affine[p, b, 0]
            for r in range(PANEL):
                acc[r] += scale[r] * s[r]
        out[p * PANEL : (p + 1) * PANEL] = acc


@compiled
def multiply4_strips(x, code, affine, out):  # type: ignore[no-untyped-def]
    panels, blocks = code.shape[:2]
    for p in prange(panels):
        acc = np.empty(STRIP * PANEL, np.float32)
        for t in range(0, len(x), STRIP):
            acc[:] = 0
            for b in range(blocks):
                scale, minimum = affine[p, b, 0], affine[p, b, 1]
                for j in range(0, BLOCK // 2, 2):
                    at = b * BLOCK + j
                    a0, a1, a2, a3 = x[t, at], x[t + 1, at], x[t + 2, at], x[t + 3, at]
                    b0, b1, b2, b3 = x[t, at + 1], x[t + 1, at + 1], x[t + 2, at + 1], x[t + 3, at + 1]
                    at += BLOCK // 2
                    c0, c1, c2, c3 = x[t, at], x[t + 1, at], x[t + 2, at], x[t + 3, at]
                    d0, d1, d2, d3 = x[t, at + 1], x[t + 1, at + 1], x[t + 2, at + 1], x[t + 3, at + 1]
                    first, second = code[p, b, j], code[p, b, j + 1]
                    for r in range(PANEL):
                        w0 = np.float32(np.int32(first[r] & 15)) * scale[r] + minimum[r]
                        w1 = np.float32(np.int32(second[r] & 15)) * scale[r] + minimum[r]
                        w2 = np.float32(np.int32(first[r] >> 4)) * scale[r] + minimum[r]
                        w3 = np.float32(np.int32(second[r] >> 4)) * scale[r] + minimum[r]
                        acc[r] = w3 * d0 + (w2 * c0 + (w1 * b0 + (w0 * a0 + acc[r])))
                        acc[PANEL + r] = w3 * d1 + (w2 * c1 + (w1 * b1 + (w0 * a1 + acc[PANEL + r])))
                        acc[2 * PANEL + r] = w3 * d2 + (w2 * c2 + (w1 * b2 + (w0 * a2 + acc[2 * PANEL + r])))
                        acc[3 * PANEL + r] = w3 * d3 + (w2 * c3 + (w1 * b3 + (w0 * a3 + acc[3 * PANEL + r])))
            for i in range(STRIP):
                out[t + i, p * PANEL : (p + 1) * PANEL] = acc[i * PANEL : (i + 1) * PANEL]


@compiled
def multiply8_strips(x, code, affine, out):  # type: ignore[no-untyped-def]
    panels, blocks = code.shape[:2]
    for p in prange(panels):
        acc = np.empty(STRIP * PANEL, np.float32)
        for t in range(0, len(x), STRIP):
            acc[:] = 0
            for b in range(blocks):
                scale = affine[p, b, 0]
                for j in range(0, BLOCK, 4):
                    at = b * BLOCK + j
                    a0, a1, a2, a3 = x[t, at], x[t + 1, at], x[t + 2, at], x[t + 3, at]
                    b0, b1, b2, b3 = x[t, at + 1], x[t + 1, at + 1], x[t + 2, at + 1], x[t + 3, at + 1]
                    c0, c1, c2, c3 = x[t, at + 2], x[t + 1, at + 2], x[t + 2, at + 2], x[t + 3, at + 2]
                    d0, d1, d2, d3 = x[t, at + 3], x[t + 1, at + 3], x[t + 2, at + 3], x[t + 3, at + 3]
                    e0, e1, e2, e3 = code[p, b, j], code[p, b, j + 1], code[p, b, j + 2], code[p, b, j + 3]
                    for r in range(PANEL):
                        w0 = np.float32(np.int32(e0[r]) - 128) * scale[r]
                        w1 = np.float32(np.int32(e1[r]) - 128) * scale[r]
                        w2 = np.float32(np.int32(e2[r]) - 128) * scale[r]
                        w3 = np.float32(np.int32(e3[r]) - 128) * scale[r]
                        acc[r] = w3 * d0 + (w2 * c0 + (w1 * b0 + (w0 * a0 + acc[r])))
                        acc[PANEL + r] = w3 * d1 + (w2 * c1 + (w1 * b1 + (w0 * a1 + acc[PANEL + r])))
                        acc[2 * PANEL + r] = w3 * d2 + (w2 * c2 + (w1 * b2 + (w0 * a2 + acc[2 * PANEL + r])))
                        acc[3 * PANEL + r] = w3 * d3 + (w2 * c3 + (w1 * b3 + (w0 * a3 + acc[3 * PANEL + r])))
            for i in range(STRIP):
                out[t + i, p * PANEL : (p + 1) * PANEL] = acc[i * PANEL : (i + 1) * PANEL]

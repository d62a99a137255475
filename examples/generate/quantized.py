"""Products with quantized matrices on the CPU, in float32, by Numba.

A token of a small model costs the time of reading its weights once. In codes of 4 and 8 bits that is a fifth of the
bytes of float32; elements are unpacked in registers and are the same float32 numbers, up to the order of rounding.

A panel is 64 rows of the matrix. Its codes lie column by column, so that vector lanes are rows and no sum runs across
lanes. Several inputs are multiplied in strips of four, which unpack each element once. The threads are those of
flashkit's attention: each takes the next panel that no other has taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from flashkit.backends.cpu import arguments as at
from flashkit.backends.cpu import threads
from flashkit.backends.cpu.views import atomic_increment, vector

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
        rows = 1 if t == 1 else -(-t // STRIP) * STRIP
        padded = np.zeros((rows, self.columns), np.float32)
        padded[:t] = x
        out = np.empty((rows, self.rows), np.float32)
        block = np.zeros(int(at.SIZE), np.int64)
        block[at.N_Q], block[at.DIM], block[at.DIM_V], block[at.PANEL] = rows, self.columns, self.rows, self.bits
        for word, array in (at.Q, padded), (at.K, self.code), (at.V, self.affine), (at.OUT, out):
            block[word] = array.ctypes.data
        if rows == 1 and self.bits == 4:
            sums = padded.reshape(-1, BLOCK).sum(axis=1)
            block[at.LSE] = sums.ctypes.data
        block[at.KERNEL], block[at.WORK_TILES] = multiply.address, self.rows // PANEL
        count = min(threads.count(), self.rows // PANEL)
        if count > 1:
            threads.set_pool(block)
        threads.entry("launch")(block.ctypes.data, count)
        return out[:t].astype(x.dtype, copy=False)


def compiled(function):  # type: ignore[no-untyped-def]
    return njit(nogil=True, fastmath={"contract", "nsz"}, boundscheck=False)(function)


@compiled
def multiply4(x, sums, code, affine, out, p):  # type: ignore[no-untyped-def]
    blocks = code.shape[1]
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
def multiply8(x, code, affine, out, p):  # type: ignore[no-untyped-def]
    blocks = code.shape[1]
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
def multiply4_strips(x, code, affine, out, p):  # type: ignore[no-untyped-def]
    blocks = code.shape[1]
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
def multiply8_strips(x, code, affine, out, p):  # type: ignore[no-untyped-def]
    blocks = code.shape[1]
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


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as Numba's carray takes it."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


def multiply(block, thread):  # type: ignore[no-untyped-def]
    """What a thread does: panels of out = x @ weight.T until none is left."""
    args = vector(block, at.SIZE, 8, np.int64)
    t, blocks, panels, bits = args[at.N_Q], args[at.DIM] // BLOCK, args[at.WORK_TILES], args[at.PANEL]
    x = carray(pointer(args[at.Q]), (t, args[at.DIM]), np.float32)
    code = carray(pointer(args[at.K]), (panels, blocks, BLOCK * bits // 8, PANEL), np.uint8)
    affine = carray(pointer(args[at.V]), (panels, blocks, 2, PANEL), np.float32)
    out = carray(pointer(args[at.OUT]), (t, args[at.DIM_V]), np.float32)
    sums = carray(pointer(args[at.LSE]), (blocks,), np.float32)
    while True:
        p = atomic_increment(block + 8 * at.TILE_COUNTER)
        if p >= panels:
            break
        if bits == 4 and t == 1:
            multiply4(x[0], sums, code, affine, out[0], p)
        elif bits == 4:
            multiply4_strips(x, code, affine, out, p)
        elif t == 1:
            multiply8(x[0], code, affine, out[0], p)
        else:
            multiply8_strips(x, code, affine, out, p)


# What Numba has on disk belongs to a module's name, but its files are named by the function: `flashkit generate`
# imports this file by another name than `examples.generate`.
multiply.__qualname__ = f"{__name__}.{multiply.__qualname__}"
multiply = cfunc(types.void(types.int64, types.int64), cache=True, nopython=True)(multiply)

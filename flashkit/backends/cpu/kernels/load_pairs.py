"""The steps of load.py for bfloat16 that is multiplied in pairs (pairs.py): operands are words of two numbers that
follow each other along the summed axis, and pass for float32 where only their addresses count.
"""

from numba import njit

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.memory import call_pack_rows, call_product, call_round_pairs, matrix, tensor3

UNIT = 2


@njit(**options)
def padded(n):
    """Packing writes whole squares of 16 words."""
    return (n + 15) // 16 * 16


@njit(**options)
def load_tile(source, address):
    """Rows as words: where they lie, or, if a row ends within a word, copied to `address` with a zero after each."""
    count, width = source.shape
    words = (width + 1) // 2
    if width % 2 == 0:
        return matrix(source.ctypes.data, count, words, source.strides[0], COMPUTE_SIZE, COMPUTE)
    copy = matrix(address, count, width + 1, words * COMPUTE_SIZE, STORAGE_SIZE, STORAGE)
    for i in range(count):
        for j in range(width):
            copy[i, j] = source[i, j]
        copy[i, width] = 0
    return matrix(address, count, words, words * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)


@njit(**options)
def load_values(args, source, address):
    """V^T, pairs of keys."""
    count, width = source.shape
    words = (count + 1) // 2
    target = matrix(address, width, words, padded(words) * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)
    call_pack_rows(args[PACK_ROWS_T], source, target)
    return target


@njit(**options)
def halves(words):
    """The numbers of words: (rows, columns, 2)."""
    rows, columns = words.shape
    return tensor3(words.ctypes.data, rows, columns, 2, words.strides[0], words.strides[1], STORAGE_SIZE, STORAGE)


@njit(**options)
def careful_pairs(a, b, c):
    """c += a @ b where a zero in b leaves its term out, whatever a holds there."""
    x, y = halves(a), halves(b)
    for k in range(b.shape[0]):
        for half in range(2):
            for j in range(b.shape[1]):
                weight = widen(y[k, j, half])
                if weight != 0:
                    for i in range(a.shape[0]):
                        c[i, j] += widen(x[i, k, half]) * weight


@njit(**options)
def accumulate_output(args, v_t, weights, count, output, careful):
    """O^T += V^T P^T over `count` keys; weights: their pairs, or, still to be rounded, themselves."""
    words, columns = (count + 1) // 2, output.shape[1]
    pairs = matrix(weights.ctypes.data, words, columns, weights.strides[0], COMPUTE_SIZE, COMPUTE)
    if args[DROPOUT] != 0:
        call_round_pairs(args[ROUND_PAIRS], weights, pairs, 0, 0)
    if careful:
        careful_pairs(v_t, pairs, output)
    else:
        call_product(args[PRODUCT_ADD], v_t, pairs, output)

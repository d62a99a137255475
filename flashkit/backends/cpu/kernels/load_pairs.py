"""The steps of load.py for bfloat16 that is multiplied in pairs (pairs.py): operands are words of two numbers that
follow each other along the summed axis, and pass for float32 where only their addresses count.
"""

from numba import njit

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.memory import (
    call_exponentials,
    call_pack_rows,
    call_product,
    call_round_pairs,
    call_unpack,
    call_weights_in_pairs,
    matrix,
    tensor3,
    vector,
)

UNIT = 2

SLACK = COMPUTE(0)
"""Relative to the maximum itself a row's greatest weight is 1, which rounding leaves as it is. Results are so 3 %
nearer to float64 (2,048 tokens) than with load.py's, for 4 % of the time.
"""


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
def load_query(source, target):
    """A row of Q for decoding, padded with zeros."""
    halves = vector(target.ctypes.data, UNIT * len(target), STORAGE_SIZE, STORAGE)
    for i in range(len(halves)):
        halves[i] = source[i] if i < len(source) else 0


@njit(**options)
def exponentials(args, tile, shift, total):
    """Scores to weights, rounded and in pairs unless some are to be dropped first; total adds up the unrounded ones."""
    if args[DROPOUT] != 0:
        call_exponentials(args[EXPONENTIALS], tile, shift, total)
    else:
        call_weights_in_pairs(args[TILE_EXPONENTIALS], tile, shift, total, args[RATE])


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
def halves_t(words):
    """The numbers of words^T: (columns, rows, 2)."""
    rows, columns = words.shape
    return tensor3(words.ctypes.data, columns, rows, 2, words.strides[1], words.strides[0], STORAGE_SIZE, STORAGE)


@njit(**options)
def careful_pairs(a, b, c):
    """c += a @ b, halves of words, where a zero in b leaves its term out, whatever a holds there."""
    for k in range(b.shape[0]):
        for half in range(2):
            for j in range(b.shape[1]):
                weight = widen(b[k, j, half])
                if weight != 0:
                    for i in range(a.shape[0]):
                        c[i, j] += widen(a[i, k, half]) * weight


@njit(**options)
def accumulate_output(args, v_t, weights, count, output, careful):
    """O^T += V^T P^T over `count` keys; weights: their pairs, or, still to be rounded, themselves."""
    words, columns = (count + 1) // 2, output.shape[1]
    pairs = matrix(weights.ctypes.data, words, columns, weights.strides[0], COMPUTE_SIZE, COMPUTE)
    if args[DROPOUT] != 0:
        call_round_pairs(args[ROUND_PAIRS], weights, pairs, 0, 0)
    if careful:
        careful_pairs(halves(v_t), halves(pairs), output)
    else:
        call_product(args[PRODUCT_ADD], v_t, pairs, output)


@njit(**options)
def load_keys(args, source, address):
    """K as dQ += dS K has it: pairs of keys."""
    count, width = source.shape
    target = matrix(address, (count + 1) // 2, width, padded(width) * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)
    call_pack_rows(args[PACK_ROWS], source, target)
    return target


@njit(**options)
def key_sums(address, count, width, row_bytes):
    """A key tile's sums of dK or dV, transposed, set to 0."""
    sums = matrix(address, width, count, row_bytes, COMPUTE_SIZE, COMPUTE)
    sums[:] = 0
    return sums


@njit(**options)
def store_key_sums(args, sums, target, spare):
    """Returns whether all of them are finite."""
    count, lanes = target.shape[0], args[LANES]
    check = vector(spare, lanes, COMPUTE_SIZE, COMPUTE)
    ones = vector(spare + lanes * COMPUTE_SIZE, count, COMPUTE_SIZE, COMPUTE)
    check[:], ones[:] = 0, 1
    call_unpack(args[UNPACK], sums, target, ones, check)
    finite = True
    for i in range(lanes):
        finite &= check[i] == 0
    return finite


@njit(**options)
def _add_to_keys(args, weights, rows, sums, address, careful):
    """sums^T += rows^T weights, over the rows; weights are rounded in place."""
    count, n = weights.shape
    words, width = (count + 1) // 2, sums.shape[0]
    pairs = matrix(weights.ctypes.data, words, n, weights.strides[0], COMPUTE_SIZE, COMPUTE)
    row_bytes = padded(words) * COMPUTE_SIZE
    source = matrix(rows.ctypes.data, count, 2 * rows.shape[1], rows.strides[0], STORAGE_SIZE, STORAGE)
    call_pack_rows(args[PACK_ROWS_T], source, matrix(address, width, words, row_bytes, COMPUTE_SIZE, COMPUTE))
    rows_t = matrix(address, width, words, row_bytes, COMPUTE_SIZE, COMPUTE)
    if careful:
        careful_pairs(halves(rows_t), halves(pairs), sums)
    else:
        call_product(args[PRODUCT_ADD], rows_t, pairs, sums)


@njit(**options)
def accumulate_gradients(args, p, ds, q, do, k, dq, dk, dv, spare, careful):
    """dV^T += dO^T P, dK^T += Q^T dS, dQ += dS K. `spare`: room for dS and for one of the others' transposes."""
    rows, n = ds.shape
    row_bytes = args[BLOCK_K] * STORAGE_SIZE
    call_round_pairs(args[ROUND_PAIRS], p, p, 0, 0)
    call_round_pairs(args[ROUND_PAIRS], ds, ds, spare, row_bytes)
    if n % 2 != 0:
        stored = matrix(spare, rows, n + 1, row_bytes, STORAGE_SIZE, STORAGE)
        for i in range(rows):
            stored[i, n] = 0
    ds_words = matrix(spare, rows, (n + 1) // 2, row_bytes, COMPUTE_SIZE, COMPUTE)
    turned = spare + padded(rows) * row_bytes
    _add_to_keys(args, p, do, dv, turned, careful)
    _add_to_keys(args, ds, q, dk, turned, careful)
    if careful:
        careful_pairs(halves_t(k), halves_t(ds_words), dq.T)
    else:
        call_product(args[PRODUCT_ADD], ds_words, k, dq)

"""How both passes load tiles of Q, K, V and dO and sum over them, in computing precision; specialise.py puts this text
before theirs. load_pairs.py has the same steps for bfloat16 that is multiplied in pairs.
"""

from numba import njit

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.memory import call_product, matrix
from flashkit.backends.cpu.tiling import careful_product_t

UNIT = 1
"""Numbers along a summed axis that make one element of a packed operand."""


@njit(**options)
def padded(n):
    """Rows of scratch memory for a head dim."""
    return n


@njit(**options)
def load_tile(source, address):
    """A tile in computing precision: where it lies, or widened into scratch memory at `address`."""
    count, width = source.shape
    if IN_PLACE:
        return matrix(source.ctypes.data, count, width, source.strides[0], COMPUTE_SIZE, COMPUTE)
    target = matrix(address, count, width, width * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)
    for i in range(count):
        for j in range(width):
            target[i, j] = widen(source[i, j])
    return target


@njit(**options)
def load_values(args, source, address):
    """V^T."""
    return load_tile(source, address).T


@njit(**options)
def accumulate_output(args, v_t, weights, count, output, careful):
    """O^T += V^T P^T over `count` keys; weights: a tile of them, or of their pairs."""
    if careful:
        careful_product_t(v_t, weights, output)
    else:
        call_product(args[PRODUCT_ADD], v_t, weights, output)

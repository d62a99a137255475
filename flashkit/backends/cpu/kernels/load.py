"""How both passes load tiles of Q, K, V and dO and sum over them, in computing precision; specialise.py puts this text
before theirs. load_pairs.py has the same steps for bfloat16 that is multiplied in pairs.
"""

from numba import njit

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.memory import call_exponentials, call_product, matrix
from flashkit.backends.cpu.tiling import careful_product, careful_product_t

UNIT = 1
"""Numbers along a summed axis that make one element of a packed operand."""

SLACK = COMPUTE(8)
"""What a score may exceed the softmax's reference by: with e^8 no sum comes near overflow, and none loses precision."""


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
def load_query(source, target):
    """A row of Q for decoding, padded with zeros."""
    for i in range(len(target)):
        target[i] = widen(source[i]) if i < len(source) else 0


@njit(**options)
def exponentials(args, tile, shift, total):
    """Scores to weights, which total adds up."""
    call_exponentials(args[EXPONENTIALS], tile, shift, total)


@njit(**options)
def load_values(args, source, address):
    """V^T."""
    return load_tile(source, address).T


@njit(**options)
def load_keys(args, source, address):
    """K as dQ += dS K has it."""
    return load_tile(source, address)


@njit(**options)
def key_sums(address, count, width, row_bytes):
    """A key tile's sums of dK or dV, set to 0."""
    sums = matrix(address, count, width, width * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)
    sums[:] = 0
    return sums


@njit(**options)
def store_key_sums(args, sums, target, spare):
    """Returns whether all of them are finite."""
    finite = True
    for i in range(target.shape[0]):
        for j in range(target.shape[1]):
            finite &= np.isfinite(sums[i, j])
            target[i, j] = narrow(sums[i, j])
    return finite


@njit(**options)
def _add(args, a, b, c, careful):
    """c += a @ b."""
    if careful:
        careful_product(a, b, c)
    else:
        call_product(args[PRODUCT_ADD], a, b, c)


@njit(**options)
def accumulate_gradients(args, p, ds, q, do, k, dq, dk, dv, spare, careful):
    """dV += P^T dO, dK += dS^T Q, dQ += dS K."""
    _add(args, p.T, do, dv, careful)
    _add(args, ds.T, q, dk, careful)
    _add(args, ds, k, dq, careful)


@njit(**options)
def accumulate_output(args, v_t, weights, count, output, careful):
    """O^T += V^T P^T over `count` keys; weights: a tile of them, or of their pairs."""
    if careful:
        careful_product_t(v_t, weights, output)
    else:
        call_product(args[PRODUCT_ADD], v_t, weights, output)

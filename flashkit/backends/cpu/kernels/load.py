"""How both passes load a tile of Q, K, V or dO; specialise.py puts this text before theirs."""

from numba import njit

from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.memory import matrix


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

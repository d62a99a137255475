# Scalars: conversion of stored elements, and the functions that expressions of flashkit.mods.expr are rendered to.
#
# STORED is the type in which kernels read elements of Q, K, V and O: int16 for the bits of types that Numba lacks.

EMPTY, PARTIAL, FULL = 0, 1, 2  # what the mask shows of a tile: no pair, some pairs, all pairs

STORED = np.int16 if STORAGE in ("float16", "bfloat16") else F
LOG2E, ZERO, ONE = F(1.4426950408889634), F(0), F(1)
LEAST_INTEGER, GREATEST_INTEGER = -(2**63), 2**63 - 1
exp, exp2, log, log2, sqrt, tanh, sin, cos, floor, erf = functions_of(F)

if STORAGE == "float16":

    @device
    def widen(bits):
        return half_of(bits)

    @device
    def narrow(x):
        return bits_of_half(x)

elif STORAGE == "bfloat16":

    @device
    def widen(bits):
        return single_of(np.int32(np.int64(bits) << np.int64(16)))

    @device
    def narrow(x):  # to nearest, ties to even
        bits = np.int64(bits_of_single(x))
        if (bits & 0x7FFFFFFF) > 0x7F800000:  # rounding could make NaN infinite
            return np.int16((bits >> 16) | 64)
        return np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

else:

    @device
    def widen(x):
        return x

    @device
    def narrow(x):
        return x


@device
def minimum(x, y):  # NaN propagates, as in NumPy
    return y if y < x or y != y else x


@device
def maximum(x, y):
    return y if y > x or y != y else x


@device
def to_int(x):  # without its fraction, up to 2^30; NaN as 0
    return I(np.int32(minimum(maximum(x, F(-(2.0**30))), F(2.0**30)))) if x == x else I(0)


@device
def add_number(address, x):
    """Add to a number of global memory, unless the address is 0."""
    if address != 0:
        if F_ITEMSIZE == 8:
            add_double(address, x)
        else:
            add_single(address, x)


@device
def softmax_exp2(x):
    """2^x of a score relative to its row maximum."""
    return exp2(x)

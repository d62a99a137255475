"""The K/V loader: tiles of keys and values as the products want them. specialise.py puts this text before the kernels'.

`kv_rows` alone knows where the rows of a key/value head lie: in dense tensors (B, H, N, D). Another loader, for a page
table say, has the same functions.

    kv_rows     rows of K, V, dK or dV where they lie
    load_k      K      left operand of S^T = K Q^T        forward
    load_v_t    V^T    left operand of O^T += V^T P^T
    pack_k_t    K^T    right operand of S = Q K^T         backward
    pack_v_t    V^T    right operand of dP = dO V^T
    pack_k      K      right operand of dQ += dS K

`address`: scratch memory for a tile that is not used where it lies.
"""

import numpy as np
from numba import njit

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import options
from flashkit.backends.cpu.micro_calls import call_pack_transposed
from flashkit.backends.cpu.seq_info import tokens

ONE = np.float64(1).view(np.int64)


@njit(**options)
def kv_rows(args, tensor, seq, b, head_kv, first, count, width):
    return tokens(args, tensor, b, head_kv, seq.key_offset + first, count, width, STORAGE_SIZE, STORAGE)


@njit(**options)
def load_k(args, seq, b, head_kv, k0, n, address):
    return load_tile(kv_rows(args, K, seq, b, head_kv, k0, n, args[DIM]), address)


@njit(**options)
def load_v_t(args, seq, b, head_kv, k0, n, address):
    return load_tile_t(args, kv_rows(args, V, seq, b, head_kv, k0, n, args[DIM_V]), address)


@njit(**options)
def pack_k_t(args, seq, b, head_kv, k0, n, address):
    """Scaled."""
    k_t = accum_tile(address, (args[DIM] + K_PACK - 1) // K_PACK, n, args[BLOCK_K] * ACCUM_SIZE)
    rows = kv_rows(args, K, seq, b, head_kv, k0, n, args[DIM])
    call_pack_transposed(args[PACK_TRANSPOSED], rows, k_t, args[PACK_SCALE])
    return k_t


@njit(**options)
def pack_v_t(args, seq, b, head_kv, k0, n, address):
    v_t = accum_tile(address, (args[DIM_V] + K_PACK - 1) // K_PACK, n, args[BLOCK_K] * ACCUM_SIZE)
    rows = kv_rows(args, V, seq, b, head_kv, k0, n, args[DIM_V])
    call_pack_transposed(args[PACK_TRANSPOSED], rows, v_t, ONE)
    return v_t


@njit(**options)
def pack_k(args, seq, b, head_kv, k0, n, address):
    return pack_tile(args, kv_rows(args, K, seq, b, head_kv, k0, n, args[DIM]), address)

"""Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2): weights recomputed from the
log-sum-exp, five products.

A task is one part of the keys of one key/value head: it goes over its key tiles and, for each, over the query tiles
that see them. The softmax is known, so keys may lie along the vector lanes: only K and V are packed, once a key
tile, and Q, dO, dQ, dK, dV are used as they lie. Names that no import brings are the head that specialise.py puts
before this text (see forward.py).

    K^T, V^T  [D][BLOCK_K], [DV][BLOCK_K]      scaled keys, values
    S, dP     [BLOCK_Q][BLOCK_K]               scores, then weights P; dP, then dS
    dK, dV    [BLOCK_K][D], [BLOCK_K][DV]      sums of the key tile
    dQ        DQ_PARTIAL [part][B][H][N_Q][D]  sums of each part of the keys, added in a fixed order by `reduce`
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.memory import (
    call_pack,
    call_product,
    call_weights,
    matrix,
    next_task,
    vector,
)
from flashkit.backends.cpu.scratch import backward_layout
from flashkit.backends.cpu.tiling import drop, keys_of, modify, next_group, next_run, scale_tile, tokens

ONE = np.float64(1).view(np.int64)


@njit(**options)
def row_values(args, tensor, b, h, first, count):
    """A number for each query of one head: log-sum-exp, delta."""
    return vector(
        args[tensor] + b * args[tensor + 1] + h * args[tensor + 2] + first * args[tensor + 3],
        count,
        args[tensor + 3],
        COMPUTE,
    )


@njit(**options)
def backward_rows(args, b, h, part, row0, rows, k0, state, k_t, v_t, k, dk, dvs, scratch):
    """Some queries against a key tile: adds to dQ, dK and dV."""
    d, dv, n = args[DIM], args[DIM_V], k_t.shape[1]
    _, _, queries, douts, scores, dscores, slopes, spare, _, _, _ = backward_layout(
        args[BLOCK_Q], args[BLOCK_K], padded(d), padded(dv), COMPUTE_SIZE, UNIT
    )
    row_bytes, careful = args[BLOCK_K] * COMPUTE_SIZE, args[CAREFUL] != 0
    q = load_tile(tokens(args, Q, b, h, row0, rows, d, STORAGE_SIZE, STORAGE), scratch + queries)
    do = load_tile(tokens(args, DOUT, b, h, row0, rows, dv, STORAGE_SIZE, STORAGE), scratch + douts)
    s = matrix(scratch + scores, rows, n, row_bytes, COMPUTE_SIZE, COMPUTE)
    dp = matrix(scratch + dscores, rows, n, row_bytes, COMPUTE_SIZE, COMPUTE)
    slope = matrix(scratch + slopes, rows, n, row_bytes, COMPUTE_SIZE, COMPUTE)
    dq_row = ((part * args[BATCH] + b) * args[HEADS] + h) * args[N_Q] + row0
    dq = matrix(args[DQ_PARTIAL] + dq_row * d * COMPUTE_SIZE, rows, d, d * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)

    call_product(args[PRODUCT], q, k_t, s)  # scores
    scale_tile(args, s)
    modify(args, state, s, scratch + slopes, b, h, row0, k0)
    call_product(args[PRODUCT], do, v_t, dp)
    if args[DROPOUT] != 0:
        drop(args, dp, False, b, h, row0, k0)
    shift, delta = row_values(args, SHIFT, b, h, row0, rows), row_values(args, DELTA, b, h, row0, rows)
    call_weights(args[WEIGHTS], s, dp, shift, delta, args[SCALE])
    if args[HAS_SCORE] != 0:
        for i in range(rows):
            for j in range(n):
                dp[i, j] = dp[i, j] * slope[i, j] if s[i, j] != 0 else COMPUTE(0)
    if args[DROPOUT] != 0:
        drop(args, s, False, b, h, row0, k0)
    accumulate_gradients(args, s, dp, q, do, k, dq, dk, dvs, scratch + spare, careful)


@njit(**options)
def backward_keys(args, b, head_kv, part, key_tile, scratch):
    """One key tile against all queries that see it. Returns whether dK and dV are finite."""
    d, dv, block_q, block_k = args[DIM], args[DIM_V], args[BLOCK_Q], args[BLOCK_K]
    group, n_q = args[GROUP], args[N_Q]
    values_t, keys, _, _, scores, _, _, _, dkeys, dvalues, _ = backward_layout(
        block_q, block_k, padded(d), padded(dv), COMPUTE_SIZE, UNIT
    )
    row_bytes = block_k * COMPUTE_SIZE
    k0 = key_tile * block_k
    n = min(block_k, keys_of(args, b) - k0)

    k_t = matrix(scratch, (d + UNIT - 1) // UNIT, n, row_bytes, COMPUTE_SIZE, COMPUTE)
    v_t = matrix(scratch + values_t, (dv + UNIT - 1) // UNIT, n, row_bytes, COMPUTE_SIZE, COMPUTE)
    k_stored = tokens(args, K, b, head_kv, k0, n, d, STORAGE_SIZE, STORAGE)
    call_pack(args[PACK], k_stored, k_t, args[PACK_SCALE])
    call_pack(args[PACK], tokens(args, V, b, head_kv, k0, n, dv, STORAGE_SIZE, STORAGE), v_t, ONE)
    k = load_keys(args, k_stored, scratch + keys)
    dk = key_sums(scratch + dkeys, n, d, row_bytes)
    dvs = key_sums(scratch + dvalues, n, dv, row_bytes)

    tiles = (n_q + block_q - 1) // block_q
    for h in range(head_kv * group, (head_kv + 1) * group):
        tile = np.int64(0)
        while tile < tiles:
            end, state = next_group(args, b, h, k0, k0 + n, tile, tiles, block_q, n_q, False)
            while state != EMPTY and tile < end:
                row0, last = tile * block_q, min((tile + 1) * block_q, n_q)
                while row0 < last:
                    stop, run = last, state
                    if state == PARTIAL:
                        stop, run = next_run(args, b, h, k0, k0 + n, row0, last, n_q, False)
                    if run != EMPTY:
                        backward_rows(args, b, h, part, row0, stop - row0, k0, run, k_t, v_t, k, dk, dvs, scratch)
                    row0 = stop
                tile += 1
            tile = end
    dk_stored = tokens(args, DK, b, head_kv, k0, n, d, STORAGE_SIZE, STORAGE)
    dv_stored = tokens(args, DV, b, head_kv, k0, n, dv, STORAGE_SIZE, STORAGE)
    finite = store_key_sums(args, dk, dk_stored, scratch + scores)
    return finite & store_key_sums(args, dvs, dv_stored, scratch + scores)


@entry(types.void(types.int64, types.int64))
def prepare(address, thread):
    """delta = rowsum(dO * O) - dlse, and the log-sum-exp with +inf for rows without keys, whose weights so become 0."""
    args = vector(address, SIZE, 8, np.int64)
    blocks = (args[N_Q] + args[BLOCK_Q] - 1) // args[BLOCK_Q]
    while True:
        task = next_task(address + 8 * COUNTER)
        if task >= args[TASKS]:
            break
        head, first = task // blocks, task % blocks * args[BLOCK_Q]
        b, h = head // args[HEADS], head % args[HEADS]
        count = min(args[BLOCK_Q], args[N_Q] - first)
        out = tokens(args, OUT, b, h, first, count, args[DIM_V], STORAGE_SIZE, STORAGE)
        dout = tokens(args, DOUT, b, h, first, count, args[DIM_V], STORAGE_SIZE, STORAGE)
        lse, shift = row_values(args, LSE, b, h, first, count), row_values(args, SHIFT, b, h, first, count)
        delta = row_values(args, DELTA, b, h, first, count)
        for i in range(count):
            total = COMPUTE(0)
            for j in range(args[DIM_V]):
                total += widen(out[i, j]) * widen(dout[i, j])
            if args[DLSE] != 0:
                total -= row_values(args, DLSE, b, h, first, count)[i]
            empty = lse[i] == -np.inf
            delta[i] = COMPUTE(0) if empty else total
            shift[i] = np.inf if empty else lse[i]


@entry(types.void(types.int64, types.int64))
def worker(address, thread):
    """Draw parts of key/value heads until none is left. A part takes every SPLITS-th key tile, so causal parts
    weigh the same.
    """
    args = vector(address, SIZE, 8, np.int64)
    scratch = args[SCRATCH] + thread * args[SCRATCH_BYTES]
    heads_kv = args[HEADS] // args[GROUP]
    while True:
        task = next_task(address + 8 * COUNTER)
        if task >= args[TASKS]:
            break
        head, part = task // args[SPLITS], task % args[SPLITS]
        b, head_kv = head // heads_kv, head % heads_kv
        size = args[GROUP] * args[N_Q] * args[DIM]
        dq_at = (
            args[DQ_PARTIAL]
            + ((part * args[BATCH] + b) * args[HEADS] + head_kv * args[GROUP]) * args[N_Q] * args[DIM] * COMPUTE_SIZE
        )
        vector(dq_at, size, COMPUTE_SIZE, COMPUTE)[:] = 0
        tiles = (keys_of(args, b) + args[BLOCK_K] - 1) // args[BLOCK_K]
        for key_tile in range(part, tiles, args[SPLITS]):
            if not backward_keys(args, b, head_kv, part, key_tile, scratch):
                args[NON_FINITE] = 1


@entry(types.void(types.int64, types.int64))
def reduce(address, thread):
    """dQ from the sums of the parts, always added in the same order."""
    args = vector(address, SIZE, 8, np.int64)
    blocks = (args[N_Q] + args[BLOCK_Q] - 1) // args[BLOCK_Q]
    d = args[DIM]
    part_bytes = args[BATCH] * args[HEADS] * args[N_Q] * d * COMPUTE_SIZE
    while True:
        task = next_task(address + 8 * COUNTER)
        if task >= args[TASKS]:
            break
        head, first = task // blocks, task % blocks * args[BLOCK_Q]
        count = min(args[BLOCK_Q], args[N_Q] - first)
        target = tokens(args, DQ, head // args[HEADS], head % args[HEADS], first, count, d, STORAGE_SIZE, STORAGE)
        at = args[DQ_PARTIAL] + (head * args[N_Q] + first) * d * COMPUTE_SIZE
        for i in range(count):
            for j in range(d):
                total = COMPUTE(0)
                for part in range(args[SPLITS]):
                    total += vector(at + part * part_bytes, count * d, COMPUTE_SIZE, COMPUTE)[i * d + j]
                if not np.isfinite(total):
                    args[NON_FINITE] = 1
                target[i, j] = narrow(total)

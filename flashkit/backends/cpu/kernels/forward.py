"""Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1), scores transposed: one column a query.

A task is one block of queries of one head. With queries along the vector lanes the softmax needs no operation
across lanes, K and V are used where they lie, and only Q is packed. The names that no import brings (STORAGE,
STORAGE_SIZE, COMPUTE, COMPUTE_SIZE, IN_PLACE, widen, narrow, load_tile) are the head that specialise.py puts before
this text.

    Q^T  panels [panel][D][PANEL]        scaled queries; a panel is a few vectors of columns
    S^T  tile   [BLOCK_K][PANEL]         scores of one panel, then weights
    O^T  panels [panel][DV][PANEL]       output, unscaled
    m, l        [panel][PANEL]           running maximum and sum of each query
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.memory import (
    call_column_max,
    call_exponentials,
    call_pack,
    call_product,
    call_unpack,
    double_from_bits,
    matrix,
    next_task,
    vector,
)
from flashkit.backends.cpu.scratch import forward_layout
from flashkit.backends.cpu.tiling import drop, keys_of, modify, next_group, next_run, scale_tile, tokens


@njit(**options)
def load_queries(args, source, target):
    """Transpose and scale; columns without a query become 0."""
    call_pack(args[PACK], source, target, args[PACK_SCALE])
    packed = (source.shape[0] + args[LANES] - 1) // args[LANES] * args[LANES]
    for d in range(target.shape[0]):
        for i in range(packed, target.shape[1]):
            target[d, i] = 0


@njit(**options)
def online_softmax(args, tile, m, l, top, shift, factor, output):
    """Scores to weights relative to a reference m near the running maximum; what was summed before is rescaled where m
    moves, which it does only when a score exceeds it by SLACK: nearly never after the first tiles.
    """
    columns = tile.shape[1]
    for i in range(columns):
        top[i] = m[i]
    call_column_max(args[COLUMN_MAX], tile, top)
    moved = False
    for i in range(columns):
        moved |= top[i] > m[i] + SLACK
    if moved:
        for i in range(columns):
            factor[0, i] = m[i]
            m[i] = top[i]
    for i in range(columns):
        # A query that has seen no key yet keeps the shift 0, so that -inf - shift stays -inf.
        shift[i] = 0 if m[i] == -np.inf else m[i]
    if moved:
        rest = COMPUTE(double_from_bits(args[REST_SCALE]))
        for i in range(columns):
            factor[0, i] = (factor[0, i] - shift[i]) * rest
            top[i] = 0
        call_exponentials(args[EXPONENTIALS], factor, top, top)
        for i in range(columns):
            l[i] *= top[i]
        for d in range(output.shape[0]):
            for i in range(columns):
                output[d, i] *= top[i]
    exponentials(args, tile, shift, l)


@njit(**options)
def finish(args, b, h, first, count, output, m, l, check):
    """Divide by the sums, transpose back and store output and log-sum-exp. Returns whether all of it is finite."""
    out = tokens(args, OUT, b, h, first, count, args[DIM_V], STORAGE_SIZE, STORAGE)
    lse = vector(
        args[LSE] + b * args[LSE + 1] + h * args[LSE + 2] + first * args[LSE + 3], count, args[LSE + 3], COMPUTE
    )
    rest = COMPUTE(double_from_bits(args[REST_SCALE]))
    for i in range(count):
        top, total, factor = m[i] * rest, l[i], COMPUTE(1)
        if args[SINKS] != 0:
            # The sink is one more logit in the sum, without a value.
            sink = vector(args[SINKS], args[HEADS], COMPUTE_SIZE, COMPUTE)[h]
            if sink != -np.inf:
                old = top
                top = max(old, sink)
                factor = np.exp(old - top)
                total = total * factor + np.exp(sink - top)
        if total == 0:  # no key is visible
            lse[i], l[i] = -np.inf, 0
        else:
            lse[i], l[i] = top + np.log(total), factor / total
    for i in range(args[LANES]):
        check[i] = 0
    call_unpack(args[UNPACK], output, out, l, check)
    finite = True
    for i in range(args[LANES]):
        finite &= check[i] == 0
    return finite


@njit(**options)
def forward_block(args, b, h, first, count, scratch, careful):
    """One block of queries against all the keys it sees. Returns whether all results are finite."""
    d, dv, block_k, panel, lanes = args[DIM], args[DIM_V], args[BLOCK_K], args[PANEL], args[LANES]
    panel_bytes = panel * COMPUTE_SIZE
    q_words, q_rows, o_rows = (d + UNIT - 1) // UNIT, padded(d), padded(dv)
    panels = (count + panel - 1) // panel
    outputs, scores, keys, values, maxima, sums, rows, turned, _ = forward_layout(
        panels, panel, block_k, q_rows, o_rows, COMPUTE_SIZE, args[TURNED]
    )
    m = vector(scratch + maxima, panels * panel, COMPUTE_SIZE, COMPUTE)
    l = vector(scratch + sums, panels * panel, COMPUTE_SIZE, COMPUTE)
    output = matrix(scratch + outputs, panels * o_rows, panel, panel_bytes, COMPUTE_SIZE, COMPUTE)
    for i in range(panels * panel):
        m[i], l[i] = -np.inf, 0
    for i in range(panels * o_rows):
        for j in range(panel):
            output[i, j] = 0
    shift = vector(scratch + rows, panel, COMPUTE_SIZE, COMPUTE)
    top = vector(scratch + rows + panel_bytes, panel, COMPUTE_SIZE, COMPUTE)

    for p in range(panels):
        row0 = first + p * panel
        q = tokens(args, Q, b, h, row0, min(panel, first + count - row0), d, STORAGE_SIZE, STORAGE)
        q_t = matrix(scratch + p * q_rows * panel_bytes, q_words, panel, panel_bytes, COMPUTE_SIZE, COMPUTE)
        load_queries(args, q, q_t)

    head_kv = h // args[GROUP]
    n_k = keys_of(args, b)
    tiles = (n_k + block_k - 1) // block_k
    tile = np.int64(0)
    while tile < tiles:
        end, state = next_group(args, b, h, first, first + count, tile, tiles, block_k, n_k, True)
        while state != EMPTY and tile < end:
            k0 = tile * block_k
            n = min(block_k, n_k - k0)
            k = load_tile(tokens(args, K, b, head_kv, k0, n, d, STORAGE_SIZE, STORAGE), scratch + keys)
            v_t = load_values(args, tokens(args, V, b, head_kv, k0, n, dv, STORAGE_SIZE, STORAGE), scratch + values)
            for p in range(panels):
                row0 = first + p * panel
                columns = min(panel, first + count - row0)
                width = (columns + lanes - 1) // lanes * lanes
                q_t = matrix(scratch + p * q_rows * panel_bytes, q_words, width, panel_bytes, COMPUTE_SIZE, COMPUTE)
                o_at = scratch + outputs + p * o_rows * panel_bytes
                o_t = matrix(o_at, dv, width, panel_bytes, COMPUTE_SIZE, COMPUTE)
                factor = matrix(scratch + rows + 2 * panel_bytes, 1, width, panel_bytes, COMPUTE_SIZE, COMPUTE)
                at = slice(p * panel, p * panel + width)
                start = k0
                while start < k0 + n:
                    # One run of keys after the other until an EMPTY one; their weights are summed together.
                    begin, run = start, state
                    while start < k0 + n:
                        stop = k0 + n
                        if state == PARTIAL:
                            stop, run = next_run(args, b, h, row0, row0 + columns, start, stop, n_k, True)
                            if run == EMPTY:
                                break
                        s_t = matrix(
                            scratch + scores + (start - begin) * panel_bytes,
                            stop - start, width, panel_bytes, COMPUTE_SIZE, COMPUTE,
                        )  # fmt: skip
                        call_product(args[PRODUCT], k[start - k0 : stop - k0], q_t, s_t)  # scores
                        scale_tile(args, s_t)
                        modify(args, run, s_t[:, :columns], scratch + turned, b, h, row0, start)
                        start = stop
                    if start > begin:
                        p_t = matrix(scratch + scores, start - begin, width, panel_bytes, COMPUTE_SIZE, COMPUTE)
                        online_softmax(args, p_t, m[at], l[at], top, shift, factor, o_t)
                        if args[DROPOUT] != 0:
                            drop(args, p_t[:, :columns], True, b, h, row0, begin)
                        v_run = v_t[:, (begin - k0) // UNIT : (start - k0 + UNIT - 1) // UNIT]
                        accumulate_output(args, v_run, p_t, start - begin, o_t, careful)
                    if run == EMPTY:
                        start = stop
            tile += 1
        tile = end

    finite = True
    for p in range(panels):
        row0 = first + p * panel
        o_t = matrix(scratch + outputs + p * o_rows * panel_bytes, dv, panel, panel_bytes, COMPUTE_SIZE, COMPUTE)
        at = slice(p * panel, (p + 1) * panel)
        finite &= finish(args, b, h, row0, min(panel, first + count - row0), o_t, m[at], l[at], top)
    return finite


@entry(types.void(types.int64, types.int64))
def worker(address, thread):
    """Draw blocks of queries until none is left; the last rows first, which under a causal mask see the most."""
    args = vector(address, SIZE, 8, np.int64)
    scratch = args[SCRATCH] + thread * args[SCRATCH_BYTES]
    heads = args[BATCH] * args[HEADS]
    blocks = (args[N_Q] + args[BLOCK_Q] - 1) // args[BLOCK_Q]
    while True:
        task = next_task(address + 8 * COUNTER)
        if task >= args[TASKS]:
            break
        first = (blocks - 1 - task // heads) * args[BLOCK_Q]
        b, h = divmod(task % heads, args[HEADS])
        count = min(args[BLOCK_Q], args[N_Q] - first)
        # A zero weight times an infinity hidden by the mask would be NaN: such a block, rare, is done again the
        # careful way.
        for careful in range(2):
            if forward_block(args, b, h, first, count, scratch, careful):
                break

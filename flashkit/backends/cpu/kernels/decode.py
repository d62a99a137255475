"""Forward pass of few queries (flash-decoding: Dao, Haziza, Massa, Sizov 2023): the keys are split, each read once.

A task is a part of the keys of one key/value head, with all queries that see it: the rows of every query head of its
group, packed. Scores have one row a query and keys along the lanes. Each part has its own sums; whoever ends the
last part adds them all up, in the order of the parts, so that the result does not depend on who did what.

    Q    [rows][D]           queries, row g * n_q + i: query i of the group's head g; padded with 0
    S    [rows][keys]        scores, then weights, of a tile, or of a stretch of them where nothing is masked
    O    [rows][DV]          output of the part, unscaled; with m and l in the memory that parts are added up from
    m, l [rows]              running maximum and sum of each row
    ends, states [group]     each head's group of tiles of one state that the tile is in
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.memory import (
    arrive,
    call_row_scores,
    call_row_values,
    call_row_weights,
    matrix,
    next_task,
    vector,
)
from flashkit.backends.cpu.scratch import decode_layout, part_layout
from flashkit.backends.cpu.tiling import drop, keys_of, modify, next_group, tokens


@njit(**options)
def load_queries(args, b, head_kv, target):
    n_q, d = args[N_Q], args[DIM]
    for g in range(args[GROUP]):
        q = tokens(args, Q, b, head_kv * args[GROUP] + g, 0, n_q, d, STORAGE_SIZE, STORAGE)
        for i in range(n_q):
            load_query(q[i], target[g * n_q + i])


@njit(**options)
def careful_accumulate(p, v, factor, output):
    """What the micro-kernel computes, where a zero weight leaves its value out, whatever it is."""
    for i in range(p.shape[0]):
        for c in range(output.shape[1]):
            output[i, c] *= factor[i]
        for j in range(p.shape[1]):
            if p[i, j] != 0:
                for c in range(output.shape[1]):
                    output[i, c] += p[i, j] * widen(v[j, c])


@njit(**options)
def part_of(args, place):
    """O, m and l of a part."""
    rows, dv = args[GROUP] * args[N_Q], args[DIM_V]
    at = args[SCRATCH] + args[PARTS] + place * args[PART_BYTES]
    maxima, sums, _ = part_layout(rows, dv, COMPUTE_SIZE)
    return (
        matrix(at, rows, dv, dv * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE),
        vector(at + maxima, rows, COMPUTE_SIZE, COMPUTE),
        vector(at + sums, rows, COMPUTE_SIZE, COMPUTE),
    )


@njit(**options)
def finish(args, b, head_kv, first, parts):
    """Add up the parts, divide by the sums, and store output and log-sum-exp."""
    n_q, dv = args[N_Q], args[DIM_V]
    total_output, _, _ = part_of(args, first)
    for g in range(args[GROUP]):
        h = head_kv * args[GROUP] + g
        out = tokens(args, OUT, b, h, 0, n_q, dv, STORAGE_SIZE, STORAGE)
        lse = vector(args[LSE] + b * args[LSE + 1] + h * args[LSE + 2], n_q, args[LSE + 3], COMPUTE)
        # The sink is one more logit in the sum, without a value.
        sink = vector(args[SINKS], args[HEADS], COMPUTE_SIZE, COMPUTE)[h] if args[SINKS] != 0 else COMPUTE(-np.inf)
        for i in range(n_q):
            row = g * n_q + i
            top = sink
            for part in range(first, first + parts):
                _, m, _ = part_of(args, part)
                top = max(top, m[row])
            shift = COMPUTE(0) if top == -np.inf else top
            total = np.exp(sink - shift)
            for part in range(first, first + parts):
                _, m, l = part_of(args, part)
                total += np.exp(m[row] - shift) * l[row]
            lse[i] = -np.inf if total == 0 else top + np.log(total)
            for part in range(first, first + parts):
                output, m, _ = part_of(args, part)
                # Without a visible key there is nothing but zeros to add, and a part that weighs nothing is left out,
                # whatever it holds.
                weight = COMPUTE(0) if total == 0 else np.exp(m[row] - shift) / total
                if part == first:
                    for c in range(dv):
                        total_output[row, c] = 0 if weight == 0 else weight * output[row, c]
                elif weight != 0:
                    for c in range(dv):
                        total_output[row, c] += weight * output[row, c]
            for c in range(dv):
                out[i, c] = narrow(total_output[row, c])


@njit(**options)
def decode_part(args, b, head_kv, start, stop, place, scratch, careful):
    """Keys start ... stop - 1 for all rows of a key/value head. Returns whether the output is finite."""
    d, dv, n_q, group, block_k, lanes = args[DIM], args[DIM_V], args[N_Q], args[GROUP], args[BLOCK_K], args[LANES]
    rows = group * n_q
    padded = (d + UNIT * lanes - 1) // (UNIT * lanes) * lanes
    scores, factors, states, ends, _ = decode_layout(rows, group, STRETCH * block_k, padded, COMPUTE_SIZE)
    q = matrix(scratch, rows, padded, padded * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)
    factor = vector(scratch + factors, rows, COMPUTE_SIZE, COMPUTE)
    state, end = vector(scratch + states, group, 8, np.int64), vector(scratch + ends, group, 8, np.int64)
    output, m, l = part_of(args, place)
    for i in range(rows):
        m[i], l[i] = -np.inf, 0
        for c in range(dv):
            output[i, c] = 0
    for g in range(group):
        end[g] = 0
    load_queries(args, b, head_kv, q)

    tile, tiles = start // block_k, (stop + block_k - 1) // block_k
    while tile < tiles:
        following, visible, whole = tiles, False, True
        for g in range(group):
            if end[g] <= tile:
                h = head_kv * group + g
                end[g], state[g] = next_group(args, b, h, 0, n_q, tile, tiles, block_k, stop, True)
            following = min(following, end[g])
            visible |= state[g] != EMPTY
            whole &= state[g] == FULL
        if not visible:
            tile = following
            continue
        k0 = tile * block_k
        following = min(following, tile + STRETCH) if whole else tile + 1
        n = min(following * block_k, stop) - k0
        k = tokens(args, K, b, head_kv, k0, n, d, STORAGE_SIZE, STORAGE)
        v = tokens(args, V, b, head_kv, k0, n, dv, STORAGE_SIZE, STORAGE)
        s = matrix(scratch + scores, rows, n, STRETCH * block_k * COMPUTE_SIZE, COMPUTE_SIZE, COMPUTE)
        call_row_scores(args[ROW_SCORES], q, k, s, d, args[SCALE])
        for g in range(group):
            head = s[g * n_q : (g + 1) * n_q]
            if state[g] == EMPTY:
                head[:] = -np.inf
            else:
                modify(args, state[g], head, 0, b, head_kv * group + g, 0, k0)
        call_row_weights(args[ROW_WEIGHTS], s, m, l, factor)  # online_softmax
        if args[DROPOUT] != 0:
            for g in range(group):
                drop(args, s[g * n_q : (g + 1) * n_q], False, b, head_kv * group + g, 0, k0)
        if careful:  # accumulate
            careful_accumulate(s, v, factor, output)
        else:
            call_row_values(args[ROW_VALUES], s, v, output, factor)
        tile = following

    check = COMPUTE(0)
    for i in range(rows):
        for c in range(dv):
            check += output[i, c] * 0
    return check == 0


@entry(types.void(types.int64, types.int64))
def worker(address, thread):
    """Draw parts until none is left."""
    args = vector(address, SIZE, 8, np.int64)
    scratch = args[SCRATCH] + thread * args[SCRATCH_BYTES]
    parts, heads_kv = args[SPLITS], args[HEADS] // args[GROUP]
    while True:
        task = next_task(address + 8 * COUNTER)
        if task >= args[TASKS]:
            break
        b, head_kv = divmod(task // parts, heads_kv)
        start = task % parts * args[PART_KEYS]
        stop = min(start + args[PART_KEYS], keys_of(args, b))
        place = thread if parts == 1 else task
        # A zero weight times an infinity hidden by the mask would be NaN: such a part, rare, is done again the
        # careful way.
        for careful in range(2):
            if decode_part(args, b, head_kv, start, stop, place, scratch, careful):
                break
        if parts == 1:
            finish(args, b, head_kv, thread, 1)
        elif arrive(address + 8 * DONE) + 1 == args[TASKS]:
            for head in range(args[BATCH] * heads_kv):
                finish(args, head // heads_kv, head % heads_kv, head * parts, parts)

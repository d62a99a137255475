"""Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on transposed tiles: one column per query.

A work tile is a block of queries of one head. With queries along the vector lanes the softmax needs no operation across
lanes, K and V are used where they lie, and only Q is packed. specialise.py puts common.py, the operands, the K/V
loader and panels.py before this text.

    Q^T   [panel][D][PANEL]      scaled queries; a panel is a few vectors of columns
    S^T   [BLOCK_K][PANEL]       scores of one panel, then P^T
    O^T   [panel][DV][PANEL]     o_acc: the output before it is divided by l
    m, l  [panel][PANEL]         row_max, to which P is relative, and row_sum of each query
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.micro_calls import call_online_softmax_stats
from flashkit.backends.cpu.scratch import forward_layout
from flashkit.backends.cpu.seq_info import seq_info
from flashkit.backends.cpu.tile_ops import dropout, modify, row_statistics
from flashkit.backends.cpu.tile_scheduler import next_q_tile, stopped
from flashkit.backends.cpu.tiling import next_group, next_run
from flashkit.backends.cpu.views import vector


@njit(**options)
def forward_work_tile(args, seq, b, h, first, count, scratch, nonfinite):
    """One block of queries against all keys that it sees. Returns whether all of O is finite."""
    # Tiles.
    d, dv, block_k, panel, lanes = args[DIM], args[DIM_V], args[BLOCK_K], args[PANEL], args[LANES]
    panel_bytes, panels = panel * ACCUM_SIZE, (count + panel - 1) // panel
    q_words, q_rows_padded, o_rows = (d + K_PACK - 1) // K_PACK, padded(d), padded(dv)
    q_bytes, o_bytes = q_rows_padded * panel_bytes, o_rows * panel_bytes
    head_kv = h // args[GROUP]

    # Scratch memory.
    with_stats = args[ENTROPY] != 0
    gathered = STORAGE_SIZE if args[PAGE_TABLE] != 0 or args[DIM_PE] != 0 else 0
    at = forward_layout(panels, panel, block_k, q_rows_padded, o_rows, ACCUM_SIZE, args[TRANSPOSED_TILES], gathered, 0)
    m, l = accum_row(scratch + at.m, panels * panel), accum_row(scratch + at.l, panels * panel)
    o_acc = accum_tile(scratch + at.o_acc, panels * o_rows, panel, panel_bytes)
    check = accum_row(scratch + at.check, lanes)

    queries = panels * panel
    sums, tops = accum_row(scratch + at.more, queries), accum_row(scratch + at.more + queries * ACCUM_SIZE, queries)
    if with_stats:
        sums[:], tops[:] = 0, -np.inf
    for i in range(queries):
        m[i], l[i] = -np.inf, 0
    for i in range(panels * o_rows):
        for j in range(panel):
            o_acc[i, j] = 0
    for p in range(panels):
        row0 = first + p * panel
        q = q_rows(args, Q, seq, b, h, row0, min(panel, first + count - row0), d)
        load_q(args, q, accum_tile(scratch + p * q_bytes, q_words, panel, panel_bytes))

    tiles = (seq.n_k + block_k - 1) // block_k
    tile = np.int64(0)
    while tile < tiles and not stopped(args):
        end, state = next_group(args, seq, b, h, first, first + count, tile, tiles, block_k, seq.n_k, True)
        while state != EMPTY and tile < end and not stopped(args):
            k0 = tile * block_k
            n = min(block_k, seq.n_k - k0)
            k = load_k(args, seq, b, head_kv, k0, n, scratch + at.k, scratch + at.k_pages)  # load_tile
            v_t = load_v_t(args, seq, b, head_kv, k0, n, scratch + at.v, scratch + at.v_pages)
            at_once = state == FULL and not nonfinite and not with_stats and attends_at_once(args)
            if at_once:
                attend_at_once(
                    args, count, scratch, q_bytes, k, v_t, scratch + at.scores, scratch + at.m, scratch + at.l,
                    scratch + at.o_acc, o_bytes,
                )  # fmt: skip
            for p in range(0 if at_once else panels):
                row0 = first + p * panel
                columns = min(panel, first + count - row0)
                width = (columns + lanes - 1) // lanes * lanes
                q_t = accum_tile(scratch + p * q_bytes, q_words, width, panel_bytes)
                o_t = accum_tile(scratch + at.o_acc + p * o_bytes, dv, width, panel_bytes)
                stats = slice(p * panel, p * panel + width)
                start = k0
                while start < k0 + n:
                    # Runs of strips up to the next EMPTY one share one softmax and one product with V.
                    begin, run = start, state
                    while start < k0 + n:
                        stop = k0 + n
                        if state == PARTIAL:
                            stop, run = next_run(args, seq, b, h, row0, row0 + columns, start, stop, seq.n_k, True)
                            if run == EMPTY:
                                break
                        s_at = scratch + at.scores + (start - begin) * panel_bytes
                        s_t = accum_tile(s_at, stop - start, width, panel_bytes)
                        scores(args, k[start - k0 : stop - k0], q_t, s_t)
                        modify(args, seq, run, s_t[:, :columns], scratch + at.transposed, b, h, row0, start)
                        start = stop
                    if start > begin:
                        p_t = accum_tile(scratch + at.scores, start - begin, width, panel_bytes)
                        if with_stats:
                            call_online_softmax_stats(
                                args[ONLINE_SOFTMAX_STATS], p_t, m[stats], l[stats], o_t, tops[stats], sums[stats]
                            )
                        else:
                            online_softmax(args, p_t, m[stats], l[stats], o_t)
                        if args[DROPOUT] != 0:
                            dropout(args, p_t[:, :columns], True, b, h, row0, begin)
                        v_run = v_t[:, (begin - k0) // K_PACK : (start - k0 + K_PACK - 1) // K_PACK]
                        accumulate(args, v_run, p_t, start - begin, o_t, nonfinite)
                    if run == EMPTY:
                        start = stop
            tile += 1
        tile = end

    finite = True
    for p in range(panels):
        row0 = first + p * panel
        o_t = accum_tile(scratch + at.o_acc + p * o_bytes, dv, panel, panel_bytes)
        stats, columns = slice(p * panel, (p + 1) * panel), min(panel, first + count - row0)
        if with_stats:
            sink = accum_row(args[SINKS], args[HEADS])[h] if args[SINKS] != 0 else ACCUM(-np.inf)
            entropy = q_stats(args, ENTROPY, seq, b, h, row0, columns)
            max_logit = q_stats(args, MAX_LOGIT, seq, b, h, row0, columns)
            for i in range(columns):
                at_row = p * panel + i
                entropy[i], max_logit[i] = row_statistics(m[at_row], l[at_row], sums[at_row], tops[at_row], sink)
        finite &= epilogue(args, seq, b, h, row0, columns, o_t, m[stats], l[stats], check)
    return finite


@entry(types.void(types.int64, types.int64))
def forward(address, thread):
    args = vector(address, SIZE, 8, np.int64)
    scratch = args[SCRATCH] + thread * args[SCRATCH_BYTES]
    begin_products(args)
    work_tile = next_q_tile(args)
    while work_tile.valid:
        b, h, first = work_tile.b, work_tile.head, work_tile.block * args[BLOCK_Q]
        seq = seq_info(args, b, h)
        count = min(args[BLOCK_Q], seq.n_q - first)
        # P = 0 times an infinity that the mask hides is NaN. Such a work tile, rare, is computed again by the
        # non-finite fallback.
        for nonfinite in range(2):
            if forward_work_tile(args, seq, b, h, first, count, scratch, nonfinite):
                break
        work_tile = next_q_tile(args)
    end_products(args)

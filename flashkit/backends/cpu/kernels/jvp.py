"""Forward pass with tangents, in one pass over the keys, as kernels/forward.py goes over them: dS^T is a second tile of
scores. With E[dS] = rowsum(P dS), dO = P (dS - E[dS]) V + P dV and dLSE = E[dS]. specialise.py puts common.py, the
operands, the K/V loader and panels.py before this text.

    Q^T, dQ^T    [panel][D][PANEL]           scaled queries, then their tangents
    S^T, dS^T    [BLOCK_K][PANEL]            then P^T and (P dS)^T
    O^T          [panel][2 DV + 1][PANEL]    sums of P V, of P dS V + P dV, and of P dS
    m, l         [panel][PANEL]

A tangent whose address is 0 is 0.
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.micro_calls import call_gemm, call_unpack_transposed
from flashkit.backends.cpu.scratch import forward_layout
from flashkit.backends.cpu.seq_info import seq_info
from flashkit.backends.cpu.tile_ops import dropout, modify, visit_ds
from flashkit.backends.cpu.tile_scheduler import next_q_tile, stopped
from flashkit.backends.cpu.tiling import next_group, next_run
from flashkit.backends.cpu.views import vector


@njit(**options)
def score_tangents(args, k, dk, q_t, dq_t, ds_t):
    """dS^T = K dQ^T + dK Q^T."""
    if args[DQ] != 0:
        call_gemm(args[GEMM], k, dq_t, ds_t)
    if args[DK] != 0:
        call_gemm(args[GEMM_ADD] if args[DQ] != 0 else args[GEMM], dk, q_t, ds_t)


@njit(**options)
def weigh(p_t, ds_t, totals):
    """dS^T to (P dS)^T, whose columns are added to `totals`."""
    for i in range(p_t.shape[0]):
        for j in range(p_t.shape[1]):
            ds_t[i, j] = p_t[i, j] * ds_t[i, j] if p_t[i, j] != 0 else ACCUM(0)
            totals[j] += ds_t[i, j]


@njit(**options)
def epilogue_of_tangents(args, seq, b, h, first, count, o_acc, do_acc, totals, factor, check):
    """Store dO and dLSE. factor: of the epilogue of O. Returns whether all of dO is finite."""
    dlse = q_stats(args, DLSE, seq, b, h, first, count)
    for i in range(count):
        dlse[i] = totals[i] * factor[i]
    for c in range(do_acc.shape[0]):
        for i in range(count):
            do_acc[c, i] -= totals[i] * factor[i] * o_acc[c, i]
    for i in range(args[LANES]):
        check[i] = 0
    dout = q_rows(args, DOUT, seq, b, h, first, count, args[DIM_V])
    call_unpack_transposed(args[UNPACK_TRANSPOSED], do_acc, dout, factor, check)
    finite = True
    for i in range(args[LANES]):
        finite &= check[i] == 0
    return finite


@njit(**options)
def jvp_work_tile(args, seq, b, h, first, count, scratch, nonfinite):
    """One block of queries against all keys that it sees. Returns whether all of O and dO is finite."""
    # Tiles.
    d, dv, block_k, panel, lanes = args[DIM], args[DIM_V], args[BLOCK_K], args[PANEL], args[LANES]
    panel_bytes, panels = panel * ACCUM_SIZE, (count + panel - 1) // panel
    q_bytes, o_rows = d * panel_bytes, 2 * dv + 1
    o_bytes, head_kv = o_rows * panel_bytes, h // args[GROUP]
    has_dq, has_dk, has_dv = args[DQ] != 0, args[DK] != 0, args[DV] != 0
    moves = has_dq or has_dk  # whether scores have tangents

    # Scratch memory.
    at = forward_layout(panels, panel, block_k, 2 * d, o_rows, ACCUM_SIZE, args[TRANSPOSED_TILES], 0, 0)
    m, l = accum_row(scratch + at.m, panels * panel), accum_row(scratch + at.l, panels * panel)
    o_acc = accum_tile(scratch + at.o_acc, panels * o_rows, panel, panel_bytes)
    check, tangents = accum_row(scratch + at.check, lanes), scratch + panels * q_bytes
    dk_at, dv_at = scratch + at.k + block_k * d * ACCUM_SIZE, scratch + at.v + block_k * dv * ACCUM_SIZE

    for i in range(panels * panel):
        m[i], l[i] = -np.inf, 0
    o_acc[:] = 0
    for p in range(panels):
        row0 = first + p * panel
        columns = min(panel, first + count - row0)
        q = q_rows(args, Q, seq, b, h, row0, columns, d)
        load_q(args, q, accum_tile(scratch + p * q_bytes, d, panel, panel_bytes))
        if has_dq:
            dq = q_rows(args, DQ, seq, b, h, row0, columns, d)
            load_q(args, dq, accum_tile(tangents + p * q_bytes, d, panel, panel_bytes))

    tiles = (seq.n_k + block_k - 1) // block_k
    tile = np.int64(0)
    while tile < tiles and not stopped(args):
        end, state = next_group(args, seq, b, h, first, first + count, tile, tiles, block_k, seq.n_k, True)
        while state != EMPTY and tile < end and not stopped(args):
            k0 = tile * block_k
            n = min(block_k, seq.n_k - k0)
            k = load_tile(args, kv_rows(args, K, seq, b, head_kv, k0, n, d), scratch + at.k)
            v_t = load_tile_t(args, kv_rows(args, V, seq, b, head_kv, k0, n, dv), scratch + at.v)
            dk, dv_t = k, v_t
            if has_dk:
                dk = load_tile(args, kv_rows(args, DK, seq, b, head_kv, k0, n, d), dk_at)
            if has_dv:
                dv_t = load_tile_t(args, kv_rows(args, DV, seq, b, head_kv, k0, n, dv), dv_at)
            for p in range(panels):
                row0 = first + p * panel
                columns = min(panel, first + count - row0)
                width = (columns + lanes - 1) // lanes * lanes
                q_t = accum_tile(scratch + p * q_bytes, d, width, panel_bytes)
                dq_t = accum_tile(tangents + p * q_bytes, d, width, panel_bytes)
                o_t = accum_tile(scratch + at.o_acc + p * o_bytes, o_rows, width, panel_bytes)
                stats = slice(p * panel, p * panel + width)
                start = k0
                while start < k0 + n:
                    # Runs of strips up to the next EMPTY one share one softmax and the products with V.
                    begin, run = start, state
                    while start < k0 + n:
                        stop = k0 + n
                        if state == PARTIAL:
                            stop, run = next_run(args, seq, b, h, row0, row0 + columns, start, stop, seq.n_k, True)
                            if run == EMPTY:
                                break
                        place, keys = (start - begin) * panel_bytes, slice(start - k0, stop - k0)
                        s_t = accum_tile(scratch + at.scores + place, stop - start, width, panel_bytes)
                        ds_t = accum_tile(scratch + at.more + place, stop - start, width, panel_bytes)
                        scores(args, k[keys], q_t, s_t)
                        score_tangents(args, k[keys], dk[keys], q_t, dq_t, ds_t)
                        modify(args, seq, run, s_t[:, :columns], scratch + at.transposed + place, b, h, row0, start)
                        start = stop
                    if start > begin:
                        p_t = accum_tile(scratch + at.scores, start - begin, width, panel_bytes)
                        ds_t = accum_tile(scratch + at.more, start - begin, width, panel_bytes)
                        v_run, dv_run = v_t[:, begin - k0 : start - k0], dv_t[:, begin - k0 : start - k0]
                        online_softmax(args, p_t, m[stats], l[stats], o_t)
                        if moves:
                            slopes = scratch + at.transposed
                            visit_ds(args, seq, p_t[:, :columns], ds_t[:, :columns], slopes, b, h, row0, begin)
                            weigh(p_t, ds_t, o_t[2 * dv])
                        if args[DROPOUT] != 0:
                            dropout(args, p_t[:, :columns], True, b, h, row0, begin)
                            if moves:
                                dropout(args, ds_t[:, :columns], True, b, h, row0, begin)
                        accumulate(args, v_run, p_t, start - begin, o_t[:dv], nonfinite)
                        if moves:
                            accumulate(args, v_run, ds_t, start - begin, o_t[dv : 2 * dv], nonfinite)
                        if has_dv:
                            accumulate(args, dv_run, p_t, start - begin, o_t[dv : 2 * dv], nonfinite)
                    if run == EMPTY:
                        start = stop
            tile += 1
        tile = end

    finite = True
    for p in range(panels):
        row0 = first + p * panel
        columns, stats = min(panel, first + count - row0), slice(p * panel, (p + 1) * panel)
        o_t = accum_tile(scratch + at.o_acc + p * o_bytes, o_rows, panel, panel_bytes)
        finite &= epilogue(args, seq, b, h, row0, columns, o_t[:dv], m[stats], l[stats], check)
        finite &= epilogue_of_tangents(
            args, seq, b, h, row0, columns, o_t[:dv], o_t[dv : 2 * dv], o_t[2 * dv], l[stats], check
        )
    return finite


@entry(types.void(types.int64, types.int64))
def forward(address, thread):
    args = vector(address, SIZE, 8, np.int64)
    scratch = args[SCRATCH] + thread * args[SCRATCH_BYTES]
    work_tile = next_q_tile(args)
    while work_tile.valid:
        b, h, first = work_tile.b, work_tile.head, work_tile.block * args[BLOCK_Q]
        seq = seq_info(args, b, h)
        count = min(args[BLOCK_Q], seq.n_q - first)
        # As in kernels/forward.py: P = 0 times an infinity that the mask hides is NaN.
        for nonfinite in range(2):
            if jvp_work_tile(args, seq, b, h, first, count, scratch, nonfinite):
                break
        work_tile = next_q_tile(args)

"""Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on transposed tiles: one column per query.

A work tile is a block of queries of one head. With queries along the vector lanes the softmax needs no operation across
lanes, K and V are used where they lie, and only Q is packed. specialise.py puts common.py, the operands and the K/V
loader before this text.

    Q^T   [panel][D][PANEL]      scaled queries; a panel is a few vectors of columns
    S^T   [BLOCK_K][PANEL]       scores of one panel, then P^T
    O^T   [panel][DV][PANEL]     o_acc: the output before it is divided by l
    m, l  [panel][PANEL]         row_max, to which P is relative, and row_sum of each query

JVP, from the head: also tangents, in the same pass. With E[dS] = rowsum(P dS), dO = P (dS - E[dS]) V + P dV and dLSE =
E[dS]. A tangent whose address is 0 is 0.

    dQ^T  [panel][D][PANEL]      behind all of Q^T
    dS^T  [BLOCK_K][PANEL]       then (P dS)^T
    dO^T  [DV + 1][PANEL]        behind O^T of each panel: sums of P dS V + P dV, and of P dS
"""


@njit(**options)
def load_q(args, q, q_t):
    """Transpose and scale; columns without a query become 0."""
    call_pack_transposed(args[PACK_TRANSPOSED], q, q_t, args[PACK_SCALE])
    packed = (q.shape[0] + args[LANES] - 1) // args[LANES] * args[LANES]
    for d in range(q_t.shape[0]):
        for i in range(packed, q_t.shape[1]):
            q_t[d, i] = 0


@njit(**options)
def scores(args, k, q_t, s_t):
    """S^T = K Q^T."""
    call_gemm(args[GEMM], k, q_t, s_t)
    scale_tile(args, s_t)


@njit(**options)
def store_transposed(args, acc, target, factor, check):
    """Store columns times factors, rounded, as rows. Returns whether all of them are finite."""
    for i in range(args[LANES]):
        check[i] = 0
    call_unpack_transposed(args[UNPACK_TRANSPOSED], acc, target, factor, check)
    finite = True
    for i in range(args[LANES]):
        finite &= check[i] == 0
    return finite


@njit(**options)
def epilogue(args, seq, b, h, first, count, o_acc, m, l, check):
    """Divide by l, transpose and round; store O and the LSE. Returns whether all of O is finite."""
    out = q_rows(args, OUT, seq, b, h, first, count, args[DIM_V])
    lse = q_stats(args, LSE, seq, b, h, first, count)
    scale = ACCUM(double_from_bits(args[SOFTMAX_SCALE]))
    for i in range(count):
        row_max, row_sum, rescale = m[i] * scale, l[i], ACCUM(1)
        if args[SINKS] != 0:
            # The sink is one more logit in the sum, without a value.
            sink = accum_row(args[SINKS], args[HEADS])[h]
            if sink != -np.inf:
                before = row_max
                row_max = max(before, sink)
                rescale = np.exp(before - row_max)
                row_sum = row_sum * rescale + np.exp(sink - row_max)
        if row_sum == 0:  # no key is visible
            lse[i], l[i] = -np.inf, 0
        else:
            lse[i], l[i] = row_max + np.log(row_sum), rescale / row_sum
    return store_transposed(args, o_acc, out, l, check)

# --- tangents ---------------------------------------------------------------------------------------------------------


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
    return store_transposed(args, do_acc, q_rows(args, DOUT, seq, b, h, first, count, args[DIM_V]), factor, check)


# --- the kernel -------------------------------------------------------------------------------------------------------


@njit(**options)
def forward_work_tile(args, seq, b, h, first, count, scratch, nonfinite):
    """One block of queries against all keys that it sees. Returns whether all of O, and dO, is finite."""
    # Tiles.
    d, dv, block_k, panel, lanes = args[DIM], args[DIM_V], args[BLOCK_K], args[PANEL], args[LANES]
    panel_bytes, panels = panel * ACCUM_SIZE, (count + panel - 1) // panel
    q_words, q_rows_padded, o_rows = (d + K_PACK - 1) // K_PACK, padded(d), padded(dv)
    if JVP:
        o_rows = 2 * dv + 1
        has_dq, has_dk, has_dv = args[DQ] != 0, args[DK] != 0, args[DV] != 0
        moves = has_dq or has_dk  # whether scores have tangents
    q_bytes, o_bytes = q_rows_padded * panel_bytes, o_rows * panel_bytes
    head_kv = h // args[GROUP]

    # Scratch memory.
    with_stats = args[ENTROPY] != 0
    gathered = STORAGE_SIZE if args[PAGE_TABLE] != 0 or args[DIM_PE] != 0 else 0
    if JVP:
        q_rows_padded = 2 * d
    at = forward_layout(panels, panel, block_k, q_rows_padded, o_rows, ACCUM_SIZE, args[TRANSPOSED_TILES], gathered, 0)
    if JVP:
        tangents, ds_at = scratch + panels * q_bytes, scratch + at.more
        dk_at, dv_at = scratch + at.k + block_k * d * ACCUM_SIZE, scratch + at.v + block_k * dv * ACCUM_SIZE
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
        if JVP:
            if has_dq:
                dq = q_rows(args, DQ, seq, b, h, row0, min(panel, first + count - row0), d)
                load_q(args, dq, accum_tile(tangents + p * q_bytes, d, panel, panel_bytes))

    tiles = (seq.n_k + block_k - 1) // block_k
    tile = np.int64(0)
    while tile < tiles and not stopped(args):
        end, state = next_group(args, seq, b, h, first, first + count, tile, tiles, block_k, seq.n_k, True)
        while state != EMPTY and tile < end and not stopped(args):
            k0 = tile * block_k
            n = min(block_k, seq.n_k - k0)
            k = load_k(args, seq, b, head_kv, k0, n, scratch + at.k, scratch + at.k_pages)  # load_tile
            v_t = load_v_t(args, seq, b, head_kv, k0, n, scratch + at.v, scratch + at.v_pages)
            if JVP:
                dk, dv_t = k, v_t
                if has_dk:
                    dk = load_tile(args, kv_rows(args, DK, seq, b, head_kv, k0, n, d), dk_at)
                if has_dv:
                    dv_t = load_tile_t(args, kv_rows(args, DV, seq, b, head_kv, k0, n, dv), dv_at)
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
                all_of_o_t = o_t
                if JVP:
                    dq_t = accum_tile(tangents + p * q_bytes, d, width, panel_bytes)
                    all_of_o_t = accum_tile(scratch + at.o_acc + p * o_bytes, o_rows, width, panel_bytes)
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
                        place, extra = (start - begin) * panel_bytes, scratch + at.transposed
                        s_t = accum_tile(scratch + at.scores + place, stop - start, width, panel_bytes)
                        scores(args, k[start - k0 : stop - k0], q_t, s_t)
                        if JVP:
                            ds_t = accum_tile(ds_at + place, stop - start, width, panel_bytes)
                            keys = slice(start - k0, stop - k0)
                            score_tangents(args, k[keys], dk[keys], q_t, dq_t, ds_t)
                            extra += place
                        modify(args, seq, run, s_t[:, :columns], extra, b, h, row0, start)
                        start = stop
                    if start > begin:
                        p_t = accum_tile(scratch + at.scores, start - begin, width, panel_bytes)
                        if with_stats:
                            call_online_softmax_stats(
                                args[ONLINE_SOFTMAX_STATS], p_t, m[stats], l[stats], o_t, tops[stats], sums[stats]
                            )
                        else:
                            online_softmax(args, p_t, m[stats], l[stats], all_of_o_t)
                        if JVP:
                            ds_t, slopes = accum_tile(ds_at, start - begin, width, panel_bytes), scratch + at.transposed
                            if moves:
                                visit_ds(args, seq, p_t[:, :columns], ds_t[:, :columns], slopes, b, h, row0, begin)
                                weigh(p_t, ds_t, all_of_o_t[2 * dv])
                        if args[DROPOUT] != 0:
                            dropout(args, p_t[:, :columns], True, b, h, row0, begin)
                        v_run = v_t[:, (begin - k0) // K_PACK : (start - k0 + K_PACK - 1) // K_PACK]
                        accumulate(args, v_run, p_t, start - begin, o_t, nonfinite)
                        if JVP:
                            do_t, dv_run = all_of_o_t[dv : 2 * dv], dv_t[:, begin - k0 : start - k0]
                            if moves:
                                if args[DROPOUT] != 0:
                                    dropout(args, ds_t[:, :columns], True, b, h, row0, begin)
                                accumulate(args, v_run, ds_t, start - begin, do_t, nonfinite)
                            if has_dv:
                                accumulate(args, dv_run, p_t, start - begin, do_t, nonfinite)
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
        if JVP:
            do_t = accum_tile(scratch + at.o_acc + p * o_bytes + dv * panel_bytes, dv + 1, panel, panel_bytes)
            finite &= epilogue_of_tangents(args, seq, b, h, row0, columns, o_t, do_t[:dv], do_t[dv], l[stats], check)
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

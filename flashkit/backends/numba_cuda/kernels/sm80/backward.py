# parts: common/tiles common/fragment sm80/bwd_layout sm80/mma common/softmax
# parts: sm80/bwd_mma sm80/bwd_softmax sm80/bwd_epilogue sm80/bwd_postprocess
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on tensor cores by mma.sync, from Ampere on.
# P is recomputed from the log-sum-exp; five matrix products.
#
# A CTA of WARPS warps takes BLOCK_K keys of one key/value head and loops over the query tiles that see them, of all
# query heads that share it.
#
#     K, V           [BLOCK_K][..]       shared memory
#     Q, dO          [2][BLOCK_Q][..]    shared memory, double-buffered, with bwd_lse and delta of their rows
#     s, dp          [32][KEYS_S]        registers of a warp
#     P, dS          [BLOCK_Q][BLOCK_K]  shared memory, between these products and the next
#     dk, dv         [32][SUMS]          registers of a warp
#     dq             [32][SUMS_Q]        registers of a warp, then added to dq_accum in global memory
#
# The PADDING_LSE of bwd_preprocess makes P of rows past the last 0. Measurements: docs/notes/ampere.md.


# --- which key tile ---------------------------------------------------------------------------------------------------
#
# p.heads_per_l2_group heads are worked on at the same time: the L2 cache holds their operands and dq_accum. The first
# key tiles come first: under a causal mask they take longest.


@device
def key_tile_of_cta(p):
    """Batch entry, key/value head and key tile of this CTA."""
    heads = u32(u32(p.heads) // u32(GQA_GROUP))
    tile, head = tile_coord(block(), u32(num_k_tiles(p, BLOCK_K)), u32(heads * u32(p.batch)), u32(p.heads_per_l2_group))
    return i32(head // heads), i32(head % heads), i32(tile)


# --- the kernel -------------------------------------------------------------------------------------------------------


@device
def load_rows_async(stage, p, b, h, row0, wanted):
    """bwd_lse, then delta, of a query tile by cp.async: bwd_preprocess pads them to whole tiles."""
    i = i32(thread())
    rows = p.bwd_lse if i < BLOCK_Q // 4 else p.delta
    source = number_address(rows, I(b), I(h), I(row0)) + VEC_BYTES * (i & (BLOCK_Q // 4 - 1))
    cp_async_if(stage + AT_STAGE_ROWS + VEC_BYTES * i, source, 0, 1, 1 if wanted and i < BLOCK_Q // 2 else 0)


@device
def load_qdo(p, stage, b, h, tile):
    """Q, dO, bwd_lse and delta of a query tile to a stage."""
    row0, n_q = i32(tile) * BLOCK_Q, i32(p.n_q)
    load_tile(stage, p.q, b, h, row0, n_q, BLOCK_Q, HEAD_DIM, PADDED_QK)
    load_tile(stage + AT_STAGE_DOUT, p.dout, b, h, row0, n_q, BLOCK_Q, HEAD_DIM_V, PADDED_V)
    load_rows_async(stage, p, b, h, row0, True)


@kernel(THREADS, 1)
def sm80_backward(p):
    base = shared_address()
    if thread() == 0:  # each tile loads it; else each would convert it from float64
        store_word(base + AT_SCALE, as_int(softmax_scale_log2(p)))
    b, head, tile_k = key_tile_of_cta(p)
    warp, lane = i32(thread() // 32), i32(thread() % 32)
    n_k, q_position = i32(seq_info(p, I(b)).n_k), seq_info(p, I(b)).q_position
    k0 = tile_k * BLOCK_K
    rows, keys = warp // ACROSS_S * 32, warp % ACROSS_S * KEYS_S  # of S, that this warp computes
    dk, dv = filled(ZERO, SUMS), filled(ZERO, SUMS_V)
    load_tile(base, p.k, b, head, k0, n_k, BLOCK_K, HEAD_DIM, PADDED_QK)
    load_tile(base + AT_V, p.v, b, head, k0, n_k, BLOCK_K, HEAD_DIM_V, PADDED_V)

    h, stage = I(head) * GQA_GROUP, I(0)
    last = h + GQA_GROUP if k0 < n_k else h
    while h < last:
        n_q = p.n_q
        walk = walk_queries(p, I(b), h, I(k0), min(I(k0) + BLOCK_K, I(n_k)), n_q)
        if walk.state != EMPTY:
            load_qdo(p, base + AT_QDO + stage * STAGE_BYTES, b, h, walk.tile)
            cp_async_commit()
        while walk.state != EMPTY:
            cp_async_wait(0)
            threads_sync()  # all threads see the tile and have finished the previous one
            qdo, free = base + AT_QDO + stage * STAGE_BYTES, base + AT_QDO + (1 - stage) * STAGE_BYTES
            ahead = next_tile(p, walk)
            more = ahead.state != EMPTY
            row0 = i32(ahead.tile) * BLOCK_Q
            copy_q = copy_of(free, p.q, b, h, row0, i32(n_q), more)
            copy_dout = copy_of(free + AT_STAGE_DOUT, p.dout, b, h, row0, i32(n_q), more)
            scale_log2 = load_f32(base + AT_SCALE)
            own_rows = listed(row_values, ROWS, (qdo + AT_STAGE_ROWS, rows))
            full = walk.state == FULL and k0 + BLOCK_K <= n_k
            # Opaque, else values that depend on the first key occupy registers in all tiles.
            pairs = TilePairs(
                p.values, p.softmax_scale, p.seed, p.dropout_first, p.dropout_head, p.dropout_threshold,
                p.dropout_scale, I(b), h, i32(n_q), n_k, q_position,
                i32(walk.tile) * BLOCK_Q, opaque(k0 + keys + i32(thread() % 4 * 2)), walk.state,
            )  # fmt: skip
            staged = base + AT_P + (rows + lane // 4) * PITCH + 2 * keys + lane % 4 * 4
            s = scores(qdo, base, rows, keys, copy_q)
            p_slope, dropped = recompute_p(staged, full, s, own_rows, pairs, scale_log2)
            dp = dp_scores(qdo, base + AT_V, rows, keys, copy_dout)
            load_rows_async(free, p, b, h, row0, more)
            cp_async_commit()
            compute_ds(staged + (AT_DS - AT_P), full, dp, p_slope, dropped, own_rows)
            threads_sync()  # all threads see P and dS
            dq_accum = dq_accum_at(p, b, h, walk.tile, warp)
            share = warp % ACROSS_KV
            first, first_v = share * (SUMS // 8), share * (SUMS_V // 8)
            if not DQ_FIRST:
                dv = gemm_tn(dv, base + AT_P, qdo + AT_STAGE_DOUT, first_v)
            dq = compute_dq(base + AT_DS, base)
            if DQ_FIRST:
                dv = gemm_tn_adding(dv, base + AT_P, qdo + AT_STAGE_DOUT, first_v, dq, dq_accum)
                dk = gemm_tn(dk, base + AT_DS, qdo, first)
            else:
                dk = gemm_tn_adding(dk, base + AT_DS, qdo, first, dq, dq_accum)
            stage, walk = 1 - stage, ahead
        h += 1

    cp_async_commit()
    cp_async_wait(0)  # for K and V, if no query tile has
    threads_sync()
    epilogue(p, DK, b, head, tile_k, n_k, dk, np.float32(p.softmax_scale), base)
    epilogue(p, DV, b, head, tile_k, n_k, dv, np.float32(1), base + AT_V)

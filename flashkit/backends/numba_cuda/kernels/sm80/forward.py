# parts: common/tiles common/fragment common/tile_order sm80/layout sm80/load sm80/mma common/softmax common/epilogue
# Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on tensor cores by mma.sync, from Ampere on.
#
# A block of four warps takes BLOCK_Q rows of a head and goes over the tiles of keys that they see.
#
#     Q, then O   [BLOCK_Q][..]           shared memory
#     K, V        [STAGES][BLOCK_K][..]   shared memory: one tile is multiplied while the next one comes; with a single
#                                         stage its values come while scores are multiplied, and the next keys from then
#     s, weights  [WARP_ROWS][BLOCK_K]    registers of a warp, which has 16 rows, or two tiles of 16 for the same keys
#     output      [WARP_ROWS][HEAD_DIM_V] registers of a warp, unscaled
#     m, l        [WARP_ROWS]             a row's reference, in base 2, and its sum of weights: registers


@device
def load_keys(p, base, item, n_k, tile, stage):
    at = base + BYTES_Q + stage * BYTES_STAGE
    load_tile(at, p.k, item[0], item[1] // GQA_GROUP, tile * BLOCK_K, n_k, BLOCK_K, HEAD_DIM, COLUMNS_QK)


@device
def load_values(p, base, item, n_k, tile, stage):
    at = base + BYTES_Q + stage * BYTES_STAGE + BYTES_K
    load_tile(at, p.v, item[0], item[1] // GQA_GROUP, tile * BLOCK_K, n_k, BLOCK_K, HEAD_DIM_V, COLUMNS)


@device
def scores(q, k):
    """s = Q K^T for the rows of this warp."""
    return repeat(sixteen_dims, STEPS, filled(ZERO, SCORES), (q, CHUNK_Q, k, CHUNK_K))


@device
def is_one(j, so_far, factor):
    return so_far and factor[j] == ONE


@device
def finish(p, base, item, m, l, output):
    """Divide by the sums; log-sum-exp and output to memory, the output by way of shared memory, in 16 bytes."""
    m, l = finite_sums(p, item, m, l)
    output, factor, odd = normalize_rows(p, item, m, l, output)
    lane, row0 = thread() % 32, thread() // 32 * WARP_ROWS
    staged = base + row0 * CHUNK_ROW
    lanes_sync()
    groups(store_piece, LEFT, operand(output), (staged, CHUNK_Q, 0))
    lanes_sync()
    if MAY_HIDE:  # a value that is not finite may have met a weight of 0
        if any_lane(odd):
            accumulate_nonfinite(p, item, m, factor, base, BLOCK_Q)
            lanes_sync()
    target = row_address(p.out, I(item[0]), I(item[1]), I(item[2] + row0))
    for i in range(lane, WARP_ROWS * UNITS_V, 32):
        row, unit = i // UNITS_V, i % UNITS_V
        if item[2] + row0 + row < p.n_q:
            four = load_vec(staged + unit // 8 * CHUNK_Q + swizzled(row, unit % 8))
            store_vec(target + row * p.out.token * ITEM + VEC_BYTES * unit, four)


@kernel(THREADS, BLOCKS_PER_SM)
def sm80_forward(p):
    base, item = shared_address(), work_tile(p, block())
    n_k, unit = i32(keys_of(p, I(item[0]))), softmax_scale_log2(p)
    q = base + thread() // 32 * WARP_ROWS * CHUNK_ROW
    load_tile(base, p.q, item[0], item[1], item[2], i32(p.n_q), BLOCK_Q, HEAD_DIM, COLUMNS_QK)
    end = min(I(item[2]) + BLOCK_Q, p.n_q)
    walk = walk_keys(p, I(item[0]), I(item[1]), I(item[2]), end, I(n_k))
    if walk.state != EMPTY:
        load_keys(p, base, item, n_k, i32(walk.tile), 0)
        if STAGES > 1:
            load_values(p, base, item, n_k, i32(walk.tile), 0)
    copies_end()
    if walk.state == EMPTY:  # finish() uses the memory that Q is on its way to
        copies_wait(0)
        threads_sync()

    output, m, l = filled(ZERO, SUMS), NO_REFERENCE, ZERO_ROWS
    begun, stage = False, I(0)
    while walk.state != EMPTY:
        copies_wait(0)
        threads_sync()  # the tile is there for all, and all are done with the one before
        ahead = next_tile(p, walk)
        if STAGES == 1:
            load_values(p, base, item, n_k, i32(walk.tile), 0)
        elif ahead.state != EMPTY:
            load_keys(p, base, item, n_k, i32(ahead.tile), 1 - stage)
            load_values(p, base, item, n_k, i32(ahead.tile), 1 - stage)
        copies_end()
        k0, k = walk.tile * BLOCK_K, base + BYTES_Q + stage * BYTES_STAGE
        full = walk.state == FULL and k0 + BLOCK_K <= n_k
        s, near, total = scores(q, k), False, ZERO_ROWS
        if STAGES == 1:
            copies_wait(0)
            threads_sync()  # the values are there for all, and all are done with the keys
            if ahead.state != EMPTY:
                load_keys(p, base, item, n_k, i32(ahead.tile), 0)
            copies_end()
        usual = begun and full and not HAS_SCORE and STAGES > 1
        if usual:
            s, total, near = speculative_softmax(s, m, unit)
            if not near:  # the optimism was misplaced, and has cost the scores
                s = scores(q, k)
        if not near:
            s = modify_tile(p, item, full, s, i32(k0))
            s, m, total, rescale = online_softmax(s, m, unit)
            l = both(times, l, rescale)
            if not all_lanes(repeat(is_one, ROWS, True, rescale)):
                output = rows_scaled(output, rescale)
            begun = all_lanes(repeat(has_reference, ROWS, True, m))
        l = both(add, l, total)
        if HAS_DROPOUT:
            s = dropout_tile(p, item, s, i32(k0))
        output = accumulate(output, operand(s), k + BYTES_K, CHUNK_K)
        stage, walk = 1 - stage if STAGES > 1 else stage, ahead
    finish(p, base, item, m, l, output)

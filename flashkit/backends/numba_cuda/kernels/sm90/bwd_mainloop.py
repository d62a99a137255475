# parts: sm90/bwd_softmax sm90/bwd_fragments sm90/bwd_epilogue
# Consumers of Hopper's backward pass. Each warp group owns 64 of the work tile's 128 keys. All products are transposed:
# keys are the rows.
#
#     S, P         [64][BLOCK_Q]   registers
#     dP, dS       [64][BLOCK_Q]   registers; dS also in shared memory, two query tiles, for dQ
#     dK, dV       [64][..]        registers
#     dQ           a part          registers, then shared memory, from where it is added to dq_accum
#
# A step, for query tile n:
#
#     S = K Q^T            issued in the step before
#     dP = V dO^T          issued; S becomes P meanwhile
#     dV += P dO           issued; dP becomes dS meanwhile, which goes to shared memory
#     dQ^T = K^T dS        of tile n - 1, so that no warp group waits for the other's dS
#     dK += dS Q           (up to 64 columns before dQ) and S of tile n + 1 issued; dQ of tile n - 1 leaves meanwhile

DK_FIRST = CHUNKS == 1

wgmma_s = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM, BLOCK_K), along_rows(HEAD_DIM, BLOCK_Q), fresh=True)
wgmma_dp = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM_V, BLOCK_K), along_rows(HEAD_DIM_V, BLOCK_Q), fresh=True)
wgmma_dv = wgmma_registers(STORAGE, PADDED_DIM_V, along_columns(BLOCK_Q), trans_b=True)
wgmma_dk = wgmma_registers(STORAGE, PADDED_DIM, along_columns(BLOCK_Q), trans_b=True)
wgmma_dq = wgmma(
    STORAGE, DQ_PART_ROWS, along_columns(BLOCK_K), along_rows(BLOCK_K, BLOCK_Q), trans_a=True, fresh=True
)  # fmt: skip

# Where a warp group's part of dQ begins in K and in dS.
K_STRIDE, DS_STRIDE = (BLOCK_K * CHUNK_ROW, 0) if DQ_BY_COLUMNS else (0, DQ_PART_ROWS * CHUNK_ROW)


@device
def issue_s(base, k_tile, wg, n):
    """S^T = K Q^T"""
    q_tile = base + AT_Q + stage_of(n, STAGES) * BYTES_Q
    wgmma_fence()
    s = wgmma_s(descriptor(k_tile + wg * 64 * CHUNK_ROW, 16), descriptor(q_tile, 16))
    wgmma_commit()
    return s


@device
def issue_dp(base, wg, dout_tile):
    """dP^T = V dO^T"""
    wgmma_fence()
    dp = wgmma_dp(descriptor(base + AT_V + wg * 64 * CHUNK_ROW, 16), descriptor(dout_tile, 16))
    wgmma_commit()
    return dp


@device
def issue_dv(dv_acc, p_frag, dout_tile, first):
    """dV += P^T dO"""
    wgmma_fence()
    dv_acc = wgmma_dv(dv_acc, p_frag, descriptor(dout_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    wgmma_commit()
    return dv_acc


@device
def issue_dq(base, k_tile, wg, n):
    """dQ^T = K^T dS, the warp group's part."""
    ds = base + AT_DS + stage_of(n, 2) * BYTES_DS
    wgmma_fence()
    dq = wgmma_dq(descriptor(k_tile + wg * K_STRIDE, 16), descriptor(ds + wg * DS_STRIDE, 16))
    wgmma_commit()
    return dq


@device
def issue_dk(base, dk_acc, ds, n, first):
    """dK += dS Q"""
    q_tile = base + AT_Q + stage_of(n, STAGES) * BYTES_Q
    wgmma_fence()
    dk_acc = wgmma_dk(dk_acc, ds, descriptor(q_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    wgmma_commit()
    return dk_acc


# --- dS to shared memory, dQ to memory --------------------------------------------------------------------------------


@device
def store_ds_matrices(i, words, target):
    """16 rows of a warp's keys, transposed."""
    stmatrix_x4_trans(target + 16 * i * CHUNK_ROW, words[0], words[1], words[2], words[3])


@device
def store_ds(base, n, ds, ds_of_lane):
    producer_acquire(base + AT_DS_PIPE, n, 2)
    groups(store_ds_matrices, 4, ds, ds_of_lane + u32(stage_of(n, 2) * BYTES_DS))
    fence_proxy_async()
    lanes_sync()
    mbarrier_arrive_once(full_barrier(base + AT_DS_PIPE, n, 2))


@device
def stage_dq_four(i, four, target):
    store_four(target + 512 * i, four)


@device
def stage_dq(base, n, dq, lane_offset):
    """dQ leaves in two steps: to shared memory at once; from there after the next step's proxy fence."""
    consumer_release(base + AT_DS_PIPE, n, 2)
    bulk_wait_read(0)
    lanes_sync()
    groups(stage_dq_four, 4, dq, base + AT_DQ + lane_offset)


@device
def send_dq(p, base, index, warp):
    """After a proxy fence and lanes_sync()."""
    offset = BYTES_DQ_WARP * warp
    add_bulk_once(dq_accum_at(p, index, offset), base + AT_DQ + offset, BYTES_DQ_WARP)
    bulk_commit()


@device
def add_dq_four(i, four, target):
    red_add_four(target + 512 * i, four)


# --- the main loop ----------------------------------------------------------------------------------------------------


@device
def prologue(p, base, k_tile, number, wg, n):
    """S of a work tile's first query tile, issued."""
    if HAS_LENGTHS:  # 0 * NaN of a key past the length must not show in dQ
        at = read_work_tile(base, number)
        first = max(i32(seq_info(p, I(at[0])).n_k) - at[2], WARPGROUP_KEYS * wg)
        clear_rows(k_tile, first, i32(WARPGROUP_KEYS * (wg + 1)), BLOCK_K, CHUNKS)
    consumer_wait(base + AT_Q_PIPE, n, STAGES)
    s = issue_s(base, k_tile, wg, n)
    consumer_wait(base + AT_V_PIPE, number, 1)
    return s


@device
def mma_step(p, base, k_tile, number, n, first, state, warp_args):
    """A query tile. State: S; dK and dV; the query tiles, as indices among all, whose dQ is in shared memory, and the
    one before n.
    """
    wg, (stats_of_lane, dq_of_lane, ds_of_lane, warp), scale_log2 = warp_args
    s, dk_acc, dv_acc, staged, previous = state
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    lse = stats_of_lane + AT_LSE + stage * BYTES_ROW_STATS
    delta = stats_of_lane + AT_DELTA + dout_stage * BYTES_ROW_STATS
    dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT
    tile_desc, index = uniform(load_word(tile_desc_slot(base, n))), load_word(tile_desc_slot(base, n) + DESC_INDEX)
    last = tile_desc & LAST_TILE != 0
    early_lse = listed(row_stats_of, EARLY_LSE, lse)
    consumer_wait(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    wgmma_wait(0)  # S, and dK of the step before
    s = fence_operand(s)
    dp = issue_dp(base, wg, dout_tile)
    s, p_frag, dropout, unmasked = softmax_p(p, base, n, number, tile_desc, wg, s, early_lse, lse, scale_log2)
    dv_acc = issue_dv(dv_acc, p_frag, dout_tile, first)
    wgmma_wait(1)  # dP
    if last:  # V of the next work tile may be loaded during the epilogue
        consumer_release(base + AT_V_PIPE, number, 1)
    ds = compute_ds(s, fence_operand(dp), unmasked, delta, dropout, np.float32(p.dropout_scale))
    store_ds(base, n, ds, ds_of_lane)
    if staged >= 0:
        send_dq(p, base, staged, warp)
    wgmma_wait(0)  # dV
    p_frag = fence_operand(p_frag)
    if DK_FIRST:
        dk_acc = issue_dk(base, dk_acc, ds, n, first)
    if not first:
        consumer_wait(base + AT_DS_PIPE, n - 1, 2)
    dq = issue_dq(base, k_tile, wg, n + 1)  # of tile n - 1; unconditional, or ptxas serializes it
    if not DK_FIRST:
        dk_acc = issue_dk(base, dk_acc, ds, n, first)
    if not last:
        consumer_wait(base + AT_Q_PIPE, n + 1, STAGES)
    s = issue_s(base, k_tile, wg, n if last else n + 1)  # unconditional as well; unused after the last step
    wgmma_wait(1)  # dQ, dK
    dq, ds = fence_operand(dq), fence_operand(ds)
    consumer_release(base + AT_Q_PIPE, n, STAGES)
    consumer_release(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    if not first:
        stage_dq(base, n - 1, dq, dq_of_lane)
    return (s, dk_acc, dv_acc, previous, index), last


@device
def epilogue(p, base, k_tile, number, n, state, warp_args):
    """The last dQ, then dV and dK."""
    wg, (_, dq_of_lane, _, warp), _ = warp_args
    s, dk_acc, dv_acc, staged, previous = state
    s, dk_acc, dv_acc = fence_operand(s), fence_operand(dk_acc), fence_operand(dv_acc)
    consumer_wait(base + AT_DS_PIPE, n - 1, 2)
    dq = issue_dq(base, k_tile, wg, n - 1)
    fence_proxy_async()
    lanes_sync()
    if staged >= 0:
        send_dq(p, base, staged, warp)
    wgmma_wait(0)
    dq = fence_operand(dq)
    # From registers, while the tile before leaves through shared memory.
    consumer_release(base + AT_DS_PIPE, n - 1, 2)
    groups(add_dq_four, 4, dq, dq_accum_at(p, previous, dq_of_lane))
    at = read_work_tile(base, number)
    consumer_release(base + AT_K_PIPE, number, KEY_BUFFERS)
    lane, buffer = opaque(thread() % 32), base + AT_DQ + BYTES_DQ_WARP * warp
    key = i32(at[2] + 16 * warp)
    store_dv(p, map_address("map_dv"), at, key, lane, buffer, dv_acc, np.float32(1))
    store_dk(p, map_address("map_dk"), at, key, lane, buffer, dk_acc, np.float32(p.softmax_scale))
    return dk_acc, dv_acc


@device
def consumer(p, base, wg):
    # Kept in a uniform register, or it is recomputed in float64.
    scale_log2 = as_float(uniform(as_int(np.float32(p.softmax_scale * 1.4426950408889634))))
    # Made once: reading the thread's index again would wait for all stores to shared memory before.
    lane, warp = opaque(thread() % 32), i32(uniform(thread() // 32) - 4)
    # Where a lane's row statistics are, its part of a tile of dQ, and its matrices of dS; its warp.
    places = (
        u32(opaque(base + lane_stats())),
        u32(BYTES_DQ_WARP * warp + 16 * lane),
        u32(opaque(base + AT_DS + wg * BLOCK_Q * CHUNK_ROW
                 + swizzled(lane % 8 + lane // 16 * 8, warp % 4 * 2 + lane // 8 % 2))),
        warp,
    )  # fmt: skip
    warp_args = wg, places, scale_log2
    dk_acc, dv_acc = filled(ZERO, DK_REGS), filled(ZERO, DV_REGS)  # which the first step of a work tile overwrites
    n, number = u32(0), u32(0)  # query tiles and work tiles so far
    while True:
        consumer_wait(base + AT_K_PIPE, number, KEY_BUFFERS)
        if uniform(load_word(work_tile_slot(base, number))) == END:
            break
        k_tile = base + AT_K + stage_of(number, KEY_BUFFERS) * BYTES_K
        s = prologue(p, base, k_tile, number, wg, n)
        state, first, last = (s, dk_acc, dv_acc, i32(-1), i32(-1)), YES, NO
        while not last:
            state, last = mma_step(p, base, k_tile, number, n, first, state, warp_args)
            first, n = NO, u32(n + 1)
        wgmma_wait(0)
        dk_acc, dv_acc = epilogue(p, base, k_tile, number, n, state, warp_args)
        number = u32(number + 1)
    bulk_wait()

# parts: sm90/backward
# Consumers of Hopper's backward pass where dK and dV of 64 keys do not fit the registers of a warp group. A cluster of
# two CTAs shares a work tile, 64 keys each, and the two consumers of a CTA differ in role. All products are transposed:
# keys are the rows.
#
#     S, P, dP, dS  [64][64]   registers of the dS consumer; dS also in shared memory of both CTAs
#     dV            [64][..]   registers of the dS consumer
#     dK            [64][..]   registers of the dK/dQ consumer
#     dQ^T          half the columns, of both CTAs' keys: registers of the dK/dQ consumer
#
# A single CTA would be limited by its traffic to the L2 cache, most of which is dQ in float32. So the CTAs exchange dS
# in 16 bits and each adds half of the columns, once for all 128 keys.
#
# A step, for query tile n:
#
#     dS consumer                                dK/dQ consumer
#     S = K Q^T issued in the step before        dK += dS Q
#     dP = V dO^T; S becomes P meanwhile         dQ^T = K^T dS of the CTA's keys
#     dV += P dO; dP becomes dS meanwhile,       the peer's dS is awaited
#         which goes to both CTAs                dQ^T += K^T dS of the peer's keys
#     S of the next tile                         dQ leaves

BYTES_DS_WARP = BYTES_DS // ROLE_WARPS  # dS of a warp's 16 keys, which it sends to the peer
DQ_CHUNK_REGS = BLOCK_Q // 2  # registers of a lane for 64 columns of dQ
DQ_REGS = DQ_CHUNKS * DQ_CHUNK_REGS
DS_CONSUMER_BARRIER, DK_DQ_CONSUMER_BARRIER = 1, 2

store_dv = make_store_dkv(PADDED_DIM_V, 0, CHUNKS_V, CTA_KEYS * CHUNK_ROW)
store_dk = make_store_dkv(PADDED_DIM, 0, DQ_CHUNKS, CTA_KEYS * CHUNK_ROW)

wgmma_dk = wgmma(STORAGE, PADDED_DIM, along_rows(BLOCK_Q, CTA_KEYS), along_columns(BLOCK_Q), trans_b=True)
wgmma_dq, wgmma_dq_zero_init = (
    wgmma(
        STORAGE, BLOCK_Q, along_columns(CTA_KEYS), along_columns(CTA_KEYS), trans_a=True, trans_b=True, fresh=fresh
    ) for fresh in (False, True)
)  # fmt: skip


# --- the dS consumer --------------------------------------------------------------------------------------------------


@device
def store_ds_matrices(i, words, ds_of_lane):
    """16 columns of a warp's keys."""
    stmatrix_x4(u32(ds_of_lane ^ u32(2 * VEC_BYTES * i)), words[0], words[1], words[2], words[3])


@device
def store_ds(base, n, ds, places):
    """A warp's dS to shared memory, and from there to the peer's."""
    ds_of_warp, ds_of_lane, peer_ds, peer_full = places
    producer_acquire(base + AT_DS_PIPE, n, 1)
    producer_acquire(base + AT_DSMEM_PIPE, n, 1)
    groups(store_ds_matrices, 4, ds, ds_of_lane)
    fence_proxy_async()
    lanes_sync()
    dsmem_copy(peer_ds, ds_of_warp, BYTES_DS_WARP, peer_full)
    mbarrier_arrive_once(base + AT_DS_PIPE)


@device
def ds_prologue(base, k_tile, number, n, dv_acc, warp_args):
    consumer_wait(base + AT_Q_PIPE, n, STAGES)
    s = issue_s(base, k_tile, 0, n)
    consumer_wait(base + AT_V_PIPE, number, 1)
    return s, dv_acc


@device
def ds_step(p, base, k_tile, number, keys_finite, step, state, warp_args):
    n, first = step
    _, rank, _, stats_of_lane, places, scale_log2 = warp_args
    s, dv_acc = state
    stage, dout_stage = stage_of(n, STAGES), stage_of(n, DOUT_STAGES)
    lse = stats_of_lane + AT_LSE + stage * BYTES_ROW_STATS
    delta = stats_of_lane + AT_DELTA + dout_stage * BYTES_ROW_STATS
    dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT
    tile_desc = uniform(load_word(tile_desc_slot(base, n)))
    last = tile_desc & LAST_TILE != 0
    early_lse = listed(row_stats_of, EARLY_LSE, lse)
    consumer_wait(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    wgmma_wait(0)  # S
    s = fence_operand(s)
    dp = issue_dp(base, 0, dout_tile)
    s, p_frag, dropout, unmasked = softmax_p(
        p, base, n, number, tile_desc, rank, keys_finite, s, early_lse, lse, scale_log2
    )  # fmt: skip
    dv_acc = issue_dv(dv_acc, p_frag, dout_tile, first)
    wgmma_wait(1)  # dP
    ds = compute_ds(p, s, fence_operand(dp), unmasked, delta, dropout, (base, n, number, rank))
    store_ds(base, n, ds, places)
    consumer_release(base + AT_Q_PIPE, n, STAGES)
    if not last:
        consumer_wait(base + AT_Q_PIPE, n + 1, STAGES)
    # Unconditional, or ptxas serializes it; unused after the last step.
    s = issue_s(base, k_tile, 0, n if last else n + 1)
    wgmma_wait(1)  # dV
    p_frag = fence_operand(p_frag)
    consumer_release(base + AT_DOUT_PIPE, n, DOUT_STAGES)
    return (s, dv_acc), last


@device
def ds_epilogue(p, base, k_tile, number, n, state, warp_args):
    _, rank, warp, _, _, _ = warp_args
    s, dv_acc = state
    s, dv_acc = fence_operand(s), fence_operand(dv_acc)
    at = read_work_tile(base, number)
    consumer_release(base + AT_K_PIPE, number, KEY_BUFFERS)
    named_barrier_sync(DS_CONSUMER_BARRIER, 128)  # no warp reads V any more: dV leaves through its place
    lane, buffer = opaque(thread() % 32), base + AT_V + BYTES_PIECE * warp
    key = i32(at[2] + CTA_KEYS * rank + 16 * warp)
    store_dv(map_address("map_dv"), at, key, lane, buffer, dv_acc, np.float32(1))
    bulk_wait_read(0)
    lanes_sync()
    consumer_release(base + AT_V_PIPE, number, 1)
    return dv_acc


@device
def ds_consumer(p, base, rank, warp, lane):
    scale_log2 = scale_log2_of(p)
    # Where a lane's row statistics are; a warp's dS, a lane's matrices of it, its place in the peer CTA, the barrier
    # there.
    stats_of_lane, ds_of_warp = u32(opaque(base + lane_stats())), u32(base + AT_DS + warp * BYTES_DS_WARP)
    ds_of_lane = u32(opaque(ds_of_warp + swizzled(lane % 16, lane // 16)))
    peer_ds, peer_full = mapa(u32(ds_of_warp + BYTES_DS), 1 - rank), mapa(u32(base + AT_DSMEM_PIPE), 1 - rank)
    warp_args = 0, rank, warp, stats_of_lane, (ds_of_warp, ds_of_lane, peer_ds, peer_full), scale_log2
    consume_work_tiles(p, base, filled(ZERO, DV_REGS), ds_prologue, ds_step, ds_epilogue, warp_args)


# --- the dK/dQ consumer -----------------------------------------------------------------------------------------------


@device
def dq_chunk_zero_init(c, _, args):
    k_tile, ds = args
    return wgmma_dq_zero_init(descriptor(k_tile + c * CTA_KEYS * CHUNK_ROW, 16), descriptor(ds, 16))


@device
def dq_chunk(c, dq_acc, args):
    k_tile, ds = args
    return wgmma_dq(dq_acc, descriptor(k_tile + c * CTA_KEYS * CHUNK_ROW, 16), descriptor(ds, 16), 1)


@device
def issue_dq(chunk, dq_acc, k_tile, ds):
    """dQ^T = K^T dS of a CTA's keys, or += that; 64 columns at a time, each by chunk()."""
    wgmma_fence()
    dq_acc = groups(chunk, DQ_CHUNK_REGS, dq_acc, (k_tile, ds))
    wgmma_commit()
    return dq_acc


@device
def add_dq_chunk(c, dq_acc, args):
    target, first = args
    if CHUNKS % DQ_CHUNKS == 0 or first + c < CHUNKS:
        groups(add_dq_four, 4, dq_acc, target + c * BYTES_DQ_PART)


@device
def dk_dq_prologue(base, k_tile, number, n, dk_acc, warp_args):
    return dk_acc, read_work_tile(base, number)


@device
def dk_dq_step(p, base, k_tile, number, keys_finite, step, state, warp_args):
    n, first = step
    _, rank, warp, dq_of_lane, peer_empty = warp_args
    dk_acc, at = state
    q_tile, own_ds = base + AT_Q + stage_of(n, STAGES) * BYTES_Q, base + AT_DS
    consumer_wait(base + AT_Q_PIPE, n, STAGES)
    tile_desc, index = uniform(load_word(tile_desc_slot(base, n))), load_word(tile_desc_slot(base, n) + DESC_INDEX)
    last = tile_desc & LAST_TILE != 0
    consumer_wait(base + AT_DS_PIPE, n, 1)
    wgmma_fence()
    dk_acc = wgmma_dk(dk_acc, descriptor(own_ds, 16), descriptor(q_tile, BLOCK_Q * CHUNK_ROW), 0 if first else 1)
    wgmma_commit()
    own_k_tile = k_tile + DQ_CHUNKS * CTA_KEYS * CHUNK_ROW * rank
    dq_acc = issue_dq(dq_chunk_zero_init, filled(ZERO, DQ_REGS), own_k_tile, own_ds)
    wgmma_wait(1)  # dK
    consumer_release(base + AT_Q_PIPE, n, STAGES)
    if first:
        consumer_wait(base + AT_PEER_K_PIPE, number, 1)
    consumer_wait(base + AT_DSMEM_PIPE, n, 1)
    dq_acc = issue_dq(dq_chunk, dq_acc, base + AT_PEER_K, own_ds + BYTES_DS)
    wgmma_wait(1)  # dQ of the CTA's own keys
    consumer_release(base + AT_DS_PIPE, n, 1)
    wgmma_wait(0)
    dq_acc = fence_operand(dq_acc)
    if warp == 0:
        arrive_and_expect_once(base + AT_DSMEM_PIPE, BYTES_DS)  # of the next query tile
    dsmem_arrive(peer_empty)
    if last:
        consumer_release(base + AT_K_PIPE, number, KEY_BUFFERS)
    chunk = DQ_CHUNKS * rank
    groups(add_dq_chunk, DQ_CHUNK_REGS, dq_acc, (dq_accum_at(p, index, chunk * BYTES_DQ_PART + dq_of_lane), chunk))
    return (dk_acc, at), last


@device
def dk_dq_epilogue(p, base, k_tile, number, n, state, warp_args):
    _, rank, warp, _, _ = warp_args
    dk_acc, at = state
    dk_acc = fence_operand(dk_acc)
    # No warp reads the peer's keys any more: dK leaves through their place.
    named_barrier_sync(DK_DQ_CONSUMER_BARRIER, 128)
    lane, buffer = opaque(thread() % 32), base + AT_PEER_K + BYTES_PIECE * warp
    key = i32(at[2] + CTA_KEYS * rank + 16 * warp)
    store_dk(map_address("map_dk"), at, key, lane, buffer, dk_acc, np.float32(p.softmax_scale))
    bulk_wait_read(0)
    lanes_sync()
    consumer_release(base + AT_PEER_K_PIPE, number, 1)
    return dk_acc


@device
def dk_dq_consumer(p, base, rank, warp, lane):
    if warp == 0:
        arrive_and_expect_once(base + AT_DSMEM_PIPE, BYTES_DS)
    peer_empty = mapa(u32(base + AT_DSMEM_PIPE + 8), 1 - rank)
    warp_args = 0, rank, warp, u32(BYTES_DQ_WARP * warp + 16 * lane), peer_empty
    consume_work_tiles(p, base, filled(ZERO, DK_REGS), dk_dq_prologue, dk_dq_step, dk_dq_epilogue, warp_args)


@device
def consumer(p, base, wg):
    rank, warp, lane = uniform(cta_rank()), i32(uniform(thread() // 32 % 4)), opaque(thread() % 32)
    if wg == 0:
        ds_consumer(p, base, rank, warp, lane)
    else:
        dk_dq_consumer(p, base, rank, warp, lane)
    bulk_wait()

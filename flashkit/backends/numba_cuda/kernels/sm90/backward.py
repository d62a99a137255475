# parts: common/tiles common/fragment sm90/pipeline sm90/bwd_layout common/softmax sm90/bwd_scheduler_warp
# parts: sm90/bwd_producer sm90/bwd_softmax sm90/bwd_fragments sm90/bwd_epilogue sm90/bwd_preprocess
# Hopper's backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2; warp specialization as in
# FlashAttention-3, Shah et al. 2024, arXiv 2407.08608): P is recomputed from the log-sum-exp, five products.
#
# Three kernels: bwd_preprocess, sm90_backward, bwd_postprocess. In the second a persistent grid of CTAs takes work
# tiles, BLOCK_K keys of a key/value head each, and loops over the query tiles that see them. bwd_layout has its roles
# and shared memory; the file that has this one as a part, bwd_mainloop or bwd_mainloop_cluster, defines consumer().
#
#     K, V           [CTA_KEYS][..]            shared memory; of BLOCK_K keys those of the CTA
#     Q, dO          [BLOCK_Q][..]             shared memory, pipelines, with the rows' log-sum-exps and deltas
#     S, P, dP, dS   [BLOCK_Q][CTA_KEYS]       registers; dS also in shared memory, for dQ
#     dK, dV         [CTA_KEYS][..]            registers
#     dQ             [BLOCK_Q][..]             registers, then added to dq_accum in global memory


# --- products that both main loops have -------------------------------------------------------------------------------

wgmma_s = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM, CTA_KEYS), along_rows(HEAD_DIM, BLOCK_Q), fresh=True)
wgmma_dp = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM_V, CTA_KEYS), along_rows(HEAD_DIM_V, BLOCK_Q), fresh=True)
wgmma_dv = wgmma_registers(STORAGE, PADDED_DIM_V, along_columns(BLOCK_Q), trans_b=True)


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


# --- consumers --------------------------------------------------------------------------------------------------------


@device
def scale_log2_of(p):
    """Kept in a uniform register, or it is recomputed in float64."""
    return as_float(uniform(as_int(np.float32(p.softmax_scale * 1.4426950408889634))))


@device
def add_dq_four(i, four, target):
    red_add_four(target + 512 * i, four)


@device
def all_keys_finite(base, number, wg):
    """Whether the warp group's keys of a work tile are."""
    if not MAY_HIDE:
        return True
    words = nonfinite_keys_slot(base, number) + 8 * wg
    return uniform(load_word(words) | load_word(words + 4)) == 0


@device
def consume_work_tiles(p, base, acc, prologue, mma_step, epilogue, warp_args):
    """All work tiles of the CTA, by a warp group: a prologue, a step for each query tile, an epilogue. acc:
    accumulators in registers, which each first step overwrites. warp_args: what these three take of the warp; the first
    is its key group.
    """
    n, number = u32(0), u32(0)  # query tiles and work tiles so far
    while True:
        consumer_wait(base + AT_K_PIPE, number, KEY_BUFFERS)
        if uniform(load_word(work_tile_slot(base, number))) == END:
            break
        k_tile = base + AT_K + stage_of(number, KEY_BUFFERS) * BYTES_K
        keys_finite = all_keys_finite(base, number, warp_args[0])
        state, first, last = prologue(base, k_tile, number, n, acc, warp_args), YES, NO
        while not last:
            state, last = mma_step(p, base, k_tile, number, keys_finite, (n, first), state, warp_args)
            first, n = NO, u32(n + 1)
        wgmma_wait(0)
        acc = epilogue(p, base, k_tile, number, n, state, warp_args)
        number = u32(number + 1)


# --- the kernel -------------------------------------------------------------------------------------------------------


@device
def init_barriers(base):
    pipeline_init(base + AT_Q_PIPE, STAGES, 1, MMA_WARPS)
    pipeline_init(base + AT_DOUT_PIPE, DOUT_STAGES, 1, ROLE_WARPS)
    pipeline_init(base + AT_K_PIPE, KEY_BUFFERS, 1, MMA_WARPS)
    pipeline_init(base + AT_V_PIPE, 1, 1, ROLE_WARPS)
    pipeline_init(base + AT_DS_PIPE, DS_STAGES, ROLE_WARPS, ROLE_WARPS)
    pipeline_init(base + AT_PEER_K_PIPE, 1, 1, ROLE_WARPS)
    pipeline_init(base + AT_DSMEM_PIPE, 1, 1, ROLE_WARPS)
    pipeline_init(base + AT_LIST_PIPE, NUM_LISTS, 1, 1)
    mbarrier_init(base + AT_CLAIM, 1)
    mbarrier_init(base + AT_PEER_K_LOADED, 1)
    for i in range(2):
        mbarrier_init(base + AT_CLAIMED + 8 * i, 1)
    for i in range(KEY_BUFFERS):
        mbarrier_init(base + AT_K_LOADED + 8 * i, 1)
    mbarrier_init(base + AT_ROWS_LOADED, 1)
    fence_mbarrier_init()


@kernel(THREADS, 1, maps=("map_q", "map_k", "map_v", "map_dout", "map_dk", "map_dv"), cluster=CLUSTER_SIZE)
def sm90_backward(p):
    base = u32(uniform(shared_address()))
    if thread() == 0:
        init_barriers(base)
    if CLUSTER_SIZE > 1:
        cluster_sync()
    else:
        threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        setmaxnreg_dec(PRODUCER_REGISTERS)
        if warp == 0:
            producer(p, base)
        elif warp == 1:
            scheduler(p, base)
    else:
        setmaxnreg_inc(CONSUMER_REGISTERS)
        consumer(p, base, role - 1)
    if CLUSTER_SIZE > 1:
        cluster_sync()  # the peer's copies to this CTA's shared memory have arrived

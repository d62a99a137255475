# parts: common/tiles common/fragment sm90/pipeline sm90/bwd_layout common/softmax sm90/bwd_producer
# parts: sm90/bwd_mainloop sm90/bwd_preprocess
# Hopper's backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2; warp specialization as in
# FlashAttention-3, Shah et al. 2024, arXiv 2407.08608): P is recomputed from the log-sum-exp, five products.
#
# Three kernels: bwd_preprocess, sm90_backward, bwd_postprocess. In the second a persistent grid of CTAs takes work
# tiles, BLOCK_K keys of a key/value head each, and loops over the query tiles that see them. bwd_layout has its roles
# and shared memory.
#
#     K, V           [BLOCK_K][..]            shared memory
#     Q, dO          [BLOCK_Q][..]            shared memory, pipelines, with the rows' log-sum-exps and deltas
#     S, P, dP, dS   [BLOCK_Q][BLOCK_K]       registers; dS also in shared memory, for dQ
#     dK, dV         [BLOCK_K][..]            registers
#     dQ             [BLOCK_Q][..]            registers, then added to dq_accum in global memory


@device
def init_barriers(base):
    pipeline_init(base + AT_Q_PIPE, STAGES, 1, MMA_WARPS)
    pipeline_init(base + AT_DOUT_PIPE, DOUT_STAGES, 1, MMA_WARPS)
    pipeline_init(base + AT_K_PIPE, KEY_BUFFERS, 1, MMA_WARPS)
    pipeline_init(base + AT_V_PIPE, 1, 1, MMA_WARPS)
    pipeline_init(base + AT_DS_PIPE, 2, MMA_WARPS, MMA_WARPS)
    pipeline_init(base + AT_LIST_PIPE, NUM_LISTS, 1, 1)
    mbarrier_init(base + AT_CLAIM, 1)
    fence_mbarrier_init()


@kernel(THREADS, 1, maps=("map_q", "map_k", "map_v", "map_dout", "map_dk", "map_dv"))
def sm90_backward(p):
    base = u32(uniform(shared_address()))
    if thread() == 0:
        init_barriers(base)
    threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        setmaxnreg_dec(PRODUCER_REGISTERS)
        if warp == 1:
            scheduler(p, base)
        elif warp == 0 and elect_one():
            producer(p, base)
    else:
        setmaxnreg_inc(CONSUMER_REGISTERS)
        consumer(p, base, role - 1)

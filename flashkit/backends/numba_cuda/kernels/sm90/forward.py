# parts: common/tiles common/fragment sm90/pipeline sm90/layout sm90/producer sm90/mainloop
# Forward pass for Hopper (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1; warp specialisation and overlap of
# softmax and products as in FlashAttention-3, Shah et al. 2024, arXiv 2407.08608). docs/numba_hopper.md walks through
# it.
#
# The grid is persistent: one CTA per SM takes work tiles, BLOCK_Q rows of a head, until none is left.
#
#     Q, then O   [Q_BUFFERS][MMA_WARPGROUPS][64][..]   shared memory; O leaves through the buffer that its Q came in
#     K, V        [STAGES][BLOCK_K][..]                 shared memory, two pipelines
#     S, P        [64][BLOCK_K]                         registers of a warp group
#     O           [64][HEAD_DIM_V]                      registers of a warp group, not normalised
#     m, l        [64]                                  registers: row reference in base 2, row sum
#
#     warp group 0     warp 0  producer (sm90/producer)
#                      warp 1  store warp (sm90/epilogue)
#                      warp 2  scheduler warp (sm90/tile_scheduler)
#     warp groups 1 .. MMA_WARPGROUPS  consumers, 64 rows each (sm90/mainloop)


@kernel(THREADS, 1, maps=("map_q", "map_k", "map_v", "map_out"))
def sm90_forward(p):
    base = u32(uniform(shared_address()))
    if thread() == 0:
        pipeline_init(base + AT_Q_PIPE, Q_BUFFERS, 1, 1)
        pipeline_init(base + AT_K_PIPE, STAGES, 1, 4 * MMA_WARPGROUPS)
        pipeline_init(base + AT_V_PIPE, STAGES, 1, 4 * MMA_WARPGROUPS)
        pipeline_init(base + AT_LIST_PIPE, NUM_LISTS, 1, 1)
        mbarrier_init(base + AT_CLAIM, 1)
        for i in range(MMA_WARPGROUPS * Q_BUFFERS):
            mbarrier_init(base + AT_OUT_READY + 8 * i, 4)
        fence_mbarrier_init()
    griddepcontrol_wait()
    threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        setmaxnreg_dec(PRODUCER_REGISTERS)
        if warp == 2:
            scheduler_warp(p, base)
        elif elect_one():
            if warp == 0:
                producer(p, base)
            elif warp == 1:
                store_warp(p, base)
    else:
        setmaxnreg_inc(CONSUMER_REGISTERS)
        consumer(p, base, role - 1)

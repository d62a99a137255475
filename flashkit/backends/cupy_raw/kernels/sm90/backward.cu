// Hopper's backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2; warp specialization as in
// FlashAttention-3, Shah et al. 2024, arXiv 2407.08608): P is recomputed from the log-sum-exp, five products.
// docs/hopper.md walks through it.
//
// Three kernels: bwd_preprocess, sm90_backward, bwd_postprocess. In the second a persistent grid of CTAs takes work
// tiles, BLOCK_K keys of a key/value head each, and loops over the query tiles that see them. bwd_layout.cuh has its
// roles and shared memory.
//
//     K, V         [CTA_KEYS][..]               shared memory; of BLOCK_K keys those of the CTA
//     Q, dO        [BLOCK_Q][..]                shared memory, pipelines, with the rows' log-sum-exps and deltas
//     S, P, dP, dS [BLOCK_Q][CTA_KEYS]          registers; dS also in shared memory, for dQ
//     dK, dV       [CTA_KEYS][..]               registers
//     dQ           [BLOCK_Q][..]                registers, then added to dq_accum in global memory
//
// A warp releases a stage by lane 0's arrival. The other lanes' reads precede it, as the lanes meet in between, when dS
// is in shared memory.
//
// float32 with one product (TF32): Q, K, V and dO come as float16, gradients leave as float32 (bwd_layout.cuh).
//
// CLUSTER_MAINLOOP is defined where CLUSTER_SIZE is 2: only the main loop in use has its wgmma shapes generated.
#include "sm90/bwd_producer.cuh"
#include "sm90/bwd_preprocess.cuh"
#include "sm90/bwd_values.cuh"
#ifdef CLUSTER_MAINLOOP
#include "sm90/bwd_mainloop_cluster.cuh"
#else
#include "sm90/bwd_mainloop.cuh"
#endif

#ifdef DENSE_MAPS
#define MORE_MAPS                                                                                                      \
    , const __grid_constant__ TensorMap bias_map, const __grid_constant__ TensorMap mask_map,                          \
        const __grid_constant__ TensorMap dbias_map
#else
#define MORE_MAPS
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER_SIZE, 1, 1) __launch_bounds__(THREADS, 1)
sm90_backward(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
              const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
              const __grid_constant__ TensorMap out_rows_map,
              const __grid_constant__ TensorMap dout_rows_map MORE_MAPS) {
#ifndef DENSE_MAPS
    const TensorMap &bias_map = q_map, &mask_map = q_map, &dbias_map = q_map;
#endif
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        q_pipe(base).init(1, MMA_WARPS + VALUE_WARPS);
        dout_pipe(base).init(1, ROLE_WARPS);
        if (BYTES_DENSE > 0) dense_pipe(base).init(1, MMA_WARPS);
        k_pipe(base).init(1, MMA_WARPS + VALUE_WARPS);
        v_pipe(base).init(1, ROLE_WARPS);
        ds_pipe(base).init(ROLE_WARPS, ROLE_WARPS + VALUE_WARPS);
        peer_k_pipe(base).init(1, ROLE_WARPS);
        dsmem_pipe(base).init(1, ROLE_WARPS);
        list_pipe(base).init(1, 1);
        mbarrier_init(base + AT_CLAIM, 1), mbarrier_init(base + AT_PEER_K_LOADED, 1);
        for (int i = 0; i < 2; ++i)
            mbarrier_init(dq_written(base, i), ROLE_WARPS), mbarrier_init(dq_granted(base, i), 1);
        for (int i = 0; i < 2; ++i) mbarrier_init(base + AT_CLAIMED + 8 * i, 1);
        for (int i = 0; i < 4; ++i) mbarrier_init(dq_requested(base, i), 1);
        for (int i = 0; i < KEY_BUFFERS; ++i) mbarrier_init(base + AT_K_LOADED + 8 * i, 1);
        mbarrier_init(base + AT_ROWS_LOADED, 1);
        if (FUSED_PREPROCESS) mbarrier_init(base + AT_O_LOADED, 1), mbarrier_init(base + AT_HEAD_READY, 1);
        if (!DETERMINISTIC) mbarrier_init(base + AT_DQ_COMPLETE, ROLE_WARPS);
        fence_mbarrier_init();
    }
    if (FUSED_PREPROCESS && threadIdx.x < BYTES_ZEROS / VEC_BYTES)
        clear_vec(base + AT_ZEROS + threadIdx.x * VEC_BYTES), fence_proxy_async();
    if (CLUSTER_SIZE > 1) cluster_sync();
    else __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        QueryTileList* lists = reinterpret_cast<QueryTileList*>(shared + AT_LISTS);
        const KvSource kv{p, k_map, v_map, base};
        if (warp == 0) producer(p, kv, q_map, dout_map, bias_map, mask_map, base, lists);
        else if (warp == 1) scheduler(p, kv, base, lists);
        else if (FUSED_PREPROCESS) fused_preprocess(p, out_rows_map, dout_rows_map, base, threadIdx.x - 64);
        else if (DETERMINISTIC) dq_semaphore_warp(p, base, warp - 2);
        else if (VALUE_WARPS) value_sums_warp(p, dbias_map, base, warp - 2);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consumer(p, dk_map, dv_map, base, role - 1);
    }
    if (CLUSTER_SIZE > 1) cluster_sync();  // the peer's copies to this CTA's shared memory have arrived
}

// Multi-head latent attention on Hopper (DeepSeek-V2, 2024, arXiv 2405.04434, in its absorbed form): keys of up to 576
// columns, the first of which are the values. All query heads of a group share a key, so K is loaded once, and V not
// at all. docs/hopper.md walks through it.
//
// The grid is persistent: one CTA per SM takes units, one of p.num_splits parts of the keys of 64 rows, until none is
// left. Where a key has more rows than that, the two CTAs of a cluster take neighbouring rows and load each key once. A
// row is one of the PACK_GQA query heads that share a K/V head, at one token. `combine` reduces the splits.
//
//     Q                 [64][HEAD_DIM]             shared memory
//     K, V              [STAGES][64][HEAD_DIM]     shared memory, a pipeline for each part (mla_layout.cuh)
//     S, P              [64][64]                   registers of a warp group; P also in shared memory
//     O                 [64][HEAD_DIM_V]           registers, half of the columns in each consumer warp group
//     m, l              [64]                       registers: row reference in base 2, row sum
//
//     warp group 0      warp 0  producer (mla_producer.cuh)
//                       warp 1  scheduler warp (mla_scheduler.cuh)
//     warp groups 1, 2  consumers (mla_mainloop.cuh)
#include "sm90/mla_layout.cuh"
#include "sm90/mla_producer.cuh"
#include "sm90/mla_mainloop.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER_SIZE, 1, 1) __launch_bounds__(MLA_THREADS, 1)
sm90_mla_forward(KERNEL_PARAMS, const __grid_constant__ TensorMap k_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        for (int part = 0; part < 3; ++part) k_part(base, part).init(1, 4 * CLUSTER_SIZE);
        list_pipe(base).init(1, 1);
        unit_pipe(base).init(1, CONSUMERS / 32);
        mbarrier_init(base + AT_CLAIM, 1);
        claimed_pipe(base).init(1, 1);
        fence_mbarrier_init();
    }
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    __syncthreads();
    if (CLUSTER_SIZE > 1) cluster_sync();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        UnitList* lists = reinterpret_cast<UnitList*>(shared + AT_LISTS);
        if (warp == 1) unit_scheduler_warp(p, base, lists);
        else if (warp == 0 && (IS_PAGED || elect_one())) mla_producer(p, k_map, base, lists);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        if (role == 1) MlaConsumer<0>(p, base).run();
        else MlaConsumer<1>(p, base).run();
    }
    __syncwarp();
    if (CLUSTER_SIZE > 1) cluster_sync();  // the peer's arrivals and copies have come
}

#include "sm80/combine.cuh"
